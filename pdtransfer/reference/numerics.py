"""The arithmetic of the reference model; rule: no row's result may depend on how many rows share a call.

Matrix products run in zero-padded blocks of BLOCK_ROWS rows, since a library picks its order of summation by shape.
On a card so do sums, and batches of products: it takes those apart. Even so equal bits need equal processors: the
library picks its code by instruction set, too.
Elementwise functions run over whole vectors, since the scalar code for a tail rounds differently from the vector code.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 64
VECTOR = 32  # elements: two registers of 16 floats, the widest step of torch's vectorised loops

_EPSILON = 1e-6


def single_threaded() -> None:
    """Makes torch use one thread on the calling thread: with more, the split of the work would depend on its size."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def first_product(device: torch.device) -> None:
    """Has libraries make what they keep of the calling thread: on a card its first product waits 20-70 ms for that."""
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.zeros(BLOCK_ROWS, BLOCK_ROWS, dtype=dtype, device=device)
            torch.mm(square, square)
        torch.cuda.current_stream(device).synchronize()


def block_up(rows: int) -> int:
    """The next multiple of BLOCK_ROWS."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(rows, k) @ (k, n); rows is a multiple of BLOCK_ROWS."""
    rows = x.shape[0]
    assert rows % BLOCK_ROWS == 0, rows
    product = x.new_empty(rows, weight.shape[1])
    for first in range(0, rows, BLOCK_ROWS):
        torch.mm(x[first : first + BLOCK_ROWS], weight, out=product[first : first + BLOCK_ROWS])
    return product


def rms_norm(x: Tensor) -> Tensor:
    """Rows of unit root mean square; (rows, k), rows is a multiple of BLOCK_ROWS."""
    return x * torch.rsqrt(total(x * x) / x.shape[-1] + _EPSILON)


def total(x: Tensor) -> Tensor:
    """(..., k) -> (..., 1); on a card by halves, in one order whatever the shape: k is a power of two there."""
    if not x.is_cuda:
        return x.sum(-1, keepdim=True)
    while (k := x.shape[-1]) > 1:
        assert k % 2 == 0, k
        x = x[..., : k // 2] + x[..., k // 2 :]
    return x


def products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """(n, a, k) @ (n, k, b) to (n, a, b); on a card one by one."""
    if not left.is_cuda:
        torch.bmm(left, right, out=out)
        return
    for at in range(len(left)):
        torch.mm(left[at], right[at], out=out[at])


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), over whole vectors."""
    assert x.is_contiguous(), x.stride()
    assert x.numel() % VECTOR == 0, x.shape
    return torch.nn.functional.silu(x)


def exp2(x: Tensor) -> Tensor:
    """2 ** x, over whole vectors. Unlike exp it does not slow down for -inf."""
    count = x.numel()
    whole = -(-count // VECTOR) * VECTOR
    if whole == count:
        return torch.exp2(x.contiguous())
    padded = x.new_zeros(whole)
    padded[:count] = x.reshape(-1)
    return torch.exp2(padded)[:count].view(x.shape)


class Rope:
    """Rotary embedding at absolute positions below `positions`; `dim` is even, float32 tables from float64 angles."""

    def __init__(self, *, positions: int, dim: int, device: torch.device) -> None:
        frequency = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
        self._cos = angle.cos().to(device=device, dtype=torch.float32)
        self._sin = angle.sin().to(device=device, dtype=torch.float32)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions int64 (rows,), (rows, 1, dim / 2)."""
        return self._cos[positions].unsqueeze(1).to(dtype), self._sin[positions].unsqueeze(1).to(dtype)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (rows, heads, dim), positions int64 (rows,). Product and sum are separate ops: a fused one rounds once."""
        cos, sin = self.at(positions, torch.float32)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

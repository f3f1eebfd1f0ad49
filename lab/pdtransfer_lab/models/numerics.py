"""The arithmetic of the reference model. Rule: a row's result must not depend on how many rows share a call.

Matrix products run in zero-padded blocks of BLOCK_ROWS rows, since a library chooses its order of summation by shape.
On a GPU sums and batched products are split for the same reason. Equal bits still need equal processors, since the
library also chooses its code by instruction set. Elementwise functions run over whole vectors, since the scalar code
for a tail rounds differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 64
VECTOR = 32  # elements: two registers of 16 floats, the widest step of torch's vectorised loops

_EPSILON = 1e-6


def single_threaded() -> None:
    """Limits torch to one thread in the calling thread: otherwise the split of work would depend on its size."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def first_product(device: torch.device) -> None:
    """Makes libraries create their state for the calling thread, for which the first product on a GPU would wait."""
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.zeros(BLOCK_ROWS, BLOCK_ROWS, dtype=dtype, device=device)
            torch.mm(square, square)
        torch.cuda.current_stream(device).synchronize()


def block_up(rows: int) -> int:
    """The next multiple of BLOCK_ROWS."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(rows, k) @ (k, n). rows is a multiple of BLOCK_ROWS."""
    rows = x.shape[0]
    assert rows % BLOCK_ROWS == 0, rows
    product = x.new_empty(rows, weight.shape[1])
    for first in range(0, rows, BLOCK_ROWS):
        torch.mm(x[first : first + BLOCK_ROWS], weight, out=product[first : first + BLOCK_ROWS])
    return product


def rms_norm(x: Tensor) -> Tensor:
    """Scales rows (rows, k) to unit root mean square. rows is a multiple of BLOCK_ROWS."""
    return x * torch.rsqrt(total(x * x) / x.shape[-1] + _EPSILON)


def total(x: Tensor) -> Tensor:
    """(..., k) -> (..., 1). On a GPU it sums by halves, in an order independent of the shape; k is a power of two."""
    if not x.is_cuda:
        return x.sum(-1, keepdim=True)
    while (k := x.shape[-1]) > 1:
        assert k % 2 == 0, k
        x = x[..., : k // 2] + x[..., k // 2 :]
    return x


def products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """(n, a, k) @ (n, k, b) -> (n, a, b); on a GPU one product at a time."""
    if not left.is_cuda:
        torch.bmm(left, right, out=out)
        return
    for index in range(len(left)):
        torch.mm(left[index], right[index], out=out[index])


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), over whole vectors."""
    assert x.is_contiguous(), x.stride()
    assert x.numel() % VECTOR == 0, x.shape
    return torch.nn.functional.silu(x)


def exp2(x: Tensor) -> Tensor:
    """2 ** x, over whole vectors. Unlike exp it is not slower for -inf."""
    count = x.numel()
    whole = -(-count // VECTOR) * VECTOR
    if whole == count:
        return torch.exp2(x.contiguous())
    padded = x.new_zeros(whole)
    padded[:count] = x.reshape(-1)
    return torch.exp2(padded)[:count].view(x.shape)


class Rope:
    """Rotary embedding at absolute positions below `positions`: float32 tables from float64 angles. `dim` is even."""

    def __init__(self, *, positions: int, dim: int, device: torch.device) -> None:
        frequency = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
        self._cos = angle.cos().to(device=device, dtype=torch.float32)
        self._sin = angle.sin().to(device=device, dtype=torch.float32)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions int64 (rows,), (rows, 1, dim / 2)."""
        return self._cos[positions].unsqueeze(1).to(dtype), self._sin[positions].unsqueeze(1).to(dtype)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x (rows, heads, dim) at positions int64 (rows,).

        Products and sums are separate operations, since a fused operation rounds once.
        """
        cos, sin = self.at(positions, torch.float32)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

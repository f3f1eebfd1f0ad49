"""Picks the tokens that a decode step attends to, as in DeepSeek's sparse attention.

Each token has one key for each group of layers, float8 with a scale. A score is the sum over a few small heads of
relu(query . key) times the row's weight of the head, and a row attends to its top-k tokens. Rule: a row's picks, and
the bits of its scores, depend only on its own scores; ties go to the lower position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.kernels.plane_views import steps_of, view_of
from pdtransfer.kernels.stream import upload
from pdtransfer.layout.layout import Layout

from .architecture import DIGEST_BYTES, INDEX_DIM, INDEX_HEADS
from .attention import KEY_BLOCK
from .numerics import Rope, linear, products, rms_norm

_FLOAT8_MAX = 448.0
_SCALE_MIN = 2.0**-64  # of a row of zeros
_BLOCKS_TOGETHER = 32  # their keys, as float32, stay in the CPU's cache
_DIGEST_ROWS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queries:
    """Queries of n rows, (n, INDEX_HEADS, INDEX_DIM), and the heads' weights (n, INDEX_HEADS)."""

    heads: Tensor
    shares: Tensor


class IndexCache:
    """Views of one flat float32 tensor by an index component's layout. `index` converts slots to rows."""

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self._page_size, self._device = layout.page_size, flat.device
        view = flat.view(torch.uint8)
        self._planes = {(plane.kind, plane.layer): view_of(view, plane) for plane in layout.planes}
        self._steps = {plane.kind: steps_of(plane) for plane in layout.planes}
        self.layers = sorted({plane.layer for plane in layout.planes})
        every = torch.arange(256, dtype=torch.uint8)
        self._values = every.view(torch.float8_e4m3fn).to(torch.float32).to(flat.device)

    def index(self, slots: NDArray[np.int64], multiple: int) -> Tensor:
        """Slots int64 (n,) -> int64 (2, n): rows of the keys, rows of the scales; padded with the first slot."""
        pages, rows = np.divmod(np.pad(slots, (0, -len(slots) % multiple), constant_values=slots[0]), self._page_size)
        both = [pages * self._steps[kind][0] + rows * self._steps[kind][1] for kind in ("index", "scale")]
        return upload(torch.as_tensor(np.stack(both)), self._device)

    def write(self, layer: int, index: Tensor, keys: Tensor) -> None:
        """Writes float32 keys (n, INDEX_DIM) to rows (2, n), as float8."""
        scales = (keys.abs().amax(-1, keepdim=True) / _FLOAT8_MAX).clamp_min(_SCALE_MIN)
        small = (keys / scales).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
        self._planes["index", layer].index_copy_(0, index[0], small.view(torch.uint8))
        self._planes["scale", layer].index_copy_(0, index[1], scales.view(torch.uint8))

    def read(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (2, n) -> keys (n, INDEX_DIM) without their scales, scales (n,), both float32."""
        small = torch.index_select(self._planes["index", layer], 0, index[0])
        keys = torch.index_select(self._values, 0, small.view(-1).to(torch.int32)).view(-1, INDEX_DIM)
        scales = torch.index_select(self._planes["scale", layer], 0, index[1])
        return keys, scales.view(torch.float32).view(-1)

    def digest(self, index: Tensor) -> NDArray[np.uint8]:
        """The digest of the rows' bytes by (layer, kind, position), uint8 (DIGEST_BYTES,)."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        for layer in self.layers:
            for place, kind in enumerate(("index", "scale")):
                for first in range(0, index.shape[1], _DIGEST_ROWS):
                    rows = torch.index_select(self._planes[kind, layer], 0, index[place, first : first + _DIGEST_ROWS])
                    digest.update(rows.cpu().numpy().data)
        return np.frombuffer(digest.digest(), np.uint8)


class IndexerMath(Protocol):
    """The arithmetic, without any request's state. Row counts are multiples of numerics.BLOCK_ROWS."""

    def keys(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Tensor:
        """(n, width) -> float32 (n, INDEX_DIM)."""
        ...

    def queries(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Queries:
        """The float32 queries of each row."""
        ...


class Indexer:
    """The IndexerMath whose bits are the same in any batch."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self._rope = Rope(positions=positions, dim=INDEX_DIM, device=device)

    def keys(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Tensor:
        return self._rope(rms_norm(linear(x, layer["index_key"])).unsqueeze(1), positions).squeeze(1)

    def queries(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Queries:
        heads = linear(x, layer["index_query"]).view(len(x), INDEX_HEADS, INDEX_DIM)
        return Queries(heads=self._rope(heads, positions), shares=linear(x, layer["index_share"]))


def scores(queries: Queries, cache: IndexCache, layer: int, indices: Sequence[Tensor], lengths: list[int]) -> Tensor:
    """Scores of each request's first positions, (rows, max(lengths)), with -inf from the request's length on.

    `indices` are each request's cache rows (2, whole key blocks). All blocks' products have the same shape.
    """
    counts = [-(-length // KEY_BLOCK) for length in lengths]
    device = queries.heads.device
    owner = upload(torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)), device)
    rows = torch.cat([index[:, : count * KEY_BLOCK] for index, count in zip(indices, counts, strict=True)], dim=1)
    values = queries.heads.new_empty(len(owner), KEY_BLOCK)
    for first in range(0, len(owner), _BLOCKS_TOGETHER):
        own = owner[first : first + _BLOCKS_TOGETHER]
        keys, scales = cache.read(layer, rows[:, first * KEY_BLOCK : (first + len(own)) * KEY_BLOCK])
        products_of_heads = keys.new_empty(len(own), INDEX_HEADS, KEY_BLOCK)
        products(queries.heads[own], keys.view(len(own), KEY_BLOCK, INDEX_DIM).transpose(1, 2), out=products_of_heads)
        products_of_heads = products_of_heads.relu_() * queries.shares[own].unsqueeze(-1)
        summed = products_of_heads[:, 0]
        for head in range(1, INDEX_HEADS):
            summed = summed + products_of_heads[:, head]
        values[first : first + len(own)] = summed * scales.view(len(own), KEY_BLOCK)
    whole = values.new_full((len(counts), max(counts) * KEY_BLOCK), -torch.inf)
    first = 0
    for row, count in enumerate(counts):
        whole[row, : count * KEY_BLOCK] = values[first : first + count].view(-1)
        first += count
    whole = whole[:, : max(lengths)]
    places, ends = torch.arange(max(lengths), device=device), upload(torch.tensor(lengths), device)
    return whole.masked_fill_(places >= ends.unsqueeze(1), -torch.inf)


def pick_top(values: Tensor, top: int) -> Tensor:
    """Scores (rows, n), with -inf for no position -> the positions of the `top` highest, int64 (rows, top), ascending.

    Ties go to the lower position, missing positions are -1, and NaN counts as the highest score. torch.topk supplies
    only the lowest picked value, since its choice among equal values differs between devices.
    """
    rows, count = values.shape
    values = values.masked_fill(values.isnan(), torch.inf)
    least = values.topk(min(top, count), sorted=False).values.amin(-1, keepdim=True)
    above, level = values > least, (values == least) & (values > -torch.inf)
    chosen = above | (level & (level.cumsum(-1) <= top - above.sum(-1, keepdim=True)))
    places = torch.where(chosen, chosen.cumsum(-1) - 1, top)
    picks = torch.full((rows, top + 1), -1, dtype=torch.int64, device=values.device)
    picks.scatter_(1, places, torch.arange(count, device=values.device).expand(rows, -1))
    return picks[:, :top]

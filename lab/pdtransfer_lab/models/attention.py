"""Batches of rows, the keys that they attend to, and batch-invariant attention.

Attention folds blocks of KEY_BLOCK keys at absolute positions, in order, with an online softmax. A query row reads
blocks 0 .. position // KEY_BLOCK, whatever else is computed with it; a fully masked block would change nothing and is
skipped. Blocks are read from the cache when they are folded, and no copy outlives a call. Only tiles of one height
agree bitwise: decode (1 row) and prefill (64 rows) of one position may differ in the last bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from .cache import Cache
from .numerics import exp2, products, total
from .projection import Layer

KEY_BLOCK = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Neighbouring tiles of query rows that are folded together; the rows of a tile share their last key block.

    Either all tiles belong to one request, or each tile to a request of its own.
    """

    first: int  # index of the first tile in the batch
    depths: list[int]  # ascending; the last key block of each tile
    bias: Tensor  # (tiles, rows, KEY_BLOCK) float32: 0, or -inf for keys after the row in a tile's last block
    sources: list[Tensor]  # for each block int64 cache rows: (KEY_BLOCK,), or (tiles that reach it * KEY_BLOCK,)
    ends: list[int]  # each request's number of keys

    @cached_property
    def rows(self) -> Tensor:
        """Cache rows of the only request's keys in order, int64 (whole blocks,); padding repeats row 0."""
        (end,) = self.ends
        if end == len(self.sources[0]):
            return self.sources[0]  # one full block
        rows = torch.cat(self.sources)
        rows[end:] = rows[0]
        return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """All keys of neighbouring rows, one row for each request, for attention without folding."""

    first: int  # index of the first row in the batch
    rows: Tensor  # (requests, keys) int64 cache rows, all valid
    absent: Tensor  # (requests, keys) bool: padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Keys and their cache. A model that folds reads only Tiles."""

    tiles: Tiles | Whole
    cache: Cache


class Keys(Protocol):
    """Writes a batch's own keys and selects the keys that it attends to."""

    @property
    def readings(self) -> Sequence[Reading]:
        """All tiles of the batch for the layer that was entered."""
        ...

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        """Called once for each layer, in order, before its keys are written or read; `hidden` is (rows, width)."""
        ...

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        """Writes the batch's keys: by kind (own rows, kv_heads, dim)."""
        ...


class EveryKey:
    """The Keys of a batch that attends to all keys in one cache. `targets` are its own rows there."""

    def __init__(self, cache: Cache, targets: Tensor, tiles: Sequence[Tiles]) -> None:
        self.cache, self.targets = cache, targets
        self.readings: Sequence[Reading] = [Reading(tiles=tile, cache=cache) for tile in tiles]

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        pass

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        for kind, rows in kept.items():
            self.cache.write(kind, layer, self.targets, rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """Rows that pass through the layers together, padded to a multiple of BLOCK_ROWS.

    Rows outside `own` are padding, whose results are dropped. Each `tile_rows` rows form a tile; rows after the last
    tile attend to nothing.
    """

    ids: Tensor  # (rows,) int64
    positions: Tensor  # (rows,) int64, absolute
    own: slice
    tile_rows: int
    tile_count: int
    keys: Keys


ReadKeys = Callable[[Tensor], tuple[Tensor, ...]]
"""Cache rows (n,) -> keys (n, kv_heads, key_dim), values (n, kv_heads, value_dim), or one tensor that holds both."""


def causal_bias(positions: Tensor) -> Tensor:
    """Positions (tiles, rows) -> (tiles, rows, KEY_BLOCK): -inf for the keys after each row in its own block."""
    keys = torch.arange(KEY_BLOCK, device=positions.device)
    hidden = keys > (positions % KEY_BLOCK).unsqueeze(-1)
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, -torch.inf)


def attend(query: Tensor, tiles: Tiles, read: ReadKeys, value_dim: int) -> Tensor:
    """(kv_heads, tiles, rows * group, key_dim) -> (kv_heads, tiles, rows * group, value_dim).

    The query is scaled by the softmax's scale times log2(e). Every row has at least one key in each block it reads.
    """
    heads, count, height, _ = query.shape
    rows = tiles.bias.shape[1]
    top = query.new_full((heads, count, height, 1), -torch.inf)
    shared = query.new_zeros(heads, count, height, 1)
    mixed = query.new_zeros(heads, count, height, value_dim)
    for block in range(tiles.depths[-1] + 1):
        first, masked = bisect_left(tiles.depths, block), bisect_right(tiles.depths, block)
        active = count - first
        keys, values = _blocks(tiles, read, block, first)
        scores = query.new_empty(heads, active, height, KEY_BLOCK)
        for head in range(heads):
            source = keys[:, :, head].expand(active, -1, -1).transpose(1, 2)
            products(query[head, first:], source, out=scores[head])
        if masked > first:
            own = scores[:, : masked - first].view(heads, masked - first, rows, height // rows, KEY_BLOCK)
            own += tiles.bias[first:masked].unsqueeze(2)
        before = top[:, first:]
        after = torch.maximum(before, scores.amax(-1, keepdim=True))
        shrink = exp2(before - after)
        shares = exp2(scores.sub_(after))
        top[:, first:] = after
        shared[:, first:] = shared[:, first:] * shrink + total(shares)
        mixed[:, first:] *= shrink
        for head in range(heads):
            part = query.new_empty(active, height, value_dim)
            products(shares[head], values[:, :, head, :value_dim].expand(active, -1, -1), out=part)
            mixed[head, first:] += part
    return mixed.div_(shared)


def _blocks(tiles: Tiles, read: ReadKeys, block: int, first: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one block, (requests, KEY_BLOCK, kv_heads, dim), zero after each request's last key.

    An unwritten slot may hold NaN, which no mask removes: 0 * NaN is NaN.
    """
    planes = [plane.view(-1, KEY_BLOCK, *plane.shape[1:]) for plane in read(tiles.sources[block])]
    ends = tiles.ends[first:] if len(tiles.ends) > 1 else tiles.ends
    for request, end in enumerate(ends):
        if end < (block + 1) * KEY_BLOCK:
            for plane in planes:
                plane[request, end - block * KEY_BLOCK :] = 0.0
    return planes[0], planes[-1]

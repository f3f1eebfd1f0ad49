"""Batch-invariant attention: blocks of KEY_BLOCK keys at absolute positions, folded in order with an online softmax.

A query row meets blocks 0 .. position // KEY_BLOCK, whatever else is computed beside it; a block that would be masked
entirely changes nothing and is not visited. Blocks are read from the cache as they are folded: no copy outlives a call.
Only tiles of one height agree bitwise: decode (1 row) and prefill (64 rows) of one position may differ in last bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .numerics import exp2, products, total

KEY_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Neighbouring tiles of query rows that are folded together: the rows of a tile have one last key block in common.

    Either one request owns all tiles, or each tile is a request of its own.
    """

    first: int  # place of the first tile in the batch
    depths: list[int]  # ascending; the last key block of each tile
    bias: Tensor  # (tiles, rows, KEY_BLOCK) float32: 0, or -inf where a tile's last block holds keys after the row
    sources: list[Tensor]  # for each block int64 cache rows: (KEY_BLOCK,), or (tiles that reach it * KEY_BLOCK,)
    ends: list[int]  # of each owner: keys from here on are not there yet

    @cached_property
    def rows(self) -> Tensor:
        """The one owner's keys in order, cache rows int64 (whole blocks,), for who does not fold; in place of what is
        not there is the first row, which is."""
        (end,) = self.ends
        if end == len(self.sources[0]):
            return self.sources[0]  # all of it is there
        rows = torch.cat(self.sources)
        rows[end:] = rows[0]
        return rows


ReadKeys = Callable[[Tensor], tuple[Tensor, ...]]
"""Cache rows (n,) -> keys (n, kv_heads, key_dim), values (n, kv_heads, value_dim), or one tensor that holds both."""


def causal_bias(positions: Tensor) -> Tensor:
    """Positions (tiles, rows) -> (tiles, rows, KEY_BLOCK): -inf for the keys after each row in its own block."""
    keys = torch.arange(KEY_BLOCK, device=positions.device)
    hidden = keys > (positions % KEY_BLOCK).unsqueeze(-1)
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, -torch.inf)


def attend(query: Tensor, tiles: Tiles, read: ReadKeys, value_dim: int) -> Tensor:
    """(kv_heads, tiles, rows * group, key_dim) -> (kv_heads, tiles, rows * group, value_dim).

    The query carries the softmax's scale times log2(e). Every row sees at least one key of each block that it meets.
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
    """Keys and values of one block, (owners, KEY_BLOCK, kv_heads, dim), zero where there is no key yet.

    A slot that was never written may hold NaN, which no mask undoes: 0 * NaN is NaN.
    """
    planes = [plane.view(-1, KEY_BLOCK, *plane.shape[1:]) for plane in read(tiles.sources[block])]
    owners = tiles.ends[first:] if len(tiles.ends) > 1 else tiles.ends
    for owner, end in enumerate(owners):
        if end < (block + 1) * KEY_BLOCK:
            for plane in planes:
                plane[owner, end - block * KEY_BLOCK :] = 0.0
    return planes[0], planes[-1]

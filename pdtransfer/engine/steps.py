"""What a decode step is asked for, and its keys for the model that folds them block by block."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import KEY_BLOCK, Tiles, causal_bias
from .batch import Batch, EveryKey, Keys, Reading
from .indexer import IndexCache, IndexerMath, Queries, pick_top, scores
from .marks import Marks
from .numerics import block_up
from .projection import Layer
from .residency import Part
from .sending import sent

ROOMS_TOGETHER = 4  # folded together: their key blocks stay in the core's cache between two products


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row a request, its last id at its position, in the order of the parts."""

    ids: list[int]
    parts: list[Part]
    index: IndexCache | None  # where requests attend to picks alone
    marks: Marks

    @property
    def positions(self) -> list[int]:
        return [position for part in self.parts for position in part.positions]

    def rows(self, device: torch.device) -> Tensor:
        """Ids and positions int64 (2, rows), padded with zeros to a multiple of BLOCK_ROWS."""
        rows = torch.zeros(2, block_up(len(self.ids)), dtype=torch.int64)
        rows[:, : len(self.ids)] = torch.tensor([self.ids, self.positions])
        return sent(rows, device)

    def batch(self, rows: Tensor, keys: Keys) -> Batch:
        """Of such `rows`."""
        count = len(self.ids)
        return Batch(ids=rows[0], positions=rows[1], own=slice(0, count), tile_rows=1, tile_count=count, keys=keys)


def folded_keys(step: Step, positions: Tensor, *, top: int, indexer: IndexerMath | None) -> Keys:
    """Of a step whose rows are at `positions`: all that it may attend to, or what the indexer picks."""
    if step.index is not None and indexer is not None:
        return PickedKeys(step.parts, positions, top=top, indexer=indexer, index=step.index)
    (part,) = step.parts
    targets = torch.stack([rows[at] for rows, at in zip(part.rows, part.positions, strict=True)])
    tiles = [_tiles(part, at, positions) for at in range(0, len(part.rooms), ROOMS_TOGETHER)]
    return EveryKey(part.residency.cache, targets, tiles)


class PickedKeys:
    """The batch.Keys of a decode step that attends to what its indexer picks, and to the newest token."""

    def __init__(
        self, parts: Sequence[Part], positions: Tensor, *, top: int, indexer: IndexerMath, index: IndexCache
    ) -> None:
        self._parts, self._row_positions, self._top = parts, positions, top
        self._indexer, self._index = indexer, index
        self._begun = [part.residency.begin(part) for part in parts]
        self._positions = [position for part in parts for position in part.positions]
        self._indices = [rows for part in parts for rows in part.index]
        self._targets = torch.stack([rows[:, at] for rows, at in zip(self._indices, self._positions, strict=True)], 1)
        self.readings: Sequence[Reading] = ()

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        if layer not in self._index.layers:
            return
        count = len(self._positions)
        self._index.write(layer, self._targets, self._indexer.keys(weights, hidden, self._row_positions)[:count])
        asked = self._indexer.queries(weights, hidden, self._row_positions)
        asked = Queries(heads=asked.heads[:count], shares=asked.shares[:count])
        picks = pick_top(scores(asked, self._index, layer, self._indices, self._positions), self._top)
        readings: list[Reading] = []
        first = 0
        for part, (newest, tables) in zip(self._parts, self._begun, strict=True):
            own = picks[first : first + len(part.rooms)]
            rows = part.residency.place(layer, own, tables)
            readings += _readings(part, first, torch.where(own < 0, newest.unsqueeze(1), rows), newest)
            first += len(part.rooms)
        self.readings = readings

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        first = 0
        for part, (newest, _) in zip(self._parts, self._begun, strict=True):
            for kind, rows in kept.items():
                part.residency.cache.write(kind, layer, newest, rows[first : first + len(part.rooms)])
            first += len(part.rooms)


def _tiles(part: Part, at: int, positions: Tensor) -> Tiles:
    """A tile of one row for each of the rooms from `at` on."""
    own = slice(at, at + ROOMS_TOGETHER)
    ends = [position + 1 for position in part.positions[own]]
    depths = [position // KEY_BLOCK for position in part.positions[own]]
    blocks = [rows.view(-1, KEY_BLOCK) for rows in part.rows[own]]
    sources = [
        torch.cat([each[block] for each in blocks[bisect_left(depths, block) :]]) for block in range(depths[-1] + 1)
    ]
    bias = causal_bias(positions[at : at + len(ends)].unsqueeze(1))
    return Tiles(first=at, depths=depths, bias=bias, sources=sources, ends=ends)


def _readings(part: Part, first: int, picked: Tensor, newest: Tensor) -> list[Reading]:
    """A tile of one row a request: its picks in order, then its newest row, then that again until the block ends."""
    requests, top = picked.shape
    counts = [min(position, top) for position in part.positions]
    blocks = counts[-1] // KEY_BLOCK + 1
    rows = newest.unsqueeze(1).repeat(1, max(blocks * KEY_BLOCK, top))
    rows[:, :top] = picked
    rows = rows[:, : blocks * KEY_BLOCK].view(requests, blocks, KEY_BLOCK)
    bias = causal_bias(sent(torch.tensor(counts), picked.device).unsqueeze(1))
    depths = [count // KEY_BLOCK for count in counts]
    readings: list[Reading] = []
    for at in range(0, requests, ROOMS_TOGETHER):
        own = slice(at, at + ROOMS_TOGETHER)
        deep = depths[own]
        tiles = Tiles(
            first=first + at,
            depths=deep,
            bias=bias[own],
            sources=[rows[own][bisect_left(deep, block) :, block].reshape(-1) for block in range(deep[-1] + 1)],
            ends=[count + 1 for count in counts[own]],
        )
        readings.append(Reading(tiles=tiles, cache=part.residency.cache))
    return readings

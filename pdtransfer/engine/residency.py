"""Where the rows are that a decode step attends to: `Residency` says, for what the indexer has picked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .attention import KEY_BLOCK, Tiles, causal_bias
from .cache import Cache
from .indexer import IndexCache, IndexerMath, Queries, pick_top, scores
from .model import Reading
from .projection import Layer
from .sending import sent

ROOMS_TOGETHER = 4  # folded together: their key blocks stay in the core's cache between two products


class Residency(Protocol):
    """Some requests' rows in one cache. In a step at position p a request attends to picks of [0, p), and to p."""

    @property
    def cache(self) -> Cache: ...

    def begin(self, rooms: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The next step is of these requests, each at its position: where its new row belongs, int64 (requests,)
        cache rows, the same in all layers."""
        ...

    def place(self, layer: int, picks: Tensor) -> Tensor:
        """Where the layers of the group that `layer` leads find the step's picks, int64 (requests, top), of which -1
        is none: cache rows int64 of that shape, anything for none. Good until the next call."""
        ...


class AllResident:
    """Every row is where it landed, and there it is read."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rows: dict[int, Tensor] = {}
        self._step: list[Tensor] = []

    @property
    def cache(self) -> Cache:
        return self._cache

    def hold(self, room: int, rows: Tensor) -> None:
        """Cache rows of every position, growth included."""
        self._rows[room] = rows.view(-1)

    def let(self, room: int) -> None:
        """Unknown rooms are ignored."""
        self._rows.pop(room, None)

    def begin(self, rooms: Sequence[int], positions: Sequence[int]) -> Tensor:
        self._step = [self._rows[room] for room in rooms]
        return torch.stack([own[at] for own, at in zip(self._step, positions, strict=True)])

    def place(self, layer: int, picks: Tensor) -> Tensor:  # noqa: ARG002 -- all groups find them in one place
        return torch.stack([own[at] for own, at in zip(self._step, picks.clamp(min=0), strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Neighbouring rows of a step, ascending by position, whose requests one residency has."""

    residency: Residency
    rooms: list[int]
    positions: list[int]
    index: list[Tensor]  # each room's rows of the index cache, (2, whole key blocks)


class PickedKeys:
    """The model.Keys of a decode step that attends to what its indexer picks, and to the newest token."""

    def __init__(
        self, parts: Sequence[Part], positions: Tensor, *, top: int, indexer: IndexerMath, index: IndexCache
    ) -> None:
        self._parts, self._row_positions, self._top = parts, positions, top
        self._indexer, self._index = indexer, index
        self._newest = [part.residency.begin(part.rooms, part.positions) for part in parts]
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
        for part, newest in zip(self._parts, self._newest, strict=True):
            own = picks[first : first + len(part.rooms)]
            rows = part.residency.place(layer, own)
            readings += _readings(part, first, torch.where(own < 0, newest.unsqueeze(1), rows), newest)
            first += len(part.rooms)
        self.readings = readings

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        first = 0
        for part, newest in zip(self._parts, self._newest, strict=True):
            for kind, rows in kept.items():
                part.residency.cache.write(kind, layer, newest, rows[first : first + len(part.rooms)])
            first += len(part.rooms)


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

"""Decode steps: the requests of a step, where their rows are, and the keys of a model that folds them in blocks.

A Residency finds the cache rows that the indexer has picked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdtransfer.kernels.stream import DeviceSpans, upload

from .attention import KEY_BLOCK, EveryKey, Keys, Reading, RowBatch, Tiles, causal_bias
from .cache import Cache
from .indexer import IndexCache, IndexerMath, Queries, pick_top, scores
from .numerics import block_up
from .projection import Layer

ROOMS_TOGETHER = 4  # requests folded together: their key blocks stay in the CPU's cache between two products


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPart:
    """Neighbouring rows of a step, ascending by position, whose requests share a residency."""

    residency: Residency
    rooms: list[int]
    positions: list[int]
    rows: list[Tensor]  # each room's cache rows by position where it landed, growth included
    index: list[Tensor]  # each room's rows of the index cache, (2, whole key blocks); empty without an index

    @property
    def newest(self) -> Tensor:
        """Each room's row at its position, int64 (requests,)."""
        return torch.stack([rows[position] for rows, position in zip(self.rows, self.positions, strict=True)])


class BegunStep(NamedTuple):
    """The rows of a part's requests, for all layers of a step."""

    newest: Tensor  # (requests,) int64 cache rows for the new rows
    tables: Tensor  # (requests, n) int64 cache rows by position; n is 0 if only `place` knows them


class Residency(Protocol):
    """Rows of some requests in one cache. In a step at position p, a request attends to picks of [0, p), and to p."""

    @property
    def cache(self) -> Cache: ...

    def begin(self, part: StepPart) -> BegunStep:
        """Starts the next step with this part."""
        ...

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:
        """Finds the picks, int64 (requests, top) with -1 for none, for the layers of the group that `layer` leads.

        Returns cache rows int64 of that shape, with any row for none. Valid until the next call. `tables` as begun.
        """
        ...


class AllResident:
    """Requests whose rows are all read where they landed."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._tables = cache, PositionTables()

    @property
    def cache(self) -> Cache:
        return self._cache

    def begin(self, part: StepPart) -> BegunStep:
        return BegunStep(part.newest, self._tables.of(part.rows, max(part.positions) + 1))

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:  # noqa: ARG002 -- equal for all groups
        return tables.gather(1, picks.clamp(min=0))


class PositionTables:
    """The rows of a step's requests by position, as one tensor that is reused while the requests stay the same."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._tables = torch.empty(0)

    def of(self, rows: Sequence[Tensor], tokens: int) -> Tensor:
        """Rows (..., n) of each request -> (requests, ..., reach(tokens)), padded with each request's first row."""
        width = reach(tokens)
        same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if not same or self._tables.shape[-1] != width:
            self._rows, self._tables = list(rows), torch.stack([_padded(row, width) for row in rows])
        return self._tables


def reach(tokens: int) -> int:
    """Rounds up by at most an eighth, in whole blocks, so that requests of many lengths have few sizes."""
    blocks = -(-tokens // KEY_BLOCK)
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step * KEY_BLOCK


def _padded(rows: Tensor, width: int) -> Tensor:
    missing = width - rows.shape[-1]
    if missing <= 0:
        return rows[..., :width]
    return torch.cat((rows, rows[..., :1].expand(*rows.shape[:-1], missing)), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row for each request, its last id at its position, in the order of the parts."""

    ids: list[int]
    parts: list[StepPart]
    index: IndexCache | None  # if requests attend only to picks
    spans: DeviceSpans

    @property
    def positions(self) -> list[int]:
        return [position for part in self.parts for position in part.positions]

    @property
    def index_rows(self) -> list[Tensor]:
        """Each request's rows of the index cache."""
        return [rows for part in self.parts for rows in part.index]

    def begin(self) -> list[BegunStep]:
        """Starts the step in each part's residency."""
        return [part.residency.begin(part) for part in self.parts]

    def owns(self, begun: Sequence[BegunStep]) -> list[Own]:
        """Each part's rows in the step and in its cache."""
        owns, first = list[Own](), 0
        for part, inputs in zip(self.parts, begun, strict=True):
            owns.append(Own(part, first, *inputs))
            first += len(part.rooms)
        return owns

    def rows(self, device: torch.device) -> Tensor:
        """Ids and positions int64 (2, rows), padded with zeros to a multiple of BLOCK_ROWS."""
        rows = torch.zeros(2, block_up(len(self.ids)), dtype=torch.int64)
        rows[:, : len(self.ids)] = torch.tensor([self.ids, self.positions])
        return upload(rows, device)

    def batch(self, rows: Tensor, keys: Keys) -> RowBatch:
        """The batch of `rows`, as the method `rows` returns them."""
        count = len(self.ids)
        return RowBatch(ids=rows[0], positions=rows[1], own=slice(0, count), tile_rows=1, tile_count=count, keys=keys)


class Own(NamedTuple):
    """One part's rows of a step."""

    part: StepPart
    first: int
    newest: Tensor  # as in BegunStep
    tables: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.newest))

    def place(self, layer: int, picks: Tensor) -> Tensor:
        """Picks (requests, top) -> cache rows of that shape, with the newest row for -1."""
        return torch.where(picks < 0, self.newest.unsqueeze(1), self.part.residency.place(layer, picks, self.tables))

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        """Writes this part's rows; `kept` is of the whole step, as in Keys.write."""
        for kind, rows in kept.items():
            self.part.residency.cache.write(kind, layer, self.newest, rows[self.rows])


class PickedKeys:
    """The Keys of a decode step that attends to the indexer's picks and to the newest token.

    The model supplies `scores`, which scores a layer's queries, (requests, n) with -inf for no position, and
    `readings`, which reads the picked cache rows (requests, top).
    """

    def __init__(
        self, owns: Sequence[Own], positions: Tensor, targets: Tensor, *, top: int, indexer: IndexerMath,
        index: IndexCache, scores: Callable[[int, Queries], Tensor],
        readings: Callable[[Own, Tensor], Sequence[Reading]],
    ) -> None:  # fmt: skip
        """`positions` are of all rows, with padding; `targets` (2, requests) are rows of the index cache."""
        self._owns, self._positions, self._targets, self._top = owns, positions, targets, top
        self._indexer, self._index, self._scores, self._readings = indexer, index, scores, readings
        self.readings: Sequence[Reading] = ()

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        if layer not in self._index.layers:
            return
        count = self._targets.shape[1]
        self._index.write(layer, self._targets, self._indexer.keys(weights, hidden, self._positions)[:count])
        queries = self._indexer.queries(weights, hidden, self._positions)
        queries = Queries(heads=queries.heads[:count], shares=queries.shares[:count])
        picks = pick_top(self._scores(layer, queries), self._top)
        self.readings = [
            reading for own in self._owns for reading in self._readings(own, own.place(layer, picks[own.rows]))
        ]

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        for own in self._owns:
            own.write(layer, kept)


def folded_keys(step: Step, positions: Tensor, *, top: int, indexer: IndexerMath | None) -> Keys:
    """The keys of a step whose rows are at `positions`: all keys, or the indexer's picks."""
    index = step.index
    if index is None or indexer is None:
        (part,) = step.parts
        tiles = [_tiles(part, offset, positions) for offset in range(0, len(part.rooms), ROOMS_TOGETHER)]
        return EveryKey(part.residency.cache, part.newest, tiles)
    indices, ends = step.index_rows, step.positions
    targets = torch.stack([rows[:, end] for rows, end in zip(indices, ends, strict=True)], 1)
    return PickedKeys(
        step.owns(step.begin()), positions, targets,
        top=top, indexer=indexer, index=index,
        scores=lambda layer, queries: scores(queries, index, layer, indices, ends), readings=_readings,
    )  # fmt: skip


def _tiles(part: StepPart, at: int, positions: Tensor) -> Tiles:
    """Tiles of one row, for at most ROOMS_TOGETHER rooms from `at`."""
    own = slice(at, at + ROOMS_TOGETHER)
    ends = [position + 1 for position in part.positions[own]]
    depths = [position // KEY_BLOCK for position in part.positions[own]]
    blocks = [rows.view(-1, KEY_BLOCK) for rows in part.rows[own]]
    sources = [
        torch.cat([block_rows[block] for block_rows in blocks[bisect_left(depths, block) :]])
        for block in range(depths[-1] + 1)
    ]
    bias = causal_bias(positions[at : at + len(ends)].unsqueeze(1))
    return Tiles(first=at, depths=depths, bias=bias, sources=sources, ends=ends)


def _readings(own: Own, picked: Tensor) -> list[Reading]:
    """Tiles of one row: each request's picks in order, then its newest row, repeated to the end of the block."""
    requests, top = picked.shape
    counts = [min(position, top) for position in own.part.positions]
    blocks = counts[-1] // KEY_BLOCK + 1
    rows = own.newest.unsqueeze(1).repeat(1, max(blocks * KEY_BLOCK, top))
    rows[:, :top] = picked
    rows = rows[:, : blocks * KEY_BLOCK].view(requests, blocks, KEY_BLOCK)
    bias = causal_bias(upload(torch.tensor(counts), picked.device).unsqueeze(1))
    depths = [count // KEY_BLOCK for count in counts]
    readings: list[Reading] = []
    for offset in range(0, requests, ROOMS_TOGETHER):
        some = slice(offset, offset + ROOMS_TOGETHER)
        deep = depths[some]
        tiles = Tiles(
            first=own.first + offset,
            depths=deep,
            bias=bias[some],
            sources=[rows[some][bisect_left(deep, block) :, block].reshape(-1) for block in range(deep[-1] + 1)],
            ends=[count + 1 for count in counts[some]],
        )
        readings.append(Reading(tiles=tiles, cache=own.part.residency.cache))
    return readings

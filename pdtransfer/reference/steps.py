"""What a decode step is asked for, and its keys for the model that folds them block by block."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import KEY_BLOCK, Tiles, causal_bias
from .batch import Batch, EveryKey, Keys, Reading
from .indexer import IndexCache, IndexerMath, Queries, pick_top, scores
from .numerics import block_up
from .projection import Layer
from .residency import Begun, Part
from .sending import sent
from .stream import Marks

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

    @property
    def index_rows(self) -> list[Tensor]:
        """Each request's rows of the index cache."""
        return [rows for part in self.parts for rows in part.index]

    def begin(self) -> list[Begun]:
        """Tells each part's residency, which answers where its rows are."""
        return [part.residency.begin(part) for part in self.parts]

    def owns(self, begun: Sequence[Begun]) -> list[Own]:
        """The parts, each with its rows in the step and in its cache."""
        owns, first = list[Own](), 0
        for part, each in zip(self.parts, begun, strict=True):
            owns.append(Own(part, first, *each))
            first += len(part.rooms)
        return owns

    def rows(self, device: torch.device) -> Tensor:
        """Ids and positions int64 (2, rows), padded with zeros to a multiple of BLOCK_ROWS."""
        rows = torch.zeros(2, block_up(len(self.ids)), dtype=torch.int64)
        rows[:, : len(self.ids)] = torch.tensor([self.ids, self.positions])
        return sent(rows, device)

    def batch(self, rows: Tensor, keys: Keys) -> Batch:
        """Of such `rows`."""
        count = len(self.ids)
        return Batch(ids=rows[0], positions=rows[1], own=slice(0, count), tile_rows=1, tile_count=count, keys=keys)


class Own(NamedTuple):
    """The rows of a step that are of one part."""

    part: Part
    first: int
    newest: Tensor  # as Begun has them
    tables: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.newest))

    def place(self, layer: int, picks: Tensor) -> Tensor:
        """Picks (requests, top) -> cache rows of that shape, the newest one's for none."""
        return torch.where(picks < 0, self.newest.unsqueeze(1), self.part.residency.place(layer, picks, self.tables))

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        """What Keys.write is given of the whole step."""
        for kind, rows in kept.items():
            self.part.residency.cache.write(kind, layer, self.newest, rows[self.rows])


class PickedKeys:
    """The batch.Keys of a decode step that attends to what its indexer picks, and to the newest token.

    How the index is looked through, and how rows are read, is the model's: `scores` of a layer's queries (requests, n),
    -inf for no position; `readings` of the cache rows (requests, top) that were picked.
    """

    def __init__(
        self, owns: Sequence[Own], positions: Tensor, targets: Tensor, *, top: int, indexer: IndexerMath,
        index: IndexCache, scores: Callable[[int, Queries], Tensor],
        readings: Callable[[Own, Tensor], Sequence[Reading]],
    ) -> None:  # fmt: skip
        """`positions` of all rows, padding too; `targets` (2, requests) rows of the index cache."""
        self._owns, self._positions, self._targets, self._top = owns, positions, targets, top
        self._indexer, self._index, self._scores, self._readings = indexer, index, scores, readings
        self.readings: Sequence[Reading] = ()

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        if layer not in self._index.layers:
            return
        count = self._targets.shape[1]
        self._index.write(layer, self._targets, self._indexer.keys(weights, hidden, self._positions)[:count])
        asked = self._indexer.queries(weights, hidden, self._positions)
        asked = Queries(heads=asked.heads[:count], shares=asked.shares[:count])
        picks = pick_top(self._scores(layer, asked), self._top)
        self.readings = [
            reading for own in self._owns for reading in self._readings(own, own.place(layer, picks[own.rows]))
        ]

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        for own in self._owns:
            own.write(layer, kept)


def folded_keys(step: Step, positions: Tensor, *, top: int, indexer: IndexerMath | None) -> Keys:
    """Of a step whose rows are at `positions`: all that it may attend to, or what the indexer picks."""
    index = step.index
    if index is None or indexer is None:
        (part,) = step.parts
        tiles = [_tiles(part, at, positions) for at in range(0, len(part.rooms), ROOMS_TOGETHER)]
        return EveryKey(part.residency.cache, part.newest, tiles)
    indices, ends = step.index_rows, step.positions
    targets = torch.stack([rows[:, at] for rows, at in zip(indices, ends, strict=True)], 1)
    return PickedKeys(
        step.owns(step.begin()), positions, targets,
        top=top, indexer=indexer, index=index,
        scores=lambda layer, asked: scores(asked, index, layer, indices, ends), readings=_readings,
    )  # fmt: skip


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


def _readings(own: Own, picked: Tensor) -> list[Reading]:
    """A tile of one row a request: its picks in order, then its newest row, then that again until the block ends."""
    requests, top = picked.shape
    counts = [min(position, top) for position in own.part.positions]
    blocks = counts[-1] // KEY_BLOCK + 1
    rows = own.newest.unsqueeze(1).repeat(1, max(blocks * KEY_BLOCK, top))
    rows[:, :top] = picked
    rows = rows[:, : blocks * KEY_BLOCK].view(requests, blocks, KEY_BLOCK)
    bias = causal_bias(sent(torch.tensor(counts), picked.device).unsqueeze(1))
    depths = [count // KEY_BLOCK for count in counts]
    readings: list[Reading] = []
    for at in range(0, requests, ROOMS_TOGETHER):
        some = slice(at, at + ROOMS_TOGETHER)
        deep = depths[some]
        tiles = Tiles(
            first=own.first + at,
            depths=deep,
            bias=bias[some],
            sources=[rows[some][bisect_left(deep, block) :, block].reshape(-1) for block in range(deep[-1] + 1)],
            ends=[count + 1 for count in counts[some]],
        )
        readings.append(Reading(tiles=tiles, cache=own.part.residency.cache))
    return readings

"""Decode steps of the deep model: each request's row attends to all of its keys at once.

A step on a GPU is hundreds of kernels, whose launches take much CPU time. So requests and positions are in tensors,
and a shape that comes often is captured whole, from swap-in to logits: a step is then one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from pdtransfer.hisparse.capture import Captures, captured
from pdtransfer.kernels.stream import CapturedSpan

from .attention import KEY_BLOCK, Keys, Reading, RowBatch, Whole
from .indexer import IndexCache, IndexerMath, Queries
from .projection import Layer
from .steps import BegunStep, Own, PickedKeys, PositionTables, Step, StepPart, reach

SHAPES_MAX = 32  # captured shapes
WORTH = 3  # steps of a shape before a capture, which costs as much as one or two steps
KEYS_TOGETHER = 1 << 18  # keys gathered or scored at once; bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """The tensors that differ between steps of one shape."""

    rows: Tensor  # Step.rows
    begun: list[BegunStep]  # of each part
    index: list[Tensor]  # with an index, one tensor (requests, 2, n) of its rows

    def __iter__(self) -> Iterator[Tensor]:
        return chain((self.rows,), *self.begun, self.index)

    def copy(self) -> _Inputs:
        begun = [BegunStep(newest.clone(), tables.clone()) for newest, tables in self.begun]
        return _Inputs(self.rows.clone(), begun, [tensor.clone() for tensor in self.index])


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    logits: Tensor
    spans: list[CapturedSpan]


class DeepSteps:
    """Runs steps. `run` computes a batch's logits of all rows."""

    def __init__(
        self, run: Callable[[RowBatch], Tensor], device: torch.device, *, top: int, indexer: IndexerMath | None,
        graphs: bool,
    ) -> None:  # fmt: skip
        self._run, self._device, self._top, self._indexer = run, device, top, indexer
        self._tables = PositionTables()  # of the index
        self._captures: Captures[_Captured] | None = Captures(SHAPES_MAX, WORTH) if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def logits(self, step: Step) -> Tensor:
        """As Transformer.step."""
        inputs = self._inputs(step)
        if self._captures is None:
            return self._queue(step, inputs)
        shape = _shape(step, inputs)
        if (capture := self._captures.get(shape)) is not None:
            for buffer, given in zip(capture.inputs, inputs, strict=True):
                buffer.copy_(given)
            capture.graph.replay()
            step.spans.replayed(capture.spans, step.parts[-1].rooms)  # hot rooms come last; only they have spans
            return capture.logits
        if not self._captures.due(shape):
            return self._queue(step, inputs)
        with self._captures.side_stream():
            logits = self._queue(step, inputs)
            buffer = inputs.copy()
            with step.spans.captured() as spans, captured(self._pool) as graph:
                result = self._queue(step, buffer)
        self._captures.keep(shape, _Captured(graph, buffer, result, spans))
        return logits

    def _inputs(self, step: Step) -> _Inputs:
        index = [] if step.index is None else [self._tables.of(step.index_rows, max(step.positions) + 1)]
        return _Inputs(step.rows(self._device), step.begin(), index)

    def _queue(self, step: Step, inputs: _Inputs) -> Tensor:
        """Queues the step for the requests and positions in `inputs`."""
        owns, count, positions = step.owns(inputs.begun), len(step.ids), inputs.rows[1]
        if step.index is None or self._indexer is None:
            keys: Keys = _Every(owns[0], positions)
        else:
            (tables,) = inputs.index
            ends = positions[:count]
            keys = PickedKeys(
                owns, positions, tables.gather(2, ends[:, None, None].expand(-1, 2, 1)).squeeze(2).T,
                top=self._top, indexer=self._indexer, index=step.index,
                scores=partial(_scores, step.index, tables, ends), readings=partial(_readings, ends),
            )  # fmt: skip
        return self._run(step.batch(inputs.rows, keys))[:count]


def _shape(step: Step, inputs: _Inputs) -> Hashable:
    """Steps with equal shapes are the same work."""
    runs = () if step.index is not None else tuple(run for part in step.parts for run in _runs(part))
    return tuple(part.residency for part in step.parts), tuple(tensor.shape for tensor in inputs), runs


class _Run(NamedTuple):
    """Neighbouring rows of a part, whose keys are gathered together."""

    first: int
    end: int
    width: int  # keys of each


def _runs(part: StepPart) -> list[_Run]:
    runs: list[_Run] = []
    begin = 0
    for width, group in groupby(reach(position + 1) for position in part.positions):
        end = begin + len(list(group))
        together = max(1, KEYS_TOGETHER // width)
        runs += [_Run(first, min(first + together, end), width) for first in range(begin, end, together)]
        begin = end
    return runs


class _Every:
    """The Keys of a step that attends to all keys, in one residency."""

    def __init__(self, own: Own, positions: Tensor) -> None:
        self._own, self._positions = own, positions
        self.readings: Sequence[Reading] = [self._reading(run) for run in _runs(own.part)]

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        pass

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        self._own.write(layer, kept)

    def _reading(self, run: _Run) -> Reading:
        rooms = slice(run.first, run.end)
        tables = self._own.tables[rooms, : run.width]
        absent = _after(self._positions[rooms], run.width)
        # An unwritten row may hold NaN, which no mask removes.
        rows = torch.where(absent, tables[:, :1], tables)
        return Reading(tiles=Whole(first=run.first, rows=rows, absent=absent), cache=self._own.part.residency.cache)


def _scores(index: IndexCache, tables: Tensor, ends: Tensor, layer: int, queries: Queries) -> Tensor:
    """As indexer.scores, for rows in `tables` (requests, 2, n). Bits may depend on the batch."""
    count, _, width = tables.shape
    result = queries.heads.new_empty(count, width)
    together = max(1, KEYS_TOGETHER // width)
    for first in range(0, count, together):
        rows = slice(first, min(first + together, count))
        keys, scales = index.read(layer, tables[rows].transpose(0, 1).reshape(2, -1))
        products = queries.heads[rows] @ keys.view(-1, width, keys.shape[1]).transpose(1, 2)
        summed = products.relu_().mul_(queries.shares[rows].unsqueeze(-1)).sum(1)
        torch.mul(summed, scales.view(-1, width), out=result[rows])
    return result.masked_fill_(_after(ends - 1, width), -torch.inf)


def _readings(ends: Tensor, own: Own, picked: Tensor) -> list[Reading]:
    """Each request's picks in order, then its newest row, repeated to whole blocks."""
    top = picked.shape[1]
    rows = own.newest.unsqueeze(1).repeat(1, (top // KEY_BLOCK + 1) * KEY_BLOCK)
    rows[:, :top] = picked
    absent = _after(ends[own.rows].clamp(max=top), rows.shape[1])
    return [Reading(tiles=Whole(first=own.first, rows=rows, absent=absent), cache=own.part.residency.cache)]


def _after(places: Tensor, width: int) -> Tensor:
    """Which of `width` places are behind each of `places`, bool (places, width)."""
    return torch.arange(width, device=places.device) > places.unsqueeze(1)

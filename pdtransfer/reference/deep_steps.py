"""Decode steps of the deep model: each request's row attends to all of its keys at once.

On a card a step is hundreds of kernels, which are the CPU's time to launch. So all that differs between two steps of a
shape, whose requests and positions they are, is in tensors; of a shape that comes often everything is captured, swap-in
and attention and logits alike, and a step is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import KEY_BLOCK
from .batch import Batch, Keys, Reading, Whole
from .capture import Captures, captured
from .indexer import IndexCache, IndexerMath, Queries
from .projection import Layer
from .residency import Begun, Part, Tables, reach
from .steps import Own, PickedKeys, Step
from .stream import Within

SHAPES_MAX = 32  # the latest ones
WORTH = 3  # steps of a shape: a capture takes as long as one or two of them
KEYS_TOGETHER = 1 << 18  # gathered or scored at once: beyond, memory is what it costs


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step is told by, beside its shape."""

    rows: Tensor  # Step.rows
    begun: list[Begun]  # of each part
    index: list[Tensor]  # one (requests, 2, n) of the index cache, where there is any

    def __iter__(self) -> Iterator[Tensor]:
        return chain((self.rows,), *self.begun, self.index)

    def copy(self) -> _Inputs:
        begun = [Begun(newest.clone(), tables.clone()) for newest, tables in self.begun]
        return _Inputs(self.rows.clone(), begun, [each.clone() for each in self.index])


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    logits: Tensor
    spans: list[Within]


class DeepSteps:
    """`run` takes a batch through the model, to logits of all its rows."""

    def __init__(
        self,
        run: Callable[[Batch], Tensor],
        device: torch.device,
        *,
        top: int,
        indexer: IndexerMath | None,
        graphs: bool,
    ) -> None:
        self._run, self._device, self._top, self._indexer = run, device, top, indexer
        self._tables = Tables()  # of the index
        self._captures: Captures[_Captured] | None = Captures(SHAPES_MAX, WORTH) if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def logits(self, step: Step) -> Tensor:
        """As Transformer.step."""
        inputs = self._inputs(step)
        if self._captures is None:
            return self._made(step, inputs)
        shape = _shape(step, inputs)
        if (known := self._captures.get(shape)) is not None:
            for own, given in zip(known.inputs, inputs, strict=True):
                own.copy_(given)
            known.graph.replay()
            step.marks.replayed(known.spans, step.parts[-1].rooms)  # hot ones come last, of others nothing is told
            return known.logits
        if not self._captures.due(shape):
            return self._made(step, inputs)
        with self._captures.aside():
            logits = self._made(step, inputs)
            own = inputs.copy()
            with step.marks.captured() as spans, captured(self._pool) as graph:
                made = self._made(step, own)
        self._captures.keep(shape, _Captured(graph, own, made, spans))
        return logits

    def _inputs(self, step: Step) -> _Inputs:
        index = [] if step.index is None else [self._tables.of(step.index_rows, max(step.positions) + 1)]
        return _Inputs(step.rows(self._device), step.begin(), index)

    def _made(self, step: Step, inputs: _Inputs) -> Tensor:
        """Queues the step, for whichever requests and positions the inputs say."""
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
    """Steps for which it is equal are the same work."""
    runs = () if step.index is not None else tuple(run for part in step.parts for run in _runs(part))
    return tuple(part.residency for part in step.parts), tuple(each.shape for each in inputs), runs


class _Run(NamedTuple):
    """Neighbouring rows of a part whose keys are gathered together."""

    first: int
    end: int
    width: int  # keys of each


def _runs(part: Part) -> list[_Run]:
    runs: list[_Run] = []
    at = 0
    for width, group in groupby(reach(position + 1) for position in part.positions):
        end = at + len(list(group))
        together = max(1, KEYS_TOGETHER // width)
        runs += [_Run(first, min(first + together, end), width) for first in range(at, end, together)]
        at = end
    return runs


class _Every:
    """The batch.Keys of a step that attends to all that it may, of which one residency has everything."""

    def __init__(self, own: Own, positions: Tensor) -> None:
        self._own, self._positions = own, positions
        self.readings: Sequence[Reading] = [self._reading(run) for run in _runs(own.part)]

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        pass

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        self._own.write(layer, kept)

    def _reading(self, run: _Run) -> Reading:
        some = slice(run.first, run.end)
        tables = self._own.tables[some, : run.width]
        absent = _after(self._positions[some], run.width)
        # What is not there may be anything, also NaN, which no mask undoes.
        rows = torch.where(absent, tables[:, :1], tables)
        return Reading(tiles=Whole(first=run.first, rows=rows, absent=absent), cache=self._own.part.residency.cache)


def _scores(index: IndexCache, tables: Tensor, ends: Tensor, layer: int, asked: Queries) -> Tensor:
    """As indexer.scores, of rows in `tables` (requests, 2, n); bits may depend on what is scored together."""
    count, _, width = tables.shape
    found = asked.heads.new_empty(count, width)
    together = max(1, KEYS_TOGETHER // width)
    for first in range(0, count, together):
        some = slice(first, min(first + together, count))
        keys, scales = index.read(layer, tables[some].transpose(0, 1).reshape(2, -1))
        each = asked.heads[some] @ keys.view(-1, width, keys.shape[1]).transpose(1, 2)
        summed = each.relu_().mul_(asked.shares[some].unsqueeze(-1)).sum(1)
        torch.mul(summed, scales.view(-1, width), out=found[some])
    return found.masked_fill_(_after(ends - 1, width), -torch.inf)


def _readings(ends: Tensor, own: Own, picked: Tensor) -> list[Reading]:
    """Each request's picks in order, and its newest row; that again in whole blocks."""
    top = picked.shape[1]
    rows = own.newest.unsqueeze(1).repeat(1, (top // KEY_BLOCK + 1) * KEY_BLOCK)
    rows[:, :top] = picked
    absent = _after(ends[own.rows].clamp(max=top), rows.shape[1])
    return [Reading(tiles=Whole(first=own.first, rows=rows, absent=absent), cache=own.part.residency.cache)]


def _after(places: Tensor, width: int) -> Tensor:
    """Of `width` places those behind each of these, bool (places, width)."""
    return torch.arange(width, device=places.device) > places.unsqueeze(1)

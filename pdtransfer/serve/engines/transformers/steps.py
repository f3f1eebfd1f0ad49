"""Decode steps of a batch. On a GPU a step whose shape comes again is one CUDA graph: transformers launches a thousand
kernels a step, and launching takes longer than computing.

Shapes are few, since batches are filled up to rounded sizes and the keys to rounded numbers of tokens. What fills up a
batch is its first request once more, which writes the same rows; what fills up the keys is masked.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....hisparse.capture import Captures, captured
from ....hisparse.hot_requests import HotRequests
from ....kernels.stream import CapturedSpan, DeviceSpans, upload
from .layers import WINDOW
from .paged import PagedModel, PagedRows, Places

log = logging.getLogger(__name__)

GRAPHS_MAX, GRAPH_WORTH = 32, 3  # graphs kept at once, and steps of a shape before it gets one
KEYS_STEP = 256  # the fewest keys by which a shape grows; longer ones grow by a quarter

Stepped: TypeAlias = tuple[int, int, Mapping[str, NDArray[np.int64]]]
"""A request of a step: its number, its prompt's tokens, and its slots by component."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMade:
    """Of each request: logits (B, vocabulary) in float32, whether all are finite (B,), and the first of the highest
    (B,)."""

    logits: Tensor
    finite: Tensor
    likeliest: Tensor

    def first(self, count: int) -> StepMade:
        """Of the first `count` requests."""
        return StepMade(self.logits[:count], self.finite[:count], self.likeliest[:count])


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests of one forward pass, with their slots on the device, by component (B, n). Slots that a shorter one lacks
    are 0, and not read. `inputs` are their last ids and positions, (2, B)."""

    rooms: tuple[int, ...]
    keys: int  # to attend to, the masked ones included; 0: as many as the longest request has
    inputs: Tensor
    slots: dict[str, Tensor]
    begins: Tensor
    ring: Tensor
    places: Places | None = None  # of HiSparse requests

    def take(self, other: _Batch) -> None:
        """Takes the requests of a batch of the same shape."""
        self.rooms = other.rooms
        for name, indices in self.slots.items():
            indices.copy_(other.slots[name])
        self.begins.copy_(other.begins)
        self.ring.copy_(other.ring)


@dataclass(slots=True)
class _Graph:
    """A captured step over its own batch."""

    graph: torch.cuda.CUDAGraph
    batch: _Batch
    made: StepMade
    spans: list[CapturedSpan]


class DecodeSteps:
    """The steps of one decode engine. With `hot`, of its HiSparse requests."""

    def __init__(
        self, model: PagedModel, device: torch.device, *, graphs: bool, hot: HotRequests | None = None,
        batch_max: int = 1 << 30, spans: DeviceSpans | None = None,
    ) -> None:  # fmt: skip
        self._model, self._device, self._hot, self._batch_max = model, device, hot, batch_max
        self._spans = spans or DeviceSpans(None, device)
        self._batch: _Batch | None = None
        self._graphs: Captures[_Graph] | None = Captures(GRAPHS_MAX, GRAPH_WORTH) if graphs else None
        self._pool: Any = None  # memory of all graphs: only one runs at once

    @property
    def rows(self) -> PagedRows:
        """The arena."""
        return self._model.rows

    def step(self, requests: Sequence[Stepped], *, ids: Sequence[int], positions: Sequence[int]) -> StepMade:
        """Computes each request's last id at its position. What it returns is valid until the next step."""
        size, keys = len(requests), max(positions) + 1
        if self._graphs is not None:
            size, keys = min(rounded_batch(size), self._batch_max), rounded_keys(keys)
        rooms = tuple(room for room, *_ in requests)
        places = None
        if self._hot is not None:
            count = 0 if self._graphs is None else size
            places = Places(self._hot.begin(rooms, positions, count), self._hot.place)
        result = self._computed(requests, ids, positions, places, size, keys)
        if self._hot is not None:
            self._hot.back_up()
        return result.first(len(requests))

    def _computed(
        self, requests: Sequence[Stepped], ids: Sequence[int], positions: Sequence[int], places: Places | None,
        size: int, keys: int,
    ) -> StepMade:  # fmt: skip
        """Of a batch of `size`, each request with `keys` tokens at most."""
        more, rooms = size - len(requests), tuple(room for room, *_ in requests)
        inputs = torch.tensor([[*values, *[values[0]] * more] for values in (ids, positions)])
        batch = self._batch
        if batch is None or batch.rooms != rooms or (self._graphs is not None and batch.keys != keys):
            batch = self._batch = self._batched(rooms, [*requests, *[requests[0]] * more], keys)
        batch.places = places
        if self._graphs is None:
            batch.inputs = upload(inputs, self._device)
            return computed(self._model, batch, keys)
        shape = (keys, *(indices.shape for indices in batch.slots.values()))
        kept = self._graphs.get(shape)
        if kept is None and self._graphs.due(shape):
            kept = self._capture(shape, batch)
        if kept is None:
            batch.inputs = upload(inputs, self._device)
            return computed(self._model, batch, keys)
        if kept.batch.rooms != rooms:
            kept.batch.take(batch)
        kept.batch.inputs.copy_(upload(inputs, self._device))
        kept.graph.replay()
        self._spans.replayed(kept.spans, rooms)
        return kept.made

    def _batched(self, rooms: tuple[int, ...], requests: Sequence[Stepped], keys: int) -> _Batch:
        tables: dict[str, Tensor] = {}
        window = self._model.window
        for name in requests[0][2]:
            width = max(len(slots[name]) for *_, slots in requests)
            if self._graphs is not None:
                width = window if name == WINDOW else keys
            table = np.zeros((len(requests), width), np.int64)
            for row, (*_, slots) in zip(table, requests, strict=True):
                indices = slots[name][:width]
                row[: len(indices)] = indices
            tables[name] = upload(torch.as_tensor(table), self._device)
        begins = [prompt - min(prompt, window) if window else 0 for _, prompt, _ in requests]
        ring = [len(slots[WINDOW]) if window else 1 for *_, slots in requests]
        begin, rings = (upload(torch.tensor(counts), self._device) for counts in (begins, ring))
        inputs = torch.zeros(2, len(requests), dtype=torch.int64, device=self._device)
        return _Batch(rooms, keys, inputs, tables, begin, rings)

    def _capture(self, shape: Any, like: _Batch) -> _Graph | None:
        """The graph of a step of this batch's shape, which computes nothing yet. None, for good, if the model does what
        no graph can hold, such as waiting for the GPU."""
        assert self._graphs is not None
        batch = _Batch((), like.keys, like.inputs.clone(), {}, like.begins.clone(), like.ring.clone())
        batch.slots = {name: indices.clone() for name, indices in like.slots.items()}
        batch.places = like.places  # tensors that are the same in each step
        try:
            with self._graphs.side_stream(), captured(self._pool) as graph, self._spans.captured() as spans:
                result = computed(self._model, batch, batch.keys)
        except RuntimeError as error:
            log.warning("decode steps are launched kernel by kernel: %s", str(error).splitlines()[0])
            self._graphs = None
            self._batch = None
            return None
        self._pool = graph.pool()
        kept = _Graph(graph, batch, result, spans)
        self._graphs.keep(shape, kept)
        return kept


def computed(model: PagedModel, batch: _Batch, keys: int) -> StepMade:
    """One forward pass over `batch.inputs`, of which no request has more than `keys` tokens."""
    ids, positions = batch.inputs
    logits = model.step(
        ids, batch.slots, positions, last=keys, begins=batch.begins, ring=batch.ring, places=batch.places
    )
    return StepMade(logits, torch.isfinite(logits).all(-1), first_highest(logits))


def first_highest(logits: Tensor) -> Tensor:
    """The first of the highest logits of each row (B, vocabulary), as `pick` has it; argmax may return any of them."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1]).amin(-1)


def rounded_batch(requests: int) -> int:
    """Powers of two, and from 8 on multiples of 8."""
    return 1 << (requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8


def rounded_keys(keys: int) -> int:
    """Multiples of KEYS_STEP, and from four times that on of a quarter of the power of two below."""
    step = max(KEYS_STEP, (1 << (keys.bit_length() - 1)) // 4)
    return -(-keys // step) * step

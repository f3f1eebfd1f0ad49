"""Layers of a short prompt as CUDA graphs, one a layer: launched one by one they keep the CPU longer than the card.

A row count that comes a second time is captured, all layers of it; prompts of so many rows are copied into what the
graphs read, and each layer is one launch. A layer's event still follows its own graph, so layers leave as before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention import Tiles
from .cache import Cache
from .capture import captured
from .model import Batch, EveryKey, Reading
from .projection import Layer

ROWS_MAX = 2_048  # above, the card is busy for longer than the CPU
SIZES_MAX = 16  # row counts, the latest ones

Run = Callable[[Tensor, Batch, int], None]
"""One layer over (rows, width), in place."""


class _Keys:
    """The model.Keys of a prompt that begins here and ends in its last block: padding repeats the last row."""

    def __init__(self, cache: Cache, targets: Tensor, own: Tensor, tiles: Tiles) -> None:
        self._cache, self._targets, self._own = cache, targets, own
        self.readings: Sequence[Reading] = [Reading(tiles=tiles, cache=cache)]

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        pass

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        for kind, rows in kept.items():
            self._cache.write(kind, layer, self._targets, rows.index_select(0, self._own))


@dataclass(slots=True, eq=False)
class _Size:
    """What the graphs of one row count read and write, and which batch is in it."""

    batch: Batch  # of the buffers below
    x: Tensor
    rows: Tensor  # of the keys
    targets: Tensor
    own: Tensor
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list[torch.cuda.CUDAGraph])
    holder: Batch | None = None

    def load(self, x: Tensor, batch: Batch, keys: EveryKey) -> None:
        """Takes a prompt's first chunk."""
        end = batch.own.stop
        self.holder = batch
        self.x.copy_(x)
        self.batch.positions.copy_(batch.positions)
        self.rows.copy_(batch.keys.readings[0].tiles.rows[0, : len(x)])
        self.targets[:end] = keys.targets
        self.targets[end:] = keys.targets[-1]
        torch.arange(len(x), out=self.own)
        self.own.clamp_(max=end - 1)


class Graphs:
    """Takes batches through layers where it can."""

    def __init__(self, run: Run, layers: int) -> None:
        self._run, self._layers = run, layers
        self._sizes: OrderedDict[int, _Size] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._leaving: deque[tuple[torch.cuda.Event, _Size]] = deque()  # what may be running until the event fires
        self._stream: torch.cuda.Stream | None = None

    def layers(self, x: Tensor, batch: Batch, first: int, end: int) -> Tensor | None:
        """As the model's own; None where a batch is to be launched kernel by kernel."""
        size = self._sizes.get(len(x))
        if first == 0 and isinstance(batch.keys, EveryKey) and _fits(x, batch):
            size = size or self._captured(x, batch, batch.keys)
            if size is not None:
                self._sizes.move_to_end(len(x))
                size.load(x, batch, batch.keys)
        if size is None or size.holder is not batch:
            return None
        for number in range(first, end):
            size.graphs[number].replay()
        return size.x.clone()

    def _captured(self, x: Tensor, batch: Batch, keys: EveryKey) -> _Size | None:
        """None where it is the first prompt of so many rows, which makes the libraries ready for such."""
        rows = len(x)
        if rows not in self._seen:
            self._seen[rows] = None
            if len(self._seen) > 8 * SIZES_MAX:
                self._seen.popitem(last=False)
            return None
        size = _size_of(x, batch, keys.cache)
        size.load(x, batch, keys)
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(size.x, size.batch, 0)  # what libraries keep for a stream is made outside of any graph
            pool = torch.cuda.graph_pool_handle()
            for number in range(self._layers):
                with captured(pool) as graph:
                    self._run(size.x, size.batch, number)
                size.graphs.append(graph)
        torch.cuda.current_stream().wait_stream(stream)
        self._sizes[rows] = size
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        if len(self._sizes) > SIZES_MAX:
            event = torch.cuda.Event()
            event.record()
            self._leaving.append((event, self._sizes.popitem(last=False)[1]))
        return size


def _fits(x: Tensor, batch: Batch) -> bool:
    """Whether it is a prompt's first chunk, small enough, whose keys are its own rows."""
    readings = batch.keys.readings
    prompt = batch.tile_rows > 1 and len(readings) == 1 and len(readings[0].tiles.ends) == 1
    return prompt and len(x) <= ROWS_MAX and batch.own.start == 0 and readings[0].tiles.ends[0] == batch.own.stop


def _size_of(x: Tensor, batch: Batch, cache: Cache) -> _Size:
    tiles, count = batch.keys.readings[0].tiles, len(x)
    rows, targets, own = (torch.zeros(count, dtype=torch.int64, device=x.device) for _ in range(3))
    static = Tiles(first=0, depths=tiles.depths, bias=tiles.bias, sources=[rows], ends=[count])
    still = Batch(
        ids=batch.ids,
        positions=torch.zeros_like(batch.positions),
        own=slice(0, count),
        tile_rows=batch.tile_rows,
        tile_count=batch.tile_count,
        keys=_Keys(cache, targets, own, static),
    )
    return _Size(batch=still, x=torch.empty_like(x), rows=rows, targets=targets, own=own)

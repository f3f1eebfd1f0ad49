"""CUDA graphs for short prompts, one for each layer: launching single kernels takes longer than computing them.

When a row count comes for the second time, all layers are captured for it. Later prompts of that row count are copied
to the graphs' inputs, and each layer is one launch. A layer's event still follows its own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdtransfer.hisparse.capture import Captures, captured

from .attention import EveryKey, Reading, RowBatch, Tiles
from .cache import Cache
from .projection import Layer

ROWS_MAX = 2_048  # with more rows, computing takes longer than launching
SIZES_MAX = 16  # captured row counts
WORTH = 2  # prompts of a row count before a capture

Run = Callable[[Tensor, RowBatch, int], None]
"""One layer over (rows, width), in place."""


class _Keys:
    """The Keys of a prompt with a single chunk. Padding repeats the last row."""

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
    """The buffers and graphs of one row count."""

    batch: RowBatch  # refers to the buffers below
    x: Tensor
    rows: Tensor  # of the keys
    targets: Tensor
    own: Tensor
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list[torch.cuda.CUDAGraph])
    loaded: RowBatch | None = None  # the batch in the buffers

    def load(self, x: Tensor, batch: RowBatch, keys: EveryKey) -> None:
        """Copies a prompt's first chunk to the buffers."""
        end = batch.own.stop
        self.loaded = batch
        self.x.copy_(x)
        self.batch.positions.copy_(batch.positions)
        self.rows.copy_(_tiles(batch).rows[: len(x)])
        self.targets[:end] = keys.targets
        self.targets[end:] = keys.targets[-1]
        torch.arange(len(x), out=self.own)
        self.own.clamp_(max=end - 1)


class Graphs:
    """Runs layers by graph replay if possible."""

    def __init__(self, run: Run, layers: int) -> None:
        self._run, self._layers = run, layers
        self._sizes: Captures[_Size] = Captures(SIZES_MAX, WORTH)

    def layers(self, x: Tensor, batch: RowBatch, first: int, end: int) -> Tensor | None:
        """As Transformer.layers. Returns None if the batch must be launched kernel by kernel."""
        size = self._sizes.get(len(x))
        if first == 0 and isinstance(batch.keys, EveryKey) and _fits(x, batch):
            if size is None and self._sizes.due(len(x)):
                size = self._capture(x, batch, batch.keys)
            if size is not None:
                size.load(x, batch, batch.keys)
        if size is None or size.loaded is not batch:
            return None
        for number in range(first, end):
            size.graphs[number].replay()
        return size.x.clone()

    def _capture(self, x: Tensor, batch: RowBatch, keys: EveryKey) -> _Size:
        size = _size_of(x, batch, keys.cache)
        size.load(x, batch, keys)
        with self._sizes.side_stream():
            self._run(size.x, size.batch, 0)
            pool = torch.cuda.graph_pool_handle()
            for number in range(self._layers):
                with captured(pool) as graph:
                    self._run(size.x, size.batch, number)
                size.graphs.append(graph)
        self._sizes.keep(len(x), size)
        return size


def _fits(x: Tensor, batch: RowBatch) -> bool:
    """True if the batch is a small prompt's only chunk, whose keys are its own rows."""
    if len(x) > ROWS_MAX or batch.own.start or len(batch.keys.readings) > 1:
        return False
    return _tiles(batch).ends == [batch.own.stop]


def _tiles(batch: RowBatch) -> Tiles:
    tiles = batch.keys.readings[0].tiles
    assert isinstance(tiles, Tiles)
    return tiles


def _size_of(x: Tensor, batch: RowBatch, cache: Cache) -> _Size:
    tiles, count = _tiles(batch), len(x)
    rows, targets, own = (torch.zeros(count, dtype=torch.int64, device=x.device) for _ in range(3))
    static = Tiles(first=0, depths=tiles.depths, bias=tiles.bias, sources=[rows], ends=[count])
    buffers = RowBatch(
        ids=batch.ids,
        positions=torch.zeros_like(batch.positions),
        own=slice(0, count),
        tile_rows=batch.tile_rows,
        tile_count=batch.tile_count,
        keys=_Keys(cache, targets, own, static),
    )
    return _Size(batch=buffers, x=torch.empty_like(x), rows=rows, targets=targets, own=own)

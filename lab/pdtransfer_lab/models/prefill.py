"""The prefill side of the reference model: chunks of prompts into a paged pool, cell by cell.

Prefill attends to every key, even if decode will pick: with `top_k` it also computes the index's keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdtransfer.kernels.stream import DeviceSpans, Download, upload
from pdtransfer.serve.engine_api import EngineConfig, GpuMemory, Request, SharedMemory
from pdtransfer.serve.engines.shell.prefill import LastRow, Prompt, Report, Slots, layer_groups
from pdtransfer.serve.engines.shell.torch_memory import TensorPool

from .architecture import EngineOptions
from .attention import KEY_BLOCK, EveryKey, Keys, RowBatch, Tiles, causal_bias
from .cache import Cache
from .description import COMPONENT, INDEX, facts_of
from .indexer import IndexCache
from .model import Transformer, computing
from .numerics import BLOCK_ROWS, block_up
from .projection import Layer


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Where the rows of a prompt are."""

    index: Tensor  # (key blocks, KEY_BLOCK) int64 cache rows
    indexed: Tensor | None  # rows of the index cache, (2, tokens)


class _IndexedKeys:
    """Every key, and the index's key of each row, which decode steps read."""

    def __init__(
        self, every: EveryKey, model: Transformer, cache: IndexCache, targets: Tensor, positions: Tensor, own: slice
    ) -> None:
        assert model.indexer is not None
        self._indexer, self._cache, self._targets = model.indexer, cache, targets
        self._positions, self._own = positions, own
        self.readings, self.write = every.readings, every.write

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        if layer in self._cache.layers:
            keys = self._indexer.keys(weights, hidden, self._positions)
            self._cache.write(layer, self._targets, keys[self._own])


class ReferencePrefill:
    """A PrefillModel."""

    def __init__(self, config: EngineConfig, options: EngineOptions, model: Transformer) -> None:
        self._group, self._model = config.group, model
        self.facts = facts_of(config, model, options)
        ranks = config.group.ranks
        self._first, self._last = ranks.pp_rank == 0, ranks.pp_rank == ranks.pp_size - 1
        self._cells = layer_groups(model.shard.layers, options.layers_per_cell)
        self._pool = TensorPool(self.facts.description.memory_bytes, model.device)
        self.flat = self._pool.bytes.view(torch.float32)
        layouts = {component.name: component.layout for component in self.facts.description.components}
        self._cache = Cache(self.flat, layouts[COMPONENT], model.architecture, model.shard.kv_heads)
        self._index = IndexCache(self.flat, layouts[INDEX]) if INDEX in layouts else None
        self.spans = DeviceSpans(config.spans, model.device)

    @property
    def pool(self) -> SharedMemory | GpuMemory:
        return self._pool.memory

    def computing(self) -> AbstractContextManager[object]:
        return computing(self._model)

    def begin(self, request: Request, pool_slots: Slots, slots: Slots) -> PromptRows:  # noqa: ARG002
        tokens = len(request.prompt)
        return PromptRows(
            index=self._cache.index(slots[COMPONENT][:tokens], KEY_BLOCK).view(-1, KEY_BLOCK),
            indexed=self._index.index(slots[INDEX][:tokens], 1) if self._index else None,
        )

    def compute(self, prompt: Prompt[PromptRows], end: int, computed: Report) -> LastRow | None:
        batch, room = self._batch(prompt, end), prompt.request.room
        hidden = self._model.embed(batch) if self._first else self._from_previous_stage(batch)
        for layers in self._cells:
            with self.spans.span("compute", f"rows {prompt.done}-{end}", room=room, layer=layers[0]):
                hidden = self._model.layers(hidden, batch, *layers)
            computed(layers, self._pool.event())
        if not self._last:
            self._group.hand_on(Download(hidden).get().numpy())
            return None
        if end < len(prompt.request.prompt):
            return None
        row = (end - 1) % BLOCK_ROWS
        with self.spans.span("pick", "", room=room):
            return LastRow(Download(self._model.logits(hidden[-BLOCK_ROWS:])[row]))

    def _from_previous_stage(self, batch: RowBatch) -> Tensor:
        """The previous stage's hidden rows of the chunk."""
        hidden = np.empty((len(batch.ids), self._model.architecture.width), np.float32)
        self._group.take_over(hidden)
        return upload(torch.as_tensor(hidden), self._model.device)

    def _batch(self, prompt: Prompt[PromptRows], end: int) -> RowBatch:
        """Rows [done, end), in tiles that begin at multiples of BLOCK_ROWS of the prompt."""
        first = prompt.done // BLOCK_ROWS * BLOCK_ROWS
        rows = block_up(end - first)
        own = slice(prompt.done - first, end - first)
        ids = torch.zeros(rows, dtype=torch.int64)
        ids[own] = torch.tensor(prompt.request.prompt[prompt.done : end])
        positions = torch.arange(first, first + rows, device=self._model.device)
        bias = causal_bias(positions.view(-1, BLOCK_ROWS))
        depths = [position // KEY_BLOCK for position in range(first, first + rows, BLOCK_ROWS)]
        together = self._model.tiles_together
        tiles = [
            Tiles(
                first=offset,
                depths=depths[offset : offset + together],
                bias=bias[offset : offset + together],
                sources=[
                    prompt.state.index[block] for block in range(depths[min(offset + together, len(depths)) - 1] + 1)
                ],
                ends=[end],
            )
            for offset in range(0, len(depths), together)
        ]
        keys: Keys = EveryKey(self._cache, prompt.state.index.view(-1)[prompt.done : end], tiles)
        if self._index is not None and prompt.state.indexed is not None:
            keys = _IndexedKeys(
                keys, self._model, self._index, prompt.state.indexed[:, prompt.done : end], positions, own
            )
        return RowBatch(
            ids=upload(ids, self._model.device),
            positions=positions,
            own=own,
            tile_rows=BLOCK_ROWS,
            tile_count=len(depths),
            keys=keys,
        )

"""Prefill of a checkpoint: chunks of prompts into a paged pool, reported layer by layer on a GPU."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from ....kernels.stream import DeviceSpans, Download, upload
from ...engine_api import EngineConfig, GpuMemory, Request, SharedMemory
from ..shell.prefill import LastRow, Prompt, Report, Slots, layer_groups
from ..shell.torch_memory import TensorPool
from .checkpoint import Checkpoint, ModelOptions
from .layers import describe
from .paged import PagedModel

PoolSlots: TypeAlias = dict[str, Tensor]
"""Of the tokens of a prompt, by component, on the device."""


class CheckpointPrefill:
    """A PrefillModel.

    The pool has a row of each token also in layers with a window: later tokens of the prompt attend to them.
    """

    def __init__(self, config: EngineConfig, options: ModelOptions, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.facts = checkpoint.facts(
            options,
            describe(
                config, checkpoint.shapes, name=checkpoint.name, digest=checkpoint.digest, window_slots=0, hbm=False,
                context_tokens=checkpoint.context_tokens,
            ),
        )  # fmt: skip
        self._pool = TensorPool(self.facts.description.memory_bytes, checkpoint.device)
        self.memory = self._pool.bytes
        self._model = PagedModel(checkpoint, self.memory, self.facts.description.components)
        every = 1 if checkpoint.device.type == "cuda" else 0
        self._cells = layer_groups([shape.layer for shape in checkpoint.shapes], options.layers_per_cell or every)
        self.spans = DeviceSpans(config.spans, checkpoint.device)

    @property
    def pool(self) -> SharedMemory | GpuMemory:
        """The pool's memory."""
        return self._pool.memory

    def computing(self) -> AbstractContextManager[object]:
        """On the thread that is about to compute."""
        return self._checkpoint.computing()

    def begin(self, request: Request, pool_slots: Slots, slots: Slots) -> PoolSlots:  # noqa: ARG002
        """The slots of the whole prompt."""
        tokens, device = len(request.prompt), self._checkpoint.device
        return {name: upload(torch.as_tensor(taken[:tokens]), device) for name, taken in pool_slots.items()}

    def compute(self, prompt: Prompt[PoolSlots], end: int, computed: Report) -> LastRow | None:
        """Computes tokens [done, end) through all layers."""
        ids, done, cells = prompt.request.prompt, prompt.done, deque(self._cells)

        def entered(layer: int) -> None:
            """All layers before this one are computed, or queued on the GPU."""
            while cells and cells[0][1] <= layer:
                computed(cells.popleft(), self._pool.event())

        with self.spans.span("compute", f"rows {done}-{end}", room=prompt.request.room):
            chunk = upload(torch.as_tensor(ids[done:end]), self._checkpoint.device)
            logits = self._model.chunk(chunk, prompt.state, done=done, on_layer=entered)
        entered(self._cells[-1][1])
        return LastRow(Download(logits)) if end == len(ids) else None

"""The decode side of the reference model: keys are read from the arena or the device pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.hisparse.hot_requests import HotRequests
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.stream import DeviceSpans, Download
from pdtransfer.layout.geometry import Int64s
from pdtransfer.serve.engine_api import EngineConfig, GpuMemory, Request
from pdtransfer.serve.engines.shell.decode import Generating, StepResult, hot_capacity
from pdtransfer.serve.engines.shell.first_token import FirstToken
from pdtransfer.serve.engines.shell.torch_memory import arena_tensors

from .architecture import EngineOptions
from .attention import KEY_BLOCK
from .cache import Cache
from .description import COMPONENT, INDEX, facts_of
from .hot import HotResidency
from .indexer import IndexCache
from .model import Transformer, computing
from .steps import AllResident, Step, StepPart


@dataclass(frozen=True, slots=True, eq=False)
class AnswerRows:
    """Where the rows of a landed request are."""

    landed: Cache  # with its KV
    rows: Tensor  # int64 cache rows by position, growth included, whole key blocks
    indexed: Tensor | None  # rows of the index cache, (2, whole key blocks)


class ReferenceDecode:
    """A DecodeModel."""

    def __init__(self, config: EngineConfig, options: EngineOptions, model: Transformer) -> None:
        self._config, self._model = config, model
        self.capacity = hot_capacity(config, options.top_k)
        self.facts = facts_of(config, model, options)
        self._index: IndexCache | None = None
        self._resident: AllResident | None = None
        self._hot_rows: HotResidency | None = None
        self.spans = DeviceSpans(config.spans, model.device)

    @property
    def hot(self) -> HotRequests | None:
        return None if self._hot_rows is None else self._hot_rows.requests

    def computing(self) -> AbstractContextManager[object]:
        return computing(self._model)

    def attach(self, arena: memoryview, *, device_address: int, hbm: memoryview | GpuMemory | None) -> None:
        memories = arena_tensors(
            self.facts.description, self._model.device, arena, device_address=device_address, hbm=hbm
        )
        flat = memories["dram"].view(torch.float32)
        self.take(memories["hbm"].view(torch.float32) if "hbm" in memories else flat)
        if self._config.hisparse is not None and self.capacity is not None:
            device = flat.get_device() if flat.is_cuda else None
            layout = self.facts.description.components[0].layout
            host = Pool(layout=layout, address=flat.data_ptr(), device=device, host=flat.is_cuda)
            hot_cache = Cache(flat, layout, self._model.architecture, self._model.shard.kv_heads)
            self._hot_rows = HotResidency(
                self._config, self._config.hisparse, self.capacity, self._model, host, hot_cache, self.spans
            )

    def take(self, flat: Tensor) -> None:
        """Decodes dense requests from this memory, which the model's device reads and writes."""
        assert self._resident is None, "attach is called once"
        layouts = {component.name: component.layout for component in self.facts.description.components}
        sizes, heads = self._model.architecture, self._model.shard.kv_heads
        self._resident = AllResident(Cache(flat, layouts[COMPONENT], sizes, heads))
        if INDEX in layouts:
            self._index = IndexCache(flat, layouts[INDEX])

    def begin(self, request: Request, slots: dict[str, Int64s], first: FirstToken) -> AnswerRows:  # noqa: ARG002
        assert self._resident is not None, "attach comes before admit"
        hot = self._hot_rows if request.enable_hisparse else None
        landed = self._resident.cache if hot is None else hot.arena
        return AnswerRows(
            landed=landed,
            rows=landed.index(slots[COMPONENT], KEY_BLOCK),
            indexed=self._index.index(slots[INDEX], KEY_BLOCK) if self._index else None,
        )

    def step(self, running: list[Generating[AnswerRows]]) -> Sequence[StepResult]:
        running.sort(key=lambda answer: (answer.hot, answer.position))
        parts = [
            StepPart(
                residency=residency,
                rooms=[answer.request.room for answer in answers],
                positions=[answer.position for answer in answers],
                rows=[answer.state.rows for answer in answers],
                index=[answer.state.indexed for answer in answers if answer.state.indexed is not None],
            )
            for residency in (self._resident, self._hot_rows)
            if residency is not None
            and (answers := [answer for answer in running if answer.hot == (residency is self._hot_rows)])
        ]
        ids = [answer.ids[-1] for answer in running]
        logits = self._model.step(Step(ids=ids, parts=parts, index=self._index, spans=self.spans))
        if self._hot_rows is not None and any(answer.hot for answer in running):
            self._hot_rows.requests.back_up()
        return list(Download(logits).get().numpy())

    def kv_digest(self, answer: Generating[AnswerRows]) -> bytes:
        return self._model.whole_digest(self._digests(answer)) if self._model.digests else b""

    def _digests(self, answer: Generating[AnswerRows]) -> NDArray[np.uint8]:
        """Digests of the room's rows: by head, then of the index."""
        state, position = answer.state, answer.position
        heads = state.landed.digests(state.rows[:position])
        if self._index is None or state.indexed is None:
            return heads
        return np.concatenate((heads, self._index.digest(state.indexed[:, :position])[np.newaxis]))

"""The rows of HiSparse requests, as the reference model's steps read them."""

from __future__ import annotations

import torch
from torch import Tensor

from pdtransfer.hisparse.coordinator import Capacity
from pdtransfer.hisparse.hot_requests import HotRequests, HotShape, pool_slots
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.stream import DeviceSpans
from pdtransfer.serve.engine_api import EngineConfig, HiSparse

from .cache import Cache
from .description import kv_layout
from .model import Transformer
from .steps import BegunStep, StepPart


class HotResidency:
    """The steps.Residency of rooms that are offered to `requests`."""

    def __init__(
        self, config: EngineConfig, hisparse: HiSparse, capacity: Capacity, model: Transformer, host: Pool,
        arena: Cache, spans: DeviceSpans,
    ) -> None:  # fmt: skip
        """`host` and `arena` are views of the memory in which the requests' KV lands."""
        sizes = model.architecture
        self.arena, self._share = arena, sizes.index_share
        layout = kv_layout("layer_first", model, slots=pool_slots(hisparse), page_size=1)
        groups = [
            range(offset, min(offset + self._share, sizes.layers)) for offset in range(0, sizes.layers, self._share)
        ]
        shape = HotShape(
            layout=layout, groups=groups, top=sizes.top_k, tokens_max=min(config.slots, sizes.context_tokens)
        )
        self.requests = HotRequests(config.group, hisparse, capacity, shape, host, model.device, spans)
        self._cache = Cache(self.requests.memory.view(torch.float32), layout, sizes, model.shard.kv_heads)

    @property
    def cache(self) -> Cache:
        return self._cache

    def begin(self, part: StepPart) -> BegunStep:
        newest = self._cache.rows(self.requests.begin(part.rooms, part.positions))
        return BegunStep(newest, newest.new_empty(len(part.rooms), 0))

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:  # noqa: ARG002 -- the device has its own tables
        return self._cache.rows(self.requests.place(layer // self._share, picks))

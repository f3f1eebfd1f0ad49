"""HiSparse requests: their KV stays in the arena, and a step reads the rows that it picks in the hot pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....hisparse.coordinator import Capacity
from ....hisparse.hot_requests import HotRequests, HotShape, pool_slots
from ....kernels.pools import Pool
from ....kernels.stream import DeviceSpans
from ....layout.geometry import Int64s
from ....layout.layout import Component
from ...engine_api import EngineConfig
from .digests import total
from .options import KV, StampOptions, StampShard, kv_layout
from .rows import StampRows
from .stamps import Words


class StampHot:
    """The rooms of one engine that decode from the hot pool."""

    def __init__(self, config: EngineConfig, options: StampOptions, host: Component, capacity: Capacity) -> None:
        """`host` is the component of the arena."""
        assert config.hisparse is not None
        self._config, self._hisparse, self._options, self._host = config, config.hisparse, options, host
        self._capacity = capacity
        self.requests: HotRequests | None = None  # once the arena is attached

    def attach(self, arena: memoryview, spans: DeviceSpans) -> None:
        """Makes the hot pool for requests whose KV lands in this memory."""
        options, config = self._options, self._config
        shard = StampShard.of(options, config.group.ranks)
        layout = kv_layout("layer_first", options, shard, slots=pool_slots(self._hisparse), page_size=1)
        most = min(config.slots, options.context_tokens)
        shape = HotShape(layout=layout, groups=options.groups(), top=options.top_k, tokens_max=most)
        address = np.frombuffer(arena, np.uint8).ctypes.data
        host = Pool(layout=self._host.layout, address=address)
        self.requests = HotRequests(config.group, self._hisparse, self._capacity, shape, host, None, spans)
        self._rows = StampRows(self.requests.memory, layout, KV, options.seed)

    def write(self, rooms: Sequence[int], positions: Sequence[int], stamps: Words) -> None:
        """Begins a step of these rooms: writes the rows of their newest tokens, and stores them in the arena."""
        assert self.requests is not None
        newest = np.asarray(self.requests.begin(rooms, positions))
        self._rows.write(newest.astype(np.int64), stamps)
        self.requests.back_up()

    def read(self, group: int, layers: range, picks: Sequence[Int64s]) -> Words:
        """The digests of the rows that each room of the step picks in a group's layers, uint64 (rooms, heads)."""
        assert self.requests is not None
        positions = np.full((len(picks), self._options.top_k), -1, np.int32)
        for row, picked in zip(positions, picks, strict=True):
            row[: len(picked)] = picked
        slots = np.asarray(self.requests.place(group, positions)).astype(np.int64)
        # A position without a slot has -1: its room is refused, whatever is read for it.
        slots = np.maximum(slots, 0)
        sums = [self._rows.sums(row[: len(picked)], layers) for row, picked in zip(slots, picks, strict=True)]
        return np.stack([total(row_sums) for row_sums in sums])

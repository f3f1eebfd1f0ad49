"""Requests whose KV stays where it landed, in the arena, while a pool of the device holds their hot tokens.

Between two steps `turn` does what the scheduler says: who makes room, and who comes. In a step it is their Residency.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CapacityError, ConfigError
from ..hisparse.coordinator import Capacity, Coordinator, Placement
from ..hisparse.hot import HotPool
from ..hisparse.scheduler import Scheduler
from ..kernels.pools import Pool
from ..layout import Layout
from ..layouts import host_layout
from .base import EngineConfig, HiSparse, HotFigures
from .cache import Cache
from .hot_step import HotStep
from .marks import Marks, several
from .model import Transformer

_FIGURES_STEPS = 16


def capacity_of(config: EngineConfig, hisparse: HiSparse, top: int) -> Capacity:
    """What there is to share out. Raises ConfigError where no long request could ever run."""
    places = hisparse.hot_tokens
    if not top:
        raise ConfigError("enable_hisparse: the model attends to all tokens: give it the engine option top_k")
    if places < top:
        text = f"must be at least top_k {top}, the tokens of a request that a step reads"
        raise ConfigError(f"hot_tokens = {places}: {text}")
    if places + 1 > hisparse.device_slots:
        text = f"must be above hot_tokens {places}: a request has so many, and one for its newest token"
        raise ConfigError(f"device_slots = {hisparse.device_slots}: {text}")
    if hisparse.dense_slots < 1:
        raise ConfigError(f"dense_slots = {hisparse.dense_slots}: at least 1")
    if config.group.ranks.tp_size > 1:
        raise ConfigError(f"enable_hisparse: tp_size = {config.group.ranks.tp_size}: one rank serves it, alone")
    return Capacity(
        rows=config.batch_max,
        logical_tokens=config.slots,
        device_slots=hisparse.device_slots,
        hot=places,
        top_k=top,
        host_slots=config.slots,
    )


class Hot:
    """A residency.Residency for rooms that were offered to it, as long as they are `placed`."""

    def __init__(
        self, config: EngineConfig, hisparse: HiSparse, capacity: Capacity, model: Transformer, host: Pool,
        arena: Cache, marks: Marks,
    ) -> None:  # fmt: skip
        """`host` and `arena` are the same memory and layout, where the requests' KV lands."""
        self.arena, self._marks = arena, marks
        sizes = model.architecture
        layout = _device_layout(model, slots=hisparse.device_slots + 1)
        self._flat = torch.zeros(layout.end // 4, dtype=torch.float32, device=model.device)
        self._cache, self._row_bytes = Cache(self._flat, layout, sizes, model.shard.kv_heads), layout.row_bytes
        self._share = sizes.index_share
        groups = [range(at, min(at + self._share, sizes.layers)) for at in range(0, sizes.layers, self._share)]
        self._pool = HotPool(
            host,
            Pool(layout=layout, address=self._flat.data_ptr(), card=host.card),
            groups=groups,
            rows=capacity.rows,
            hot=capacity.hot,
            top=sizes.top_k,
            tokens_max=min(config.slots, sizes.context_tokens),
            spare=hisparse.device_slots,
        )
        self._step = HotStep(self._pool, model.device, rows=capacity.rows, groups=len(groups), top=sizes.top_k)
        # The daemon keeps the bound of the queue; one that it let in meanwhile is not to break here.
        most = hisparse.limits.hisparse_queue_max + capacity.rows
        limits = replace(hisparse.limits, hisparse_queue_max=most)
        self._scheduler = Scheduler(Coordinator(capacity), limits, policy=hisparse.policy)
        self._slots: dict[int, NDArray[np.int64]] = {}
        self._placed: dict[int, Placement] = {}
        self._stepping: list[int] = []  # rooms of the step that is under way
        self._retracts = self._steps = 0
        self._counted = self._pool.counters()
        self.figures = HotFigures()

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def idle(self) -> bool:
        """Whether no request is here, and all that they had has come back."""
        return self._scheduler.is_idle

    def offer(self, room: int, host_slots: NDArray[np.int64], *, tokens: int, growth: int) -> None:
        """It has landed, and waits for its turn. Raises ValueError for one that can never have it."""
        try:
            self._scheduler.offer(room, host_slots, tokens=tokens, growth=growth)
        except CapacityError as error:
            raise ValueError(str(error)) from error
        self._slots[room] = host_slots

    def placed(self, room: int) -> bool:
        """Whether the next step may have it."""
        return room in self._placed

    def turn(self) -> None:
        """Before a step: takes places from those that have to go, and gives them to the next in line."""
        while True:
            turn = self._scheduler.next(time.monotonic())
            for room in turn.retract:
                self._stop(room)
                self._scheduler.retract(room, after=self._pool.fence())
                self._retracts += 1
            for placement in turn.place:
                room = placement.request
                what, carried = ("preload", placement.tokens) if placement.preload else ("place", 0)
                with self._marks.span(
                    "swap-in", f"{what} {placement.tokens} tokens", room=room, byte_count=carried * self._row_bytes
                ):
                    self._pool.start(
                        placement.row, self._slots[room], placement.tokens, placement.device_slots, placement.preload
                    )
                self._placed[room] = placement
            if not turn.retract:
                return

    def begin(self, rooms: Sequence[int], positions: Sequence[int]) -> Tensor:
        self._stepping = list(rooms)
        return self._cache.rows(self._step.begin([self._placed[room].row for room in rooms], positions))

    def place(self, layer: int, picks: Tensor) -> Tensor:
        name, alone = several(self._stepping)
        with self._marks.span("swap-in", name, room=alone, layer=layer):
            slots = self._step.place(layer // self._share, picks)
        return self._cache.rows(slots)

    def stepped(self) -> None:
        """The step's rows are computed: sends them where the others are, and counts."""
        rooms, self._stepping = self._stepping, []
        if rooms:
            self._scheduler.stepped(rooms, after=self._step.back_up())

    def refused(self) -> list[int]:
        """Rooms of which a step has asked for what they have not: to be ended. Waits for the card."""
        wrong = set(np.flatnonzero(self._pool.refused.cpu().numpy()).tolist())
        return [room for room, placement in self._placed.items() if placement.row in wrong] if wrong else []

    def let(self, room: int, *, drop: bool = False) -> None:
        """The room has ended, or is given up: when this returns nothing touches its slots. Unknown ones are ignored."""
        if self._slots.pop(room, None) is None:
            return
        self._stop(room)
        after = self._pool.fence()
        self._scheduler.ended(room, drop=drop, after=after)
        after.wait()

    def count(self, *, thoroughly: bool = False) -> None:
        """Renews `figures` after a step: what the card counts each so many steps, since that waits for it."""
        self._steps += 1
        if thoroughly or self._steps % _FIGURES_STEPS == 0:
            self._counted = self._pool.counters()
        self.figures = HotFigures(
            running=len(self._placed),
            waiting=self._scheduler.waiting,
            retry_ms=self._scheduler.retry_ms,
            hits=self._counted.hits,
            misses=self._counted.misses,
            swapped_bytes=self._counted.swapped_bytes,
            preloaded_bytes=self._counted.preloaded_bytes,
            retracts=self._retracts,
            staging_copies=self._counted.staging_copies,
        )

    def _stop(self, room: int) -> None:
        placement = self._placed.pop(room, None)
        if placement is not None:
            self._pool.stop(placement.row)


def _device_layout(model: Transformer, *, slots: int) -> Layout:
    """Single tokens, since any may be hot; one layer's beside one another."""
    sizes = model.architecture
    return host_layout(
        "layer_first",
        kinds=sizes.kinds,
        layers=model.shard.layers,
        heads=model.shard.kv_heads,
        head_bytes=sizes.head_bytes,
        dtype=sizes.dtype,
        slots=slots,
        page_size=1,
    )

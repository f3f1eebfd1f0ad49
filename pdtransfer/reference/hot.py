"""Requests whose KV stays where it landed, in the arena, while a pool of the device holds their hot tokens.

Between two steps `turn` does what the scheduler says: who makes room, and who comes. In a step it is their Residency.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine_api import EngineConfig, HiSparse, HotFigures
from ..errors import CapacityError, ConfigError, WorldError
from ..hisparse.coordinator import Capacity, Coordinator, Placement
from ..hisparse.scheduler import Scheduler, Turn
from ..kernels.hot_pool import HotPool
from ..kernels.pools import Pool
from ..layout.layout import Layout
from ..layout.layout_builders import host_layout
from .cache import Cache
from .hot_step import HotStep
from .model import Transformer
from .residency import Begun, Part
from .stream import POLL_S, Fetched, Marks, several

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
        self._group, self._leads, self._rows = config.group, not config.group.ranks.tp_rank, capacity.rows
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
        """Before a step: takes places from those that have to go, and gives them to the next in line.

        Who these are the leader of a group alone decides, and says so where anybody waits for a place: else nothing
        changes. Every rank has rows and slots of its own, and uses them anew once nothing there uses them any more.
        """
        asked = len(self._slots) > len(self._placed)  # on every rank alike
        if self._leads:
            while self._do(turn := self._scheduler.next(time.monotonic())):
                self._retracts += len(turn.retract)
        running = self._led(self._placed) if asked else list(self._placed)
        if not self._leads:
            self._follow(running)

    def begin(self, part: Part) -> Begun:
        self._stepping = part.rooms
        slots = self._step.begin([self._placed[room].row for room in part.rooms], part.positions)
        newest = self._cache.rows(slots)
        return Begun(newest, newest.new_empty(len(part.rooms), 0))

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:  # noqa: ARG002 -- the device knows
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
        """Rooms of which a step has asked for what they have not: to be ended. Waits for the card. Raises WorldError
        where the ranks of a group do not run the same rooms, or one was refused on some of them."""
        found = np.full((2, self._rows), -1, np.int64)
        rooms = sorted(self._placed)
        found[0, : len(rooms)] = rooms
        found[1, : len(rooms)] = Fetched(self._pool.refused).get().numpy()[[self._placed[room].row for room in rooms]]
        for rank, theirs in enumerate(self._group.gather(found)):
            if not np.array_equal(theirs, found):
                raise WorldError(f"rank {rank} runs other HiSparse requests, or was refused other places")
        return found[0, found[1] > 0].tolist()

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

    def _do(self, turn: Turn) -> bool:
        """Whether another turn is to be asked for."""
        for room in turn.retract:
            self._stop(room)
            self._scheduler.retract(room, after=self._pool.fence())
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
        return bool(turn.retract)

    def _led(self, placed: Iterable[int]) -> list[int]:
        """Who is placed on the leader, who says so here."""
        said = np.full(self._rows, -1, np.int64)
        for at, room in enumerate(placed):
            said[at] = room
        leaders = self._group.gather(said)[0]
        return leaders[leaders >= 0].tolist()

    def _follow(self, running: list[int]) -> None:
        """Has these run and no others, as soon as what this rank still uses allows it."""
        while True:
            turn = self._scheduler.follow(running)
            self._do(turn)
            if self._placed.keys() == set(running):
                return
            if not (turn.retract or turn.place):
                time.sleep(POLL_S)

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

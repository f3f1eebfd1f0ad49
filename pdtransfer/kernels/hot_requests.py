"""Requests whose KV stays in the arena while a device pool holds their hot tokens, for any engine and dtype.

Between steps `turn` executes the scheduler's decisions: which requests leave the device pool, and which enter. The
engine reads and writes `memory`, which is laid out as it asked, in the slots that `begin` and `place` return.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CapacityError, ConfigError, WorldError
from ..handoff.events import Event
from ..hisparse.coordinator import Capacity, Coordinator, Placement
from ..hisparse.scheduler import Scheduler, SparseTurn
from ..hisparse.settings import HiSparse, HotFigures
from ..layout.layout import Layout
from ..wire import Ranks
from .capture import Replayed
from .hot_pool import HotPool
from .pools import Pool
from .stream import POLL_S, DeviceSpans, Download, span_of, upload

_FIGURES_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HotShape:
    """What a model's steps read. `layout` is of the device pool, with the planes of the host's, pages of one token,
    since any token may be hot, and `pool_slots` slots. Each of `groups` has layers that share the picks of an index, of
    which a step takes at most `top`."""

    layout: Layout
    groups: Sequence[range]
    top: int
    tokens_max: int  # of one request


class TensorRanks(Protocol):
    """The tensor-parallel ranks of one worker, as one of them sees them. All call `gather` in the same order."""

    @property
    def ranks(self) -> Ranks: ...

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns the parts of all ranks in the order of tp_rank; all have the same shape and dtype."""
        ...


def pool_slots(hisparse: HiSparse) -> int:
    """Slots of the device pool: the last one takes what no request has."""
    return hisparse.device_slots + 1


def capacity_of(hisparse: HiSparse, top: int, *, rows: int, slots: int) -> Capacity:
    """The capacity for hot requests: `rows` of them in one step, and `slots` tokens in the arena. Raises ConfigError if
    no long request could ever run."""
    places = hisparse.hot_tokens
    if places < top:
        text = f"must be at least top_k {top}, the tokens of a request that a step reads"
        raise ConfigError(f"hot_tokens = {places}: {text}")
    if places + 1 > hisparse.device_slots:
        text = f"must be above hot_tokens {places}: a request has so many, and one for its newest token"
        raise ConfigError(f"device_slots = {hisparse.device_slots}: {text}")
    if hisparse.dense_slots < 1:
        raise ConfigError(f"dense_slots = {hisparse.dense_slots}: at least 1")
    return Capacity(
        rows=rows, logical_tokens=slots, device_slots=hisparse.device_slots, hot=places, top_k=top,
        host_slots=slots,
    )  # fmt: skip


class HotRequests:
    """Offered rooms, which steps may run while they are `placed`."""

    def __init__(
        self, group: TensorRanks, hisparse: HiSparse, capacity: Capacity, shape: HotShape, host: Pool,
        device: torch.device, spans: DeviceSpans,
    ) -> None:  # fmt: skip
        """`host` is the memory in which the requests' KV lands."""
        self._spans, self._row_bytes = spans, shape.layout.row_bytes
        self._leaders = [group.start for group in shape.groups]
        self.memory = torch.zeros(shape.layout.end, dtype=torch.uint8, device=device)
        self._pool = HotPool(
            host, Pool(layout=shape.layout, address=self.memory.data_ptr(), card=host.card), groups=shape.groups,
            rows=capacity.rows, hot=capacity.hot, top=shape.top, tokens_max=shape.tokens_max,
            spare=pool_slots(hisparse) - 1,
        )  # fmt: skip
        self._step = HotStep(self._pool, device, rows=capacity.rows, groups=len(shape.groups), top=shape.top)
        # The daemon enforces the queue's bound; a room that it admits meanwhile must not fail here.
        most = hisparse.limits.hisparse_queue_max + capacity.rows
        limits = replace(hisparse.limits, hisparse_queue_max=most)
        self._scheduler = Scheduler(Coordinator(capacity), limits, policy=hisparse.policy)
        self._slots: dict[int, NDArray[np.int64]] = {}
        self._placed: dict[int, Placement] = {}
        self._running: list[int] = []  # rooms of the current pass
        self._stepping: list[int] = []  # rooms of the current step
        self._after: Event | None = None  # its last backup
        self._group, self._leads, self._rows = group, not group.ranks.tp_rank, capacity.rows
        self._retracts = self._steps = self._preloaded_bytes = 0
        self._counted = self._pool.counters()
        self.figures = HotFigures()

    @property
    def idle(self) -> bool:
        """Whether there are no requests and all their resources are free."""
        return self._scheduler.is_idle

    def offer(self, room: int, host_slots: NDArray[np.int64], *, tokens: int, growth: int) -> None:
        """Queues a landed room. Raises ValueError for a room that can never be placed."""
        try:
            self._scheduler.offer(room, host_slots, tokens=tokens, growth=growth)
        except CapacityError as error:
            raise ValueError(str(error)) from error
        self._slots[room] = host_slots

    def placed(self, room: int) -> bool:
        """Whether the next step may run the room."""
        return room in self._placed

    def turn(self) -> None:
        """Called before a step: retracts rooms and places the next ones.

        The group's leader decides, and announces its decision if a room waits; otherwise nothing changes. Every rank
        has its own rows and slots and reuses them once its device no longer uses them.
        """
        waiting = len(self._slots) > len(self._placed)  # equal on every rank
        if self._leads:
            while self._do(turn := self._scheduler.next(time.monotonic())):
                self._retracts += len(turn.retract)
        running = self._from_leader(self._placed) if waiting else list(self._placed)
        if not self._leads:
            self._follow(running)

    def begin(self, rooms: Sequence[int], positions: Sequence[int], count: int = 0) -> Tensor:
        """Begins a pass over these rooms, which computes one token of each. With `count`, it is filled up to as many
        with the first room once more. Returns the device slots for these tokens' rows in all layers, int32 (rooms,); if
        filled up, in memory that is the same in each pass.
        """
        self._running = list(rooms)
        return self._step.begin([self._placed[room].row for room in rooms], positions, count)

    def place(self, group: int, picks: Tensor) -> Tensor:
        """Finds the positions that an index has picked, (rooms, at most top) with -1 for none, for a group's layers.

        Returns their device slots int32 of that shape: with -1 for none, and for a position that makes its room one of
        the `refused`. Valid until the next call.
        """
        name, alone = span_of(self._running)
        with self._spans.span("swap-in", name, room=alone, layer=self._leaders[group]):
            return self._step.place(group, picks)

    def back_up(self) -> None:
        """Called after each pass: stores its rooms' new rows in the arena."""
        self._after = self._step.back_up()
        self._stepping += self._running

    def stepped(self) -> None:
        """Called after all passes of a step."""
        rooms, self._stepping = self._stepping, []
        if rooms:
            self._scheduler.stepped(rooms, after=self._after)

    def refused(self) -> list[int]:
        """Rooms for which a step picked a position without a slot; they must end. Waits for the card.

        Raises WorldError if the ranks of a group run different rooms or refuse different ones.
        """
        found = np.full((2, self._rows), -1, np.int64)
        rooms = sorted(self._placed)
        found[0, : len(rooms)] = rooms
        found[1, : len(rooms)] = Download(self._pool.refused).get().numpy()[[self._placed[room].row for room in rooms]]
        for rank, other in enumerate(self._group.gather(found)):
            if not np.array_equal(other, found):
                raise WorldError(f"rank {rank} runs other HiSparse requests, or refused other ones")
        return found[0, found[1] > 0].tolist()

    def release(self, room: int, *, drop: bool = False) -> None:
        """Ends a room. When this returns, nothing uses its slots. Unknown rooms are ignored."""
        if self._slots.pop(room, None) is None:
            return
        self._stop(room)
        after = self._pool.fence()
        self._scheduler.ended(room, drop=drop, after=after)
        after.wait()

    def count(self, *, exact: bool = False) -> None:
        """Updates `figures` after a step. Reads the card's counters, which waits, every _FIGURES_STEPS steps."""
        self._steps += 1
        if exact or self._steps % _FIGURES_STEPS == 0:
            self._counted = self._pool.counters()
        counted = self._counted
        self.figures = HotFigures(
            running=len(self._placed), waiting=self._scheduler.waiting, retry_ms=self._scheduler.retry_ms,
            hits=counted.hits, misses=counted.misses, swapped_bytes=counted.swapped_bytes,
            preloaded_bytes=self._preloaded_bytes, admission_bytes=self._pool.admission_bytes, retracts=self._retracts,
        )  # fmt: skip

    def _do(self, turn: SparseTurn) -> bool:
        """Executes a turn. Returns whether the scheduler must be asked for another."""
        for room in turn.retract:
            self._stop(room)
            self._scheduler.retract(room, after=self._pool.fence())
        for placement in turn.place:
            room = placement.request
            what, loaded = ("preload", placement.tokens) if placement.preload else ("place", 0)
            with self._spans.span(
                "swap-in", f"{what} {placement.tokens} tokens", room=room, byte_count=loaded * self._row_bytes
            ):
                self._pool.start(
                    placement.row, self._slots[room], placement.tokens, placement.device_slots, placement.preload
                )
            self._placed[room] = placement
            self._preloaded_bytes += loaded * self._row_bytes
        return bool(turn.retract)

    def _from_leader(self, placed: Iterable[int]) -> list[int]:
        """Exchanges the placed rooms and returns the leader's."""
        own = np.full(self._rows, -1, np.int64)
        for at, room in enumerate(placed):
            own[at] = room
        leaders = self._group.gather(own)[0]
        return leaders[leaders >= 0].tolist()

    def _follow(self, running: list[int]) -> None:
        """Places exactly these rooms, once this rank's device no longer uses the resources that they need."""
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


class HotStep:
    """The device's work for a step of hot rooms: `begin`, then `place` for each group of layers, then `back_up`.

    Each piece is captured in a graph once and replayed. Its shapes are constant, padded to the number of rows. In a
    capture of the whole step the pieces are queued one by one.
    """

    def __init__(self, pool: HotPool, device: torch.device, *, rows: int, groups: int, top: int) -> None:
        self._pool, self._row_count = pool, rows
        self._host = torch.zeros(3 * rows + 1, dtype=torch.int32)
        self._host[:rows] = -1
        inputs = self._inputs = self._host.to(device)
        # Replayed graphs read these. `like` has the request that each one of a filled up pass repeats.
        own, lengths, real = inputs[:rows], inputs[rows : 2 * rows], inputs[-1:]
        self._like = inputs[2 * rows : -1]
        self._newest_filled = torch.zeros(rows, dtype=torch.int32, device=device)
        self._picks = torch.full((rows, top), -1, dtype=torch.int32, device=device)
        self._newest = Replayed(lambda: pool.newest(own, lengths, real=real), device)
        self._store = Replayed(lambda: pool.store(own, lengths, real=real), device)
        self._swap_in = [
            Replayed(lambda group=group: pool.swap_in(group, self._picks, lengths, own, real=real), device)
            for group in range(groups)
        ]
        self._requests, self._filled = 0, False

    def begin(self, rows: Sequence[int], lengths: Sequence[int], count: int = 0) -> Tensor:
        """Device slots int32 (requests,) of the newest tokens, for requests in `rows` with `lengths` tokens, filled up
        to `count` requests with the first one."""
        self._requests, self._filled = max(count, len(rows)), bool(count)
        table, most, real = self._host.numpy(), self._row_count, len(rows)
        table[:most], table[most:-1], table[-1] = -1, 0, real
        table[:real], table[most : most + real] = rows, lengths
        table[2 * most : 2 * most + real] = range(real)
        self._inputs.copy_(upload(self._host, self._inputs.device))
        newest = _tensor(self._newest())
        if self._filled:
            newest = torch.index_select(newest, 0, self._like, out=self._newest_filled)
        return newest[: self._requests]

    def place(self, group: int, picks: Tensor) -> Tensor:
        """Device slots int32 of the picks (requests, at most top), with -1 for -1. Valid until the next call."""
        width = picks.shape[1]
        self._picks[: self._requests, :width] = picks
        self._picks[: self._requests, width:] = -1
        slots = _tensor(self._swap_in[group]())
        if self._filled:
            slots = torch.index_select(slots, 0, self._like)
        return slots[: self._requests, :width]

    def back_up(self) -> Event:
        """Copies the newest rows to the host pool. Returns the event of its end."""
        self._store()
        return self._pool.fence()


def _tensor(array: Tensor | NDArray[np.int32]) -> Tensor:
    """The pool returns numpy arrays on the CPU."""
    return torch.as_tensor(array)

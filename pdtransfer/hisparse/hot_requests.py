"""Requests whose KV stays in the arena while a device pool holds their hot tokens, for any engine and dtype.

Between steps `turn` executes the scheduler's decisions: which requests leave the device pool, and which enter. The
engine reads and writes `memory`, which is laid out as it asked, in the slots that `begin` and `place` return.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CapacityError, ConfigError, WorldError
from ..handoff.events import Event
from ..kernels.pools import Pool
from ..kernels.stream import POLL_S, DeviceSpans, Download, span_of
from ..layout.layout import Layout
from ..wire import Ranks
from .coordinator import Capacity, Coordinator, Placement
from .hot_pool import HotPool
from .scheduler import Scheduler, SparseTurn
from .settings import HiSparse, HotFigures

if TYPE_CHECKING:
    import torch

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
        text = f"must be above hot_tokens {places}: a request has this many, and one for its newest token"
        raise ConfigError(f"device_slots = {hisparse.device_slots}: {text}")
    if hisparse.dense_slots < 1:
        raise ConfigError(f"dense_slots = {hisparse.dense_slots}: at least 1")
    return Capacity(
        rows=rows, logical_tokens=slots, device_slots=hisparse.device_slots, hot=places, top_k=top,
        host_slots=slots,
    )  # fmt: skip


class HotRowStep(Protocol):
    """The device's work for a step of hot rooms: `begin`, then `place` for each group of layers, and `back_up`, which
    may come first. Arrays are numpy's, or tensors."""

    def begin(self, rows: Sequence[int], lengths: Sequence[int], count: int = 0) -> Any:
        """Device slots int32 (requests,) of the newest tokens, for requests in `rows` with `lengths` tokens, filled up
        to `count` requests with the first one."""
        ...

    def place(self, group: int, picks: Any) -> Any:
        """Device slots int32 of the picks (requests, at most top), with -1 for -1. Valid until the next call."""
        ...

    def back_up(self) -> Event:
        """Copies the newest rows to the host pool. Returns the event of its end."""
        ...


class HotRequests:
    """Offered rooms, which steps may run while they are `placed`."""

    def __init__(
        self, group: TensorRanks, hisparse: HiSparse, capacity: Capacity, shape: HotShape, host: Pool,
        device: torch.device | None, spans: DeviceSpans,
    ) -> None:  # fmt: skip
        """`host` is the memory in which the requests' KV lands. With a `device` of torch's, arrays are its tensors;
        with None they are numpy's, and torch is not imported."""
        self._spans, self._row_bytes = spans, shape.layout.row_bytes
        self._leaders = [group.start for group in shape.groups]
        self.memory, address = _memory(shape.layout.end, device)
        self._pool = HotPool(
            host, Pool(layout=shape.layout, address=address, device=host.device), groups=shape.groups,
            rows=capacity.rows, hot=capacity.hot, top=shape.top, tokens_max=shape.tokens_max,
            spare=pool_slots(hisparse) - 1,
        )  # fmt: skip
        self._step = _step(self._pool, device, rows=capacity.rows, groups=len(shape.groups), top=shape.top)
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
        """True if there are no requests and all their resources are free."""
        return self._scheduler.is_idle

    def offer(self, room: int, host_slots: NDArray[np.int64], *, tokens: int, growth: int) -> None:
        """Queues a landed room. Raises ValueError for a room that can never be placed."""
        try:
            self._scheduler.offer(room, host_slots, tokens=tokens, growth=growth)
        except CapacityError as error:
            raise ValueError(str(error)) from error
        self._slots[room] = host_slots

    def placed(self, room: int) -> bool:
        """True if the next step may run the room."""
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

    def begin(self, rooms: Sequence[int], positions: Sequence[int], count: int = 0) -> Any:
        """Begins a pass over these rooms, which computes one token of each. With `count`, it is filled up to as many
        with the first room once more. Returns the device slots for these tokens' rows in all layers, int32 (rooms,); if
        filled up, in memory that is the same in each pass.
        """
        self._running = list(rooms)
        return self._step.begin([self._placed[room].row for room in rooms], positions, count)

    def place(self, group: int, picks: Any) -> Any:
        """Finds the positions that an index has picked, (rooms, at most top) with -1 for none, for a group's layers.

        Returns their device slots int32 of that shape: with -1 for none, and for a position that makes its room one of
        the `refused`. Valid until the next call.
        """
        name, alone = span_of(self._running)
        with self._spans.span("swap-in", name, room=alone, layer=self._leaders[group]):
            return self._step.place(group, picks)

    def back_up(self) -> None:
        """Called in each pass once its rooms' new rows are written: stores these in the arena."""
        self._after = self._step.back_up()
        self._stepping += self._running

    def stepped(self) -> None:
        """Called after all passes of a step."""
        rooms, self._stepping = self._stepping, []
        if rooms:
            self._scheduler.stepped(rooms, after=self._after)

    def refused(self) -> list[int]:
        """Rooms for which a step picked a position without a slot; they must end. Waits for the GPU.

        Raises WorldError if the ranks of a group run different rooms or refuse different ones.
        """
        refusals = np.full((2, self._rows), -1, np.int64)
        rooms = sorted(self._placed)
        refusals[0, : len(rooms)] = rooms
        refused: Any = self._pool.refused
        counts = refused if self._pool.device_pool.device is None else Download(refused).get().numpy()
        refusals[1, : len(rooms)] = counts[[self._placed[room].row for room in rooms]]
        for rank, theirs in enumerate(self._group.gather(refusals)):
            if not np.array_equal(theirs, refusals):
                raise WorldError(f"rank {rank} runs other HiSparse requests, or refused other ones")
        return refusals[0, refusals[1] > 0].tolist()

    def release(self, room: int, *, drop: bool = False) -> None:
        """Ends a room. When this returns, nothing uses its slots. Unknown rooms are ignored."""
        if self._slots.pop(room, None) is None:
            return
        self._stop(room)
        after = self._pool.fence()
        self._scheduler.ended(room, drop=drop, after=after)
        after.wait()

    def count(self, *, exact: bool = False) -> None:
        """Updates `figures` after a step. Reads the GPU's counters, which waits, every _FIGURES_STEPS steps."""
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
            verb, loaded = ("preload", placement.tokens) if placement.preload else ("place", 0)
            with self._spans.span(
                "swap-in", f"{verb} {placement.tokens} tokens", room=room, byte_count=loaded * self._row_bytes
            ):
                self._pool.start(placement.row, self._slots[room], placement.tokens, placement.device_slots)
            self._placed[room] = placement
            self._preloaded_bytes += loaded * self._row_bytes
        return bool(turn.retract)

    def _from_leader(self, placed: Iterable[int]) -> list[int]:
        """Exchanges the placed rooms and returns the leader's."""
        ours = np.full(self._rows, -1, np.int64)
        for row, room in enumerate(placed):
            ours[row] = room
        leaders = self._group.gather(ours)[0]
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


class HostStep:
    """The HotRowStep whose arrays are numpy's, with a pool of this process."""

    def __init__(self, pool: HotPool) -> None:
        self._pool, self._like = pool, np.zeros(0, np.int64)
        self._rows = self._lengths = np.zeros(0, np.int32)

    def begin(self, rows: Sequence[int], lengths: Sequence[int], count: int = 0) -> NDArray[np.int32]:
        self._rows, self._lengths = np.array(rows, np.int32), np.array(lengths, np.int32)
        # Which request each one of a filled up pass repeats.
        self._like = np.concatenate((np.arange(len(rows)), np.zeros(max(0, count - len(rows)), np.int64)))
        return self._pool.newest(self._rows, self._lengths)[self._like]

    def place(self, group: int, picks: NDArray[Any]) -> NDArray[np.int32]:
        selected = picks[: len(self._rows)]
        return self._pool.swap_in(group, selected, self._lengths, self._rows)[self._like]

    def back_up(self) -> Event:
        return self._pool.back_up(self._rows, self._lengths)


def _memory(byte_count: int, device: torch.device | None) -> tuple[Any, int]:
    """Zeroed bytes of the device, and their address there."""
    if device is None:
        memory = np.zeros(byte_count, np.uint8)
        return memory, memory.ctypes.data
    import torch

    tensor = torch.zeros(byte_count, dtype=torch.uint8, device=device)
    return tensor, tensor.data_ptr()


def _step(pool: HotPool, device: torch.device | None, *, rows: int, groups: int, top: int) -> HotRowStep:
    if device is None:
        return HostStep(pool)
    from .hot_step import HotStep

    return HotStep(pool, device, rows=rows, groups=groups, top=top)

"""One rule for who may have slots: first come, first served; nobody is admitted who could not grow to the end.

Rows include growth, so an admitted request never asks again. A request that the empty arena could not hold is refused
for ever; one that finds the queue full is refused with a hint. The head of the queue waits for slots, never for a peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArenaFullError
from ..limits import Limits
from .component_variants import labels
from .prefix import PrefixCache
from .slot_allocator import Holding


@dataclass(frozen=True, slots=True)
class Demand:
    """What a room needs: rows a component, growth included, and the bytes that will be in flight to it, less what
    those of its prompt's blocks need that are here already."""

    rows: tuple[int, ...]
    inflight_bytes: int
    keys: tuple[bytes, ...] = ()


class Pace:
    """How fast a queue moves while somebody waits in it: what a retry hint is made of."""

    def __init__(self) -> None:
        self._mean_ms = 0.0  # between two that left it
        self._left_at: float | None = None  # None while none wait: idle time says nothing of how fast a queue moves

    def left(self, now: float, *, waiting: bool) -> None:
        """One has left the queue; `waiting`: others are still there."""
        if self._left_at is not None:
            self._mean_ms += 0.1 * ((now - self._left_at) * 1e3 - self._mean_ms)
        self._left_at = now if waiting else None

    def rest(self) -> None:
        """Nobody waits."""
        self._left_at = None

    def retry_ms(self, queued: int) -> int:
        """When to ask again: the time in which the queue should have moved on by a tenth, at least."""
        return int(min(max(100.0, self._mean_ms * max(1, queued // 10)), 60_000.0))


class Admission:
    """The queue before the arena; how fast it moves makes the retry hint."""

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self._arena, self._cache, self._limits = cache.arena, cache, limits
        self._queue: OrderedDict[int, Demand] = OrderedDict()
        self.inflight_bytes = 0
        self._pace = Pace()
        self._stuck: tuple[object, ...] = ()  # what there was when the head found too little

    def __len__(self) -> int:
        return len(self._queue)

    def check(self, rows: Sequence[int], *, rooms: int) -> None:
        """Raises ArenaFullError for a request that may not even wait; `rooms` is how many this node has unended."""
        if not self._arena.fits(rows):
            names = labels(self._arena.components)
            wanted = {name: count for name, count in zip(names, rows, strict=True) if count}
            have = {name: free.slots for name, free in zip(names, self._arena.free, strict=True) if name in wanted}
            raise ArenaFullError(f"rows: {wanted} wanted, the whole arena has {have}", retry_ms=None)
        if rooms >= self._limits.rooms_max:
            raise ArenaFullError(f"rooms: {rooms} of rooms_max {self._limits.rooms_max}", retry_ms=self.retry_ms)
        if len(self._queue) >= self._limits.queue_max:
            raise ArenaFullError(
                f"queue: {len(self._queue)} of queue_max {self._limits.queue_max}", retry_ms=self.retry_ms
            )

    @property
    def retry_ms(self) -> int:
        """When it is worth asking again."""
        return self._pace.retry_ms(len(self._queue))

    def enqueue(self, room: int, demand: Demand) -> None:
        """Puts a room at the queue's end; each room is in it once."""
        assert room not in self._queue
        self._queue[room] = demand

    def withdraw(self, room: int) -> None:
        """Takes a room out of the queue; one that is not there is ignored."""
        self._queue.pop(room, None)
        if not self._queue:
            self._pace.rest()

    def head(self) -> int | None:
        """The room whose turn it is."""
        return next(iter(self._queue), None)

    def admit(self, now: float) -> Holding | None:
        """Slots for the head of the queue, which leaves it; None when it has to wait on. Somebody must be queued."""
        room, demand = next(iter(self._queue.items()))
        if self._stuck and self._stuck == self._found(demand):
            return None  # A long prompt is not looked up again for every message that comes while it waits.
        self._stuck = ()
        blocks = self._cache.longest(demand.keys)
        inflight_bytes = demand.inflight_bytes - self._cache.bytes_of(len(blocks) * self._cache.block_tokens)
        over = self.inflight_bytes + inflight_bytes > self._limits.inflight_bytes_max
        holding = None
        if not over or not self.inflight_bytes:  # alone it may exceed the bound, or it would wait for ever
            holding = self._cache.allocate(demand.rows, blocks, queried=len(demand.keys))
        if holding is None:
            self._stuck = self._found(demand)
            return None
        del self._queue[room]
        self.inflight_bytes += inflight_bytes
        self._pace.left(now, waiting=bool(self._queue))
        return holding

    def _found(self, demand: Demand) -> tuple[object, ...]:
        """What decides whether this demand can be met."""
        return demand, self.inflight_bytes, self._cache.changes, *(free.free_slots for free in self._arena.free)

    def landed(self, demand: Demand, holding: Holding) -> None:
        """The room's bytes are no longer in flight, whichever way that ended."""
        self.inflight_bytes -= demand.inflight_bytes - self._cache.bytes_of(holding.prefix)
        assert self.inflight_bytes >= 0

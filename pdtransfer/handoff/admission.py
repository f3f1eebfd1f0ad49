"""One rule of admission: first come, first served, and only requests whose full growth fits.

Rows include growth, so an admitted request never asks again. A request that an empty arena cannot hold is refused
permanently; one that finds the queue full is refused with a retry hint. The head of the queue waits for slots, never
for a peer.
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
    """What a room needs: rows of each component, growth included, and the bytes that will be in flight to it. The bytes
    include blocks of the prompt that the arena may already have."""

    rows: tuple[int, ...]
    inflight_bytes: int
    keys: tuple[bytes, ...] = ()


class Pace:
    """How fast a queue moves while requests wait in it: the source of retry hints."""

    def __init__(self) -> None:
        self._mean_ms = 0.0  # between two departures
        self._left_at: float | None = None  # None while the queue is empty: idle time is not a measure of its speed

    def left(self, now: float, *, waiting: bool) -> None:
        """A request left the queue; `waiting`: others remain."""
        if self._left_at is not None:
            self._mean_ms += 0.1 * ((now - self._left_at) * 1e3 - self._mean_ms)
        self._left_at = now if waiting else None

    def rest(self) -> None:
        """The queue is empty."""
        self._left_at = None

    def retry_ms(self, queued: int) -> int:
        """When to retry: at least the time in which the queue should have moved on by a tenth."""
        return int(min(max(100.0, self._mean_ms * max(1, queued // 10)), 60_000.0))


class Admission:
    """The queue for slots of the arena."""

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self._arena, self._cache, self._limits = cache.arena, cache, limits
        self._queue: OrderedDict[int, Demand] = OrderedDict()
        self.inflight_bytes = 0
        self._pace = Pace()
        self._stuck: tuple[object, ...] = ()  # the state in which the head did not fit

    def __len__(self) -> int:
        return len(self._queue)

    def check(self, rows: Sequence[int], *, rooms: int) -> None:
        """Raises ArenaFullError for a request that may not even wait; `rooms` is the number of rooms that have not
        ended."""
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
        """When to retry."""
        return self._pace.retry_ms(len(self._queue))

    def cached(self, demand: Demand) -> int:
        """The tokens of a prompt that the arena has now. It may have given some up when the room is admitted."""
        return self._cache.cached_tokens(demand.keys)

    def enqueue(self, room: int, demand: Demand) -> None:
        """Appends a room, which must not be queued already."""
        assert room not in self._queue
        self._queue[room] = demand

    def withdraw(self, room: int) -> None:
        """Removes a room from the queue; unknown rooms are ignored."""
        self._queue.pop(room, None)
        if not self._queue:
            self._pace.rest()

    @property
    def queued(self) -> list[int]:
        """The rooms of the queue, the first one first."""
        return list(self._queue)

    def head(self) -> int | None:
        """The first room of the queue; None if the queue is empty."""
        return next(iter(self._queue), None)

    def admit(self, now: float, chosen: Holding | None = None) -> Holding | None:
        """Leases slots for the head of the queue, which leaves it; None while it must wait. The queue must not be
        empty. `chosen`: the slots that the head has already, since its engine chose them."""
        room, demand = next(iter(self._queue.items()))
        if self._stuck and self._stuck == self._found(demand):
            return None  # Spares a new search for a long prompt with every message that arrives while it waits.
        self._stuck = ()
        blocks = self._cache.longest(demand.keys)
        inflight_bytes = demand.inflight_bytes - self._cache.bytes_of(len(blocks) * self._cache.block_tokens)
        over = self.inflight_bytes + inflight_bytes > self._limits.inflight_bytes_max
        holding = None
        if not over or not self.inflight_bytes:  # a request alone may exceed the bound, or it would wait forever
            holding = chosen or self._cache.allocate(demand.rows, blocks, queried=len(demand.keys))
        if holding is None:
            self._stuck = self._found(demand)
            return None
        del self._queue[room]
        self.inflight_bytes += inflight_bytes
        self._pace.left(now, waiting=bool(self._queue))
        return holding

    def _found(self, demand: Demand) -> tuple[object, ...]:
        """Everything that decides whether this demand can be met."""
        return demand, self.inflight_bytes, self._cache.changes, *(free.free_slots for free in self._arena.free)

    def landed(self, demand: Demand, holding: Holding) -> None:
        """The room's bytes are no longer in flight, whether they landed or not."""
        self.inflight_bytes -= demand.inflight_bytes - self._cache.bytes_of(holding.prefix)
        assert self.inflight_bytes >= 0

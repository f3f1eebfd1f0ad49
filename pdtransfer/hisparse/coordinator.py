"""The shared resources of a HiSparse device: a request gets all of them at once or none.

Logical tokens are reserved before a request's KV is sent; host slots are leased by the session, growth included. A row
and device slots are taken by `admit_direct` and returned by `retract`, which leaves the KV where it landed. What a call
returns stays taken until every event named for the request has fired and `collect` was called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..errors import CapacityError, LocalProtocolError
from ..handoff.events import Event
from ..handoff.slot_allocator import Extents, FreeExtents, slot_count, slots_of
from ..handoff.tables import step
from .states import SPARSE_REQUEST, SPARSE_REQUEST_ENDS, SparseRequest, SparseRequestEvent

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The resources of a device. A request's device buffer has `hot` places, or one for each of its tokens if these are
    fewer, and a slot for the newest token."""

    rows: int  # requests that decode at once
    logical_tokens: int
    device_slots: int
    hot: int
    top_k: int = 1  # tokens that one step may read at once: a longer request's buffer must hold as many
    host_slots: int | None = None  # of the whole host pool, if known

    def __post_init__(self) -> None:
        for name in ("rows", "logical_tokens", "device_slots", "hot", "top_k"):
            if getattr(self, name) < 1:
                raise LocalProtocolError(f"{name}: {getattr(self, name)}, expected at least 1")

    def places(self, tokens: int) -> int:
        """Places in the buffer of a request with `tokens` tokens, growth included."""
        return min(tokens, self.hot)

    def check(self, *, tokens: int, growth: int) -> None:
        """Raises CapacityError for a request that could not run even alone."""
        if tokens < 1 or growth < 0:
            raise LocalProtocolError(f"tokens: {tokens}, growth: {growth}; expected at least 1 and 0")
        total = tokens + growth
        if total > self.logical_tokens:
            raise CapacityError("logical tokens", wanted=total, available=self.logical_tokens)
        if self.host_slots is not None and total > self.host_slots:
            raise CapacityError("host slots", wanted=total, available=self.host_slots)
        if total > self.hot and self.top_k > self.hot:
            raise CapacityError("slots of a device buffer (top-k)", wanted=self.top_k, available=self.hot)
        if self.places(total) + 1 > self.device_slots:
            raise CapacityError("device slots", wanted=self.places(total) + 1, available=self.device_slots)

    def check_host(self, host_slots: Int64s, *, tokens: int) -> None:
        """Raises CapacityError for too few host slots for `tokens` tokens, growth included."""
        if host_slots.ndim != 1 or host_slots.dtype != np.int64:
            raise LocalProtocolError(
                f"host slots: {host_slots.dtype} of {host_slots.shape}, expected int64 of one axis"
            )
        if len(host_slots) < tokens:
            raise CapacityError("host slots of this request", wanted=tokens, available=len(host_slots))
        end = 1 << 63 if self.host_slots is None else self.host_slots
        if int(host_slots.view(np.uint64).max()) >= end:  # one pass: as uint64, negative slots are large
            raise LocalProtocolError(f"host slots: {host_slots.min()} to {host_slots.max()}, the pool has {end}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The row and slots of an admitted request, until it is retracted or ends."""

    request: int
    row: int
    device_slots: Int64s  # (places + 1,); the last one is for the newest token
    tokens: int  # in its host slots now
    preload: bool  # all tokens fit the buffer and are copied in one launch; else every place starts empty


@dataclass(slots=True, eq=False)
class _Entry:
    request: int
    tokens: int  # now
    total: int  # at most
    state: SparseRequest = SparseRequest.RESERVED
    host_slots: Int64s | None = None  # (total,) or more
    placement: Placement | None = None  # kept after a retract or an end, until it is collected
    extents: Extents | None = None  # of its device slots
    holds: list[Event] = field(default_factory=list[Event])  # after each access to its resources

    @property
    def quiet(self) -> bool:
        """True if nothing reads or writes its resources. An event that cannot be queried raises: then it is unknown."""
        return all(event.query() for event in self.holds)


class Coordinator:
    """Every call is idempotent, and legal where `states.SPARSE_REQUEST` allows it; elsewhere it raises
    LocalProtocolError and changes nothing.

    A request number is never used again. Ended requests that were collected are forgotten: to retract or finish them
    again does nothing.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.logical_free = capacity.logical_tokens
        self._rows = list(range(capacity.rows))  # free rows, a heap
        self._device = FreeExtents(capacity.device_slots)
        self._entries: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}  # in the order of admission
        self._returning: dict[int, _Entry] = {}  # retracted or ended, and not collected yet

    def __len__(self) -> int:
        """The number of requests that have not ended."""
        ended = sum(entry.state in SPARSE_REQUEST_ENDS for entry in self._returning.values())
        return len(self._entries) - ended

    @property
    def rows_free(self) -> int:
        return len(self._rows)

    @property
    def device_free(self) -> int:
        return self._device.free_slots

    @property
    def returning(self) -> bool:
        """True if some resources are about to be returned."""
        return bool(self._returning)

    @property
    def running(self) -> list[int]:
        """The requests that have a row, in the order of admission."""
        return list(self._running)

    def state(self, request: int) -> SparseRequest | None:
        """The state of a request; None if it is unknown or forgotten."""
        entry = self._entries.get(request)
        return entry and entry.state

    def remaining(self, request: int) -> int:
        """The number of tokens that it may still grow by."""
        entry = self._known(request, "remaining")
        return entry.total - entry.tokens

    @property
    def is_idle(self) -> bool:
        """True if no request is known. Then all resources must be free: asserts that none has leaked."""
        if self._entries:
            return False
        left = (self.capacity.rows - self.rows_free, self.capacity.device_slots - self.device_free)
        assert left == (0, 0), f"idle, and {left[0]} rows and {left[1]} device slots are missing"
        assert self.logical_free == self.capacity.logical_tokens, f"idle, and {self.logical_free} logical tokens free"
        return True

    def alloc_logical_only(self, request: int, *, tokens: int, growth: int) -> bool:
        """Reserves logical tokens for a request whose KV has not arrived; False if too few are free now. Raises
        CapacityError for one that could never run."""
        entry = self._entries.get(request)
        if entry is not None:
            if entry.state in SPARSE_REQUEST_ENDS or entry.total != tokens + growth:
                was = f"{entry.state.value}, with {entry.total} tokens in all"
                raise LocalProtocolError(f"request {request} is {was}: it cannot begin again with {tokens + growth}")
            return True
        self.capacity.check(tokens=tokens, growth=growth)
        if tokens + growth > self.logical_free:
            return False
        self.logical_free -= tokens + growth
        self._entries[request] = _Entry(request, tokens, tokens + growth)
        return True

    def land(self, request: int, host_slots: Int64s) -> None:
        """Its KV is in these host slots, int64 (tokens + growth,), which include room for growth and stay the same
        until it ends. Raises CapacityError for too few slots."""
        entry = self._known(request, "land")
        if entry.host_slots is None or entry.state in SPARSE_REQUEST_ENDS:
            self._legal(entry, SparseRequestEvent.LAND)
            self.capacity.check_host(host_slots, tokens=entry.total)
            self._step(entry, SparseRequestEvent.LAND)
            entry.host_slots = host_slots
        elif host_slots is not entry.host_slots and not np.array_equal(host_slots, entry.host_slots):
            raise LocalProtocolError(f"request {request} has landed in other host slots")

    def admit_direct(self, request: int, host_slots: Int64s | None = None) -> Placement | None:
        """Assigns a row and device slots to a request that has landed, in `host_slots` if `land` was not called. None
        if a resource is lacking, or if the resources from before a retract are still in use."""
        entry = self._known(request, "admit_direct")
        if host_slots is not None:
            self.land(request, host_slots)
        if entry.state is SparseRequest.RUNNING:
            return entry.placement
        self._legal(entry, SparseRequestEvent.ADMIT)
        places = self.capacity.places(entry.total)
        if request in self._returning or not self.fits_now(request) or not entry.quiet:
            return None
        extents = self._device.allocate(places + 1)
        assert extents is not None
        self._step(entry, SparseRequestEvent.ADMIT)
        entry.holds.clear()
        entry.extents = extents
        entry.placement = Placement(
            request=request,
            row=heappop(self._rows),
            device_slots=slots_of(extents),
            tokens=entry.tokens,
            preload=entry.tokens <= places,
        )
        self._running[request] = entry
        return entry.placement

    def fits_now(self, request: int) -> bool:
        """True if a row and its device slots are free."""
        places = self.capacity.places(self._known(request, "fits_now").total)
        return bool(self._rows) and not self._device.lacking(places + 1)

    def lacking(self, request: int) -> tuple[int, int]:
        """The rows and device slots that it lacks, besides those about to be returned."""
        entry = self._known(request, "lacking")
        rows, slots = self.rows_free, self.device_free
        for returning in self._returning.values():
            if returning.extents is not None:
                rows, slots = rows + 1, slots + slot_count(returning.extents)
        return max(0, 1 - rows), max(0, self.capacity.places(entry.total) + 1 - slots)

    def device_slots(self, request: int) -> int:
        """The number of its device slots, or of those it had until it is collected."""
        extents = self._known(request, "device_slots").extents
        return 0 if extents is None else slot_count(extents)

    def grow(self, request: int, *, after: Event | None = None) -> None:
        """Adds a token to a running request; its copy to the host slot is complete once `after` has fired."""
        entry = self._known(request, "grow")
        if entry.state is not SparseRequest.RUNNING:
            raise LocalProtocolError(f"request {request} is {entry.state.value}: it does not grow")
        if entry.tokens == entry.total:
            raise LocalProtocolError(f"request {request} has all of its {entry.total} tokens")
        entry.tokens += 1
        self._hold(entry, after)

    def hold(self, request: int, *, after: Event) -> None:
        """Its resources are in use until `after` has fired."""
        self._hold(self._known(request, "hold"), after)

    def retract(self, request: int, *, drop: bool = False, after: Event | None = None) -> None:
        """Takes its row and device slots back. Its host slots stay for `admit_direct`, unless it is dropped."""
        self._end(request, SparseRequestEvent.DROP if drop else SparseRequestEvent.RETRACT, after)

    def finish(self, request: int, *, after: Event | None = None) -> None:
        """Ends it and takes all its resources back."""
        self._end(request, SparseRequestEvent.FINISH, after)

    def collect(self) -> list[int]:
        """Frees the resources that are not in use any more; returns the ended requests whose host slots may be
        released."""
        released: list[int] = []
        for entry in [returning for returning in self._returning.values() if returning.quiet]:
            del self._returning[entry.request]
            entry.holds.clear()
            if entry.placement is not None and entry.extents is not None:
                heappush(self._rows, entry.placement.row)
                self._device.free(entry.extents)
                entry.placement = entry.extents = None
            if entry.state in SPARSE_REQUEST_ENDS:
                self.logical_free += entry.total
                del self._entries[entry.request]
                if entry.host_slots is not None:
                    released.append(entry.request)
        return released

    def _end(self, request: int, event: SparseRequestEvent, after: Event | None) -> None:
        entry = self._entries.get(request)
        if entry is None:
            return
        if entry.state not in SPARSE_REQUEST_ENDS:
            self._step(entry, event)
            if self._running.pop(request, None) is not None or entry.state in SPARSE_REQUEST_ENDS:
                self._returning[request] = entry
        self._hold(entry, after)

    def _hold(self, entry: _Entry, after: Event | None) -> None:
        holds = entry.holds
        if after is None or (holds and holds[-1] is after):
            return
        holds.append(after)  # first, since a query of the others may raise
        while holds[0] is not after and holds[0].query():
            del holds[0]

    def _known(self, request: int, call: str) -> _Entry:
        entry = self._entries.get(request)
        if entry is None:
            raise LocalProtocolError(f"request {request} is not known: {call}")
        return entry

    def _legal(self, entry: _Entry, event: SparseRequestEvent) -> None:
        if (entry.state, event) not in SPARSE_REQUEST:
            raise LocalProtocolError(f"request {entry.request} is {entry.state.value}: it cannot {event.value}")

    def _step(self, entry: _Entry, event: SparseRequestEvent) -> None:
        self._legal(entry, event)
        entry.state = step(SPARSE_REQUEST, entry.state, event)

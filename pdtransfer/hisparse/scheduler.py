"""The order of requests on a HiSparse device: a queue, then retraction by policy, then `full`; no request starves.

The queue is first come, first served, and a retracted request goes to its end. Its head takes what becomes free. Once
the head has waited `hisparse_wait_steps`, running requests that had `hisparse_quantum_steps` are retracted for it, in
the policy's order. No other request is placed meanwhile, so one quantum later all that run may be retracted. The head
gets a row after at most the larger of the two counts, plus the time that events take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import CapacityError, LocalProtocolError, WorldError
from ..handoff.admission import Pace
from ..handoff.events import Event
from ..limits import Limits
from .coordinator import Coordinator, Int64s, Placement
from .states import SparseRequest

Policy = Literal["longest", "shortest", "newest"]
POLICIES: tuple[Policy, ...] = ("longest", "shortest", "newest")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTurn:
    """What to do before the next step, in this order."""

    released: list[int]  # ended, and their host slots are not in use any more
    retract: list[int]  # stop these and report it by `Scheduler.retract`; then call `next` again
    place: list[Placement]  # start these: they run from now on


@dataclass(frozen=True, slots=True, eq=False)
class _Newcomer:
    """A request for which no logical tokens are free yet."""

    tokens: int
    growth: int
    host_slots: Int64s


class Scheduler:
    """Called between the engine's steps: `next`, what it requires, the step, `stepped`, and `ended` for each ended
    request."""

    def __init__(self, coordinator: Coordinator, limits: Limits, *, policy: Policy = "longest") -> None:
        """`policy`: the request that is retracted first has the most tokens left to grow by (longest), the fewest
        (shortest), or was placed last (newest)."""
        if policy not in POLICIES:
            raise LocalProtocolError(f"policy: {policy!r} must be one of {', '.join(POLICIES)}")
        self.coordinator, self.policy = coordinator, policy
        self._limits = limits
        self._newcomers: OrderedDict[int, _Newcomer] = OrderedDict()
        self._queue: OrderedDict[int, int] = OrderedDict()  # landed requests, and the step at which each was queued
        self._placed: dict[int, int] = {}  # running requests, and the step at which each was placed
        self._gone: dict[int, list[Event]] = {}  # ended newcomers, and the events that their host slots wait for
        self._steps = 0
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        """Requests without a row: reserved, landed or retracted."""
        return len(self._newcomers) + len(self.coordinator) - len(self.coordinator.running)

    @property
    def full(self) -> bool:
        """True if a further request must be refused with `retry_ms` (HTTP 429); a daemon checks it first."""
        return self.waiting >= self._limits.hisparse_queue_max

    @property
    def retry_ms(self) -> int:
        """When to retry."""
        return self._pace.retry_ms(self.waiting)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, runs, or is about to be returned. Checks for leaks each time."""
        return self.coordinator.is_idle and not (self._newcomers or self._queue or self._placed or self._gone)

    def offer(self, request: int, host_slots: Int64s, *, tokens: int, growth: int) -> None:
        """Queues a request that has landed. One whose logical tokens were reserved before is always taken. Raises
        CapacityError for one that could never run, and with a `retry_ms` if the queue is full."""
        state = self.coordinator.state(request)
        if request in self._newcomers or state not in (None, SparseRequest.RESERVED):
            raise LocalProtocolError(f"request {request} is here already")
        if state is None and self.full:
            most = self._limits.hisparse_queue_max
            raise CapacityError("queue entries", wanted=most + 1, available=most, retry_ms=self.retry_ms)
        self.coordinator.capacity.check(tokens=tokens, growth=growth)
        self.coordinator.capacity.check_host(host_slots, tokens=tokens + growth)
        if state is None:
            self._newcomers[request] = _Newcomer(tokens, growth, host_slots)
            self._reserve()
        elif self.coordinator.alloc_logical_only(request, tokens=tokens, growth=growth):
            self._land(request, host_slots)

    def next(self, now: float) -> SparseTurn:
        """What to do before the next step. `now`: seconds of any steady clock, used only for the retry hint."""
        released = self._collect()
        place: list[Placement] = []
        while self._queue:
            head = next(iter(self._queue))
            placement = self._place(head)
            if placement is None:
                break
            self._pace.left(now, waiting=bool(self._queue))
            place.append(placement)
        return SparseTurn(released=released, retract=self._victims(), place=place)

    def follow(self, running: Sequence[int]) -> SparseTurn:
        """`next` of a rank that follows: the leader's scheduler decided that exactly these requests run.

        Resources in use here are freed later, so call it until nothing is left to retract and all of them run. Raises
        WorldError for a request that can never run here: the leader's state differs from this rank's.
        """
        released = self._collect()
        wanted = set(running)
        retract = [request for request in self._placed if request not in wanted]
        missing = [request for request in running if request not in self._placed]
        placements = [self._place(request) for request in missing if request in self._queue]
        place = [placement for placement in placements if placement is not None]
        if len(place) < len(missing) and not (place or retract or self.coordinator.returning):
            raise WorldError(f"request {missing[0]} runs on the leader of this group, and cannot here")
        return SparseTurn(released=released, retract=retract, place=place)

    def stepped(self, requests: Sequence[int], *, after: Event | None = None) -> None:
        """These requests made a step: each has one more token, in its host slot once `after` has fired."""
        self._steps += 1
        for request in requests:
            self.coordinator.grow(request, after=after)

    def retract(self, request: int, *, after: Event | None = None) -> None:
        """The request was stopped, by any caller; queued work on it is over once `after` has fired. It waits again."""
        self.coordinator.retract(request, after=after)
        if self._placed.pop(request, None) is not None:
            self._queue[request] = self._steps

    def ended(self, request: int, *, drop: bool = False, after: Event | None = None) -> None:
        """The request has ended, or is given up, in any state; a later turn reports when its host slots may be
        released."""
        if self._newcomers.pop(request, None) is not None or request in self._gone:
            self._gone.setdefault(request, []).extend([] if after is None else [after])
        elif drop:
            self.coordinator.retract(request, drop=True, after=after)
        else:
            self.coordinator.finish(request, after=after)
        self._queue.pop(request, None)
        self._placed.pop(request, None)
        if not self._queue:
            self._pace.rest()

    def _collect(self) -> list[int]:
        """Frees unused resources and reserves for newcomers; returns the requests whose host slots may be released."""
        gone = [request for request, events in self._gone.items() if all(event.query() for event in events)]
        released = self.coordinator.collect() + gone
        for request in gone:
            del self._gone[request]
        self._reserve()
        return released

    def _place(self, request: int) -> Placement | None:
        """Places a queued request, if that is possible now."""
        placement = self.coordinator.admit_direct(request)
        if placement is not None:
            del self._queue[request]
            self._placed[request] = self._steps
        return placement

    def _reserve(self) -> None:
        """Reserves logical tokens for newcomers, in order. They wait apart: a retracted request holds some and must go
        on."""
        while self._newcomers:
            request, new = next(iter(self._newcomers.items()))
            if not self.coordinator.alloc_logical_only(request, tokens=new.tokens, growth=new.growth):
                return
            del self._newcomers[request]
            self._land(request, new.host_slots)

    def _land(self, request: int, host_slots: Int64s) -> None:
        self.coordinator.land(request, host_slots)
        self._queue[request] = self._steps

    def _victims(self) -> list[int]:
        """The requests to retract for the head of the queue: just enough, with what is about to be returned, else
        none."""
        head, since = next(iter(self._queue.items()), (None, 0))
        if head is None or self._steps - since < self._limits.hisparse_wait_steps:
            return []
        rows, slots = self.coordinator.lacking(head)
        chosen: dict[int, int] = {}  # by request, its device slots
        for request in sorted(self._retractable(), key=self._rank):
            if rows <= 0 and slots <= 0:
                break
            chosen[request] = self.coordinator.device_slots(request)
            rows, slots = rows - 1, slots - chosen[request]
        if rows > 0 or slots > 0:
            return []
        for request, count in reversed(list(chosen.items())):
            if rows + 1 <= 0 and slots + count <= 0:  # the other chosen ones suffice
                del chosen[request]
                rows, slots = rows + 1, slots + count
        return list(chosen)

    def _retractable(self) -> list[int]:
        """The requests that ran for a quantum, those placed last first."""
        quantum = self._limits.hisparse_quantum_steps
        return [request for request, step in reversed(self._placed.items()) if self._steps - step >= quantum]

    def _rank(self, request: int) -> int:
        """The sort key: the policy retracts the smallest first. Of equals, the one placed last goes first."""
        remaining = self.coordinator.remaining(request)
        return {"longest": -remaining, "shortest": remaining, "newest": 0}[self.policy]

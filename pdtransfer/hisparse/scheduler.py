"""Whose turn it is on a HiSparse device: a queue, then retraction by policy, then `full`; nobody starves.

The queue is first come, first served, and whoever is retracted goes to its end. Its head takes what comes free; once it
has waited `hisparse_wait_steps`, running requests that had their `hisparse_quantum_steps` are retracted for it, in the
policy's order. While it waits nobody is placed, so all that run are retractable a quantum later: the head gets a row
after at most the larger of the two counts, and the time that events take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..engine_api import Event
from ..errors import CapacityError, LocalProtocolError, WorldError
from ..handoff.admission import Pace
from ..limits import Limits
from .coordinator import Coordinator, Int64s, Placement
from .states import SparseRequest

Policy = Literal["longest", "shortest", "newest"]
POLICIES: tuple[Policy, ...] = ("longest", "shortest", "newest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What to do before the next step, in this order."""

    released: list[int]  # ended: nothing reads or writes their host slots any more
    retract: list[int]  # stop these, and say so by `Scheduler.retract`; then ask for another turn
    place: list[Placement]  # start these: they run from now on


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """One for which no logical tokens are free yet."""

    tokens: int
    growth: int
    host_slots: Int64s


class Scheduler:
    """Between the engine's steps: `next`, what it asks for, the step, `stepped`, and `ended` for each that ended."""

    def __init__(self, coordinator: Coordinator, limits: Limits, *, policy: Policy = "longest") -> None:
        """`policy`: who is retracted first, of those that may be: who has the most tokens left to grow by, the fewest,
        or who was placed last."""
        if policy not in POLICIES:
            raise LocalProtocolError(f"policy: {policy!r} is none of {', '.join(POLICIES)}")
        self.coordinator, self.policy = coordinator, policy
        self._limits = limits
        self._newcomers: OrderedDict[int, _Newcomer] = OrderedDict()
        self._queue: OrderedDict[int, int] = OrderedDict()  # those that have landed, and the step at which each came
        self._placed: dict[int, int] = {}  # those that run: the step at which each was placed
        self._gone: dict[int, list[Event]] = {}  # newcomers that have ended, and what for their host slots wait
        self._steps = 0
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        """Requests without a row: reserved, landed or retracted."""
        return len(self._newcomers) + len(self.coordinator) - len(self.coordinator.running)

    @property
    def full(self) -> bool:
        """Whether the answer to another request is 429, with `retry_ms`: a daemon asks before it takes one."""
        return self.waiting >= self._limits.hisparse_queue_max

    @property
    def retry_ms(self) -> int:
        """When it is worth asking again."""
        return self._pace.retry_ms(self.waiting)

    @property
    def batch_is_full(self) -> bool:
        """Whether the next in line has to wait for a row or device slots. Worked out anew: nothing has to lift it."""
        head = next(iter(self._queue), None)
        return not self.coordinator.rows_free if head is None else not self.coordinator.fits_now(head)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or is on its way back. Looks for leaks each time."""
        return self.coordinator.is_idle and not (self._newcomers or self._queue or self._placed or self._gone)

    def offer(self, request: int, host_slots: Int64s, *, tokens: int, growth: int) -> None:
        """A request that has landed waits for its turn. One whose logical tokens were reserved before is always taken.
        Raises CapacityError for one that could never run, and with a `retry_ms` where the queue is full."""
        known = self.coordinator.state(request)
        if request in self._newcomers or known not in (None, SparseRequest.RESERVED):
            raise LocalProtocolError(f"request {request} is here already")
        if known is None and self.full:
            most = self._limits.hisparse_queue_max
            raise CapacityError("places in the queue", wanted=most + 1, available=most, retry_ms=self.retry_ms)
        self.coordinator.capacity.check(tokens=tokens, growth=growth)
        self.coordinator.capacity.check_host(host_slots, tokens=tokens + growth)
        if known is None:
            self._newcomers[request] = _Newcomer(tokens, growth, host_slots)
            self._reserve()
        elif self.coordinator.alloc_logical_only(request, tokens=tokens, growth=growth):
            self._land(request, host_slots)

    def next(self, now: float) -> Turn:
        """What to do before the next step. `now`: seconds of any steady clock, for the retry hint alone."""
        released = self._collect()
        place: list[Placement] = []
        while self._queue:
            head = next(iter(self._queue))
            placement = self._place(head)
            if placement is None:
                break
            self._pace.left(now, waiting=bool(self._queue))
            place.append(placement)
        return Turn(released=released, retract=self._victims(), place=place)

    def follow(self, running: Sequence[int]) -> Turn:
        """`next` of a rank that follows: the leader's scheduler has decided that these run and no others. What is used
        here still comes later, so ask until there is nothing to retract and all of them run.

        Raises WorldError for one that never can: its leader has, or knows, something else than this rank."""
        released = self._collect()
        wanted = set(running)
        retract = [request for request in self._placed if request not in wanted]
        missing = [request for request in running if request not in self._placed]
        found = [self._place(request) for request in missing if request in self._queue]
        place = [placement for placement in found if placement is not None]
        if len(place) < len(missing) and not (place or retract or self.coordinator.returning):
            raise WorldError(f"request {missing[0]} runs on the leader of this group, and cannot here")
        return Turn(released=released, retract=retract, place=place)

    def stepped(self, requests: Sequence[int], *, after: Event | None = None) -> None:
        """These have made a step: each has one more token, in its host slot once `after` has fired."""
        self._steps += 1
        for request in requests:
            self.coordinator.grow(request, after=after)

    def retract(self, request: int, *, after: Event | None = None) -> None:
        """It has been stopped, on anybody's wish; what is queued is over once `after` has fired. It waits again."""
        self.coordinator.retract(request, after=after)
        if self._placed.pop(request, None) is not None:
            self._queue[request] = self._steps

    def ended(self, request: int, *, drop: bool = False, after: Event | None = None) -> None:
        """It has ended, or is given up, wherever it is; a later turn says when its host slots may be released."""
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
        """Takes back what nobody uses any more, and gives newcomers what is free; returns whose host slots may be
        released."""
        gone = [request for request, events in self._gone.items() if all(event.query() for event in events)]
        released = self.coordinator.collect() + gone
        for request in gone:
            del self._gone[request]
        self._reserve()
        return released

    def _place(self, request: int) -> Placement | None:
        """One of the queue, if it can be now."""
        placement = self.coordinator.admit_direct(request)
        if placement is not None:
            del self._queue[request]
            self._placed[request] = self._steps
        return placement

    def _reserve(self) -> None:
        """Logical tokens for newcomers, in turn. They wait apart: who was retracted holds some, and has to go on."""
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
        """Whom to retract for the head of the queue: as many as make room for it with what is on its way back, else
        none."""
        head, since = next(iter(self._queue.items()), (None, 0))
        if head is None or self._steps - since < self._limits.hisparse_wait_steps:
            return []
        rows, slots = self.coordinator.lacking(head)
        chosen: dict[int, int] = {}  # and their device slots
        for request in sorted(self._retractable(), key=self._rank):
            if rows <= 0 and slots <= 0:
                break
            chosen[request] = self.coordinator.device_slots(request)
            rows, slots = rows - 1, slots - chosen[request]
        if rows > 0 or slots > 0:
            return []
        for request, count in reversed(list(chosen.items())):
            if rows + 1 <= 0 and slots + count <= 0:  # others that were chosen give enough
                del chosen[request]
                rows, slots = rows + 1, slots + count
        return list(chosen)

    def _retractable(self) -> list[int]:
        """Who has had a quantum, those placed last first."""
        quantum = self._limits.hisparse_quantum_steps
        return [request for request, step in reversed(self._placed.items()) if self._steps - step >= quantum]

    def _rank(self, request: int) -> int:
        """Whom the policy has retracted first has the least; of equals, whoever was placed last goes first."""
        remaining = self.coordinator.remaining(request)
        return {"longest": -remaining, "shortest": remaining, "newest": 0}[self.policy]

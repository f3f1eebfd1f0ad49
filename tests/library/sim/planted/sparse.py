"""Defences of a HiSparse device's coordinator and scheduler, taken away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdtransfer.hisparse.coordinator import Capacity, Coordinator, Placement, _Entry
from pdtransfer.hisparse.scheduler import Scheduler, SparseTurn
from pdtransfer.hisparse.states import SPARSE_REQUEST_ENDS, SparseRequest
from pdtransfer.serve.engine_api import Event

from . import Patch


def freed_before_their_events(patch: Patch) -> None:
    """Rows and device slots of who was retracted come back at once; what has ended waits."""
    quiet = _Entry.quiet.fget
    assert quiet is not None
    patch(_Entry, "quiet", property(lambda self: self.state is SparseRequest.RETRACTED or quiet(self)))


def host_slots_released_before_their_events(patch: Patch) -> None:
    """A request that has ended gives its host slots back at once; its row waits."""
    quiet = _Entry.quiet.fget
    assert quiet is not None
    patch(_Entry, "quiet", property(lambda self: self.state in SPARSE_REQUEST_ENDS or quiet(self)))


def backups_not_waited_for(patch: Patch) -> None:
    """The way of the newest tokens to their host slots holds nothing up."""
    grow = Coordinator.grow
    patch(Coordinator, "grow", lambda self, request, after=None: grow(self, request))


def the_latest_event_alone(patch: Patch) -> None:
    """Of several events only the one named first is waited for."""

    def hold(self: Coordinator, entry: _Entry, after: Event | None) -> None:
        if after is not None and not entry.holds:
            entry.holds.append(after)

    patch(Coordinator, "_hold", hold)


def readmitted_at_once(patch: Patch) -> None:
    """Who was retracted may go on, in the row that it had, while what is queued still uses it."""
    admit = Coordinator.admit_direct

    def readmit(self: Coordinator, request: int, host_slots: Any = None) -> Placement | None:
        entry = self._entries[request]
        if entry.state is SparseRequest.RETRACTED and request in self._returning:
            entry.state = SparseRequest.RUNNING
            del self._returning[request]
            self._running[request] = entry
            return entry.placement
        return admit(self, request, host_slots)

    patch(Coordinator, "admit_direct", readmit)


def admitted_without_growth(patch: Patch) -> None:
    """Logical tokens are reserved for the prompt alone."""

    def alloc(self: Coordinator, request: int, *, tokens: int, growth: int) -> bool:
        if request not in self._entries:
            if tokens > self.logical_free:
                return False
            self.logical_free -= tokens
            self._entries[request] = _Entry(request, tokens, tokens + growth)
        return True

    patch(Coordinator, "alloc_logical_only", alloc)


def places_for_the_prompt_alone(patch: Patch) -> None:
    """A short request's buffer has no places for what it will generate."""
    admit = Coordinator.admit_direct

    def short(self: Coordinator, request: int, host_slots: Any = None) -> Placement | None:
        entry = self._entries[request]
        total, entry.total = entry.total, entry.tokens
        placement = admit(self, request, host_slots)
        entry.total = total
        return placement

    patch(Coordinator, "admit_direct", short)


def what_was_retracted_leaks(patch: Patch) -> None:
    """Once a request was retracted its row and device slots are nobody's."""
    retract = Coordinator.retract

    def leak(self: Coordinator, request: int, *, drop: bool = False, after: Event | None = None) -> None:
        entry = self._entries.get(request)
        retract(self, request, drop=drop, after=after)
        if entry is not None and entry.state is SparseRequest.RETRACTED:
            entry.placement = entry.extents = None

    patch(Coordinator, "retract", leak)


def logical_tokens_leak(patch: Patch) -> None:
    """Of what a request has reserved, that which it has not used stays reserved when it ends."""
    collect = Coordinator.collect

    def short(self: Coordinator) -> list[int]:
        for entry in self._returning.values():
            if entry.state in SPARSE_REQUEST_ENDS:
                entry.total = entry.tokens
        return collect(self)

    patch(Coordinator, "collect", short)


def idle_while_something_comes_back(patch: Patch) -> None:
    """Idle is reported once everybody has ended, whatever is still in use: no leak is ever looked for."""

    def idle(self: Coordinator) -> bool:
        return all(entry.state in SPARSE_REQUEST_ENDS for entry in self._entries.values())

    patch(Coordinator, "is_idle", property(idle))


def other_host_slots_after_a_retract(patch: Patch) -> None:
    """A retract gives the host slots of the newest tokens away, as if only the prompt had landed."""
    grow = Coordinator.grow

    def forget(self: Coordinator, request: int, *, after: Event | None = None) -> None:
        grow(self, request, after=after)
        self._entries[request].tokens -= 1

    patch(Coordinator, "grow", forget)


def retracted_to_the_front(patch: Patch) -> None:
    """Who was retracted is the next in line, before those for whom that was done."""
    retract = Scheduler.retract

    def first(self: Scheduler, request: int, *, after: Event | None = None) -> None:
        retract(self, request, after=after)
        self._queue.move_to_end(request, last=False)

    patch(Scheduler, "retract", first)


def small_ones_overtake(patch: Patch) -> None:
    """The line is one of sizes."""
    turn = Scheduler.next

    def sort(self: Scheduler, now: float) -> SparseTurn:
        for request in sorted(self._queue, key=lambda each: self.coordinator._entries[each].total):
            self._queue.move_to_end(request)
        return turn(self, now)

    patch(Scheduler, "next", sort)


def never_retracted(patch: Patch) -> None:
    """Whoever runs runs to its end."""
    patch(Scheduler, "_victims", lambda self: [])


def retracted_before_their_quantum(patch: Patch) -> None:
    """Anybody may be retracted at any time."""
    patch(Scheduler, "_retractable", lambda self: list(self._placed))


def one_line_for_newcomers_too(patch: Patch) -> None:
    """Who waits for logical tokens does so at the head of the line, before who holds some and was retracted."""
    turn = Scheduler.next

    def stuck(self: Scheduler, now: float) -> SparseTurn:
        self._reserve()
        if not self._newcomers:
            return turn(self, now)
        queue, self._queue = self._queue, type(self._queue)()
        made = turn(self, now)
        queue.update(self._queue)
        self._queue = queue
        return made

    patch(Scheduler, "next", stuck)


def batch_full_until_somebody_ends(patch: Patch) -> None:
    """That the batch is full is remembered, and a retract does not lift it."""
    admit, collect = Coordinator.admit_direct, Coordinator.collect
    full: set[int] = set()

    def remember(self: Coordinator, request: int, host_slots: Any = None) -> Placement | None:
        placement = None if id(self) in full else admit(self, request, host_slots)
        if placement is None:
            full.add(id(self))
        return placement

    def lift(self: Coordinator) -> list[int]:
        released = collect(self)
        if released:
            full.discard(id(self))
        return released

    patch(Coordinator, "admit_direct", remember)
    patch(Coordinator, "collect", lift)


def queue_without_a_bound(patch: Patch) -> None:
    """Everybody is taken."""
    patch(Scheduler, "full", property(lambda self: False))


def never_fits_is_taken(patch: Patch) -> None:
    """What could never run waits like the others."""
    patch(Capacity, "check", lambda self, **_: None)


def newcomers_forgotten_when_they_end(patch: Patch) -> None:
    """A request that ends before it has logical tokens keeps its host slots."""
    ended = Scheduler.ended

    def forget(self: Scheduler, request: int, **how: Any) -> None:
        ended(self, request, **how)
        self._gone.pop(request, None)

    patch(Scheduler, "ended", forget)


def newcomers_released_before_their_events(patch: Patch) -> None:
    """A request that ends before it has logical tokens waits for nothing."""
    ended = Scheduler.ended

    def at_once(self: Scheduler, request: int, *, drop: bool = False, after: Event | None = None) -> None:
        ended(self, request, drop=drop, after=None if request in self._newcomers else after)

    patch(Scheduler, "ended", at_once)


def tokens_since_a_retract_forgotten(patch: Patch) -> None:
    """What a request may still grow by is counted from where it was last placed."""
    admit = Coordinator.admit_direct
    placed_at: dict[tuple[int, int], int] = {}

    def note(self: Coordinator, request: int, host_slots: Any = None) -> Placement | None:
        placement = admit(self, request, host_slots)
        if placement is not None:
            placed_at[id(self), request] = placement.tokens
        return placement

    def remaining(self: Coordinator, request: int) -> int:
        return self._entries[request].total - placed_at[id(self), request]

    patch(Coordinator, "admit_direct", note)
    patch(Coordinator, "remaining", remaining)


def one_victim_too_many(patch: Patch) -> None:
    """When some are retracted, so is one more."""
    victims = Scheduler._victims

    def one_more(self: Scheduler) -> list[int]:
        chosen = victims(self)
        others = [request for request in self._retractable() if request not in chosen]
        return chosen + others[:1] if chosen else []

    patch(Scheduler, "_victims", one_more)


def retracted_without_a_wait(patch: Patch) -> None:
    """The first in line takes a row at once."""
    victims = Scheduler._victims

    def at_once(self: Scheduler) -> list[int]:
        patient, self._limits = self._limits, replace(self._limits, hisparse_wait_steps=0)
        try:
            return victims(self)
        finally:
            self._limits = patient

    patch(Scheduler, "_victims", at_once)


def held_until_the_latest_event_alone(patch: Patch) -> None:
    """What is in use until one event is dropped when another is named, as if events fired in order."""

    def hold(self: Coordinator, entry: _Entry, after: Event | None) -> None:
        if after is not None:
            entry.holds[:] = [after]

    patch(Coordinator, "_hold", hold)

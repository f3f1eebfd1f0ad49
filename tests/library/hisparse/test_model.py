"""Coordinator and scheduler against plain models of them: any calls in any order, events that fire late or never."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdtransfer.errors import CapacityError, LocalProtocolError
from pdtransfer.hisparse.coordinator import Capacity, Coordinator
from pdtransfer.hisparse.scheduler import POLICIES, Scheduler
from pdtransfer.hisparse.states import SPARSE_REQUEST_ENDS, SparseRequest
from pdtransfer.limits import Limits
from tests.library.hisparse.hisparse_events import Switch, host
from tests.support.effort import some

R = SparseRequest
LIVE = (R.RESERVED, R.WAITING, R.RUNNING, R.RETRACTED)
tokens = st.integers(1, 14)
growths = st.integers(0, 4)
picks = st.integers(0, 1 << 16)
events = st.sampled_from(["none", "late", "the last one"])


@dataclass
class Model:
    """What one request should have."""

    tokens: int
    total: int
    state: SparseRequest = R.RESERVED
    row: int | None = None
    slots: set[int] = field(default_factory=set[int])
    landed: bool = False
    returning: bool = False
    events: list[Switch] = field(default_factory=list[Switch])

    @property
    def quiet(self) -> bool:
        return all(event.fired for event in self.events)


class CoordinatorMachine(RuleBasedStateMachine):
    """Legal calls do what the model does, others raise; each call is made twice now and then."""

    capacity = Capacity(rows=3, logical_tokens=50, device_slots=20, hot=6, top_k=4)

    def __init__(self) -> None:
        super().__init__()
        self.here = Coordinator(self.capacity)
        self.models: dict[int, Model] = {}
        self.forgotten: list[int] = []
        self.serial = 0
        self.last: Switch | None = None

    def pick(self, at: int) -> tuple[int, Model]:
        request = sorted(self.models)[at % len(self.models)]
        return request, self.models[request]

    def event(self, kind: str) -> Switch | None:
        if kind == "late":
            self.last = Switch()
        return None if kind == "none" else self.last

    def free(self) -> tuple[int, int, int]:
        models = self.models.values()
        return (
            self.capacity.logical_tokens - sum(model.total for model in models),
            self.capacity.rows - sum(model.row is not None for model in models),
            self.capacity.device_slots - sum(len(model.slots) for model in models),
        )

    @rule(tokens=tokens, growth=growths)
    def alloc(self, tokens: int, growth: int) -> None:
        self.serial += 1
        got = self.here.alloc_logical_only(self.serial, tokens=tokens, growth=growth)
        assert got == (tokens + growth <= self.free()[0])
        if got:
            assert self.here.alloc_logical_only(self.serial, tokens=tokens, growth=growth)
            self.models[self.serial] = Model(tokens, tokens + growth)

    @rule(tokens=tokens)
    def alloc_what_can_never_be(self, tokens: int) -> None:
        with pytest.raises(CapacityError, match=f"logical tokens: {50 + tokens} wanted, 50 available"):
            self.here.alloc_logical_only(0, tokens=tokens, growth=50)

    @precondition(lambda self: self.models)
    @rule(at=picks, short=st.booleans())
    def land(self, at: int, short: bool) -> None:
        request, model = self.pick(at)
        if model.state is R.RESERVED and short:
            with pytest.raises(CapacityError, match="host slots of this request"):
                self.here.land(request, host(model.total - 1, 100 * request))
            return
        legal = model.state in LIVE
        with nullcontext() if legal else pytest.raises(LocalProtocolError):
            self.here.land(request, host(model.total, 100 * request))
        if legal:
            model.landed = True
            model.state = R.WAITING if model.state is R.RESERVED else model.state

    @precondition(lambda self: self.models)
    @rule(at=picks)
    def admit(self, at: int) -> None:
        request, model = self.pick(at)
        if model.state in (R.RESERVED, R.FINISHED, R.DROPPED):
            with pytest.raises(LocalProtocolError):
                self.here.admit_direct(request)
            return
        _, rows, slots = self.free()
        places = min(model.total, self.capacity.hot)
        fits = not model.returning and model.quiet and rows and slots > places
        placement = self.here.admit_direct(request)
        assert (placement is not None) == bool(model.state is R.RUNNING or fits)
        if placement is None:
            return
        device_slots = set(placement.device_slots.tolist())
        assert len(device_slots) == places + 1 == len(placement.device_slots)
        if model.state is R.RUNNING:
            assert (placement.row, device_slots) == (model.row, model.slots)
            return
        for other in self.models.values():
            assert placement.row != other.row, "a row that somebody has, or that is still in use"
            assert not device_slots & other.slots, "a device slot that somebody has, or that is still in use"
        assert device_slots <= set(range(self.capacity.device_slots))
        assert (placement.tokens, placement.preload) == (model.tokens, model.tokens <= places)
        model.state, model.row, model.slots, model.events = R.RUNNING, placement.row, device_slots, []

    @precondition(lambda self: self.models)
    @rule(at=picks, event=events)
    def grow(self, at: int, event: str) -> None:
        request, model = self.pick(at)
        after = self.event(event)
        if model.state is not R.RUNNING or model.tokens == model.total:
            with pytest.raises(LocalProtocolError):
                self.here.grow(request, after=after)
            return
        self.here.grow(request, after=after)
        model.tokens += 1
        model.events += [after] if after else []

    @precondition(lambda self: self.models)
    @rule(at=picks)
    def hold(self, at: int) -> None:
        request, model = self.pick(at)
        event = Switch()
        self.here.hold(request, after=event)
        model.events.append(event)

    def end(self, at: int, call: Callable[[int, Switch | None], None], to: SparseRequest, event: str) -> None:
        request, model = self.pick(at)
        after = self.event(event)
        if model.state is R.RESERVED and to is R.FINISHED:
            with pytest.raises(LocalProtocolError):
                call(request, after)
            return
        call(request, after)
        call(request, None)
        model.events += [after] if after else []
        if model.state in SPARSE_REQUEST_ENDS or (to is R.RETRACTED and model.state is not R.RUNNING):
            return
        model.state, model.returning = to, True

    @precondition(lambda self: self.models)
    @rule(at=picks, event=events)
    def retract(self, at: int, event: str) -> None:
        self.end(at, lambda request, after: self.here.retract(request, after=after), R.RETRACTED, event)

    @precondition(lambda self: self.models)
    @rule(at=picks, event=events)
    def finish(self, at: int, event: str) -> None:
        self.end(at, lambda request, after: self.here.finish(request, after=after), R.FINISHED, event)

    @precondition(lambda self: self.models)
    @rule(at=picks, event=events)
    def drop(self, at: int, event: str) -> None:
        self.end(at, lambda request, after: self.here.retract(request, drop=True, after=after), R.DROPPED, event)

    @precondition(lambda self: self.forgotten)
    @rule(at=picks)
    def end_who_is_forgotten(self, at: int) -> None:
        request = self.forgotten[at % len(self.forgotten)]
        self.here.retract(request)
        self.here.finish(request)
        with pytest.raises(LocalProtocolError):
            self.here.admit_direct(request)

    @precondition(lambda self: self.models)
    @rule(at=picks)
    def fire(self, at: int) -> None:
        waited_for = [event for model in self.models.values() for event in model.events if not event.fired]
        if waited_for:
            waited_for[at % len(waited_for)].fired = True

    @rule()
    def collect(self) -> None:
        expected: list[int] = []
        for request, model in list(self.models.items()):
            if model.returning and model.quiet:
                model.row, model.slots, model.events, model.returning = None, set(), [], False
                if model.state in SPARSE_REQUEST_ENDS:
                    del self.models[request]
                    self.forgotten.append(request)
                    expected += [request] if model.landed else []
        assert sorted(self.here.collect()) == expected

    @invariant()
    def what_is_free_is_what_nobody_has(self) -> None:
        here = self.here
        assert (here.logical_free, here.rows_free, here.device_free) == self.free()
        assert {request: here.state(request) for request in self.models} == {
            request: model.state for request, model in self.models.items()
        }
        assert set(here.running) == {request for request, model in self.models.items() if model.state is R.RUNNING}
        assert len(here) == sum(model.state in LIVE for model in self.models.values())
        assert here.is_idle == (not self.models)

    def teardown(self) -> None:
        for request, model in self.models.items():
            self.here.retract(request, drop=True)
            for event in model.events:
                event.fired = True
        self.here.collect()
        assert self.here.is_idle


class SchedulerMachine(RuleBasedStateMachine):
    """A queue is a list: who is placed was its head, and a head waits no longer than the limits and events take."""

    capacity = Capacity(rows=3, logical_tokens=70, device_slots=20, hot=6, top_k=4)
    limits = Limits(hisparse_queue_max=6, hisparse_wait_steps=2, hisparse_quantum_steps=3)

    def __init__(self) -> None:
        super().__init__()
        self.queue: Scheduler
        self.serial = 0
        self.left: dict[int, int] = {}  # tokens that a request may still grow by, for those that have not ended
        self.wanted: dict[int, int] = {}  # logical tokens of those whose host slots were not released
        self.newcomers: list[int] = []
        self.line: list[int] = []
        self.running: dict[int, int] = {}  # and the steps that each has made since it was placed
        self.used: dict[int, list[Switch]] = {}  # events behind a request, since it was placed
        self.head: tuple[int, int] = (0, 0)  # the head of the line, and the steps that it may still wait

    @rule(policy=st.sampled_from(POLICIES))
    @precondition(lambda self: not hasattr(self, "queue"))
    def begin(self, policy: str) -> None:
        self.queue = Scheduler(Coordinator(self.capacity), self.limits, policy=policy)  # pyright: ignore

    def reserve(self) -> None:
        while self.newcomers:
            taken = sum(self.wanted[each] for each in self.wanted if each not in self.newcomers)
            if taken + self.wanted[self.newcomers[0]] > self.capacity.logical_tokens:
                return
            self.line.append(self.newcomers.pop(0))

    @precondition(lambda self: hasattr(self, "queue"))
    @rule(tokens=tokens, growth=st.integers(1, 12))
    def offer(self, tokens: int, growth: int) -> None:
        queue, waiting = self.queue, len(self.newcomers) + len(self.line)
        assert (queue.waiting, queue.full) == (waiting, waiting >= self.limits.hisparse_queue_max)
        self.serial += 1
        with pytest.raises(CapacityError, match="queue entries") if queue.full else nullcontext():
            queue.offer(self.serial, host(tokens + growth), tokens=tokens, growth=growth)
        if waiting < self.limits.hisparse_queue_max:
            self.left[self.serial], self.wanted[self.serial] = growth, tokens + growth
            self.newcomers.append(self.serial)
            self.reserve()

    @precondition(lambda self: self.left)
    @rule(at=picks, drop=st.booleans(), event=st.booleans())
    def end(self, at: int, drop: bool, event: bool) -> None:
        self.end_of(sorted(self.left)[at % len(self.left)], drop=drop, event=Switch() if event else None)

    def end_of(self, request: int, *, drop: bool, event: Switch | None) -> None:
        for _ in range(2):
            self.queue.ended(request, drop=drop, after=event)
        self.used.setdefault(request, []).extend([event] if event else [])
        if request in self.newcomers:
            self.wanted[request] = 0  # it never had its logical tokens
        del self.left[request]
        self.running.pop(request, None)
        for line in (self.line, self.newcomers):
            if request in line:
                line.remove(request)

    @precondition(lambda self: self.running)
    @rule(at=picks)
    def retract_on_a_whim(self, at: int) -> None:
        self.take(sorted(self.running)[at % len(self.running)], Switch())

    def take(self, request: int, event: Switch) -> None:
        self.queue.retract(request, after=event)
        self.used[request].append(event)
        del self.running[request]
        self.line.append(request)

    @precondition(lambda self: self.used)
    @rule(at=picks)
    def fire(self, at: int) -> None:
        waited_for = [event for each in self.used.values() for event in each if not event.fired]
        if waited_for:
            waited_for[at % len(waited_for)].fired = True

    @precondition(lambda self: self.used)
    @rule()
    def fire_all(self) -> None:
        for events in self.used.values():
            for event in events:
                event.fired = True

    @precondition(lambda self: hasattr(self, "queue"))
    @rule(late=st.booleans())
    def step(self, late: bool) -> None:
        while self.turn(late):
            pass
        event = Switch()
        event.fired = not late
        batch = list(self.running)
        self.queue.stepped(batch, after=event)
        for request in batch:
            self.used[request].append(event)
            self.running[request] += 1
            self.left[request] -= 1
            if not self.left[request]:
                self.end_of(request, drop=False, event=None)

    def turn(self, late: bool) -> bool:
        queue = self.queue
        before = [request for request in self.wanted if request not in self.left]
        turn = queue.next(0.0)
        expected = [each for each in before if all(event.fired for event in self.used.get(each, []))]
        assert sorted(turn.released) == expected
        for request in expected:
            del self.wanted[request]
            self.used.pop(request, None)
        self.reserve()
        for placement in turn.place:
            assert placement.request == self.line.pop(0), "not whose turn it was"
            assert all(event.fired for event in self.used.get(placement.request, []))
            self.running[placement.request], self.used[placement.request] = 0, []
        self.check_head(turn.retract)
        for request in turn.retract:
            assert self.running[request] >= self.limits.hisparse_quantum_steps
            event = Switch()
            event.fired = not late
            self.take(request, event)
        return bool(turn.retract)

    def check_head(self, retract: list[int]) -> None:
        """A head that stays one while every event has fired is placed within this many steps."""
        head = self.line[0] if self.line else 0
        busy = any(not event.fired for each in self.used.values() for event in each)
        most = max(self.limits.hisparse_wait_steps, self.limits.hisparse_quantum_steps)
        left = self.head[1] if self.head[0] == head and not busy else most
        assert not head or busy or retract or left > 0, f"{head} waits forever"
        self.head = head, left - 1

    @precondition(lambda self: hasattr(self, "queue"))
    @invariant()
    def nobody_is_lost(self) -> None:
        assert set(self.queue.coordinator.running) == set(self.running)
        assert self.queue.waiting == len(self.line) + len(self.newcomers)
        assert self.queue.is_idle == (not self.wanted)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            for _ in range(2_000):
                if not self.wanted:
                    break
                self.fire_all()
                self.step(late=False)
            assert self.queue.is_idle, "not everybody has come to his end"


TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(max_examples=some(150), stateful_step_count=50, derandomize=True)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=some(100), stateful_step_count=50, derandomize=True)

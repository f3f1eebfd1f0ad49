"""What a write waits for: asked by Python, or by whoever knows CUDA's events."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest

from pdtransfer.handoff.ready_gate import AllEvents, ReadyGate
from tests.support.client_pair import Late


class Handle(Late):
    def __init__(self, handle: int) -> None:
        super().__init__()
        self.cuda_event = handle


def test_an_event_of_any_library_is_asked_until_it_has_fired() -> None:
    late = Late()
    gate = ReadyGate(late)
    assert gate.next is None
    assert not gate.poll(5)
    late.fired = True
    assert gate.poll(7)
    assert gate.poll(9)
    assert (gate.opened_ns, late.asked) == (7, 2)


@pytest.mark.parametrize("events", [[Handle(3)], [Handle(3), Handle(4), Handle(5)]])
def test_cuda_events_are_waited_for_one_by_one_and_the_last_opens_it(events: Sequence[Handle]) -> None:
    gate = ReadyGate(AllEvents(events) if len(events) > 1 else events[0])
    for number, event in enumerate(events):
        assert gate.next == (number, event.cuda_event)
        assert gate.nearly is (number == len(events) - 1)
        assert not gate.opened_ns
        gate.fired(number, 10 + number)
        gate.fired(number, 20 + number)  # a second thread has seen the same
    assert gate.next is None
    assert gate.opened_ns == 9 + len(events)
    assert not any(event.asked for event in events)


def test_where_one_of_several_is_no_cuda_event_python_asks_all() -> None:
    events = [Handle(3), Late()]
    gate = ReadyGate(AllEvents(events))
    assert gate.next is None
    for event in events:
        assert not gate.poll(1)
        event.fired = True
    assert gate.poll(2)


def test_what_another_library_calls_events_is_its_own() -> None:
    class Foreign(Late):
        events = (Handle(3),)

    gate = ReadyGate(Foreign())
    assert gate.next is None
    assert not gate.poll(1)


def test_a_cuda_event_that_was_never_recorded_has_no_handle_to_wait_for() -> None:
    assert ReadyGate(Handle(0)).next is None


def test_an_event_stays_whose_handle_somebody_waits_for_while_python_asks_too() -> None:
    events = [Handle(3), Handle(4)]
    events[0].fired, there = True, weakref.ref(events[0])
    gate = ReadyGate(AllEvents(events))
    events.clear()
    assert not gate.poll(1)
    assert gate.next == (0, 3)
    assert there() is not None

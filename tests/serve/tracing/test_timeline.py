"""Spans: what reports them, how many are kept, under which label."""

from __future__ import annotations

import pytest

import pdtransfer.serve.tracing.timeline
from pdtransfer.kernels.stream import PENDING_SPANS_MAX, DeviceSpans
from pdtransfer.serve.tracing.timeline import (
    ADMISSION,
    COMPUTE,
    EXPOSED,
    FIRST_TOKEN,
    LANDING,
    QUEUE,
    SLOTS,
    Journeys,
    Timeline,
)


def test_the_latest_spans_are_kept_and_taken_once() -> None:
    timeline = Timeline("prefill", spans_max=3)
    for index in range(5):
        timeline("compute", f"layer {index}", index, index + 0.5, room=7, layer=index)
    taken = timeline.take()
    assert [span.layer for span in taken] == [2, 3, 4]
    assert {(span.process, span.lane, span.room, span.seconds) for span in taken} == {("prefill", "compute", 7, 0.5)}
    assert timeline.take() == []


def test_who_is_never_idle_keeps_a_bounded_number_of_spans_to_itself() -> None:
    timeline = Timeline("prefill")
    spans = DeviceSpans(timeline, None)
    for room in range(2 * PENDING_SPANS_MAX):
        with spans.span("compute", "", room=room):
            pass
    rooms = [span.room for span in timeline.take()]
    spans.report()
    rooms += (left := [span.room for span in timeline.take()])
    assert len(left) <= PENDING_SPANS_MAX
    assert rooms == list(range(2 * PENDING_SPANS_MAX)), "each once, in order"


def test_a_journey_is_drawn_from_each_event_to_the_next_under_the_rooms_label() -> None:
    timeline = Timeline("decode")
    journeys = Journeys(timeline)
    journeys.begin(0xABC, 1)
    journeys.reached(0xABC, "control", "wait for slots")
    journeys.reached(0xABC, "landing", "READY", byte_count=5)
    journeys.forget(0xABC)
    journeys.reached(0xABC, "generate", "stop")
    first, second = timeline.take()
    assert (first.lane, first.room, first.end_s) == ("control", 0xABC, second.begin_s)
    assert (second.lane, second.byte_count) == ("landing", 5)
    assert journeys.engine is not None
    for serial in (1, 0, 9):
        journeys.engine("step", "", 0.0, 1.0, room=serial)
    assert [span.room for span in timeline.take()] == [0xABC, 0, 0], "also when it is over; no room, unknown ones"


def test_labels_of_the_latest_rooms_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdtransfer.serve.tracing.timeline, "ROOMS_MAX", 3)
    timeline = Timeline("decode")
    journeys = Journeys(timeline)
    for serial in range(1, 6):
        journeys.begin(100 + serial, serial)
        journeys.forget(100 + serial)
    assert journeys.engine is not None
    for serial in range(1, 6):
        journeys.engine("step", "", 0.0, 1.0, room=serial)
    assert [span.room for span in timeline.take()] == [0, 0, 103, 104, 105]
    assert not journeys._rooms


def at(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Lets the journeys' clock read these times, one after the other."""
    left = iter(times)
    monkeypatch.setattr(pdtransfer.serve.tracing.timeline.time, "monotonic", lambda: next(left))


def test_a_rooms_parts_on_prefill_follow_one_another_without_a_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    journeys = Journeys()
    at(monkeypatch, 10.0, 13.5)
    journeys.begin(7, 1)
    journeys.stepped(7, 11.0, 11.5)
    journeys.stepped(7, 12.0, 13.0)
    journeys.computed(7, by_step=True)
    journeys.written(7)
    journey = journeys.of(7)
    assert journey is not None
    assert [journey.seconds(part) for part in (QUEUE, COMPUTE, EXPOSED)] == [1.0, 2.0, 0.5]
    assert [(span.name, span.begin_s, span.end_s, span.room) for span in journey.spans] == [
        ("queue", 10.0, 11.0, 7), ("compute", 11.0, 13.0, 7), ("exposed", 13.0, 13.5, 7),
    ]  # fmt: skip
    assert journeys.engine is None
    assert not journeys._labels


def test_computing_ends_with_the_token_of_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    journeys = Journeys()
    at(monkeypatch, 10.0, 14.0)
    journeys.begin(7, 1)
    journeys.stepped(7, 11.0, 12.0)
    journeys.computed(7, by_step=False)
    journey = journeys.of(7)
    assert journey is not None
    assert journey.seconds(COMPUTE) == 3.0


def test_a_rooms_parts_on_decode_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    journeys = Journeys()
    at(monkeypatch, 10.0, 12.0, 15.0, 15.75)
    journeys.begin(7, 1)
    journeys.reached(7, *SLOTS)
    journeys.reached(7, *LANDING)
    journeys.admitted(7, 15.5)
    journeys.reached(7, *FIRST_TOKEN)
    journey = journeys.of(7)
    assert journey is not None
    assert [journey.seconds(part) for part in (SLOTS, LANDING, ADMISSION, FIRST_TOKEN)] == [2.0, 3.0, 0.5, 0.75]


def test_a_part_that_a_room_never_reached_is_not_known() -> None:
    journeys = Journeys()
    journeys.begin(7, 1)
    journeys.computed(7, by_step=True)
    journeys.written(7)
    journeys.admitted(7, 1.0)
    journeys.stepped(8, 1.0, 2.0)
    journey = journeys.of(7)
    assert journey is not None
    assert not journey.parts
    assert journey.seconds(QUEUE) is None
    journeys.forget(7)
    assert journeys.of(7) is None

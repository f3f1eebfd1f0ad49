"""Spans: what reports them, how many are kept, under which label."""

from __future__ import annotations

import pytest
import torch

import pdtransfer.tracing.timeline
from pdtransfer.kernels.stream import PENDING_SPANS_MAX, DeviceSpans
from pdtransfer.tracing.timeline import Journeys, Timeline


def test_the_latest_spans_are_kept_and_taken_once() -> None:
    timeline = Timeline("prefill", spans_max=3)
    for at in range(5):
        timeline("compute", f"layer {at}", at, at + 0.5, room=7, layer=at)
    taken = timeline.take()
    assert [span.layer for span in taken] == [2, 3, 4]
    assert {(span.process, span.lane, span.room, span.seconds) for span in taken} == {("prefill", "compute", 7, 0.5)}
    assert timeline.take() == []


def test_who_is_never_idle_keeps_a_bounded_number_of_spans_to_itself() -> None:
    timeline = Timeline("prefill")
    spans = DeviceSpans(timeline, torch.device("cpu"))
    for room in range(2 * PENDING_SPANS_MAX):
        with spans.span("compute", "", room=room):
            pass
    told = [span.room for span in timeline.take()]
    spans.report()
    told += (left := [span.room for span in timeline.take()])
    assert len(left) <= PENDING_SPANS_MAX
    assert told == list(range(2 * PENDING_SPANS_MAX)), "each once, in order"


def test_a_journey_is_told_from_each_thing_to_the_next_under_the_rooms_label() -> None:
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
    monkeypatch.setattr(pdtransfer.tracing.timeline, "ROOMS_MAX", 3)
    timeline = Timeline("decode")
    journeys = Journeys(timeline)
    for serial in range(1, 6):
        journeys.begin(100 + serial, serial)
        journeys.forget(100 + serial)
    assert journeys.engine is not None
    for serial in range(1, 6):
        journeys.engine("step", "", 0.0, 1.0, room=serial)
    assert [span.room for span in timeline.take()] == [0, 0, 103, 104, 105]
    assert not journeys._since


def test_where_nobody_asks_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdtransfer.tracing.timeline.time, "monotonic", None)
    journeys = Journeys(None)
    journeys.begin(7, 1)
    journeys.reached(7, "landing", "READY")
    assert journeys.engine is None
    assert not journeys._labels

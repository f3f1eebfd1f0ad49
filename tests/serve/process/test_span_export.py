"""Spans of requests, as a collector gets them over OTLP and HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not installed: pip install '.[otel]'")

from pdtransfer.errors import Cause
from pdtransfer.serve.process import span_export
from pdtransfer.serve.process.ended_requests import recorded_ends
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.tracing.ended_request import EndedRequest, TraceContext
from pdtransfer.serve.tracing.spans import TimedSpan
from tests.support.collector import Collector, collector

TRACE, SPAN, PARENT = "4b" * 16, "07" * 8, "0a" * 8


def part(lane: str, name: str, begin_s: float, end_s: float) -> TimedSpan:
    return TimedSpan(process="p0", lane=lane, name=name, begin_s=begin_s, end_s=end_s, room=0xAB)


REQUEST = EndedRequest(
    scope="request", role="router", node="router", rooms=(0xAB,), request_id="mine-1",
    trace=TraceContext(TRACE, SPAN), parent_span=PARENT, path="/v1/completions", tokens=7, reason="length", status=200,
    ended_unix_s=1_000.0, total_s=0.25, began_s=7.0,
    spans=(part("request", "to the first token", 7.0, 7.1),),
)  # fmt: skip
ROOM = EndedRequest(
    scope="room", role="prefill", node="p0", rooms=(0xAB,), request_id="mine-1", trace=TraceContext(TRACE, SPAN),
    cause=Cause.TRANSFER, detail="a write failed", ended_unix_s=1_000.0, total_s=0.5,
    began_s=3.0,
    spans=(part("prompt", "queue", 3.0, 3.2), part("prompt", "compute", 3.2, 3.45)),
)  # fmt: skip


@pytest.fixture
def took() -> Iterator[Collector]:
    with collector() as it:
        yield it


def test_a_request_and_its_rooms_are_one_trace_with_the_timelines_names(took: Collector) -> None:
    with recorded_ends(RouterConfig(node="r7", otlp=took.url)) as ended:
        ended(REQUEST)
        ended(ROOM)
    request, room, queue, compute = took.spans()
    assert (request.name, room.name, queue.name, compute.name) == (
        "request", "prefill", "prompt: queue", "prompt: compute",
    )  # fmt: skip
    assert {span.trace_id.hex() for span in took.spans()} == {TRACE}
    assert (request.span_id.hex(), request.parent_span_id.hex()) == (SPAN, PARENT)
    assert room.parent_span_id.hex() == SPAN
    assert {each.parent_span_id for each in (queue, compute)} == {room.span_id}
    assert len({span.span_id for span in took.spans()}) == 4
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == (999_750_000_000, 1_000_000_000_000)
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (999_500_000_000, 999_700_000_000)
    assert (room.status.code, room.status.message) == (2, "a write failed")
    assert request.status.code == 0
    facts = took.attributes(request)
    assert (facts["http.response.status_code"], facts["http.route"]) == (200, "/v1/completions")
    assert (facts["pdtransfer.request_id"], facts["pdtransfer.room"]) == ("mine-1", "00000000000000ab")
    assert took.resources()["service.name"] == "pdtransfer-router"
    assert took.resources()["service.instance.id"] == "r7"


def test_what_has_no_trace_or_is_not_sampled_is_not_sent(took: Collector) -> None:
    with recorded_ends(RouterConfig(otlp=took.url)) as ended:
        ended(replace(REQUEST, trace=None))
        ended(replace(ROOM, trace=TraceContext(TRACE, SPAN, sampled=False)))
        ended(replace(REQUEST, rooms=(), request_id="refused"))
    first, part = took.spans()
    assert took.attributes(first)["pdtransfer.request_id"] == "refused"
    assert (part.name, part.parent_span_id) == ("request: to the first token", first.span_id)


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "CLOSE_S", 0.1)
    with recorded_ends(RouterConfig(otlp="http://127.0.0.1:1")) as ended:
        for _ in range(5_000):
            ended(REQUEST)

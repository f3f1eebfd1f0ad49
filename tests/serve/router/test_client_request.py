"""Records of requests and of their rooms at the router: each once, with its ids, workers, cause and times."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pdtransfer.errors import Cause
from pdtransfer.serve.router.front.client_request import ClientRequest
from pdtransfer.serve.router.front.json_bodies import STATUSES
from pdtransfer.serve.tracing.ended_request import EndedRequest, TraceContext
from tests.serve.router.router_site import LIMITS, Site
from tests.support.vllm_servers import ServerSite
from tests.support.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def rooms(site: Site) -> list[EndedRequest]:
    return [each for each in site.ended if each.scope == "room"]


def requests(site: Site) -> list[EndedRequest]:
    return [each for each in site.ended if each.scope == "request"]


async def ask(site: Site | ServerSite, headers: dict[str, str], **body: Any) -> tuple[int, Mapping[str, str], bytes]:
    path = site.url + "/v1/completions"
    async with site.http.post(path, json={"prompt": "abc", "max_tokens": 7} | body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_recorded_with_its_ids_workers_and_times(site: Site, stream: bool) -> None:
    sent = {"X-Request-Id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    status, headers, _ = await ask(site, sent, stream=stream)
    assert (status, headers["X-Request-Id"]) == (200, "mine-1")
    await until(lambda: len(site.ended) == 2)
    (room,), (request,) = rooms(site), requests(site)
    (begin,) = site.decode[0].begun
    assert request.rooms == room.rooms == (begin.room,)
    assert request.trace == room.trace == TraceContext.parse(begin.traceparent)
    assert request.trace == TraceContext(TRACE, PARENT), "spans are not exported, so there is none of its own"
    assert {each.request_id for each in site.decode[0].begun + site.prefill[0].begun} == {"mine-1"}
    for record in (room, request):
        assert (record.request_id, record.prefill, record.decode) == ("mine-1", "p0", "d0")
        assert (record.state, record.reason, record.tokens, record.kv_bytes) == ("finished", "length", 7, 640)
        assert (record.prompt_tokens, record.cached_tokens, record.stream) == (3, 2, stream)
        assert (record.queue_s, record.prefill_s, record.transfer_s) == (0.001, 0.002, 0.003)
        assert (record.admission_s, record.copy_s, record.model) == (0.004, 12e-6, "m")
        assert record.first_token_s is not None
        assert 0 < record.first_token_s <= record.total_s
        assert record.token_s == (record.total_s - record.first_token_s) / 6
        assert [span.name for span in record.spans] == ["to the first token", "from the first token on"]
    assert (request.status, request.path) == (200, "/v1/completions")


async def test_a_request_without_ids_gets_one_and_no_trace(site: Site) -> None:
    _, headers, _ = await ask(site, {"traceparent": "00-0-0-00"})
    assert re.fullmatch(r"[0-9a-f]{32}", headers["X-Request-Id"])
    (request,) = requests(site)
    assert (request.request_id, request.trace) == (headers["X-Request-Id"], None)
    assert site.decode[0].begun[0].traceparent == ""


@pytest.mark.parametrize("bad", ["x" * 129, "é", "a\tb"])
async def test_an_id_that_may_not_be_passed_on_is_refused_by_name(either: Site | ServerSite, bad: str) -> None:
    status, headers, body = await ask(either, {"X-Request-Id": bad})
    assert (status, json.loads(body)["error"]["param"]) == (400, "X-Request-Id")
    assert re.fullmatch(r"[0-9a-f]{32}", headers["X-Request-Id"])
    (record,) = either.ended
    assert (record.request_id, record.status) == (headers["X-Request-Id"], 400)
    assert not either.at_decode


@pytest.mark.given(prefill=2)
async def test_a_room_that_is_tried_again_has_a_record_of_its_own(site: Site) -> None:
    site.prefill[0].failure = site.prefill[1].failure = "transfer"
    site.decode[0].gate.clear()
    status, headers, _ = await ask(site, {})
    assert status == 502
    first, second = rooms(site)
    (request,) = requests(site)
    assert request.rooms == (*first.rooms, *second.rooms)
    assert len(set(request.rooms)) == 2
    assert {first.prefill, second.prefill} == {"p0", "p1"}
    assert [each.retried for each in (first, second, request)] == [True, False, True]
    assert {each.cause for each in (first, second, request)} == {Cause.TRANSFER}
    assert (request.status, request.detail) == (502, f"{second.prefill}: as told")
    assert request.request_id == headers["X-Request-Id"]
    assert request.first_token_s is None
    assert first.total_s + second.total_s <= request.total_s


@pytest.mark.parametrize(
    ("body", "status", "cause", "detail"),
    [
        ({"max_tokens": 0}, 400, Cause.REFUSED, "max_tokens: Expected `int` >= 1"),
        ({"model": "other"}, 404, Cause.REFUSED, "model: 'other' is not served: m"),
        ({"prompt": ["a"] * 3, "n": 3}, 400, Cause.REFUSED, "n: 9 answers, this router takes at most 8 at once"),
    ],
)
@pytest.mark.given(limits=replace(LIMITS, rooms_max=8))
async def test_a_request_that_gets_no_room_is_recorded_with_its_reason(
    site: Site, body: dict[str, Any], status: int, cause: Cause, detail: str
) -> None:
    assert (await ask(site, {}, **body))[0] == status
    (request,) = site.ended
    assert (request.scope, request.status, request.cause, request.detail) == ("request", status, cause, detail)
    assert (request.rooms, request.room, request.tokens) == ((), 0, 0)


def test_the_cause_of_a_status_has_that_status() -> None:
    for status in {STATUSES[cause] for cause in Cause if cause is not Cause.ABORTED}:
        client = ClientRequest.accept("r", "/", {}, traced=False)
        client.answered(status)
        assert STATUSES[client.cause or Cause.ABORTED] == status


async def test_choices_are_recorded_each_and_together(site: Site) -> None:
    assert (await ask(site, {}, n=3))[0] == 200
    (request,) = requests(site)
    assert sorted(request.rooms) == sorted(room.room for room in rooms(site))
    assert (len(request.rooms), request.tokens, request.kv_bytes, request.cached_tokens) == (3, 21, 3 * 640, 6)


async def test_a_client_that_leaves_is_recorded_as_cancelled(site: Site) -> None:
    site.decode[0].gate.clear()
    task = asyncio.create_task(ask(site, {"X-Request-Id": "gone"}))
    await until(lambda: site.decode[0].begun)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await until(lambda: requests(site))
    for record in site.ended:
        assert (record.request_id, record.state) == ("gone", "cancelled")
    assert (requests(site)[0].status, len(site.ended)) == (499, 2)


def test_a_router_that_exports_spans_has_one_of_its_own_in_each_trace() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    below, first = (ClientRequest.accept("r", "/", each, traced=True) for each in (headers, {}))
    assert below.trace is not None
    assert first.trace is not None
    assert (below.trace.trace_id, below.ended().parent_span, below.trace.sampled) == (TRACE, PARENT, False)
    assert below.trace.span_id != PARENT
    assert (first.ended().parent_span, first.trace.sampled) == ("", True)
    assert TraceContext.parse(first.traceparent) == first.trace
    assert first.trace.trace_id != TRACE


def test_what_is_no_trace_context_is_none() -> None:
    good = f"00-{TRACE}-{PARENT}-01"
    assert str(TraceContext.parse(good)) == good
    assert TraceContext.parse(good[:-2] + "00") == TraceContext(TRACE, PARENT, sampled=False)
    of_zeros = good.replace(TRACE, "0" * 32), good.replace(PARENT, "0" * 16)
    for bad in ("", good + "0", good.upper(), "01" + good[2:], *of_zeros):
        assert TraceContext.parse(bad) is None, bad

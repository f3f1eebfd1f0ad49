"""Replays against an endpoint: what is sent, what is measured, and how failures are counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdtransfer_lab.plan.serving_figures import ServingFigures, Slo
from pdtransfer_lab.plan.trace import Trace, TraceRequest
from pdtransfer_lab.replay.chart import write_chart
from pdtransfer_lab.replay.metrics_watch import slots_taken
from pdtransfer_lab.replay.prompts import prompt_of
from pdtransfer_lab.replay.replay import ReplayOutcome, replay
from pdtransfer_lab.replay.replay_target import ReplayTarget
from pdtransfer_lab.replay.stream import CompletionStream

from pdtransfer.errors import WorldError

ANSWER = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]
TRACE = Trace(tuple(TraceRequest(0.0, 5, 3, (1, index)) for index in range(4)), block_tokens=4)
METRICS = """# HELP pdtransfer_slots Slots
pdtransfer_slots{component="kv",memory="dram"} 100.0
pdtransfer_slots_free{component="kv",memory="dram"} 25.0
pdtransfer_slots{component="index",memory="dram"} 100.0
pdtransfer_slots_free{component="index",memory="dram"} 90.0
"""


def events(*chunks: object) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def chunk(text: str = "a", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


async def streamed(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def replayed(answer: ANSWER, trace: Trace = TRACE, **options: Any) -> tuple[ReplayOutcome, list[dict[str, Any]]]:
    """Replays against a server of this process; returns the bodies that it got as well."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json() | {"headers": dict(request.headers)})
        return await answer(bodies[-1], request)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def run() -> ReplayOutcome:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/completions", complete), web.get("/v1/models", models), web.get("/metrics", metrics)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        target = ReplayTarget(url=f"http://{host}:{port}", **options)
        if options.get("metrics"):
            target = replace(target, metrics=(f"{host}:{port}", "127.0.0.1:1"))
        try:
            return await replay(trace, target, Slo(60.0, 60.0))
        finally:
            await runner.cleanup()

    return asyncio.run(run()), bodies


async def good(_: dict[str, Any], request: web.Request) -> web.StreamResponse:
    return await streamed(
        request, events(chunk()), events(chunk(), chunk("b", "length")), events(USAGE) + b"data: [DONE]\n\n"
    )


def test_requests_are_sent_as_the_trace_has_them_and_counted_by_their_usage() -> None:
    done, bodies = replayed(good, api_key="k", metrics=("here",))
    report = done.report()
    assert len(bodies) == 4
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == ("m", 3, 3, True)
        assert body["headers"]["Authorization"] == "Bearer k"
        assert len(body["prompt"]) == 5
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 1, "they share their first block"
    assert len({tuple(body["prompt"]) for body in bodies}) > 1
    assert (report["answered"], report["good"], report["errors"]) == (4, 4, {})
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (20, 16, 12)
    assert (report["arena_high_water_share"], report["arena_high_water_tokens"]) == (0.75, 75)
    assert len(done.late_s) == 4
    assert report["short_answers"] == report["answers_without_usage"] == 0
    assert replayed(good)[0].report()["arena_high_water_share"] is None


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((events(chunk()), events({"error": {"message": "no"}})), "error in the stream"),
        ((b"data: {no json\n\n",), "not a completion's events"),
        ((events(chunk()),), "cut off"),
        ((b"data: [DONE]\n\n",), "no token"),
        ((b"hello",), "no token"),
        ((events({"choices": [{"text": 7}]}),), "not a completion's events"),
        ((events(USAGE | {"usage": {"completion_tokens": -1}}),), "not a completion's events"),
    ],
)
def test_a_broken_answer_is_counted_under_its_own_word(parts: tuple[bytes, ...], status: str) -> None:
    done, _ = replayed(lambda _, request: streamed(request, *parts))
    assert done.report()["errors"] == {status: 4}
    assert done.report()["good"] == 0


def test_statuses_and_lost_connections_are_counted() -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        match len(seen := body["prompt"]) and sum(seen) % 2:
            case 0:
                return web.Response(status=429)
            case _:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()

    errors = replayed(answer)[0].report()["errors"]
    assert set(errors) <= {"429", "connection"}
    assert sum(errors.values()) == 4


def test_what_the_sender_may_not_send_is_counted_and_not_sent() -> None:
    async def slow(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await good(body, request)

    done, bodies = replayed(slow, in_flight_max=1)
    assert done.report()["errors"]["not sent"] == 4 - len(bodies) > 0


def test_an_endpoint_without_a_model_is_named() -> None:
    async def run(url: str) -> None:
        await replay(TRACE, ReplayTarget(url=url), Slo())

    with pytest.raises(WorldError, match=r"127\.0\.0\.1:1/v1/models"):
        asyncio.run(run("http://127.0.0.1:1"))


def test_equal_hashes_give_equal_text_and_others_do_not() -> None:
    trace_request, two = TraceRequest(0, 10, 1, (7, 8, 9)), TraceRequest(0, 9, 1, (7, 8, 10))
    for kind in ("ids", "text"):
        first, second = (prompt_of(each, block_tokens=4, kind=kind) for each in (trace_request, two))
        if isinstance(first, str):
            first, second = first.split(), second.split()
        assert (len(first), len(second)) == (10, 9)
        assert first[:8] == second[:8]
        assert first[8:9] != second[8:]
    ids = prompt_of(TraceRequest(0, 4_000, 1, (3,)), block_tokens=4_000, vocabulary=40)
    assert set(ids) == set(range(32, 40))
    assert ids[:5] == prompt_of(TraceRequest(0, 5, 1, (3,)), block_tokens=4_000, vocabulary=40)


def test_a_stream_is_read_however_it_is_cut() -> None:
    data = events(chunk(), chunk(""), chunk("", "stop"), USAGE) + b"data: [DONE]\r\n: comment\n"
    for size in (1, 7, len(data)):
        stream = CompletionStream()
        for offset in range(0, len(data), size):
            stream.feed(data[offset : offset + size], float(offset))
        assert (len(stream.times_s), stream.done, stream.error) == (2, True, "")
        assert (stream.prompt_tokens, stream.output_tokens, stream.cached_tokens) == (5, 3, 4)


def test_a_line_without_an_end_is_not_kept() -> None:
    stream = CompletionStream()
    for _ in range(6):
        stream.feed(b"x" * (1 << 20), 0.0)
    assert stream.error == "not an event stream"


def test_slots_taken_are_read_by_component() -> None:
    found = slots_taken(METRICS + 'pdtransfer_slots{component="other"} 5\n')
    assert sorted(found.values()) == [(10.0, 100.0), (75.0, 100.0)]


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_a_chart_is_drawn_with_requests_and_without(name: str, tmp_path: Path) -> None:
    figures = ServingFigures(Slo(0.5, None))
    write_chart(figures, tmp_path / name, "none")
    for index in range(9):
        figures.answered(
            at_s=index, ttft_s=0.1 * index, total_s=1.0 + index, prompt_tokens=1, cached_tokens=0, output_tokens=5
        )
    write_chart(figures, tmp_path / name, "nine")
    assert (tmp_path / name).read_bytes()[:4] in (b"\x89PNG", b"<?xm")

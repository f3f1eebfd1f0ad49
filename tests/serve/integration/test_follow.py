"""A request is followed by its id through the logs and the spans of real processes, also one whose decode dies."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not installed: pip install '.[otel]'")

from tests.support.collector import Collector, collector
from tests.support.fleets import Site, running
from tests.support.waiting import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def ask(site: Site, request_id: str, **more: Any) -> tuple[int, dict[str, Any]]:
    headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    body = {"prompt": "follow me", "max_tokens": 6, "ignore_eos": True} | more
    async with site.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.headers["X-Request-Id"] == request_id
        return response.status, await response.json()


async def lines(site: Site, role: str, request_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    async def some() -> bool:
        every = [json.loads(line) for line in site.log(site.fleet.of(role)[0]).splitlines()]
        found[:] = [line for line in every if line.get("request_id") == request_id]
        return bool(found)

    await until(some, f"{role} logs {request_id}")
    return found


async def test_a_request_is_one_line_in_each_process_and_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # spans are sent at once, and not within 5 s
    with collector() as took:
        own = {"log_format": "json", "otlp": took.url}
        async with running(tmp_path, ends_as=(-signal.SIGKILL,), router=own, prefills=[own], decodes=[own]) as site:
            await follow(site)
            await until(lambda: "decode" in [span.name for span in took.spans()], "decode has sent its spans")
            await lose(site)
        check(took)


async def follow(site: Site) -> None:
    status, answer = await ask(site, "mine-1")
    assert status == 200
    (of_router,), (of_prefill,), (of_decode,) = [
        await lines(site, role, "mine-1") for role in ("router", "prefill", "decode")
    ]
    for line in (of_router, of_prefill, of_decode):
        assert (line["level"], line["state"], line["trace_id"]) == ("INFO", "finished", TRACE)
        assert line["room"] == answer["pdtransfer"]["room"]
        assert (line["prefill"], line["decode"], line["prompt_tokens"]) == ("prefill-0", "decode-0", 9)
        assert line["kv_bytes"] == answer["pdtransfer"]["kv_bytes"]
    assert (of_router["tokens"], of_decode["tokens"], of_router["status"]) == (6, 6, 200)
    assert of_router["message"] == "request finished"
    for name in ("queue_ms", "prefill_ms", "transfer_ms"):
        assert of_router[name] == pytest.approx(of_prefill[name], abs=0.002)
    assert of_router["admission_ms"] == pytest.approx(of_decode["admission_ms"], abs=0.002)
    assert of_router["first_token_ms"] < of_router["total_ms"]


async def lose(site: Site) -> None:
    events = site.events("held", max_tokens=1_500)
    await anext(events)
    site.decode.process.kill()
    await site.decode.process.wait()
    last = [event async for event in events][-1]
    assert last["error"]["code"] == "peer_lost"

    def failures() -> list[dict[str, Any]]:
        every = [json.loads(line) for line in site.log(site.router).splitlines()]
        return [line for line in every if line.get("cause") == "peer_lost"]

    await until(failures, "the failure is logged")
    (failed,) = failures()
    assert (failed["level"], failed["message"], failed["status"]) == ("WARNING", "request failed: peer_lost", 503)
    assert (failed["decode"], failed["tokens"] > 0) == ("decode-0", True)


def check(took: Collector) -> None:
    spans = [span for span in took.spans() if span.trace_id.hex() == TRACE]
    by_name = {span.name: span for span in spans}
    request = by_name["request"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    for name in ("room", "prefill", "decode"):
        assert by_name[name].parent_span_id == request.span_id
    above = {
        "prompt: queue": "prefill", "prompt: compute": "prefill", "transfer: exposed": "prefill",
        "control: wait for slots": "decode", "landing: READY": "decode", "admission: READY to first step": "decode",
        "first token: READY to first token": "decode", "generate: length": "decode",
        "request: to the first token": "room", "request: from the first token on": "room",
    }  # fmt: skip
    assert {name: by_name[name].parent_span_id for name in above} == {
        name: by_name[parent].span_id for name, parent in above.items()
    }

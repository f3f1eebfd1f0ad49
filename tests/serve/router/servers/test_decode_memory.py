"""Requests that wait for a decode server's memory: the router names decode, wherever it waits itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdtransfer.serve.router.backends.servers import backend
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.backends.servers.server_pool import Waiting
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import LIMITS, ServerSite, server_site
from tests.support.waiting import until

LATE = replace(LIMITS, room_deadline_ms=300)
WHY = "the first needs 1662 tokens, --num-reserved-decode-tokens 512 among them: 900 of 1200 are free"
METRIC = "pdtransfer_server_waiting_requests"


@pytest.mark.given(of=FakeSglang, prefill=2, limits=LATE)
async def test_a_request_that_decode_does_not_take_is_no_failure_of_prefill(site: ServerSite) -> None:
    """SGLang's prefill answers only once decode has the KV."""
    (decode,) = site.decode
    decode.shown = {"waiting": {"requests": 2, "why": WHY}}
    for server in site.servers:
        server.gate.clear()
    status, answer, _ = await site.post()
    message = answer["error"]["message"]
    assert (status, answer["error"]["code"]) == (504, "deadline")
    assert message.startswith(f"{decode.url}: has not taken the KV from http://127.0.0.1:")
    assert message.endswith(f" within 300 ms: 2 requests wait for its memory: {WHY}")
    asked = [prefill for prefill in site.prefill if prefill.seen]
    assert len(asked) == 2, "another pair is tried once, since decode may have memory by then"
    assert all(server.identity for server in site.backend.pool.prefill), "prefill is what it was"


@pytest.mark.parametrize("shown", [{}, {"waiting": {"requests": 0, "why": ""}}, {"waiting": {"requests": -1}}])
@pytest.mark.given(of=FakeSglang, limits=LATE)
async def test_where_decode_has_memory_either_may_be_late(site: ServerSite, shown: dict) -> None:
    site.decode[0].shown = shown
    for server in site.servers:
        server.gate.clear()
    status, answer, _ = await site.post()
    assert (status, answer["error"]["code"]) == (504, "deadline")
    assert answer["error"]["message"].startswith(f"{site.decode[0].url}: has not taken the KV from")
    assert answer["error"]["message"].endswith("within 300 ms; either may be late")


@pytest.mark.given(limits=LATE)
async def test_a_prefill_of_vllm_that_does_not_answer_is_late_itself(site: ServerSite) -> None:
    """It answers when the prompt is computed, whatever decode waits for."""
    site.prefill[0].gate.clear()
    status, answer, _ = await site.post()
    assert (status, answer["error"]["message"]) == (504, f"{site.prefill[0].url}: no answer in time")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_a_wait_is_in_health_metrics_and_log(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "METRICS_S", 0.0)
    caplog.set_level("INFO")
    of = {"of": FakeSglang} if engine == "sglang" else {}
    async with server_site(**of) as site:
        (decode,) = site.decode

        def wait(requests: int) -> None:
            decode.counted = "\n".join(
                f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}} {count}'
                for reason, count in (("capacity", float(requests)), ("deferred", 7.0))
            )
            if isinstance(decode, FakeSglang):
                decode.shown = {"waiting": {"requests": requests, "why": WHY if requests else ""}}

        def logged(text: str) -> bool:
            return any(text in record.getMessage() for record in caplog.records)

        wait(3)
        await until(lambda: logged(f"decode {decode.url}: 3 requests wait for its memory: "))
        servers = json.loads((await site.get("/health"))[1])["servers"]
        shown = {server["role"]: server["waiting"] for server in servers}
        assert (shown["prefill"], shown["decode"]["requests"]) == (None, 3)
        assert f'{METRIC}{{url="{decode.url}"}} 3.0' in (await site.get("/metrics"))[1]
        wait(0)
        await until(lambda: logged(f"decode {decode.url}: no request waits for its memory any more"))
        assert [record.levelname for record in caplog.records if "its memory" in record.getMessage()] == [
            "WARNING",
            "INFO",
        ]


def test_ranks_wait_together_and_an_answer_of_another_form_is_unknown() -> None:
    sglang, vllm = DIALECTS["sglang"], DIALECTS["vllm"]
    states = (
        b'[{"pdtransfer": {"waiting": {"requests": 1, "why": "a"}}}, {}, {"pdtransfer": {"waiting": {"requests": 2}}}]'
    )
    assert sglang.waiting(b'{"internal_states": %s}' % states) == Waiting(3, "a")
    for answer in (b"", b"[]", b'{"internal_states": 5}', b'{"error": "Unauthorized"}'):
        assert sglang.waiting(answer) is None
    line = b'vllm:num_requests_waiting_by_reason{engine="%d",reason="capacity"} %d.0\n'
    counted = vllm.waiting(line % (0, 2) + line % (1, 3))
    assert counted is not None
    assert counted.requests == 5
    assert vllm.waiting(b"vllm:num_requests_waiting_by_reason{" + b'reason="capacity",' * (1 << 18)) is None  # in time
    assert vllm.waiting(b"vllm:num_requests_waiting 5.0") is None

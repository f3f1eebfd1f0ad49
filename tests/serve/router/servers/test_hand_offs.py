"""What decode servers say of their hand-offs, read from their metrics and answers."""

from __future__ import annotations

import json
import logging

import pytest

from pdtransfer.serve.router.backends.servers import backend, hand_offs
from pdtransfer.serve.router.backends.servers.hand_offs import (
    ComputedHandOffs,
    HandOffs,
    Received,
    differences,
    hand_offs_of,
    received_of,
)
from tests.support.vllm_servers import server_site
from tests.support.waiting import until

OF_VLLM = """# HELP vllm:pdtransfer_rooms_total Hand-offs on one rank, by how they ended.
# TYPE vllm:pdtransfer_rooms_total counter
vllm:pdtransfer_rooms_total{end="received",engine="0",model_name="m"} 12.0
vllm:pdtransfer_rooms_total{end="failed",engine="0",model_name="m"} 3.0
vllm:pdtransfer_rooms_total{end="received",engine="1",model_name="m"} 1.0
vllm:pdtransfer_bytes_total{direction="received",engine="0",model_name="m"} 1.5e+06
vllm:pdtransfer_bytes_total{direction="sent",engine="0",model_name="m"} 7.0
vllm:pdtransfer_computed_total{engine="0",model_name="m"} 2.0
vllm:pdtransfer_refusals_total{engine="0",model_name="m",fact="block_size=32"} 2.0
vllm:pdtransfer_refusals_created{engine="0",model_name="m",fact="no"} 2.0
vllm:num_requests_running{engine="0"} 4.0
"""


def test_metrics_are_summed_over_engines() -> None:
    assert hand_offs_of(OF_VLLM.encode()) == HandOffs(13, 2, 1_500_000, ("block_size=32",))


def test_what_differs_is_named_with_both_values() -> None:
    prefills: dict[str, object] = {
        "http://p0": {"block_size": "16", "dtype": "float32"}, "http://p1": {"block_size": "32"}, "http://p2": None,
        "http://p3": {"block_size": [16]},
    }  # fmt: skip
    lines = differences("http://d0", HandOffs(refusals=("block_size=32", "kv_dtype=fp8")), prefills)
    assert lines == ["block_size: http://p0 has '16', http://d0 '32'"]


@pytest.mark.parametrize("text", [b"", b"vllm:num_requests_running 4.0", b"<html>", b"\xff\xfe"])
def test_a_server_without_our_connector_reports_nothing(text: bytes) -> None:
    assert hand_offs_of(text) is None


@pytest.mark.parametrize("value", ["..", "1e9999", "1" * 400, "nan", "-1"])
def test_numbers_that_are_none_count_for_nothing(value: str) -> None:
    text = f'vllm:pdtransfer_computed_total{{engine="0"}} {value}\n' + OF_VLLM
    assert (hand_offs_of(text.encode()) or HandOffs()).received == 13


def test_texts_of_a_server_are_bounded() -> None:
    line = 'vllm:pdtransfer_refusals_total{{fact="{}{}"}} 1.0\n'
    found = hand_offs_of("".join(line.format(at, "x" * 10_000) for at in range(100)).encode())
    assert found is not None
    assert len(found.refusals) == hand_offs.WHYS_MAX
    assert all(len(each) == 256 for each in found.refusals)


def test_a_warning_is_due_beyond_a_tenth_of_enough_requests() -> None:
    share = ComputedHandOffs()
    assert share.take(HandOffs(100, 50)) is None, "before this router looked"
    assert share.take(HandOffs(104, 54)) is None, "too few to tell"
    text = "5 of its last 10 requests were computed there, since their KV was not received: model"
    assert share.take(HandOffs(105, 55, 0, ("model",))) == text
    assert share.take(HandOffs(123, 57)) is None, "2 of 20 are a tenth"
    assert share.take(HandOffs(123, 58)) is not None
    assert share.take(HandOffs(0, 1)) is None, "another process"


def test_an_answer_reports_whether_its_kv_was_received() -> None:
    body = {"choices": [{"text": "x"}], "kv_transfer_params": {"kv_bytes": 7, "kv_lost": True}}
    for text in (json.dumps(body), json.dumps(body, separators=(",", ":"))):
        assert received_of(text.encode()) == Received(7, True)
    forged = json.dumps({"choices": [{"text": '"kv_transfer_params": {"kv_bytes": 1, "kv_lost": true}'}]})
    for text in (forged, json.dumps({"kv_transfer_params": {"do_remote_prefill": True}}), "", "{}"):
        assert received_of(text.encode()) is None
    assert received_of(b'"kv_transfer_params": {"kv_lost": 3}') is None


async def test_a_prompt_that_decode_computed_shows_in_the_record_and_in_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(backend, "METRICS_S", 0.02)
    async with server_site() as it:
        await it.meet()
        it.ended.clear()
        it.decode[0].reports_kv = True
        assert (await it.post())[0] == 200
        it.decode[0].lost = True
        assert (await it.post())[0] == 200
        await it.stream()
        landed, lost, stream = it.ended
        assert (landed.kv_bytes, lost.kv_bytes, stream.kv_bytes) == (4_096, 0, None)
        assert lost.detail == "decode computed the prompt: its KV was not received"
        assert landed.detail == ""
        assert it.backend.metrics.prompts_computed == 1
        counts = 'vllm:pdtransfer_rooms_total{end="received"} %d\nvllm:pdtransfer_computed_total{e="0"} %d\n'
        it.decode[0].counted = counts % (4, 0)
        await until(lambda: it.server(it.decode[0]).hand_offs == HandOffs(4))
        it.decode[0].counted = counts % (12, 2) + 'vllm:pdtransfer_refusals_total{fact="dtype=bfloat16"} 2.0\n'
        warning = f"decode {it.decode[0].url}: 2 of its last 10 requests were computed there, since their KV was not"
        await until(lambda: any(warning in each.getMessage() for each in caplog.records))
        prefill, decode = json.loads((await it.get("/health"))[1])["servers"]
        assert decode["hand_offs"] == {"received": 12, "computed": 2, "kv_bytes": 0, "refusals": ["dtype=bfloat16"]}
        assert decode["differs"] == [f"dtype: {prefill['url']} has 'float32', {decode['url']} 'bfloat16'"]
        assert prefill["identity"]["facts"] == {"dtype": "float32"}
        _, text = await it.get("/metrics")
        (line,) = [each for each in text.splitlines() if each.startswith("pdtransfer_server_hand_offs_computed_total{")]
        assert line.endswith(" 2.0")

"""The log line of an ended request: its level, its fields, in text and as JSON, whatever a peer put into it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from pdtransfer.errors import Cause
from pdtransfer.serve.process import logs
from pdtransfer.serve.process.request_lines import LINES_A_SECOND, fields_of, level_of, log_ended
from pdtransfer.serve.tracing.ended_request import EndedRequest, TraceContext

DONE = EndedRequest(
    scope="request", role="router", node="router", rooms=(0xAB,), request_id="mine-1",
    trace=TraceContext("4b" * 16, "07" * 8), prefill="p0", decode="d0", model="m", path="/v1/completions",
    prompt_tokens=3, cached_tokens=0, tokens=7, kv_bytes=640, reason="length", status=200, total_s=0.25,
    queue_s=0.001, prefill_s=0.002, transfer_s=0.0030004, first_token_s=0.1,
)  # fmt: skip
LOST = replace(DONE, reason="", status=503, cause=Cause.PEER_LOST, detail='d0: "gone"\nx=1', transfer_s=None)


def test_a_line_states_what_is_known_by_name(started: Callable[..., Path]) -> None:
    file = started()
    log_ended(DONE)
    (line,) = file.read_text().splitlines()
    assert line.partition(" INFO router pdtransfer.requests: ")[2] == (
        f"request finished request_id=mine-1 room=00000000000000ab trace_id={'4b' * 16} state=finished status=200 "
        "reason=length path=/v1/completions model=m prefill=p0 decode=d0 prompt_tokens=3 cached_tokens=0 tokens=7 "
        "kv_bytes=640 queue_ms=1.0 prefill_ms=2.0 transfer_ms=3.0 first_token_ms=100.0 total_ms=250.0"
    )


def test_a_failure_is_a_warning_of_one_line_with_its_cause(started: Callable[..., Path]) -> None:
    file = started()
    log_ended(LOST)
    (line,) = file.read_text().splitlines()
    assert " WARNING router pdtransfer.requests: request failed: peer_lost " in line
    assert line.endswith(r'total_ms=250.0 detail="d0: \"gone\"\nx=1"')


def test_no_value_can_pass_for_further_fields(started: Callable[..., Path]) -> None:
    file = started()
    log_ended(replace(LOST, detail=r'gone\" status=200 x="'))
    assert file.read_text().endswith(r'total_ms=250.0 detail="gone\\\" status=200 x=\""' + "\n")


def test_json_has_the_same_fields_beside_time_and_level(started: Callable[..., Path]) -> None:
    file = started(log_format="json")
    log_ended(LOST)
    logging.getLogger("pdtransfer.x").error("not %d\n", 7)
    line, other = map(json.loads, file.read_text().splitlines())
    assert line.pop("time").endswith("+00:00")
    head = {"level": "WARNING", "logger": "pdtransfer.requests", "node": "router", "role": "router"}
    assert line == {"message": "request failed: peer_lost"} | head | fields_of(LOST)
    assert (other["message"], other["level"], other["node"]) == ("not 7\n", "ERROR", "router")


@pytest.mark.parametrize(
    ("record", "level"),
    [
        (DONE, logging.INFO),
        (LOST, logging.WARNING),
        (replace(LOST, cause=Cause.ABORTED, status=499), logging.INFO),
        (replace(LOST, cause=Cause.REFUSED, status=400), logging.INFO),
        (replace(LOST, cause=Cause.FULL, status=429), logging.WARNING),
        (replace(LOST, scope="room", status=None), logging.DEBUG),
        (replace(LOST, scope="room", status=None, retried=True), logging.WARNING),
        (replace(LOST, scope="room", role="decode", status=None), logging.WARNING),
        (replace(LOST, scope="room", role="prefill", status=None, cause=Cause.REFUSED), logging.WARNING),
        (replace(DONE, scope="room", role="decode", status=None), logging.INFO),
        (replace(LOST, scope="room", role="prefill", status=None, cause=Cause.ABORTED), logging.INFO),
    ],
)
def test_levels_separate_failures_of_the_fleet_from_what_clients_do(record: EndedRequest, level: int) -> None:
    assert level_of(record) == level


def test_requests_have_a_limit_of_their_own_for_each_cause(
    started: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.threading, "Timer", Mock())
    monkeypatch.setattr(logs.time, "monotonic", lambda: 5.0)
    file = started()
    most = round(LINES_A_SECOND * logs.PERIOD_S)
    for _ in range(most + 3):
        log_ended(LOST)
    log_ended(replace(LOST, cause=Cause.FULL))
    lines = file.read_text().splitlines()
    assert len(lines) == most + 1
    assert "request failed: full" in lines[-1]

"""`pdtransfer top`: what it draws of a status document, and what it says of a router that gives none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from pdtransfer.errors import WorldError
from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.commands.http_client import HttpClient
from pdtransfer.serve.commands.top import status_document
from pdtransfer.serve.commands.top_view import byte_count, duration, number, slots_bar, view
from pdtransfer.serve.router.fleet.status import (
    FailureStatus,
    FleetStatus,
    RouterStatus,
    SlotsStatus,
    TotalsStatus,
    WorkerState,
    WorkerStatus,
)
from tests.support.http_answers import Answer, answering

URL = "http://router:8000"


def worker(place: int, role: str = "decode", state: WorkerState = "ready", **more: object) -> WorkerStatus:
    given = {
        "role": role, "address": f"tcp://10.0.0.{place}:1", "node": f"{role}-{place}", "state": state, "rooms_here": 1,
        "rooms_running": 3, "rooms_queued": 2, "slots": SlotsStatus(free=25, total=100, quarantined=10),
        "quarantined_bytes": 4_096, "kv_gb_s": 1.25, "tokens_s": 4_567.0, "hot_hit_ratio": 0.914,
        "rooms": {"ready": 3, "queued": 2}, **more,
    }  # fmt: skip
    return msgspec.convert(given, WorkerStatus)


def document(workers: list[WorkerStatus], failures: int = 0, **failure: object) -> FleetStatus:
    router = RouterStatus(
        node="router-0", version="0.1.0", engine="pdtransfer", ready=True, draining=False, uptime_s=7_300.0,
        models=["m"], requests_open=5, requests_s=8.2, rooms={"waiting": 3, "generating": 2, "ending": 0}, retries=1,
        answers={"200": 12, "503": 1}, first_token_ms={"p50": 120.4, "p99": 1_900.0},
    )  # fmt: skip
    given = {"time": 0.0, "cause": "peer_lost", "detail": "d0 is lost", "status": 503, **failure}
    failed = [msgspec.convert(given, FailureStatus) for _ in range(failures)]
    totals = TotalsStatus(kv_gb_s=1.25, generated_tokens_s=4_567.0, quarantined_bytes=4_096)
    return FleetStatus(time=0.0, router=router, totals=totals, workers=workers, failures=failed)


def lines(status: FleetStatus | None, width: int = 80, height: int | None = 24, why: str = "") -> list[str]:
    return view(status, URL, why, width=width, height=height).plain.split("\n")


def test_a_picture_has_workers_rooms_rates_arena_quarantine_hot_hits_and_failures() -> None:
    text = lines(document([worker(0, "prefill"), worker(1)], failures=1))
    assert "router-0  ready  http://router:8000" in text[0]
    assert text[1] == "requests  5 open (3 waiting, 2 generating)  8.20/s  TTFT p50 120 ms, p99 1.90 s"
    assert text[2] == "answers   12 x 200  1 x 503  1 tried again"
    assert "KV 1.25 GB/s" in text[3]
    (row,) = [each for each in text if each.startswith("d decode-1")]
    assert row.split() == ["d", "decode-1", "ready", "3+2", "███████▒··", "75%", "1.25", "4.6k", "91%", "4.1kB"]
    assert text[-1].endswith("peer_lost      503     d0 is lost")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (20, 5), (80, 8)])
def test_a_picture_fits_the_terminal(width: int, height: int) -> None:
    many = [worker(place, state="ready" if place % 9 else "connecting", why="silent " * 40) for place in range(60)]
    text = lines(document(many, failures=30, detail="x" * 500), width, height)
    assert len(text) <= height
    assert all(cell_len(line) <= width for line in text)


def test_workers_with_trouble_come_first_where_not_all_fit_and_failures_keep_their_place() -> None:
    many = [worker(place) for place in range(40)]
    many[33] = worker(33, state="connecting", why="tcp://10.0.0.33:1 has been silent for 2001 ms")
    text = lines(document(many, failures=30))
    assert "decode-33" in text[6]
    assert "has been silent for 2001 ms" in text[6]
    assert any("more, 39 of 40 ready" in line for line in text)
    assert sum("peer_lost" in line for line in text) == 3
    assert len(lines(document(many, failures=30), height=None)) == 40 + 30 + 8


def test_what_other_processes_send_can_neither_draw_nor_mark_up() -> None:
    evil = "\x1b[2J\r\n[bold]日本\u202e"
    given = document(
        [worker(1, node=evil, why=evil, state="connecting"), worker(2, rooms={evil: 1})],
        failures=1, cause=evil, detail=evil, room=evil, prefill=evil,
    )  # fmt: skip
    for width in (80, 200):
        text = lines(given, width)
        assert all(line.isprintable() for line in text)
        assert all(cell_len(line) <= width for line in text)
        assert "\\x1b[2J\\r\\n[bold]" in "".join(text)


def test_columns_that_no_worker_reports_are_left_out() -> None:
    server = WorkerStatus(role="decode", address="http://10.0.0.1:8200", state="ready", rooms_here=7)
    text = lines(document([server]))
    assert text[5].split() == ["WORKER", "STATE", "ROOMS"]
    assert text[6].split() == ["d", "10.0.0.1:8200", "ready", "7"]


def test_a_router_that_does_not_answer_is_named_above_the_last_picture() -> None:
    assert lines(None, why="no answer")[0].startswith("no answer; asked again")
    text = lines(document([worker(1)]), why="no answer")
    assert text[0].startswith("no answer")
    assert any("decode-1" in line for line in text)


def test_numbers_stay_short() -> None:
    assert [number(value) for value in (None, 0.0, 4e-4, 0.0123, 3.456, 56.78, 890.0, 1_234.0, 345_600_000.0)] == [
        "-", "0", "<0.001", "0.012", "3.46", "56.8", "890", "1.2k", "346M",
    ]  # fmt: skip
    assert [byte_count(value) for value in (0, 999, 4_096, 5 * 10**9)] == ["0", "999B", "4.1kB", "5.0GB"]
    assert [duration(seconds) for seconds in (0, 59, 61, 7_300, 90_061)] == ["0s", "59s", "1m01s", "2h01m", "1d01h"]
    bar = SlotsStatus(free=999, total=1_000, quarantined=1)
    assert slots_bar(bar, ascii_only=True) == "x.........   0%"
    assert slots_bar(SlotsStatus(free=0, total=0)) == ""


def answered(*, status: int = 200, body: bytes = msgspec.json.encode(document([worker(1)]))) -> Answer:
    """A router's answer to /status."""
    return lambda path, _: (status, body) if path == "/status" else (404, b"")


def test_one_picture_and_the_document_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answered()) as url:
        assert main(["top", "--router", url.removeprefix("http://"), "--once"]) == 0
        assert "d decode-1" in capsys.readouterr().out
        assert main(["top", "--router", url, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=FleetStatus) == document([worker(1)])


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [("\ufeffsk-good\n", 0, ""), ("sk-bad", 1, "asks for an API key"), ("two words", 2, "one word")],
)
def test_a_key_is_sent_where_a_file_names_one(
    text: str, status: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(text)
    with answering(answered(), key="sk-good") as url:
        assert main(["top", "--router", url, "--once", "--api-key", str(tmp_path / "key")]) == status
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, b"", "answers 404: this is not a pdtransfer router, or an older one"),
        (200, b"<html>", "malformed"),
        (200, b'{"time": 1}', "router: missing"),
        (200, b'{"time": "now"}', "time: expected float"),
    ],
)
def test_what_is_no_document_is_one_line(
    status: int, body: bytes, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answered(status=status, body=body)) as url:
        assert main(["top", "--router", url, "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize("body", [b"\x1b[2J", b'{"\xff": 1}', b"[1]", b'{"a": ' + b"[" * 100_000])
def test_what_is_no_json_object_is_not_printed(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answered(body=body)) as url:
        assert main(["top", "--router", url, "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


def test_a_router_that_is_down_is_asked_again() -> None:
    states = iter((503, 200))
    with answering(lambda *asked: answered(status=next(states))(*asked)) as url:
        source = HttpClient("router", url)
        with pytest.raises(WorldError, match="answers 503"):
            status_document(source, FleetStatus)
        assert status_document(source, FleetStatus).router.node == "router-0"
        source.close()
    with pytest.raises(WorldError, match="does not answer: Connection refused"):
        status_document(HttpClient("router", "http://127.0.0.1:9"), FleetStatus)

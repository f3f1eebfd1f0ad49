"""Logs: what peers say stays within its line, and no peer fills the disk with one kind of line."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdtransfer.serve.process import logs


@pytest.fixture
def file(started: Callable[..., Path]) -> Path:
    return started(node="d0")


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("x\n2026 WARNING d0 pdtransfer.bus: all is well", r"x\n2026 WARNING d0 pdtransfer.bus: all is well"),
        ("a\rb", r"a\rb"),
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("\u2028\u202e\u200b\ufeff", r"\u2028\u202e\u200b\ufeff"),
        ("café 表 100 %s", "café 表 100 %s"),
    ],
)  # fmt: skip
def test_what_a_peer_sends_stays_in_its_log_line(file: Path, text: str, logged: str) -> None:
    logging.getLogger("pdtransfer.x").warning("%s says hello", text)
    (line,) = file.read_text().split("\n")[:-1]
    assert line.endswith(f" WARNING d0 pdtransfer.x: {logged} says hello")


def test_an_exceptions_lines_cannot_pass_for_records(file: Path) -> None:
    try:
        raise ValueError("bad\n2026-11-21 INFO d0 pdtransfer: fine\x1b[0m")
    except ValueError:
        logging.getLogger("pdtransfer.x").exception("it failed")
    first, *rest = file.read_text().splitlines()
    assert first.endswith("it failed")
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in file.read_text()


def test_a_flood_of_one_kind_of_line_is_held_back_and_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, timers = 1_000.0, []
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    monkeypatch.setattr(logs.threading, "Timer", lambda _, call: timers.append(call) or threading.Thread())
    log = logging.getLogger("pdtransfer.x")
    for number in range(1_000):
        log.warning("peer %s broke the protocol", number)
    log.warning("something else")
    lines = file.read_text().splitlines()
    assert len(lines) == logs.BURST + 1
    assert lines[-1].endswith("something else")
    assert len(timers) == 1, "one for all kinds"
    now += logs.PERIOD_S
    log.warning("peer %s broke the protocol", "100%d")
    log.warning("peer %s broke the protocol", "last")
    *_, counted, again, last = file.read_text().splitlines()
    text = f"{1_000 - logs.BURST} more lines like this one in 10 s were held back: peer %s broke the protocol"
    assert text in counted
    assert " WARNING d0 pdtransfer.x: " in counted
    assert again.endswith("peer 100%d broke the protocol")
    assert last.endswith("peer last broke the protocol")


def test_of_lines_with_a_traceback_fewer_pass(file: Path) -> None:
    for _ in range(2 * logs.BURST):
        try:
            raise ValueError("bad")
        except ValueError:
            logging.getLogger("pdtransfer.x").exception("it failed")
    assert file.read_text().count("Traceback") == logs.TRACEBACKS


def test_what_was_held_back_is_reported_though_no_further_line_comes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, timers = 1_000.0, []
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    monkeypatch.setattr(logs.threading, "Timer", lambda _, call: timers.append(call) or threading.Thread())
    early, late = logging.getLogger("pdtransfer.x"), logging.getLogger("pdtransfer.y")
    for _ in range(logs.BURST + 3):
        early.warning("early")
    now += 1.0
    for _ in range(logs.BURST + 5):
        late.warning("late")
    now += logs.PERIOD_S - 1.0
    (report,) = timers
    report()
    assert file.read_text().splitlines()[-1].endswith("held back: early held_back=3")
    assert len(timers) == 2, "the other period is not over"
    now += 1.0
    timers[1]()
    assert file.read_text().splitlines()[-1].endswith("held back: late held_back=5")
    assert len(timers) == 2


def test_kinds_of_lines_are_bounded_and_those_forgotten_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.threading, "Timer", lambda *_: threading.Thread())
    reports: list[logging.LogRecord] = []
    seldom = logs.LogRateLimit(reports.append)

    def passes(text: str) -> bool:
        return seldom.filter(logging.LogRecord("x", logging.INFO, "", 0, text, (), None))

    assert [passes("flood") for _ in range(logs.BURST + 2)][-3:] == [True, False, False]
    for number in range(3 * logs.KINDS_MAX):
        assert passes(f"kind {number}")
        assert len(seldom._kinds) <= logs.KINDS_MAX
    assert [report.args[0] for report in reports] == [2]


def test_what_was_held_back_is_reported_where_logs_go_by_then(
    file: Path, started: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Callable[[], None]] = []
    monkeypatch.setattr(logs.threading, "Timer", lambda _, report: timers.append(report) or threading.Thread())
    now = 1e6
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    for _ in range(logs.BURST + 3):
        logging.getLogger("a").warning("early")
    started(log_file=tmp_path / "later")
    now += logs.PERIOD_S
    timers[0]()
    assert "were held back: early" in (tmp_path / "later").read_text()
    assert "were held back" not in file.read_text()


def test_a_full_disk_is_reported_once_and_loses_lines_alone(
    started: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    started(log_file=Path("/dev/full"))
    for text in ("one", "two"):
        logging.getLogger("a").warning(text)
    assert capsys.readouterr().err == (
        "pdtransfer: log_file: /dev/full: No space left on device: lines are lost while it cannot be written\n"
    )


def test_a_log_goes_on_once_its_directory_is_there_again(started: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    started(log_file=tmp_path / "logs" / "log")
    (tmp_path / "logs").rename(tmp_path / "moved")
    logging.getLogger("a").warning("lost")
    (tmp_path / "logs").mkdir()
    logging.getLogger("a").warning("there")
    assert (tmp_path / "logs" / "log").read_text().endswith(" WARNING router a: there\n")

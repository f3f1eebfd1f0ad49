"""Logs: what peers say stays within its line, and no peer fills the disk with one kind of line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdtransfer.process import logs


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logs.start(node="d0", level="info", file=tmp_path / "log")
    yield tmp_path / "log"
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        ("x\n2026 WARNING d0 pdtransfer.bus: all is well", r"x\n2026 WARNING d0 pdtransfer.bus: all is well"),
        ("a\rb", r"a\rb"),
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("\u2028\u202e\u200b\ufeff", r"\u2028\u202e\u200b\ufeff"),
        ("café 表 100 %s", "café 表 100 %s"),
    ],
)  # fmt: skip
def test_what_a_peer_says_stays_in_its_line(file: Path, said: str, logged: str) -> None:
    logging.getLogger("pdtransfer.x").warning("%s says hello", said)
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


def test_a_flood_of_one_kind_of_line_is_held_back_and_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log = logging.getLogger("pdtransfer.x")
    for number in range(1_000):
        log.warning("peer %s broke the protocol", number)
    log.warning("something else")
    lines = file.read_text().splitlines()
    assert len(lines) == logs.BURST + 1
    assert lines[-1].endswith("something else")
    now += logs.PERIOD_S
    log.warning("peer %s broke the protocol", "100%d")
    log.warning("peer %s broke the protocol", "last")
    *_, counted, last = file.read_text().splitlines()
    assert counted.endswith(f"peer 100%d broke the protocol (and {1_000 - logs.BURST} more like it)")
    assert last.endswith("peer last broke the protocol")


def test_kinds_of_lines_are_bounded(file: Path) -> None:
    seldom = logs.LogRateLimit()
    for number in range(3 * logs.KINDS_MAX):
        assert seldom.filter(logging.LogRecord("x", logging.INFO, "", 0, f"kind {number}", (), None))
        assert len(seldom._kinds) <= logs.KINDS_MAX

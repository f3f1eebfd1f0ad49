"""What holds for every test: none fails for being slow, since the machine may be busy; and what some have measured is
said at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices", default="", help="prefill's and decode's, as cuda:0,cuda:0: runs all of tests/two_gpu on them"
    )


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an arena is handed over: a socket's path has 107 bytes, and tmp_path grows with a test's name."""
    return tmp_path_factory.mktemp("s") / "sockets"


_MEASURED = "measured"


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Has a run's summary say a figure, whether or not the test passes: none asserts a time, some show one."""
    return lambda text: record_property(_MEASURED, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, text in report.user_properties
        if name == _MEASURED and report.when == "call"
    ]
    if said:
        terminalreporter.section(_MEASURED)
        for line in said:
            terminalreporter.write_line(line)

"""A pytest that has collected tests, and runs them in forks of itself, on request: with the mutant that is loaded.

Requests and answers are lines of JSON on a socket. Hypothesis draws the same each time, and a first failure is enough.
What a fork has started ends with it, in whatever session.
"""

from __future__ import annotations

import atexit
import cProfile
import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import Phase, settings

from .swap import Image

SOCKET, REPORT = "MUTANTS_SOCKET", "MUTANTS_REPORT"
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_POLL_S = 0.01
_LOST_TIMEOUT_S = 2

# It begins before conftest and the tests are imported.
_import_profile = cProfile.Profile(builtins=False, subcalls=False)
if SOCKET in os.environ:
    _import_profile.enable()


def pytest_configure() -> None:
    """Behind conftest's own profile, and before the tests are imported."""
    unshrunk = settings(deadline=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    settings.register_profile("mutants", unshrunk, derandomize=True, database=None)
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a fork, pytest's own loop goes on with the items that it was asked for."""
    _import_profile.disable()
    channel = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    channel.set_inheritable(False)
    with channel, channel.makefile("rw") as lines:
        asked = _serve(lines, importable=not session.testsfailed)
    if asked is None:
        return True
    atexit.register(lambda: os._exit(session.exitstatus))  # once threads have ended: the rest would copy all memory
    session.items[:] = _ordered(session.items, asked)
    session.config.option.maxfail = 1 if asked["stops"] else 0
    return None


def _serve(lines: TextIO, *, importable: bool) -> dict[str, Any] | None:
    """A request, in its fork; nothing in this process, when the other side has closed."""
    image = Image(entry.code for entry in _import_profile.getstats() if not isinstance(entry.code, str))
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    swaps: Any = []
    print(json.dumps(importable), file=lines, flush=True)
    for line in lines:
        request = json.loads(line)
        if "file" in request:
            swaps = image.swaps(Path(request["file"]), request["before"])
            print(json.dumps(swaps is not None), file=lines, flush=True)
            continue
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            for function, code in swaps:
                function.__code__ = code
            return request
        print(json.dumps(_status(child, request["seconds"])), file=lines, flush=True)
    return None


def _status(child: int, seconds: float | None) -> int | None:
    """How it has exited; None if it had to be ended."""
    end = None if seconds is None else time.monotonic() + seconds
    status = None
    while status is None and (end is None or time.monotonic() < end):
        reaped, state = os.waitpid(-1, os.WNOHANG)  # orphans as well, as init does
        if reaped == child:
            status = os.waitstatus_to_exitcode(state)
        elif not reaped:
            time.sleep(_POLL_S)
    _end_children()
    return status


def _end_children() -> None:
    """Those of a child are this process's once it has ended."""
    with suppress(ChildProcessError):
        while True:
            for entry in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):  # gone
                    if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(entry.parent.name), signal.SIGKILL)
            os.waitpid(-1, 0)


def _stop(*_: object) -> None:
    _end_children()
    os._exit(0)


def _ordered(items: list[pytest.Item], asked: dict[str, Any]) -> list[pytest.Item]:
    """Files come first that have most of these names, or alone those that have the first. Whole files stay together."""
    texts = {path: path.read_text() for path in {item.path for item in items}}
    near = {path: [name in text for name in asked["names"]] for path, text in texts.items()}
    alone = asked["alone"] and any(names[0] for names in near.values())
    wanted = [item for item in items if item.nodeid not in asked["left_out"] and (not alone or near[item.path][0])]
    if asked["tests"]:
        wanted = [item for item in wanted if item.nodeid in asked["tests"]]
    return sorted(wanted, key=lambda item: -sum(near[item.path]))


def pytest_runtest_logstart(nodeid: str) -> None:
    _keep("started", nodeid, "")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A timeout is an exception, which is lost in a callback that C calls: then the process ends."""
    if item.get_closest_marker("timeout"):
        return
    limit_s = float(str(item.config.getoption("timeout"))) + _LOST_TIMEOUT_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash: Any = getattr(report.longrepr, "reprcrash", None)
        _keep("failed", report.nodeid, f"{crash.path}: {crash.message[:200]}" if crash else "")


def _keep(*line: str) -> None:
    with Path(os.environ[REPORT]).open("a") as report:
        report.write(json.dumps(line) + "\n")

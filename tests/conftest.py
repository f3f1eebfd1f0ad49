"""What holds for every test: none fails for being slow, since the machine may be busy; and what some have measured is
said at the end of a run."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import logging.handlers
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

if not __debug__:
    # Under -O only asserts that pytest has rewritten are checked: those of test modules, and now of what helps them.
    folders = [folder.name for folder in Path(__file__).parent.iterdir() if folder.is_dir()]
    pytest.register_assert_rewrite(*(f"tests.{folder}" for folder in folders))

from tests.support.effort import (
    CASES_MAX,
    ENGINES_FOLDER,
    SLOW_FOLDERS,
    VARIABLE,
    Effort,
    chosen,
    dealt,
    expects_assertion,
    is_in_part,
)
from tests.support.waiting import on_loop

Made = TypeVar("Made")

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices", default="", help="prefill's and decode's, as cuda:0,cuda:0: runs all of tests/lab/two_gpu on them"
    )
    parser.addoption("--full", action="store_true", help="all cases, seeds and examples, as in continuous integration")
    parser.addoption("--fast", action="store_true", help="a glance: few cases of each test, and none that are slow")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: their counts are read then, and torch reads how many threads it may have."""
    for effort in Effort:
        if config.getoption(effort):
            os.environ[VARIABLE] = effort
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Else every process has a thread a core, and each small step of torch waits until all of them had their turn.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A test that is a coroutine function runs on a loop of its own, each example of hypothesis's as well."""
    drawn = getattr(pyfuncitem.obj, "hypothesis", None)
    if drawn is not None and inspect.iscoroutinefunction(drawn.inner_test):
        drawn.inner_test = on_loop(drawn.inner_test)
    elif inspect.iscoroutinefunction(pyfuncitem.obj):
        pyfuncitem.obj = on_loop(pyfuncitem.obj)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out folders that are not named: slow ones at a glance, real engines without their mark at all times."""
    if collection_path == ENGINES_FOLDER:
        return "engines" not in config.getoption("markexpr") or None
    return (chosen() is Effort.FAST and collection_path in SLOW_FOLDERS) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the chosen effort does not run: the same cases in every process, whatever others there are."""
    cases: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if chosen() is Effort.FAST:
            keep = cases[test] <= CASES_MAX and not (item.get_closest_marker("slow") or item.get_closest_marker("full"))
        elif not __debug__ and expects_assertion(item):
            keep = False
        else:
            keep = chosen() is Effort.FULL or is_in_part(item)
        if keep:
            kept.append(item)
    if len(items) > len(kept) and len(items) > 1:  # one that is named is run
        left_out = set(items).difference(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        items[:] = dealt(items, workers)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which would only go over what stays: modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A command that runs in this process sends logs to what stands for standard error in its test, and no longer."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if handler not in before and type(handler) in (logging.StreamHandler, logging.handlers.WatchedFileHandler):
            logging.root.removeHandler(handler)


SIGNALS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A daemon that ran in this process has it ignore signals from then on: processes of later tests inherit that. It
    may have run in a fixture of a module, which ends behind those of its last test."""
    _restore_signals()
    yield
    _restore_signals()


def _restore_signals() -> None:
    for number, handler in SIGNALS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def marked(request: pytest.FixtureRequest) -> Callable[[Callable[..., Made]], Made]:
    """Makes what a test is about, with the arguments of its mark and of its module's."""
    marks = list(request.node.iter_markers("given"))
    arguments = {name: value for mark in reversed(marks) for name, value in mark.kwargs.items()}
    return lambda make: make(*(marks[0].args if marks else ()), **arguments)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an arena is handed over: a socket's path has 107 bytes, and tmp_path grows with a test's name."""
    return tmp_path_factory.mktemp("s") / "sockets"


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as host code."""
    from tests.support import kernels_host

    own = tmp_path_factory.getbasetemp()  # in the run's, where xdist has several workers
    return kernels_host.library(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


_MEASURED = "measured"


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Has a run's summary say a figure, whether or not the test passes: none asserts a time, some show one."""
    return lambda text: record_property(_MEASURED, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, text in report.user_properties
        if name == _MEASURED and report.when == "call"
    ]
    if lines:
        terminalreporter.section(_MEASURED)
        for line in lines:
            terminalreporter.write_line(line)

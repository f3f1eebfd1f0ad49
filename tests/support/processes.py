"""What the kernel tells of a process: what it started, what it has open; and how to stop every thread of it."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_for


def children(pid: int) -> list[int]:
    """Processes that a process's threads have started; any of them may end meanwhile."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def command_line(pid: int) -> list[str]:
    """Its arguments, empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def mapped_files(pid: int) -> str:
    """The files that a process has in its memory, its libraries among them."""
    return Path(f"/proc/{pid}/maps").read_text()


def open_files(pid: int | str = "self") -> int:
    """How many descriptors it has. Garbage of earlier tests is collected first, since it may hold some."""
    if pid == "self":
        gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


def deliver(pids: Iterable[int], number: signal.Signals) -> None:
    """Signals processes, some of which may be gone, and returns once all threads of each are dead, stopped or running
    again. A signal alone is only on its way then: a thread that runs when SIGSTOP is sent goes on until another thread
    has taken the signal, which on a busy machine is long enough to land a room."""
    signalled = list(pids)
    for pid in signalled:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    for pid in signalled:
        wait_for(lambda pid=pid: _obeys(pid, number), f"{number.name} to process {pid} is not in force")


def _obeys(pid: int, number: signal.Signals) -> bool:
    states = _thread_states(pid)
    match number:
        case signal.SIGSTOP:
            return states <= {"T", "Z", "X"}
        case signal.SIGCONT:
            return "T" not in states
        case _:
            return states <= {"Z", "X"}


def _thread_states(pid: int) -> set[str]:
    """As proc(5) has them; none of a process that is gone."""
    states: set[str] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                states.add(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(") ")[2][0])
    return states


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more, for so long."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def forked_descriptors() -> Iterator[None]:
    """Another descriptor of everything that is open now, for so long: what a forked child has."""
    inherited: list[int] = []
    for number in list(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the directory itself, which is closed by now
            inherited.append(os.dup(number))
    try:
        yield
    finally:
        for number in inherited:
            os.close(number)

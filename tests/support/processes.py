"""What the kernel tells of a process: what it started, what it has open; and how to stop every thread of it."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import until


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


def open_files(pid: int | str = "self") -> int:
    """How many descriptors it has. Garbage of earlier tests is collected first, since it may hold some."""
    if pid == "self":
        gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


def stop(pids: Iterable[int], number: signal.Signals) -> None:
    """Signals processes, some of which may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def freeze(pid: int) -> None:
    """No thread of it runs any more: one that did when the signal was sent goes on for a while."""

    def states() -> set[str]:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
        return {stat.rpartition(") ")[2][0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    await until(lambda: states() == {"T"})


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

"""Loops in threads of their own, the CPUs they run on, and calls that block away from a loop's own thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import uvloop

from .errors import ConfigError


def run_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` on a new loop until it returns, also while the interpreter exits. From Python 3.12 on no thread can
    start then, but a loop's close starts one to end the loop's executor. That executor has ended by then."""
    ended = False

    async def whole() -> None:
        nonlocal ended
        await main()
        ended = True

    try:
        uvloop.run(whole())
    except RuntimeError:
        if not ended:
            raise


async def in_thread(call: Callable[[], None]) -> None:
    """Runs `call` in another thread and waits for it; in this one while the interpreter exits, when none can start."""
    try:
        done = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        call()
    else:
        await done


def in_pool(pool: Executor, call: Callable[[], object]) -> None:
    """Runs `call` in a thread of the pool; in this one while the interpreter exits, when none takes calls."""
    try:
        pool.submit(call)
    except RuntimeError:
        call()


INHERIT = "inherit"  # leaves a thread's CPUs as they are
CPUS_LENGTH_MAX = 9  # of one range: a host has four digits of CPUs
AUTO = "auto"  # all CPUs that the process was started with
_AT_IMPORT = frozenset(os.sched_getaffinity(0))


def cpus_of(text: str, *, named: str = "cpus") -> frozenset[int] | None:
    """The CPUs that a setting of this name holds, such as 0-3,6; None for "inherit". Raises ConfigError."""
    if text == INHERIT:
        return None
    if text == AUTO:
        return started_with()
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > CPUS_LENGTH_MAX:
            raise ConfigError(f"{named} = {text!r}: must be {AUTO}, {INHERIT}, or a list such as 0-3,6")
        cpus.update(range(int(first), int(last or first) + 1))
    if not cpus:
        raise ConfigError(f"{named} = {text!r}: must name a CPU")
    return frozenset(cpus)


def started_with() -> frozenset[int]:
    """The CPUs that this process was started with, as far as they can be told by now.

    An OpenMP runtime that binds its threads pins the main thread as well, to a core on which it spins, and threads
    inherit that. Others of the process keep what they had, and so does the process that forked or spawned this one. All
    of these are within what taskset or a cgroup left to the program.
    """
    cpus = set(_AT_IMPORT)
    parent = multiprocessing.parent_process()
    tasks = [] if parent is None or parent.pid is None else [parent.pid]
    with suppress(OSError):
        tasks += [int(name) for name in os.listdir("/proc/self/task")]
    for task in tasks:
        with suppress(OSError):  # it has ended
            cpus |= os.sched_getaffinity(task)
    return frozenset(cpus)


def run_on(cpus: frozenset[int] | None) -> None:
    """Binds the calling thread, and those that it starts from now on, to these CPUs; None changes nothing.

    Raises ConfigError where the kernel allows this process no CPU of these.
    """
    if cpus is None or set(cpus) == os.sched_getaffinity(0):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ConfigError(f"cpus = {sorted(cpus)}: the kernel allows this process no CPU of these: {error}") from None

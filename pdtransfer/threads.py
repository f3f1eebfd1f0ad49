"""Loops in threads of their own, the CPUs they run on, calls to a loop, and calls that block away from its thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections import deque
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


class LoopCalls:
    """Calls that any thread has a loop make: in order, many with one wake-up, and never from within `post`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """As `attach`; without a loop the calls wait for one."""
        self._calls: deque[Callable[[], object]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread, self._waking = 0, False
        if loop is not None:
            self.attach(loop)

    def __len__(self) -> int:
        """Calls that the loop has not made yet."""
        return len(self._calls)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls run on this loop, whose thread this is, from now on."""
        self._loop, self._thread = loop, threading.get_ident()
        if self._calls:
            self._wake()

    def post(self, call: Callable[[], object]) -> None:
        """From any thread. What the call raises goes to the loop's exception handler, and costs no call behind it."""
        self._calls.append(call)
        if not self._waking:
            self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            self._waking = True
            (loop.call_soon if threading.get_ident() == self._thread else loop.call_soon_threadsafe)(self._run)

    def _run(self) -> None:
        # Cleared first: a call that is appended after the last one here wakes the loop again.
        self._waking = False
        for left in reversed(range(len(self._calls))):
            try:
                self._calls.popleft()()
            except Exception:
                if left:
                    self._wake()
                raise


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
    """The CPUs that this process was started with, as far as they can still be determined.

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

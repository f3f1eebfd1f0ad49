"""The two bounded queues between an engine's thread and the loop. An entry in one wakes the thread at its other end."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from ..errors import WorldError
from ..threads import LoopCalls

CALLS_MAX = 65_536  # that the loop has not run yet: the loop of an engine so far ahead has stopped
EventForEngine = TypeVar("EventForEngine")
Arguments = ParamSpec("Arguments")


class ThreadQueues(Generic[EventForEngine]):
    """The engine's side calls `to_loop`, the loop's side `to_engine`. `fileno` is readable while `poll` has events."""

    def __init__(self) -> None:
        self._calls = LoopCalls()
        self._events: deque[EventForEngine] = deque()
        self._watchers: list[tuple[Callable[[EventForEngine], bool], threading.Event]] = []
        self._signals = self._signals_read = 0  # that the descriptor got, and that `poll` has taken from it
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls run on this loop, whose thread this is, from now on."""
        self._calls.attach(loop)

    # The engine's side: any thread

    def to_loop(self, call: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Makes the call on the loop; calls keep their order. Raises WorldError when too many wait."""
        if len(self._calls) >= CALLS_MAX:
            raise WorldError(f"calls: {len(self._calls)} wait for the loop, the limit is {CALLS_MAX}")
        self._calls.post(partial(call, *args, **kwargs))

    def poll(self) -> list[EventForEngine]:
        """Takes all events; never waits. After close it takes those that were left."""
        if self._signals == self._signals_read and not self._events:
            return []  # without a system call
        if self._fd >= 0:
            try:
                self._signals_read += os.eventfd_read(self._fd)
            except BlockingIOError:
                return []
        events: list[EventForEngine] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until `poll` has events, or until the timeout; returns True if it has any."""
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def wait_for(self, wanted: Callable[[EventForEngine], bool], timeout_s: float) -> bool:
        """Waits until `poll` has an event that `wanted` accepts, or until the timeout; returns True if it has one."""
        watcher = wanted, threading.Event()
        self._watchers.append(watcher)
        try:
            return any(map(wanted, list(self._events))) or watcher[1].wait(timeout_s)
        finally:
            self._watchers.remove(watcher)

    @property
    def unpolled(self) -> int:
        """Events that wait for `poll`."""
        return len(self._events)

    def fileno(self) -> int:
        """For select, poll and epoll: readable while there are events that were not polled; -1 after close."""
        return self._fd

    # The loop's side

    def to_engine(self, event: EventForEngine) -> None:
        """Gives the engine's side an event."""
        self._signals += 1  # first: an event that is polled before its signal leaves the descriptor readable
        self._events.append(event)
        os.eventfd_write(self._fd, 1)
        for wanted, seen in tuple(self._watchers):
            if wanted(event):
                seen.set()

    def close(self) -> None:
        """Closes the descriptor, once both sides are done."""
        fd, self._fd = self._fd, -1  # first: another thread may close it as well
        if fd >= 0:
            os.close(fd)

"""Calls that wait for a device's events. The loop polls whether an event has fired; it never waits for a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from ..errors import WorldError
from ..handoff.events import Event
from ..handoff.ready_gate import ReadyGate

POLL_S = 0.0002  # between two queries of an event that has not fired

_libc = ctypes.CDLL(None, use_errno=True)


class EventQueue:
    """Makes the calls of one key, such as a room, in order: each once its event has fired, at once if it has."""

    def __init__(self, broken: Callable[[Any, Exception], None]) -> None:
        """`broken` is called with a key whose event has failed; calls made for it before may still be under way."""
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Hashable, deque[tuple[Event | None, Callable[[], None]]]] = {}
        self._timer = _Timer(self._loop, self._poll)

    def call(self, key: Hashable, after: Event | None, call: Callable[[], None]) -> None:
        """Calls after `after` and after every earlier call of this key."""
        queue = self._waiting.get(key)
        if not queue and after is None:
            call()
            return
        if queue is None:
            queue = self._waiting[key] = deque()
        queue.append((after, call))
        if len(queue) == 1:
            self._advance(key)

    def forget(self, key: Hashable) -> None:
        """Drops the calls of this key, and queries its events no more."""
        if (queue := self._waiting.pop(key, None)) is not None:
            queue.clear()

    def stop(self) -> None:
        """Queries no event any more."""
        self._waiting.clear()
        self._timer.close()

    def _advance(self, key: Hashable) -> None:
        queue = self._waiting[key]
        while queue:
            after, call = queue[0]
            try:
                fired = after is None or after.query()
            except Exception as error:  # noqa: BLE001 (whatever library the event is of)
                self.forget(key)
                self._broken(key, error)
                return
            if not fired:
                self._timer.start()
                return
            queue.popleft()
            call()
        if self._waiting.get(key) is queue:
            del self._waiting[key]

    def _poll(self) -> None:
        for key in list(self._waiting):
            if key in self._waiting:
                self._advance(key)
        if not self._waiting:
            self._timer.stop()


class GateEvent:
    """A gate as an Event, which the loop queries."""

    def __init__(self, gate: ReadyGate) -> None:
        self._gate = gate

    def query(self) -> bool:
        return self._gate.poll(time.monotonic_ns())


class _Timer:
    """Calls on the loop every POLL_S while it is started. uvloop's own timers count in milliseconds: a shorter one
    fires at once, again and again, and the loop takes a whole core."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call, self._started = loop, call, False
        # Now, since no descriptor may be left once there is something to wait for.
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise WorldError(f"timerfd_create: {os.strerror(ctypes.get_errno())}")
        loop.add_reader(self._fd, self._due)

    def start(self) -> None:
        """Idempotent; ignored once it is closed."""
        if not self._started and self._fd >= 0:
            self._set(POLL_S)

    def stop(self) -> None:
        """Idempotent."""
        if self._started:
            self._set(0.0)

    def close(self) -> None:
        """Makes no more calls."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd, self._started = -1, False

    def _set(self, seconds: float) -> None:
        """Sets interval and first expiry, two struct timespec; zeros disarm the timer."""
        half = (0, int(seconds * 1e9))
        if _libc.timerfd_settime(self._fd, 0, (ctypes.c_long * 4)(*half, *half), None):
            raise OSError(ctypes.get_errno(), f"timerfd_settime: {os.strerror(ctypes.get_errno())}")
        self._started = seconds > 0

    def _due(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was stopped meanwhile
        self._call()

"""The two bounded queues between an engine's thread and the loop; what waits on one end wakes the other."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import WorldError

CALLS_MAX = 65_536  # not yet run on the loop: an engine so far ahead has lost its loop
Said = TypeVar("Said")


class Port(Generic[Said]):
    """`submit` from the engine's side, `tell` from the loop's; `fileno` is readable while `poll` has something."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._said: deque[Said] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waking = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls run on this loop from now on."""
        self._loop = loop
        if self._calls:
            self._wake()

    # The engine's side: any thread

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` on the loop, in the order of submission. Raises WorldError when the loop takes no more."""
        if len(self._calls) >= CALLS_MAX:
            raise WorldError(f"calls: {len(self._calls)} wait for the loop, the limit is {CALLS_MAX}")
        self._calls.append(call)
        if not self._waking:
            self._wake()

    def poll(self) -> list[Said]:
        """Takes everything that was said; never waits. After close it takes what was left."""
        if self._fd >= 0:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return []
        said: list[Said] = []
        while self._said:
            said.append(self._said.popleft())
        return said

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until `poll` has something to say, or the time is over."""
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def fileno(self) -> int:
        """For select, poll, epoll: readable while something was said that was not polled; -1 after close."""
        return self._fd

    # The loop's side

    def tell(self, said: Said) -> None:
        """Says something to the engine's side."""
        self._said.append(said)
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Gives the descriptor back; both sides are done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            self._waking = True
            loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        # Lowered first: a call that is appended behind the last one here wakes the loop again.
        self._waking = False
        for left in reversed(range(len(self._calls))):
            try:
                self._calls.popleft()()
            except Exception:
                if left:
                    self._wake()  # the calls behind it are not to blame
                raise

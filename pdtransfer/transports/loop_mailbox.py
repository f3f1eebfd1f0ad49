"""Reports of other threads to the loop: many of them with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Report = TypeVar("Report")


class LoopMailbox(Generic[Report]):
    """Calls `receive` with each report, in order, on the loop's thread and never from within `post`."""

    def __init__(self, receive: Callable[[Report], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._posted: deque[Report] = deque()
        self._scheduled = False  # the loop is going to deliver

    def post(self, report: Report) -> None:
        """From any thread, while the loop lives."""
        with self._lock:
            self._posted.append(report)
            if self._scheduled:
                return
            self._scheduled = True
        on_loop = threading.get_ident() == self._thread
        (self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe)(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted, self._scheduled = self._posted, deque(), False
        while posted:
            try:
                self._receive(posted.popleft())
            except Exception as error:  # noqa: BLE001 (one that fails must not cost the others; the loop logs it)
                self._loop.call_exception_handler({"message": "a report could not be received", "exception": error})

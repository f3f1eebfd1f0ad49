"""What other threads tell the loop: many reports with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Report = TypeVar("Report")


class Reports(Generic[Report]):
    """Reports, in order, to `hear`, which is called on the loop's thread and never from within `tell`."""

    def __init__(self, hear: Callable[[Report], None]) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._told: deque[Report] = deque()
        self._awaited = False  # the loop is going to look

    def tell(self, report: Report) -> None:
        """From any thread, while the loop lives."""
        with self._lock:
            self._told.append(report)
            if self._awaited:
                return
            self._awaited = True
        on_loop = threading.get_ident() == self._thread
        (self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe)(self._listen)

    def _listen(self) -> None:
        with self._lock:
            told, self._told, self._awaited = self._told, deque(), False
        while told:
            try:
                self._hear(told.popleft())
            except Exception as error:  # noqa: BLE001 (one that fails must not cost the others; the loop is told)
                self._loop.call_exception_handler({"message": "a report was not taken", "exception": error})

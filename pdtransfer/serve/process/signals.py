"""Signals of every process: SIGTERM and SIGINT drain, a second one later stops at once, SIGHUP reloads."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

from ...bus.keys import AllowList
from ...errors import Cause, ConfigError
from ..tracing.ended_request import EndedRequest, EndedRequests
from .logs import FIELDS

log = logging.getLogger(__name__)

Allow = Callable[[AllowList], None]

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
HURRY_S = 1.0  # signals within this time count once: timeout(1) and terminals signal the process and its group
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Makes a child process receive SIGTERM when the thread that started it ends, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """Returns the status of `work`. Ctrl-C, SIGTERM or SIGHUP cancels it, and a second one later ends the process at
    once. No other task is cancelled by the first, so a child process that is just being started is not lost."""
    loop, task, asked, status = asyncio.get_running_loop(), asyncio.ensure_future(work), StopEvent(), 0

    def end(number: int) -> None:
        nonlocal status
        if not asked.is_set():
            status = 128 + number
            asked.set()
            task.cancel()
        elif time.monotonic() >= asked.set_s + HURRY_S:
            sys.exit(128 + number)

    for number in (*_NUMBERS, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    await asyncio.wait([task])
    return status if task.cancelled() and status else task.result()


class StopEvent(asyncio.Event):
    """Set once, by a signal or by another rank."""

    set_s = float("-inf")  # time.monotonic() when it was set

    def set(self) -> None:
        if not self.is_set():
            self.set_s = time.monotonic()
        super().set()


class StopSignal:
    """Two events of the running loop: `asked` (drain) and `hurried` (stop now)."""

    def __init__(self, ended: EndedRequests, scope: Literal["request", "room"] | None) -> None:
        """The last line counts the records of `scope` that `ended` gets; None for a rank that gets none."""
        self.asked, self.hurried = StopEvent(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._scope = scope
        self._all = self._drained = self._cut_off = 0
        ended.subscribe(self._count)
        for number in _NUMBERS:
            self._loop.add_signal_handler(number, self._signalled)
        reload_on_hangup()

    def close(self) -> None:
        """The process is about to exit with its own status; later signals are ignored. Once it was asked to stop, it
        logs what became of the work under way."""
        if self.asked.is_set():
            counts = {f"{self._scope}s": self._all, "drained": self._drained, "cut_off": self._cut_off}
            log.info("stopped", extra={FIELDS: {} if self._scope is None else counts})
        for number in (*_NUMBERS, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _signalled(self) -> None:
        if not self.asked.is_set():
            log.info("draining: no new requests, those under way run to their end; signal again to end them now")
            self.asked.set()
        elif time.monotonic() >= self.asked.set_s + HURRY_S:
            self.hurried.set()

    def _count(self, record: EndedRequest) -> None:
        if record.scope != self._scope:
            return
        self._all += 1
        if time.monotonic() - record.total_s <= self.asked.set_s:  # under way at the signal
            cut_off = record.cause is Cause.SHUTDOWN
            self._cut_off += cut_off
            self._drained += not cut_off


def reload_on_hangup(*reloads: Callable[[], None]) -> None:
    """Calls all of these on SIGHUP, which never ends the process. With none of them it changes nothing."""

    def hangup() -> None:
        if not reloads:
            log.info("SIGHUP: no file is configured to be read again, nothing has changed")
        for reload in reloads:
            reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup)


def read_again(source: str, read: Callable[[], None]) -> None:
    """Reads a file again; an invalid one changes nothing."""
    try:
        read()
    except ConfigError as error:
        log.error("not read again: %s: %s", source, error)
    else:
        log.info("read again: %s", source)


def reload(path: Path, allow: Allow) -> None:
    """Reads the allow-list again. An invalid list changes nothing."""
    try:
        allowed = AllowList.read(path)
    except ConfigError as error:
        log.error("the allow-list is unchanged: %s", error)
        return
    allow(allowed)
    log.info("allow-list: %d peers", len(allowed.names))

"""Signals of every process: SIGTERM and SIGINT drain, a second one later stops at once, SIGHUP reloads."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from ...bus.keys import AllowList
from ...errors import ConfigError

log = logging.getLogger(__name__)

Allow = Callable[[AllowList], None]

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
HURRY_S = 1.0  # signals within this time count once: timeout(1) and terminals signal the process and its group
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Makes a child process receive SIGTERM when the thread that started it ends, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StopSignal:
    """Two events of the running loop: `asked` (drain) and `hurried` (stop now)."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._hurry_at = 0.0
        for number in _NUMBERS:
            self._loop.add_signal_handler(number, self._signalled)
        reload_on_hangup()

    def close(self) -> None:
        """The process is about to exit with its own status; later signals are ignored."""
        for number in (*_NUMBERS, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _signalled(self) -> None:
        if not self.asked.is_set():
            log.info("draining: no new requests, those under way run to their end; signal again to end them now")
            self._hurry_at = self._loop.time() + HURRY_S
            self.asked.set()
        elif self._loop.time() >= self._hurry_at:
            self.hurried.set()


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

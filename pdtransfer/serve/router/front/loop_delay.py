"""Overload of a router: how late its loop comes to what is due."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks
LATE_S = 1.0  # a turn of the loop that takes so long keeps every answer waiting for as long
LATE_TURNS = 3  # in a row: a process that was stopped, or a host that was suspended, is late once


class LoopDelay:
    """Looks at the loop from `start` to `stop`; `seconds` is how late the last look was."""

    def __init__(self) -> None:
        self.seconds, self._late = 0.0, 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def overloaded(self) -> bool:
        """True if the last looks were all late: what was accepted comes first then, and nothing new is."""
        return self._late >= LATE_TURNS

    def start(self) -> None:
        """Begins to look."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_S, self._look, loop, loop.time() + LOOK_S)

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.seconds, before = max(0.0, loop.time() - due), self.overloaded
        self._late = self._late + 1 if self.seconds >= LATE_S else 0
        if self.overloaded != before:
            level, change = (logging.INFO, "are accepted again") if before else (logging.WARNING, "are refused")
            log.log(level, "the loop is %.1f s late: new requests %s", self.seconds, change)
        self.start()

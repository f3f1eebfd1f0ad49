"""What turns a sans-I/O core on a loop: its next time, and its effects, one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class Ticker:
    """Calls `tick` when the core's next time has come."""

    def __init__(self, next_tick: Callable[[], float | None], tick: Callable[[], None]) -> None:
        self._next_tick, self._tick = next_tick, tick
        self._loop = asyncio.get_running_loop()
        self._armed: asyncio.Handle | None = None
        self._when = 0.0

    def arm(self) -> None:
        """Looks at the next time; cheap when what is armed comes no later."""
        when = self._next_tick()
        if when is None or (self._armed is not None and self._when <= when):
            return
        self.stop()
        self._armed, self._when = self._loop.call_at(when, self._fire), when

    def stop(self) -> None:
        """Calls no more."""
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def _fire(self) -> None:
        self._armed = None
        self._tick()
        self.arm()


class Performer(Generic[Effect]):
    """Performs effects one after the other, also those that come while one is being performed."""

    def __init__(self, perform: Callable[[Effect], None], ticker: Ticker) -> None:
        self._perform, self.ticker = perform, ticker
        self._effects: deque[Effect] = deque()
        self._busy = False

    def __call__(self, effects: Sequence[Effect]) -> None:
        self._effects.extend(effects)
        if self._busy:
            return
        self._busy = True
        try:
            while self._effects:
                self._perform(self._effects.popleft())
        finally:
            self._busy = False
        self.ticker.arm()

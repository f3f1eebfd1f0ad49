"""Drives a sans-I/O core on a loop: its clock, its next tick, and its effects, one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class LoopClock:
    """A core's time: the loop's time without the time in which this process did not run.

    A process that was stopped, or whose host was suspended, reads the messages of that time only after its timers have
    fired. By the loop's time all peers would have been silent. By this clock no tick is later than `slack_s`.
    """

    def __init__(self, slack_s: float) -> None:
        self._loop, self._slack_s = asyncio.get_running_loop(), slack_s
        self._lost = self._latest = 0.0
        self.due: float | None = None  # when the next tick should be

    @classmethod
    def among_peers(cls, ping_ms: int) -> LoopClock:
        """For a core whose peers are asked every `ping_ms`: no late tick counts for much of their silence."""
        return cls(ping_ms / 8e3)

    def now(self) -> float:
        """The time in seconds; it never goes back."""
        now = self._loop.time() - self._lost
        if self.due is not None and now > self.due + self._slack_s:
            self._lost += now - self.due - self._slack_s
            now = self.due + self._slack_s
        self._latest = max(self._latest, now)
        return self._latest

    def call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """As the loop's call_at."""
        return self._loop.call_at(when + self._lost, call)


class Ticker:
    """Calls `tick` when the core's next time has come by `clock`, which no other core uses; before that `receive`,
    which passes on what has arrived. A message that is there counts before the lack of it."""

    def __init__(
        self,
        next_tick: Callable[[], float | None],
        tick: Callable[[], None],
        clock: LoopClock,
        receive: Callable[[], None] = lambda: None,
    ) -> None:
        self._next_tick, self._tick, self._clock, self._receive = next_tick, tick, clock, receive
        self._armed: asyncio.Handle | None = None
        self._when = 0.0

    def arm(self) -> None:
        """Sets a timer for the next time; cheap when the timer is already early enough."""
        when = self._next_tick()
        if when is None or (self._armed is not None and self._when <= when):
            return
        self.stop()
        self._armed, self._when = self._clock.call_at(when, self._fire), when
        self._clock.due = when

    def stop(self) -> None:
        """Makes no more calls."""
        if self._armed is not None:
            self._armed.cancel()
            self._armed = self._clock.due = None

    def _fire(self) -> None:
        self._armed = None
        try:
            self._receive()
            self._tick()
        finally:  # what raises ends this tick alone
            if self._armed is None:
                self._clock.due = None
            self.arm()


class EffectRunner(Generic[Effect]):
    """Carries out effects one after the other, also those that are added while one is carried out. An effect that
    raises costs none of the others: they are carried out in the loop's next turn, and the ticker is armed."""

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
            if self._effects:
                asyncio.get_running_loop().call_soon(self, ())
            self.ticker.arm()

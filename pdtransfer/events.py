"""Calls that wait for a device's events. The loop asks whether an event has fired; it never waits for a GPU."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .engine.base import Event

POLL_S = 0.0002  # how often an event that has not fired is asked again


class EventQueue:
    """Calls of a room happen in the order they were made, each once its event has fired; at once, if it has."""

    def __init__(self, broken: Callable[[int, Exception], None]) -> None:
        """`broken` hears of a room whose event can be asked no more: what came before it may still be under way."""
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, deque[tuple[Event | None, Callable[[], None]]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def call(self, room: int, after: Event | None, call: Callable[[], None]) -> None:
        """Calls after `after` and after every earlier call of this room."""
        queue = self._waiting.get(room)
        if not queue and after is None:
            call()
            return
        if queue is None:
            queue = self._waiting[room] = deque()
        queue.append((after, call))
        if len(queue) == 1:
            self._advance(room)

    def forget(self, room: int) -> None:
        """Calls nothing more for this room, and asks its events no more."""
        if (queue := self._waiting.pop(room, None)) is not None:
            queue.clear()

    def stop(self) -> None:
        """Asks no more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _advance(self, room: int) -> None:
        queue = self._waiting[room]
        while queue:
            after, call = queue[0]
            try:
                fired = after is None or after.query()
            except Exception as error:  # noqa: BLE001 (whatever library the event is of)
                self.forget(room)
                self._broken(room, error)
                return
            if not fired:
                if self._timer is None:
                    self._timer = self._loop.call_later(POLL_S, self._ask)
                return
            queue.popleft()
            call()
        if self._waiting.get(room) is queue:
            del self._waiting[room]

    def _ask(self) -> None:
        self._timer = None
        for room in list(self._waiting):
            if room in self._waiting:
                self._advance(room)

"""READY rooms whose prompts are about to be shared: a turn later than READY, so that no engine waits for it."""

from __future__ import annotations

from ..prefix import PrefixCache
from ..timers import Timers
from .records import Room, TimerKey


class Keeping:
    """Each prompt enters the cache once: when its turn comes, when its room is released, or when a room is about to be
    admitted, which shares with all that were READY before."""

    def __init__(self, cache: PrefixCache, timers: Timers[TimerKey]) -> None:
        self._cache, self._timers = cache, timers
        self._rooms: dict[int, Room] = {}

    def add(self, room: Room, now: float) -> None:
        """The room is READY; one without keys shares nothing."""
        if room.keys:
            self._rooms[room.id] = room
            self._timers.set(("keep", room.id, 0), now)

    def keep(self, room_id: int) -> None:
        """Idempotent."""
        room = self._rooms.pop(room_id, None)
        if room is not None:
            assert room.holding is not None
            self._cache.keep(room.holding, room.keys)
            self._timers.clear(("keep", room_id, 0))

    def keep_all(self) -> None:
        """In the order in which they were READY."""
        while self._rooms:
            self.keep(next(iter(self._rooms)))

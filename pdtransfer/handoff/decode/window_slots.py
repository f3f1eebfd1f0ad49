"""Rooms that wait for a place in the window of each of their sources, oldest first."""

from __future__ import annotations

from ...errors import Cause
from .coverage import Coverage
from .records import Room, Session


class Places:
    """Who waits at which source. Admission, and with it the queue for slots, comes after."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._waiting: dict[str, dict[int, Room]] = {}  # by source; none is empty
        self._gaps: dict[int, tuple[Room, str]] = {}  # rooms that their sources do not cover

    def __bool__(self) -> bool:
        return bool(self._waiting or self._gaps)

    def __contains__(self, source: str) -> bool:
        return source in self._waiting

    def at(self, source: str) -> list[Room]:
        """The rooms that wait for a place at this source."""
        return list(self._waiting.get(source, {}).values())

    def wait(self, room: Room) -> None:
        """Waits for a place at each of its sources."""
        for source in room.sources:
            self._waiting.setdefault(source, {})[room.id] = room

    def leave(self, room: Room) -> None:
        """Waits no more, and leaves the places that it has got to others."""
        for source in room.sources:
            if (waiting := self._waiting.get(source)) is not None:
                waiting.pop(room.id, None)
                if not waiting:
                    del self._waiting[source]
        self._gaps.pop(room.id, None)
        room.unreserve()

    def give(self, session: Session) -> list[Room]:
        """Gives away what is free of this session's window; returns the rooms that have all their places now.

        A room of several ranks keeps each place that it has got: since all ranks serve the oldest first, it gets the
        others, too.
        """
        source, complete = session.peer, list[Room]()
        waiting = self._waiting.get(source)
        while waiting and session.has_place:
            room = waiting.pop(next(iter(waiting)))
            session.reserved += 1
            room.places[source] = session
            if len(room.places) == len(room.sources):
                gap = self._coverage.gap(room.places[each] for each in room.sources)
                if gap:
                    self._gaps[room.id] = room, gap
                else:
                    complete.append(room)
        if waiting is not None and not waiting:
            del self._waiting[source]
        return complete

    def refused(self) -> tuple[Room, Cause, str] | None:
        """A room that has all its places and whose sources do not cover it: it fails before anything is leased."""
        if not self._gaps:
            return None
        _, (room, gap) = self._gaps.popitem()
        return room, Cause.REFUSED, gap

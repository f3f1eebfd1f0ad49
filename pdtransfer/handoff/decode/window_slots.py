"""Rooms that wait for a slot in the window of each of their sources, oldest first, or to be given up there; and the
check of their sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import Cause
from ...layout.layout import Component
from ...limits import TEXT_LENGTH_MAX, WITHDRAWN_MAX
from ...wire import Withdrawn
from ..sharing import uncovered
from .records import RoomRecord, SessionRecord

HELLOS = 3  # that name a room: ZeroMQ loses one where a connection is made anew


class Coverage:
    """Whether the sources of a room send every plane of it exactly once.

    The answers for the latest `kept_max` sets of sessions of one decode rank are kept.
    """

    def __init__(self, components: Sequence[Component], kept_max: int) -> None:
        self._components, self._kept_max = components, kept_max
        self._known: dict[tuple[int, ...], str] = {}  # by session ids, which are never used again

    def gap(self, sessions: Iterable[SessionRecord]) -> str:
        """Empty if the sessions cover the room, else a line that names what is missing."""
        sessions = tuple(sessions)
        key = tuple([session.id for session in sessions])
        text = self._known.get(key)
        if text is None:
            text = uncovered(self._components, {session.peer: session.components for session in sessions})
            if len(self._known) >= self._kept_max:
                del self._known[next(iter(self._known))]
            self._known[key] = text
        return text


class WindowSlots:
    """The rooms that wait at each source. They enter the queue for slots of the arena afterwards."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._waiting: dict[str, dict[int, RoomRecord]] = {}  # by source; none is empty
        self._incomplete: dict[int, RoomRecord] = {}  # rooms that wait at some source, oldest first
        self._gaps: dict[int, tuple[RoomRecord, str]] = {}  # rooms that their sources do not cover

    def __bool__(self) -> bool:
        return bool(self._waiting or self._gaps)

    def __contains__(self, source: str) -> bool:
        return source in self._waiting

    def waiting_at(self, source: str) -> list[RoomRecord]:
        """The rooms that wait for a window slot at this source."""
        return list(self._waiting.get(source, {}).values())

    def wait(self, room: RoomRecord) -> None:
        """Adds a room, which waits at each of its sources."""
        self._incomplete[room.id] = room
        for source in room.sources:
            self._waiting.setdefault(source, {})[room.id] = room

    def rename(self, source: str, into: str) -> None:
        """The rooms of one source wait in the line of another name of it, each in its turn.

        Slots there that went to rooms which still wait elsewhere are given back: an older room may have been in the
        other line, and hold what these wait for.
        """
        waiting = self._waiting.pop(source, None)
        if waiting is None:
            return
        line = [room for room in self._incomplete.values() if room.id in waiting or into in room.sources]
        for room in line:
            if (session := room.reserved.pop(into, None)) is not None:
                session.reserved -= 1
        self._waiting[into] = {room.id: room for room in line}

    def leave(self, room: RoomRecord) -> None:
        """Removes a room and gives its window slots back."""
        for source in room.sources:
            if (waiting := self._waiting.get(source)) is not None:
                waiting.pop(room.id, None)
                if not waiting:
                    del self._waiting[source]
        self._incomplete.pop(room.id, None)
        self._gaps.pop(room.id, None)
        room.unreserve()

    def assign(self, session: SessionRecord) -> list[RoomRecord]:
        """Assigns the free slots of this session's window; returns the rooms that have all their slots now.

        A room of several ranks keeps each slot that it got. Every rank serves the oldest room first, so the room gets
        the others, too.
        """
        source, complete = session.peer, list[RoomRecord]()
        waiting = self._waiting.get(source)
        while waiting and session.has_window_slot:
            room = waiting.pop(next(iter(waiting)))
            session.reserved += 1
            room.reserved[source] = session
            if len(room.reserved) == len(room.sources):
                del self._incomplete[room.id]
                gap = self._coverage.gap(room.reserved[each] for each in room.sources)
                if gap:
                    self._gaps[room.id] = room, gap
                else:
                    complete.append(room)
        if waiting is not None and not waiting:
            del self._waiting[source]
        return complete

    def refused(self) -> tuple[RoomRecord, Cause, str] | None:
        """A room that has all its window slots and whose sources do not cover it; it fails before anything is
        leased."""
        if not self._gaps:
            return None
        _, (room, gap) = self._gaps.popitem()
        return room, Cause.PEER_LOST, gap


@dataclass(slots=True)
class Withdrawal:
    """One room that was given up, for one source."""

    room: int
    detail: str  # why, for a person
    until: float  # when nobody waits for it any more
    whole_group: bool  # it is for all ranks that the source leads
    hellos: int = 0  # that have named it, to a source that refuses this node or is refused


class Withdrawals:
    """Rooms that were given up before their Grant, oldest first, until each source that may have them open is told.

    At most `kept_max` are kept, and each for `kept_s` at least: a source has a deadline of its own, which may be later
    than that of the room here.
    """

    def __init__(self, kept_max: int, kept_s: float) -> None:
        self._kept_max, self._kept_s = kept_max, kept_s
        self._waiting: dict[str, dict[int, Withdrawal]] = {}  # by source and room; none is empty
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def sources(self) -> list[str]:
        """The sources that are to be told of a room."""
        return list(self._waiting)

    def add(self, room: RoomRecord, detail: str, now: float) -> None:
        """Adds a room that has failed, for those of its sources that have no Grant of it."""
        granted = {lease.session.peer for lease in room.leases}
        for source in room.sources:
            if source not in granted:
                whole_group = room.sources == room.leaders
                self.put(source, room.id, detail, now, until=room.deadline, whole_group=whole_group)

    def put(
        self, source: str, room_id: int, detail: str, now: float, *, until: float = 0.0, whole_group: bool = False
    ) -> None:
        """Adds a room for one source, or for the whole group of ranks that this source leads."""
        waiting = self._waiting.setdefault(source, {})
        if room_id not in waiting:
            self._count += 1
        waiting[room_id] = Withdrawal(room_id, detail[:TEXT_LENGTH_MAX], max(until, now + self._kept_s), whole_group)
        if self._count > self._kept_max:
            self._pop(source)

    def rename(self, source: str, into: str, now: float) -> None:
        """What one source is to be told, another name of it is told."""
        for room_id in list(self._waiting.get(source, ())):
            moved = self._remove(source, room_id)
            self.put(into, room_id, moved.detail, now, until=moved.until, whole_group=moved.whole_group)

    def drop(self, room: RoomRecord) -> None:
        """The room is expected again: its sources are not told that it was given up."""
        for source in room.sources:
            if room.id in self._waiting.get(source, ()):
                self._remove(source, room.id)

    def take(self, source: str, now: float) -> Withdrawal | None:
        """Removes a room of which this source is to be told, and returns it; None for none."""
        while source in self._waiting:
            taken = self._pop(source)
            if now < taken.until:
                return taken
        return None

    def is_new(self, source: str) -> bool:
        """Whether no Hello to this source has named one of its rooms yet."""
        return any(not each.hellos for each in self._waiting.get(source, {}).values())

    def in_hello(self, source: str, now: float) -> tuple[Withdrawn, ...]:
        """The rooms that the next Hello to this source names. Nothing acknowledges them, so each is in several."""
        waiting = self._waiting.get(source, {})
        named = sorted(waiting.values(), key=lambda each: each.hellos)[:WITHDRAWN_MAX]
        for each in named:
            each.hellos += 1
        for each in [each for each in waiting.values() if each.hellos >= HELLOS or now >= each.until]:
            self._remove(source, each.room)
        return tuple([Withdrawn(each.room, each.detail) for each in named])

    def _pop(self, source: str) -> Withdrawal:
        return self._remove(source, next(iter(self._waiting[source])))

    def _remove(self, source: str, room_id: int) -> Withdrawal:
        waiting = self._waiting[source]
        removed = waiting.pop(room_id)
        self._count -= 1
        if not waiting:
            del self._waiting[source]
        return removed

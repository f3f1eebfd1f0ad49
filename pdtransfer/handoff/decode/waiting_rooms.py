"""What waits at a peer, oldest first: rooms whose leader has not named its ranks, and rooms without a window slot at a
source. And rooms that were given up, which their sources have to learn.

A room is in one line of each peer that it waits for. It enters the lines of all its sources at once, when it knows
them. So every rank serves the oldest room first, and no two rooms wait for each other's window slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...errors import Cause
from ...layout.layout import Component
from ...limits import TEXT_LENGTH_MAX, WITHDRAWN_MAX
from ...wire import Withdrawn
from ..component_variants import NO_STAND_INS, StandIns, sent_by_both, used_with
from ..sharing import uncovered
from ..states import Lease
from .records import RoomRecord, SessionRecord

HELLOS = 3  # that name a room: ZeroMQ loses one where a connection is made anew


class Coverage:
    """Checks that the sources of a room send every plane of it exactly once, all of them by the same rows.

    The answers for the latest `kept_max` sets of sessions of one decode rank are kept.
    """

    def __init__(self, components: Sequence[Component], kept_max: int, stand_ins: StandIns = NO_STAND_INS) -> None:
        self._components, self._kept_max, self._stand_ins = components, kept_max, stand_ins
        self._known: dict[tuple[int, ...], str] = {}  # by session ids, which are never used again

    def gap(self, sessions: Iterable[SessionRecord]) -> str:
        """Empty if the sessions cover the room, else a line that names what is missing, or sent twice."""
        sessions = tuple(sessions)
        key = tuple([session.id for session in sessions])
        text = self._known.get(key)
        if text is None:
            shares = {session.peer: session.components for session in sessions}
            names = {component.name for share in shares.values() for component in share}
            text = sent_by_both(shares, self._stand_ins)
            text = text or uncovered(used_with(self._components, names, self._stand_ins), shares)
            if len(self._known) >= self._kept_max:
                del self._known[next(iter(self._known))]
            self._known[key] = text
        return text


Entry = TypeVar("Entry")


class WaitingRooms(Generic[Entry]):
    """One line of rooms for each peer."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, Entry]] = {}  # none is empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, peer: str) -> bool:
        return peer in self._lines

    @property
    def peers(self) -> list[str]:
        """The peers that something waits at."""
        return list(self._lines)

    def at(self, peer: str) -> list[Entry]:
        """What waits at this peer."""
        return list(self._lines.get(peer, {}).values())

    def put(self, peer: str, room_id: int, entry: Entry) -> None:
        """Puts a room at the end of a peer's line; one that is there keeps its turn."""
        self._lines.setdefault(peer, {})[room_id] = entry

    def pop(self, peer: str, room_id: int | None = None) -> Entry | None:
        """Takes a room, or the oldest, out of a peer's line; None where it is not there."""
        line = self._lines.get(peer)
        if line is None:
            return None
        entry = line.pop(next(iter(line)) if room_id is None else room_id, None)
        if not line:
            del self._lines[peer]
        return entry

    def pop_line(self, peer: str) -> dict[int, Entry]:
        """Takes all rooms out of a peer's line."""
        return self._lines.pop(peer, {})


class WindowSlots:
    """The rooms that wait at each source. They enter the queue for slots of the arena afterwards."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self.rooms: WaitingRooms[RoomRecord] = WaitingRooms()
        self._incomplete: dict[int, RoomRecord] = {}  # rooms that wait at some source, oldest first
        self._gaps: dict[int, tuple[RoomRecord, str]] = {}  # rooms that their sources do not cover

    def wait(self, room: RoomRecord) -> None:
        """Adds a room, which waits at each of its sources."""
        self._incomplete[room.id] = room
        for source in room.sources:
            self.rooms.put(source, room.id, room)

    def rename(self, source: str, into: str) -> None:
        """The rooms of one source wait in the line of another name of it, each in its turn.

        Slots there that went to rooms which still wait elsewhere are given back. An older room may have been in the
        other line, and hold what these wait for.
        """
        waiting = self.rooms.pop_line(source)
        if not waiting:
            return
        line = [room for room in self._incomplete.values() if room.id in waiting or into in room.sources]
        for room in line:
            if (session := room.reserved.pop(into, None)) is not None:
                session.reserved -= 1
        self.rooms.pop_line(into)
        for room in line:
            self.rooms.put(into, room.id, room)

    def leave(self, room: RoomRecord) -> None:
        """Removes a room and gives its window slots back."""
        for source in room.sources:
            self.rooms.pop(source, room.id)
        self._incomplete.pop(room.id, None)
        self._gaps.pop(room.id, None)
        room.unreserve()

    def assign(self, session: SessionRecord) -> list[RoomRecord]:
        """Assigns the free slots of this session's window; returns the rooms that have all their slots now.

        A room of several ranks keeps each slot that it got. Every rank serves the oldest room first, so the room gets
        the others, too.
        """
        source, complete = session.peer, list[RoomRecord]()
        while session.has_window_slot and (room := self.rooms.pop(source)) is not None:
            room.reserve(session)
            if len(room.reserved) == len(room.sources):
                del self._incomplete[room.id]
                gap = self._coverage.gap(room.reserved[name] for name in room.sources)
                if gap:
                    self._gaps[room.id] = room, gap
                else:
                    complete.append(room)
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
    """Rooms that were given up before their Grant, oldest first, until each source that may have them open has learned
    it.

    At most `kept_max` are kept, and each for `kept_s` at least. A source has a deadline of its own, which may be later
    than that of the room here.
    """

    def __init__(self, kept_max: int, kept_s: float) -> None:
        self._kept_max, self._kept_s = kept_max, kept_s
        self.rooms: WaitingRooms[Withdrawal] = WaitingRooms()

    def add(self, room: RoomRecord, detail: str, now: float) -> None:
        """Adds a room that has failed, for those of its sources that have no Grant of it."""
        granted = {lease.session.peer for lease in room.leases if lease.message.last or lease.state is not Lease.ENDED}
        for source in room.sources:
            if source not in granted:
                whole_group = room.sources == room.leaders
                self.put(source, room.id, detail, now, until=room.deadline, whole_group=whole_group)

    def put(
        self, source: str, room_id: int, detail: str, now: float, *, until: float = 0.0, whole_group: bool = False
    ) -> None:
        """Adds a room for one source, or for the whole group of ranks that this source leads."""
        until = max(until, now + self._kept_s)
        self.rooms.put(source, room_id, Withdrawal(room_id, detail[:TEXT_LENGTH_MAX], until, whole_group))
        if len(self.rooms) > self._kept_max:
            self.rooms.pop(source)

    def rename(self, source: str, into: str) -> None:
        """What one source has to learn is sent to another name of it."""
        for room_id, withdrawal in self.rooms.pop_line(source).items():
            self.rooms.put(into, room_id, withdrawal)

    def drop(self, room: RoomRecord) -> None:
        """The room is expected again: its sources do not get a withdrawal."""
        for source in room.sources:
            self.rooms.pop(source, room.id)

    def take(self, source: str, now: float) -> Withdrawal | None:
        """Removes a room whose withdrawal this source has to get, and returns it; None if there is none."""
        while (taken := self.rooms.pop(source)) is not None:
            if now < taken.until:
                return taken
        return None

    def is_new(self, source: str) -> bool:
        """True if no Hello to this source has named one of its rooms yet."""
        return any(not withdrawal.hellos for withdrawal in self.rooms.at(source))

    def in_hello(self, source: str, now: float) -> tuple[Withdrawn, ...]:
        """The rooms that the next Hello to this source names. Nothing acknowledges them, so each is in several."""
        waiting = self.rooms.at(source)
        named = sorted(waiting, key=lambda withdrawal: withdrawal.hellos)[:WITHDRAWN_MAX]
        for withdrawal in named:
            withdrawal.hellos += 1
        for withdrawal in waiting:
            if withdrawal.hellos >= HELLOS or now >= withdrawal.until:
                self.rooms.pop(source, withdrawal.room)
        return tuple([Withdrawn(withdrawal.room, withdrawal.detail) for withdrawal in named])

"""Rooms whose caller named the leaders of prefill workers alone, until each leader has named its ranks."""

from __future__ import annotations

from itertools import chain

from .prefill_peers import PrefillPeers
from .records import RoomRecord


class RoomGroups:
    """The rooms that wait at each leader. A room enters the queues of all its sources at once, when it knows them:
    so every rank serves the oldest room first, and no two rooms wait for each other's window slots."""

    def __init__(self, peers: PrefillPeers) -> None:
        self._peers = peers
        self._waiting: dict[str, dict[int, RoomRecord]] = {}  # by leader; none is empty

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, leader: str) -> bool:
        return leader in self._waiting

    def waiting_at(self, leader: str) -> list[RoomRecord]:
        """The rooms that wait for this leader, and perhaps for others."""
        return list(self._waiting.get(leader, {}).values())

    def wait(self, room: RoomRecord) -> None:
        """Adds a room, which waits for its leaders."""
        for leader in room.leaders:
            self._waiting.setdefault(leader, {})[room.id] = room

    def rename(self, leader: str, into: str) -> None:
        """The rooms of one leader wait for another name of it."""
        if (waiting := self._waiting.pop(leader, None)) is not None:
            self._waiting.setdefault(into, {}).update(waiting)

    def leave(self, room: RoomRecord) -> None:
        """Removes a room."""
        for leader in room.leaders:
            if (waiting := self._waiting.get(leader)) is not None:
                waiting.pop(room.id, None)
                if not waiting:
                    del self._waiting[leader]

    def sources(self, room: RoomRecord, now: float) -> tuple[str, ...] | None:
        """The ranks of all its leaders' groups as they are dialled, each leader before the ranks that it leads; None
        while a leader has not named them."""
        groups = [self._peers.group_of(leader, now) for leader in room.leaders]
        known = [group for group in groups if group is not None]
        return tuple(dict.fromkeys(chain.from_iterable(known))) if len(known) == len(groups) else None

"""What prefill and decode have in common towards a router: rooms from Begin to Ended, and Load (section 5)."""

import struct
from dataclasses import dataclass, field
from typing import Any

from tests.serve.stranger.peer import Fields, Link, Peer


@dataclass(eq=False)
class Room:
    """A request on this worker. What is below `end` belongs to the one role or the other."""

    router: Link
    begin: Fields
    ids: list[int]  # the prompt
    kv_bytes: int = 0
    end: Fields | None = None
    grants_landed: int = 0  # prefill: one of each decode rank that Begin names
    grant: tuple[Any, int] | None = None  # decode: session and number
    parts: list[Fields] = field(default_factory=list)  # decode: of that grant
    slots: dict[int, list[int]] = field(default_factory=dict)  # decode: by component, in the order of rows

    @property
    def number(self) -> int:
        return self.begin["room"]


class Worker(Peer):
    """A subclass starts rooms in `begun`, ends them by `end`, and has `load` for its routers."""

    def __init__(self, **peer: Any) -> None:
        super().__init__(**peer)
        self.rooms: dict[int, Room] = {}
        self.refused: set[int] = set()  # rooms that were given up before they began
        self.listen()

    def begun(self, room: Room) -> None:
        raise NotImplementedError

    def given_up(self, room: Room, reason: str) -> None:
        """The router wants it no more."""
        self.end(room, reason, "cancelled")

    def load(self) -> Fields:
        """Slots, and what the worker can do."""
        raise NotImplementedError

    def on_greeted(self, link: Link) -> None:
        if link.identity["role"] == "router":
            self._send_load(link)

    def on_ping(self, link: Link, ping: Fields) -> None:
        super().on_ping(link, ping)
        if link.identity["role"] == "router":
            self._send_load(link)

    def _send_load(self, link: Link) -> None:
        running = sum(room.end is None for room in self.rooms.values())
        link.send("Load", ready=True, draining=False, rooms_running=running, rooms_queued=0, **self.load())

    def on_begin(self, link: Link, begin: Fields) -> None:
        number = begin["room"]
        if number in self.rooms:
            room = self.rooms[number]
            self._send_end(room) if room.end else link.send("Begun", room=number)
            return
        ids = [token for (token,) in struct.iter_unpack("<I", begin["prompt"])]
        room = self.rooms[number] = Room(link, begin, ids)
        link.send("Begun", room=number)
        if number in self.refused:
            self.end(room, "aborted", "given up before it began")
        else:
            self.begun(room)

    def on_cancel(self, link: Link, cancel: Fields) -> None:
        room = self.rooms.get(cancel["room"])
        if room is None:
            self.refused.add(cancel["room"])
            link.send("End", room=cancel["room"], reason=cancel["reason"], detail="", tokens=0)
        elif room.end is None:
            self.given_up(room, cancel["reason"])
        else:
            self._send_end(room)

    def on_ended(self, link: Link, ended: Fields) -> None:
        self.answered(("End", ended["room"]))

    def end(self, room: Room, reason: str, detail: str, *, tokens: int = 0) -> None:
        """The room is over on this worker: once, for one reason."""
        assert room.end is None
        room.end = {"reason": reason, "detail": detail, "tokens": tokens, "kv_bytes": room.kv_bytes}
        self._send_end(room)

    def _send_end(self, room: Room) -> None:
        self.repeat(("End", room.number), room.router, "End", room=room.number, **room.end)

"""A router: it dials prefill and decode, begins a room on both, and collects the answer."""

import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.serve.stranger.peer import Fields, Link, Peer

ROLES = ("prefill", "decode")
GOOD = ("stop", "length", "done")


@dataclass(eq=False)
class Room:
    """A request on two daemons, or on one of them."""

    links: dict[str, Link]  # by role, as all below
    begin: Fields
    tokens: list[int] = field(default_factory=list)
    ends: dict[str, Fields] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def number(self) -> int:
        return self.begin["room"]

    @property
    def whole(self) -> bool:
        """Whether all tokens have arrived that decode has told of."""
        return "decode" not in self.ends or self.ends["decode"]["tokens"] <= len(self.tokens)


class Router(Peer):
    """`begin` and `complete` are for other threads, while this peer runs."""

    def __init__(self, prefill: str, decode: str, **peer: Any) -> None:
        super().__init__(role="router", **peer)
        self.links = {"prefill": self.dial(prefill), "decode": self.dial(decode)}
        self.usable = {role: threading.Event() for role in ROLES}
        self.rooms: dict[int, Room] = {}

    def complete(self, prompt: bytes, max_tokens: int, **more: Any) -> Room:
        """A room that has ended on both."""
        room = self.begin(prompt, max_tokens, **more)
        self.wait(room.over, "every End")
        return room

    def begin(self, prompt: bytes, max_tokens: int, *, roles: Sequence[str] = ROLES, **more: Any) -> Room:
        """A room for a prompt of byte tokens, once both daemons are ready; `more` goes into Begin."""
        for role, event in self.usable.items():
            self.wait(event, f"{role} that is ready")
        begin = {
            "room": secrets.randbits(64),
            "prompt": struct.pack(f"<{len(prompt)}I", *prompt),
            "sampling": {"max_tokens": max_tokens, "ignore_eos": True},
            "time_left_ms": 30_000,
            **more,
        }
        room = Room({role: self.links[role] for role in roles}, begin)
        self.call(lambda: self._begin(room))
        return room

    def cancel(self, room: Room, reason: str) -> None:
        """Gives a room up."""
        self.call(lambda: self._cancel(room, reason))

    def _begin(self, room: Room) -> None:
        """To prefill with the decode ranks' names, to decode with the prefill ranks' endpoints."""
        self.rooms[room.number] = room
        peers = {"prefill": [self.links["decode"].identity["node"]], "decode": [self.links["prefill"].endpoint]}
        for role, link in room.links.items():
            self.repeat(("Begin", room.number, role), link, "Begin", **room.begin, peers=peers[role])

    def _cancel(self, room: Room, reason: str) -> None:
        """On every daemon that has not ended it."""
        for role, link in room.links.items():
            if role not in room.ends:
                self.answered(("Begin", room.number, role))
                self.repeat(("Cancel", room.number, role), link, "Cancel", room=room.number, reason=reason)

    def ping_fields(self, link: Link) -> Fields:
        return {"peers": [self.links["prefill"].endpoint]} if link is self.links["decode"] else {}

    def on_load(self, link: Link, load: Fields) -> None:
        if load["ready"] and not load["draining"]:
            self.usable[link.identity["role"]].set()

    def on_begun(self, link: Link, begun: Fields) -> None:
        self.answered(("Begin", begun["room"], link.identity["role"]))
        if begun["room"] not in self.rooms:
            link.send("Cancel", room=begun["room"], reason="aborted")

    def on_tokens(self, link: Link, tokens: Fields) -> None:
        room = self.rooms.get(tokens["room"])
        if room is None:
            link.send("Cancel", room=tokens["room"], reason="aborted")
            return
        if tokens["first"] <= len(room.tokens):
            room.tokens[tokens["first"] :] = [token for (token,) in struct.iter_unpack("<I", tokens["ids"])]
        link.send("TokensAcked", room=room.number, next=len(room.tokens))
        self._finish(room)

    def on_end(self, link: Link, end: Fields) -> None:
        role, room = link.identity["role"], self.rooms.get(end["room"])
        if room is None:
            link.send("Ended", room=end["room"])
            return
        room.ends.setdefault(role, end)
        self.answered(("Begin", room.number, role))
        self.answered(("Cancel", room.number, role))
        if end["reason"] not in GOOD:
            self._cancel(room, end["reason"])
        self._finish(room)

    def _finish(self, room: Room) -> None:
        """Ended is said when the answer is whole: decode keeps its tokens until then."""
        for role in room.ends:
            if room.whole or room.ends[role]["reason"] not in GOOD:
                room.links[role].send("Ended", room=room.number)
        if room.whole and room.ends.keys() == room.links.keys():
            room.over.set()

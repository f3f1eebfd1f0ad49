"""Both sides of the rooms of a bootstrap_room: decode numbers its uses, prefill meets the rooms that decode asks for,
and both report how its state changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ...client.api import KVPoll
from ..kit.peers import USE_BITS, Remembered, room_of, tag_of


@dataclass(frozen=True, slots=True)
class Change:
    """A request, by its bootstrap_room, is in another state; `reason` is why it failed."""

    bootstrap_room: int
    state: KVPoll
    reason: str = ""


_KEPT_MAX = 65_536


class Uses:
    """Decode: numbers the uses of each bootstrap_room, from the number `first` on, which all ranks share."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = Remembered[int, int](_KEPT_MAX)  # by bootstrap_room, the oldest first

    def room(self, bootstrap_room: int) -> int:
        """A room that no request had before, unless it was one of 2**20 of the same bootstrap_room."""
        use = self._next.pop(bootstrap_room, self._first)
        self._next.keep(bootstrap_room, use + 1)
        return room_of(bootstrap_room, use)


class Meetings:
    """Prefill: requests wait for decode to ask for their room, and rooms that were asked for wait for their request.

    `opened` is called with a bootstrap_room and the room that is to be opened for it. It is called again, with another
    one, if decode asks once more before `met`: it gave the first room up, and prefill never learned of it. `refused` is
    called with a room that decode asks for after its request was given up: it would wait for nothing.
    """

    def __init__(
        self,
        opened: Callable[[int, int], None],
        refused: Callable[[int], None],
        *,
        kept_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened, self._refused = opened, refused
        self._kept_s, self._clock = kept_s, clock
        self._waiting: dict[int, int] = {}  # bootstrap_room by tag
        self._asked = Remembered[int, int](_KEPT_MAX)  # room by tag, the oldest first
        self._given_up = Remembered[int, float](_KEPT_MAX)  # until when it is known, by tag, the oldest first

    def wait(self, bootstrap_room: int) -> None:
        """A request is here."""
        tag = tag_of(bootstrap_room)
        self._waiting[tag] = bootstrap_room
        self._given_up.pop(tag, None)
        if (room := self._asked.pop(tag, None)) is not None:
            self._opened(bootstrap_room, room)

    def ask(self, room: int) -> None:
        """Decode asked for a room that is not open."""
        tag = room >> USE_BITS
        if (bootstrap_room := self._waiting.get(tag)) is not None:
            self._opened(bootstrap_room, room)
        elif self._given_up.pop(tag, 0.0) > self._clock():
            self._refused(room)
        else:
            self._asked.keep(tag, room)

    def met(self, bootstrap_room: int) -> None:
        """The request has its room, or has ended. Idempotent."""
        self._waiting.pop(tag_of(bootstrap_room), None)

    def give_up(self, bootstrap_room: int) -> None:
        """The request has ended, and decode has not asked for it yet: the first room that it asks for is refused, as
        long as decode waits for one."""
        self.met(bootstrap_room)
        self._given_up.keep(tag_of(bootstrap_room), self._clock() + self._kept_s)

"""Fairness and time, as they are seen outside a core: the room that waits longest is served first, none waits for what
is free, and what is not answered is repeated neither too soon nor too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from pdtransfer.handoff.effects import DecodeEffect, HangUp, PrefillEffect, RoomLeased, Send
from pdtransfer.handoff.states import DecodeRoom
from pdtransfer.wire import Abort, Drained, Failed, Grant, Hello, Landed, Message, Register, Reject, Welcome

if TYPE_CHECKING:
    from pdtransfer.handoff.decode.records import RoomRecord

    from .decodes import DecodeNode
    from .process import Process

SLACK = 1e-6  # seconds, of rounding

Effect = TypeVar("Effect", DecodeEffect, PrefillEffect)
Key = tuple[str, str, int, int]  # peer, kind of message, session, grant


class WaitingLine:
    """The rooms that wait for slots of one decode node, in one of its lives."""

    def __init__(self, node: DecodeNode) -> None:
        self._node, self._core = node, node.core
        self._since: dict[int, int] = {}  # by room: in which call of the core it came to wait for slots
        self._calls = 0

    def check(self, effects: Sequence[DecodeEffect]) -> None:
        """After each call of the core."""
        self._calls += 1
        leased = [effect.room for effect in effects if isinstance(effect, RoomLeased)]
        for room in leased:
            self._check_turn(room, leased)
        self._check_windows()
        if not leased and not self._since and not len(self._core.admission):
            return
        rooms = self._core.rooms.values()
        queued = [room for room in rooms if room.state is DecodeRoom.QUEUED]
        for room in queued:
            if room.id not in self._since:
                self._check_window_turn(room)
        self._since = {room.id: self._since.get(room.id, self._calls) for room in queued}
        for room in queued:
            self._check_rest(room)
        self._check_head()
        landing = sum(room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING) for room in rooms)
        inflight, most = self._core.admission.inflight_bytes, self._node.limits.inflight_bytes_max
        if leased and landing > 1 and inflight > most:
            self._node.world.fail(f"{self._node.name} has {inflight} bytes in flight to {landing} rooms, of {most}")

    def _check_turn(self, room: int, leased: list[int]) -> None:
        """First come, first served."""
        since = self._since.pop(room, self._calls)
        for other, earlier in self._since.items():
            known = self._core.rooms.get(other)
            waits = other in leased or (known is not None and known.state is DecodeRoom.QUEUED)
            if waits and earlier < since:
                self._node.world.fail(f"room {room} is leased its slots before room {other}, which has waited longer")

    def _check_rest(self, room: RoomRecord) -> None:
        """No room without a prefill waits for slots when its blocks are gone: it is handed over at once."""
        cache = self._core.cache
        rest = room.tokens - len(cache.longest(room.keys)) * cache.block_tokens
        if not room.sources and rest > room.rest_max:
            self._node.world.fail(f"room {room.id} waits, though {rest} tokens are left of {room.rest_max} at most")

    def _check_window_turn(self, room: RoomRecord) -> None:
        """Nor does a room that came later to the same peers get there first."""
        for other in self._core.rooms.values():
            if other is room:
                return
            if other.state is DecodeRoom.CONNECTING and other.sources == room.sources and not other.leaders:
                self._node.world.fail(
                    f"room {room.id} has its places in windows before room {other.id}, which is older"
                )

    def _check_windows(self) -> None:
        """No room waits for a window that has a place, nor for a peer that is there."""
        for name, peer in self._core.prefill_peers.peers.items():
            if peer.up is not None and peer.up.has_window_slot and name in self._core.window_slots.rooms:
                self._node.world.fail(f"{self._node.name}: rooms wait for {name}, which has a place in its window")

    def _check_head(self) -> None:
        """The head of the queue waits only for what is not there."""
        core, seen = self._core, self._node.world.seen
        if (head := core.admission.head()) is None:
            return
        seen["calls with a queue"] += 1
        demand, inflight = core.rooms[head].demand, core.admission.inflight_bytes
        over = inflight and inflight + demand.inflight_bytes > self._node.limits.inflight_bytes_max
        seen["calls with a queue for bytes in flight"] += bool(over)
        free = [each.free_slots for each in core.arena.free]
        if not over and all(map(int.__le__, demand.rows, free)):
            self._node.world.fail(f"room {head} waits for {demand.rows} slots, though {free} are free")


class Repeats:
    """What one life of a process sends again until it is answered, and when."""

    def __init__(self, process: Process) -> None:
        self._process, limits = process, process.limits
        self._pace = limits.resend_ms, limits.resend_ms_max
        self._polls = limits.fence_poll_ms, limits.fence_poll_ms_max
        self._sent: dict[Key, float] = {}
        self._pauses: dict[Key, int] = {}  # of what is not answered: how often it was repeated because it was time

    def sent(self, peer: str, message: Message) -> None:
        """Any message. No peer is greeted more often than what is not answered is repeated at first. A Reject may be
        an answer as well, which has its own time."""
        key = _key(peer, message)
        if key is not None and not isinstance(message, Reject):
            if isinstance(message, Hello):
                self._check_not_early(key, self._pace[0])
            self._note(key)

    def received(self, peer: str, message: Message) -> None:
        """A Welcome ends the Hellos, for a while."""
        if isinstance(message, Welcome):
            self._pauses.pop((peer, "Hello", 0, 0), None)

    def forgotten(self, peer: str) -> None:
        """A peer that is dialled again is a new one."""
        self._sent.pop((peer, "Hello", 0, 0), None)

    def ticked(self, effects: list[Effect]) -> list[Effect]:
        """What is sent because it was time to: each pause is twice the one before, up to the longest. Returns it."""
        for effect in effects:
            if isinstance(effect, HangUp):
                self.forgotten(effect.peer)
            key = _key(effect.peer, effect.message) if isinstance(effect, Send) else None
            if key is not None and key in self._sent:
                self._check_pause(key)
            if key is not None and key[1] == "Reject":
                self._note(key)
        return effects

    def _note(self, key: Key) -> None:
        self._sent[key] = self._process.clock
        self._pauses.setdefault(key, 0)

    def _check_pause(self, key: Key) -> None:
        process = self._process
        first_ms, most_ms = self._polls if key[1] == "Reject" else self._pace
        count = self._pauses.get(key, 0) if key[1] != "Hello" else 0  # a peer that asks for Hellos gets them sooner
        self._check_not_early(key, min(first_ms << count, most_ms))
        late = process.clock - max(self._sent[key], process.thawed) - most_ms / 1e3
        if key in self._pauses:
            process.world.seen["repeats in time"] += 1
            self._pauses[key] += 1
            if late > SLACK:
                process.world.fail(f"{process.name} repeats {key} {late:.4f} s after the longest pause")

    def _check_not_early(self, key: Key, pause_ms: int) -> None:
        process = self._process
        early = self._sent.get(key, -math.inf) + pause_ms / 1e3 - process.clock
        if early > SLACK:
            process.world.fail(f"{process.name} repeats {key} {early:.4f} s before it is time")


def _key(peer: str, message: Message) -> Key | None:
    """What is repeated, by what its answer names; None for what is not."""
    kind = type(message).__name__
    match message:
        case Hello():
            return peer, kind, 0, 0
        case Register() | Reject() if message.session:
            return peer, kind, message.session, 0
        case Grant() | Abort() | Landed() | Drained():
            return peer, kind, message.session, message.grant
        case Failed() if message.quiescent:
            return peer, kind, message.session, message.grant
        case _:
            return None

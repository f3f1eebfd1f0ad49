"""What a node owes each peer, honest or not, by what it was sent and what it does: whoever keeps to no rules gets no
further than the rules let them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.liveness import HELLO_WANTED
from pdtransfer.handoff.slot_allocator import slots_of
from pdtransfer.wire import (
    Abort,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Landed,
    Message,
    Register,
    Registered,
    Reject,
    Released,
    Welcome,
    unpack_extents,
)

from .pools import ROW

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .prefills import PrefillNode


Slots: TypeAlias = dict[int, set[int]]
"""What a Grant names, by component."""


def slots_in(message: Grant) -> Slots:
    return {part.component: set(slots_of(unpack_extents("extents", part.extents)).tolist()) for part in message.parts}


@dataclass(slots=True, eq=False)
class _Mapped:
    """A session as its writer should keep it."""

    peer: str
    window: int
    grants: dict[int, Grant] = field(default_factory=dict[int, Grant])  # taken, and their ends not acknowledged
    slots: dict[int, Slots] = field(default_factory=dict[int, "Slots"])  # of these
    rooms: dict[int, Grant] = field(default_factory=dict[int, Grant])  # the grant that each was written for last
    ended: set[int] = field(default_factory=set[int])
    acknowledged: set[int] = field(default_factory=set[int])
    highest: int = 0  # number that was taken

    def acknowledge(self, number: int) -> None:
        if number in self.ended:
            self.grants.pop(number, None)
            self.slots.pop(number, None)
            self.acknowledged.add(number)


class WriterPromises:
    """One life of a prefill rank, towards those who grant."""

    def __init__(self, node: PrefillNode) -> None:
        self._node = node
        self._sessions: dict[int, _Mapped] = {}
        self._lives: dict[str, int] = {}  # whose Hello was welcomed last
        self._windows: dict[str, int] = {}
        self._registered = ""  # who has sent the latest Register

    def received(self, peer: str, message: Message, effects: Sequence[fx.PrefillEffect]) -> None:
        """A message, and what the core makes of it."""
        answers = [effect.message for effect in effects if isinstance(effect, fx.Send) and effect.peer == peer]
        match message:
            case Hello(identity=theirs):
                if any(isinstance(answer, Welcome) for answer in answers):
                    self._lives[peer] = theirs.incarnation
                    self._windows[peer] = min(theirs.window, self._node.limits.window)
            case Register():
                self._registered = peer
            case Goodbye(incarnation=incarnation):
                if effects and incarnation != self._lives.get(peer):
                    self._node.fail(f"heeds a Goodbye of {peer} from another life")
            case Grant():
                self._granted(peer, message, answers)
            case Released(session=session, grant=number) if session in self._sessions:
                self._sessions[session].acknowledge(number)
            case _:
                pass

    def sent(self, message: Message) -> None:
        """An end of a grant frees its slots, and its number once that is acknowledged."""
        over = isinstance(message, Landed | Drained) or (isinstance(message, Failed) and message.quiescent)
        if over and (session := self._sessions.get(message.session)) is not None:
            session.ended.add(message.grant)

    def mapped(self, session: int) -> None:
        """A new session, after a Register."""
        peer = self._registered
        self._sessions[session] = _Mapped(peer, self._windows[peer])
        count, most = (
            sum(session.peer == peer for session in self._sessions.values()),
            self._node.limits.peer_sessions_max,
        )
        if count > most:
            self._node.fail(f"keeps {count} sessions of {peer}, {most} at most")

    def open_sessions(self, peer: str) -> list[int]:
        """Of this peer, in the order in which they were registered."""
        return [session.id for session in self._node.core.sessions.values() if session.peer == peer and session.open]

    def superseded(self, peer: str, message: Message, before: Sequence[int]) -> None:
        """A message on a session may end the sessions before it; never one that was registered after it."""
        if isinstance(message, Grant | Abort | Released) and message.session in before:
            self._node.world.seen["messages on an earlier session"] += message.session != before[-1]
            after = self.open_sessions(peer)
            lost = [each for each in before[before.index(message.session) + 1 :] if each not in after]
            if lost:
                self._node.fail(f"ends session {lost[0]:#x} for a message on {message.session:#x}, which is older")

    def unmapped(self, session: int) -> None:
        self._sessions.pop(session, None)

    def writes(self, order: fx.Write) -> None:
        """Only where the Grant says, for a room that is for this peer, and for one of its grants alone."""
        session = self._sessions[order.session]
        grant, allowed = session.grants.get(order.grant), self._node.rooms[order.room].peers
        what = f"writes room {order.room} for grant {order.grant} of {session.peer}"
        if grant is None or grant.room != order.room:
            self._node.fail(f"{what}, which is not of this room")
            return
        if not session.slots[order.grant][order.component].issuperset(order.target_slots.tolist()):
            self._node.fail(f"{what} beside its slots")
        if allowed is not None and session.peer not in allowed:
            self._node.fail(f"{what}, the room is for {allowed}")
        before = session.rooms.get(order.room, grant)
        session.rooms[order.room] = grant
        if before is not grant and (before.grant not in session.ended or before.stop > grant.prefix):
            self._node.fail(f"{what}, and for grant {before.grant} of the same session")

    def _granted(self, peer: str, message: Grant, answers: list[Message]) -> None:
        session, number = self._sessions.get(message.session), message.grant
        if session is None or session.peer != peer:
            return
        ended = any(isinstance(answer, Reject) and answer.session == message.session for answer in answers)
        if (first := session.grants.get(number)) is not None:
            if replace(message, time_left_ms=first.time_left_ms) != first and not ended:
                self._node.fail(f"goes on with {peer}, which repeats grant {number} as another")
            return
        if not any(isinstance(answer, Granted) and answer.grant == number for answer in answers):
            return
        session.highest = max(session.highest, number)
        if session.highest - len(session.acknowledged) > session.window:
            self._node.fail(f"takes grant {number} of {peer}, outside the window of {session.window}")
        slots = slots_in(message)
        for other in session.slots.keys() - session.ended:
            taken = session.slots[other]
            if any(slots.get(component, set()) & theirs for component, theirs in taken.items()):
                self._node.fail(f"takes grant {number} of {peer}, which overlaps grant {other}")
        session.grants[number], session.slots[number] = message, slots


class OwnerPromises:
    """One life of a decode rank, towards those who write its arena."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._welcomes: dict[str, tuple[Welcome, float]] = {}  # the latest, and when
        self._current: dict[str, int] = {}  # the session that may be granted on, also once its peer is silent
        self._lives: dict[str, int] = {}  # whose session that is
        self._windows: dict[int, int] = {}  # by session
        self._held: dict[int, str] = {}  # sessions that are not over, and whose they are
        self._opened: dict[str, float] = {}
        self._asked: set[str] = set()  # peers that keep no session, and report that

    def received(self, peer: str, message: Message, effects: Sequence[fx.DecodeEffect]) -> None:
        """A message, and what the core makes of it."""
        match message:
            case Welcome():
                self._welcomes[peer] = message, self._node.clock
            case Goodbye(incarnation=incarnation) if peer in self._current and incarnation != self._lives[peer]:
                if any(isinstance(effect, fx.SessionLost) for effect in effects):
                    self._node.fail(f"heeds a Goodbye of {peer} from another life")
            case Registered(session=session, bytes_ready=count) if count > len(self._node.memory) * ROW:
                answers = [effect.message for effect in effects if isinstance(effect, fx.Send) and effect.peer == peer]
                if not any(isinstance(answer, Reject) and answer.session == session for answer in answers):
                    self._node.fail(
                        f"goes on with {peer}, which has {count} bytes ready of {len(self._node.memory) * ROW}"
                    )
            case Reject(session=0, reason=reason) if reason in HELLO_WANTED:
                since = self._node.clock - self._opened.get(peer, -math.inf)
                if peer not in self._current or since >= self._node.limits.resend_ms / 1e3:
                    self._asked.add(peer)
            case _:
                pass

    def offered(self, peer: str, session: int) -> None:
        """A new session, after a Welcome."""
        (welcome, at), limits = self._welcomes[peer], self._node.limits
        self._current[peer], self._lives[peer], self._opened[peer] = session, welcome.identity.incarnation, at
        self._windows[session] = min(welcome.identity.window, limits.window)
        self._held[session] = peer
        self._asked.discard(peer)
        count = sum(each == peer for each in self._held.values())
        if count > limits.peer_sessions_max:
            self._node.fail(f"keeps {count} sessions of {peer}, {limits.peer_sessions_max} at most")

    def forgotten(self, session: int) -> None:
        self._held.pop(session)
        self._leave(session)

    def sent(self, peer: str, message: Message) -> None:
        """Who has a session and has not asked for it lately is not greeted: that would end it."""
        match message:
            case Reject(session=session):
                self._leave(session)
            case Hello() if peer in self._current and peer not in self._asked:
                self._node.fail(f"greets {peer}, with which it has a session")
            case Grant(session=session):
                leases = self._node.core.prefill_peers.sessions[session].leases
                if len(leases) > self._windows[session]:
                    self._node.fail(f"grants {peer} {message.grant}, outside the window of {self._windows[session]}")
            case _:
                pass

    def _leave(self, session: int) -> None:
        self._current = {peer: current for peer, current in self._current.items() if current != session}

"""Prefill's peers and its sessions with them: who has said Hello, whose arena may be written, what of it is mapped.

A session that is closed takes no message any more. It is over when its last write is, and its mapping goes then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ...errors import Cause, LayoutMismatchError, RemoteProtocolError
from ...layout.layout import Component
from ...limits import FIELDS_MAX, LIVES_MAX, TEXT_LENGTH_MAX, Limits
from ...wire import (
    VERSION,
    Abort,
    Goodbye,
    Grant,
    Hello,
    Identity,
    Message,
    Ping,
    Pong,
    Reach,
    Register,
    Registered,
    Reject,
    Released,
    Welcome,
    negotiate,
)
from ..component_variants import repeated
from ..effects import Map, PrefillEffect, Send, Unmap
from ..liveness import Lives
from ..sharing import pair_share
from ..states import step
from ..timers import Timers
from .writer_grants import WRITER, WriterEvent, WriterSession, WriterState

TimerKey: TypeAlias = tuple[str, str | int, int]
"""What is due: alive of a peer, grant (that waits) and end of a session's grant, room."""


@dataclass(slots=True, eq=False)
class DecodePeer:
    """One decode node that has said Hello."""

    name: str
    incarnation: int
    window: int
    heard: float
    lives: Lives
    ended: deque[int] = field(default_factory=lambda: deque[int](maxlen=LIVES_MAX))  # the latest sessions of it


class Writers:
    """Peers and sessions of one prefill rank. Effects go to `out`; `told` and `closed` tell the rooms' owner."""

    def __init__(
        self,
        identity: Identity,
        components: Mapping[str, Component],
        limits: Limits,
        timers: Timers[TimerKey],
        out: Callable[[PrefillEffect], None],
        *,
        told: Callable[[WriterSession, Grant | Abort | Released, float], None],
        closed: Callable[[WriterSession, Cause, str, float], None],
    ) -> None:
        self.identity, self._components, self._limits = identity, components, limits
        self._timers, self._out, self._told, self._closed = timers, out, told, closed
        self.peers: dict[str, DecodePeer] = {}
        self.sessions: dict[int, WriterSession] = {}  # closed ones too, until they are over

    def receive(self, name: str, message: Message, now: float) -> None:
        """One message of a decode node; RemoteProtocolError where it is a breach."""
        if isinstance(message, Hello):
            self._hello(name, message, now)
            return
        peer = self.peers.get(name)
        if peer is None:
            if not isinstance(message, Reject | Goodbye):
                self._out(Send(name, Reject(0, "hello_required", ())))
            return
        peer.heard = now
        match message:
            case Ping():
                self._out(Send(name, Pong(self.identity.incarnation)))
            case Register():
                self._register(peer, message, now)
            case Goodbye():
                if message.incarnation == peer.incarnation:
                    self._depart(peer, Cause.PEER_LOST, f"{name} says goodbye: {message.reason}", now)
            case Grant() | Abort() | Released() | Reject():
                session = self._of(name, message.session)
                if isinstance(message, Reject):
                    if session is not None:
                        self.close(session, Cause.PEER_LOST, f"{name} ended the session: {message.reason}", now)
                elif session is not None:
                    self._hear(session, message, now)
                else:
                    self._out(Send(name, Reject(message.session, "unknown_session", ())))
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is nothing that decode sends to a prefill")

    def breach(self, name: str, session_id: int, text: str, now: float) -> None:
        """The peer broke the protocol: it is told how, and the session that it was about ends, if it is its own."""
        session = self.sessions.get(session_id)
        if session is not None and session.peer == name and session.open:
            self.expel(session, Cause.BREACH, text, now)
        else:
            self._reject(name, session_id, Cause.BREACH, text)

    def mapped(self, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> None:
        """Map was answered, or more has become ready since: so many of the arena's first bytes."""
        session = self.sessions.get(session_id)
        if session is None:
            self._out(Unmap(session_id))
        elif session.state is WriterState.ABANDONED:
            self._end(session)
        elif session.open:
            session.state = step(WRITER, session.state, WriterEvent.MAP)
            session.ready(bytes_ready, hbm_direct=hbm_direct)
            self._out(Send(session.peer, Registered(session_id, bytes_ready, hbm_direct)))

    def unmappable(self, session_id: int, text: str, now: float) -> None:
        """Map was answered: it cannot be done."""
        session = self.sessions.get(session_id)
        if session is not None and session.open:
            self.expel(session, Cause.TRANSFER, text, now)
        if session is not None and session.state is WriterState.ABANDONED:
            self._end(session)

    def expel(self, session: WriterSession, cause: Cause, text: str, now: float) -> None:
        """Ends a session of our own accord, and says so: its decode node need not wait for anything on it."""
        self._reject(session.peer, session.id, cause, text)
        self.close(session, cause, text, now)

    def close(self, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        """Takes no more of this session, which must be open; its grants end."""
        session.state = step(WRITER, session.state, WriterEvent.CLOSE)
        peer = self.peers.get(session.peer)
        if peer is not None:
            peer.ended.append(session.id)
        self._closed(session, cause, detail, now)
        self.settle(session)

    def settle(self, session: WriterSession) -> None:
        """Lets the mapping of a closed session go, unless a write is in flight."""
        if session.state is WriterState.CLOSING and not session.writes:
            self._end(session)

    def tick(self, key: TimerKey, now: float) -> bool:
        """Acts on a key of its own that is due, silence; False for others' keys."""
        match key:
            case ("alive", str(name), _):
                peer = self.peers[name]
                # One sum for both: (now - heard) rounds otherwise, and what is not yet silent is due for ever.
                silent_at = peer.heard + self._limits.session_silence_ms / 1e3
                if now >= silent_at:
                    text = f"{name} has been silent for {(now - peer.heard) * 1e3:.0f} ms"
                    self._depart(peer, Cause.PEER_LOST, text, now)
                else:
                    self._look_at(name, silent_at, now)
            case _:
                return False
        return True

    def _look_at(self, name: str, silent_at: float, now: float) -> None:
        """Soon again, though it cannot be silent before `silent_at`: time in which nobody ran is told from silence only
        by a timer that should have fired meanwhile."""
        self._timers.set(("alive", name, 0), min(silent_at, now + self._limits.ping_ms / 1e3))

    def _of(self, name: str, session_id: int) -> WriterSession | None:
        session = self.sessions.get(session_id)
        if session is not None and session.peer != name:
            raise RemoteProtocolError("session", f"{session_id:#x} is not {name}'s")
        return session if session is not None and session.open else None

    def _open_of(self, name: str) -> list[WriterSession]:
        return [session for session in self.sessions.values() if session.peer == name and session.open]

    def _hello(self, name: str, message: Hello, now: float) -> None:
        theirs, ours, peer = message.identity, self.identity, self.peers.get(name)
        if peer is not None and peer.incarnation != theirs.incarnation:
            if peer.lives.late(theirs.incarnation, now):
                return
            peer.lives.end(peer.incarnation, now)
            peer.incarnation = theirs.incarnation
            for session in self._open_of(name):
                self.close(session, Cause.PEER_RESTARTED, f"{name} is a new process", now)
        version = negotiate(ours=(VERSION, VERSION), theirs=(message.version_min, message.version_max))
        differences = [
            f"{field}: {theirs.node} has {there!r}, {ours.node} {here!r}"
            for field, there, here in (
                ("role", theirs.role, "decode"),
                ("model", theirs.model, ours.model),
                ("weights", theirs.weights.hex(), ours.weights.hex()),
            )
            if there != here
        ]
        if differences:
            self._reject(name, 0, Cause.REFUSED, *differences)
            return
        if peer is None:
            if len(self.peers) >= self._limits.sessions_max:
                self._reject(name, 0, Cause.FULL, f"peers: {len(self.peers)} of {self._limits.sessions_max}")
                return
            lives = Lives(self._limits.silence_ms)
            peer = self.peers[name] = DecodePeer(name, theirs.incarnation, theirs.window, now, lives)
            self._look_at(name, now + self._limits.session_silence_ms / 1e3, now)
        peer.heard, peer.window = now, min(theirs.window, self._limits.window)
        self._out(Send(name, Welcome(version, ours)))

    def _register(self, peer: DecodePeer, message: Register, now: float) -> None:
        known = self.sessions.get(message.session)
        if message.session == 0 or (known is not None and known.peer != peer.name):
            raise RemoteProtocolError("Register.session", f"{message.session:#x} is no session of {peer.name}'s")
        if message.session in peer.ended or (known is not None and not known.open):
            self._out(Send(peer.name, Reject(message.session, "unknown_session", ())))  # It comes late.
        elif known is not None:
            _check_same(known, message)
            if known.state is WriterState.UP:
                self._out(Send(peer.name, Registered(known.id, known.bytes_ready, known.hbm_direct)))
        else:
            self._open(peer, message, now)

    def _open(self, peer: DecodePeer, message: Register, now: float) -> None:
        differences = self._differences(message)
        if differences:
            self._reject(peer.name, message.session, Cause.REFUSED, *differences[:FIELDS_MAX])
            return
        if self._full(peer.name):
            for other in self._open_of(peer.name):
                self.close(other, Cause.PEER_RESTARTED, f"{peer.name} opened another session", now)
        if full := self._full(peer.name):
            self._reject(peer.name, message.session, Cause.FULL, full)
            return
        session = WriterSession(message.session, peer.name, message.components, message.reach, peer.window)
        self.sessions[session.id] = session
        if session.components:
            self._out(Map(session.id, message.reach, message.components))
        else:  # It maps nothing, so nothing tells a dead process's late one apart: that may cost rooms, no bytes.
            self._supersede(session, now)
            self.mapped(session.id, message.reach.arena_bytes)

    def _full(self, name: str) -> str:
        """Why this peer can have no other session now, if so."""
        of_peer = sum(session.peer == name for session in self.sessions.values())
        for limit, count in (("peer_sessions_max", of_peer), ("sessions_max", len(self.sessions))):
            if count >= (most := getattr(self._limits, limit)):
                return f"sessions: {count} not over, {limit} is {most}"
        return ""

    def _hear(self, session: WriterSession, message: Grant | Abort | Released, now: float) -> None:
        if not session.spoken_on:
            session.spoken_on = True
            self._supersede(session, now)
        self._told(session, message, now)

    def _supersede(self, session: WriterSession, now: float) -> None:
        """Its owner has another session no more. Register alone does not say so: it may come late from a process that
        is dead, whose arena nobody can map, and whose next one has a session already."""
        for other in self._open_of(session.peer):
            if other is session:
                break
            self.close(other, Cause.PEER_RESTARTED, f"{session.peer} opened another session", now)

    def _differences(self, message: Register) -> list[str]:
        """What is registered and is not what this prefill holds, a line for each field, with both values.

        RemoteProtocolError where it is wrong whatever this prefill holds.
        """
        if name := repeated(message.components):
            raise RemoteProtocolError("Register.components", f"{name!r} twice in one memory")
        lines: list[str] = []
        for index, theirs in enumerate(message.components):
            where = f"Register.components[{index}]"
            try:
                theirs.layout.check_within(message.reach.arena_bytes, "Register.reach.arena_bytes")
                if theirs.memory == "hbm" and message.reach.hbm_handle:
                    _check_hbm(theirs, message.reach)
            except ValueError as error:
                raise RemoteProtocolError(f"{where}.layout", str(error)) from None
            ours = self._components.get(theirs.name)
            if ours is None:
                lines.append(f"{where}.name: {theirs.name!r}, this prefill has {sorted(self._components)}")
                continue
            lines += [
                f"{where}.{name}: decode has {getattr(theirs, name)}, prefill {getattr(ours, name)}"
                for name in ("tokens_per_row", "span")
                if getattr(theirs, name) != getattr(ours, name)
            ]
            try:
                pair_share(ours.layout, theirs.layout)
            except LayoutMismatchError as error:
                lines += [f"{where}.layout: {line}" for line in error.differences]
        return lines

    def _depart(self, peer: DecodePeer, cause: Cause, detail: str, now: float) -> None:
        del self.peers[peer.name]
        self._timers.clear(("alive", peer.name, 0))
        for session in self._open_of(peer.name):
            self.close(session, cause, detail, now)

    def _end(self, session: WriterSession) -> None:
        session.state = step(WRITER, session.state, WriterEvent.QUIET)
        del self.sessions[session.id]
        if session.components:
            self._out(Unmap(session.id))

    def _reject(self, name: str, session_id: int, cause: Cause, *lines: str) -> None:
        self._out(Send(name, Reject(session_id, cause.value, tuple(line[:TEXT_LENGTH_MAX] for line in lines))))


def _check_hbm(component: Component, reach: Reach) -> None:
    """ValueError where rows of an HBM component would leave the memory that `reach` names."""
    first = int(component.layout.table[:, 3].min())
    if first < reach.hbm_base:
        raise ValueError(f"Register.reach.hbm_base: a plane begins at byte {first}, HBM at {reach.hbm_base}")
    component.layout.check_within(reach.hbm_base + reach.hbm_bytes, "Register.reach.hbm_bytes")


def _check_same(session: WriterSession, message: Register) -> None:
    """RemoteProtocolError where a Register of the same session says something else than the first one did."""
    for name in ("transport", "host", "address", "base", "arena_bytes", "hbm_base", "hbm_bytes"):
        was, now = getattr(session.reach, name), getattr(message.reach, name)
        if was != now:
            raise RemoteProtocolError(f"Register.reach.{name}", f"{now!r}, the session began with {was!r}")
    for name in ("token", "hbm_handle"):
        if getattr(message.reach, name) != getattr(session.reach, name):
            raise RemoteProtocolError(f"Register.reach.{name}", "another one than the session began with")
    if message.components != session.components:
        text = f"{len(message.components)} that are not the {len(session.components)} which the session began with"
        raise RemoteProtocolError("Register.components", text)

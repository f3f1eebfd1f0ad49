"""Prefill's peers and its sessions with them: who sent Hello, and how much of each arena is mapped.

A closed session takes no more messages. It is over when its last write has ended, and its mapping is released then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ...errors import Cause, LayoutMismatchError, RemoteProtocolError
from ...layout.layout import Component
from ...limits import EARLIER_INCARNATIONS_MAX, Limits
from ...wire import (
    Abort,
    Goodbye,
    Grant,
    Hello,
    Identity,
    Member,
    Message,
    Ping,
    Pong,
    Reach,
    Register,
    Registered,
    Reject,
    Released,
)
from ..component_variants import repeated
from ..effects import Map, PrefillEffect, Send, Unmap
from ..identity_check import differences
from ..liveness import Liveness, PeerProcess
from ..peers import Peers, full
from ..sharing import pair_share
from ..staged_register import landing_of
from ..states import WRITER, WriterEvent, WriterState
from ..tables import step
from ..timers import TimerKey, Timers
from .records import WriterSession, check_repeated


@dataclass(slots=True, eq=False)
class DecodePeer:
    """One decode node that sent Hello."""

    name: str
    liveness: Liveness
    window: int = 0
    group_size: int = 1  # ranks of its group, each of which grants
    ended: deque[int] = field(default_factory=lambda: deque[int](maxlen=EARLIER_INCARNATIONS_MAX))  # latest sessions

    @property
    def incarnation(self) -> int:
        """Of the process that sent the latest Hello."""
        assert self.liveness.incarnation is not None
        return self.liveness.incarnation


class DecodePeers:
    """Peers and sessions of one prefill rank. Effects go to `out`; the callbacks report to the owner of the rooms."""

    def __init__(
        self, identity: Identity, components: Mapping[str, Component], limits: Limits, timers: Timers[TimerKey],
        out: Callable[[PrefillEffect], None], *,
        closed: Callable[[WriterSession, Cause, str, float], None], withdraw: Callable[[int, str, str, float], None],
        group_is_known: bool,
    ) -> None:  # fmt: skip
        self._components, self._limits = components, limits
        self._out, self._closed, self._withdraw = out, closed, withdraw
        self._group_is_known = group_is_known
        self._table: Peers[DecodePeer] = Peers(
            identity, limits, timers, out, look=self._look, peers_max=limits.sessions_max, refused=out
        )
        self.peers = self._table.by_name
        self.gone, self.tick = self._table.gone, self._table.tick
        self.sessions: dict[int, WriterSession] = {}  # closed ones too, until they are over

    def set_group(self, members: tuple[Member, ...]) -> None:
        """Names the group in each Welcome from now on."""
        self._table.identity, self._group_is_known = msgspec.structs.replace(self._table.identity, group=members), True

    def receive(self, name: str, message: Message, now: float) -> None:
        """Takes one message of a decode node that is about no grant. Raises RemoteProtocolError for a breach."""
        if isinstance(message, Hello):
            self._hello(name, message, now)
            return
        if (peer := self._seen(name, message, now)) is None:
            return
        match message:
            case Ping():
                self._out(Send(name, Pong(self._table.identity.incarnation)))
            case Register():
                self._register(peer, message, now)
            case Goodbye():
                if peer.liveness.receive(message, now) is PeerProcess.LEFT:
                    self._depart(peer, Cause.PEER_LOST, f"{name} said goodbye: {message.reason}", now)
            case Reject():
                if (session := self._of(name, message.session)) is not None:
                    self.close(session, Cause.PEER_LOST, f"{name} ended the session: {message.reason}", now)
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is not a message from decode to prefill")

    def session_of(self, name: str, message: Grant | Abort | Released, now: float) -> WriterSession | None:
        """The open session that a message of a decode node is about, which is in use from now on; where there is none
        the node is informed. Raises RemoteProtocolError for a breach."""
        if self._seen(name, message, now) is None:
            return None
        session = self._of(name, message.session)
        if session is None:
            self._out(Send(name, Reject(message.session, "unknown_session", ())))
        elif not session.in_use:
            session.in_use = True
            self._supersede(session, now)
        return session

    def group_size(self, name: str) -> int:
        """The ranks of a peer's group; 1 for a peer that has left."""
        peer = self.peers.get(name)
        return 1 if peer is None else peer.group_size

    def breach(self, name: str, session_id: int, text: str, now: float) -> None:
        """The peer broke the protocol: ends its session if the message was about it, else sends Reject."""
        session = self.sessions.get(session_id)
        if session is not None and session.peer == name and session.open:
            self.expel(session, Cause.BREACH, text, now)
        else:
            self._table.reject(name, session_id, Cause.BREACH, text)

    def mapped(self, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> None:
        """Answers Map, or reports more later: the arena's first `bytes_ready` bytes are ready."""
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
        """Answers Map with a failure."""
        session = self.sessions.get(session_id)
        if session is not None and session.open:
            self.expel(session, Cause.TRANSFER, text, now)
        if session is not None and session.state is WriterState.ABANDONED:
            self._end(session)

    def expel(self, session: WriterSession, cause: Cause, text: str, now: float) -> None:
        """Ends a session on this side's initiative and sends Reject: decode need not wait for anything on it."""
        self._table.reject(session.peer, session.id, cause, text)
        self.close(session, cause, text, now)

    def close(self, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        """Closes an open session; its grants end."""
        session.state = step(WRITER, session.state, WriterEvent.CLOSE)
        peer = self.peers.get(session.peer)
        if peer is not None:
            peer.ended.append(session.id)
        self._closed(session, cause, detail, now)
        self.settle(session)

    def settle(self, session: WriterSession) -> None:
        """Releases the mapping of a closed session, unless a write is in flight."""
        if session.state is WriterState.CLOSING and not session.writes:
            self._end(session)

    def _look(self, peer: DecodePeer, now: float) -> None:
        if peer.liveness.silent(now):
            self._depart(peer, Cause.PEER_LOST, peer.liveness.why(peer.name, now), now)

    def _seen(self, name: str, message: Message, now: float) -> DecodePeer | None:
        """The peer, which lives. One that has sent no Hello is asked for it."""
        peer = self.peers.get(name)
        if peer is not None:
            peer.liveness.seen(now)
        elif not isinstance(message, Reject | Goodbye):
            self._out(Send(name, Reject(0, "hello_required", ())))
        return peer

    def _of(self, name: str, session_id: int) -> WriterSession | None:
        session = self.sessions.get(session_id)
        if session is not None and session.peer != name:
            raise RemoteProtocolError("session", f"{session_id:#x} is not a session of {name}")
        return session if session is not None and session.open else None

    def _open_of(self, name: str) -> list[WriterSession]:
        return [session for session in self.sessions.values() if session.peer == name and session.open]

    def _hello(self, name: str, message: Hello, now: float) -> None:
        if not self._group_is_known:
            return  # Hello repeats until it is.
        theirs = message.identity

        def new() -> DecodePeer:
            silence_ms = self._limits.session_silence_ms
            return DecodePeer(name, Liveness(self._limits, now, theirs.incarnation, silence_ms=silence_ms))

        misfits = differences(theirs, self._table.identity, role="decode")
        process = self._table.answer(name, message, now, misfits=misfits, new=new, replaced=self._replaced)
        if process is not PeerProcess.LATE and theirs.role == "decode":
            for room in message.withdrawn:  # also of a node that does not fit: nothing else reports that these are over
                self._withdraw(room.room, name, room.detail, now)
        if process not in (PeerProcess.LATE, PeerProcess.REFUSED):
            peer = self.peers[name]
            peer.window = min(theirs.window, self._limits.window)
            peer.group_size = theirs.ranks.tp_size * theirs.ranks.pp_size

    def _replaced(self, peer: DecodePeer, now: float) -> None:
        for session in self._open_of(peer.name):
            self.close(session, Cause.PEER_RESTARTED, f"{peer.name} is a new process", now)

    def _register(self, peer: DecodePeer, message: Register, now: float) -> None:
        session = self.sessions.get(message.session)
        if message.session == 0 or (session is not None and session.peer != peer.name):
            raise RemoteProtocolError("Register.session", f"{message.session:#x} is not a session of {peer.name}")
        if message.session in peer.ended or (session is not None and not session.open):
            self._out(Send(peer.name, Reject(message.session, "unknown_session", ())))  # The message is late.
        elif session is not None:
            check_repeated("Register", session.register, message, begun="the session")
            if session.state is WriterState.UP:
                self._out(Send(peer.name, Registered(session.id, session.bytes_ready, session.hbm_direct)))
        else:
            self._open(peer, message, now)

    def _open(self, peer: DecodePeer, message: Register, now: float) -> None:
        landing = landing_of(message)
        if lines := self._differences(message):
            self._table.refuse(peer.name, message.session, lines)
            return
        if full(self.sessions.values(), peer.name, self._limits):
            for other in self._open_of(peer.name):
                self.close(other, Cause.PEER_RESTARTED, f"{peer.name} opened another session", now)
        if text := full(self.sessions.values(), peer.name, self._limits):
            self._table.reject(peer.name, message.session, Cause.FULL, text)
            return
        self._table.fits(peer.name)
        session = WriterSession(message.session, peer.name, message, landing, peer.window)
        self.sessions[session.id] = session
        if session.components:
            self._out(Map(session.id, message.reach, message.components, landing))
        else:  # Nothing is mapped: a late Register of a dead process goes undetected.
            self._supersede(session, now)
            self.mapped(session.id, message.reach.arena_bytes)

    def _supersede(self, session: WriterSession, now: float) -> None:
        """Closes earlier sessions of the same peer, which it does not use any more.

        Register alone is no proof: it may come late from a dead process whose arena cannot be mapped, after its
        successor's session.
        """
        for other in self._open_of(session.peer):
            if other is session:
                break
            self.close(other, Cause.PEER_RESTARTED, f"{session.peer} opened another session", now)

    def _differences(self, message: Register) -> list[str]:
        """Compares Register with what this prefill holds; returns a line with both values for each field that differs.

        Raises RemoteProtocolError where it is wrong whatever this prefill holds.
        """
        if name := repeated(message.components):
            raise RemoteProtocolError("Register.components", f"{name!r} is there twice in one memory")
        lines: list[str] = []
        for index, theirs in enumerate(message.components):
            where = f"Register.components[{index}]"
            try:
                if theirs.memory == "dram" or not message.staging:
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
        self._table.remove(peer)
        for session in self._open_of(peer.name):
            self.close(session, cause, detail, now)

    def _end(self, session: WriterSession) -> None:
        session.state = step(WRITER, session.state, WriterEvent.QUIET)
        del self.sessions[session.id]
        self._out(Unmap(session.id))


def _check_hbm(component: Component, reach: Reach) -> None:
    """Raises ValueError where rows of an HBM component leave the memory that `reach` names."""
    first = int(component.layout.table[:, 3].min())
    if first < reach.hbm_base:
        raise ValueError(f"Register.reach.hbm_base: a plane begins at byte {first}, HBM at {reach.hbm_base}")
    component.layout.check_within(reach.hbm_base + reach.hbm_bytes, "Register.reach.hbm_bytes")

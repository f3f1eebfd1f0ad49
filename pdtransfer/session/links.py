"""Decode's peers and its sessions with them: who was dialled, who answers, which session may be granted on.

A peer is dialled once and kept: Hello repeats until Welcome, a session is minted, Register repeats until the arena is
mapped there. A peer that falls silent keeps its session, quarantined; it comes back by answering, or by its fence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..arena import Holding
from ..effects import DecodeEffect, Fence, Forget, Offer, PeerRefused, Send
from ..errors import Cause, RemoteProtocolError
from ..layout import Component
from ..lease import Lease
from ..limits import Limits
from ..states import step
from ..timers import Timers
from ..wire import VERSION, Grant, Hello, Identity, Ping, Reach, Register, Registered, Reject, Welcome


class SessionState(Enum):
    """A session on the decode side; only UP may be granted on."""

    OFFERING = "offering"  # the shell prepares the hand-over
    REGISTERING = "registering"
    UP = "up"
    SILENT = "silent"  # unheard of for silence_ms: nothing is granted, its leases are quarantined
    FENCING = "fencing"  # condemned: waits for the proof that its writer is quiet
    CLOSED = "closed"


class SessionEvent(Enum):
    """What happens to a session."""

    OFFER = "offer"
    REGISTER = "register"
    SILENCE = "silence"
    HEAR = "hear"
    CONDEMN = "condemn"
    FENCE = "fence"


_S, _SE = SessionState, SessionEvent

SESSION: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.OFFERING, _SE.OFFER): _S.REGISTERING,
    (_S.OFFERING, _SE.CONDEMN): _S.FENCING,
    (_S.REGISTERING, _SE.REGISTER): _S.UP,
    (_S.REGISTERING, _SE.CONDEMN): _S.FENCING,
    (_S.UP, _SE.SILENCE): _S.SILENT,
    (_S.UP, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.HEAR): _S.UP,
    (_S.SILENT, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.FENCE): _S.CLOSED,
    (_S.FENCING, _SE.FENCE): _S.CLOSED,
}


TimerKey: TypeAlias = tuple[str, str | int, int]
"""What is due: hello and alive of a peer, register and fence of a session, lease of a session's grant, room."""


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """One grant as decode keeps it until a proof ends it; `room` is a label for people, the room finds its leases."""

    session: Session
    message: Grant
    holding: Holding
    kv_bytes: int
    deadline: float
    state: Lease = Lease.GRANTED
    granted: bool = False
    repeat_ms: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One prefill rank's right to write. `leases` holds the unended grants, oldest first."""

    id: int
    peer: str
    components: tuple[Component, ...]  # what this rank may write
    window: int
    state: SessionState = SessionState.OFFERING
    reach: Reach | None = None
    next_grant: int = 1
    reserved: int = 0  # places in the window that queued rooms will take
    leases: dict[int, LeaseEntry] = field(default_factory=dict[int, LeaseEntry])
    repeat_ms: int = 0
    fence_ms: int = 0
    verdict: Cause = Cause.PEER_LOST  # why it was condemned

    @property
    def has_place(self) -> bool:
        """Whether one more grant would lie inside the window."""
        oldest = next(iter(self.leases), self.next_grant)
        return self.next_grant + self.reserved - oldest < self.window


@dataclass(slots=True, eq=False)
class Peer:
    """One dialled prefill rank."""

    name: str
    heard: float
    identity: Identity | None = None
    refusal: str | None = None
    session: Session | None = None
    repeat_ms: int = 0
    quarantined_bytes: int = 0

    @property
    def up(self) -> Session | None:
        """The session that may be granted on, if there is one."""
        return self.session if self.session is not None and self.session.state is SessionState.UP else None


class Links:
    """Peers and sessions of one decode node. Effects go to `out`; `up`, `lost` and `quiet` tell the rooms' owner."""

    def __init__(
        self,
        identity: Identity,
        components: tuple[Component, ...],
        limits: Limits,
        mint: Callable[[], int],
        out: Callable[[DecodeEffect], None],
        *,
        enable_hisparse: bool,
        up: Callable[[Peer, float], None],
        lost: Callable[[Session, Cause, str, float], None],
        unreachable: Callable[[Peer, Cause, str, float], None],
        quiet: Callable[[Session, float], None],
    ) -> None:
        self.identity, self._components, self._limits, self._mint, self._out = identity, components, limits, mint, out
        self._enable_hisparse = enable_hisparse
        self._up, self._lost, self._unreachable, self._quiet = up, lost, unreachable, quiet
        self.peers: dict[str, Peer] = {}
        self.sessions: dict[int, Session] = {}  # condemned ones too, until they are proven quiet
        self.timers: Timers[TimerKey] = Timers()

    def dial(self, name: str, now: float) -> Peer:
        """The peer of that name; says Hello the first time."""
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer(name, heard=now)
            self._hello(peer, now)
            self.timers.set(("alive", name, 0), now + self._limits.ping_ms / 1e3)
        return peer

    def of(self, name: str, session_id: int) -> Session | None:
        """The session, if it is this peer's; a session of somebody else's is a breach."""
        session = self.sessions.get(session_id)
        if session is not None and session.peer != name:
            raise RemoteProtocolError("session", f"{session_id:#x} is not {name}'s")
        return session

    def heard(self, session: Session, now: float) -> None:
        """The peer spoke on this session, so it is the process that we know."""
        peer = self.peers[session.peer]
        peer.heard = now
        if session.state is SessionState.SILENT:
            session.state = step(SESSION, session.state, SessionEvent.HEAR)
            session.fence_ms = 0
            self._up(peer, now)

    def welcome(self, name: str, message: Welcome, now: float) -> None:
        """Hello was answered: checks whom we found, and opens a session if there is none."""
        peer = self.peers[name]
        theirs, ours = message.identity, self.identity
        differences = [
            f"{field}: {name} has {there!r}, this node {here!r}"
            for field, there, here in (
                ("version", message.version, VERSION),
                ("role", theirs.role, "prefill"),
                ("model", theirs.model, ours.model),
                ("weights", theirs.weights.hex(), ours.weights.hex()),
            )
            if there != here
        ]
        if differences:
            self._refuse(peer, "; ".join(differences), now)
            return
        peer.heard, peer.refusal, peer.repeat_ms = now, None, 0
        self.timers.clear(("hello", name, 0))
        known = peer.identity
        peer.identity = theirs
        if peer.session is not None and known is not None and known.incarnation != theirs.incarnation:
            self.condemn(peer.session, Cause.PEER_RESTARTED, f"{name} is a new process", now)
        if peer.session is not None:
            self.heard(peer.session, now)
        elif len(self.sessions) < self._limits.sessions_max:
            session = Session(self._mint(), name, self._components, min(theirs.window, self._limits.window))
            self.sessions[session.id] = peer_session = session
            peer.session = peer_session
            self._out(Offer(name, session.id))

    def offered(self, session_id: int, reach: Reach, now: float) -> None:
        """The hand-over is prepared: registers."""
        session = self.sessions.get(session_id)
        if session is not None and session.state is SessionState.OFFERING:
            session.state = step(SESSION, session.state, SessionEvent.OFFER)
            session.reach = reach
            self._register(session, now)

    def registered(self, session: Session, message: Registered, now: float) -> None:
        """The writer says how much of the arena it has ready."""
        assert session.reach is not None
        if message.bytes_ready > session.reach.arena_bytes:
            text = f"{message.bytes_ready}, the arena has {session.reach.arena_bytes}"
            raise RemoteProtocolError("Registered.bytes_ready", text)
        if session.state is SessionState.REGISTERING and message.bytes_ready == session.reach.arena_bytes:
            session.state = step(SESSION, session.state, SessionEvent.REGISTER)
            self.timers.clear(("register", session.id, 0))
            self._up(self.peers[session.peer], now)

    def pong(self, name: str, incarnation: int, now: float) -> None:
        """The peer lives; under another incarnation it is another process, which has to be greeted anew."""
        peer = self.peers[name]
        if peer.identity is None or peer.identity.incarnation == incarnation:
            peer.heard = now
            if peer.session is not None:
                self.heard(peer.session, now)
            return
        if peer.session is not None:
            self.condemn(peer.session, Cause.PEER_RESTARTED, f"{name} is a new process", now)
        self._hello(peer, now)

    def rejected(self, name: str, message: Reject, now: float) -> None:
        """The peer refuses our Hello, or a session."""
        peer = self.peers[name]
        text = f"{name} refuses ({message.reason}): " + "; ".join(message.fields)
        if message.session == 0:
            if peer.identity is None:
                self._refuse(peer, text, now)
            else:
                self._hello(peer, now)  # a process that does not know us: its Welcome will say which
            return
        session = self.of(name, message.session)
        if session is None or session.state is SessionState.FENCING:
            return
        if session.state in (SessionState.OFFERING, SessionState.REGISTERING):
            self.condemn(session, Cause.REFUSED, text, now)
            self._refuse(peer, text, now)
        else:
            self.condemn(session, Cause.PEER_LOST, text, now)
            self._hello(peer, now)

    def condemn(self, session: Session, cause: Cause, detail: str, now: float) -> None:
        """Nothing more is granted on this session, and every lease on it waits for a proof or the fence."""
        if session.state in (SessionState.FENCING, SessionState.CLOSED):
            return
        session.state = step(SESSION, session.state, SessionEvent.CONDEMN)
        peer = self.peers[session.peer]
        if peer.session is session:
            peer.session = None
        self.timers.clear(("register", session.id, 0))
        session.verdict, session.fence_ms = cause, 0
        self._lost(session, cause, detail, now)
        self._fence(session, now)

    def fenced(self, session_id: int, now: float) -> None:
        """The writer is proven quiet, for ever: its session is over."""
        session = self.sessions.get(session_id)
        if session is None or session.state not in (SessionState.SILENT, SessionState.FENCING):
            return
        session.state = step(SESSION, session.state, SessionEvent.FENCE)
        del self.sessions[session_id]
        self.timers.clear(("fence", session_id, 0))
        self._quiet(session, now)
        self._out(Forget(session_id))
        peer = self.peers[session.peer]
        if peer.session is session:
            peer.session = None
        if peer.session is None:
            self._hello(peer, now)

    def tick(self, key: TimerKey, now: float) -> bool:
        """Acts on a key of its own that is due: repeats what is unanswered, looks for silence; False for others' keys."""
        match key:
            case ("hello", str(name), _):
                self._hello(self.peers[name], now)
            case ("alive", str(name), _):
                self._alive(self.peers[name], now)
            case ("register", int(session_id), _):
                self._register(self.sessions[session_id], now)
            case ("fence", int(session_id), _):
                self._fence(self.sessions[session_id], now)
            case _:
                return False
        return True

    def repeat_ms(self, last_ms: int) -> int:
        """The next interval of a repetition: doubled, within the limits."""
        return min(max(2 * last_ms, self._limits.resend_ms), self._limits.resend_ms_max)

    def _hello(self, peer: Peer, now: float) -> None:
        peer.repeat_ms = self.repeat_ms(peer.repeat_ms)
        self.timers.set(("hello", peer.name, 0), now + peer.repeat_ms / 1e3)
        self._out(Send(peer.name, Hello(VERSION, VERSION, self.identity)))

    def _refuse(self, peer: Peer, text: str, now: float) -> None:
        peer.heard, peer.identity = now, None
        if peer.refusal != text:
            peer.refusal = text
            self._out(PeerRefused(peer.name, text))
        self._unreachable(peer, Cause.REFUSED, text, now)
        # It may be replaced by one that fits: ask again, at the slowest pace.
        peer.repeat_ms = self._limits.resend_ms_max
        self.timers.set(("hello", peer.name, 0), now + peer.repeat_ms / 1e3)

    def _register(self, session: Session, now: float) -> None:
        assert session.reach is not None
        session.repeat_ms = self.repeat_ms(session.repeat_ms)
        self.timers.set(("register", session.id, 0), now + session.repeat_ms / 1e3)
        register = Register(session.id, session.components, session.reach, self._enable_hisparse)
        self._out(Send(session.peer, register))

    def _alive(self, peer: Peer, now: float) -> None:
        silent_ms = (now - peer.heard) * 1e3
        self.timers.set(("alive", peer.name, 0), now + self._limits.ping_ms / 1e3)
        if peer.identity is not None and silent_ms >= self._limits.ping_ms / 2:
            self._out(Send(peer.name, Ping(self.identity.incarnation)))
        if silent_ms < self._limits.silence_ms or peer.refusal is not None:
            return
        text = f"{peer.name} has been silent for {silent_ms:.0f} ms"
        session = peer.session
        if session is not None and session.state is SessionState.UP:
            session.state = step(SESSION, session.state, SessionEvent.SILENCE)
            self._lost(session, Cause.PEER_LOST, text, now)
            self._fence(session, now)
        elif session is not None and session.state is not SessionState.SILENT:
            self.condemn(session, Cause.PEER_LOST, text, now)
            self._hello(peer, now)
        self._unreachable(peer, Cause.PEER_LOST, text, now)

    def _fence(self, session: Session, now: float) -> None:
        if session.state not in (SessionState.SILENT, SessionState.FENCING):
            return
        session.fence_ms = min(max(2 * session.fence_ms, self._limits.fence_poll_ms), self._limits.fence_poll_ms_max)
        self.timers.set(("fence", session.id, 0), now + session.fence_ms / 1e3)
        if session.state is SessionState.FENCING:
            self._out(Send(session.peer, Reject(session.id, session.verdict.value, ())))
        self._out(Fence(session.id))

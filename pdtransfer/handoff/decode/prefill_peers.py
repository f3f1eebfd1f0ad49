"""Decode's peers and its sessions with them: which are dialled, which answer, which session may be granted on.

A peer is one process, however it is reached: it has the name of one endpoint. Where another endpoint answers as the
same process, that one is hung up, and its name stands for the peer until this is silent or another process.

A dialled peer is sent Hello until it answers with Welcome. Then a session is opened, and Register repeats until the
arena is mapped there. A slow peer is granted nothing new until it is seen again. A silent one keeps its session,
quarantined, until the peer is seen again or the session is fenced. A peer without a session is always being greeted: a
Hello is due, or was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from ...errors import Cause, RemoteProtocolError
from ...layout.layout import Component
from ...limits import Limits
from ...wire import VERSION, Goodbye, Identity, Ping, Pong, Reach, Register, Registered, Reject, Welcome, Withdrawn
from ..component_variants import StandIns, used_with
from ..effects import DecodeEffect, Fence, Forget, HangUp, Offer, Send
from ..identity_check import differences
from ..liveness import Liveness, PeerProcess
from ..peers import Peers, full
from ..sharing import share_of, wrong_fields
from ..staged_register import staging_of
from ..states import SESSION, SessionEvent, SessionState
from ..tables import step
from ..timers import TimerKey, Timers, backoff_ms
from .records import PeerRecord, SessionRecord

_OPENING = (SessionState.OFFERING, SessionState.REGISTERING)


class PrefillPeers:
    """Peers and sessions of one decode node. Effects go to `out`; the callbacks report to the owner of the rooms."""

    def __init__(
        self, identity: Identity, components: tuple[Component, ...], landing: tuple[Component, ...], limits: Limits,
        mint: Callable[[], int], out: Callable[[DecodeEffect], None], *, enable_hisparse: bool, stand_ins: StandIns,
        up: Callable[[PeerRecord], None], lost: Callable[[SessionRecord, Cause, str, float], None],
        unreachable: Callable[[PeerRecord, Cause, str, float], None], quiet: Callable[[SessionRecord], None],
        withdrawn: Callable[[str, float], tuple[Withdrawn, ...]], merged: Callable[[str, str, float], None],
        may_be_one: Callable[[str, str], bool], unusable_changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """`landing` are the components as writers see them that do not reach HBM. `merged` is called with an endpoint
        and the peer that it stands for from now on."""
        self.identity, self._components, self._limits, self._mint, self._out = identity, components, limits, mint, out
        self._landing, self._stand_ins = landing, stand_ins
        self._enable_hisparse = enable_hisparse
        self._up, self._lost, self._unreachable, self._quiet = up, lost, unreachable, quiet
        self._merged, self._may_be_one, self._unusable_changed = merged, may_be_one, unusable_changed
        self._spellings: dict[str, tuple[str, int | None]] = {}  # other endpoints: the peer, and which of its processes
        self.timers: Timers[TimerKey] = Timers()
        self._table: Peers[PeerRecord] = Peers(
            identity, limits, self.timers, out,
            look=self._look, peers_max=limits.sessions_max, refused=out, ping=self._ping,
            withdrawn=lambda peer, now: withdrawn(peer.name, now) if peer.refusal is not None else (),
        )  # fmt: skip
        self.peers, self.gone, self.greet_soon = self._table.by_name, self._table.gone, self._table.greet_soon
        self.sessions: dict[int, SessionRecord] = {}  # condemned ones too, until they are proven quiet

    def resolve(self, name: str, now: float) -> str:
        """The name of the peer that an endpoint leads to: the endpoint itself, unless it stands for another."""
        if name not in self._spellings:
            return name
        peer_name, incarnation = self._spellings[name]
        peer = self.peers.get(peer_name)
        if peer is None or peer.liveness.incarnation != incarnation or peer.liveness.silent(now):
            del self._spellings[name]  # it may lead elsewhere now
            return name
        return peer_name

    def dial(self, name: str, now: float) -> PeerRecord | None:
        """The peer of that name, greeted from now on; None where the limit of peers is reached."""
        peer = self.peers.get(name)
        if peer is None and not self._table.full:
            peer = PeerRecord(name, Liveness(self._limits, now))
            self._table.add(peer, now)
            self._table.greet(peer, now)
        return peer

    def redial(self, name: str, now: float) -> None:
        """As `dial`. A silent peer without a session is greeted at once and gets as much time as a new one."""
        peer = self.dial(name, now)
        if peer is not None and peer.session is None and peer.liveness.silent(now):
            peer.liveness.last_seen, peer.liveness.hello_ms = now, 0
            self._table.greet_soon(peer, now)

    def unfit(self, name: str, now: float, arena_bytes: int) -> tuple[Cause, str] | None:
        """Why no room may be expected from this peer now; None if one may. A peer may keep only a share of
        `arena_bytes` in quarantine."""
        peer, limits = self.peers.get(name), self._limits
        if peer is None:
            return Cause.FULL, self._table.full
        if peer.refusal is not None:
            return peer.refusal
        if peer.liveness.silent(now):
            return Cause.PEER_LOST, peer.liveness.why(name, now)
        if peer.quarantined_bytes > limits.quarantine_fraction_max * arena_bytes:
            return Cause.PEER_LOST, f"{name} keeps {peer.quarantined_bytes} bytes of the arena in quarantine"
        return None

    def unusable(self, now: float, trouble: Callable[[str], str]) -> list[tuple[str, str]]:
        """The peers that no room can be expected from, each with the reason. `trouble` returns why a peer cannot be
        reached, empty where it can be."""
        reasons = [(name, self._why_not(peer, now, trouble)) for name, peer in self.peers.items()]
        return [(name, why) for name, why in reasons if why]

    def _why_not(self, peer: PeerRecord, now: float, trouble: Callable[[str], str]) -> str:
        if peer.up is None and (why := self._table.refusal(peer.name)):
            return why
        return trouble(peer.name) if peer.session is None and peer.liveness.silent(now) else ""

    def group_of(self, name: str, now: float) -> tuple[str, ...] | None:
        """The ranks that this peer leads, by their names, itself first; None without a session with it."""
        peer = self.peers.get(name)
        if peer is None or peer.identity is None or peer.session is None:
            return None
        return name, *[self.resolve(member.endpoint, now) for member in peer.identity.group[1:]]

    def sources_of(self, leaders: Sequence[str], now: float) -> tuple[str, ...] | None:
        """The ranks of all these leaders' groups as they are dialled, each leader before the ranks that it leads; None
        while a leader has not named them."""
        groups = [self.group_of(leader, now) for leader in leaders]
        named = [group for group in groups if group is not None]
        return tuple(dict.fromkeys(chain.from_iterable(named))) if len(named) == len(groups) else None

    def undialled(self, name: str, cause: Cause, text: str, now: float) -> None:
        """The shell cannot dial the peer: its rooms fail, and a later room tries again."""
        peer = self.peers.get(name)
        if peer is not None:
            self._unreachable(peer, cause, text, now)
            if all(session.peer != name for session in self.sessions.values()):
                self._forget(peer)

    def session_of(self, name: str, session_id: int) -> SessionRecord | None:
        """The session, None if unknown. Raises RemoteProtocolError if it is another peer's. A peer that is greeted by
        two endpoints, and has answered at one, may send by either connection."""
        session = self.sessions.get(session_id)
        if (
            session is not None
            and session.peer != name
            and not self._is_one(self.peers[name], self.peers[session.peer])
        ):
            raise RemoteProtocolError("session", f"{session_id:#x} is not a session of {name}")
        return session

    def mark_seen(self, session: SessionRecord, now: float) -> None:
        """The peer sent a message on this session; one on an earlier session proves nothing about its process now."""
        peer = self.peers[session.peer]
        if peer.session is not session:
            return
        peer.liveness.seen(now)
        if session.state in (SessionState.SLOW, SessionState.SILENT):
            session.state = step(SESSION, session.state, SessionEvent.SEEN)
            session.fence_ms = 0
            self._up(peer)

    def receive(self, name: str, message: Welcome | Reject | Pong | Goodbye, now: float) -> None:
        """Takes a message about the peer itself or about a session."""
        match message:
            case Welcome():
                self.welcome(name, message, now)
            case Reject():
                self.rejected(name, message, now)
            case Pong():
                self.pong(name, message, now)
            case Goodbye():
                self.goodbye(name, message, now)

    def welcome(self, name: str, message: Welcome, now: float) -> None:
        """Answers Hello: checks the peer's identity, and opens a session if there is none."""
        peer = self.peers[name]
        process = self._table.welcome(peer, message, now)
        if process is PeerProcess.LATE:
            return
        theirs, ours = message.identity, self.identity
        lines = differences(theirs, ours, role="prefill")
        if message.version != VERSION:
            lines.append(f"version: {theirs.node} has {message.version}, {ours.node} {VERSION}")
        lines += [f"{field}: {theirs.node} has {text}" for field, text in wrong_fields(theirs, ours, self._components)]
        if lines:
            self._refuse(peer, Cause.REFUSED, f"{name} is refused: " + "; ".join(lines), now)
            return
        if process is PeerProcess.ANOTHER:
            self._replaced(peer, now)
        elif peer.session is not None and peer.session.state not in _OPENING:
            # It asked for Hello, so it keeps no session with this node.
            self.condemn(peer.session, Cause.PEER_LOST, f"{name} had forgotten this node", now)
        peer.liveness.seen(now)
        peer.refusal, peer.identity = None, theirs
        if self._is_known(peer, now):
            return
        if peer.session is None and full(self.sessions.values(), name, self._limits):
            self._unreachable(peer, Cause.FULL, f"{name} must wait until an ended session is fenced", now)
            return
        self._table.met(peer, now)
        if peer.session is not None:
            self.mark_seen(peer.session, now)
            return
        window = min(theirs.window, self._limits.window)
        names_held = {holding.component for holding in theirs.holds}
        usable = used_with(self._components, names_held, self._stand_ins)
        share = share_of(usable, theirs.holds, ours.ranks.tp_rank)
        names = [(component.name, component.memory) for component in self._components]
        indices = tuple(names.index((component.name, component.memory)) for component in share)
        landing = share
        if self._landing is not self._components and any(component.memory == "hbm" for component in share):
            usable = used_with(self._landing, names_held, self._stand_ins)
            landing = share_of(usable, theirs.holds, ours.ranks.tp_rank)
        peer.session = SessionRecord(self._mint(), name, share, landing, indices, window, theirs.frame_bytes_max)
        self.sessions[peer.session.id] = peer.session
        self._out(Offer(name, peer.session.id))

    def _is_known(self, peer: PeerRecord, now: float) -> bool:
        """True if another peer is this process, and lives: it stands for this endpoint from now on. This endpoint
        stands for one that is silent."""
        assert peer.liveness.incarnation is not None
        for other in list(self.peers.values()):
            current = other.identity is not None and other.identity.incarnation == peer.liveness.incarnation
            if other is peer or not current or not self._is_one(other, peer):
                continue
            if other.liveness.silent(now):
                self._merge(other, peer, now)
            elif not other.liveness.late(peer.liveness.incarnation, now):
                self._merge(peer, other, now)
                return True
        return False

    def _is_one(self, first: PeerRecord, second: PeerRecord) -> bool:
        return first.owner == second.owner != "" and self._may_be_one(first.name, second.name)

    def _merge(self, peer: PeerRecord, into: PeerRecord, now: float) -> None:
        if peer.session is not None:
            self.condemn(peer.session, Cause.PEER_LOST, f"{peer.name} and {into.name} are one process", now)
        for session in self.sessions.values():  # that await their fence
            if session.peer == peer.name:
                session.peer = into.name
        into.quarantined_bytes += peer.quarantined_bytes
        if len(self._spellings) >= self._limits.sessions_max:
            del self._spellings[next(iter(self._spellings))]
        self._spellings[peer.name] = into.name, into.liveness.incarnation
        self._forget(peer)
        self._merged(peer.name, into.name, now)
        self._up(into)

    def offered(self, session_id: int, reach: Reach, now: float) -> None:
        """The hand-over is prepared: registers the session."""
        session = self.sessions.get(session_id)
        if session is not None and session.state is SessionState.OFFERING:
            session.state = step(SESSION, session.state, SessionEvent.OFFER)
            session.reach = reach
            self._register(session, now)

    def unoffered(self, session_id: int, text: str, now: float) -> None:
        """There is no hand-over, or no longer: nothing writes through it, which the session's fence will prove."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.state is SessionState.OFFERING:
            self._refuse(self.peers[session.peer], Cause.TRANSFER, text, now)
        elif session.state is SessionState.FENCING:
            self._fence(session, now)  # ahead of its next poll
        else:
            self.condemn(session, Cause.TRANSFER, text, now)

    def registered(self, session: SessionRecord, message: Registered) -> None:
        """The writer reported how much of the arena it has ready."""
        if session.reach is None:
            raise RemoteProtocolError("Registered.session", f"{session.id:#x} has not been registered yet")
        if message.bytes_ready > session.reach.arena_bytes:
            text = f"{message.bytes_ready}, the arena has {session.reach.arena_bytes}"
            raise RemoteProtocolError("Registered.bytes_ready", text)
        if message.hbm_direct and not session.reach.hbm_handle:
            raise RemoteProtocolError("Registered.hbm_direct", "true, but Reach has no HBM handle")
        if session.bytes_ready and message.hbm_direct != session.hbm_direct:
            raise RemoteProtocolError(
                "Registered.hbm_direct", f"{message.hbm_direct}, but it was {session.hbm_direct} before"
            )
        session.hbm_direct = message.hbm_direct
        session.bytes_ready = max(session.bytes_ready, message.bytes_ready)
        if session.whole:
            self.timers.clear(("register", session.id, 0))  # until then Register repeats, since Registered may be lost
        if session.state is SessionState.REGISTERING and session.bytes_ready:
            session.state = step(SESSION, session.state, SessionEvent.REGISTER)
            self._table.fits(session.peer)
            self._up(self.peers[session.peer])
            self._unusable_changed()

    def pong(self, name: str, message: Pong, now: float) -> None:
        """The peer is alive; another incarnation is another process, which has to be greeted again."""
        peer = self.peers[name]
        match peer.liveness.receive(message, now):
            case PeerProcess.ANOTHER:
                self._replaced(peer, now)
            case PeerProcess.SAME if peer.session is not None:
                self.mark_seen(peer.session, now)
            case PeerProcess.SAME:
                peer.liveness.seen(now)
            case _:
                pass

    def _replaced(self, peer: PeerRecord, now: float) -> None:
        if peer.session is not None:
            self.condemn(peer.session, Cause.PEER_RESTARTED, f"{peer.name} is a new process", now)

    def goodbye(self, name: str, message: Goodbye, now: float) -> None:
        """The process leaves; a successor is greeted at the slowest pace."""
        peer = self.peers[name]
        if peer.liveness.receive(message, now) is PeerProcess.LEFT:
            text = f"{name} said goodbye: {message.reason}"
            peer.liveness.part(message.incarnation)
            self._table.greet_later(peer, now)
            if peer.session is not None:
                peer.session.parted = True
                self.condemn(peer.session, Cause.PEER_LOST, text, now)
            self._unreachable(peer, Cause.PEER_LOST, text, now)

    def rejected(self, name: str, message: Reject, now: float) -> None:
        """The peer refuses a Hello or a session, or asks for a Hello."""
        peer = self.peers[name]
        if self._table.asks_for_hello(peer, message, now, met=peer.session is not None):
            return
        text = f"{name} refuses ({message.reason}): " + "; ".join(message.fields)
        session = self.session_of(name, message.session)
        if session is not None:
            peer = self.peers[session.peer]
        refused = session is not None and session.state in _OPENING and message.reason != "unknown_session"
        if message.session == 0 or refused:
            # "refused": the two do not fit. All else is no verdict: other prefills may be tried, and this one again.
            verdicts = (Cause.TRANSFER.value, Cause.REFUSED.value)
            cause = Cause(message.reason) if message.reason in verdicts else Cause.PEER_LOST
            self._refuse(peer, cause, text, now)
        elif session is not None:
            self.condemn(session, Cause.PEER_LOST, text, now)

    def breach(self, name: str, session_id: int, text: str, now: float) -> None:
        """The peer broke the protocol: ends its session if the message was about it, else sends Reject."""
        peer, session = self.peers[name], self.sessions.get(session_id)
        if session is not None and session is peer.session:
            self._table.greet_later(peer, now)
            self.condemn(session, Cause.BREACH, f"{name} broke the protocol: {text}", now)
        elif session is None or peer.identity is not None:  # else it may be that session's peer, and not know it yet
            self._table.reject(name, session_id, Cause.BREACH, text)

    def condemn(self, session: SessionRecord, cause: Cause, detail: str, now: float) -> None:
        """Grants nothing more on this session; every lease of it waits for a proof or the fence."""
        if session.state is SessionState.FENCING:
            return
        session.state = step(SESSION, session.state, SessionEvent.CONDEMN)
        self.timers.clear(("register", session.id, 0))
        session.verdict, session.fence_ms = (cause, detail), 0
        self._lost(session, cause, detail, now)
        self._fence(session, now)
        self._detach(session, now)

    def fenced(self, session_id: int, now: float) -> None:
        """The session's writer is proven quiet: no write of it will come; the session is over."""
        session = self.sessions.get(session_id)
        if session is None or session.state not in (SessionState.SILENT, SessionState.FENCING):
            return
        session.state = step(SESSION, session.state, SessionEvent.FENCE)
        del self.sessions[session_id]
        self.timers.clear(("fence", session_id, 0))
        self.timers.clear(("register", session_id, 0))
        self._quiet(session)
        self._out(Forget(session_id))
        self._detach(session, now)

    def tick(self, key: TimerKey, now: float) -> bool:
        """Acts on a due key of its own: repeats messages, polls fences, looks for silence. Returns False for other
        keys."""
        match key:
            case ("register", int(session_id), _):
                self._register(self.sessions[session_id], now)
            case ("fence", int(session_id), _):
                self._fence(self.sessions[session_id], now)
            case _:
                return self._table.tick(key, now)
        return True

    def _detach(self, session: SessionRecord, now: float) -> None:
        peer = self.peers[session.peer]
        if peer.session is session:
            peer.session = None
            self._table.greet(peer, now)

    def _refuse(self, peer: PeerRecord, cause: Cause, text: str, now: float) -> None:
        """Fails the peer's rooms. A fitting process may replace it, so Hello repeats at the slowest pace."""
        self._table.greet_later(peer, now)
        peer.refusal = cause, text
        if peer.session is not None:
            self.condemn(peer.session, cause, text, now)
        peer.liveness.last_seen, peer.liveness.incarnation, peer.identity = now, None, None
        if self._table.report(peer.name, text):
            self._unusable_changed()
        self._unreachable(peer, cause, text, now)

    def _register(self, session: SessionRecord, now: float) -> None:
        assert session.reach is not None
        session.repeat_ms = backoff_ms(session.repeat_ms, self._limits.resend_ms, self._limits.resend_ms_max)
        self.timers.set(("register", session.id, 0), now + session.repeat_ms / 1e3)
        staging = staging_of(session.components, session.landing)
        register = Register(session.id, session.components, session.reach, self._enable_hisparse, staging)
        self._out(Send(session.peer, register))

    def _ping(self, peer: PeerRecord, now: float) -> Ping | None:
        quiet = peer.liveness.silent_ms(now) >= self._limits.ping_ms / 2
        return Ping(self.identity.incarnation) if quiet and peer.identity is not None else None

    def _look(self, peer: PeerRecord, now: float) -> None:
        session = peer.session
        if session is not None and session.state is SessionState.UP and peer.liveness.slow(now):
            session.state = step(SESSION, session.state, SessionEvent.SLOW)
        if peer.liveness.silent(now) and peer.refusal is None:
            self._silence(peer, peer.liveness.why(peer.name, now), now)
        if peer.liveness.silent_ms(now) >= self._limits.forget_ms and all(
            session.peer != peer.name for session in self.sessions.values()
        ):
            self._forget(peer)

    def _silence(self, peer: PeerRecord, text: str, now: float) -> None:
        session = peer.session
        if session is not None and session.state in (SessionState.UP, SessionState.SLOW):
            session.state = step(SESSION, session.state, SessionEvent.SILENCE)
            self._lost(session, Cause.PEER_LOST, text, now)
            self._fence(session, now)
        elif session is not None and session.state is not SessionState.SILENT:
            self.condemn(session, Cause.PEER_LOST, text, now)
        self._unreachable(peer, Cause.PEER_LOST, text, now)

    def _forget(self, peer: PeerRecord) -> None:
        self._table.remove(peer)
        self._table.fits(peer.name)
        self._out(HangUp(peer.name))

    def _fence(self, session: SessionRecord, now: float) -> None:
        if session.state not in (SessionState.SILENT, SessionState.FENCING):
            return
        session.fence_ms = backoff_ms(session.fence_ms, self._limits.fence_poll_ms, self._limits.fence_poll_ms_max)
        self.timers.set(("fence", session.id, 0), now + session.fence_ms / 1e3)
        if session.state is SessionState.FENCING:
            cause, detail = session.verdict
            self._table.reject(session.peer, session.id, cause, detail)
        self._out(Fence(session.id))

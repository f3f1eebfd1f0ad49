"""Decode's rooms: expect, lease, grant, land, release. A room fails at once; its leases end later, each by its own proof.

The shell calls `receive` with each message, `tick` when `next_tick` says so, and performs the effects that every call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..admission import Admission, Demand
from ..arena import Arena, Holding, cut, slots_of
from ..effects import DecodeEffect, Ready, RoomFailed, Send
from ..errors import ArenaFullError, Cause, LocalProtocolError, RemoteProtocolError
from ..layout import Component
from ..lease import Lease
from ..limits import Limits
from ..room import DECODE_ROOM, DecodeRoom, DecodeRoomEvent
from ..states import step
from ..wire import (
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Identity,
    Landed,
    Message,
    Part,
    Pong,
    Reach,
    Registered,
    Reject,
    Welcome,
    pack_extents,
)
from .leases import Leases
from .links import LeaseEntry, Links, Peer, Session


@dataclass(slots=True, eq=False)
class Room:
    """One request's hand-off on the decode side."""

    id: int
    tokens: int
    prefix: int
    rows: tuple[int, ...]  # a component, growth included
    demand: Demand
    sources: tuple[str, ...]
    deadline: float
    enable_hisparse: bool
    state: DecodeRoom = DecodeRoom.CONNECTING
    holding: Holding | None = None
    leases: list[LeaseEntry] = field(default_factory=list[LeaseEntry])
    reserved: bool = False
    unlanded: int = 0
    aux: bytes = b""
    kv_bytes: int = 0


class DecodeSessions:
    """One decode rank: its arena, its peers, its rooms."""

    def __init__(
        self,
        identity: Identity,
        components: Sequence[Component],
        limits: Limits,
        mint: Callable[[], int],
        *,
        enable_hisparse: bool = False,
    ) -> None:
        self._limits = limits
        self.arena = Arena(components)
        self.admission = Admission(self.arena, limits)
        self.rooms: dict[int, Room] = {}  # unended ones
        self.draining = False
        self._out: list[DecodeEffect] = []
        self._waiting: dict[str, dict[int, Room]] = {}  # peer -> rooms CONNECTING, oldest first
        self.links = Links(
            identity,
            tuple(components),
            limits,
            mint,
            self._out.append,
            enable_hisparse=enable_hisparse,
            up=lambda peer, now: self._connect(peer.name, now),
            lost=self._session_lost,
            unreachable=self._peer_unreachable,
            quiet=lambda session, now: self.leases.quiet(session, now),
        )
        self.leases = Leases(self.links, self.arena, self._out.append, self._admit)

    # What the engine asks

    def dial(self, peer: str, now: float) -> list[DecodeEffect]:
        """Opens a session with a prefill rank ahead of its first room; idempotent."""
        self.links.dial(peer, now)
        return self._effects()

    def expect(
        self,
        room_id: int,
        *,
        tokens: int,
        sources: Sequence[str],
        now: float,
        deadline: float,
        growth: int = 0,
        prefix: int = 0,
        enable_hisparse: bool = False,
    ) -> list[DecodeEffect]:
        """Leases slots for `tokens` + `growth` tokens and grants them to the prefill ranks `sources`.

        Ends as Ready, or RoomFailed with its root cause. Raises LocalProtocolError for a label in use or numbers that make no sense.
        """
        if room_id in self.rooms:
            raise LocalProtocolError(f"room: {room_id:#x} is expected already")
        if not 0 <= prefix <= tokens or tokens < 1 or growth < 0:
            raise LocalProtocolError(f"tokens: {tokens}, prefix {prefix}, growth {growth} make no sense")
        if not sources or len(set(sources)) != len(sources):
            raise LocalProtocolError(f"sources: {list(sources)} names no rank, or one twice")
        rows = tuple(c.rows(tokens + growth) for c in self.arena.components)
        sent = sum(c.layout.row_bytes * (c.rows(tokens) - _prefix_rows(c, prefix)) for c in self.arena.components)
        room = Room(
            room_id, tokens, prefix, rows, Demand(rows, sent), tuple(sources), deadline, enable_hisparse
        )  # fmt: skip
        if self.draining:
            return [RoomFailed(room_id, Cause.SHUTDOWN, "this node is draining")]
        try:
            self.admission.check(rows, rooms=len(self.rooms))
        except ArenaFullError as error:
            cause = Cause.FULL if error.retry_ms is not None else Cause.REFUSED
            return [RoomFailed(room_id, cause, str(error), error.retry_ms or 0)]
        self.rooms[room_id] = room
        self.links.timers.set(("room", room_id, 0), deadline)
        for name in room.sources:
            peer = self.links.dial(name, now)
            refusal = self._unfit(peer, now)
            if refusal is not None:
                self._fail(room, *refusal, now)
                return self._effects()
            self._waiting.setdefault(name, {})[room_id] = room
        self._connect(room.sources[0], now)
        return self._effects()

    def release(self, room_id: int, now: float) -> list[DecodeEffect]:
        """The engine reads and writes no slot of this READY room any more; idempotent."""
        room = self.rooms.get(room_id)
        if room is None:
            return []
        if room.state is not DecodeRoom.READY:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value}, not ready: abort it")
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.RELEASE)
        self._close(room, now)
        return self._effects()

    def abort(self, room_id: int, now: float, cause: Cause = Cause.ABORTED, detail: str = "") -> list[DecodeEffect]:
        """Gives a room up before READY; its slots come back by proof. Of a READY or ended room nothing changes: release that."""
        room = self.rooms.get(room_id)
        if room is not None and room.state is not DecodeRoom.READY:
            self._fail(room, cause, detail, now)
        return self._effects()

    def drain(self) -> None:
        """Takes no new room from here on; what there is runs to its end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """No room, no lease, no hold: everything is where it started."""
        return not self.rooms and not any(session.leases for session in self.links.sessions.values())

    # What the shell reports

    def offered(self, session_id: int, reach: Reach, now: float) -> list[DecodeEffect]:
        """Answers Offer."""
        self.links.offered(session_id, reach, now)
        return self._effects()

    def fenced(self, session_id: int, now: float) -> list[DecodeEffect]:
        """Answers Fence, once the proof is there."""
        self.links.fenced(session_id, now)
        return self._effects()

    def next_tick(self) -> float | None:
        """When `tick` has something to do."""
        return self.links.timers.next()

    def tick(self, now: float) -> list[DecodeEffect]:
        """Repeats, looks for silence, ends what is past its deadline."""
        while (key := self.links.timers.pop(now)) is not None:
            match key:
                case ("room", int(room_id), _):
                    room = self.rooms[room_id]
                    if room.state is not DecodeRoom.READY:
                        self._fail(room, Cause.DEADLINE, f"not ready in time, still {room.state.value}", now)
                case ("lease", int(session_id), number):
                    self.leases.repeat(self.links.sessions[session_id].leases[number], now)
                case _:
                    assert self.links.tick(key, now), key
        return self._effects()

    def receive(self, name: str, message: Message, now: float) -> list[DecodeEffect]:
        """One message of a dialled peer. A breach ends the session it was about, and nobody else's."""
        if name not in self.links.peers:
            return self._effects()
        try:
            self._receive(name, message, now)
        except RemoteProtocolError as error:
            session = self.links.sessions.get(getattr(message, "session", 0))
            if session is not None and session.peer == name:
                self.links.condemn(session, Cause.BREACH, f"{name} broke the protocol: {error}", now)
        return self._effects()

    def _receive(self, name: str, message: Message, now: float) -> None:
        match message:
            case Welcome():
                self.links.welcome(name, message, now)
            case Reject():
                self.links.rejected(name, message, now)
            case Pong():
                self.links.pong(name, message.incarnation, now)
            case Goodbye():
                peer = self.links.peers[name]
                if (
                    peer.session is not None
                    and peer.identity is not None
                    and peer.identity.incarnation == message.incarnation
                ):
                    self.links.condemn(peer.session, Cause.PEER_LOST, f"{name} says goodbye: {message.reason}", now)
            case Registered() | Granted() | Landed() | Failed() | Drained():
                session = self.links.of(name, message.session)
                if session is None:
                    self._out.append(Send(name, Reject(message.session, "unknown_session", ())))
                    return
                self.links.heard(session, now)
                if isinstance(message, Registered):
                    self.links.registered(session, message, now)
                else:
                    self._of_grant(session, message, now)
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is nothing that a prefill sends to decode")

    def _of_grant(self, session: Session, message: Granted | Landed | Failed | Drained, now: float) -> None:
        if message.grant >= session.next_grant:
            text = f"{message.grant} was never granted, the next is {session.next_grant}"
            raise RemoteProtocolError(f"{type(message).__name__}.grant", text)
        lease = session.leases.get(message.grant)
        match message:
            case Granted():
                if lease is not None:
                    lease.granted = True
            case Landed():
                self._landed(session, lease, message, now)
            case Failed():
                if lease is not None:
                    room = self._room_of(lease)
                    if room is not None:
                        cause = Cause.of(message.reason)
                        self._fail(room, cause, f"{session.peer}: {message.detail or message.reason}", now)
                if message.quiescent:
                    self._proof(session, message.grant, now)
            case Drained():
                room = self._room_of(lease) if lease is not None else None
                if room is not None:
                    self._fail(room, Cause.TRANSFER, f"{session.peer} stopped writing", now)
                self._proof(session, message.grant, now)

    # Rooms

    def _unfit(self, peer: Peer, now: float) -> tuple[Cause, str] | None:
        """Why no room may be expected from this peer now, if so."""
        if peer.refusal is not None:
            return Cause.REFUSED, peer.refusal
        silent_ms = (now - peer.heard) * 1e3
        if silent_ms >= self._limits.silence_ms:
            return Cause.PEER_LOST, f"{peer.name} has been silent for {silent_ms:.0f} ms"
        total = sum(c.layout.row_bytes * c.layout.slots for c in self.arena.components)
        if peer.quarantined_bytes > self._limits.quarantine_fraction_max * total:
            return Cause.PEER_LOST, f"{peer.name} keeps {peer.quarantined_bytes} bytes of the arena in quarantine"
        return None

    def _connect(self, name: str, now: float) -> None:
        """Queues the rooms that wait for this peer, oldest first, as long as its window has places."""
        peer = self.links.peers[name]
        for room in list(self._waiting.get(name, {}).values()):
            if peer.up is None or not peer.up.has_place:
                break
            sessions = [self.links.peers[source].up for source in room.sources]
            if not all(session is not None and session.has_place for session in sessions):
                continue  # another rank of it is not there yet
            for source, session in zip(room.sources, sessions, strict=True):
                assert session is not None
                session.reserved += 1
                del self._waiting[source][room.id]
            room.reserved = True
            room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.CONNECT)
            self.admission.enqueue(room.id, room.demand)
        self._admit(now)

    def _admit(self, now: float) -> None:
        while (head := self.admission.head()) is not None:
            holding = self.admission.admit(now)
            if holding is None:
                return
            room = self.rooms[head]
            room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.ADMIT)
            room.holding, room.unlanded = holding, len(room.sources)
            self._unreserve(room)
            for place, source in enumerate(room.sources):
                session = self.links.peers[source].up
                assert session is not None, "a room whose session is gone has left the queue"
                self._grant(room, session, send_aux=place == 0, now=now)

    def _grant(self, room: Room, session: Session, *, send_aux: bool, now: float) -> None:
        assert room.holding is not None
        parts: list[Part] = []
        kv_bytes = 0
        for index, (component, extents) in enumerate(zip(session.components, room.holding.extents, strict=True)):
            first = _prefix_rows(component, room.prefix)
            rows = component.rows(room.tokens) - first
            if rows > 0:
                parts.append(Part(index, first, rows, pack_extents(cut(extents, first=first, count=rows))))
                kv_bytes += rows * component.layout.row_bytes
        message = Grant(
            session.id,
            session.next_grant,
            room.id,
            room.tokens,
            room.prefix,
            tuple(parts),
            send_aux,
            0,
            room.enable_hisparse,
        )
        lease = LeaseEntry(session, message, room.holding, kv_bytes, room.deadline)
        room.leases.append(lease)
        self.leases.open(lease, now)

    def _landed(self, session: Session, lease: LeaseEntry | None, message: Landed, now: float) -> None:
        if lease is not None:
            if message.kv_bytes != lease.kv_bytes:
                raise RemoteProtocolError("Landed.kv_bytes", f"{message.kv_bytes}, the grant is {lease.kv_bytes}")
            if message.aux and not lease.message.send_aux:
                raise RemoteProtocolError("Landed.aux", f"{len(message.aux)} bytes from a rank that sends none")
            room = self._room_of(lease)
            if room is not None:
                room.unlanded -= 1
                room.kv_bytes += message.kv_bytes
                room.aux = room.aux or message.aux
                if not room.unlanded:
                    self._ready(room, lease)
        self._proof(session, message.grant, now)

    def _ready(self, room: Room, last: LeaseEntry) -> None:
        assert room.holding is not None
        assert all(lease is last or lease.state is Lease.ENDED for lease in room.leases)
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.COMPLETE)
        self.admission.landed(room.demand)
        self.links.timers.clear(("room", room.id, 0))
        slots = {
            component.name: slots_of(extents, count=rows)
            for component, extents, rows in zip(self.arena.components, room.holding.extents, room.rows, strict=True)
        }
        self._out.append(Ready(room.id, slots, room.aux, room.kv_bytes))

    def _proof(self, session: Session, number: int, now: float) -> None:
        self.leases.proof(session, number, now)
        self._connect(session.peer, now)  # its window may have a place again

    def _room_of(self, lease: LeaseEntry) -> Room | None:
        """The room that this lease may still complete or fail: the one that holds it, while it lands."""
        room = self.rooms.get(lease.message.room)
        landing = room is not None and room.state is DecodeRoom.LANDING and lease in room.leases
        return room if landing and lease.state is Lease.GRANTED else None

    def _fail(self, room: Room, cause: Cause, detail: str, now: float) -> None:
        """Ends a room that is not READY: its client hears it now, its leases end in their own time."""
        before = room.state
        room.state = step(DECODE_ROOM, before, DecodeRoomEvent.FAIL)
        for source in room.sources:
            self._waiting.get(source, {}).pop(room.id, None)
        self.admission.withdraw(room.id)
        self._unreserve(room)
        if before is DecodeRoom.LANDING:
            self.admission.landed(room.demand)
        self._out.append(RoomFailed(room.id, cause, detail))
        for lease in room.leases:
            self.leases.abort(lease, now)
        self._close(room, now)

    def _close(self, room: Room, now: float) -> None:
        del self.rooms[room.id]
        self.links.timers.clear(("room", room.id, 0))
        if room.holding is not None and self.arena.drop(room.holding):
            self._admit(now)

    def _unreserve(self, room: Room) -> None:
        if room.reserved:
            room.reserved = False
            for source in room.sources:
                session = self.links.peers[source].session
                if session is not None:
                    session.reserved -= 1

    # What links report

    def _session_lost(self, session: Session, cause: Cause, detail: str, now: float) -> None:
        for room in [room for room in self.rooms.values() if session.peer in room.sources]:
            if room.state in (DecodeRoom.QUEUED, DecodeRoom.LANDING) and self._uses(room, session):
                self._fail(room, cause, detail, now)
        self.leases.quarantine(session)

    @staticmethod
    def _uses(room: Room, session: Session) -> bool:
        return room.reserved or any(
            lease.session is session and lease.state is not Lease.ENDED for lease in room.leases
        )

    def _peer_unreachable(self, peer: Peer, cause: Cause, detail: str, now: float) -> None:
        for room in list(self._waiting.get(peer.name, {}).values()):
            self._fail(room, cause, detail, now)

    def _effects(self) -> list[DecodeEffect]:
        out = self._out.copy()
        self._out.clear()
        return out


def _prefix_rows(component: Component, prefix: int) -> int:
    """Rows that decode already holds: whole rows of components that every token owns; the others cross anew."""
    return prefix // component.tokens_per_row if component.span.kind == "all" else 0

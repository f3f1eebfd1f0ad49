"""Decode's rooms: expect, lease, grant, land, release. A room fails at once; its leases end later, each by its proof.

The shell calls `receive` with each message, `tick` when `next_tick` says so, and performs the effects that every call
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import Cause, LocalProtocolError, RemoteProtocolError
from ...layout.layout import Component
from ...limits import AHEAD_MAX, TEXT_LENGTH_MAX, Limits
from ...wire import (
    Drained,
    Failed,
    Goodbye,
    Granted,
    Identity,
    Landed,
    Message,
    Pong,
    Reach,
    Registered,
    Reject,
    Welcome,
)
from ..admission import Admission
from ..effects import DecodeEffect, Leased, PeerRefused, Ready, RoomFailed, Send, SessionLost
from ..lease import Lease
from ..prefix import PrefixCache
from ..room import DECODE_ROOM, DecodeRoom, DecodeRoomEvent
from ..slot_allocator import Arena
from ..states import step
from .coverage import Coverage
from .leases import Leases
from .parts import fits_a_grant
from .prefill_peers import Links
from .prefix_publish import Keeping
from .records import LeaseEntry, Peer, Room, Session
from .room_request import refusal, room_of
from .settling import Settling
from .window_slots import Places


class DecodeSessions:
    """One decode rank: its arena, its peers, its rooms."""

    def __init__(
        self,
        identity: Identity,
        components: Sequence[Component],
        limits: Limits,
        mint: Callable[[], int],
        *,
        enable_hisparse: bool = False, prefix_cache: bool = True, verify: bool = False, bytes_ready: int | None = None,
        hbm_apart: bool = False,
    ) -> None:  # fmt: skip
        """With `hbm_apart` HBM is a memory of its own, all of it ready; what its writers can't reach lands before."""
        self._limits, self._verify, self._enable_hisparse = limits, verify, enable_hisparse
        self.arena = Arena(components, bytes_ready, hbm_apart=hbm_apart)
        self.cache = PrefixCache(
            self.arena, limits, model=identity.model, weights=identity.weights, enabled=prefix_cache
        )
        self.admission = Admission(self.cache, limits)
        self.rooms: dict[int, Room] = {}  # unended ones
        self.draining = False
        self._out: list[DecodeEffect] = []
        self.places = Places(Coverage(self.arena.components, limits.sessions_max))
        self._arena_bytes = sum(c.bytes_of(c.layout.slots) for c in self.arena.components)
        self.links = Links(
            identity, tuple(components), limits, mint, self._out.append,
            enable_hisparse=enable_hisparse,
            up=lambda peer: self._connect(peer.name), lost=self._session_lost, unreachable=self._peer_unreachable,
            quiet=lambda session: self.leases.quiet(session),  # noqa: PLW0108 -- made below: each needs the other
        )  # fmt: skip
        self.leases = Leases(self.links, self.cache, limits, self._out.append)
        self.keeping = Keeping(self.cache, self.links.timers)
        self.settling = Settling(self.cache, self._out.append, hbm_apart=hbm_apart)

    # What the engine asks

    def dial(self, peer: str, now: float) -> list[DecodeEffect]:
        """Opens a session with a prefill rank ahead of its first room; idempotent."""
        if self.links.dial(peer, now) is None:
            text = f"{peer} is not dialled: {len(self.links.peers)} peers of sessions_max {self._limits.sessions_max}"
            self._out.append(PeerRefused(peer, text))
        return self._effects(now)

    def may_dial_ahead(self, peer: str) -> bool:
        """Whether `dial` takes no place that rooms are sure to need: half are kept for the peers that they name."""
        known, most = self.links.peers, min(AHEAD_MAX, self._limits.sessions_max // 2)
        return not self.draining and (peer in known or len(known) < most)

    def expect(
        self,
        room_id: int,
        *,
        tokens: int,
        sources: Sequence[str],
        now: float,
        deadline: float,
        growth: int = 0, prefix: int = 0, keys: tuple[bytes, ...] = (), enable_hisparse: bool = False,
    ) -> list[DecodeEffect]:  # fmt: skip
        """Leases slots for `tokens` + `growth` tokens and grants them to the prefill ranks `sources`.

        The first `prefix` tokens the engine has elsewhere. Or `keys`, as `cache.keys` makes them, name the prompt's
        blocks: those that are here when the room is admitted do not cross, the others are shared from READY on.
        Ends as Ready, or RoomFailed with its root cause. Raises LocalProtocolError for a label in use, and for numbers
        that make no sense.
        """
        room = room_of(
            room_id, known=self.rooms, cache=self.cache, tokens=tokens, sources=sources, deadline=deadline,
            growth=growth, prefix=prefix, keys=keys, enable_hisparse=enable_hisparse,
        )  # fmt: skip
        refused = refusal(
            room, self.admission, rooms=len(self.rooms), draining=self.draining, enable_hisparse=self._enable_hisparse
        )
        if refused is not None:
            return [refused]
        self.rooms[room_id] = room
        self.links.timers.set(("room", room_id, 0), deadline)
        for name in room.sources:
            if name not in self.places:
                self.links.redial(name, now)
        if (unfit := self._unfit(room, now)) is not None:
            self._fail(room, *unfit, now)
            return self._effects(now)
        self.places.wait(room)
        for name in room.sources:
            self._connect(name)
        return self._effects(now)

    def release(self, room_id: int, now: float) -> list[DecodeEffect]:
        """The engine reads and writes no slot of this READY room any more; idempotent."""
        room = self.rooms.get(room_id)
        if room is None:
            return []
        if room.state is not DecodeRoom.READY:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value}, not ready: abort it")
        self.keeping.keep(room_id)
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.RELEASE)
        self._close(room)
        return self._effects(now)

    def abort(self, room_id: int, now: float, cause: Cause = Cause.ABORTED, detail: str = "") -> list[DecodeEffect]:
        """Gives a room up before READY; its slots come back by proof. A READY room stays: release that."""
        room = self.rooms.get(room_id)
        if room is not None and room.state is not DecodeRoom.READY:
            self._fail(room, cause, detail, now)
        return self._effects(now)

    def drain(self) -> None:
        """Takes no new room from here on; what there is runs to its end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """No room, no lease, no hold: everything is where it started."""
        leases = any(session.leases for session in self.links.sessions.values())
        return not self.rooms and not leases and not self.settling

    # What the shell reports

    def offered(self, session_id: int, reach: Reach, now: float) -> list[DecodeEffect]:
        """Answers Offer."""
        self.links.offered(session_id, reach, now)
        return self._effects(now)

    def unoffered(self, session_id: int, text: str, now: float) -> list[DecodeEffect]:
        """Answers Offer: it cannot be done. Or later: what was offered is gone."""
        self.links.unoffered(session_id, text, now)
        return self._effects(now)

    def ready(self, bytes_ready: int, now: float) -> list[DecodeEffect]:
        """So many of the arena's first bytes are backed with memory now: what lies below is leased to who waits."""
        self.arena.grow(bytes_ready)
        self.leases.grown(now)
        return self._effects(now)

    def fenced(self, session_id: int, now: float) -> list[DecodeEffect]:
        """Answers Fence, once the proof is there."""
        self.links.fenced(session_id, now)
        return self._effects(now)

    def verified(self, session_id: int, grant: int, checksum: int, detail: str, now: float) -> list[DecodeEffect]:
        """Answers Verify: the sum of the rows, or in `detail` why there is none."""
        self._settled(*self.settling.verified(session_id, grant, checksum, detail), now)
        return self._effects(now)

    def lifted(self, session_id: int, grant: int, detail: str, now: float) -> list[DecodeEffect]:
        """Answers Lift: every row of it is in HBM, or in `detail` why not; nothing of it is copied any more."""
        self._settled(*self.settling.lifts.end(session_id, grant, detail), now)
        return self._effects(now)

    def _settled(self, room: Room, wrong: str, now: float) -> None:
        if room.state is DecodeRoom.SETTLING and not wrong and not room.settling:
            self._ready(room, now)
        elif room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING) and wrong:
            self._fail(room, Cause.TRANSFER, wrong, now)

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
                case ("keep", int(room_id), _):
                    self.keeping.keep(room_id)
                case ("lease", int(session_id), number):
                    self.leases.repeat(self.links.sessions[session_id].leases[number], now)
                case _:
                    assert self.links.tick(key, now), key
        return self._effects(now)

    def receive(self, name: str, message: Message, now: float) -> list[DecodeEffect]:
        """One message of a dialled peer. A breach ends the session it was about, and nobody else's."""
        if name in self.links.peers:
            try:
                self._receive(name, message, now)
            except RemoteProtocolError as error:
                self.links.breach(name, getattr(message, "session", 0), str(error), now)
        return self._effects(now)

    def _receive(self, name: str, message: Message, now: float) -> None:
        match message:
            case Welcome() | Reject() | Pong() | Goodbye():
                self.links.receive(name, message, now)
            case Registered() | Granted() | Landed() | Failed() | Drained():
                session = self.links.of(name, message.session)
                if session is None:
                    self._out.append(Send(name, Reject(message.session, "unknown_session", ())))
                    return
                self.links.heard(session, now)
                if isinstance(message, Registered):
                    self.links.registered(session, message)
                    self.leases.ready(session, now)
                else:
                    self._of_grant(session, message, now)
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is nothing that a prefill sends to decode")

    def _of_grant(self, session: Session, message: Granted | Landed | Failed | Drained, now: float) -> None:
        if message.grant >= session.next_grant:
            text = f"{message.grant} was never granted, the next is {session.next_grant}"
            raise RemoteProtocolError(f"{type(message).__name__}.grant", text)
        lease = session.leases.get(message.grant)
        if isinstance(message, Granted):
            if lease is not None:
                lease.granted = True
            return
        room, wrong = None if lease is None else self._room_of(lease), ""
        if lease is not None and isinstance(message, Landed):
            wrong = self._landed(lease, message, room, now)
        if not isinstance(message, Failed) or message.quiescent:
            self.leases.proof(session, message.grant)
        if room is not None and isinstance(message, Failed):
            detail = f"{session.peer}: {message.detail or message.reason}"
            self._fail(room, Cause.of(message.reason), detail, now)
        elif room is not None and (wrong or isinstance(message, Drained)):
            self._fail(room, Cause.TRANSFER, wrong or f"{session.peer} stopped writing", now)
        self._connect(session.peer)  # its window may have a place again

    def _landed(self, lease: LeaseEntry, message: Landed, room: Room | None, now: float) -> str:
        """Checks what the writer says; the room, unless it has ended, is ready when this was its last grant, and what
        was to be verified is. Returns what is wrong with it, once there is its proof."""
        lease.check(message)
        if room is None:
            return ""
        room.aux = room.aux or message.aux
        if wrong := self.settling.landed(room, lease, message.checksum):
            return wrong
        if all(each is lease or each.state is Lease.ENDED for each in room.leases):
            if room.settling:
                room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.LAND)
            else:
                self._ready(room, now)
        return ""

    # Rooms

    def _connect(self, name: str) -> None:
        """Gives the places in this peer's window to the rooms that wait for one."""
        peer = self.links.peers.get(name)
        if peer is not None and peer.up is not None:
            for room in self.places.give(peer.up):
                room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.CONNECT)
                self.admission.enqueue(room.id, room.demand)

    def _admit(self, now: float) -> None:
        while True:
            while (refused := self.places.refused()) is not None:  # one that fails below may leave its place to such
                self._fail(*refused, now)
            if (head := self.admission.head()) is None:
                return
            room = self.rooms[head]
            if (unfit := self._unfit(room, now)) is not None:
                self._fail(room, *unfit, now)
                continue
            self.keeping.keep_all()
            holding = self.admission.admit(now)
            if holding is None:
                return
            room.state, room.holding = step(DECODE_ROOM, room.state, DecodeRoomEvent.ADMIT), holding
            room.prefix = room.prefix or holding.prefix
            sessions = list(room.places.values())
            room.unreserve()
            if not all(fits_a_grant(each.extents_of(holding), each.frame_bytes_max) for each in sessions):
                text = f"extents: {[len(each) for each in holding.extents]} are more than a Grant can name"
                self._fail(room, Cause.FULL, text, now)
                continue
            self._out.append(Leased(room.id))
            for session in sessions:
                self.leases.grant(room, session, send_aux=session.peer == room.sources[0], verify=self._verify, now=now)

    def _unfit(self, room: Room, now: float) -> tuple[Cause, str] | None:
        """Why one of its sources may not be granted now, if so."""
        for source in room.sources:
            if (refusal := self.links.unfit(source, now, self._arena_bytes)) is not None:
                return refusal
        return None

    def _ready(self, room: Room, now: float) -> None:
        assert room.holding is not None
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.COMPLETE)
        self.admission.landed(room.demand, room.holding)
        self.links.timers.clear(("room", room.id, 0))
        self.keeping.add(room, now)
        slots = room.slots_of(self.arena.components)
        self._out.append(Ready(room.id, slots, room.aux, sum([lease.kv_bytes for lease in room.leases]), room.prefix))

    def _room_of(self, lease: LeaseEntry) -> Room | None:
        """The room that this lease may still complete or fail: the one that holds it, while it lands."""
        room = self.rooms.get(lease.message.room)
        landing = room is not None and room.state is DecodeRoom.LANDING and lease in room.leases
        return room if landing and lease.state is Lease.GRANTED else None

    def _fail(self, room: Room, cause: Cause, detail: str, now: float) -> None:
        """Ends a room that is not READY: its client hears it now, its leases end in their own time."""
        before = room.state
        room.state = step(DECODE_ROOM, before, DecodeRoomEvent.FAIL)
        self.places.leave(room)
        self.admission.withdraw(room.id)
        if before in (DecodeRoom.LANDING, DecodeRoom.SETTLING):
            assert room.holding is not None
            self.admission.landed(room.demand, room.holding)
        self.settling.stop(room)
        self._out.append(RoomFailed(room.id, cause, detail[:TEXT_LENGTH_MAX]))
        for lease in room.leases:
            self.leases.abort(lease, now)
        self._close(room)
        for source in room.sources:
            self._connect(source)

    def _close(self, room: Room) -> None:
        del self.rooms[room.id]
        self.links.timers.clear(("room", room.id, 0))
        if room.holding is not None:
            self.cache.drop(room.holding)

    # What links report

    def _session_lost(self, session: Session, cause: Cause, detail: str, now: float) -> None:
        self._out.append(SessionLost(session.id, detail))
        for room in [room for room in self.rooms.values() if room.uses(session)]:
            self._fail(room, cause, detail, now)
        self.leases.quarantine(session)

    def _peer_unreachable(self, peer: Peer, cause: Cause, detail: str, now: float) -> None:
        for room in self.places.at(peer.name):
            self._fail(room, cause, detail, now)

    def _effects(self, now: float) -> list[DecodeEffect]:
        """What has come together. Whatever has just come free is leased first, since anything may have freed it."""
        self._admit(now)
        out = self._out.copy()
        self._out.clear()
        return out

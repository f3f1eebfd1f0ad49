"""Decode's rooms: expect, lease, grant, land, release.

A room fails at once; each of its leases ends later, by its own proof. The shell calls `receive` with each message and
`tick` at the time that `next_tick` returns, and performs the effects that every call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
from ..component_variants import NO_STAND_INS, StandIns
from ..effects import DecodeEffect, Dial, PeerRefused, RoomDrained, RoomFailed, RoomLeased, RoomReady, Send, SessionLost
from ..prefix import PrefixCache
from ..slot_allocator import Holding, SlotAllocator
from ..states import DECODE_ROOM, DecodeRoom, DecodeRoomEvent, Lease, SessionState
from ..tables import step
from .leases import Leases, reason_of, too_many_extents
from .post_landing import PostLanding, PrefixPublish
from .prefill_peers import PrefillPeers
from .records import LeaseEntry, PeerRecord, RoomPiece, RoomRecord, SessionRecord
from .room_request import RoomRequest, refusal, rest_refusal
from .staging import StagingBuffer
from .waiting_rooms import Coverage, WaitingRooms, WindowSlots, Withdrawals


class DecodeSessions:
    """One decode rank: its arena, its peers and its rooms."""

    def __init__(
        self,
        identity: Identity,
        components: Sequence[Component],
        limits: Limits,
        mint: Callable[[], int],
        *,
        enable_hisparse: bool = False, prefix_cache: bool = True, verify: bool = False, bytes_ready: int | None = None,
        landing: Sequence[Component] | None = None, engine_slots: bool = False, stand_ins: StandIns = NO_STAND_INS,
        may_be_one: Callable[[str, str], bool] = lambda _, __: False,
        quarantine: Callable[[LeaseEntry, bool], None] = lambda _, __: None,
        unusable_changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """With `landing` HBM is a separate memory, ready from the start. Rows whose writer cannot reach it land in the
        arena, in the staging buffer that `landing` describes (`layout.staging.staged`), and are copied. With
        `engine_slots` each room brings its slots, and RoomDrained returns them; then some components may be `stand_ins`
        of others, and a room brings the slots of both. `may_be_one` returns whether two
        endpoints lead to one process, if that reports so at both. `quarantine` is called when a lease's quarantine
        begins (True) and ends, `unusable_changed` when what `PrefillPeers.unusable` returns may be another."""
        self._limits, self._verify, self._enable_hisparse = limits, verify, enable_hisparse
        components = tuple(components)
        landing = components if landing is None else tuple(landing)
        hbm_apart = landing is not components
        self.arena = SlotAllocator(
            components, bytes_ready, hbm_apart=hbm_apart, engine_slots=engine_slots, stand_ins=stand_ins
        )
        self.staging = StagingBuffer(landing, bytes_ready)
        prefix_cache = prefix_cache and not engine_slots
        self.cache = PrefixCache(
            self.arena, limits, model=identity.model, weights=identity.weights, enabled=prefix_cache
        )
        self.admission = Admission(self.cache, limits)
        self._evicted_blocks = 0  # by the cache, when rests that wait for slots were compared with it last
        self.rooms: dict[int, RoomRecord] = {}  # not ended
        self.draining = False
        self._out: list[DecodeEffect] = []
        self.unnamed: WaitingRooms[RoomRecord] = WaitingRooms()  # at each leader that has not named its ranks
        self.window_slots = WindowSlots(Coverage(self.arena.components, limits.sessions_max, stand_ins))
        self.withdrawals = withdrawals = Withdrawals(limits.rooms_max, limits.room_deadline_ms / 1e3)
        self.prefill_peers = PrefillPeers(
            identity, components, landing, limits, mint, self._out.append,
            enable_hisparse=enable_hisparse, stand_ins=stand_ins,
            up=lambda peer: self._connect(peer.name), lost=self._session_lost, unreachable=self._peer_unreachable,
            quiet=self._quiet, withdrawn=withdrawals.in_hello, merged=self._peers_merged, may_be_one=may_be_one,
            unusable_changed=unusable_changed,
        )  # fmt: skip
        self.leases = Leases(
            self.prefill_peers, self.cache, self.staging, limits, self._out.append, quarantine=quarantine
        )
        self.prefix_publish = PrefixPublish(self.cache, self.prefill_peers.timers)
        self.post_landing = PostLanding(self.cache, self.staging, self._out.append)

    # Calls of the engine

    def dial(self, peer: str, now: float) -> list[DecodeEffect]:
        """Opens a session with a prefill rank ahead of its first room; idempotent."""
        peer = self.prefill_peers.resolve(peer, now)
        if self.prefill_peers.dial(peer, now) is None:
            count = len(self.prefill_peers.peers)
            text = f"{peer} is not dialled: {count} peers of sessions_max {self._limits.sessions_max}"
            self._out.append(PeerRefused(peer, text))
        return self._effects(now)

    def may_dial_ahead(self, peer: str, now: float) -> bool:
        """True if `dial` leaves enough sessions for the peers that rooms name: half of them are kept for those."""
        peers, most = self.prefill_peers.peers, min(AHEAD_MAX, self._limits.sessions_max // 2)
        return not self.draining and (self.prefill_peers.resolve(peer, now) in peers or len(peers) < most)

    def expect(self, request: RoomRequest, now: float) -> list[DecodeEffect]:
        """Leases the slots of a room and grants them to its sources.

        The room ends as RoomReady, or as RoomFailed with its root cause. Where its engine chose the slots, RoomDrained
        follows either of them. Raises as RoomRequest.record, and as SlotAllocator.take.
        """
        names = partial(self.prefill_peers.resolve, now=now)
        room = request.record(self.cache, self.rooms, now + request.time_left_s, names)
        if not room.sources:
            self.prefix_publish.publish_all()
        refused = refusal(
            room, self.admission, rooms=len(self.rooms), draining=self.draining, enable_hisparse=self._enable_hisparse
        )
        if refused is not None:
            self._out += [refused] if request.chosen is None else [refused, RoomDrained(room.id)]
            self.withdrawals.add(room, reason_of(refused.cause, refused.detail), now)
            if not self.draining:  # they learn it on a session, and there may be none yet
                for name in room.sources:
                    self.prefill_peers.redial(name, now)
            return self._effects(now)
        self.withdrawals.drop(room)
        if request.chosen is not None:
            room.holding = self.arena.take(room.id, tuple([rows.extents for rows in request.chosen]))
        self.rooms[room.id] = room
        self.prefill_peers.timers.set(("room", room.id, 0), room.deadline)
        if room.leaders:
            if self._fit(room, now):
                for leader in room.leaders:
                    self.unnamed.put(leader, room.id, room)
                self._name_sources(room, now)
        else:
            self._meet(room, now)
        return self._effects(now)

    def release(self, room_id: int, now: float, keys: Sequence[bytes] = ()) -> list[DecodeEffect]:
        """Frees a READY room, of which the engine reads and writes no slot any more; idempotent. `keys` are those of
        the blocks of its prompt and answer whose rows the engine has written: they are shared from now on."""
        room = self.rooms.get(room_id)
        if room is None:
            return []
        if room.state is not DecodeRoom.READY:
            raise LocalProtocolError(f"room: {room_id:016x} is {room.state.value}, not ready: abort it")
        self.prefix_publish.publish(room_id)
        if keys:
            assert room.holding is not None
            self.cache.keep(room.holding, keys)
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.RELEASE)
        self._close(room)
        return self._effects(now)

    def abort(self, room_id: int, now: float, cause: Cause = Cause.ABORTED, detail: str = "") -> list[DecodeEffect]:
        """Gives up a room that is not READY; its slots return by proof. A READY room stays until `release`."""
        room = self.rooms.get(room_id)
        if room is not None and room.state is not DecodeRoom.READY:
            self._fail(room, cause, detail, now)
        return self._effects(now)

    def withdraw(self, room_id: int, sources: Sequence[str], detail: str, now: float) -> list[DecodeEffect]:
        """Informs the prefill ranks at `sources` that this node will not expect a room that they may have open. A room
        that it expects already is left alone."""
        if room_id not in self.rooms and not self.draining:
            for name in [self.prefill_peers.resolve(source, now) for source in sources]:
                self.withdrawals.put(name, room_id, detail, now)
                self._out.append(Dial(name))
                self.prefill_peers.redial(name, now)
        return self._effects(now)

    def drain(self) -> None:
        """Accepts no new room from now on; present rooms run to their end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """True if there is no room, no lease, and no copy or check of landed rows."""
        leases = any(session.leases for session in self.prefill_peers.sessions.values())
        return not self.rooms and not leases and not self.post_landing

    # Reports of the shell

    def undialled(self, peer: str, cause: Cause, text: str, now: float) -> list[DecodeEffect]:
        """Answers Dial with a failure: the rooms that need the peer end."""
        self.prefill_peers.undialled(peer, cause, text, now)
        return self._effects(now)

    def offered(self, session_id: int, reach: Reach, now: float) -> list[DecodeEffect]:
        """Answers Offer."""
        self.prefill_peers.offered(session_id, reach, now)
        return self._effects(now)

    def unoffered(self, session_id: int, text: str, now: float) -> list[DecodeEffect]:
        """Answers Offer with a failure; or reports later that the hand-over is gone."""
        self.prefill_peers.unoffered(session_id, text, now)
        return self._effects(now)

    def ready(self, bytes_ready: int, now: float) -> list[DecodeEffect]:
        """The first `bytes_ready` bytes of the arena are backed with memory: slots in them may be leased."""
        self.arena.grow(bytes_ready)
        self.staging.slots.grow(bytes_ready)
        self.leases.grown(now)
        return self._effects(now)

    def gone(self, peer: str, evidence: str, now: float) -> list[DecodeEffect]:
        """There is evidence that the peer is gone, such as a port that refuses connections; empty: no longer. It is
        repeated while it stands."""
        self.prefill_peers.gone(peer, evidence, now)
        return self._effects(now)

    def fenced(self, session_id: int, now: float) -> list[DecodeEffect]:
        """Answers Fence: its session is proven quiet."""
        self.prefill_peers.fenced(session_id, now)
        return self._effects(now)

    def settled(self, session_id: int, grant: int, checksum: int, detail: str, now: float) -> list[DecodeEffect]:
        """Answers Settle with the checksum of rows that were verified; a non-empty `detail` is why it is missing, or
        why not every row is in HBM."""
        room, wrong = self.post_landing.settled(session_id, grant, checksum, detail)
        if room.state is DecodeRoom.SETTLING and not wrong and not room.post_landing_count:
            self._ready(room, now)
        elif room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING) and wrong:
            self._fail(room, Cause.TRANSFER, wrong, now)
        return self._effects(now)

    def next_tick(self) -> float | None:
        """When `tick` is due; None if nothing is."""
        return self.prefill_peers.timers.next()

    def tick(self, now: float) -> list[DecodeEffect]:
        """Repeats what is unanswered, detects silent peers, and fails rooms past their deadline."""
        while (key := self.prefill_peers.timers.pop(now)) is not None:
            match key:
                case ("room", int(room_id), _):
                    room = self.rooms[room_id]
                    if room.state is not DecodeRoom.READY:
                        text = f"not ready in time, still {room.state.value}: {self._awaited(room)}"
                        self._fail(room, Cause.DEADLINE, text, now)
                case ("publish", int(room_id), _):
                    self.prefix_publish.publish(room_id)
                case ("lease", int(session_id), number):
                    self.leases.repeat(self.prefill_peers.sessions[session_id].leases[number], now)
                case _:
                    handled = self.prefill_peers.tick(key, now)
                    assert handled, key
        return self._effects(now)

    def receive(self, name: str, message: Message, now: float) -> list[DecodeEffect]:
        """Takes one message of a dialled peer. A breach ends only the session that the message was about."""
        if name in self.prefill_peers.peers:
            try:
                self._receive(name, message, now)
            except RemoteProtocolError as error:
                self.prefill_peers.breach(name, getattr(message, "session", 0), str(error), now)
        return self._effects(now)

    def _receive(self, name: str, message: Message, now: float) -> None:
        match message:
            case Welcome() | Reject() | Pong() | Goodbye():
                self.prefill_peers.receive(name, message, now)
                if isinstance(message, Welcome):
                    self._on_group(self.prefill_peers.resolve(name, now), now)
            case Registered() | Granted() | Landed() | Failed() | Drained():
                session = self.prefill_peers.session_of(name, message.session)
                if session is None:
                    self._out.append(Send(name, Reject(message.session, "unknown_session", ())))
                    return
                self.prefill_peers.mark_seen(session, now)
                if isinstance(message, Registered):
                    self.prefill_peers.registered(session, message)
                    self.leases.ready(session, now)
                else:
                    self._on_grant_message(session, message, now)
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is not a message from prefill to decode")

    def _on_grant_message(
        self, session: SessionRecord, message: Granted | Landed | Failed | Drained, now: float
    ) -> None:
        if message.grant >= session.next_grant:
            text = f"{message.grant} was never granted, the next is {session.next_grant}"
            raise RemoteProtocolError(f"{type(message).__name__}.grant", text)
        lease = session.leases.get(message.grant)
        if isinstance(message, Granted):
            if lease is not None:
                lease.confirmed = True
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
        self._connect(session.peer)  # its window may have a free slot again

    def _landed(self, lease: LeaseEntry, message: Landed, room: RoomRecord | None, now: float) -> str:
        """Checks a Landed message and begins what follows it; returns what is wrong with it, or an empty text. The
        room, unless it has ended, is READY after its last grant once nothing is left to verify or copy."""
        lease.check(message)
        if room is None:
            self._landed_too_late(lease, now)
            return ""
        room.aux = room.aux or message.aux
        if wrong := self.post_landing.landed(room, lease, message.checksum):
            return wrong
        if lease.session in room.staged:
            self._next_piece(room, [lease.session])
        elif not room.staged and all(other is lease or other.state is Lease.ENDED for other in room.leases):
            if room.post_landing_count:
                room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.LAND)
            else:
                self._ready(room, now)
        return ""

    def _landed_too_late(self, lease: LeaseEntry, now: float) -> None:
        """The room has ended meanwhile. A writer that waits for its next piece is informed again: no Abort of a landed
        grant is repeated, and the first may be lost."""
        if not lease.message.last and lease.message.room not in self.rooms:
            self.withdrawals.put(lease.session.peer, lease.message.room, lease.detail, now, until=lease.deadline)

    # Rooms

    def _fit(self, room: RoomRecord, now: float) -> bool:
        """Greets the room's sources; False if one of them may not be granted, so that the room has failed."""
        for name in room.sources:
            if name not in self.window_slots.rooms and name not in self.unnamed:
                self.prefill_peers.redial(name, now)
        if (unfit := self._unfit(room, now)) is not None:
            self._fail(room, *unfit, now)
        return unfit is None

    def _meet(self, room: RoomRecord, now: float) -> None:
        """The room knows its sources: it waits for a window slot at each of them."""
        if not room.sources:
            room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.CONNECT)
            self.admission.enqueue(room.id, room.demand)
        elif self._fit(room, now):
            self.window_slots.wait(room)
            for name in room.sources:
                self._connect(name)

    def _name_sources(self, room: RoomRecord, now: float) -> None:
        """Gives the room its sources if all its leaders have named their groups."""
        sources = self.prefill_peers.sources_of(room.leaders, now)
        if sources is not None:
            self._named(room)
            room.sources = sources
            self._out += map(Dial, sources)
            self._meet(room, now)

    def _named(self, room: RoomRecord) -> None:
        for leader in room.leaders:
            self.unnamed.pop(leader, room.id)

    def _on_group(self, leader: str, now: float) -> None:
        """The leader's group may have changed after a restart: rooms that wait for its old ranks fail now, and not at
        their deadline."""
        for room in self.window_slots.rooms.at(leader):
            if leader in room.leaders and self.prefill_peers.sources_of(room.leaders, now) not in (None, room.sources):
                self._fail(room, Cause.PEER_RESTARTED, f"{leader} leads another group of ranks now", now)
        for room in self.unnamed.at(leader):
            self._name_sources(room, now)

    def _peers_merged(self, name: str, into: str, now: float) -> None:
        """Two sources are one peer: rooms of the one are rooms of the other."""
        self.window_slots.rename(name, into)
        for room_id, room in self.unnamed.pop_line(name).items():
            self.unnamed.put(into, room_id, room)
        self.withdrawals.rename(name, into)
        for room in [room for room in self.rooms.values() if name in room.sources or name in room.leaders]:
            if room.rename(name, into) and room.state is not DecodeRoom.READY:
                self._fail(room, Cause.PEER_LOST, f"sources: {name} and {into} are one rank", now)

    def _awaited(self, room: RoomRecord) -> str:
        """What a room waits for that is not READY, and from whom."""
        peers = self.prefill_peers.peers
        match room.state:
            case DecodeRoom.CONNECTING:
                missing = [name for name in room.sources if name not in room.reserved]
                if down := [name for name in missing if name not in peers or peers[name].up is None]:
                    return f"no session with prefill is up yet ({', '.join(down)})"
                return f"the window of grants to prefill is full ({', '.join(missing)})"
            case DecodeRoom.QUEUED:
                return f"this node has granted it no memory yet ({len(self.admission)} rooms wait for some)"
            case DecodeRoom.LANDING if room.id in self.staging.line:
                return "this node has no room for its next piece in the staging buffer yet"
            case DecodeRoom.LANDING:
                writers = {lease.session.peer: None for lease in room.leases if lease.state is Lease.GRANTED}
                return f"prefill has not sent all of it yet ({', '.join(writers)})"
            case _:
                return "this node has not verified it or copied it to HBM yet"

    def _connect(self, name: str) -> None:
        """Assigns free slots in this peer's window to the rooms that wait for them."""
        peer = self.prefill_peers.peers.get(name)
        if peer is not None and peer.up is not None:
            for room in self.window_slots.assign(peer.up):
                room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.CONNECT)
                self.admission.enqueue(room.id, room.demand)

    def _withdraw(self, now: float) -> None:
        """Informs sources of the rooms that were given up before their Grant: by Abort, in window slots that no room
        waits for. Where there can be no session, by Hello."""
        for name in self.withdrawals.rooms.peers:
            peer = self.prefill_peers.peers.get(name)
            if peer is not None and peer.refusal is not None and peer.session is None and self.withdrawals.is_new(name):
                self.prefill_peers.greet_soon(peer, now)
            while peer is not None and peer.up is not None and peer.up.has_window_slot:
                taken = self.withdrawals.take(name, now)
                if taken is None:
                    break
                self.leases.withdraw(taken.room, peer.up, taken.detail, now)
                for member in (self.prefill_peers.group_of(name, now) or ()) if taken.whole_group else ():
                    if member != name:
                        self.withdrawals.put(member, taken.room, taken.detail, now, until=taken.until)
                        self._out.append(Dial(member))
                        self.prefill_peers.redial(member, now)

    def _admit(self, now: float) -> None:
        while True:
            while (refused := self.window_slots.refused()) is not None:  # a failure below may free its window slot
                self._fail(*refused, now)
            if len(self.admission):
                self.prefix_publish.publish_all()
                self._refuse_rests(now)
            if (head := self.admission.head()) is None:
                return
            room = self.rooms[head]
            if (unfit := self._unfit(room, now)) is not None:
                self._fail(room, *unfit, now)
                continue
            holding = self.admission.admit(now, room.holding)
            if holding is None:
                return
            room.state, room.holding = step(DECODE_ROOM, room.state, DecodeRoomEvent.ADMIT), holding
            room.prefix = room.prefix or holding.prefix
            sessions = list(room.reserved.values())
            room.unreserve()
            if text := too_many_extents(sessions, holding):
                self._fail(room, Cause.FULL, text, now)
            else:
                assert room.sources or rest_refusal(room, room.prefix) is None, "no block was given up since then"
                self._out.append(RoomLeased(room.id))
                self._grant(room, holding, sessions, now)

    def _refuse_rests(self, now: float) -> None:
        """Fails the rooms that wait for slots, and of whose prompts too much is left since blocks were given up."""
        if self._evicted_blocks == self.cache.evicted_blocks:
            return
        self._evicted_blocks = self.cache.evicted_blocks
        for room_id in self.admission.queued:
            room = self.rooms[room_id]
            if not room.sources and (refused := rest_refusal(room, self.admission.cached(room.demand))) is not None:
                self._fail(room, refused.cause, refused.detail, now)

    def _grant(self, room: RoomRecord, holding: Holding, sessions: Sequence[SessionRecord], now: float) -> None:
        """The room has its slots: grants them to its sources, those that stage piece by piece."""
        if not room.sources:
            self._ready(room, now)
            return
        room.stop = room.prefix
        room.staged = tuple([session for session in sessions if session.stages_rows_of(holding)])
        for session in sessions:
            if session not in room.staged:
                self.leases.grant(room, session, room.whole, verify=self._verify, now=now)
        if room.staged and room.prefix < room.tokens:
            self._grant_piece(room, self.staging.begin(room), now)
        elif room.staged:  # windows and states alone
            self._next_piece(room, room.staged)

    def _next_piece(self, room: RoomRecord, sessions: Sequence[SessionRecord]) -> None:
        """These sessions may have the next piece, and keep their window slots for it. When all of them may, the room
        waits for slots of the staging buffer."""
        for session in sessions:
            room.reserve(session)
        if len(room.reserved) == len(room.staged):
            self.staging.line[room.id] = room

    def _stage(self, now: float) -> bool:
        """Grants the next pieces of rooms that wait for the staging buffer, the oldest first. Returns True where a room
        has failed, which may have freed what others wait for."""
        waiting, failed = set[str](), False
        for room in list(self.staging.line.values()):
            if any(session.peer in waiting for session in room.staged):
                continue  # rooms of one peer keep their order, too
            if (unfit := self._unfit(room, now)) is not None:
                self._fail(room, *unfit, now)
                failed = True
            elif peers := self.staging.waits_for(room):
                waiting |= peers
            elif (piece := self.staging.next(room)) is None:
                break
            else:
                del self.staging.line[room.id]
                failed |= not self._grant_piece(room, piece, now)
        return failed

    def _grant_piece(self, room: RoomRecord, piece: RoomPiece, now: float) -> bool:
        """Grants a piece to each source that stages; returns False where the room has failed instead."""
        assert room.holding is not None
        room.unreserve()
        sessions, room.stop = room.staged, piece.stop
        text = too_many_extents(sessions, room.holding, piece.staged)
        if text:
            self._fail(room, Cause.FULL, text, now)
        else:
            if piece.stop == room.tokens:
                room.staged = ()
            for session in sessions:
                self.leases.grant(room, session, piece, verify=self._verify, now=now)
        self.staging.drop(piece.staged)
        return not text

    def _unfit(self, room: RoomRecord, now: float) -> tuple[Cause, str] | None:
        """Why one of the room's sources may not be granted now; None if all may."""
        for source in room.sources:
            if (refusal := self.prefill_peers.unfit(source, now, self.arena.slot_bytes)) is not None:
                return refusal
        return None

    def _ready(self, room: RoomRecord, now: float) -> None:
        assert room.holding is not None
        room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.COMPLETE)
        self.admission.landed(room.demand, room.holding)
        self.prefill_peers.timers.clear(("room", room.id, 0))
        if room.sources:  # else its engine has yet to compute the rest of the prompt
            self.prefix_publish.add(room, now)
        slots = room.slots_of(self.arena.components)
        self._out.append(
            RoomReady(room.id, slots, room.aux, sum([lease.kv_bytes for lease in room.leases]), room.prefix)
        )
        if self.arena.engine_slots:
            room.state = step(DECODE_ROOM, room.state, DecodeRoomEvent.RELEASE)
            self._close(room)

    def _room_of(self, lease: LeaseEntry) -> RoomRecord | None:
        """The room that this lease may still complete or fail: the one that holds it and is LANDING."""
        room = self.rooms.get(lease.message.room)
        landing = room is not None and room.state is DecodeRoom.LANDING and lease in room.leases
        return room if landing and lease.state is Lease.GRANTED else None

    def _fail(self, room: RoomRecord, cause: Cause, detail: str, now: float) -> None:
        """Ends a room that is not READY: its client is informed now, its leases end later."""
        before = room.state
        room.state = step(DECODE_ROOM, before, DecodeRoomEvent.FAIL)
        self.window_slots.leave(room)
        self.staging.line.pop(room.id, None)
        self._named(room)
        self.admission.withdraw(room.id)
        if before in (DecodeRoom.LANDING, DecodeRoom.SETTLING):
            assert room.holding is not None
            self.admission.landed(room.demand, room.holding)
        self.post_landing.stop(room)
        self._out.append(RoomFailed(room.id, cause, detail[:TEXT_LENGTH_MAX]))
        reason = reason_of(cause, detail)
        for lease in room.leases:
            self.leases.abort(lease, reason, now)
        self._close(room)
        self.withdrawals.add(room, reason, now)
        for source in room.sources:
            self._connect(source)

    def _close(self, room: RoomRecord) -> None:
        del self.rooms[room.id]
        self.prefill_peers.timers.clear(("room", room.id, 0))
        if room.holding is not None:
            self.cache.drop(room.holding)

    # Reports of prefill peers

    def _session_lost(self, session: SessionRecord, cause: Cause, detail: str, now: float) -> None:
        if session.bytes_ready or self.prefill_peers.peers[session.peer].refusal is None:  # else PeerRefused reports it
            self._out.append(SessionLost(session.id, detail, session.parted))
        for room in [room for room in self.rooms.values() if room.uses(session)]:
            self._fail(room, cause, detail, now)
        self.leases.quarantine(session)
        if session.state is SessionState.FENCING and cause is not Cause.PEER_RESTARTED:
            for lease in session.leases.values():
                if not lease.confirmed:  # neither its Grant nor its Abort may have arrived, and none is repeated
                    self.withdrawals.put(session.peer, lease.message.room, reason_of(cause, detail), now)

    def _quiet(self, session: SessionRecord) -> None:
        self.leases.quiet(session)

    def _peer_unreachable(self, peer: PeerRecord, cause: Cause, detail: str, now: float) -> None:
        for room in [*self.window_slots.rooms.at(peer.name), *self.unnamed.at(peer.name)]:
            self._fail(room, cause, detail, now)

    def _effects(self, now: float) -> list[DecodeEffect]:
        """Returns the effects so far. Slots are leased first, since any call may have freed some."""
        self._admit(now)
        while self.staging.line and self._stage(now):
            self._admit(now)
        if self.withdrawals.rooms:
            self._withdraw(now)
        out = [*self._out, *map(RoomDrained, self.arena.drained)]
        self._out.clear()
        self.arena.drained.clear()
        return out

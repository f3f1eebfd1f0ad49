"""Planted bugs, one for each defence: with the defence gone the simulator has to find it within so many seeds.

A mutant patches the code through `patch(owner, name, value)`, so that a test can take it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pdtransfer import effects as fx
from pdtransfer.admission import Admission
from pdtransfer.arena import Block, Holding
from pdtransfer.errors import Cause
from pdtransfer.lease import Duty, DutyEvent, Lease, LeaseEvent
from pdtransfer.prefix import PrefixCache
from pdtransfer.room import DECODE_ROOM, DecodeRoom, DecodeRoomEvent, PrefillRoom
from pdtransfer.routed import Leg
from pdtransfer.routing import Routing
from pdtransfer.service import Service
from pdtransfer.session import links
from pdtransfer.session.coverage import Coverage
from pdtransfer.session.decode import DecodeSessions
from pdtransfer.session.duties import DutyEntry, WriterSession, WriterState
from pdtransfer.session.grants import Grants
from pdtransfer.session.leases import Leases
from pdtransfer.session.ledger import LeaseEntry, Session, SessionState
from pdtransfer.session.links import Links
from pdtransfer.session.lives import Lives
from pdtransfer.session.prefill import PrefillSessions
from pdtransfer.session.verify import Verifications
from pdtransfer.session.writers import Writers
from pdtransfer.wire import Begun, Drained, End, Failed, Landed, Pong, Tokens
from pdtransfer.workers import Worker, Workers

Patch = Callable[[object, str, Any], None]


def free_at_the_deadline(patch: Patch) -> None:
    """A room that is given up frees its slots at once, as if a timeout were a proof."""

    def abort(self: Leases, lease: LeaseEntry, now: float) -> None:
        if lease.state is not Lease.ENDED:
            self._end(lease, LeaseEvent.FENCE)

    patch(Leases, "abort", abort)


def drained_sent_early(patch: Patch) -> None:
    """The writer says that it has stopped while a write is in flight."""

    def stop(self: DutyEntry, event: DutyEvent) -> None:
        self.step(event)

    patch(DutyEntry, "stop", stop)


def ended_grants_forgotten(patch: Patch) -> None:
    """A number whose end was acknowledged is as good as new."""
    patch(WriterSession, "known_end", lambda self, number: False)


def late_message_revives_room(patch: Patch) -> None:
    """A room that has failed stays findable, and Landed makes it READY."""
    failed: dict[int, object] = {}
    close = DecodeSessions._close

    def keep(self: DecodeSessions, room: Any) -> None:
        failed[room.id] = room
        if room.id in self.rooms:
            close(self, room)

    def room_of(self: DecodeSessions, lease: LeaseEntry) -> Any:
        room = self.rooms.get(lease.message.room) or failed.get(lease.message.room)
        return room if room is not None and lease in room.leases else None

    patch(DecodeSessions, "_close", keep)
    patch(DecodeSessions, "_room_of", room_of)
    patch(DECODE_ROOM, (DecodeRoom.FAILED, DecodeRoomEvent.COMPLETE), DecodeRoom.READY)
    patch(DECODE_ROOM, (DecodeRoom.FAILED, DecodeRoomEvent.FAIL), DecodeRoom.FAILED)


def silence_taken_for_a_fence(patch: Patch) -> None:
    """A peer that says nothing is taken for dead, and for quiet."""
    quarantine = Leases.quarantine

    def end_all(self: Leases, session: Session) -> None:
        quarantine(self, session)
        self.quiet(session)

    patch(Leases, "quarantine", end_all)


def new_incarnation_taken_for_a_fence(patch: Patch) -> None:
    """The process that wrote is gone, so its leases end; but its child writes on."""
    lost = DecodeSessions._session_lost

    def end_all(self: DecodeSessions, session: Session, cause: Cause, detail: str, now: float) -> None:
        lost(self, session, cause, detail, now)
        if cause is Cause.PEER_RESTARTED:
            self.leases.quiet(session)

    patch(DecodeSessions, "_session_lost", end_all)


def pages_reused_when_the_room_fails(patch: Patch) -> None:
    """Prefill gives its pages back when the room has ended, whatever still reads them."""

    def drain(self: PrefillSessions, room: Any) -> None:
        if room.id in self.rooms and room.state.value in ("failed", "landed"):
            del self.rooms[room.id]
            self._out.append(fx.Drained(room.id))

    patch(PrefillSessions, "_drain_if_quiet", drain)


def one_queue_for_all_peers(patch: Patch) -> None:
    """The oldest room waits for its peer at the head of everybody's queue."""
    connect = DecodeSessions._connect

    def in_order(self: DecodeSessions, name: str) -> None:
        waiting = [room for room in self.rooms.values() if room.state is DecodeRoom.CONNECTING]
        for room in waiting:
            if any(self.links.peers[source].up is None for source in room.sources):
                return
            connect(self, room.sources[0])

    def unreachable(self: DecodeSessions, *_: object) -> None:
        """Nor does a silent peer's room fail before its deadline."""

    patch(DecodeSessions, "_connect", in_order)
    patch(DecodeSessions, "_peer_unreachable", unreachable)
    patch(Links, "unfit", lambda self, name, now, arena_bytes: None)


def claimed_blocks_evicted(patch: Patch) -> None:
    """A block is given up though rooms read it: who claims it is not asked."""

    def claim(self: PrefixCache, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.claims += 1

    patch(PrefixCache, "_claim", claim)


def blocks_go_with_the_first_room(patch: Patch) -> None:
    """The first of some rooms that share a block to go gives its slots back."""
    drop = PrefixCache.drop

    def drop_all(self: PrefixCache, holding: Holding) -> bool:
        if holding.claims == 1:
            for block in holding.blocks:
                block.claims = min(block.claims, 1)
        return drop(self, holding)

    patch(PrefixCache, "drop", drop_all)


def shared_before_ready(patch: Patch) -> None:
    """A prompt enters the cache when its slots are leased: the next one reads what has not landed."""
    admit = Admission.admit

    def and_keep(self: Admission, now: float) -> Holding | None:
        keys = next(iter(self._queue.values())).keys
        holding = admit(self, now)
        if holding is not None:
            self._cache.keep(holding, keys)
        return holding

    patch(Admission, "admit", and_keep)


def keys_without_what_comes_before(patch: Patch) -> None:
    """A block is known by its own tokens alone."""
    module = sys.modules[PrefixCache.__module__]
    whole = module.block_keys

    def alone(root: bytes, prompt: bytes, *, block_tokens: int, blocks_max: int) -> tuple[bytes, ...]:
        size = 4 * block_tokens
        blocks = [prompt[at : at + size] for at in range(0, len(prompt) // size * size, size)]
        return sum((whole(root, block, block_tokens=block_tokens, blocks_max=blocks_max) for block in blocks), ())

    patch(module, "block_keys", alone)


def landed_is_not_drained(patch: Patch) -> None:
    """Decode that has given a grant up waits for Drained, and Landed is none."""
    proof = Leases.proof

    def strict(self: Leases, session: Session, number: int) -> None:
        lease = session.leases.get(number)
        if lease is None or lease.state is Lease.GRANTED:
            proof(self, session, number)

    patch(Leases, "proof", strict)


def failed_taken_for_a_proof(patch: Patch) -> None:
    """Failed ends the lease, whether or not its writes have ended."""
    of_grant = DecodeSessions._of_grant

    def hasty(self: DecodeSessions, session: Session, message: Any, now: float) -> None:
        of_grant(self, session, message, now)
        if isinstance(message, Failed):
            self.leases.proof(session, message.grant)

    patch(DecodeSessions, "_of_grant", hasty)


def released_only_once(patch: Patch) -> None:
    """An end that comes a second time is not answered: it has been."""
    proof = Leases.proof

    def once(self: Leases, session: Session, number: int) -> None:
        if number in session.leases:
            proof(self, session, number)

    patch(Leases, "proof", once)


def ends_said_once(patch: Patch) -> None:
    """Landed, Failed and Drained are not repeated."""
    say = Grants.say

    def once(self: Grants, duty: DutyEntry, now: float) -> None:
        say(self, duty, now)
        self._timers.clear(("end", duty.session.id, duty.number))

    patch(Grants, "say", once)


def abort_said_once(patch: Patch) -> None:
    """Abort is not repeated."""
    repeat = Leases.repeat

    def once(self: Leases, lease: LeaseEntry, now: float) -> None:
        repeat(self, lease, now)
        if lease.state is not Lease.GRANTED:
            self._links.timers.clear(("lease", lease.session.id, lease.message.grant))

    patch(Leases, "repeat", once)


def grant_said_once(patch: Patch) -> None:
    """Grant is not repeated."""
    repeat = Leases.repeat

    def once(self: Leases, lease: LeaseEntry, now: float) -> None:
        if lease.state is not Lease.GRANTED or not lease.repeat_ms:
            repeat(self, lease, now)

    patch(Leases, "repeat", once)


def abort_of_an_unknown_grant_forgotten(patch: Patch) -> None:
    """An Abort that comes before its Grant is answered, and nothing is kept of it."""

    def refuse(self: Grants, session: WriterSession, number: int, now: float) -> None:
        self._out(fx.Send(session.peer, Drained(session.id, number)))

    patch(Grants, "refuse", refuse)


def window_unheeded_by_decode(patch: Patch) -> None:
    """Decode grants as many as it likes."""
    patch(Session, "has_place", property(lambda self: True))


def window_unheeded_by_prefill(patch: Patch) -> None:
    """Prefill takes a Grant of any number."""
    patch(WriterSession, "outside", lambda self, number: False)


def condemned_taken_for_quiet(patch: Patch) -> None:
    """A session that is condemned is free at once: nobody asks for the kernel's proof."""
    condemn = Links.condemn

    def quiet(self: Links, session: Session, cause: Cause, detail: str, now: float) -> None:
        condemn(self, session, cause, detail, now)
        self._quiet(session)

    patch(Links, "condemn", quiet)


def mapping_dropped_under_a_write(patch: Patch) -> None:
    """A closed session's mapping goes at once, and with it the lock that says that somebody can write."""

    def settle(self: Writers, session: WriterSession) -> None:
        if session.state is WriterState.CLOSING:
            self._end(session)

    patch(Writers, "settle", settle)


def unknown_taken_for_failed(patch: Patch) -> None:
    """A write that nobody knows the end of counts as ended."""
    wrote = PrefillSessions.wrote

    def sure(self: PrefillSessions, session: int, write: int, outcome: fx.Outcome, *args: Any, checksum: int) -> Any:
        known = fx.Outcome.FAILED if outcome is fx.Outcome.UNKNOWN else outcome
        return wrote(self, session, write, known, *args, checksum=checksum)

    patch(PrefillSessions, "wrote", sure)


def landed_short(patch: Patch) -> None:
    """Prefill lands a room although a cell is missing."""
    complete = PrefillSessions._complete

    def short(self: PrefillSessions, duty: DutyEntry, room: Any, now: float) -> None:
        if room.state is PrefillRoom.FINISHED and not duty.in_flight:
            duty.written_bytes = duty.kv_bytes
        complete(self, duty, room, now)

    patch(PrefillSessions, "_complete", short)


def landed_bytes_unchecked(patch: Patch) -> None:
    """Prefill lands short and says so, and decode does not look."""
    landed = DecodeSessions._landed

    def blind(self: DecodeSessions, lease: LeaseEntry, message: Landed, *args: Any) -> str:
        return landed(self, lease, replace(message, kv_bytes=lease.kv_bytes), *args)

    def land(self: PrefillSessions, duty: DutyEntry, room: Any, now: float) -> None:
        if duty.state is Duty.ACTIVE and not duty.in_flight and room.state is PrefillRoom.FINISHED:
            self._grants.land(duty, room.aux, now)

    patch(DecodeSessions, "_landed", blind)
    patch(PrefillSessions, "_complete", land)


def landed_before_it_is_written(patch: Patch) -> None:
    """Landed leaves when every cell was offered, not when all are written."""
    complete = PrefillSessions._complete

    def early(self: PrefillSessions, duty: DutyEntry, room: Any, now: float) -> None:
        flying, duty.in_flight = duty.in_flight, 0
        if room.state is PrefillRoom.FINISHED:
            duty.written_bytes = duty.kv_bytes
        complete(self, duty, room, now)
        duty.in_flight = flying

    patch(PrefillSessions, "_complete", early)


def ready_with_the_first_rank(patch: Patch) -> None:
    """A room is READY when one of its ranks has landed."""
    landed = DecodeSessions._landed

    def first(self: DecodeSessions, lease: LeaseEntry, message: Landed, room: Any, now: float) -> str:
        wrong = landed(self, lease, message, room, now)
        if room is not None and room.state is DecodeRoom.LANDING:
            self._ready(room, now)
        return wrong

    patch(DecodeSessions, "_landed", first)


def earlier_lives_heard(patch: Patch) -> None:
    """What a dead process had left on its way is taken for the live one's word."""
    patch(Lives, "late", lambda self, incarnation, now: False)


def quarantine_without_a_cap(patch: Patch) -> None:
    """Who keeps a whole arena in quarantine is granted more."""
    unfit = Links.unfit

    def fit(self: Links, name: str, now: float, arena_bytes: int) -> Any:
        return unfit(self, name, now, 1 << 60)

    patch(Links, "unfit", fit)


def quarantine_counted_for_ever(patch: Patch) -> None:
    """What leaves quarantine stays counted."""
    count = Leases._count
    patch(Leases, "_count", lambda self, lease, sign: count(self, lease, max(sign, 0)))


def place_kept_by_a_failed_room(patch: Patch) -> None:
    """A room that fails in the queue keeps its place in the window."""
    fail = DecodeSessions._fail

    def keep(self: DecodeSessions, room: Any, *args: Any) -> None:
        room.places.clear()
        fail(self, room, *args)

    patch(DecodeSessions, "_fail", keep)


def deadline_as_a_time_of_day(patch: Patch) -> None:
    """Grant carries decode's own clock instead of the time that is left."""
    repeat = Leases.repeat

    def absolute(self: Leases, lease: LeaseEntry, now: float) -> None:
        repeat(self, lease, 0.0) if lease.state is Lease.GRANTED else repeat(self, lease, now)
        if lease.state is Lease.GRANTED and not lease.granted:
            self._links.timers.set(("lease", lease.session.id, lease.message.grant), now + lease.repeat_ms / 1e3)

    patch(Leases, "repeat", absolute)


def restart_of_a_router_unnoticed(patch: Patch) -> None:
    """A router's new process is taken for the old one, its rooms run on."""
    patch(Service, "_stop_all", lambda self, router, cause: None)


def ended_rooms_forgotten(patch: Patch) -> None:
    """A late Begin starts a room again that has ended."""
    begin = Service._begin

    def forgetful(self: Service, router: Any, message: Any, now: float) -> None:
        router.ended.clear()
        begin(self, router, message, now)

    patch(Service, "_begin", forgetful)


def tokens_said_once(patch: Patch) -> None:
    """Tokens and End are not repeated."""

    def silent(self: Service, room: Any, now: float) -> None:
        self._schedule(room, now)

    patch(Service, "_repeat", silent)


def gap_in_tokens_unheeded(patch: Patch) -> None:
    """The router takes tokens that come before those that they follow."""
    tokens = Routing._tokens

    def skip(self: Routing, room: Any, leg: Any, message: Tokens, now: float) -> None:
        room.received = max(room.received, message.first)
        tokens(self, room, leg, message, now)

    patch(Routing, "_tokens", skip)


def retried_after_a_token(patch: Patch) -> None:
    """A room that fails is tried again, whatever its client has seen."""
    second = Routing._second

    def again(self: Routing, room: Any, *args: Any) -> Any:
        received, room.received = room.received, 0
        pair = second(self, room, *args)
        room.received = received
        return pair

    patch(Routing, "_second", again)


def other_side_not_cancelled(patch: Patch) -> None:
    """When a room fails on one worker, the other is left to find out."""
    repeat = Routing._repeat

    def mute(self: Routing, room: Any, leg: Any, now: float) -> None:
        if leg.state is not Leg.CANCELLING:
            repeat(self, room, leg, now)

    patch(Routing, "_repeat", mute)


def end_before_its_tokens(patch: Patch) -> None:
    """The router takes an End although tokens that it counts have not come."""
    end = Routing._end

    def hasty(self: Routing, room: Any, leg: Any, message: End, now: float) -> None:
        end(self, room, leg, replace(message, tokens=min(message.tokens, room.received)), now)

    patch(Routing, "_end", hasty)


def coverage_unchecked(patch: Patch) -> None:
    """A room is granted although its sources leave a plane out."""
    patch(Coverage, "gap", lambda self, sessions: "")


def equal_rows_sent_by_all(patch: Patch) -> None:
    """Every rank that holds a row sends it."""
    share = links.share_of

    def all_of_it(components: Any, holds: Any, tp_rank: int) -> Any:
        return share(components, [replace(each, replica=0, replicas=1) for each in holds], tp_rank)

    patch(links, "share_of", all_of_it)
    patch(Coverage, "gap", lambda self, sessions: "")


def other_ranks_granted_on(patch: Patch) -> None:
    """When one rank fails a room, the grants of the others are left as they are."""
    abort = Leases.abort

    def lone(self: Leases, lease: LeaseEntry, now: float) -> None:
        if len(lease.holding.extents) and lease.message.send_aux:
            abort(self, lease, now)

    patch(Leases, "abort", lone)


def waiting_grants_wait_for_ever(patch: Patch) -> None:
    """A Grant whose room is not opened has no deadline at prefill."""
    place = PrefillSessions._place

    def patient(self: PrefillSessions, duty: DutyEntry, room_id: int, now: float) -> None:
        place(self, duty, room_id, now)
        self._timers.clear(("grant", duty.session.id, duty.number))

    patch(PrefillSessions, "_place", patient)


def silent_decode_kept(patch: Patch) -> None:
    """Prefill keeps the sessions of a decode node that is silent, for ever."""
    patch(Writers, "_depart", lambda self, peer, cause, detail, now: None)


def restart_of_a_worker_unnoticed(patch: Patch) -> None:
    """The router takes a worker's new process for the old one."""

    def pong(self: Workers, worker: Any, message: Pong, now: float) -> None:
        worker.heard = now

    def welcome(self: Workers, worker: Any, message: Any, now: float) -> None:
        worker.identity = None
        known(self, worker, message, now)

    known = Workers._welcome
    patch(Workers, "_pong", pong)
    patch(Workers, "_welcome", welcome)


def ended_labels_forgotten(patch: Patch) -> None:
    """A Grant for a room that has ended at prefill waits for it to be opened."""
    place = PrefillSessions._place

    def forgetful(self: PrefillSessions, duty: DutyEntry, room_id: int, now: float) -> None:
        self._ended.clear()
        place(self, duty, room_id, now)

    patch(PrefillSessions, "_place", forgetful)


def cancel_before_begin_forgotten(patch: Patch) -> None:
    """A Cancel that comes before its Begin is answered, and nothing is kept of it."""
    cancel = Service._cancel

    def forgetful(self: Service, router: Any, message: Any) -> None:
        known = message.room in self._rooms or message.room in router.ended
        cancel(self, router, message)
        if not known:
            del router.ended[message.room]

    patch(Service, "_cancel", forgetful)


def begun_said_once(patch: Patch) -> None:
    """A room that has nothing to say does not ask whether anybody still wants it."""
    repeat = Service._repeat

    def quiet(self: Service, room: Any, now: float) -> None:
        if room.end is not None or room.unacked:
            repeat(self, room, now)
        else:
            self._schedule(room, now)

    patch(Service, "_repeat", quiet)


def unknown_rooms_unanswered(patch: Patch) -> None:
    """What a worker says of a room that the router does not know is not answered."""
    receive = Routing.receive

    def mute(self: Routing, peer: str, message: Any, now: float) -> Any:
        unknown = isinstance(message, Begun | Tokens | End) and message.room not in self._rooms
        return [] if unknown else receive(self, peer, message, now)

    patch(Routing, "receive", mute)


def deaf_writer_not_quarantined(patch: Patch) -> None:
    """Slots whose writer lives, and does not answer Abort, count as in use."""
    repeat = Leases.repeat

    def hopeful(self: Leases, lease: LeaseEntry, now: float) -> None:
        lease.aborted = now
        repeat(self, lease, now)

    patch(Leases, "repeat", hopeful)


def silent_peer_not_fenced(patch: Patch) -> None:
    """Of a peer that is silent nobody asks whether it can still write, until another comes in its place."""
    fence = Links._fence

    def patient(self: Links, session: Session, now: float) -> None:
        if session.state is not SessionState.SILENT:
            fence(self, session, now)

    patch(Links, "_fence", patient)


def granted_before_it_is_ready(patch: Patch) -> None:
    """A Grant is said whether or not its writer has its slots ready."""
    patch(Session, "covers", lambda self, holding: True)


def more_said_ready_than_there_is(patch: Patch) -> None:
    """The writer says that it has the whole arena when it has some of it."""
    mapped = Writers.mapped

    def all_of_it(self: Writers, session_id: int, bytes_ready: int) -> None:
        session = self.sessions.get(session_id)
        mapped(self, session_id, bytes_ready if session is None else session.reach.arena_bytes)

    patch(Writers, "mapped", all_of_it)


def register_said_until_the_first_answer(patch: Patch) -> None:
    """Register ends with the first Registered, and the one that says more may be lost."""
    registered = Links.registered

    def once(self: Links, session: Session, message: Any) -> None:
        registered(self, session, message)
        self.timers.clear(("register", session.id, 0))

    patch(Links, "registered", once)


def held_grants_forgotten(patch: Patch) -> None:
    """A Grant whose slots were not ready is not said when they are."""
    patch(Leases, "ready", lambda self, session, now: None)


def arena_grows_no_more(patch: Patch) -> None:
    """Slots that are backed later are never leased."""
    patch(DecodeSessions, "ready", lambda self, bytes_ready, now: [])


def replaced_by_register(patch: Patch) -> None:
    """A Register ends the session before it, though a dead process may have sent it."""
    register = Writers._open

    def hasty(self: Writers, peer: Any, message: Any, now: float) -> None:
        for other in self._open_of(peer.name):
            self.close(other, Cause.PEER_RESTARTED, "another session", now)
        register(self, peer, message, now)

    patch(Writers, "_open", hasty)


def checksums_not_compared(patch: Patch) -> None:
    """What was read back is right, whatever the writer has said."""
    end = Verifications.end

    def trusting(self: Verifications, session: int, grant: int, checksum: int, detail: str) -> Any:
        said = int.from_bytes(self._open[session, grant].checksum, "little")
        return end(self, session, grant, said, detail)

    patch(Verifications, "end", trusting)


def ready_before_it_is_read(patch: Patch) -> None:
    """A room is READY with its last Landed, while its rows are read back."""
    begin, end = Verifications.begin, Verifications.end

    def uncounted(self: Verifications, room: Any, *args: Any) -> str:
        wrong = begin(self, room, *args)
        room.verifying -= not wrong
        return wrong

    def ended(self: Verifications, session: int, grant: int, *args: Any) -> Any:
        self._open[session, grant].room.verifying += 1
        return end(self, session, grant, *args)

    patch(Verifications, "begin", uncounted)
    patch(Verifications, "end", ended)


def ready_with_the_first_sum(patch: Patch) -> None:
    """A room of several ranks is READY when the first of its grants was read back."""
    end = Verifications.end

    def hasty(self: Verifications, *args: Any) -> Any:
        room, wrong = end(self, *args)
        room.verifying = 0
        return room, wrong

    patch(Verifications, "end", hasty)


def rows_not_claimed_while_they_are_read(patch: Patch) -> None:
    """The slots of a room that fails while it is read back are free at once."""
    begin, end = Verifications.begin, Verifications.end

    def unclaimed(self: Verifications, room: Any, lease: LeaseEntry, checksum: bytes) -> str:
        wrong = begin(self, room, lease, checksum)
        lease.holding.claims -= not wrong
        return wrong

    def ended(self: Verifications, session: int, grant: int, *args: Any) -> Any:
        holding = self._open[session, grant].holding
        holding.claims += 2
        found = end(self, session, grant, *args)
        holding.claims -= 1
        return found

    patch(Verifications, "begin", unclaimed)
    patch(Verifications, "end", ended)


def wrong_rows_taken_for_a_breach(patch: Patch) -> None:
    """One wrong row ends its writer's session, and all its rooms."""
    verified = DecodeSessions.verified

    def strict(self: DecodeSessions, session_id: int, *args: Any) -> Any:
        before, now = self.verifications.mismatched, args[-1]
        effects = verified(self, session_id, *args)
        session = self.links.sessions.get(session_id)
        if self.verifications.mismatched > before and session is not None:
            self.links.condemn(session, Cause.TRANSFER, "wrong rows", now)
        return effects + self._effects(now)

    patch(DecodeSessions, "verified", strict)


def sum_of_the_last_write(patch: Patch) -> None:
    """Landed carries the checksum of the grant's last write alone."""
    wrote = DutyEntry.wrote

    def last(self: DutyEntry, byte_count: int, checksum: int) -> None:
        self.checksum = 0
        wrote(self, byte_count, checksum)

    patch(DutyEntry, "wrote", last)


def leader_dialled_alone(patch: Patch) -> None:
    """The router names one rank of a prefill worker to decode."""
    whole: Any = Worker.endpoints
    patch(Worker, "endpoints", property(lambda self: whole.fget(self)[: 1 if self.role == "prefill" else None]))


def leader_let_in_alone(patch: Patch) -> None:
    """The router names one rank of a decode worker to prefill."""
    patch(Worker, "names", property(lambda self: (self.identity.node,)))


def landed_with_the_first_grant(patch: Patch) -> None:
    """Prefill's room has landed when it has in one rank of a decode worker."""
    attach = PrefillSessions._attach

    def first(self: PrefillSessions, duty: DutyEntry, room: Any, now: float) -> None:
        attach(self, duty, room, now)
        room.grants = len(room.duties)

    patch(PrefillSessions, "_attach", first)


def sent_to_who_drains(patch: Patch) -> None:
    """The router goes on choosing a worker that has said that it drains."""
    there = {"THERE"}
    patch(Worker, "usable", property(lambda self: self.state.name in there and self.load is not None))


def never_tried_again(patch: Patch) -> None:
    """What a worker that drains has refused has failed."""
    patch(Routing, "_second", lambda self, *args: None)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug; to be caught within so many seeds of worlds of that kind, about three times what it took."""

    plant: Callable[[Patch], None]
    kind: str
    seeds: int


MUTANTS: dict[str, Mutant] = {
    "free at the deadline": Mutant(free_at_the_deadline, "quiet", 3),
    "Drained sent early": Mutant(drained_sent_early, "lossy", 6),
    "ended grants forgotten": Mutant(ended_grants_forgotten, "crowded", 75),
    "a late message revives a room": Mutant(late_message_revives_room, "quiet", 3),
    "silence taken for a fence": Mutant(silence_taken_for_a_fence, "rough", 9),
    "a new incarnation taken for a fence": Mutant(new_incarnation_taken_for_a_fence, "deadly", 12),
    "condemned taken for quiet": Mutant(condemned_taken_for_quiet, "deadly", 12),
    "pages reused when the room fails": Mutant(pages_reused_when_the_room_fails, "lossy", 3),
    "claimed blocks evicted": Mutant(claimed_blocks_evicted, "shared", 9),
    "blocks go with the first room": Mutant(blocks_go_with_the_first_room, "shared", 9),
    "shared before READY": Mutant(shared_before_ready, "shared", 3),
    "keys without what comes before": Mutant(keys_without_what_comes_before, "shared", 9),
    "one queue for all peers": Mutant(one_queue_for_all_peers, "isolation", 18),
    "Landed is not Drained": Mutant(landed_is_not_drained, "lossy", 3),
    "Failed taken for a proof": Mutant(failed_taken_for_a_proof, "lossy", 6),
    "Released only once": Mutant(released_only_once, "lossy", 6),
    "ends said once": Mutant(ends_said_once, "lossy", 6),
    "Abort said once": Mutant(abort_said_once, "lossy", 42),
    "Grant said once": Mutant(grant_said_once, "patient", 6),
    "Abort of an unknown grant forgotten": Mutant(abort_of_an_unknown_grant_forgotten, "lossy", 60),
    "window unheeded by decode": Mutant(window_unheeded_by_decode, "quiet", 9),
    "window unheeded by prefill": Mutant(window_unheeded_by_prefill, "lossy", 6),
    "a mapping dropped under a write": Mutant(mapping_dropped_under_a_write, "deadly", 21),
    "an unknown end taken for a failure": Mutant(unknown_taken_for_failed, "lossy", 50),
    "landed short": Mutant(landed_short, "lossy", 6),
    "bytes of Landed unchecked": Mutant(landed_bytes_unchecked, "lossy", 6),
    "Landed before it is written": Mutant(landed_before_it_is_written, "quiet", 3),
    "READY with the first rank": Mutant(ready_with_the_first_rank, "ranks", 6),
    "coverage unchecked": Mutant(coverage_unchecked, "ranks", 6),
    "equal rows sent by all": Mutant(equal_rows_sent_by_all, "ranks", 6),
    "the other ranks granted on": Mutant(other_ranks_granted_on, "ranks", 6),
    "waiting Grants wait for ever": Mutant(waiting_grants_wait_for_ever, "lossy", 48),
    "silent decode kept": Mutant(silent_decode_kept, "deadly", 57),
    "ended labels forgotten": Mutant(ended_labels_forgotten, "patient", 6),
    "Cancel before Begin forgotten": Mutant(cancel_before_begin_forgotten, "fleet", 60),
    "Begun said once": Mutant(begun_said_once, "fleet", 27),
    "unknown rooms unanswered": Mutant(unknown_rooms_unanswered, "fleet", 42),
    "a deaf writer not quarantined": Mutant(deaf_writer_not_quarantined, "deadly", 21),
    "a silent peer not fenced": Mutant(silent_peer_not_fenced, "deadly", 33),
    "earlier lives heard": Mutant(earlier_lives_heard, "restarts", 60),
    "quarantine without a cap": Mutant(quarantine_without_a_cap, "deadly", 60),
    "quarantine counted for ever": Mutant(quarantine_counted_for_ever, "rough", 6),
    "a place kept by a failed room": Mutant(place_kept_by_a_failed_room, "crowded", 6),
    "a deadline as a time of day": Mutant(deadline_as_a_time_of_day, "patient", 3),
    "a router's death unnoticed": Mutant(restart_of_a_router_unnoticed, "fleet", 24),
    "ended rooms forgotten": Mutant(ended_rooms_forgotten, "fleet", 9),
    "Tokens said once": Mutant(tokens_said_once, "fleet", 3),
    "a gap in Tokens unheeded": Mutant(gap_in_tokens_unheeded, "fleet", 6),
    "End before its Tokens": Mutant(end_before_its_tokens, "fleet", 6),
    "retried after a token": Mutant(retried_after_a_token, "fleet", 15),
    "the other side not cancelled": Mutant(other_side_not_cancelled, "fleet", 6),
    "a worker's restart unnoticed": Mutant(restart_of_a_worker_unnoticed, "fleet", 9),
    "granted before it is ready": Mutant(granted_before_it_is_ready, "growing", 3),
    "more said ready than there is": Mutant(more_said_ready_than_there_is, "growing", 9),
    "Register said until the first answer": Mutant(register_said_until_the_first_answer, "growing", 40),
    "held Grants forgotten": Mutant(held_grants_forgotten, "growing", 9),
    "an arena that grows no more": Mutant(arena_grows_no_more, "growing", 3),
    "replaced by Register": Mutant(replaced_by_register, "restarts", 57),
    "the leader dialled alone": Mutant(leader_dialled_alone, "groups", 3),
    "the leader let in alone": Mutant(leader_let_in_alone, "groups", 12),
    "landed with the first grant": Mutant(landed_with_the_first_grant, "groups", 12),
    "sent to who drains": Mutant(sent_to_who_drains, "leaving", 21),
    "never tried again": Mutant(never_tried_again, "leaving", 12),
    "checksums not compared": Mutant(checksums_not_compared, "checked", 15),
    "READY before it is read": Mutant(ready_before_it_is_read, "checked", 6),
    "READY with the first sum": Mutant(ready_with_the_first_sum, "checked", 105),
    "rows not claimed while they are read": Mutant(rows_not_claimed_while_they_are_read, "checked", 63),
    "wrong rows taken for a breach": Mutant(wrong_rows_taken_for_a_breach, "checked", 15),
    "the sum of the last write": Mutant(sum_of_the_last_write, "checked", 6),
}

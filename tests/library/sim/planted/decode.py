"""Defences of decode's sessions, rooms and leases, taken away."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode import prefill_peers
from pdtransfer.handoff.decode.leases import Leases
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.decode.waiting_rooms import Coverage, Withdrawals
from pdtransfer.handoff.liveness import Liveness
from pdtransfer.handoff.states import DECODE_ROOM, DecodeRoom, DecodeRoomEvent, Lease, LeaseEvent, SessionState
from pdtransfer.wire import Drained, Failed, Landed, Message

from . import Patch


def free_at_the_deadline(patch: Patch) -> None:
    """A room that is given up frees its slots at once, as if a timeout were a proof."""

    def abort(self: Leases, lease: LeaseEntry, _detail: str, _now: float) -> None:
        if lease.state is not Lease.ENDED:
            self._end(lease, LeaseEvent.FENCE)

    patch(Leases, "abort", abort)


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

    def end_all(self: Leases, session: SessionRecord) -> None:
        quarantine(self, session)
        self.quiet(session)

    patch(Leases, "quarantine", end_all)


def new_incarnation_taken_for_a_fence(patch: Patch) -> None:
    """The process that wrote is gone, so its leases end; but its child writes on."""
    lost = DecodeSessions._session_lost

    def end_all(self: DecodeSessions, session: SessionRecord, cause: Cause, detail: str, now: float) -> None:
        lost(self, session, cause, detail, now)
        if cause is Cause.PEER_RESTARTED:
            self.leases.quiet(session)

    patch(DecodeSessions, "_session_lost", end_all)


def one_queue_for_all_peers(patch: Patch) -> None:
    """The oldest room waits for its peer at the head of everybody's queue."""
    connect = DecodeSessions._connect

    def in_order(self: DecodeSessions, name: str) -> None:
        waiting = [room for room in self.rooms.values() if room.state is DecodeRoom.CONNECTING]
        for room in waiting:
            if any(self.prefill_peers.peers[source].up is None for source in room.sources):
                return
            connect(self, room.sources[0])

    def unreachable(self: DecodeSessions, *_: object) -> None:
        """Nor does a silent peer's room fail before its deadline."""

    patch(DecodeSessions, "_connect", in_order)
    patch(DecodeSessions, "_peer_unreachable", unreachable)
    patch(PrefillPeers, "unfit", lambda self, name, now, arena_bytes: None)


def landed_is_not_drained(patch: Patch) -> None:
    """Decode that has given a grant up waits for Drained, and Landed is none."""
    proof = Leases.proof

    def strict(self: Leases, session: SessionRecord, number: int) -> None:
        lease = session.leases.get(number)
        if lease is None or lease.state is Lease.GRANTED:
            proof(self, session, number)

    patch(Leases, "proof", strict)


def failed_taken_for_a_proof(patch: Patch) -> None:
    """Failed ends the lease, whether or not its writes have ended."""
    on_grant_message = DecodeSessions._on_grant_message

    def hasty(self: DecodeSessions, session: SessionRecord, message: Any, now: float) -> None:
        on_grant_message(self, session, message, now)
        if isinstance(message, Failed):
            self.leases.proof(session, message.grant)

    patch(DecodeSessions, "_on_grant_message", hasty)


def released_only_once(patch: Patch) -> None:
    """An end that comes a second time is not answered: it has been."""
    proof = Leases.proof

    def once(self: Leases, session: SessionRecord, number: int) -> None:
        if number in session.leases:
            proof(self, session, number)

    patch(Leases, "proof", once)


def abort_sent_once(patch: Patch) -> None:
    """Abort is not repeated."""
    repeat = Leases.repeat

    def once(self: Leases, lease: LeaseEntry, now: float) -> None:
        repeat(self, lease, now)
        if lease.state is not Lease.GRANTED:
            self._peers.timers.clear(("lease", lease.session.id, lease.message.grant))

    patch(Leases, "repeat", once)


def grant_sent_once(patch: Patch) -> None:
    """Grant is not repeated."""
    repeat = Leases.repeat

    def once(self: Leases, lease: LeaseEntry, now: float) -> None:
        if lease.state is not Lease.GRANTED or not lease.repeat_ms:
            repeat(self, lease, now)

    patch(Leases, "repeat", once)


def window_unheeded_by_decode(patch: Patch) -> None:
    """Decode grants as many as it likes."""
    patch(SessionRecord, "has_window_slot", property(lambda self: True))


def condemned_taken_for_quiet(patch: Patch) -> None:
    """A session that is condemned is free at once: nobody asks for the kernel's proof."""
    condemn = PrefillPeers.condemn

    def quiet(self: PrefillPeers, session: SessionRecord, cause: Cause, detail: str, now: float) -> None:
        condemn(self, session, cause, detail, now)
        self._quiet(session)

    patch(PrefillPeers, "condemn", quiet)


def ready_with_the_first_rank(patch: Patch) -> None:
    """A room is READY when one of its ranks has landed."""
    landed = DecodeSessions._landed

    def first(self: DecodeSessions, lease: LeaseEntry, message: Landed, room: Any, now: float) -> str:
        wrong = landed(self, lease, message, room, now)
        if room is not None and room.state is DecodeRoom.LANDING:
            self._ready(room, now)
        return wrong

    patch(DecodeSessions, "_landed", first)


def earlier_lives_believed(patch: Patch) -> None:
    """What a dead process had left on its way is taken for a message of the live one."""
    patch(Liveness, "late", lambda self, incarnation, now: False)


def quarantine_without_a_cap(patch: Patch) -> None:
    """Who keeps a whole arena in quarantine is granted more."""
    unfit = PrefillPeers.unfit

    def fit(self: PrefillPeers, name: str, now: float, arena_bytes: int) -> Any:
        return unfit(self, name, now, 1 << 60)

    patch(PrefillPeers, "unfit", fit)


def quarantine_counted_forever(patch: Patch) -> None:
    """What leaves quarantine stays counted."""
    count = Leases._count
    patch(Leases, "_count", lambda self, lease, sign: count(self, lease, max(sign, 0)))


def place_kept_by_a_failed_room(patch: Patch) -> None:
    """A room that fails in the queue keeps its place in the window."""
    fail = DecodeSessions._fail

    def keep(self: DecodeSessions, room: Any, *args: Any) -> None:
        room.reserved.clear()
        fail(self, room, *args)

    patch(DecodeSessions, "_fail", keep)


def given_up_before_its_grant_untold(patch: Patch) -> None:
    """Prefill learns nothing of a room that fails before its Grant."""
    patch(Withdrawals, "add", lambda self, room, detail, now: None)


def given_up_at_its_deadline_untold(patch: Patch) -> None:
    """Prefill learns nothing of a room whose deadline at decode is over: its own may be later."""
    add = Withdrawals.add

    def silent(self: Withdrawals, room: Any, detail: str, now: float) -> None:
        if now < room.deadline:
            add(self, room, detail, now)

    patch(Withdrawals, "add", silent)


def deadline_as_a_time_of_day(patch: Patch) -> None:
    """Grant carries decode's own clock instead of the time that is left."""
    repeat = Leases.repeat

    def absolute(self: Leases, lease: LeaseEntry, now: float) -> None:
        repeat(self, lease, 0.0) if lease.state is Lease.GRANTED else repeat(self, lease, now)
        if lease.state is Lease.GRANTED and not lease.confirmed:
            self._peers.timers.set(("lease", lease.session.id, lease.message.grant), now + lease.repeat_ms / 1e3)

    patch(Leases, "repeat", absolute)


def coverage_unchecked(patch: Patch) -> None:
    """A room is granted although its sources leave a plane out."""
    patch(Coverage, "gap", lambda self, sessions: "")


def equal_rows_sent_by_all(patch: Patch) -> None:
    """Every rank that holds a row sends it."""
    share = prefill_peers.share_of

    def all_of_it(components: Any, holds: Any, tp_rank: int) -> Any:
        return share(components, [replace(hold, replica=0, replicas=1) for hold in holds], tp_rank)

    patch(prefill_peers, "share_of", all_of_it)
    patch(Coverage, "gap", lambda self, sessions: "")


def other_ranks_granted_on(patch: Patch) -> None:
    """When one rank fails a room, the grants of the others are left as they are."""
    abort = Leases.abort

    def lone(self: Leases, lease: LeaseEntry, detail: str, now: float) -> None:
        if len(lease.holding.extents) and lease.message.send_aux:
            abort(self, lease, detail, now)

    patch(Leases, "abort", lone)


def deaf_writer_not_quarantined(patch: Patch) -> None:
    """Slots whose writer lives, and does not answer Abort, count as in use."""
    repeat = Leases.repeat

    def hopeful(self: Leases, lease: LeaseEntry, now: float) -> None:
        lease.aborted = now
        repeat(self, lease, now)

    patch(Leases, "repeat", hopeful)


def silent_leases_forgotten_by_a_drain(patch: Patch) -> None:
    """A node is idle although it has leased slots to a peer that is silent."""

    def idle(self: DecodeSessions) -> bool:
        sessions = self.prefill_peers.sessions.values()
        leases = any(session.leases for session in sessions if session.state is not SessionState.SILENT)
        return not self.rooms and not leases and not self.post_landing

    patch(DecodeSessions, "idle", property(idle))


def silent_peer_not_fenced(patch: Patch) -> None:
    """Of a peer that is silent nobody asks whether it can still write, until another comes in its place."""
    fence = PrefillPeers._fence

    def patient(self: PrefillPeers, session: SessionRecord, now: float) -> None:
        if session.state is not SessionState.SILENT:
            fence(self, session, now)

    patch(PrefillPeers, "_fence", patient)


def ends_of_an_old_session_heeded(patch: Patch) -> None:
    """Landed and Drained on a session that is over count for the grant of that number on the current one."""
    receive = DecodeSessions._receive

    def current(self: DecodeSessions, name: str, message: Message, now: float) -> None:
        session = self.prefill_peers.peers[name].session
        if isinstance(message, Landed | Drained) and session is not None and message.grant in session.leases:
            message = replace(message, session=session.id)
        receive(self, name, message, now)

    patch(DecodeSessions, "_receive", current)

"""Defences of the staging buffer, taken away: what claims its slots, who waits for them, and the order of pieces."""

from __future__ import annotations

from typing import Any

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode.leases import Leases
from pdtransfer.handoff.decode.post_landing import LandedGrant, PostLanding
from pdtransfer.handoff.decode.records import LeaseEntry, RoomPiece, RoomRecord, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.decode.staging import StagingBuffer
from pdtransfer.handoff.decode.waiting_rooms import Withdrawals
from pdtransfer.handoff.effects import Settle
from pdtransfer.handoff.prefill.cells import OpenRoom
from pdtransfer.handoff.prefill.records import WriterGrant, WriterSession
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.handoff.states import WRITER_GRANT_ENDS
from tests.library.sim.lifts import Lifter, Rows

from . import Patch


def reused_before_its_copy_has_ended(patch: Patch) -> None:
    """Slots of the buffer go to another room when their lease ends, while they are copied up."""
    _unclaimed(patch, lifts=True)


def reused_before_its_check_has_ended(patch: Patch) -> None:
    """The same, while they are read back."""
    _unclaimed(patch, lifts=False)


def _unclaimed(patch: Patch, *, lifts: bool) -> None:
    begin, end, landed_staged = PostLanding._begin, PostLanding._end, dict[LandedGrant, Any]()

    def unclaimed(self: PostLanding, landed: LandedGrant) -> None:
        begin(self, landed)
        if bool(landed.order.targets) is lifts:
            landed_staged[landed] = landed.lease.staged
            self._staging.drop(landed.lease.staged)

    def ended(self: PostLanding, landed: LandedGrant) -> None:
        if landed in landed_staged:
            landed.lease.staged = None
        end(self, landed)

    patch(PostLanding, "_begin", unclaimed)
    patch(PostLanding, "_end", ended)


def free_between_check_and_copy(patch: Patch) -> None:
    """The claim of a check ends before that of the copy begins."""
    settled, lift = PostLanding.settled, PostLanding.lift

    def unclaimed(self: PostLanding, session: int, grant: int, checksum: int, detail: str) -> tuple[RoomRecord, str]:
        landed = self._open[session, grant]
        if landed.order.targets:
            return settled(self, session, grant, checksum, detail)
        self._staging.drop(landed.lease.staged)
        staged, landed.lease.staged = landed.lease.staged, None

        def late(self: PostLanding, room: RoomRecord, lease: LeaseEntry) -> None:
            lease.staged = staged
            lift(self, room, lease)
            lease.staged = None

        PostLanding.lift = late
        try:
            return settled(self, session, grant, checksum, detail)
        finally:
            PostLanding.lift = lift
            landed.lease.staged = staged

    patch(PostLanding, "settled", unclaimed)


def reported_before_it_is_copied(patch: Patch) -> None:
    """A copy counts as ended when its last piece was queued, and the card has not passed it."""
    following = Lifter._next

    def hasty(self: Lifter, order: Settle, pieces: list[Rows], each: float, *, fails: bool) -> None:
        node = self._node
        if pieces and (order.session, order.grant) in node.settling and not fails:
            del node.settling[order.session, order.grant]
            node.perform(node.core.settled(order.session, order.grant, 0, "", node.clock))
        elif not pieces and (order.session, order.grant) not in node.settling:
            return
        following(self, order, pieces, each, fails=fails)

    patch(Lifter, "_next", hasty)


def freed_on_abort(patch: Patch) -> None:
    """A room that is given up returns its slots of the buffer at once, without the writer's proof."""
    abort = Leases.abort

    def at_once(self: Leases, lease: LeaseEntry, detail: str, now: float) -> None:
        staged, lease.staged = lease.staged, None
        self._staging.drop(staged)
        abort(self, lease, detail, now)

    patch(Leases, "abort", at_once)


def freed_with_a_silent_peer(patch: Patch) -> None:
    """Slots of the buffer that a lost peer may still write are free before its fence."""
    condemn = Leases._condemn

    def at_once(self: Leases, lease: LeaseEntry) -> None:
        condemn(self, lease)
        staged, lease.staged = lease.staged, None
        self._staging.drop(staged)

    patch(Leases, "_condemn", at_once)


def piece_skipped(patch: Patch) -> None:
    """Decode goes on behind the piece that was due, and prefill takes it."""
    patch(OpenRoom, "misplaced", lambda self, message: "")
    following = StagingBuffer.next

    def skipping(self: StagingBuffer, room: RoomRecord) -> RoomPiece | None:
        stop = self._stop(room)
        if stop < room.tokens and room.stop > room.prefix:
            room.stop = stop
        return following(self, room)

    patch(StagingBuffer, "next", skipping)


def piece_out_of_order(patch: Patch) -> None:
    """A piece is granted with the rows of the one before it."""
    following = StagingBuffer.next

    def again(self: StagingBuffer, room: RoomRecord) -> RoomPiece | None:
        piece = following(self, room)
        before = [lease.message for lease in room.leases if lease.message.parts]
        if piece is None or not before:
            return piece
        return RoomPiece(prefix=before[-1].prefix, stop=piece.stop, first_rows=piece.first_rows, staged=piece.staged)

    patch(StagingBuffer, "next", again)


def landed_with_the_first_piece(patch: Patch) -> None:
    """Prefill takes each grant for its room's last."""
    patch(WriterGrant, "last", property(lambda self: True))


def window_slot_given_up_between_pieces(patch: Patch) -> None:
    """A room that has landed a piece leaves its window slot to a room that waits for what it has."""
    reserve, following = RoomRecord.reserve, StagingBuffer.next
    owed: dict[RoomRecord, list[SessionRecord]] = {}

    def later(self: RoomRecord, session: SessionRecord) -> None:
        reserve(self, session)
        if self.staged:
            session.reserved -= 1
            owed.setdefault(self, []).append(session)

    def when_there_is_one(self: StagingBuffer, room: RoomRecord) -> RoomPiece | None:
        if not all(session.has_window_slot for session in owed.get(room, ())):
            return None
        for session in owed.pop(room, ()):
            session.reserved += 1
        return following(self, room)

    def unreserve(self: RoomRecord) -> None:
        for session in owed.pop(self, ()):
            session.reserved += 1
        whole(self)

    whole = RoomRecord.unreserve
    patch(RoomRecord, "reserve", later)
    patch(RoomRecord, "unreserve", unreserve)
    patch(StagingBuffer, "next", when_there_is_one)


def granted_before_there_are_rows(patch: Patch) -> None:
    """Slots of the buffer are held for rooms whose engines have computed nothing."""
    offer = OpenRoom.meet

    def at_once(self: OpenRoom, grant: WriterGrant, ranks: int) -> None:
        offer(self, grant, ranks)
        assert self.tokens is not None
        self.offered_tokens = self.tokens

    patch(OpenRoom, "meet", at_once)


def given_up_between_pieces_untold(patch: Patch) -> None:
    """A source that has no grant of a room just then is not told that the room was given up."""
    add = Withdrawals.add

    def untold(self: Withdrawals, room: RoomRecord, detail: str, now: float) -> None:
        if not room.leases:
            add(self, room, detail, now)

    patch(Withdrawals, "add", untold)


def landed_too_late_untold(patch: Patch) -> None:
    """A source whose piece landed while its room was given up has the Abort of that piece alone, which may be lost."""
    patch(DecodeSessions, "_landed_too_late", lambda self, lease, now: None)


def kept_between_pieces_without_a_session(patch: Patch) -> None:
    """A room whose session ends between two pieces waits for the next one."""

    def closed(self: PrefillSessions, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        for grant in list(session.grants.values()):
            self._timers.clear(("end", session.id, grant.number))
            if grant.state not in WRITER_GRANT_ENDS:
                self._fail_grant(grant, cause, detail, now)

    patch(PrefillSessions, "_session_closed", closed)

"""Planted bugs that an edit of the source would not say: each replaces, through a `patch(owner, name, value)` that a
test can take back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdtransfer.handoff.decode.records import LeaseEntry, RoomPiece, RoomRecord, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.decode.staging import StagingBuffer
from pdtransfer.handoff.effects import Settle
from pdtransfer.handoff.states import DECODE_ROOM, DecodeRoom, DecodeRoomEvent
from tests.library.sim.lifts import Lifter, Rows

Patch = Callable[[object, Any, Any], None]


def late_message_revives_a_room(patch: Patch) -> None:
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


def window_slot_given_up(patch: Patch) -> None:
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

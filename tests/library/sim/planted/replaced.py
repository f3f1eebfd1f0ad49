"""Planted bugs that an edit of the source would not say: each replaces, through a `patch(owner, name, value)` that a
test can take back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdtransfer.handoff.decode.records import LeaseEntry
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.states import DECODE_ROOM, DecodeRoom, DecodeRoomEvent

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

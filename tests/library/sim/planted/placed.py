"""Defences of slots that an engine chose, taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdtransfer.handoff.decode import leases, room_request
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.effects import RoomDrained, RoomReady
from pdtransfer.handoff.slot_allocator import Extents, FreeExtents, Holding, SlotAllocator
from pdtransfer.wire import Part

from . import Patch


def drained_when_the_room_fails(patch: Patch) -> None:
    """RoomDrained follows RoomFailed at once: the engine reuses slots that somebody may still write."""
    fail, drop = DecodeSessions._fail, SlotAllocator.drop

    def hasty(self: DecodeSessions, room: Any, *args: Any) -> None:
        fail(self, room, *args)
        self._out.append(RoomDrained(room.id))

    def silent(self: SlotAllocator, holding: Holding) -> bool:
        last = drop(self, holding)
        self.drained.clear()
        return last

    patch(DecodeSessions, "_fail", hasty)
    patch(SlotAllocator, "drop", silent)


def drained_with_the_first_proof(patch: Patch) -> None:
    """RoomDrained of an aborted room of several ranks follows the first of them that has stopped writing."""
    drop = SlotAllocator.drop

    def hasty(self: SlotAllocator, holding: Holding) -> bool:
        before = len(self.drained)
        last = drop(self, holding)
        if holding.chosen_for is not None:
            del self.drained[before:]
            if holding.claims == 1:
                self.drained.append(holding.chosen_for)
        return last

    patch(SlotAllocator, "drop", hasty)


def drained_without_ready(patch: Patch) -> None:
    """An aborted room whose last grant has landed is drained, and its Landed taken for READY as well."""
    original = DecodeSessions._effects

    def revived(self: DecodeSessions, now: float) -> Any:
        effects = original(self, now)
        ended = {effect.room for effect in effects if isinstance(effect, RoomDrained)}
        reported = {effect.room for effect in effects if isinstance(effect, RoomReady)}
        return effects + [RoomReady(room, {}, b"", 0) for room in ended - reported]

    patch(DecodeSessions, "_effects", revived)


def never_drained(patch: Patch) -> None:
    """The slots of a room that was never granted are not given back to the engine."""
    close = DecodeSessions._close

    def keep(self: DecodeSessions, room: Any) -> None:
        granted = bool(room.leases)
        close(self, room)
        if not granted:
            self.arena.drained.clear()

    patch(DecodeSessions, "_close", keep)


def taken_twice(patch: Patch) -> None:
    """Slots of a room that has not drained may be chosen for another."""
    take = FreeExtents.take

    def trusting(self: FreeExtents, extents: Extents) -> bool:
        take(self, extents)
        return True

    patch(FreeExtents, "take", trusting)


def refused_slots_are_kept(patch: Patch) -> None:
    """Of several components of which one is refused the others stay taken."""
    take = SlotAllocator.take

    def leaky(self: SlotAllocator, room: int, extents: tuple[Extents, ...]) -> Holding:
        free = FreeExtents.free
        FreeExtents.free = lambda *_: None
        try:
            return take(self, room, extents)
        finally:
            FreeExtents.free = free

    patch(SlotAllocator, "take", leaky)


def any_slot_is_taken(patch: Patch) -> None:
    """Slots outside the pool are not refused, nor one that is there twice."""
    patch(room_request, "check_slots", lambda slots, limit, field: None)


def granted_before_it_is_backed(patch: Patch) -> None:
    """The engine chose the slots, so they are taken to be ready."""
    covers = SessionRecord.covers

    def trusting(self: SessionRecord, lease: LeaseEntry, ready: int) -> bool:
        return lease.holding.chosen_for is not None or covers(self, lease, ready)

    patch(SessionRecord, "covers", trusting)


def rows_count_from_the_first_slot(patch: Patch) -> None:
    """The first slot is row 0's, though the engine gave slots only to later rows."""
    whole = leases.parts_of

    def from_zero(components: Any, extents: Sequence[Extents], firsts: Sequence[int], **more: Any) -> tuple[Part, ...]:
        return whole(components, extents, [0] * len(firsts), **more)

    patch(leases, "parts_of", from_zero)

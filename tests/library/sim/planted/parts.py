"""Defences of rooms that several prefills write, and of components that describe the same KV, taken away."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pdtransfer.handoff.component_variants import StandIns
from pdtransfer.handoff.decode import prefill_peers, waiting_rooms
from pdtransfer.handoff.decode.leases import Leases
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.slot_allocator import Holding, SlotAllocator
from pdtransfer.handoff.states import DecodeRoom, Lease, LeaseEvent
from pdtransfer.layout.layout import Component

from . import Patch


def ready_with_the_first_source(patch: Patch) -> None:
    """A room of two prefills is READY when one of them has landed."""
    landed = DecodeSessions._landed

    def first(self: DecodeSessions, lease: LeaseEntry, message: Any, room: Any, now: float) -> str:
        wrong = landed(self, lease, message, room, now)
        if not wrong and room is not None and room.state is DecodeRoom.LANDING and not room.post_landing_count:
            self._ready(room, now)
        return wrong

    patch(DecodeSessions, "_landed", first)


def _others(self: Leases, lease: LeaseEntry) -> list[LeaseEntry]:
    """The leases of other sessions on the same slots."""
    sessions = self._peers.sessions.values()
    return [
        other
        for session in sessions
        for other in session.leases.values()
        if other.holding is lease.holding and other is not lease
    ]


def one_proof_taken_for_all(patch: Patch) -> None:
    """One prefill that has stopped writing a room proves that all have."""
    proof = Leases.proof

    def of_all(self: Leases, session: SessionRecord, number: int) -> None:
        lease = session.leases.get(number)
        others = [] if lease is None or lease.state is Lease.GRANTED else _others(self, lease)
        proof(self, session, number)
        for other in others:
            self._end(other, LeaseEvent.PROOF)

    patch(Leases, "proof", of_all)


def one_fence_taken_for_all(patch: Patch) -> None:
    """The fence of one prefill ends the leases of the others on the same rooms."""
    quiet = Leases.quiet

    def of_all(self: Leases, session: SessionRecord) -> None:
        others = [other for lease in session.leases.values() for other in _others(self, lease)]
        quiet(self, session)
        for other in others:
            self._end(other, LeaseEvent.FENCE)

    patch(Leases, "quiet", of_all)


def components_of_sources_not_counted(patch: Patch) -> None:
    """A component that none of a room's prefills has is not missed, and one that two have is sent by both."""
    patch(waiting_rooms, "uncovered", lambda components, shares: "")


def both_of_two_descriptions_sent(patch: Patch) -> None:
    """One prefill sends the pages and another the same KV by token, which decode grants as well."""
    patch(waiting_rooms, "sent_by_both", lambda shares, stand_ins: "")


def pages_asked_of_all(patch: Patch) -> None:
    """No stand-in is used, whoever has nothing else."""

    def originals(components: Sequence[Component], names: Collection[str], stand_ins: StandIns) -> tuple[Any, ...]:
        return tuple(component for component in components if component.name not in stand_ins)

    patch(waiting_rooms, "used_with", originals)
    patch(prefill_peers, "used_with", originals)


def stand_in_used_as_well(patch: Patch) -> None:
    """A prefill that has both sends both."""
    patch(prefill_peers, "used_with", lambda components, names, stand_ins: tuple(components))
    patch(waiting_rooms, "sent_by_both", lambda shares, stand_ins: "")


def slots_of_a_stand_in_free_when_the_room_ends(patch: Patch) -> None:
    """The slots by token are given back with the room, while a writer of them may still be there."""
    close = DecodeSessions._close

    def early(self: DecodeSessions, room: Any) -> None:
        if room.holding is not None and room.leases:
            for index, component in enumerate(self.arena.components):
                if component.name in self.arena.stand_ins:
                    self.arena.free[index].free(room.holding.own[index])
                    own = list(room.holding.own)
                    own[index] = own[index][:0]
                    room.holding.own = tuple(own)
        close(self, room)

    patch(DecodeSessions, "_close", early)


def bytes_of_a_stand_in_counted(patch: Patch) -> None:
    """What is described twice counts twice."""
    take = SlotAllocator.take

    def twice(self: SlotAllocator, room: int, extents: Any) -> Holding:
        holding = take(self, room, extents)
        for component, wanted in zip(self.components, extents, strict=True):
            if component.name in self.stand_ins:
                holding.bytes += component.bytes_of(int(wanted[:, 1].sum()))
        return holding

    patch(SlotAllocator, "take", twice)

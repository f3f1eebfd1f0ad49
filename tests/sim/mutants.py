"""Planted bugs, one for each defence: with the defence gone the simulator has to find it within so many seeds.

A mutant patches the code through `patch(owner, name, value)`, so that a test can take it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdtransfer import effects as fx
from pdtransfer.admission import Admission
from pdtransfer.arena import Block, Holding
from pdtransfer.errors import Cause
from pdtransfer.lease import DutyEvent, Lease, LeaseEvent
from pdtransfer.prefix import PrefixCache
from pdtransfer.room import DECODE_ROOM, DecodeRoom, DecodeRoomEvent
from pdtransfer.session.decode import DecodeSessions
from pdtransfer.session.duties import DutyEntry, WriterSession
from pdtransfer.session.leases import Leases
from pdtransfer.session.ledger import LeaseEntry, Session
from pdtransfer.session.links import Links
from pdtransfer.session.prefill import PrefillSessions

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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug; to be caught within so many seeds of worlds of that kind, about three times what it took."""

    plant: Callable[[Patch], None]
    kind: str
    seeds: int


MUTANTS: dict[str, Mutant] = {
    "free at the deadline": Mutant(free_at_the_deadline, "quiet", 3),
    "Drained sent early": Mutant(drained_sent_early, "lossy", 9),
    "ended grants forgotten": Mutant(ended_grants_forgotten, "crowded", 42),
    "a late message revives a room": Mutant(late_message_revives_room, "quiet", 9),
    "silence taken for a fence": Mutant(silence_taken_for_a_fence, "rough", 9),
    "a new incarnation taken for a fence": Mutant(new_incarnation_taken_for_a_fence, "deadly", 9),
    "pages reused when the room fails": Mutant(pages_reused_when_the_room_fails, "lossy", 9),
    "claimed blocks evicted": Mutant(claimed_blocks_evicted, "shared", 9),
    "blocks go with the first room": Mutant(blocks_go_with_the_first_room, "shared", 9),
    "shared before READY": Mutant(shared_before_ready, "shared", 9),
    "keys without what comes before": Mutant(keys_without_what_comes_before, "shared", 9),
    "one queue for all peers": Mutant(one_queue_for_all_peers, "isolation", 18),
}

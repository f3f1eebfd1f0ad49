"""Defences of what lies in an arena, taken away: shared blocks, memory that is not there yet, checksums."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pdtransfer.errors import Cause
from pdtransfer.handoff.admission import Admission
from pdtransfer.handoff.decode.leases import Leases
from pdtransfer.handoff.decode.post_landing import LandedGrant, PostLanding
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.decode.staging import StagingBuffer
from pdtransfer.handoff.prefill.decode_peers import DecodePeers
from pdtransfer.handoff.prefill.records import WriterGrant, WriterSession
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.slot_allocator import Block, Holding
from pdtransfer.wire import Granted

from . import Patch


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

    def and_keep(self: Admission, now: float, placed: Holding | None) -> Holding | None:
        keys = next(iter(self._queue.values())).keys
        holding = admit(self, now, placed)
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
        blocks = [prompt[offset : offset + size] for offset in range(0, len(prompt) // size * size, size)]
        return sum((whole(root, block, block_tokens=block_tokens, blocks_max=blocks_max) for block in blocks), ())

    patch(module, "block_keys", alone)


def granted_before_it_is_ready(patch: Patch) -> None:
    """A Grant is sent whether or not its writer has its slots ready."""
    patch(SessionRecord, "covers", lambda self, lease, ready: True)


def more_reported_ready_than_there_is(patch: Patch) -> None:
    """The writer reports that it has the whole arena when it has some of it."""
    mapped = DecodePeers.mapped

    def all_of_it(self: DecodePeers, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> None:
        session = self.sessions.get(session_id)
        whole = bytes_ready if session is None else session.register.reach.arena_bytes
        mapped(self, session_id, whole, hbm_direct=hbm_direct)

    patch(DecodePeers, "mapped", all_of_it)


def register_sent_until_the_first_answer(patch: Patch) -> None:
    """Register ends with the first Registered, and the one that reports more may be lost."""
    registered = PrefillPeers.registered

    def once(self: PrefillPeers, session: SessionRecord, message: Any) -> None:
        registered(self, session, message)
        self.timers.clear(("register", session.id, 0))

    patch(PrefillPeers, "registered", once)


def held_grants_forgotten(patch: Patch) -> None:
    """A Grant whose slots were not ready is not sent when they are."""
    patch(Leases, "ready", lambda self, session, now: None)


def arena_grows_no_more(patch: Patch) -> None:
    """Slots that are backed later are never leased."""
    patch(DecodeSessions, "ready", lambda self, bytes_ready, now: [])


def checksums_not_compared(patch: Patch) -> None:
    """What was read back is right, whatever the writer has sent."""
    patch(LandedGrant, "unlike", lambda self, checksum: "")


def ready_before_it_is_read(patch: Patch) -> None:
    """A room is READY with its last Landed, while its rows are read back."""
    _uncounted(patch, lifts=False)


def ready_before_it_is_copied_up(patch: Patch) -> None:
    """A room is READY with its last Landed, while its rows are copied up."""
    _uncounted(patch, lifts=True)


def _uncounted(patch: Patch, *, lifts: bool) -> None:
    """A room does not wait while one of its grants is copied up, or read back."""
    begin, end = PostLanding._begin, PostLanding._end

    def uncounted(self: PostLanding, landed: LandedGrant) -> None:
        begin(self, landed)
        landed.room.post_landing_count -= bool(landed.order.targets) is lifts

    def ended(self: PostLanding, landed: LandedGrant) -> None:
        landed.room.post_landing_count += bool(landed.order.targets) is lifts
        end(self, landed)

    patch(PostLanding, "_begin", uncounted)
    patch(PostLanding, "_end", ended)


def slots_not_claimed_while_they_are_copied_up(patch: Patch) -> None:
    """The slots of a room that fails while it is copied up are free at once."""
    _unclaimed(patch, lifts=True)


def _unclaimed(patch: Patch, *, lifts: bool) -> None:
    """The room's slots are not claimed while a grant is copied up, or read back."""
    begin, end = PostLanding._begin, PostLanding._end

    def unclaimed(self: PostLanding, landed: LandedGrant) -> None:
        begin(self, landed)
        landed.lease.holding.claims -= bool(landed.order.targets) is lifts

    def ended(self: PostLanding, landed: LandedGrant) -> None:
        wrong = bool(landed.order.targets) is lifts
        landed.lease.holding.claims += 2 * wrong
        end(self, landed)
        landed.lease.holding.claims -= wrong

    patch(PostLanding, "_begin", unclaimed)
    patch(PostLanding, "_end", ended)


def copied_up_before_it_has_landed(patch: Patch) -> None:
    """Copying up begins when the writer has its Grant."""
    on_grant_message, landed = DecodeSessions._on_grant_message, PostLanding.landed
    begun: set[int] = set()

    def hasty(self: DecodeSessions, session: SessionRecord, message: Any, now: float) -> None:
        lease = session.leases.get(message.grant)
        room = None if lease is None else self.rooms.get(lease.message.room)
        first = room is not None and lease in room.leases and id(lease) not in begun
        if isinstance(message, Granted) and first and not lease.message.verify:
            begun.add(id(lease))
            self.post_landing.lift(room, lease)
        on_grant_message(self, session, message, now)

    def once(self: PostLanding, room: Any, lease: LeaseEntry, checksum: bytes) -> str:
        return "" if id(lease) in begun else landed(self, room, lease, checksum)

    patch(DecodeSessions, "_on_grant_message", hasty)
    patch(PostLanding, "landed", once)


def copied_up_from_where_no_card_reaches(patch: Patch) -> None:
    """Slots of the staging buffer are granted as soon as a writer has them, where decode's own GPU may not reach."""
    covers, init = SessionRecord.covers, StagingBuffer.__init__
    patch(SessionRecord, "covers", lambda self, lease, ready: covers(self, lease, 1 << 60))
    patch(StagingBuffer, "__init__", lambda self, landing, ready: init(self, landing, None))


def landed_taken_for_lifted(patch: Patch) -> None:
    """What lies in the arena is not copied up."""
    patch(PostLanding, "lift", lambda self, room, lease: None)


def wrong_rows_copied_all_the_same(patch: Patch) -> None:
    """A room whose copy failed is READY."""
    lifted = PostLanding._lifted
    patch(PostLanding, "_lifted", lambda self, landed, detail: lifted(self, landed, ""))


def ready_with_the_first_sum(patch: Patch) -> None:
    """A room of several ranks is READY when the first of its grants was read back."""
    end = PostLanding._end

    def hasty(self: PostLanding, landed: LandedGrant) -> None:
        end(self, landed)
        landed.room.post_landing_count = 0

    patch(PostLanding, "_end", hasty)


def rows_not_claimed_while_they_are_read(patch: Patch) -> None:
    """The slots of a room that fails while it is read back are free at once."""
    _unclaimed(patch, lifts=False)


def wrong_rows_taken_for_a_breach(patch: Patch) -> None:
    """One wrong row ends its writer's session, and all its rooms."""
    settled = DecodeSessions.settled

    def strict(self: DecodeSessions, session_id: int, *args: Any) -> Any:
        before, now = self.post_landing.mismatched, args[-1]
        effects = settled(self, session_id, *args)
        session = self.prefill_peers.sessions.get(session_id)
        if self.post_landing.mismatched > before and session is not None:
            self.prefill_peers.condemn(session, Cause.TRANSFER, "wrong rows", now)
        return effects + self._effects(now)

    patch(DecodeSessions, "settled", strict)


def sum_of_the_last_write(patch: Patch) -> None:
    """Landed carries the checksum of the grant's last write alone."""
    end = WriterSession.end

    def last(self: WriterSession, write: int, checksum: int | None = None) -> WriterGrant:
        self.writes[write][0].checksum = 0
        return end(self, write, checksum)

    patch(WriterSession, "end", last)

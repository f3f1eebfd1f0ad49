"""Defences of what lies in an arena, taken away: shared blocks, memory that is not there yet, checksums."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pdtransfer.errors import Cause
from pdtransfer.handoff.admission import Admission
from pdtransfer.handoff.decode.leases import Leases
from pdtransfer.handoff.decode.post_landing import HbmCopies, PostLanding, Verifications
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefill.decode_peers import DecodePeers
from pdtransfer.handoff.prefill.writer_grants import WriterGrant
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
        blocks = [prompt[at : at + size] for at in range(0, len(prompt) // size * size, size)]
        return sum((whole(root, block, block_tokens=block_tokens, blocks_max=blocks_max) for block in blocks), ())

    patch(module, "block_keys", alone)


def granted_before_it_is_ready(patch: Patch) -> None:
    """A Grant is said whether or not its writer has its slots ready."""
    patch(SessionRecord, "covers", lambda self, holding, ready: True)


def more_said_ready_than_there_is(patch: Patch) -> None:
    """The writer says that it has the whole arena when it has some of it."""
    mapped = DecodePeers.mapped

    def all_of_it(self: DecodePeers, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> None:
        session = self.sessions.get(session_id)
        whole = bytes_ready if session is None else session.register.reach.arena_bytes
        mapped(self, session_id, whole, hbm_direct=hbm_direct)

    patch(DecodePeers, "mapped", all_of_it)


def register_said_until_the_first_answer(patch: Patch) -> None:
    """Register ends with the first Registered, and the one that says more may be lost."""
    registered = PrefillPeers.registered

    def once(self: PrefillPeers, session: SessionRecord, message: Any) -> None:
        registered(self, session, message)
        self.timers.clear(("register", session.id, 0))

    patch(PrefillPeers, "registered", once)


def held_grants_forgotten(patch: Patch) -> None:
    """A Grant whose slots were not ready is not said when they are."""
    patch(Leases, "ready", lambda self, session, now: None)


def arena_grows_no_more(patch: Patch) -> None:
    """Slots that are backed later are never leased."""
    patch(DecodeSessions, "ready", lambda self, bytes_ready, now: [])


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
        room.post_landing_count -= not wrong
        return wrong

    def ended(self: Verifications, session: int, grant: int, *args: Any) -> Any:
        self._open[session, grant].room.post_landing_count += 1
        return end(self, session, grant, *args)

    patch(Verifications, "begin", uncounted)
    patch(Verifications, "end", ended)


def ready_before_it_is_copied_up(patch: Patch) -> None:
    """A room is READY with its last Landed, while its rows are copied up."""
    begin, end = HbmCopies.begin, HbmCopies.end

    def uncounted(self: HbmCopies, room: Any, lease: LeaseEntry) -> None:
        before = room.post_landing_count
        begin(self, room, lease)
        room.post_landing_count = before

    def ended(self: HbmCopies, session: int, grant: int, *args: Any) -> Any:
        self._open[session, grant].room.post_landing_count += 1
        return end(self, session, grant, *args)

    patch(HbmCopies, "begin", uncounted)
    patch(HbmCopies, "end", ended)


def slots_not_claimed_while_they_are_copied_up(patch: Patch) -> None:
    """The slots of a room that fails while it is copied up are free at once."""
    begin, end = HbmCopies.begin, HbmCopies.end

    def unclaimed(self: HbmCopies, room: Any, lease: LeaseEntry) -> None:
        before = len(self)
        begin(self, room, lease)
        lease.holding.claims -= len(self) - before

    def ended(self: HbmCopies, session: int, grant: int, *args: Any) -> Any:
        holding = self._open[session, grant].holding
        holding.claims += 2
        found = end(self, session, grant, *args)
        holding.claims -= 1
        return found

    patch(HbmCopies, "begin", unclaimed)
    patch(HbmCopies, "end", ended)


def copied_up_before_it_has_landed(patch: Patch) -> None:
    """Copying up begins when the writer has heard of its Grant."""
    on_grant_message, landed = DecodeSessions._on_grant_message, PostLanding.landed
    begun: set[int] = set()

    def hasty(self: DecodeSessions, session: SessionRecord, message: Any, now: float) -> None:
        lease = session.leases.get(message.grant)
        room = None if lease is None else self.rooms.get(lease.message.room)
        first = room is not None and lease in room.leases and id(lease) not in begun
        if isinstance(message, Granted) and first and not lease.message.verify:
            begun.add(id(lease))
            self.post_landing.hbm_copies.begin(room, lease)
        on_grant_message(self, session, message, now)

    def once(self: PostLanding, room: Any, lease: LeaseEntry, checksum: bytes) -> str:
        return "" if id(lease) in begun else landed(self, room, lease, checksum)

    patch(DecodeSessions, "_on_grant_message", hasty)
    patch(PostLanding, "landed", once)


def copied_up_from_where_no_card_reaches(patch: Patch) -> None:
    """A Grant is said as soon as its writer has its slots, whether or not decode's own GPU reaches them."""
    covers = SessionRecord.covers
    patch(SessionRecord, "covers", lambda self, holding, ready: covers(self, holding, 1 << 60))


def landed_taken_for_lifted(patch: Patch) -> None:
    """What lies in the arena is not copied up."""
    patch(HbmCopies, "begin", lambda self, room, lease: None)


def wrong_rows_copied_all_the_same(patch: Patch) -> None:
    """A room whose copy failed is READY."""
    end = HbmCopies.end
    patch(HbmCopies, "end", lambda self, session, grant, detail: end(self, session, grant, ""))


def ready_with_the_first_sum(patch: Patch) -> None:
    """A room of several ranks is READY when the first of its grants was read back."""
    end = Verifications.end

    def hasty(self: Verifications, *args: Any) -> Any:
        found = end(self, *args)
        found[0].post_landing_count = 0
        return found

    patch(Verifications, "end", hasty)


def rows_not_claimed_while_they_are_read(patch: Patch) -> None:
    """The slots of a room that fails while it is read back are free at once."""
    begin, end = Verifications.begin, Verifications.end

    def unclaimed(self: Verifications, room: Any, lease: LeaseEntry, checksum: bytes) -> str:
        wrong = begin(self, room, lease, checksum)
        lease.holding.claims -= not wrong
        return wrong

    def ended(self: Verifications, session: int, grant: int, *args: Any) -> Any:
        holding = self._open[session, grant].lease.holding
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
        before, now = self.post_landing.verifications.mismatched, args[-1]
        effects = verified(self, session_id, *args)
        session = self.prefill_peers.sessions.get(session_id)
        if self.post_landing.verifications.mismatched > before and session is not None:
            self.prefill_peers.condemn(session, Cause.TRANSFER, "wrong rows", now)
        return effects + self._effects(now)

    patch(DecodeSessions, "verified", strict)


def sum_of_the_last_write(patch: Patch) -> None:
    """Landed carries the checksum of the grant's last write alone."""
    wrote = WriterGrant.wrote

    def last(self: WriterGrant, byte_count: int, checksum: int) -> None:
        self.checksum = 0
        wrote(self, byte_count, checksum)

    patch(WriterGrant, "wrote", last)

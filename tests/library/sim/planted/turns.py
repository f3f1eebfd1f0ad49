"""Defences of rooms that go on from others, with a prefill or without one, taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pdtransfer.handoff.decode.records import RoomRecord
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.prefix_keys import RunningKeys
from pdtransfer.handoff.slot_allocator import Block, Holding

from . import Patch


def _at_ready(patch: Patch, then: Callable[[DecodeSessions, RoomRecord, float], object]) -> None:
    """`then` follows where a room without a prefill is READY."""
    ready = DecodeSessions._ready

    def and_then(self: DecodeSessions, room: RoomRecord, now: float) -> None:
        ready(self, room, now)
        if not room.sources:
            then(self, room, now)

    patch(DecodeSessions, "_ready", and_then)


def slots_given_back_at_ready(patch: Patch) -> None:
    """A room without a prefill is READY at once, so its slots are taken for done with: its engine computes in them."""
    _at_ready(patch, lambda sessions, room, now: sessions._close(room))


def kept_blocks_given_up_while_they_are_read(patch: Patch) -> None:
    """The blocks that a room without a prefill reads count as idle: they go where slots are needed."""

    def idle(self: DecodeSessions, room: RoomRecord, now: float) -> None:
        assert room.holding is not None
        self.cache._idle.update((block.key, block) for block in reversed(room.holding.blocks))

    _at_ready(patch, idle)


def shared_before_the_rest_is_computed(patch: Patch) -> None:
    """The prompt of a room without a prefill is shared when it is READY, as that of any other room."""
    _at_ready(patch, lambda sessions, room, now: sessions.prefix_publish.add(room, now))


def whole_prompt_found(patch: Patch) -> None:
    """Of a room without a prefill the block of its last token is looked for, too: nothing is left to compute."""
    record = RoomRequest.record

    def with_all_keys(self: RoomRequest, *args: Any) -> RoomRecord:
        room = record(self, *args)
        if not room.sources:
            room.demand = replace(room.demand, keys=self.keys)
        return room

    patch(RoomRequest, "record", with_all_keys)


def any_rest_computed(patch: Patch) -> None:
    """A room without a prefill is READY however much of its prompt is missing."""
    record = RoomRequest.record

    def boundless(self: RoomRequest, *args: Any) -> RoomRecord:
        room = record(self, *args)
        room.rest_max *= 1_000
        return room

    patch(RoomRequest, "record", boundless)


def refused_when_it_has_slots(patch: Patch) -> None:
    """A room without a prefill, whose blocks are given up while it waits, goes on waiting for slots."""
    patch(DecodeSessions, "_refuse_rests", lambda self, now: None)


def answers_not_kept(patch: Patch) -> None:
    """What a room leaves is its prompt, if a prefill wrote it."""
    release = DecodeSessions.release
    patch(DecodeSessions, "release", lambda self, room_id, now, keys=(): release(self, room_id, now))


def last_token_taken_for_written(patch: Patch) -> None:
    """The row of an answer's last token is taken to be there, though no step has followed it."""
    patch(RunningKeys, "generated", RunningKeys.add)


def keys_beyond_the_slots_of_a_room(patch: Patch) -> None:
    """Every key is kept, with slots or without."""
    keep = PrefixCache.keep

    def all_of_them(self: PrefixCache, holding: Holding, keys: Sequence[bytes]) -> None:
        keep(self, holding, keys)
        for key in keys[len(holding.blocks) :]:
            if key not in self._blocks:
                block = self._blocks[key] = Block(key, ((),) * len(self._rows))
                holding.blocks = [*holding.blocks, block]

    patch(PrefixCache, "keep", all_of_them)


def ready_with_its_kept_blocks(patch: Patch) -> None:
    """A room of which decode has kept some blocks is READY before its prefill has sent the others."""
    grant = DecodeSessions._grant

    def hasty(self: DecodeSessions, room: RoomRecord, holding: Holding, sessions: Any, now: float) -> None:
        if room.prefix and room.sources:
            self._ready(room, now)
        else:
            grant(self, room, holding, sessions, now)

    patch(DecodeSessions, "_grant", hasty)

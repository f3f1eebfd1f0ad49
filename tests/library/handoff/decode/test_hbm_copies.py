"""HBM apart from the arena: rows land in a staging buffer piece by piece, and nothing is reused under a copy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import Offer, RoomFailed, RoomReady, Settle, StopSettling
from pdtransfer.handoff.staged_register import staging_of
from pdtransfer.layout.checksum import CHECKSUM_BYTES
from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.layout.staging import staged
from pdtransfer.wire import Abort, Drained, Grant, Registered, Reject, StagedLayout
from tests.library.handoff.decode.hbm_pair import hbm_pair
from tests.library.sim.pools import LAYERS, ROW
from tests.support.client_pair import Expected, slots_of_pages
from tests.support.internals import core_of, node_of
from tests.support.layout_tensors import CANARY
from tests.support.session_ends import (
    ARENA,
    DENSE_SLOTS,
    LIMITS,
    REACH,
    SLOTS,
    P,
    PrefillEnd,
    TwinEnd,
    kv_bytes,
    of,
    sent,
    twins,
)

HANDLE = b"handle"
KV_END = min(plane.base for plane in twins()[1].layout.planes)  # of the kv in DRAM
BASE = min(plane.base for plane in twins()[2].layout.planes)  # of the staging buffer, and of HBM in its own numbering
BUFFER = DENSE_SLOTS * LAYERS * ROW + 256  # bytes of it: all of a small HBM
LANDING = staged(twins(), base=BASE, byte_count=BUFFER)
STAGED = BASE + BUFFER  # bytes of an arena with the buffer
PIECE = DENSE_SLOTS // 4
NOWHERE = (StagedLayout(1, b""),)
CHECKSUM = (7).to_bytes(CHECKSUM_BYTES, "little")


class ApartEnd(TwinEnd):
    """Its kv in HBM is in a memory of its own, which `handle` opens."""

    def __init__(self, handle: bytes = b"", **options: Any) -> None:
        super().__init__(**{"landing": LANDING} | options)
        self.reach = msgspec.structs.replace(
            REACH, arena_bytes=STAGED, hbm_handle=handle, hbm_base=BASE, hbm_bytes=ARENA - BASE
        )

    def registers(self, *, bytes_ready: int = STAGED, hbm_direct: bool = False) -> list[Any]:
        self.core.dial(P, self.now)
        (offer,) = of(self.receive(self.welcome()), Offer)
        self.core.offered(offer.session, self.reach, self.now)
        return self.receive(Registered(offer.session, bytes_ready, hbm_direct))

    def piece(self, room: int, tokens: int = PIECE, **options: Any) -> Grant:
        """The first Grant of a new room that has rows: the engine of its source has some."""
        (grant,) = sent(self.land(self.granted(room, tokens, **options)), Grant)
        return grant

    @property
    def staged(self) -> int:
        """Slots of the buffer that are in use."""
        free = self.core.staging.slots.free[2]
        return free.slots - free.free_slots

    def lifted(self, lift: Settle, detail: str = "") -> list[Any]:
        return self.core.settled(lift.session, lift.grant, 0, detail, self.now)


def copies(effects: list[Any]) -> list[Settle]:
    """The orders to copy rows up."""
    return [order for order in of(effects, Settle) if order.targets]


@pytest.fixture
def end() -> ApartEnd:
    return ApartEnd()


def test_a_dense_room_is_ready_when_its_rows_were_copied_up(end: ApartEnd) -> None:
    end.registers()
    grant = end.piece(1)
    assert (grant.prefix, grant.last, grant.send_aux) == (0, True, True)
    effects = end.land(grant)
    assert of(effects, RoomReady) == []
    (lift,) = copies(effects)
    (part,), (target,) = lift.parts, lift.targets
    assert (target.component, target.first_row) == (twins()[2], 0)
    assert (part.component, part.first_row) == (LANDING[2], 0)
    assert target.extents[:, 1].sum() == part.extents[:, 1].sum() == PIECE, "growth is not copied"
    (ready,) = of(end.lifted(lift), RoomReady)
    assert ready.kv_bytes == kv_bytes(PIECE)
    assert end.staged == 0
    lifts = end.core.post_landing
    assert (lifts.copies, lifts.copied_bytes) == ({"dense": 1}, {"dense": PIECE * LAYERS * ROW})


def test_a_room_crosses_in_pieces_that_have_each_row_once(end: ApartEnd) -> None:
    """kv has a row a token, c4 one for every four: the last of each piece has the c4 row of its last tokens."""
    end.registers()
    tokens, prefixes, lifted = 14, list[int](), list[int]()
    grant, ready = end.piece(1, tokens), list[Any]()
    while not ready:
        prefixes.append(grant.prefix)
        assert sum(part.rows for part in grant.parts if part.component == 2) <= PIECE
        effects = end.land(grant, aux=b"aux" if grant.last else b"")
        (lift,) = copies(effects)
        effects += end.lifted(lift)
        lifted += [lift.targets[0].first_row]
        ready = of(effects, RoomReady)
        grant = next(iter(sent(effects, Grant)), grant)
    assert prefixes == lifted == [0, 4, 8, 12]
    assert (ready[0].kv_bytes, ready[0].aux) == (kv_bytes(tokens), b"aux")
    assert end.staged == 0


def test_the_next_piece_lands_while_one_is_copied_up(end: ApartEnd) -> None:
    end.registers()
    effects = end.land(end.piece(1, 12))
    assert copies(effects)
    (second,) = sent(effects, Grant)
    assert (second.prefix, second.stop) == (PIECE, 2 * PIECE)
    assert end.staged == 2 * PIECE
    assert sent(end.land(second), Grant) == [], "its peer has its half of the buffer, of which both are copied up"


def test_a_room_that_no_engine_computes_yet_holds_nothing_of_the_buffer(end: ApartEnd) -> None:
    end.registers()
    waiting = end.granted(1, tokens=14)
    assert (waiting.parts, waiting.stop, waiting.last) == ((), 0, False)
    assert end.staged == 0


def test_a_peer_has_half_of_the_buffer_and_others_go_on(end: ApartEnd) -> None:
    end.registers()
    begun = [end.granted(room, tokens=PIECE) for room in (1, 2, 3)]
    granted = [sent(end.land(grant), Grant) for grant in begun]
    assert [len(each) for each in granted] == [1, 1, 0]
    (lift,) = copies(effects := end.land(granted[0][0]))
    assert sent(effects, Grant) == [], "it has landed, and is still copied up"
    (third,) = sent(end.lifted(lift), Grant)
    assert third.room == 3


def test_rooms_of_one_peer_keep_their_order_though_a_later_one_would_fit(end: ApartEnd) -> None:
    end.registers()
    effects = end.land(end.piece(1, PIECE + 2))
    (lift,), (second,) = copies(effects), sent(effects, Grant)
    begun = [end.granted(2, PIECE), end.granted(3, 1)]
    assert [sent(end.land(grant), Grant) for grant in begun] == [[], []]
    assert [grant.room for grant in sent(end.lifted(lift), Grant)] == [2, 3]
    assert sent(end.land(second), Grant) == []


def test_a_source_whose_piece_landed_while_its_room_was_given_up_is_informed_again(end: ApartEnd) -> None:
    """The Abort of a piece that has landed is not repeated, and this one is lost."""
    end.registers()
    grant = end.piece(1, 12)
    end.core.abort(1, end.now, detail="the client left")
    effects = end.land(grant)
    (abort,) = sent(effects, Abort)
    assert (abort.room, abort.detail) == (1, "the client left")
    assert abort.grant > grant.grant
    assert end.tick(LIMITS.resend_ms / 1e3 + 0.01)
    end.receive(Drained(grant.session, abort.grant))
    assert end.core.idle
    last = end.piece(2)
    end.core.abort(2, end.now)
    assert sent(end.land(last), Abort) == [], "it was the last, which ends its room there"


def test_a_window_waits_for_slots_where_the_engine_has_all_tokens() -> None:
    """There is no piece before the last, and the last has rows."""
    kv, layout = twins()[2], twins()[2].layout
    window = Component("window", "hbm", 1, Span("last", PIECE), layout.rebase(layout.end - BASE))
    components = kv, window
    landing = staged(components, base=BASE, byte_count=(DENSE_SLOTS // 2 + PIECE) * LAYERS * ROW + 512)
    end = ApartEnd(arena=components, landing=landing, enable_hisparse=False, verify=True)
    end.registers()
    granted = [sent(end.expect(room, PIECE, prefix=PIECE), Grant) for room in (1, 2)]
    ((grant,), nothing) = granted
    assert nothing == [], "both windows do not fit"
    assert (grant.prefix, grant.last, grant.verify) == (PIECE, True, True)
    assert [(part.component, part.rows) for part in grant.parts] == [(1, PIECE)]
    effects = end.verified(grant, 7) if of(end.land(grant, checksum=CHECKSUM), Settle) else []
    (lift,) = copies(effects)
    effects = end.lifted(lift)
    assert [ready.room for ready in of(effects, RoomReady)] == [1]
    assert [after.room for after in sent(effects, Grant)] == [2]


def test_slots_of_a_piece_come_back_by_proof_and_its_source_is_informed_where_it_has_no_grant(end: ApartEnd) -> None:
    end.registers()
    grant = end.piece(1, 12)
    aborts = sent(end.core.abort(1, end.now), Abort)
    assert [abort.grant for abort in aborts] == [grant.grant]
    assert end.staged == PIECE, "its writer may still write"
    end.receive(Drained(grant.session, grant.grant))
    assert end.staged == 0
    for room in (2, 3, 4):  # the last has to wait for slots
        last = end.land(end.granted(room, PIECE * (1 + (room == 4))))
    assert sent(last, Grant) == []
    (abort,) = sent(end.core.abort(4, end.now), Abort)
    assert abort.room == 4
    assert abort.grant not in (lease.message.grant for lease in end.core.rooms[2].leases)


def test_a_piece_that_no_frame_could_carry_fails_its_room_and_nobody_elses() -> None:
    dense, slots = twins()[2], 32_768
    layout = Layout(dense.layout.planes, dense.layout.page_size, slots)
    components = (msgspec.structs.replace(dense, layout=layout),)
    buffer_bytes = slots * LAYERS * ROW + 256
    landing = staged(components, base=BASE, byte_count=buffer_bytes)
    end = ApartEnd(arena=components, landing=landing, enable_hisparse=False)
    end.core.dial(P, end.now)
    (offer,) = of(end.receive(end.welcome(frame_bytes_max=1 << 16)), Offer)
    reach = msgspec.structs.replace(REACH, arena_bytes=BASE + buffer_bytes)
    end.core.offered(offer.session, reach, end.now)
    end.receive(Registered(offer.session, reach.arena_bytes))
    ones = end.core.staging.slots.free[0]
    held = [ones.allocate(1) for _ in range(slots)]
    ones.free(np.concatenate(held[::2]))  # every other slot: 16,384 extents of one
    effects = end.land(end.granted(1, tokens=slots // 4, growth=0))
    assert [(failed.room, failed.cause) for failed in of(effects, RoomFailed)] == [(1, Cause.FULL)]
    assert ones.free_slots == slots // 2
    assert len(end.piece(2, tokens=8_000, growth=0).parts[0].extents) == 8 * 8_000
    assert end.core.arena.free[0].free_slots == slots - 8_000


def test_pieces_of_a_lost_peer_stay_until_the_fence(end: ApartEnd) -> None:
    end.registers()
    grant = end.piece(1, 12)
    effects = end.live(LIMITS.silence_ms / 1e3 + 1)
    assert of(effects, RoomFailed)[0].cause is Cause.PEER_LOST
    assert end.staged == PIECE
    end.core.fenced(grant.session, end.now)
    assert end.staged == 0


def test_a_sparse_rooms_kv_is_never_copied(end: ApartEnd) -> None:
    end.registers()
    effects = end.land(end.granted(1, tokens=8, enable_hisparse=True))
    assert copies(effects) == []
    assert of(effects, RoomReady)
    assert not end.core.post_landing.copies


def test_what_its_writer_puts_there_itself_is_not_copied() -> None:
    end = ApartEnd(handle=HANDLE)
    end.registers(hbm_direct=True)
    effects = end.land(end.granted(1, tokens=8))
    assert copies(effects) == []
    assert of(effects, RoomReady)


def test_a_range_of_the_arena_is_not_copied() -> None:
    end = ApartEnd(landing=None)
    end.registers()
    assert of(end.land(end.granted(1, tokens=8)), RoomReady)


def test_nothing_lands_where_this_node_has_nothing_ready_to_be_copied_up_from() -> None:
    """Mooncake's writers say at once that all is ready, and a GPU that reads what it does not reach is lost."""
    end = ApartEnd(bytes_ready=BASE)
    end.registers()
    begun = end.granted(1, tokens=PIECE)
    assert sent(end.land(begun), Grant) == []
    assert sent(end.core.ready(BASE + 1, end.now), Grant) == []
    assert sent(end.core.ready(STAGED, end.now), Grant)
    direct = ApartEnd(handle=HANDLE, bytes_ready=BASE)
    direct.registers(hbm_direct=True)
    assert sent(direct.expect(1, tokens=8), Grant)[0].parts, "its rows land nowhere else"


def test_slots_are_claimed_as_long_as_they_are_copied(end: ApartEnd) -> None:
    end.registers()
    (lift,) = copies(end.land(end.piece(1)))
    effects = end.core.abort(1, end.now)
    assert of(effects, StopSettling) == [StopSettling(lift.session, lift.grant)]
    assert of(effects, RoomFailed)[0].cause is Cause.ABORTED
    assert end.free == [SLOTS, SLOTS - 1, DENSE_SLOTS - PIECE], "its lease has ended, and it is still being copied"
    assert not end.core.idle
    assert of(end.lifted(lift, "cancelled"), RoomReady) == []
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.idle


def test_a_copy_that_fails_fails_its_room_and_gives_its_slots_back(end: ApartEnd) -> None:
    end.registers()
    (lift,) = copies(end.land(end.piece(1)))
    (failed,) = of(end.lifted(lift, "the GPU is gone"), RoomFailed)
    assert failed.cause is Cause.TRANSFER
    assert "not copied to HBM: the GPU is gone" in failed.detail
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.post_landing.copies == {}


def test_a_room_that_nobody_copies_up_fails_at_its_deadline_and_keeps_its_slots(end: ApartEnd) -> None:
    end.registers()
    assert copies(end.land(end.piece(1, deadline=1.0)))
    (failed,) = of(end.live(1.5, P), RoomFailed)
    text = "still settling: this node has not verified it or copied it to HBM yet"
    assert (failed.cause, failed.detail) == (Cause.DEADLINE, f"not ready in time, {text}")
    assert end.free[2] == DENSE_SLOTS - PIECE


def test_a_room_that_waits_for_the_staging_buffer_fails_at_its_deadline_by_name(end: ApartEnd) -> None:
    end.registers()
    while end.core.staging.line == {}:  # each takes a piece, until one finds no slots
        end.land(end.granted(len(end.core.rooms) + 1, PIECE, deadline=end.now + 1.0))
    (waits,) = end.core.staging.line
    details = {failure.room: failure.detail for failure in of(end.live(1.5, P), RoomFailed)}
    text = "still landing: this node has no room for its next piece in the staging buffer yet"
    assert details[waits] == f"not ready in time, {text}"


@pytest.mark.parametrize(("checksum", "given_up"), [(7, False), (8, False), (7, True)])
def test_rows_are_read_back_before_they_are_copied_and_wrong_or_unwanted_ones_are_copied_nowhere(
    checksum: int, given_up: bool
) -> None:
    end = ApartEnd(verify=True)
    end.registers()
    begun = end.granted(1, tokens=PIECE)
    assert not begun.verify, "it has no rows"
    (grant,) = sent(end.land(begun), Grant)
    effects = end.land(grant, checksum=CHECKSUM)
    assert of(effects, Settle)
    assert copies(effects) == []
    if given_up:
        end.core.abort(1, end.now)
        assert end.free[2] == DENSE_SLOTS - PIECE, "they are still read"
    effects = end.verified(grant, checksum)
    assert len(of(effects, RoomFailed)) == (checksum != 7)
    if lifts := copies(effects):
        assert of(end.lifted(lifts[0]), RoomReady)
    assert len(lifts) == (checksum == 7 and not given_up)
    assert end.free[2] == DENSE_SLOTS - (PIECE if lifts else 0)


def test_slots_of_the_buffer_wait_for_a_writer_that_has_not_mapped_them() -> None:
    end = ApartEnd(handle=HANDLE, bytes_ready=STAGED)
    end.registers(bytes_ready=BASE)
    begun = end.granted(1, PIECE)
    assert sent(end.land(begun), Grant) == []
    assert len(sent(end.receive(Registered(begun.session, STAGED)), Grant)) == 1


@pytest.mark.parametrize(
    ("handle", "second", "text"),
    [(b"", True, "true, but Reach has no HBM handle"), (HANDLE, False, "False, but it was True before")],
)
def test_a_writer_announces_once_where_it_writes_and_only_what_it_was_asked_for(
    handle: bytes, second: bool, text: str
) -> None:
    end = ApartEnd(handle=handle)
    effects = end.registers(hbm_direct=True)
    if handle:
        session = next(iter(end.core.prefill_peers.sessions))
        effects = end.receive(Registered(session, STAGED, second))
    (reject,) = sent(effects, Reject)
    assert reject.reason == Cause.BREACH.value
    assert text in reject.fields[0]


# Prefill


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hbm_base": 0}, ""),
        ({"hbm_base": ARENA - 8, "hbm_bytes": 8}, "Register.reach.hbm_base"),
        ({"hbm_bytes": 8}, "Register.reach.hbm_bytes"),
    ],
)
def test_a_component_that_leaves_the_cards_memory_is_a_breach(changes: dict[str, int], field: str) -> None:
    end = PrefillEnd()
    end.receive(end.hello())
    base = min(plane.base for plane in twins()[2].layout.planes)
    fields = {"hbm_handle": HANDLE, "hbm_base": base, "hbm_bytes": ARENA} | changes
    reach = msgspec.structs.replace(REACH, arena_bytes=ARENA, **fields)
    rejects = sent(end.receive(end.register(components=twins(), reach=reach)), Reject)
    assert [reject.reason for reject in rejects] == [Cause.BREACH.value] * bool(field)
    assert not field or field in rejects[0].fields[0]


def test_a_writer_of_hbm_is_granted_all_of_it_before_the_arena_is_ready() -> None:
    for direct in (False, True):
        end = PrefillEnd()
        end.receive(end.hello())
        reach = msgspec.structs.replace(REACH, arena_bytes=STAGED, hbm_handle=HANDLE, hbm_base=0, hbm_bytes=ARENA)
        end.receive(end.register(components=twins(), reach=reach, staging=staging_of(twins(), LANDING)))
        (registered,) = sent(end.core.mapped(0xA0, KV_END, hbm_direct=direct), Registered)
        assert registered.hbm_direct is direct
        session = end.core.sessions[0xA0]
        assert session.components == (twins() if direct else LANDING)
        assert [each > 0 for each in session.slots_ready] == [True, False, direct]


@pytest.mark.parametrize(
    ("staging", "field"),
    [
        (staging_of(twins(), LANDING) * 2, "Register.staging: 2 entries for 1 HBM components"),
        (NOWHERE, "Register.staging[0].bases: 0 bytes for 3 planes"),
        ((StagedLayout(DENSE_SLOTS, (STAGED).to_bytes(8, "little") * LAYERS),), "Register.staging[0]: "),
        ((StagedLayout(1 << 31, staging_of(twins(), LANDING)[0].bases),), "Register.staging[0]: "),
        ((StagedLayout(DENSE_SLOTS, (1 << 63).to_bytes(8, "little") * LAYERS),), "Register.staging[0]: "),
    ],
)
def test_a_staging_buffer_that_is_none_is_a_breach(staging: tuple[StagedLayout, ...], field: str) -> None:
    end = PrefillEnd()
    end.receive(end.hello())
    reach = msgspec.structs.replace(REACH, arena_bytes=STAGED)
    (reject,) = sent(end.receive(end.register(components=twins(), reach=reach, staging=staging)), Reject)
    assert reject.reason == Cause.BREACH.value
    assert reject.fields[0].startswith(field)


# With memory


def test_dense_rows_land_in_hbm_and_sparse_ones_stay_in_dram_to_the_byte() -> None:
    with hbm_pair() as (pair, memory):
        dram, hbm = Expected(pair.target), Expected(pair.target)
        pages = {}
        for room, sparse in ((1, True), (2, False), (3, False)):
            pair.expect(room, 40, growth=3, enable_hisparse=sparse)
            pages[room] = pair.send(room, 40)
        for room, of_room in pages.items():
            ready = pair.ready(room)
            target = dram if room == 1 else hbm
            target.land(slots_of_pages(of_room, 16, 40), ready.slots["kv"][:40])
        assert dram.holds(pair.target.memory)
        assert hbm.holds(memory)
        lifts = core_of(pair.decode).post_landing
        assert lifts.copies["dense"] >= 2
        node = node_of(pair.decode)
        assert node.lifted_bytes == lifts.copied_bytes["dense"] == 80 * pair.target.layout.row_bytes
        for room in pages:
            pair.decode.release(room)


def test_verified_rows_are_copied_up_as_well() -> None:
    with hbm_pair(twin=False, verify=True) as (pair, memory):
        pages = pair.begin(1, 100)
        ready, hbm = pair.ready(1), Expected(pair.target)
        hbm.land(slots_of_pages(pages, 16, 100), ready.slots["kv"])
        assert hbm.holds(memory)
        assert core_of(pair.decode).post_landing.matched >= 2, "two pieces at least"


def test_a_prompt_that_others_have_left_in_hbm_is_copied_up_once() -> None:
    """One component, in HBM: all rooms are of one kind, and share what they have in common."""
    with hbm_pair(twin=False) as (pair, _):
        prompt = np.arange(64)
        for room in (1, 2):
            pair.begin(room, 64, prompt=prompt)
            assert pair.ready(room).prefix == (0 if room == 1 else 64)
            pair.decode.release(room)
        assert core_of(pair.decode).post_landing.copied_bytes["dense"] == 64 * pair.target.layout.row_bytes


def test_a_room_larger_than_the_buffer_lands_byte_for_byte() -> None:
    with hbm_pair(twin=False, staging_rows=24) as (pair, memory):
        pages = pair.begin(1, 200)
        ready, landed = pair.ready(1), Expected(pair.target)
        landed.land(slots_of_pages(pages, 16, 200), ready.slots["kv"])
        assert landed.holds(memory)
        assert (pair.target.memory == CANARY).all()
        assert core_of(pair.decode).post_landing.copies["dense"] >= 200 // 6


def test_drained_after_an_abort_that_met_the_copy_leaves_nothing_behind(end: ApartEnd) -> None:
    end.registers()
    grant = end.piece(1)
    end.core.abort(1, end.now)
    end.receive(Drained(grant.session, grant.grant))
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.idle

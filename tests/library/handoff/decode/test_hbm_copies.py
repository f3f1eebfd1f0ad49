"""HBM apart from the arena: rows that landed before it are copied up, and nothing is reused under a copy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.effects import Lift, Offer, RoomFailed, RoomReady, StopLifting, Verify
from pdtransfer.layout.checksum import CHECKSUM_BYTES
from pdtransfer.limits import Limits
from pdtransfer.wire import Drained, Grant, Registered, Reject
from tests.library.handoff.decode.hbm_pair import expected, hbm_pair
from tests.library.sim.pools import LAYERS, ROW
from tests.support.client_pair import slots_of_pages
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
    identity,
    kv_bytes,
    of,
    sent,
    twins,
)

HANDLE = b"handle"


class ApartEnd(TwinEnd):
    """Its kv in HBM is in a memory of its own, which `handle` opens."""

    def __init__(self, limits: Limits = LIMITS, handle: bytes = b"", **options: Any) -> None:
        super().__init__(limits)
        ids = iter(range(0xA0, 0xFFF))
        self.handle = handle
        me = identity("d0", "decode", window=limits.window)
        options = {"enable_hisparse": True, "hbm_apart": True} | options
        self.core = DecodeSessions(me, twins(), limits, lambda: next(ids), **options)

    def registers(self, *, bytes_ready: int = ARENA, hbm_direct: bool = False) -> list[Any]:
        self.core.dial(P, self.now)
        (offer,) = of(self.receive(self.welcome()), Offer)
        base = min(plane.base for plane in twins()[2].layout.planes)
        reach = msgspec.structs.replace(
            REACH, arena_bytes=ARENA, hbm_handle=self.handle, hbm_base=base, hbm_bytes=ARENA - base
        )
        self.core.offered(offer.session, reach, self.now)
        return self.receive(Registered(offer.session, bytes_ready, hbm_direct))

    def lifted(self, lift: Lift, detail: str = "") -> list[Any]:
        return self.core.lifted(lift.session, lift.grant, detail, self.now)


def test_a_dense_room_is_ready_when_its_rows_were_copied_up() -> None:
    end = ApartEnd()
    end.registers()
    grant = end.granted(1, tokens=8)
    effects = end.land(grant)
    assert of(effects, RoomReady) == []
    (lift,) = of(effects, Lift)
    (rows,) = lift.parts
    assert (rows.component.name, rows.component.memory, rows.first_row) == ("kv", "hbm", 0)
    assert int(rows.extents[:, 1].sum()) == 8, "growth is not copied, nor what is in DRAM"
    (ready,) = of(end.lifted(lift), RoomReady)
    assert ready.kv_bytes == kv_bytes(8)
    lifts = end.core.post_landing
    assert (lifts.copies, lifts.copied_bytes) == ({"dense": 1}, {"dense": 8 * LAYERS * ROW})


def test_a_sparse_rooms_kv_is_never_copied() -> None:
    end = ApartEnd()
    end.registers()
    effects = end.land(end.granted(1, tokens=8, enable_hisparse=True))
    assert of(effects, Lift) == []
    assert of(effects, RoomReady)
    assert not end.core.post_landing.copies


def test_what_its_writer_puts_there_itself_is_not_copied() -> None:
    end = ApartEnd(handle=HANDLE)
    end.registers(hbm_direct=True)
    effects = end.land(end.granted(1, tokens=8))
    assert of(effects, Lift) == []
    assert of(effects, RoomReady)


def test_a_range_of_the_arena_is_not_copied() -> None:
    end = ApartEnd(hbm_apart=False)
    end.registers()
    assert of(end.land(end.granted(1, tokens=8)), RoomReady)


def test_nothing_lands_where_this_node_has_nothing_ready_to_be_copied_up_from() -> None:
    """Mooncake's writers say at once that all is ready, and a GPU that reads what it does not reach is lost."""
    base = min(plane.base for plane in twins()[2].layout.planes)
    end = ApartEnd(bytes_ready=base)
    end.registers()
    assert sent(end.expect(1, tokens=8), Grant) == []
    assert sent(end.core.ready(base + 1, end.now), Grant) == []
    assert sent(end.core.ready(ARENA, end.now), Grant)
    direct = ApartEnd(handle=HANDLE, bytes_ready=base)
    direct.registers(hbm_direct=True)
    assert sent(direct.expect(1, tokens=8), Grant), "its rows land nowhere else"


def test_slots_are_claimed_as_long_as_they_are_copied() -> None:
    end = ApartEnd()
    end.registers()
    (lift,) = of(end.land(end.granted(1, tokens=8)), Lift)
    effects = end.core.abort(1, end.now)
    assert of(effects, StopLifting) == [StopLifting(lift.session, lift.grant)]
    assert of(effects, RoomFailed)[0].cause is Cause.ABORTED
    assert end.free == [SLOTS, SLOTS - 2, DENSE_SLOTS - 8], "its lease has ended, and it is still being copied"
    assert not end.core.idle
    assert of(end.lifted(lift, "cancelled"), RoomReady) == []
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.idle


def test_a_copy_that_fails_fails_its_room_and_gives_its_slots_back() -> None:
    end = ApartEnd()
    end.registers()
    (lift,) = of(end.land(end.granted(1, tokens=8)), Lift)
    (failed,) = of(end.lifted(lift, "the GPU is gone"), RoomFailed)
    assert failed.cause is Cause.TRANSFER
    assert "not copied to HBM: the GPU is gone" in failed.detail
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.post_landing.copies == {}


def test_a_room_that_nobody_copies_up_fails_at_its_deadline_and_keeps_its_slots() -> None:
    end = ApartEnd()
    end.registers()
    assert of(end.land(end.granted(1, tokens=8, deadline=1.0)), Lift)
    (failed,) = of(end.live(1.5, P), RoomFailed)
    assert failed.cause is Cause.DEADLINE
    assert end.free[2] == DENSE_SLOTS - 8


def test_rows_are_read_back_before_they_are_copied_and_wrong_ones_are_copied_nowhere() -> None:
    for right in (True, False):
        end = ApartEnd(verify=True)
        end.registers()
        grant = end.granted(1, tokens=8)
        effects = end.land(grant, checksum=(7).to_bytes(CHECKSUM_BYTES, "little"))
        assert of(effects, Verify)
        assert of(effects, Lift) == []
        effects = end.verified(grant, 7 if right else 8)
        assert len(of(effects, Lift)) == right
        assert len(of(effects, RoomFailed)) != right
        if right:
            assert of(end.lifted(of(effects, Lift)[0]), RoomReady)


def test_all_of_hbm_may_be_leased_before_the_arena_is_backed_but_waits_for_a_writer_that_needs_the_arena() -> None:
    kv = min(plane.base for plane in twins()[1].layout.planes)  # where the kv in DRAM ends
    for direct in (False, True):
        end = ApartEnd(handle=HANDLE, bytes_ready=ARENA)
        end.registers(bytes_ready=kv + 16 * LAYERS * ROW, hbm_direct=direct)
        grants = sent(end.expect(1, 8), Grant)
        assert len(grants) == direct, "c4 has room for both, the arena's range for HBM is not there yet"


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
        effects = end.receive(Registered(session, ARENA, second))
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
    kv = min(plane.base for plane in twins()[1].layout.planes)
    for direct in (False, True):
        end = PrefillEnd()
        end.receive(end.hello())
        reach = msgspec.structs.replace(REACH, arena_bytes=ARENA, hbm_handle=HANDLE, hbm_base=0, hbm_bytes=ARENA)
        end.receive(end.register(components=twins(), reach=reach))
        (registered,) = sent(end.core.mapped(0xA0, kv, hbm_direct=direct), Registered)
        assert registered.hbm_direct is direct
        assert [each > 0 for each in end.core.sessions[0xA0].slots_ready] == [True, False, direct]


# With memory


def test_dense_rows_land_in_hbm_and_sparse_ones_stay_in_dram_to_the_byte() -> None:
    with hbm_pair() as pair:
        dram, hbm = expected(pair), expected(pair)
        pages = {}
        for room, sparse in ((1, True), (2, False), (3, False)):
            pair.expect(room, 40, growth=3, enable_hisparse=sparse)
            pages[room] = pair.send(room, 40)
        for room, of_room in pages.items():
            ready = pair.ready(room)
            target = dram if room == 1 else hbm
            target.land(slots_of_pages(of_room, 16, 40), ready.slots["kv"][:40])
        assert dram.holds(pair.target.memory)
        assert (pair.hbm == hbm.pool.memory).all()
        lifts = core_of(pair.decode).post_landing
        assert lifts.copies == {"dense": 2}
        node = node_of(pair.decode)
        assert node.lifted_bytes == lifts.copied_bytes["dense"] == 80 * pair.target.layout.row_bytes
        for room in pages:
            pair.decode.release(room)


def test_verified_rows_are_copied_up_as_well() -> None:
    with hbm_pair(twin=False, verify=True) as pair:
        pair.expect(1, 100)
        pages = pair.send(1, 100)
        ready, hbm = pair.ready(1), expected(pair)
        hbm.land(slots_of_pages(pages, 16, 100), ready.slots["kv"])
        assert (pair.hbm == hbm.pool.memory).all()
        assert core_of(pair.decode).post_landing.matched == 1


def test_a_prompt_that_others_have_left_in_hbm_is_copied_up_once() -> None:
    """One component, in HBM: all rooms are of one kind, and share what they have in common."""
    with hbm_pair(twin=False) as pair:
        prompt = np.arange(64)
        for room in (1, 2):
            pair.expect(room, 64, prompt=prompt)
            pair.send(room, 64)
            assert pair.ready(room).prefix == (0 if room == 1 else 64)
            pair.decode.release(room)
        assert core_of(pair.decode).post_landing.copied_bytes["dense"] == 64 * pair.target.layout.row_bytes


def test_what_landed_before_hbm_is_not_what_the_engine_reads() -> None:
    """The landing range holds the rows as well, at the same slots; canaries show that nothing else was touched."""
    with hbm_pair(twin=False) as pair:
        pair.expect(1, 16)
        pages = pair.send(1, 16)
        ready, landed = pair.ready(1), expected(pair)
        landed.land(slots_of_pages(pages, 16, 16), ready.slots["kv"])
        assert (pair.landing == landed.pool.memory).all()
        assert (pair.hbm == landed.pool.memory).all()
        assert (pair.target.memory == CANARY).all()


def test_drained_after_an_abort_that_met_the_copy_leaves_nothing_behind() -> None:
    end = ApartEnd()
    end.registers()
    grant = end.granted(1, tokens=8)
    end.core.abort(1, end.now)
    end.receive(Drained(grant.session, grant.grant))
    assert end.free == [SLOTS, SLOTS, DENSE_SLOTS]
    assert end.core.idle

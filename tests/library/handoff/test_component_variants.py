"""Components of one name in both memories: what sparse and dense rooms lease of them, side by side."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.component_variants import labels, leased, repeated, shares_prefixes
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.effects import Map, Outcome, RoomFailed, RoomReady, Write
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.wire import Grant, Landed, Registered, unpack_extents
from tests.library.sim.pools import BLOCK, LAYERS, ROW
from tests.support.session_ends import (
    ARENA,
    DENSE_SLOTS,
    LIMITS,
    SLOTS,
    PrefillEnd,
    TwinEnd,
    identity,
    kv_bytes,
    of,
    sent,
    twins,
)


@pytest.fixture
def end() -> TwinEnd:
    end = TwinEnd()
    end.up()
    return end


def test_a_room_has_rows_of_one_twin_and_of_what_has_none() -> None:
    assert leased(twins(), enable_hisparse=True) == (True, True, False)
    assert leased(twins(), enable_hisparse=False) == (False, True, True)
    alone = (twins()[2], twins()[1])
    for sparse in (False, True):
        assert leased(alone, enable_hisparse=sparse) == (True, True), "what is there once serves both"
        assert shares_prefixes(alone, enable_hisparse=sparse)
    assert labels(twins()) == ("kv in dram", "c4", "kv in hbm")
    assert repeated(twins()) == ""
    assert repeated((*twins(), twins()[1])) == "c4"


@pytest.mark.parametrize(("sparse", "place", "other"), [(True, 0, 2), (False, 2, 0)])
def test_a_grant_names_the_twin_that_its_flag_selects_and_never_the_other(
    sparse: bool, place: int, other: int, end: TwinEnd
) -> None:
    free = end.free
    grant = end.granted(1, tokens=8, growth=2, enable_hisparse=sparse)
    assert grant.enable_hisparse is sparse
    assert [part.component for part in grant.parts] == sorted([place, 1])
    taken = [before - now for before, now in zip(free, end.free, strict=True)]
    assert (taken[place], taken[1], taken[other]) == (10, 3, 0)
    (ready,) = of(end.land(grant), RoomReady)
    assert ready.kv_bytes == kv_bytes(8), "as many bytes as a room of one kv has"
    written = next(part for part in grant.parts if part.component == place)
    first, count = unpack_extents("x", written.extents)[0]
    assert ready.slots["kv"][:8].tolist() == list(range(first, first + count))
    assert len(ready.slots["kv"]) == 10
    end.core.release(1, end.now)
    assert end.free == free
    assert end.core.idle


def test_landed_is_held_against_the_bytes_of_one_twin(end: TwinEnd) -> None:
    grant = end.granted(1, tokens=8, enable_hisparse=True)
    both = kv_bytes(8) + 8 * LAYERS * ROW
    effects = end.receive(Landed(grant.session, grant.grant, both, b""))
    assert of(effects, RoomFailed)[0].cause is Cause.BREACH


def test_what_can_never_fit_is_refused_by_the_twin_that_it_would_take(end: TwinEnd) -> None:
    (failed,) = of(end.expect(1, DENSE_SLOTS + 1), RoomFailed)
    assert failed.cause is Cause.REFUSED
    assert "'kv in hbm': 17" in failed.detail
    assert "dram" not in failed.detail
    end.granted(2, tokens=DENSE_SLOTS + 1, enable_hisparse=True)


def test_a_full_twin_holds_up_its_own_kind_alone_and_only_at_the_queues_head(end: TwinEnd) -> None:
    held = end.granted(1, tokens=DENSE_SLOTS)
    end.land(held)
    assert sent(end.expect(2, 1), Grant) == []
    assert len(end.core.admission) == 1
    effects = end.core.release(1, end.now)
    assert sent(effects, Grant)[0].room == 2


def test_a_sparse_request_where_nobody_can_is_refused_with_the_reason() -> None:
    end = TwinEnd(enable_hisparse=False)
    end.up()
    (failed,) = of(end.expect(1, 8, enable_hisparse=True), RoomFailed)
    assert failed.cause is Cause.REFUSED
    assert "enable_hisparse" in failed.detail
    end.granted(2, tokens=8)


def test_dense_rooms_share_no_prompt_and_sparse_ones_do() -> None:
    end = TwinEnd(limits=replace(LIMITS, prefix_block_tokens=BLOCK))
    end.up()
    keys = end.core.cache.keys(np.arange(BLOCK, dtype="<u4").tobytes(), b"")
    assert len(keys) == 1
    prefixes: list[int] = []
    for room, sparse in enumerate((False, False, True, False, True)):
        (ready,) = of(end.land(end.granted(room, tokens=BLOCK, keys=keys, enable_hisparse=sparse)), RoomReady)
        prefixes.append(ready.prefix)
        end.core.release(room, end.now)
    assert prefixes == [0, 0, 0, 0, BLOCK]
    assert end.free == [SLOTS - BLOCK, SLOTS - BLOCK // 4, DENSE_SLOTS], "a block has no row of the twin in HBM"


def test_a_component_that_is_twice_in_one_memory_makes_no_node() -> None:
    with pytest.raises(LocalProtocolError, match="'kv' is registered twice"):
        DecodeSessions(identity("d0", "decode"), (*twins(), twins()[0]), LIMITS, lambda: 1)


def test_prefill_pairs_both_twins_with_its_one_component_and_writes_the_one_that_a_grant_names() -> None:
    end = PrefillEnd()
    end.receive(end.hello())
    reach = msgspec.structs.replace(end.register().reach, arena_bytes=ARENA)
    assert of(end.receive(end.register(components=twins(), reach=reach)), Map)
    assert sent(end.core.mapped(0xA0, ARENA), Registered)
    decode = TwinEnd()
    decode.up()
    for room, sparse, place in ((1, True, 0), (2, False, 2)):
        granted = decode.granted(room, tokens=8, enable_hisparse=sparse)
        end.open(room)
        end.receive(msgspec.structs.replace(granted, session=0xA0))
        writes: list[Write] = []
        for component in end.components:
            cell = Cell(component.name, 0, (0, LAYERS), np.arange(component.rows(8)))
            writes += of(end.core.push(room, cell, 0.0), Write)
        assert sorted(write.component for write in writes) == sorted([place, 1])
        for write in writes:
            end.core.wrote(0xA0, write.write, Outcome.LANDED, "", end.now)
        (landed,) = sent(end.finish(room), Landed)
        assert landed.kv_bytes == kv_bytes(8)

"""What a send ring does to a plan: through slots of it every byte comes where the plan alone would have put it."""

from __future__ import annotations

import numpy as np
import pytest

from pdtransfer import rows
from pdtransfer.cancel import Cancel
from pdtransfer.geometry import Int64s
from pdtransfer.pairing import Pairing, pair
from pdtransfer.plan import plan
from pdtransfer.transports.mooncake import ring
from tests.layout_tensors import CANARY, Model, Pool, c4, dsa_index, mha, mla

HOST = ("layer_first", "page_first", "page_first_direct", "page_head")
ITEMS = ("layer_first", "page_first", "page_first_direct")
CASES = [
    *((model, source, target) for model in (mha(), mla()) for source in HOST for target in HOST),
    *((model, source, target) for model in (dsa_index(), c4()) for source in ITEMS for target in ITEMS),
]


def through(pairing: Pairing, source_slots: Int64s, target_slots: Int64s, source: Pool, target: Pool) -> None:
    """Every piece into a slot's worth of bytes, and from there as its runs say."""
    cut = ring.cut(pairing)
    for piece in cut.pieces(len(source_slots)):
        slot = np.full(ring.SLOT_BYTES, 0xAA, np.uint8)
        gathered = cut.gather(piece, source_slots)
        assert gathered.bytes <= ring.SLOT_BYTES
        rows.copy(gathered, source.memory.ctypes.data, slot.ctypes.data, Cancel())
        runs = cut.runs(piece, target_slots)
        assert len(runs) <= ring.OPERATIONS_MAX
        for here, there, byte_count in runs.tolist():
            assert here + byte_count <= gathered.bytes
            target.memory[there : there + byte_count] = slot[here : here + byte_count]


@pytest.mark.parametrize("slot_bytes", [2_304, 9_000, ring.SLOT_BYTES])
@pytest.mark.parametrize(("model", "source", "target"), CASES)
def test_what_passes_through_the_ring_lands_where_the_plan_says(
    model: Model, source: str, target: str, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "SLOT_BYTES", slot_bytes)
    monkeypatch.setattr(ring, "OPERATIONS_MAX", 40)
    ours = Pool(name=source, model=model, page_size=8, slots=64)
    ours.fill(np.arange(64))
    draw = np.random.default_rng(1)
    for target_slots in (np.arange(5, 45), draw.permutation(64)[:40]):
        theirs = [Pool(name=target, model=model, page_size=4, slots=64) for _ in range(2)]
        pairing, source_slots = pair(ours.layout, theirs[0].layout).fused(), draw.permutation(64)[:40]
        through(pairing, source_slots, target_slots, ours, theirs[0])
        whole = plan(pairing, source_slots, target_slots)
        rows.copy(whole, ours.memory.ctypes.data, theirs[1].memory.ctypes.data, Cancel())
        assert np.array_equal(theirs[0].memory, theirs[1].memory)
        assert (theirs[0].memory == CANARY).sum() < theirs[0].memory.size


def test_rows_that_lie_together_in_the_arena_go_as_one_operation_a_slot() -> None:
    ours, theirs = (
        Pool(name=n, model=mla(layers=range(61)), page_size=1, slots=512) for n in ("layer_first", "page_first")
    )
    cut = ring.cut(pair(ours.layout, theirs.layout).fused())
    pieces = list(cut.pieces(512))
    assert [len(cut.runs(piece, np.arange(512))) for piece in pieces] == [1] * len(pieces)
    assert len(pieces) == -(-512 // (ring.SLOT_BYTES // (61 * 1_152)))


def test_rows_of_a_layer_first_arena_go_plane_by_plane_in_long_operations() -> None:
    ours, theirs = (
        Pool(name=n, model=mla(layers=range(61)), page_size=1, slots=512) for n in ("page_first", "layer_first")
    )
    cut = ring.cut(pair(ours.layout, theirs.layout).fused())
    runs = [run for piece in cut.pieces(512) for run in cut.runs(piece, np.arange(512)).tolist()]
    assert sum(run[2] for run in runs) == 512 * 61 * 1_152
    assert min(run[2] for run in runs) == 512 * 1_152

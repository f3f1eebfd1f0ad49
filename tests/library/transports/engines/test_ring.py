"""What a send ring does to a plan: through slots of it every byte comes where the plan alone would have put it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdtransfer.kernels import numpy_copy, pools
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import plan
from pdtransfer.transports.engines import ring
from tests.support.layout_tensors import CANARY, Model, Pool, c4, dsa_index, mha, mla

Fill = Callable[..., Any]
HOST = ("layer_first", "page_first", "page_first_direct", "page_head")
ITEMS = ("layer_first", "page_first", "page_first_direct")
CASES = [
    *((model, source, target) for model in (mha(), mla()) for source in HOST for target in HOST),
    *((model, source, target) for model in (dsa_index(), c4()) for source in ITEMS for target in ITEMS),
]


def through(
    cut: ring.Cut, fill: Fill, source_slots: Int64s, target_slots: Int64s, source: Pool, target: Pool
) -> None:  # fmt: skip
    """Every piece into a slot's worth of bytes, and from there as its runs say."""
    all_runs = cut.all_runs(target_slots)
    for number, piece in enumerate(cut.pieces(len(source_slots))):
        slots = np.full((ring.SLOTS, ring.SLOT_BYTES), CANARY, np.uint8)
        at = number % ring.SLOTS
        fill(cut, piece, source_slots, source, slots, at)
        assert (slots[(at + 1) % ring.SLOTS] == CANARY).all()
        runs = cut.runs(piece, target_slots) if all_runs is None else cut.runs_within(piece, all_runs)
        assert len(runs) <= ring.OPERATIONS_MAX
        assert runs[:, 2].sum() == piece.rows * cut.pairing.table[piece.low : piece.high, 6].sum()
        for here, there, byte_count in runs.tolist():
            assert here + byte_count <= ring.SLOT_BYTES
            target.memory[there : there + byte_count] = slots[at, here : here + byte_count]


def by_copy(
    cut: ring.Cut, piece: ring.Piece, source_slots: Int64s, source: Pool, slots: NDArray[np.uint8], at: int
) -> None:  # fmt: skip
    gathered = cut.gather(piece, source_slots)
    assert gathered.bytes <= ring.SLOT_BYTES
    numpy_copy.copy(gathered, source.memory.ctypes.data, slots[at].ctypes.data, CancelWord())


def by_launch(
    cut: ring.Cut, piece: ring.Piece, source_slots: Int64s, source: Pool, slots: NDArray[np.uint8], at: int
) -> None:  # fmt: skip
    """What a GPU is asked for, on the CPU."""
    theirs, ours = cut.layouts(piece)
    ours.check_within(slots.nbytes, "ring")
    kv_copy(
        pools.Pool(layout=ours, address=slots.ctypes.data),
        pools.Pool(layout=theirs, address=source.memory.ctypes.data),
        range(at * piece.room, at * piece.room + piece.rows), source_slots[piece.first : piece.end], piece.rows,
    )  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("fill", [by_copy, by_launch])
@pytest.mark.parametrize("slot_bytes", [2_304, 9_000, ring.SLOT_BYTES])
@pytest.mark.parametrize(("model", "source", "target"), CASES)
def test_what_passes_through_the_ring_lands_where_the_plan_puts_it(
    model: Model, source: str, target: str, slot_bytes: int, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "SLOT_BYTES", slot_bytes)
    monkeypatch.setattr(ring, "OPERATIONS_MAX", 40)
    monkeypatch.setattr(ring, "SLOTS", 3)
    ours = Pool(name=source, model=model, page_size=8, slots=64)
    ours.fill(np.arange(64))
    draw = np.random.default_rng(1)
    for target_slots in (np.arange(5, 45), draw.permutation(64)[:40]):
        theirs = [Pool(name=target, model=model, page_size=4, slots=64) for _ in range(2)]
        pairing, source_slots = pair(ours.layout, theirs[0].layout).fused(), draw.permutation(64)[:40]
        cut = ring.cut(pairing, paged=fill is by_launch)
        through(cut, fill, source_slots, target_slots, ours, theirs[0])
        whole = plan(pairing, source_slots, target_slots)
        numpy_copy.copy(whole, ours.memory.ctypes.data, theirs[1].memory.ctypes.data, CancelWord())
        assert np.array_equal(theirs[0].memory, theirs[1].memory)
        assert (theirs[0].memory == CANARY).sum() < theirs[0].memory.size


@pytest.mark.grid
@pytest.mark.parametrize("piece_bytes", [2_304, 9_000, ring.PIECE_BYTES])
@pytest.mark.parametrize(("model", "source", "target"), CASES)
def test_what_leaves_from_the_pool_itself_lands_where_the_plan_puts_it(
    model: Model, source: str, target: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(ring, "SLOT_BYTES", min(piece_bytes, ring.SLOT_BYTES))
    monkeypatch.setattr(ring, "OPERATIONS_MAX", 40)
    ours = Pool(name=source, model=model, page_size=8, slots=64)
    ours.fill(np.arange(64))
    draw = np.random.default_rng(1)
    for slots in (np.arange(5, 45), draw.permutation(64)[:40]):
        theirs = [Pool(name=target, model=model, page_size=4, slots=64) for _ in range(2)]
        pairing, source_slots = pair(ours.layout, theirs[0].layout).fused(), np.roll(slots, 7)
        cut = ring.cut(pairing)
        for piece in cut.pieces(len(slots), straight=True):
            runs = cut.straight(piece, source_slots, slots)
            assert len(runs) <= ring.OPERATIONS_MAX
            assert runs[:, 2].sum() <= piece_bytes
            for here, there, byte_count in runs.tolist():
                theirs[0].memory[there : there + byte_count] = ours.memory[here : here + byte_count]
        whole = plan(pairing, source_slots, slots)
        numpy_copy.copy(whole, ours.memory.ctypes.data, theirs[1].memory.ctypes.data, CancelWord())
        assert np.array_equal(theirs[0].memory, theirs[1].memory)
        assert (theirs[0].memory == CANARY).sum() < theirs[0].memory.size


def test_rows_that_lie_together_in_the_arena_go_as_one_operation_a_slot() -> None:
    ours, theirs = (
        Pool(name=n, model=mla(layers=range(61)), page_size=1, slots=512) for n in ("layer_first", "page_first")
    )
    cut = ring.cut(pair(ours.layout, theirs.layout).fused())
    pieces = list(cut.pieces(512))
    assert [len(cut.runs(piece, np.arange(512))) for piece in pieces] == [1] * len(pieces)
    sizes = [61 * 1_152 * (piece.end - piece.first) for piece in pieces]
    assert sizes[0] <= ring.FIRST_BYTES, "sending begins early"
    assert max(sizes) > ring.SLOT_BYTES - 61 * 1_152


def test_rows_of_a_layer_first_arena_go_plane_by_plane_in_long_operations() -> None:
    ours, theirs = (
        Pool(name=n, model=mla(layers=range(61)), page_size=1, slots=512) for n in ("page_first", "layer_first")
    )
    cut = ring.cut(pair(ours.layout, theirs.layout).fused())
    runs = [run for piece in cut.pieces(512) for run in cut.runs(piece, np.arange(512)).tolist()]
    assert sum(run[2] for run in runs) == 512 * 61 * 1_152
    assert min(run[2] for run in runs) >= 512 * 1_152


@pytest.mark.parametrize("target", ["layer_first", "page_first"])
def test_writes_of_many_lengths_and_all_slots_share_few_tables_of_a_card(target: str) -> None:
    ours, theirs = (
        Pool(name=n, model=mla(layers=range(61)), page_size=1, slots=4_096) for n in ("layer_first", target)
    )
    cut = ring.cut(pair(ours.layout, theirs.layout).fused(), paged=True)
    pieces = [piece for count in range(3_000, 4_096, 61) for piece in cut.pieces(count)]
    tables = {cut.layouts(piece) for piece in pieces}
    assert len(tables) == (1 if target == "page_first" else 61)
    assert min(piece.room * layout.row_bytes for piece in pieces for _, layout in [cut.layouts(piece)]) > 1 << 20

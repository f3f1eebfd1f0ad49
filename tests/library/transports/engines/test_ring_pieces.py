"""How a write is cut into pieces for the send ring, and what leaves from the pool itself."""

from __future__ import annotations

import numpy as np
import pytest

from pdtransfer.layout.pairing import pair
from pdtransfer.transports.engines.ring import OPERATIONS_MAX, PIECE_BYTES, SLOT_BYTES, Cut, cut
from tests.support.layout_tensors import Pool, mla


def made(source: str, target: str, slots: int = 16_384) -> Cut:
    source_side, target_side = (
        Pool(name=name, model=mla(layers=range(8)), page_size=page_size, slots=slots).layout
        for name, page_size in ((source, 64), (target, 1))
    )
    return cut(pair(source_side, target_side).fused())


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("names", [("layer_first", "page_first"), ("layer_first", "layer_first"), ("page_first",) * 2])
@pytest.mark.parametrize("rows", [1, 63, 4_000])
def test_pieces_are_all_rows_of_all_planes_once_and_fit(names: tuple[str, str], rows: int, straight: bool) -> None:
    by = made(*names)
    seen = np.zeros((rows, len(by.pairing.table)), np.int64)
    pieces = list(by.pieces(rows, straight=straight))
    for piece in pieces:
        part = seen[piece.first : piece.end, piece.low : piece.high]
        part += 1
        byte_count = piece.room * int(by.pairing.table[piece.low : piece.high, 6].sum())
        assert piece.rows <= piece.room
        assert byte_count <= (PIECE_BYTES if straight else SLOT_BYTES)
        assert part.size <= OPERATIONS_MAX or (part.shape[1] == 1 and not straight)
        assert by.last(piece, rows) == (piece is pieces[-1])
    assert (seen == 1).all()


@pytest.mark.parametrize("names", [("layer_first", "page_first"), ("layer_first", "layer_first"), ("page_first",) * 2])
def test_a_piece_moves_the_same_bytes_by_the_ring_and_straight(names: tuple[str, str]) -> None:
    by, rng = made(*names), np.random.default_rng(3)
    source_slots, target_slots = rng.permutation(16_384)[:150], rng.permutation(16_384)[:150]

    def bytes_of(runs: np.ndarray) -> set[tuple[int, int]]:
        """(where from, where to) of each 128 bytes."""
        return {(source + at, target + at) for source, target, count in runs.tolist() for at in range(0, count, 128)}

    for piece in [*by.pieces(150), *by.pieces(70)]:
        rows = slice(piece.first, piece.end)
        inwards = dict(bytes_of(by.gather(piece, source_slots).byte_runs()))
        into = {slot: pool for pool, slot in inwards.items()}
        by_the_ring = {(into[slot], there) for slot, there in bytes_of(by.runs(piece, target_slots))}
        assert len(by_the_ring) == (rows.stop - rows.start) * by.pairing.table[piece.low : piece.high, 6].sum() // 128
        assert by_the_ring == bytes_of(by.straight(piece, source_slots, target_slots))


@pytest.mark.parametrize("run", [1, 64, 4_000])
@pytest.mark.parametrize("source", ["layer_first", "page_first"])
def test_a_piece_of_a_write_that_was_planned_whole_is_the_piece_planned_alone(source: str, run: int) -> None:
    by, draw = made(source, "page_first"), np.random.default_rng(3)
    target_slots = (draw.permutation(16_384 // run)[:, None] * run + np.arange(run)).reshape(-1)[:4_000]
    all_runs = by.all_runs(target_slots)
    assert all_runs is not None
    pieces = list(by.pieces(4_000))
    assert len(pieces) > 8
    for piece in pieces:
        runs = by.runs_within(piece, all_runs)
        assert (runs[1:, 0] == runs[:-1, 0] + runs[:-1, 2]).all()
        assert runs[np.argsort(runs[:, 1])].tolist() == by.runs(piece, target_slots).tolist()


def test_pieces_of_few_rows_or_of_many_planes_are_planned_alone() -> None:
    few = 2 * SLOT_BYTES // (8 * 1_152)
    assert made("layer_first", "page_first").all_runs(np.arange(few)) is None
    assert made("layer_first", "page_first").all_runs(np.arange(few + 1)) is not None
    assert made("layer_first", "layer_first").all_runs(np.arange(4_000)) is None


@pytest.mark.parametrize(
    ("names", "run", "long"),
    [
        (("page_first", "page_first"), 64, True),
        (("page_first", "page_first"), 8, True),  # of 9,216 bytes
        (("page_first", "page_first"), 4, False),
        (("layer_first", "layer_first"), 64, True),  # of 1,152 bytes
        (("layer_first", "layer_first"), 32, False),
        (("layer_first", "page_first"), 64, False),  # a row of a layer at a time
    ],
)
def test_what_goes_straight_is_in_long_runs_on_both_sides(names: tuple[str, str], run: int, long: bool) -> None:
    slots = (np.random.default_rng(1).permutation(16_384 // run)[:, None] * run + np.arange(run)).reshape(-1)
    whole = np.arange(len(slots))
    assert made(*names).long(slots, whole) is long
    assert made(*names).long(whole, slots) is long

"""Which bytes of an arena rows need, and which of them are still to be entered."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.layout.layout import Layout
from pdtransfer.layout.pairing import pair
from pdtransfer.transports.shm import entering
from pdtransfer.transports.shm.entering import Parts, parts_of
from tests.support.shm_pair import LAYERS, PAGE, ROW, layer_first, page_first

SLOTS = 512


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_missing_until_they_are_added(seed: int) -> None:
    rng, parts, there = np.random.default_rng(seed), Parts(), np.zeros(64, np.bool_)
    for _ in range(40):
        first, end = sorted(rng.choice(65, 2, replace=False).tolist())
        gaps = parts.missing(first, end)
        wanted = np.zeros(64, np.bool_)
        for gap_first, gap_end in gaps:
            wanted[gap_first:gap_end] = True
        inside = np.arange(64)
        assert np.array_equal(wanted, ~there & (inside >= first) & (inside < end))
        assert all(before[1] < behind[0] for before, behind in pairwise(gaps)), "none touch"
        for gap in gaps[: rng.integers(3)]:
            parts.add(*gap)
            there[slice(*gap)] = True
    assert (parts.missing(0, 64) == []) == there.all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("target", [layer_first(SLOTS, base=12_288), page_first(SLOTS)])
def test_parts_of_slots_are_the_pieces_with_their_rows_and_few_others(
    target: Layout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entering, "PIECE_BYTES", 8_192)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SLOTS)[: rng.integers(1, 40)]
    parts = parts_of(pair(layer_first(SLOTS), target), extents_of(slots))
    pieces = {piece for first, end in parts.tolist() for piece in range(first // 8_192, end // 8_192)}
    assert (parts % 8_192 == 0).all()
    assert (parts[1:, 0] > parts[:-1, 1]).all(), "disjoint, and none touch"

    def pieces_of(slots: np.ndarray) -> set[int]:
        rows = np.concatenate([np.ravel(target.address(layer, slots)) for layer in range(LAYERS)])
        return {int(byte) // 8_192 for row in rows for byte in (row, row + ROW - 1)}

    whole_pages = (slots[:, None] // PAGE * PAGE + np.arange(PAGE)).ravel()
    assert pieces_of(slots) <= pieces <= pieces_of(whole_pages)


def test_planes_of_no_layer_need_no_bytes() -> None:
    pairing = pair(layer_first(SLOTS), layer_first(SLOTS))
    assert parts_of(pairing.within_layers(LAYERS, LAYERS + 1), np.array([[0, 9]])).shape == (0, 2)
    assert parts_of(pairing, np.empty((0, 2), np.int64)).shape == (0, 2)

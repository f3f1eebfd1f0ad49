"""Which bytes of an arena rows need, and which of them are still to be entered."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import TransportError
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.layout.layout import Layout
from pdtransfer.layout.pairing import pair
from pdtransfer.memory import mapping as mappings
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.shm import entering
from pdtransfer.transports.shm.entering import EnteredArena, Parts, parts_of
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


def test_parts_of_many_extents_are_those_of_few_planes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "PIECE_BYTES", 8_192)
    pairing = pair(layer_first(SLOTS), layer_first(SLOTS, base=12_288))
    extents = extents_of(np.random.default_rng(3).permutation(SLOTS)[:100])
    whole = parts_of(pairing, extents)
    monkeypatch.setattr(entering, "_ROUNDED_MAX", 2 * len(extents))
    assert len(pairing.table) > 2
    assert np.array_equal(parts_of(pairing, extents), whole)


STEP = 4_096


class Entered:
    """An arena of this many steps, of which the first are backed, and what is entered of it, in order."""

    def __init__(self, steps: int, backed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entering, "STEP_BYTES", STEP)
        monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
        self.order, self.enters = list[int](), lambda _: None
        made = ArenaMemory.create(steps * STEP, huge_pages="never")
        made.mapping.prefault(end=backed * STEP)
        mapping: Any = SimpleNamespace(prefault=self._prefault)
        self.arena = EnteredArena(mapping, os.dup(made.fd), steps * STEP, None)
        self._made = made

    def _prefault(self, *, first: int, end: int) -> None:
        assert end - first <= STEP
        self.order.append(first // STEP)
        self.enters(first // STEP)

    def enter(self, first: int, end: int, *, urgent: bool = False) -> None:
        """Enters these steps, each by a call of its own."""
        left = np.array([[first * STEP, end * STEP]])
        while len(left):
            left = self.arena.enter(left, urgent=urgent)

    def close(self) -> None:
        self.arena.close_fd()
        self._made.close()


def test_rows_that_are_computed_do_not_wait_for_all_that_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 1_000
    it = Entered(steps, steps, monkeypatch)
    computed = steps - 1

    def slow(step: int) -> None:
        if step != computed and computed not in it.order:
            time.sleep(0.02)

    it.enters = slow
    granted = threading.Thread(target=it.enter, args=(0, computed))
    granted.start()
    it.enter(computed, steps, urgent=True)
    assert len(it.order) < steps, "the others are not all entered"
    granted.join()
    assert sorted(it.order) == list(range(steps))
    assert it.arena.whole
    it.close()


def test_a_call_enters_a_step_of_what_is_missing_and_returns_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Entered(9, 9, monkeypatch)
    it.enter(1, 3)
    left = it.arena.enter(np.array([[0, 5 * STEP], [6 * STEP, 8 * STEP]]))
    assert it.order == [1, 2, 0]
    assert left.tolist() == [[STEP, 5 * STEP], [6 * STEP, 8 * STEP]]
    left = it.arena.enter(left)
    assert it.order == [1, 2, 0, 3], "what is there costs no call"
    assert it.arena.enter(left).tolist() == [[6 * STEP, 8 * STEP]]
    assert it.arena.enter(np.array([[0, 5 * STEP], [6 * STEP, 8 * STEP]])).tolist() == [[7 * STEP, 8 * STEP]]
    it.enter(0, 9)
    assert it.arena.whole
    assert len(it.arena.enter(left)) == 0
    assert sorted(it.order) == list(range(9))
    it.close()


@pytest.mark.parametrize("first", [3, 4])
def test_rows_where_nothing_is_backed_are_refused(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Entered(9, 4, monkeypatch)
    with pytest.raises(TransportError, match=f"its owner has backed {4 * STEP}"):
        it.enter(first, 6)
    assert it.order == list(range(first, 4))
    it.close()

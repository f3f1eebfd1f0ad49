"""Free extents against a plain set of slots, whether they are put in their places one by one or in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.handoff import slot_allocator
from pdtransfer.handoff.slot_allocator import Extents, FreeExtents
from tests.support.effort import some

bounded = settings(max_examples=some(80), deadline=None)
SLOTS = 128
FEW = (0, 2, 1 << 20)


def slots_in(extents: Extents) -> list[int]:
    return [slot for start, count in extents.tolist() for slot in range(start, start + count)]


def runs_of(slots: set[int]) -> list[tuple[int, int]]:
    """Maximal (start, count), ascending."""
    starts = sorted(slot for slot in slots if slot - 1 not in slots)
    ends = sorted(slot + 1 for slot in slots if slot + 1 not in slots)
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def best_fit(free: set[int], wanted: int) -> list[tuple[int, int]]:
    """The rule in full: the shortest run that holds what is wanted, else the longest."""
    taken: list[tuple[int, int]] = []
    free = set(free)
    while wanted:
        by_size = sorted((count, start) for start, count in runs_of(free))
        count, start = next((run for run in by_size if run[0] >= wanted), by_size[-1])
        count = min(count, wanted)
        taken.append((start, count))
        free -= set(range(start, start + count))
        wanted -= count
    return taken


@bounded
@pytest.mark.parametrize("few", FEW)
@given(data=st.data())
def test_leases_are_best_fit_and_freed_runs_join(few: int, data: Any) -> None:
    granule = data.draw(st.sampled_from((1, 4)))
    free, extents, held = set(range(SLOTS)), FreeExtents(SLOTS, granule), list[Extents]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_allocator, "_FEW", few)
        for _ in range(data.draw(st.integers(1, 30))):
            if held and data.draw(st.booleans()):
                back = held.pop(data.draw(st.integers(0, len(held) - 1)))
                extents.free(back)
                free |= set(slots_in(back))
            else:
                count = data.draw(st.sampled_from((1, 2, 3, 5, 20, 70)))
                wanted, got = -(-count // granule) * granule, extents.allocate(count)
                if wanted > len(free):
                    assert got is None
                    continue
                assert got is not None
                assert [tuple(run) for run in got.tolist()] == best_fit(free, wanted)
                free -= set(slots_in(got))
                held.append(got)
            assert extents.free_slots == len(free)
            assert extents.largest == max((count for _, count in runs_of(free)), default=0)
        for back in held:
            extents.free(back)
    assert (extents.free_slots, extents.largest, extents.fragmentation) == (SLOTS, SLOTS, 0.0)


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("back", [[[0, 4]], [[10, 2], [3, 1]], [[8, 0]], [[-1, 1]], [[15, 2]], [[4, 8], [11, 2]]])
def test_freeing_what_is_free_or_nowhere_is_our_bug(
    few: int, back: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_allocator, "_FEW", few)
    extents = FreeExtents(16)
    held = extents.allocate(16)
    assert held is not None
    extents.free(np.array([[0, 4]]))
    with pytest.raises(AssertionError):
        extents.free(np.array(back))


@pytest.mark.parametrize("few", FEW)
def test_runs_used_up_together_come_back_one_by_one(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_allocator, "_FEW", few)
    extents = FreeExtents(16)
    singles = [extents.allocate(1) for _ in range(16)]
    extents.free(np.concatenate([single for single in singles[::2] if single is not None]))
    got = extents.allocate(5)
    assert got is not None
    assert got[:, 1].tolist() == [1] * 5
    for back in (*(run[None] for run in got), *singles[1::2]):
        assert back is not None
        extents.free(back)
    assert extents.largest == extents.free_slots == 16

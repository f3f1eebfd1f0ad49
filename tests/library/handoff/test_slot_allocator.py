"""The arena's slots against naive models: a list of flags for what is free, a set for what is claimed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from pdtransfer.errors import LocalProtocolError
from pdtransfer.handoff import slot_allocator
from pdtransfer.handoff.slot_allocator import (
    Extents,
    ExtentSet,
    FreeExtents,
    SlotAllocator,
    cut,
    end_of,
    extents_of,
    slot_count,
    slots_below,
    slots_of,
)
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, host_layout
from tests.support.effort import some

GRANULE, SLOTS = 4, 160
FEW = (0, 2, 1 << 20)


def extents(*pairs: tuple[int, int]) -> Extents:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def naive_slots(of: Extents) -> list[int]:
    return [slot for start, count in of.tolist() for slot in range(start, start + count)]


def runs(free: set[int]) -> list[tuple[int, int]]:
    """(start, count) of the maximal runs in a set of slots."""
    found: list[tuple[int, int]] = []
    for slot in sorted(free):
        if found and sum(found[-1]) == slot:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found


def best_fit(free: set[int], wanted: int) -> list[tuple[int, int]]:
    """The rule in full: the shortest run that holds what is wanted, else the longest."""
    taken: list[tuple[int, int]] = []
    free = set(free)
    while wanted:
        by_size = sorted((count, start) for start, count in runs(free))
        count, start = next((run for run in by_size if run[0] >= wanted), by_size[-1])
        count = min(count, wanted)
        taken.append((start, count))
        free -= set(range(start, start + count))
        wanted -= count
    return taken


@settings(max_examples=some(80), deadline=None)
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
                free |= set(naive_slots(back))
            else:
                count = data.draw(st.sampled_from((0, 1, 2, 3, 5, 20, 70)))
                wanted, got = -(-count // granule) * granule, extents.allocate(count)
                if wanted > len(free):
                    assert got is None
                    continue
                assert got is not None
                assert [tuple(run) for run in got.tolist()] == best_fit(free, wanted)
                free -= set(naive_slots(got))
                held.append(got)
            assert extents.free_slots == len(free)
            largest = max((count for _, count in runs(free)), default=0)
            assert extents.largest == largest
            assert extents.fragmentation == (1 - largest / len(free) if free else 0)
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
    assert extents.allocate(16) is not None
    assert extents.largest == 0
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


# Holdings


def component(name: str, slots: int, page: int, base: int = 0) -> Component:
    return Component(
        name, "dram", 1, Span(), Layout((Plane(0, "latent", "int64", 0, 1, base, 8 * page, 8, 8),), page, slots)
    )


def test_components_are_leased_together_or_not_at_all() -> None:
    arena = SlotAllocator([component("kv", 64, 1), component("c4", 16, 4)])
    assert arena.allocate([10, 17]) is None
    assert [free.free_slots for free in arena.free] == [64, 16]
    assert arena.allocate([10, 13]) is not None
    assert [free.free_slots for free in arena.free] == [54, 0]
    assert arena.allocate([1, 1]) is None
    assert arena.allocate([1, 0]) is not None


def test_what_is_backed_with_memory_stays_so_whatever_is_reported_later() -> None:
    arena = SlotAllocator([component("kv", 64, 1)], bytes_ready=0)
    for bytes_ready in (128, 256, 128):
        arena.grow(bytes_ready)
    free = arena.free[0]
    assert (arena.bytes_ready, free.ready, free.free_slots, free.largest) == (256, 32, 32, 32)
    assert free.allocate(33) is None


def test_of_components_in_another_memory_alone_all_slots_are_ready_at_once() -> None:
    both = [component("kv", 64, 1), replace(component("hbm", 16, 1, 512), memory="hbm")]
    for bytes_ready, hbm_apart, ready in ((0, False, [0, 0]), (0, True, [0, 16]), (None, False, [64, 16])):
        arena = SlotAllocator(both, bytes_ready, hbm_apart=hbm_apart)
        assert [each.ready for each in arena.free] == ready
        assert arena.bytes_ready == (640 if bytes_ready is None else 0)


def test_what_fits_an_empty_arena_counts_whole_pages() -> None:
    arena = SlotAllocator([component("kv", 16, 4), component("window", 8, 4, 128)])
    assert arena.fits([13, 8])
    assert arena.fits([16, 0])
    assert not arena.fits([17, 0])


def test_slots_are_free_when_the_last_claim_has_ended() -> None:
    arena = SlotAllocator([component("kv", 64, 1)])
    holding = arena.allocate([64])
    assert holding is not None
    assert holding.bytes == 64 * 8
    holding.claims += 2
    assert not arena.drop(holding)
    assert not arena.drop(holding)
    assert arena.free[0].free_slots == 0
    assert arena.drop(holding)
    assert arena.free[0].free_slots == 64
    with pytest.raises(AssertionError):
        arena.drop(holding)


# Extents as sequences of slots

lists = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), max_size=8).map(lambda pairs: extents(*pairs))


@given(lists, st.data())
def test_slots_of_lists_every_slot_in_order(of: Extents, data: st.DataObject) -> None:
    naive = naive_slots(of)
    count = data.draw(st.none() | st.integers(0, len(naive)))
    got = slots_of(of, count=count)
    assert got.dtype == np.int64
    assert got.tolist() == naive[:count]
    assert slots_of(runs_of := extents_of(got)).tolist() == naive[:count]
    assert runs_of.shape == (sum(after != before + 1 for before, after in pairwise([-2, *naive[:count]])), 2)
    assert (slot_count(of), end_of(of)) == (len(naive), max(naive, default=-1) + 1)


@given(lists, st.data())
def test_cut_keeps_the_slots_asked_for_in_as_few_extents(of: Extents, data: st.DataObject) -> None:
    naive = naive_slots(of)
    first = data.draw(st.integers(0, max(0, len(naive) - 1)))
    count = data.draw(st.integers(0, len(naive) - first))
    got = cut(of, first=first, count=count)
    assert naive_slots(got) == naive[first : first + count]
    assert (got[:, 1] > 0).all()
    assert len(got) <= len(of)


# Sets of extents


class Claims(RuleBasedStateMachine):
    """Any order of adding and removing, beside a set of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.set = ExtentSet()
        self.model: set[int] = set()
        self.added: list[Extents] = []

    @rule(new=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=4))
    def add(self, new: list[tuple[int, int]]) -> None:
        pairs = extents(*new)
        slots = naive_slots(pairs)
        clashes = len(set(slots)) < len(slots) or bool(self.model & set(slots))
        if clashes:
            (a, a_count), (b, b_count) = self.set.clash(pairs)
            assert max(a, b) < min(a + a_count, b + b_count), "these two do not overlap"
            known = [(start, count) for each in [*self.added, pairs] for start, count in each.tolist()]
            assert (a, a_count) in known
            assert (b, b_count) in known
        assert self.set.add(pairs) == (not clashes)
        if not clashes:
            self.model |= set(slots)
            self.added.append(pairs)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = self.added.pop(data.draw(st.integers(0, len(self.added) - 1)))
        self.set.remove(gone)
        self.model -= set(naive_slots(gone))

    @invariant()
    def it_holds_what_was_added_and_not_removed(self) -> None:
        assert len(self.set) == sum(len(each) for each in self.added)
        assert all(self.set.overlaps_run(slot, 1) == (slot in self.model) for slot in range(0, 70, 3))


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=some(150), stateful_step_count=30, deadline=None)


def test_removing_what_was_never_added_is_caught() -> None:
    claims = ExtentSet()
    assert claims.add(extents((4, 4), (20, 4)))
    for never in (extents((4, 2)), extents((2, 6)), extents((4, 4), (20, 3)), extents((4, 4), (18, 6))):
        with pytest.raises(AssertionError, match="no such extent"):
            claims.remove(never)
    claims.remove(extents((20, 4), (4, 4)))
    assert len(claims) == 0


@pytest.mark.parametrize("name", HOST_LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_below_are_the_first_pages_all_of_whose_bytes_are(name: str, page_size: int) -> None:
    layout = host_layout(
        name, kinds=("k", "v"), layers=2, heads=2, head_bytes=4, dtype="uint8", slots=16, page_size=page_size, base=8
    )
    ends = [
        int(max(layout.address(index, slot) + plane.row_bytes for index, plane in enumerate(layout.planes)))
        for slot in range(layout.slots)
    ]
    pages = [max(ends[page : page + page_size]) for page in range(0, layout.slots, page_size)]
    for byte_count in range(700):
        below = [end <= byte_count for end in pages]
        assert slots_below(layout, byte_count) == [*below, False].index(False) * page_size


@pytest.mark.parametrize(
    "wrong",
    [((8, 4), (10, 2)), ((4, 1), (4, 1)), ((0, 1), (33, 1)), ((0, 33),), ((40, 1),), ((31, 2),)],
    ids=["some twice", "one slot twice", "one that is taken", "more than are free", "outside", "partly taken"],
)
def test_exactly_the_chosen_slots_are_taken_or_none(wrong: tuple[tuple[int, int], ...]) -> None:
    free = FreeExtents(40)
    assert free.take(extents((32, 8)))
    assert not free.take(extents(*wrong))
    assert (free.free_slots, free.largest) == (32, 32)
    assert free.take(extents((30, 2), (1, 2), (0, 1)))
    assert (free.free_slots, free.largest) == (27, 27)


def test_slots_of_a_room_that_cannot_be_placed_are_all_free_again() -> None:
    """The second component's are taken already: those of the first come back, and no room is reported drained."""
    arena = SlotAllocator([component("kv", 32, 1), component("window", 16, 1, base=256)], engine_slots=True)
    held = arena.take(1, (extents((0, 8)), extents((4, 4))))
    assert held.bytes == 12 * 8
    with pytest.raises(LocalProtocolError, match="some of 'window' belong to a room that has not drained"):
        arena.take(2, (extents((8, 8)), extents((0, 8))))
    assert [each.free_slots for each in arena.free] == [24, 12]
    assert arena.drop(held)
    assert arena.drained == [1]
    assert arena.drop(arena.take(2, (extents((8, 8)), extents((0, 8)))))
    assert [each.free_slots for each in arena.free] == [32, 16]

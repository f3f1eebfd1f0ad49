"""The arena's slots against naive models: a list of flags for what is free, a set for what is claimed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdtransfer.errors import LocalProtocolError
from pdtransfer.handoff.slot_allocator import (
    Extents,
    ExtentSet,
    FreeExtents,
    SlotAllocator,
    cut,
    slots_below,
    slots_of,
)
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, host_layout
from tests.support.effort import some

GRANULE, SLOTS = 4, 160


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


class AllocateAndFree(RuleBasedStateMachine):
    """Any order of allocating and freeing, beside a set of the free slots."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeExtents(SLOTS, GRANULE)
        self.model = set(range(SLOTS))
        self.held: list[Extents] = []

    @rule(count=st.integers(0, SLOTS + 8))
    def allocate(self, count: int) -> None:
        wanted = -(-count // GRANULE) * GRANULE
        before = runs(self.model)
        got = self.free.allocate(count)
        if wanted > len(self.model):
            assert got is None
            return
        assert got is not None
        taken = naive_slots(got)
        assert len(taken) == len(set(taken)) == wanted
        assert set(taken) <= self.model
        assert (got % GRANULE == 0).all()
        fitting = [size for _, size in before if size >= wanted]
        if not wanted:
            assert not len(got)
        elif fitting:
            assert len(got) == 1, "one run would have held it"
            assert next(size for start, size in before if start == got[0, 0]) == min(fitting), "not the best fit"
        else:
            sizes = sorted((size for _, size in before), reverse=True)
            assert got[:-1, 1].tolist() == sizes[: len(got) - 1], "not the fewest runs"
        self.model -= set(taken)
        self.held.append(got)

    @rule(count=st.integers(20, SLOTS // GRANULE))
    def shatter(self, count: int) -> None:
        """Pages one by one, and every other of them back at once: many runs that do not touch."""
        pages = [page for page in (self.free.allocate(1) for _ in range(count)) if page is not None]
        self.model -= {slot for page in pages for slot in naive_slots(page)}
        self.held += pages[::2]
        if pages[1::2]:
            back = np.concatenate(pages[1::2])
            self.free.free(back)
            self.model |= set(naive_slots(back))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        given = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.free.free(given)
        self.model |= set(naive_slots(given))

    @invariant()
    def what_is_free_matches_the_model(self) -> None:
        assert self.free.free_slots == len(self.model)
        found = runs(self.model)
        largest = max((size for _, size in found), default=0)
        assert self.free.largest == largest
        assert self.free.fragmentation == (1 - largest / len(self.model) if self.model else 0)
        assert [(start, self.free._count_at[start]) for start in self.free._starts] == found


TestAllocateAndFree = AllocateAndFree.TestCase
TestAllocateAndFree.settings = settings(max_examples=some(150), stateful_step_count=40, deadline=None)


def test_fragmentation_is_0_while_all_that_is_free_is_one_run() -> None:
    free = FreeExtents(100)
    first, second, third = (free.allocate(count) for count in (20, 30, 50))
    assert free.fragmentation == 0
    free.free(second)
    assert free.fragmentation == 0
    free.free(third)
    assert free.fragmentation == 0
    held = free.allocate(30)
    free.free(first)
    assert free.fragmentation == pytest.approx(1 - 50 / 70)
    free.free(held)
    assert free.fragmentation == 0


@pytest.mark.parametrize("twice", [(0, 8), (4, 4), (8, 8), (12, 8), (0, 32)])
def test_a_double_free_is_caught(twice: tuple[int, int]) -> None:
    free = FreeExtents(32, 4)
    assert free.allocate(32) is not None
    free.free(extents((0, 16)))
    with pytest.raises(AssertionError, match="free already"):
        free.free(extents(twice))


@pytest.mark.parametrize("outside", [(28, 8), (-4, 4), (4, 0)])
def test_what_is_no_extent_of_the_arena_cannot_be_freed(outside: tuple[int, int]) -> None:
    free = FreeExtents(32, 4)
    assert free.allocate(32) is not None
    with pytest.raises(AssertionError, match="is not an extent"):
        free.free(extents(outside))


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
    arena.grow(256)
    arena.grow(128)
    assert (arena.bytes_ready, arena.free[0].ready) == (256, 32)


def test_what_fits_an_empty_arena_counts_whole_pages() -> None:
    arena = SlotAllocator([component("kv", 16, 4)])
    assert arena.fits([13])
    assert arena.fits([16])
    assert not arena.fits([17])


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


@given(lists, st.data())
def test_cut_keeps_the_slots_asked_for_in_as_few_extents(of: Extents, data: st.DataObject) -> None:
    naive = naive_slots(of)
    first = data.draw(st.integers(0, max(0, len(naive) - 1)))
    count = data.draw(st.integers(min(1, len(naive)), len(naive) - first))
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


def test_neighbours_do_not_overlap() -> None:
    claims = ExtentSet()
    assert claims.add(extents((4, 4), (12, 4)))
    assert claims.add(extents((8, 4), (0, 4)))
    claims.remove(extents((8, 4), (0, 4)))
    assert claims.overlaps_run(7, 1)
    assert not claims.overlaps_run(8, 4)


def test_removing_what_was_never_added_is_caught() -> None:
    claims = ExtentSet()
    assert claims.add(extents((4, 4), (20, 4)))
    for never in (extents((4, 2)), extents((2, 6)), extents((4, 4), (20, 3)), extents((4, 4), (18, 6))):
        with pytest.raises(AssertionError, match="no such extent"):
            claims.remove(never)
    claims.remove(extents((20, 4), (4, 4)))
    assert len(claims) == 0


@given(st.sampled_from(HOST_LAYOUTS), st.sampled_from([1, 4]), st.integers(0, 700))
def test_slots_below_are_the_first_pages_all_of_whose_bytes_are(name: str, page_size: int, byte_count: int) -> None:
    layout = host_layout(
        name, kinds=("k", "v"), layers=2, heads=2, head_bytes=4, dtype="uint8", slots=16, page_size=page_size, base=8
    )
    ends = [
        int(max(layout.address(index, slot) + plane.row_bytes for index, plane in enumerate(layout.planes)))
        for slot in range(layout.slots)
    ]
    below = [max(ends[page : page + page_size]) <= byte_count for page in range(0, layout.slots, page_size)]
    assert slots_below(layout, byte_count) == [*below, False].index(False) * page_size


def test_slots_may_be_had_once_they_are_ready_and_join_those_before() -> None:
    free = FreeExtents(SLOTS, GRANULE, 2 * GRANULE)
    assert free.allocate(3 * GRANULE) is None
    held = free.allocate(GRANULE)
    assert held is not None
    free.grow(4 * GRANULE)
    free.grow(SLOTS)
    assert (free.free_slots, free.largest) == (SLOTS - GRANULE, SLOTS - GRANULE)
    free.free(held)
    assert free.largest == SLOTS


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
    assert free.take(extents((30, 2), (0, 1)))
    assert (free.free_slots, free.largest) == (29, 29)


def test_slots_of_a_room_that_cannot_be_placed_are_all_free_again() -> None:
    """The second component's are taken already: those of the first come back, and no room is reported drained."""
    arena = SlotAllocator([component("kv", 32, 1), component("window", 16, 1, base=256)], engine_slots=True)
    held = arena.take(1, (extents((0, 8)), extents((4, 4))))
    with pytest.raises(LocalProtocolError, match="some of 'window' belong to a room that has not drained"):
        arena.take(2, (extents((8, 8)), extents((0, 8))))
    assert [each.free_slots for each in arena.free] == [24, 12]
    assert arena.drop(held)
    assert arena.drained == [1]
    assert arena.drop(arena.take(2, (extents((8, 8)), extents((0, 8)))))
    assert [each.free_slots for each in arena.free] == [32, 16]

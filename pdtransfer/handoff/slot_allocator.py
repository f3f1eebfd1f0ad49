"""Slots of an arena: extents by best fit, leased for all components together or for none.

Best fit keeps long runs whole, so that a request lands in few of them: over a network an operation costs the same,
whatever its size. Where the engine's own allocator chooses the slots, the same ledger takes those and no others.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from ..layout.layout import Component, Layout
from .component_variants import NO_STAND_INS, StandIns, labels, repeated

Extents = NDArray[np.int64]
"""(n, 2) int64: start, count."""

_FEW = 16  # extents that are inserted one by one; more are merged in one pass


def slots_below(layout: Layout, byte_count: int) -> int:
    """The number of a layout's first slots, in whole pages, that lie wholly below `byte_count`."""
    base, page_stride, row_stride, row_bytes = layout.table[:, 3:7].T
    left = byte_count - base - (layout.page_size - 1) * row_stride - row_bytes  # behind each plane's first page
    pages = np.where(left < 0, 0, left // np.maximum(page_stride, 1) + 1).min()
    return min(layout.slots, int(pages) * layout.page_size)


class FreeExtents:
    """The free slots of one component, in runs that never touch; sizes are multiples of `granule`, a page.

    Only the first `ready` of `slots` may be allocated, until `grow`.
    """

    def __init__(self, slots: int, granule: int = 1, ready: int | None = None) -> None:
        assert slots % granule == 0
        self.slots, self.granule, self.free_slots, self.ready = slots, granule, 0, 0
        self._starts: list[int] = []
        self._count_at: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.grow(slots if ready is None else ready)

    def grow(self, ready: int) -> None:
        """The first `ready` slots may be allocated now; never fewer than before."""
        assert self.ready <= ready <= self.slots
        assert ready % self.granule == 0
        before, self.ready = self.ready, ready
        if before < ready:
            self._join(before, ready - before)
            self.free_slots += ready - before

    @property
    def largest(self) -> int:
        """Slots of the longest free run."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """1 - largest run / free slots: 0 if all free slots are one run."""
        return 1.0 - self.largest / self.free_slots if self.free_slots else 0.0

    def in_pages(self, count: int) -> int:
        """`count` rounded up to whole pages."""
        return -(-count // self.granule) * self.granule

    def lacking(self, count: int) -> int:
        """The number of slots that must become free before `count` could be allocated."""
        return max(0, self.in_pages(count) - self.free_slots)

    def allocate(self, count: int) -> Extents | None:
        """`count` slots, rounded up to whole pages, in as few runs as best fit finds; None if too few are free."""
        wanted = self.in_pages(count)
        if wanted > self.free_slots:
            return None
        self.free_slots -= wanted
        taken: list[tuple[int, int]] = []
        while self.largest < wanted:  # no run holds the rest: the longest is used up
            size, start = self._by_size.pop()
            taken.append((start, size))
            wanted -= size
        if taken:
            self._forget([start for start, _ in taken])
        if wanted:
            size, start = self._by_size[bisect_left(self._by_size, (wanted, -1))]
            self._remove(start)
            if size > wanted:
                self._insert(start + wanted, size - wanted)
            taken.append((start, wanted))
        return np.array(taken, dtype=np.int64).reshape(-1, 2)

    def take(self, extents: Extents) -> bool:
        """Takes exactly these slots; False, with nothing taken, if one is not free or is there twice."""
        low, high = np.sort(extents[:, 0]), np.sort(extents[:, 0] + extents[:, 1])
        starts, counts = self._runs()
        ends = starts + counts
        around = np.searchsorted(starts, low, side="right") - 1
        twice = (low[1:] < high[:-1]).any()
        if twice or (len(low) and (around[0] < 0 or (high > ends[around]).any())):
            return False
        starts, ends = np.sort(np.concatenate([starts, high])), np.sort(np.concatenate([ends, low]))
        left = starts < ends
        self._rebuild(starts[left], (ends - starts)[left])
        return True

    def _forget(self, starts: list[int]) -> None:
        """Removes runs that have left `_by_size`."""
        for start in starts:
            del self._count_at[start]
        if len(starts) <= _FEW:
            for start in starts:
                del self._starts[bisect_left(self._starts, start)]
        else:
            self._starts = [start for start in self._starts if start in self._count_at]

    def free(self, extents: Extents) -> None:
        """Frees runs; to free a free slot is a bug in this package."""
        if len(extents) > _FEW:
            self._join_many(extents)
            return
        for start, count in extents.tolist():
            assert 0 <= start < start + count <= self.slots, f"{start}+{count} is not an extent of {self.slots} slots"
            self._join(start, count)
            self.free_slots += count

    def _join_many(self, extents: Extents) -> None:
        """As `_join` for each run, in one pass."""
        low, high = extents[:, 0], extents[:, 0] + extents[:, 1]
        assert ((low >= 0) & (low < high) & (high <= self.slots)).all(), f"{extents} must be among {self.slots} slots"
        runs = np.concatenate([np.stack(self._runs(), axis=1), extents])
        starts, counts = runs[np.argsort(runs[:, 0], kind="stable")].T
        ends = starts + counts
        assert (starts[1:] >= ends[:-1]).all(), "some of these slots are free already"
        opens = np.flatnonzero(np.concatenate([[True], starts[1:] != ends[:-1]]))
        self._rebuild(starts[opens], np.add.reduceat(counts, opens))

    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and count of each free run, ascending."""
        return np.array(self._starts, np.int64), np.array([self._count_at[start] for start in self._starts], np.int64)

    def _rebuild(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """These runs, ascending, are free, and no others."""
        self._starts = starts.tolist()
        self._count_at = dict(zip(self._starts, counts.tolist(), strict=True))
        self.free_slots = int(counts.sum())
        order = np.lexsort((starts, counts))
        self._by_size = list(zip(counts[order].tolist(), starts[order].tolist(), strict=True))

    def _join(self, start: int, count: int) -> None:
        index = bisect_left(self._starts, start)
        if index < len(self._starts):
            after = self._starts[index]
            assert start + count <= after, f"slots {start}+{count} are free already"
            if start + count == after:
                count += self._remove(after)
        if index:
            before = self._starts[index - 1]
            before_count = self._count_at[before]
            assert before + before_count <= start, f"slots {start}+{count} are free already"
            if before + before_count == start:
                count += self._remove(before)
                start = before
        self._insert(start, count)

    def _insert(self, start: int, count: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (count, start))
        self._count_at[start] = count

    def _remove(self, start: int) -> int:
        count = self._count_at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (count, start))]
        return count


@dataclass(slots=True, eq=False)
class Block:
    """Rows of a prompt that rooms share and none writes: whole pages of every component that has any of them."""

    key: bytes
    runs: tuple[tuple[tuple[int, int], ...], ...]  # (start, count) of each component
    claims: int = 1  # by holdings


@dataclass(slots=True, eq=False)
class Holding:
    """The slots of one room, one array of extents a component.

    They are free when the last claim has ended: the room's own, and one for each lease.
    """

    extents: tuple[Extents, ...]  # of all its rows in order, including those in blocks
    claims: int = 1
    bytes: int = field(default=0, kw_only=True)  # of `own`
    own: tuple[Extents, ...] = field(default=(), kw_only=True)  # in no block; freed with the holding
    blocks: Sequence[Block] = field(default=(), kw_only=True)  # from the prompt's first row on
    prefix: int = field(default=0, kw_only=True)  # tokens that the cache held when it was leased
    chosen_for: int | None = field(default=None, kw_only=True)  # the room whose slots the engine chose


class SlotAllocator:
    """The slots of every component of one decode node."""

    def __init__(
        self,
        components: Sequence[Component],
        bytes_ready: int | None = None,
        *,
        hbm_apart: bool = False,
        engine_slots: bool = False,
        stand_ins: StandIns = NO_STAND_INS,
    ) -> None:
        """With `hbm_apart` all slots of HBM components may be leased from the start: they are in another memory.

        With `engine_slots` the engine's allocator chooses every slot (`take`). It knows nothing of backing, so all
        slots may be taken from the start, and Grants wait until theirs are backed. Components may then lie in the same
        memory, each with its own layers, and share one numbering of slots. `stand_ins` are numbered by themselves: who
        takes slots of one takes those of the component that it stands in for as well.
        """
        if name := repeated(components):
            raise LocalProtocolError(f"components: {name!r} is registered twice in one memory")
        self.components = tuple(components)
        self.engine_slots, self.stand_ins = engine_slots, stand_ins
        self.drained: list[int] = []  # rooms whose chosen slots have become free; the caller takes them
        ready = None if bytes_ready is None or engine_slots else 0
        free = [
            FreeExtents(c.layout.slots, c.layout.page_size, None if hbm_apart and c.memory == "hbm" else ready)
            for c in self.components
        ]
        memories = aliases(self.components, stand_ins) if engine_slots else range(len(self.components))
        self.free = tuple([free[first] for first in memories])
        sizes = dict[int, int]()
        for component, first in zip(self.components, memories, strict=True):
            if component.name not in stand_ins:
                sizes[first] = max(sizes.get(first, 0), component.bytes_of(component.layout.slots))
        self.slot_bytes = sum(sizes.values())  # of all slots; components in the same memory count once
        # The bytes of a stand-in are those of the other one, which is leased with it.
        self._row_bytes = tuple(0 if c.name in stand_ins else c.layout.row_bytes for c in self.components)
        self.bytes_ready = 0 if bytes_ready is not None else max(c.layout.end for c in self.components)
        self.grow(bytes_ready or 0)

    def grow(self, bytes_ready: int) -> None:
        """The arena's first `bytes_ready` bytes are backed with memory: slots in them may be leased."""
        self.bytes_ready = max(self.bytes_ready, bytes_ready)
        for component, free in zip(self.components, self.free, strict=True):
            free.grow(max(free.ready, slots_below(component.layout, bytes_ready)))

    def fits(self, rows: Sequence[int]) -> bool:
        """True if an empty arena could hold these rows."""
        return all(free.in_pages(count) <= free.slots for free, count in zip(self.free, rows, strict=True))

    def allocate(self, rows: Sequence[int]) -> Holding | None:
        """Leases extents for `rows[i]` rows of component i, with the room's own claim; None, with nothing taken, if a
        component lacks slots."""
        for free, count in zip(self.free, rows, strict=True):
            if free.lacking(count):
                return None
        extents: list[Extents] = []
        byte_count = 0
        for free, row_bytes, count in zip(self.free, self._row_bytes, rows, strict=True):
            taken = free.allocate(count)
            assert taken is not None
            extents.append(taken)
            byte_count += row_bytes * count
        leased = tuple(extents)
        return Holding(leased, own=leased, bytes=byte_count)

    def take(self, room: int, extents: tuple[Extents, ...]) -> Holding:
        """Takes the slots that the engine chose for a room, with the room's own claim.

        Raises LocalProtocolError, with nothing taken, where a slot is taken already: its room has not drained.
        """
        byte_count = 0
        for index, (free, wanted) in enumerate(zip(self.free, extents, strict=True)):
            if len(wanted) and not free.take(wanted):
                for other, taken in zip(self.free[:index], extents[:index], strict=True):
                    other.free(taken)
                name = labels(self.components)[index]
                raise LocalProtocolError(f"slots: some of {name!r} belong to a room that has not drained")
            byte_count += self._row_bytes[index] * slot_count(wanted)
        return Holding(extents, own=extents, bytes=byte_count, chosen_for=room)

    def drop(self, holding: Holding) -> bool:
        """Ends one claim; returns whether it was the last, so that the holding's own slots are free."""
        assert holding.claims > 0
        holding.claims -= 1
        if holding.claims:
            return False
        for free, extents in zip(self.free, holding.own, strict=True):
            free.free(extents)
        if holding.chosen_for is not None:
            self.drained.append(holding.chosen_for)
        return True

    def lacking(self, rows: Sequence[int]) -> list[int]:
        """The number of slots of each component that must become free before these rows could be leased."""
        return [free.lacking(count) for free, count in zip(self.free, rows, strict=True)]


def aliases(components: Sequence[Component], stand_ins: StandIns = NO_STAND_INS) -> list[int]:
    """For each component the index of the first one that lies in the same memory: some of their planes begin at the
    same byte. A stand-in counts by itself. Raises LocalProtocolError where two other such components number their slots
    differently."""
    first_at: dict[int, int] = {}  # by the base of a plane
    firsts: list[int] = []
    for index, component in enumerate(components):
        if component.name in stand_ins:
            firsts.append(index)
            continue
        layout = component.layout
        bases = layout.table[:, 3].tolist()
        met = {first_at[base] for base in bases if base in first_at}
        first = min(met, default=index)
        other = components[first].layout
        ours, theirs = ((side.slots, side.page_size, set(side.table[:, 4].tolist())) for side in (layout, other))
        if ours != theirs:
            names = f"{components[first].name!r} and {component.name!r}"
            raise LocalProtocolError(f"components: {names} share memory, but not slots, page_size and page_stride")
        firsts = [first if earlier in met else earlier for earlier in firsts]
        first_at = {base: first if earlier in met else earlier for base, earlier in first_at.items()}
        first_at |= dict.fromkeys(bases, first)
        firsts.append(first)
    return firsts


def check_apart(components: Sequence[Component]) -> None:
    """Raises LocalProtocolError where two components lie in the same memory: leased apart, both would have its
    slots."""
    for index, first in enumerate(aliases(components)):
        if index != first:
            names = f"{components[first].name!r} and {components[index].name!r}"
            raise LocalProtocolError(f"components: {names} share memory, but not engine_slots=True")


def extents_of(slots: NDArray[np.int64]) -> Extents:
    """Slots in order, int64 (n,), as runs; the inverse of `slots_of`."""
    if not len(slots):
        return np.empty((0, 2), np.int64)
    opens = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1] + 1]))
    return np.stack([slots[opens], np.diff(np.append(opens, len(slots)))], axis=1)


def slot_count(extents: Extents) -> int:
    """The number of slots in the extents."""
    if len(extents) == 1:  # the usual case, in which numpy takes ten times as long
        return extents.item(1)
    return int(extents[:, 1].sum())


def end_of(extents: Extents) -> int:
    """One past their highest slot; 0 without extents."""
    if len(extents) == 1:
        return extents.item(0) + extents.item(1)
    return int(extents.sum(1).max(initial=0))


def slots_of(extents: Extents, *, count: int | None = None) -> NDArray[np.int64]:
    """The slots of extents in order, as int64: the first `count` of them, or all."""
    if len(extents) == 1:
        start = extents.item(0)
        return np.arange(start, start + (extents.item(1) if count is None else count), dtype=np.int64)
    counts = extents[:, 1]
    steps = np.ones(int(counts.sum()), dtype=np.int64)
    if len(extents):
        ends = np.cumsum(counts)[:-1]
        steps[0] = extents[0, 0]
        steps[ends] = extents[1:, 0] - (extents[:-1, 0] + counts[:-1] - 1)
    return np.cumsum(steps)[:count]


def cut(extents: Extents, *, first: int, count: int) -> Extents:
    """The extents of the slots [first, first + count) of `extents`, in order."""
    if not count:
        return extents[:0]
    if len(extents) == 1:
        return np.array(((extents.item(0) + first, count),), dtype=np.int64)
    ends = np.cumsum(extents[:, 1])
    starts = ends - extents[:, 1]
    low, high = np.maximum(starts, first), np.minimum(ends, first + count)
    keep = high > low
    return np.stack([extents[keep, 0] + (low - starts)[keep], (high - low)[keep]], axis=1)


class ExtentSet:
    """Disjoint extents, which detect overlaps with new ones."""

    def __init__(self) -> None:
        self._starts, self._ends = array("q"), array("q")  # both ascending, and alternating

    def add(self, extents: Extents) -> bool:
        """Adds all of them, or none if one overlaps; returns whether they were added."""
        if len(extents) == 1:
            return self.add_run(extents.item(0), extents.item(1))
        edges = self._with(extents)
        if edges is None:
            return False
        self._starts, self._ends = (array("q", side.tobytes()) for side in edges)
        return True

    def add_run(self, start: int, count: int) -> bool:
        """As `add`, for one extent."""
        index = self._gap(start, count)
        if index is None:
            return False
        self._starts.insert(index, start)
        self._ends.insert(index, start + count)
        return True

    def overlaps_run(self, start: int, count: int) -> bool:
        """True if an extent overlaps the set."""
        return self._gap(start, count) is None

    def remove(self, extents: Extents) -> None:
        """Removes extents that were added."""
        if len(extents) == 1:
            start, count = extents.item(0), extents.item(1)
            index = bisect_left(self._starts, start)
            assert (self._starts[index], self._ends[index]) == (start, start + count), "no such extent"
            del self._starts[index], self._ends[index]
            return
        starts, ends = extents[:, 0], extents[:, 0] + extents[:, 1]
        before = np.array(self._starts), np.array(self._ends)
        indices = np.searchsorted(before[0], starts)
        assert np.array_equal(before[0][indices], starts), "no such extents"
        assert np.array_equal(before[1][indices], ends), "no such extents"
        self._starts, self._ends = (array("q", np.delete(side, indices).tobytes()) for side in before)

    def clash(self, extents: Extents) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two (start, count) that overlap, of these extents and the set; for error messages."""
        starts = np.concatenate([self._starts, extents[:, 0]])
        ends = np.concatenate([self._ends, extents[:, 0] + extents[:, 1]])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        second = int((starts[1:] < np.maximum.accumulate(ends)[:-1]).argmax()) + 1
        first = int(ends[:second].argmax())
        low, high = int(starts[first]), int(starts[second])
        assert high < int(ends[first]), "none of them overlaps"
        return (low, int(ends[first]) - low), (high, int(ends[second]) - high)

    def _gap(self, start: int, count: int) -> int | None:
        """The index at which an extent goes; None if it overlaps another."""
        index = bisect_right(self._ends, start)
        return None if index < len(self._starts) and self._starts[index] < start + count else index

    def _with(self, extents: Extents) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """All starts and ends, new ones included; None if two overlap, so that starts and ends do not alternate."""
        starts = np.concatenate([self._starts, extents[:, 0]])
        ends = np.concatenate([self._ends, extents[:, 0] + extents[:, 1]])
        starts.sort(kind="stable")  # merges two ascending runs in one pass
        ends.sort(kind="stable")
        return None if (starts[1:] < ends[:-1]).any() else (starts, ends)

    def __len__(self) -> int:
        return len(self._starts)

"""What goes through a ring: blocks of rows that are one stretch of the far side's bytes, in the order of its slots.

The far side is the host's, which the copy engine reads or writes in long runs. Each slot of the ring looks like the far
side does, stretch by stretch, so that the near side's rows are gathered or scattered by the same kernel as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ..layout.geometry import Int64s, read_only
from ..layout.pairing import Pairing

RUN_BYTES_MIN = 64 << 10  # shorter ones the kernel carries as fast: the engine loses 0.3 us a run
_SHAPES_MAX = 64
_NONE = read_only(np.zeros(0, np.int64))
_RAMP = (2, 8)  # 32ths of a slot that the first chunks have, so that the engine starts soon


class Stretch(NamedTuple):
    """Planes of a pairing whose rows, for one block of slots, lie side by side on the far side."""

    planes: Int64s  # int64 (n, 7), of the pairing's table
    base: int  # of block 0
    step: int  # from a block to the next
    bytes: int  # of a block


@dataclass(frozen=True, slots=True, eq=False)
class Carved:
    """What goes through a ring, a slot at a time."""

    chunks: Int64s  # int64 (n, 4): first stretch, end stretch, first block, end block
    edges: Int64s  # int64 (n + 1,): where each chunk's runs begin
    runs: Int64s  # int64 (m, 3): offset in the ring's slot, offset in the far side's pool, bytes
    steps: Int64s  # int64 (m,): how far a run moves on the far side with the first block


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """How blocks of one pairing lie in a slot of the ring: up to `together` stretches at a time, of `room` blocks."""

    pairing: Pairing
    fetch: bool
    block: int  # rows of a block
    stretches: tuple[Stretch, ...]
    room: int
    together: int

    @property
    def region_bytes(self) -> int:
        """Between two stretches in a slot."""
        return self.room * max(stretch.bytes for stretch in self.stretches)

    def ring_pairing(self, stretch: int) -> Pairing:
        """Rows between the near side and a slot's region of this stretch, whose blocks are numbered from 0."""
        planes, base, _, bytes_ = self.stretches[stretch]
        far, table = 0 if self.fetch else 3, planes.copy()
        table[:, far] -= base
        table[:, far + 1] = bytes_
        if self.block == 1:
            table[:, far + 2] = bytes_
        rows, page = self.room * self.block, self.block
        changed = (
            {"source_page_size": page, "source_slots": rows}
            if self.fetch
            else {"target_page_size": page, "target_slots": rows}
        )
        layers = read_only(np.zeros(len(table), np.int64))
        return replace(self.pairing, table=read_only(table), layers=layers, **changed)

    @cached_property
    def columns(self) -> Int64s:
        """int64 (3, n): base, step and bytes of each stretch."""
        return np.array([stretch[1:] for stretch in self.stretches]).T

    @cached_property
    def stretch_bytes(self) -> int:
        """Of one block, all stretches."""
        return sum(stretch.bytes for stretch in self.stretches)

    @cached_property
    def touching(self) -> bool:
        """Whether blocks that follow one another are one run in every stretch."""
        return all(stretch.step == stretch.bytes for stretch in self.stretches)


@lru_cache(_SHAPES_MAX)
def shape_of(pairing: Pairing, *, fetch: bool, slot_bytes: int, room_max: int) -> Shape | None:
    """None where no run of the far side is longer than a row, or a block is larger than a slot."""
    far = 0 if fetch else 3
    page_size = pairing.source_page_size if fetch else pairing.target_page_size
    table = pairing.table[np.argsort(pairing.table[:, far], kind="stable")]
    rows = _merged([(table[at : at + 1], int(width)) for at, width in enumerate(table[:, 6])], far, 1, slot_bytes)
    if any(int(planes[0, far + 2]) != width for planes, width in rows):
        return None  # there are gaps between rows, or other planes
    merged = _merged([(planes, width * page_size) for planes, width in rows], far, page_size, slot_bytes)
    stretches = tuple(
        Stretch(planes, int(planes[0, far]), int(planes[0, far + (2 if page_size == 1 else 1)]), width)
        for planes, width in merged
    )
    widest = max(stretch.bytes for stretch in stretches)
    if widest > slot_bytes:
        return None
    room = min(room_max, slot_bytes // widest)
    together = min(len(stretches), slot_bytes // (room * widest))
    return Shape(pairing=pairing, fetch=fetch, block=page_size, stretches=stretches, room=room, together=together)


def _merged(pieces: list[tuple[Int64s, int]], far: int, rows: int, bytes_max: int) -> list[tuple[Int64s, int]]:
    """Neighbours made one, up to `bytes_max`, where one ends as the next begins and both go on alike."""
    merged: list[tuple[list[Int64s], int]] = []
    for planes, width in pieces:
        if merged:
            before, bytes_ = merged[-1]
            start, strides = before[0][0, far], before[0][0, far + 1 : far + 3]
            # Within a page whose rows lie apart, only the pages' stride has to be the same.
            alike = (strides == planes[0, far + 1 : far + 3])[: 1 if rows > 1 else 2].all()
            if start + bytes_ == planes[0, far] and alike and (rows == 1 or bytes_ + width <= bytes_max):
                merged[-1] = ([*before, planes], bytes_ + width)
                continue
        merged.append(([planes], width))
    return [(np.concatenate(planes), bytes_) for planes, bytes_ in merged]


@dataclass(frozen=True, kw_only=True, eq=False)
class Through:
    """Rows that go through a ring of `shape`, and those that are left to the kernel."""

    shape: Shape
    near_slots: Int64s  # of the rows in the order of the far side's slots, block by block
    blocks: Int64s  # where each block lies on the far side: its slot, or its page
    left: Int64s  # which rows, by their place in what was given, are left
    run: bool  # whether the blocks follow one another

    @property
    def bytes(self) -> int:
        """Through the ring."""
        return len(self.blocks) * self.shape.stretch_bytes

    @property
    def whole(self) -> bool:
        """Whether each stretch is one run, as nearly every push is: carved alike wherever it begins."""
        return self.run and self.shape.touching

    @property
    def carved(self) -> Carved:
        """Every block of every stretch once; the first chunks are small, where that delays nobody."""
        return _carved_again(self.shape, len(self.blocks)) if self.whole else _carved(self.shape, self.blocks)

    def far_offsets(self, carved: Carved) -> Int64s:
        """Where the runs of `carved` are in the far side's pool, int64 (m,)."""
        return carved.runs[:, 1] + carved.steps * self.blocks[0] if self.whole else carved.runs[:, 1]


@lru_cache(_SHAPES_MAX)
def _carved_again(shape: Shape, count: int) -> Carved:
    """Of so many blocks that follow one another from block 0 on."""
    return _carved(shape, np.arange(count))


def _carved(shape: Shape, blocks: Int64s) -> Carved:
    count = len(blocks)
    opens = np.flatnonzero(np.diff(blocks) != 1) + 1
    base, step, bytes_ = shape.columns
    group, place = np.divmod(np.arange(len(base)), shape.together)
    bounds = _bounds(count, shape.room, ramp=len(base) <= shape.together)
    per_group, keys, parts = len(bounds) - 1, list[Int64s](), list[Int64s]()
    for touching in (True, False):
        which = np.flatnonzero((step == bytes_) == touching)
        if not which.size:
            continue
        starts = np.arange(count)
        if touching:
            starts = np.union1d(opens, bounds[:-1])
        at = np.searchsorted(bounds, starts, side="right") - 1
        part = np.empty((len(which), len(starts), 4), np.int64)
        width = bytes_[which, None]
        part[:, :, 0] = (starts - bounds[at]) * width + place[which, None] * shape.region_bytes
        part[:, :, 1] = base[which, None] + blocks[starts] * step[which, None]
        part[:, :, 2] = np.diff(starts, append=count) * width
        part[:, :, 3] = step[which, None]
        parts.append(part.reshape(-1, 4))
        keys.append((group[which, None] * per_group + at).reshape(-1))
    chunk = np.concatenate(keys)
    order = np.argsort(chunk, kind="stable")
    first = np.repeat(np.arange(0, len(base), shape.together), per_group)
    chunks = np.empty((len(first), 4), np.int64)
    chunks[:, 0], chunks[:, 1] = first, np.minimum(first + shape.together, len(base))
    chunks[:, 2], chunks[:, 3] = np.resize(bounds[:-1], len(first)), np.resize(bounds[1:], len(first))
    edges = np.searchsorted(chunk[order], np.arange(len(chunks) + 1))
    runs = np.concatenate(parts)[order]
    columns = (np.ascontiguousarray(part) for part in (runs[:, :3], runs[:, 3]))
    return Carved(*map(read_only, (chunks, edges, *columns)))


@lru_cache(_SHAPES_MAX)
def _bounds(count: int, room: int, *, ramp: bool) -> Int64s:
    """Of chunks of `room` blocks, the last with what remains."""
    first = np.maximum(1, room * np.array(_RAMP) // 32) if ramp else np.zeros(0, np.int64)
    ends = np.append(0, np.cumsum(first))
    bounds = np.append(ends, (*range(int(ends[-1]) + room, count, room), count))
    return read_only(np.unique(np.minimum(bounds, count)))


def through(
    pairing: Pairing, source_slots: Int64s, target_slots: Int64s, *, fetch: bool, slot_bytes: int
) -> Through | None:
    """What of these rows, int64 (n,) on either side, goes through a ring; None where nothing does."""
    near, far = (target_slots, source_slots) if fetch else (source_slots, target_slots)
    page_size = pairing.source_page_size if fetch else pairing.target_page_size
    room_max = 1 << (len(far) // page_size).bit_length()  # a power of two, so that there are few shapes
    shape = shape_of(pairing, fetch=fetch, slot_bytes=slot_bytes, room_max=room_max)
    if shape is None or not len(far):
        return None
    ascends = bool((far[1:] > far[:-1]).all())
    if ascends and int(far[-1]) - int(far[0]) == len(far) - 1:
        return _of_run(shape, near, int(far[0]), page_size)
    order = None if ascends else np.argsort(far, kind="stable")
    ascending = far if order is None else far[order]
    starts = _whole_blocks(ascending, page_size)
    blocks = ascending[starts] // page_size
    kept = _long(blocks, shape)
    starts, blocks = starts[kept], blocks[kept]
    if not len(starts):
        return None
    taken = (starts[:, None] + np.arange(page_size)).reshape(-1)
    left = np.ones(len(far), np.bool_)
    left[taken] = False
    if order is not None:
        taken = order[taken]
    remaining = np.flatnonzero(left) if order is None else order[left]
    run = bool((blocks[1:] - blocks[:-1] == 1).all())
    return Through(shape=shape, near_slots=near[taken], blocks=blocks, left=remaining, run=run)


def _of_run(shape: Shape, near: Int64s, first: int, page_size: int) -> Through | None:
    """Rows whose far side's slots follow one another from `first` on: nothing has to be looked at one by one."""
    low, high = -(-first // page_size), (first + len(near)) // page_size
    if high <= low or _shortest(shape, high - low) < RUN_BYTES_MIN:
        return None
    begin, end = low * page_size - first, high * page_size - first
    left = _NONE if end - begin == len(near) else np.append(np.arange(begin), np.arange(end, len(near)))
    return Through(shape=shape, near_slots=near[begin:end], blocks=np.arange(low, high), left=left, run=True)


def _shortest(shape: Shape, blocks: int) -> int:
    """Bytes of the shortest transfer of a run of so many blocks."""
    return min(each.bytes * (blocks if each.step == each.bytes else 1) for each in shape.stretches)


def _whole_blocks(ascending: Int64s, page_size: int) -> Int64s:
    """Where in the slots, which ascend, each page starts that is there with all its slots."""
    if page_size == 1:
        return np.arange(len(ascending))
    ends = np.concatenate(([0], np.cumsum(np.diff(ascending) == 1)))  # how many steps of one there were until here
    starts = np.flatnonzero(ascending & (page_size - 1) == 0)
    starts = starts[starts + page_size <= len(ascending)]
    return starts[ends[starts + page_size - 1] - ends[starts] == page_size - 1]


def _long(blocks: Int64s, shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which blocks lie in runs that are worth a transfer of their own, in every stretch."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(blocks) != 1) + 1, [len(blocks)]))
    counts = np.diff(edges)
    shortest = np.full(len(counts), np.iinfo(np.int64).max)
    for bytes_, touching in {(each.bytes, each.step == each.bytes) for each in shape.stretches}:
        shortest = np.minimum(shortest, bytes_ * (counts if touching else np.ones_like(counts)))
    return np.repeat(shortest >= RUN_BYTES_MIN, counts)

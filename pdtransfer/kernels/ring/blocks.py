"""Selects the rows that go through a ring, in blocks that are contiguous on the far side, in the order of its slots.

The far side is the host's, which the copy engine reads or writes in long runs. A slot of the ring has the far side's
layout, stretch by stretch, so that kv_copy's kernel gathers or scatters the near side's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...layout.geometry import Int64s, read_only
from ...layout.pairing import Pairing

RUN_BYTES_MIN = 64 << 10  # the kernel copies shorter runs as fast, since each transfer has a fixed cost
_SHAPES_MAX = 64
_NONE = read_only(np.zeros(0, np.int64))
_RAMP = (2, 8)  # sizes of the first chunks, in 32ths of a slot, so that the copy engine starts early


class Stretch(NamedTuple):
    """Planes of a pairing whose rows, for one block of slots, are contiguous on the far side."""

    planes: Int64s  # int64 (n, 7), of the pairing's table
    base: int  # offset of block 0
    step: int  # bytes between blocks
    bytes: int  # of one block


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The blocks that go through a ring, divided into chunks of one slot."""

    table: Int64s  # int64 (n, 4): first stretch, end stretch, first block, end block
    edges: Int64s  # int64 (n + 1,): where each chunk's runs begin
    runs: Int64s  # int64 (m, 3): offset in the ring's slot, offset in the far side's pool, bytes
    steps: Int64s  # int64 (m,): how far a run moves on the far side if the first block moves by one


@dataclass(frozen=True, kw_only=True, eq=False)
class RingShape:
    """The layout of a ring's slot for one pairing: up to `together` stretches of up to `room` blocks."""

    pairing: Pairing
    fetch: bool
    block: int  # rows of a block
    stretches: tuple[Stretch, ...]
    room: int
    together: int

    @property
    def region_bytes(self) -> int:
        """Bytes between two stretches in a slot."""
        return self.room * max(stretch.bytes for stretch in self.stretches)

    def ring_pairing(self, stretch: int) -> Pairing:
        """The pairing between the near side and a stretch's region in a slot, with blocks numbered from 0."""
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
        """int64 (3, n): each stretch's base, step and bytes."""
        return np.array([stretch[1:] for stretch in self.stretches]).T

    @cached_property
    def stretch_bytes(self) -> int:
        """Bytes of one block in all stretches."""
        return sum(stretch.bytes for stretch in self.stretches)

    @cached_property
    def contiguous(self) -> bool:
        """True if consecutive blocks are one run in every stretch."""
        return all(stretch.step == stretch.bytes for stretch in self.stretches)


@lru_cache(_SHAPES_MAX)
def shape_of(pairing: Pairing, *, fetch: bool, slot_bytes: int, room_max: int) -> RingShape | None:
    """Returns None if no run on the far side is longer than a row, or if a block is larger than a slot."""
    far = 0 if fetch else 3
    page_size = pairing.source_page_size if fetch else pairing.target_page_size
    table = pairing.table[np.argsort(pairing.table[:, far], kind="stable")]
    rows = _merged(
        [(table[index : index + 1], int(width)) for index, width in enumerate(table[:, 6])], far, 1, slot_bytes
    )
    if any(int(planes[0, far + 2]) != width for planes, width in rows):
        return None  # gaps or other planes lie between rows
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
    return RingShape(pairing=pairing, fetch=fetch, block=page_size, stretches=stretches, room=room, together=together)


def _merged(pieces: list[tuple[Int64s, int]], far: int, rows: int, bytes_max: int) -> list[tuple[Int64s, int]]:
    """Merges adjacent pieces with equal strides, up to `bytes_max`."""
    merged: list[tuple[list[Int64s], int]] = []
    for planes, width in pieces:
        if merged:
            before, bytes_ = merged[-1]
            start, strides = before[0][0, far], before[0][0, far + 1 : far + 3]
            # If the rows of a page are not contiguous, only the page strides must be equal.
            alike = (strides == planes[0, far + 1 : far + 3])[: 1 if rows > 1 else 2].all()
            if start + bytes_ == planes[0, far] and alike and (rows == 1 or bytes_ + width <= bytes_max):
                merged[-1] = ([*before, planes], bytes_ + width)
                continue
        merged.append(([planes], width))
    return [(np.concatenate(planes), bytes_) for planes, bytes_ in merged]


@dataclass(frozen=True, kw_only=True, eq=False)
class Through:
    """The rows that go through a ring of `shape`, and the rest, which kv_copy copies."""

    shape: RingShape
    near_slots: Int64s  # of the rows, in the order of the far side's slots
    blocks: Int64s  # each block's slot or page on the far side
    rest: Int64s  # indices of the rows that do not go through the ring
    consecutive: bool  # whether the blocks are consecutive

    @property
    def bytes(self) -> int:
        """Bytes through the ring."""
        return len(self.blocks) * self.shape.stretch_bytes

    @property
    def regular(self) -> bool:
        """True if each stretch is one run, as in nearly every push: the chunks do not depend on the first block."""
        return self.consecutive and self.shape.contiguous

    @property
    def chunks(self) -> Chunks:
        """Every block of every stretch once. The first chunks are small."""
        return _regular_chunks(self.shape, len(self.blocks)) if self.regular else _chunks(self.shape, self.blocks)

    def far_offsets(self, chunks: Chunks) -> Int64s:
        """The offsets of the runs in the far side's pool, int64 (m,)."""
        return chunks.runs[:, 1] + chunks.steps * self.blocks[0] if self.regular else chunks.runs[:, 1]


@lru_cache(_SHAPES_MAX)
def _regular_chunks(shape: RingShape, count: int) -> Chunks:
    """Chunks of `count` consecutive blocks from block 0."""
    return _chunks(shape, np.arange(count))


def _chunks(shape: RingShape, blocks: Int64s) -> Chunks:
    count = len(blocks)
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    base, step, bytes_ = shape.columns
    group, place = np.divmod(np.arange(len(base)), shape.together)
    bounds = _bounds(count, shape.room, ramp=len(base) <= shape.together)
    per_group, keys, parts = len(bounds) - 1, list[Int64s](), list[Int64s]()
    for contiguous in (True, False):
        which = np.flatnonzero((step == bytes_) == contiguous)
        if not which.size:
            continue
        starts = np.union1d(breaks, bounds[:-1]) if contiguous else np.arange(count)
        region = np.searchsorted(bounds, starts, side="right") - 1
        part = np.empty((len(which), len(starts), 4), np.int64)
        width = bytes_[which, None]
        part[:, :, 0] = (starts - bounds[region]) * width + place[which, None] * shape.region_bytes
        part[:, :, 1] = base[which, None] + blocks[starts] * step[which, None]
        part[:, :, 2] = np.diff(starts, append=count) * width
        part[:, :, 3] = step[which, None]
        parts.append(part.reshape(-1, 4))
        keys.append((group[which, None] * per_group + region).reshape(-1))
    chunk = np.concatenate(keys)
    order = np.argsort(chunk, kind="stable")
    first = np.repeat(np.arange(0, len(base), shape.together), per_group)
    table = np.empty((len(first), 4), np.int64)
    table[:, 0], table[:, 1] = first, np.minimum(first + shape.together, len(base))
    table[:, 2], table[:, 3] = np.resize(bounds[:-1], len(first)), np.resize(bounds[1:], len(first))
    edges = np.searchsorted(chunk[order], np.arange(len(table) + 1))
    runs = np.concatenate(parts)[order]
    columns = (np.ascontiguousarray(part) for part in (runs[:, :3], runs[:, 3]))
    return Chunks(*map(read_only, (table, edges, *columns)))


@lru_cache(_SHAPES_MAX)
def _bounds(count: int, room: int, *, ramp: bool) -> Int64s:
    """The bounds of chunks of `room` blocks. `ramp`: the first chunks are smaller."""
    first = np.maximum(1, room * np.array(_RAMP) // 32) if ramp else np.zeros(0, np.int64)
    ends = np.append(0, np.cumsum(first))
    bounds = np.append(ends, (*range(int(ends[-1]) + room, count, room), count))
    return read_only(np.unique(np.minimum(bounds, count)))


def through(
    pairing: Pairing, source_slots: Int64s, target_slots: Int64s, *, fetch: bool, slot_bytes: int
) -> Through | None:
    """Selects the rows that go through a ring; both arrays are int64 (n,). Returns None if there are none."""
    near, far = (target_slots, source_slots) if fetch else (source_slots, target_slots)
    page_size = pairing.source_page_size if fetch else pairing.target_page_size
    room_max = 1 << (len(far) // page_size).bit_length()  # a power of two, so that there are few shapes
    shape = shape_of(pairing, fetch=fetch, slot_bytes=slot_bytes, room_max=room_max)
    if shape is None or not len(far):
        return None
    ascends = bool((far[1:] > far[:-1]).all())
    if ascends and int(far[-1]) - int(far[0]) == len(far) - 1:
        return _through_run(shape, near, int(far[0]), page_size)
    order = None if ascends else np.argsort(far, kind="stable")
    ascending = far if order is None else far[order]
    starts = _whole_blocks(ascending, page_size)
    blocks = ascending[starts] // page_size
    long = _in_long_runs(blocks, shape)
    starts, blocks = starts[long], blocks[long]
    if not len(starts):
        return None
    taken = (starts[:, None] + np.arange(page_size)).reshape(-1)
    bypass = np.ones(len(far), np.bool_)
    bypass[taken] = False
    if order is not None:
        taken = order[taken]
    rest = np.flatnonzero(bypass) if order is None else order[bypass]
    consecutive = bool((blocks[1:] - blocks[:-1] == 1).all())
    return Through(shape=shape, near_slots=near[taken], blocks=blocks, rest=rest, consecutive=consecutive)


def _through_run(shape: RingShape, near: Int64s, first: int, page_size: int) -> Through | None:
    """As `through`, if the far side's slots are consecutive from `first`: no row needs a separate test."""
    low, high = -(-first // page_size), (first + len(near)) // page_size
    if high <= low or _shortest(shape, high - low) < RUN_BYTES_MIN:
        return None
    begin, end = low * page_size - first, high * page_size - first
    rest = _NONE if end - begin == len(near) else np.append(np.arange(begin), np.arange(end, len(near)))
    return Through(shape=shape, near_slots=near[begin:end], blocks=np.arange(low, high), rest=rest, consecutive=True)


def _shortest(shape: RingShape, blocks: int) -> int:
    """Bytes of the shortest transfer for a run of `blocks` blocks."""
    return min(stretch.bytes * (blocks if stretch.step == stretch.bytes else 1) for stretch in shape.stretches)


def _whole_blocks(ascending: Int64s, page_size: int) -> Int64s:
    """The index of the first slot of each complete page among ascending slots."""
    if page_size == 1:
        return np.arange(len(ascending))
    steps = np.concatenate(([0], np.cumsum(np.diff(ascending) == 1)))  # steps of one up to each slot
    starts = np.flatnonzero(ascending & (page_size - 1) == 0)
    starts = starts[starts + page_size <= len(ascending)]
    return starts[steps[starts + page_size - 1] - steps[starts] == page_size - 1]


def _in_long_runs(blocks: Int64s, shape: RingShape) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """True for each block in a run that is long enough for a transfer in every stretch."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(blocks) != 1) + 1, [len(blocks)]))
    counts = np.diff(edges)
    shortest = np.full(len(counts), np.iinfo(np.int64).max)
    for bytes_, contiguous in {(stretch.bytes, stretch.step == stretch.bytes) for stretch in shape.stretches}:
        shortest = np.minimum(shortest, bytes_ * (counts if contiguous else np.ones_like(counts)))
    return np.repeat(shortest >= RUN_BYTES_MIN, counts)

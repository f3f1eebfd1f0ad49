"""Carries rows through a ring: a kernel between the near side and the ring's slots, the copy engine beyond them."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout.geometry import Int64s, read_only
from ..layout.plan import Plan, plan
from . import copy as host_copy
from .cancel import Cancel
from .card import Card
from .kv_copy import BLOCKS_FETCH, BLOCKS_PUSH, CopyArgument, Side, SlotsArgument, kv_copy, launch_of
from .lanes import ARGUMENT, Ring, Staging, Works
from .pairs import device_pairs, lanes_of, pair_major
from .pools import Pool, Progress, State
from .ring_blocks import Carved, Shape, Through

_TABLES_MAX = 64


class Sides(NamedTuple):
    """Two pools, and which slot of the one goes to which of the other."""

    target: Pool
    source: Pool
    target_slots: Int64s
    source_slots: Int64s


def direct_works(target: Pool, source: Pool, made: Plan, *, bytes_max: int) -> Works:
    """All rows of a plan as runs that lie together on both sides, about `bytes_max` at a time."""
    runs = made.byte_runs() + np.array((source.address, target.address, 0))
    if (wide := runs[:, 2] > bytes_max).any():
        runs = _split(runs, wide, bytes_max)
    ends = np.append(0, np.cumsum(runs[:, 2]))
    full = np.searchsorted(ends, np.arange(bytes_max, int(ends[-1]), bytes_max))
    edges = np.unique(np.append(full, (0, len(runs))))
    table = np.zeros((len(edges) - 1, 4), np.int64)
    table[:, 0], table[:, 2], table[:, 3] = -1, edges[:-1], edges[1:]
    return Works(np.zeros(0, ARGUMENT), table, runs, fetch=False)


def strided_works(target: Pool, source: Pool, made: Plan) -> Works:
    """All rows of a plan as rows that lie evenly spaced on both sides, in one work."""
    runs, strides = made.strided()
    table = np.array([(-1, 0, 0, len(runs))], np.int64)
    moved = runs + np.array((source.address, target.address, 0))
    return Works(np.zeros(0, ARGUMENT), table, moved, fetch=False, strides=strides)


def _split(runs: Int64s, wide: NDArray[np.bool_], bytes_max: int) -> Int64s:
    """Runs longer than `bytes_max` in pieces of it."""
    counts = np.where(wide, -(-runs[:, 2] // bytes_max), 1)
    pieces = np.repeat(runs, counts, axis=0)
    at = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * bytes_max
    pieces[:, :2] += at[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - at, bytes_max)
    return pieces


def listing(made: Through, sides: Sides) -> NDArray[np.int32]:
    """Slots that the card is to have: the near side's, and those of the rows that are left, source and target."""
    left = made.left
    if not len(left):
        return made.near_slots.astype(np.int32)
    return np.concatenate((made.near_slots, sides.source_slots[left], sides.target_slots[left])).astype(np.int32)


def ring_works(
    ring: Ring, sides: Sides, made: Through, staged: Staging, held: ExitStack, stream: int
) -> Works:  # fmt: skip
    """All rows, those past the ring last; `staged` has their `listing`. They are to be queued ahead of what comes on
    `stream` next before `held` closes, which lets go of their tables."""
    shape, carved, slots = made.shape, made.carved, tuple(ring.slots)
    near, far = (sides.target, sides.source) if shape.fetch else (sides.source, sides.target)
    tables = _tables(shape, near.address, slots)
    begun = (_begun_again if made.whole else _begun)(tables, carved, ring.card.multiprocessors)
    slot = (ring.turn + begun.order) % len(slots)
    arguments, table, runs = begun.arguments.copy(), begun.table, carved.runs.copy()
    pairs = _kept(ring.card, tables, tables.pairs, held, stream) + slot * tables.slot_bytes
    arguments["pairs"] += pairs.astype(np.uint64)
    arguments["target" if shape.fetch else "source"]["entries"] += staged.address
    runs[:, 0] += np.array(slots)[slot[begun.chunks]]
    runs[:, 1] = far.address + made.far_offsets(carved)
    if shape.fetch:
        runs = runs[:, [1, 0, 2]]
    if len(made.left):
        left = _left(ring, sides, made, staged.address + 4 * len(made.near_slots), held, stream)
        more = np.zeros((len(left), 4), np.int64)
        more[:, 0] = len(slot) + np.arange(len(left))
        more[:, 1] = BLOCKS_FETCH if shape.fetch else BLOCKS_PUSH
        more[:, 2:] = len(runs)
        arguments, table = np.concatenate((arguments, left)), np.concatenate((table, more))
    return Works(arguments, table, runs, fetch=shape.fetch, staged=staged)


def _kept(here: Card, key: object, pairs: Int64s, held: ExitStack, stream: int) -> int:
    address = here.tables.kept(key, pairs)
    held.callback(here.tables.let, key, stream)
    return address


def _left(
    ring: Ring, sides: Sides, made: Through, listed: int, held: ExitStack, stream: int
) -> NDArray[Any]:  # fmt: skip
    """Launches past the ring, ARGUMENT (n,): each as much as a slot holds."""
    count, pairing = len(made.left), made.shape.pairing
    step = max(1, ring.slot_bytes // pairing.row_bytes)
    ours, theirs = (
        Side(None, 0, 1, False, 1, count, limit, True) for limit in (pairing.target_slots, pairing.source_slots)
    )
    launch = launch_of(sides.target, sides.source, ours, theirs, count)
    launch.argument.pairs = _kept(ring.card, launch.key, launch.pairs, held, stream)
    first = np.arange(0, count, step)
    arguments = np.repeat(_array(launch.argument), len(first))
    arguments["count"] = np.minimum(step, count - first)
    arguments["source"]["entries"] = listed + 4 * first
    arguments["target"]["entries"] = listed + 4 * (count + first)
    return arguments


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """All pairs of every slot of a ring, and what the kernel is told of each chunk, but for addresses and counts."""

    pairs: Int64s  # slot by slot
    slot_bytes: int  # from a slot's to the next one's
    starts: Int64s  # of each stretch, within a slot's; one more ends the last
    argument: NDArray[Any]  # ARGUMENT (1,)
    shape: Shape


class _Begun(NamedTuple):
    """What of a ring's works goes by how they are carved alone."""

    arguments: NDArray[Any]  # whose pairs are offsets in a slot's, and whose listed slots are offsets in the list
    table: Int64s
    order: Int64s
    chunks: Int64s  # of each run


def _begun(tables: _Tables, carved: Carved, blocks: int) -> _Begun:
    shape, starts, count = tables.shape, tables.starts, len(carved.chunks)
    arguments, (first, end, low, high) = np.repeat(tables.argument, count), carved.chunks.T
    arguments["pairs"] = starts[first] * tables.pairs.strides[0]
    arguments["pair_count"] = starts[end] - starts[first]
    arguments["count"] = (high - low) * shape.block
    arguments["target" if shape.fetch else "source"]["entries"] = 4 * low * shape.block
    order = np.arange(count)
    table = np.stack((order, np.full(count, blocks), carved.edges[:-1], carved.edges[1:]), axis=1)
    return _Begun(arguments, read_only(table), order, np.repeat(order, np.diff(carved.edges)))


_begun_again = lru_cache(_TABLES_MAX)(_begun)  # for what is carved alike again and again


@lru_cache(_TABLES_MAX)
def _tables(shape: Shape, near: int, slots: tuple[int, ...]) -> _Tables:
    tables = [_of_slot(shape, near, slot) for slot in slots]
    return replace(tables[0], pairs=read_only(np.concatenate([table.pairs for table in tables])))


def _of_slot(shape: Shape, near: int, slot: int) -> _Tables:
    parts: list[Int64s] = []
    for at in range(len(shape.stretches)):
        region = slot + at % shape.together * shape.region_bytes
        addresses = (region, near) if shape.fetch else (near, region)
        parts.append(device_pairs(shape.ring_pairing(at), source_address=addresses[0], target_address=addresses[1]))
    pairs, pairing = read_only(np.concatenate(parts)), shape.pairing
    page_size = pairing.target_page_size if shape.fetch else pairing.source_page_size
    limit = pairing.target_slots if shape.fetch else pairing.source_slots
    near_side = SlotsArgument(entry_limit=limit, page_shift=page_size.bit_length() - 1)
    ring_side = SlotsArgument(entry_limit=shape.room * shape.block, page_shift=shape.block.bit_length() - 1)
    told = CopyArgument(
        source=ring_side if shape.fetch else near_side,
        target=near_side if shape.fetch else ring_side,
        group_shift=lanes_of(pairs).bit_length() - 1,
        pair_major=pair_major(parts[0], base=3, stride=5),
    )
    return _Tables(pairs, pairs.nbytes, np.cumsum([0, *map(len, parts)]), _array(told), shape)


def _array(told: CopyArgument) -> NDArray[Any]:
    return np.frombuffer(bytes(told), ARGUMENT)


def on_cpu(sides: Sides, made: Plan | Through, slot_bytes: int, *, progress: Progress | None, cancel: Cancel) -> None:
    """The same in this process, with a ring of one slot; it returns when all is done."""
    if progress is not None:
        progress.begin()
    complete = (
        _runs_here(sides, made, slot_bytes, cancel)
        if isinstance(made, Plan)
        else _ring_here(sides, made, slot_bytes, cancel)
    )
    if progress is not None:
        progress.end(State.COMPLETE if complete else State.CANCELLED)


def _runs_here(sides: Sides, made: Plan, bytes_max: int, cancel: Cancel) -> bool:
    works = direct_works(sides.target, sides.source, made, bytes_max=bytes_max)
    for first, end in works.table[:, 2:].tolist():
        if cancel.is_set:
            return False
        _move(works.runs[first:end])
    return True


def _ring_here(sides: Sides, made: Through, slot_bytes: int, cancel: Cancel) -> bool:
    ring, shape, carved = np.empty(slot_bytes, np.uint8), made.shape, made.carved
    slot, moved = ring.ctypes.data, carved.runs.copy()
    moved[:, 1] = made.far_offsets(carved)
    for at, (first_stretch, end_stretch, first, end) in enumerate(carved.chunks.tolist()):
        if cancel.is_set:
            return False
        runs = moved[carved.edges[at] : carved.edges[at + 1]]
        near = made.near_slots[first * shape.block : end * shape.block]
        if shape.fetch:
            _move(runs[:, [1, 0, 2]] + np.array((sides.source.address, slot, 0)))
        for stretch in range(first_stretch, end_stretch):
            region = slot + (stretch - first_stretch) * shape.region_bytes
            pairing, rows = shape.ring_pairing(stretch), np.arange(len(near))
            if shape.fetch:
                host_copy(plan(pairing, rows, near), region, sides.target.address)
            else:
                host_copy(plan(pairing, near, rows), sides.source.address, region)
        if not shape.fetch:
            _move(runs + np.array((slot, sides.target.address, 0)))
    if cancel.is_set and len(made.left):
        return False
    target_slots, source_slots = sides.target_slots[made.left], sides.source_slots[made.left]
    kv_copy(sides.target, sides.source, target_slots, source_slots, len(made.left))
    return True


def _move(runs: Int64s) -> None:
    for source, target, byte_count in runs.tolist():
        ctypes.memmove(target, source, byte_count)

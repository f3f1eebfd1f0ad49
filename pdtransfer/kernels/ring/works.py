"""Copies rows through a staging ring: a kernel between the near side and the ring, the copy engine to the far side.

The near side is the GPU's memory, the far side the host's.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout.geometry import Int64s, read_only
from ...layout.plan import Plan, plan
from .. import copy as host_copy
from ..arguments import BLOCKS_PUSH, CopyArgument, SlotsArgument
from ..cancel import CancelWord
from ..gpu import Gpu
from ..kv_copy import BLOCKS_FETCH, CheckedCopy, Side, device_pairs, kv_copy, lanes_of, launch_of, pair_major
from ..pools import Pool, Progress, State
from ..staging import Staging
from .blocks import Chunks, RingShape, Through
from .lanes import ARGUMENT, StagingRing, Works

_TABLES_MAX = 64


def direct_works(target: Pool, source: Pool, copy: Plan, *, bytes_max: int) -> Works:
    """A plan as runs that are contiguous on both sides, about `bytes_max` bytes in each work."""
    runs = copy.byte_runs() + np.array((source.address, target.address, 0))
    if (wide := runs[:, 2] > bytes_max).any():
        runs = _split(runs, wide, bytes_max)
    ends = np.append(0, np.cumsum(runs[:, 2]))
    full = np.searchsorted(ends, np.arange(bytes_max, int(ends[-1]), bytes_max))
    edges = np.unique(np.append(full, (0, len(runs))))
    table = np.zeros((len(edges) - 1, 4), np.int64)
    table[:, 0], table[:, 2], table[:, 3] = -1, edges[:-1], edges[1:]
    return Works(np.zeros(0, ARGUMENT), table, runs, fetch=False)


def strided_works(target: Pool, source: Pool, copy: Plan) -> Works:
    """A plan as rows that are evenly spaced on both sides, in one work."""
    runs, strides = copy.strided()
    table = np.array([(-1, 0, 0, len(runs))], np.int64)
    moved = runs + np.array((source.address, target.address, 0))
    return Works(np.zeros(0, ARGUMENT), table, moved, fetch=False, strides=strides)


def _split(runs: Int64s, wide: NDArray[np.bool_], bytes_max: int) -> Int64s:
    """Splits runs longer than `bytes_max`."""
    counts = np.where(wide, -(-runs[:, 2] // bytes_max), 1)
    pieces = np.repeat(runs, counts, axis=0)
    offsets = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * bytes_max
    pieces[:, :2] += offsets[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - offsets, bytes_max)
    return pieces


def listing(rows: Through, copy: CheckedCopy) -> NDArray[np.int32]:
    """The slots that the GPU needs: the near side's, then the source's and the target's of the remaining rows."""
    rest = rows.rest
    if not len(rest):
        return rows.near_slots.astype(np.int32)
    return np.concatenate((rows.near_slots, copy.source_slots[rest], copy.target_slots[rest])).astype(np.int32)


def ring_works(
    ring: StagingRing, copy: CheckedCopy, rows: Through, staged: Staging, tables: ExitStack, stream: int
) -> Works:  # fmt: skip
    """The work of all rows; the remaining rows, which bypass the ring, come last. `staged` holds their `listing`.

    The caller queues the work before the next work on `stream`, and then closes `tables`, which releases the uploads.
    """
    shape, chunks, slots = rows.shape, rows.chunks, tuple(ring.slots)
    near, far = (copy.target, copy.source) if shape.fetch else (copy.source, copy.target)
    ring_tables = _tables(shape, near.address, slots)
    template = (_cached_template if rows.regular else _template)(ring_tables, chunks, ring.gpu.multiprocessors)
    slot = (ring.turn + template.order) % len(slots)
    arguments, table, runs = template.arguments.copy(), template.table, chunks.runs.copy()
    pairs = _acquire(ring.gpu, ring_tables, ring_tables.pairs, tables, stream) + slot * ring_tables.slot_bytes
    arguments["pairs"] += pairs.astype(np.uint64)
    arguments["target" if shape.fetch else "source"]["entries"] += staged.address
    runs[:, 0] += np.array(slots)[slot[template.chunk_of_run]]
    runs[:, 1] = far.address + rows.far_offsets(chunks)
    if shape.fetch:
        runs = runs[:, [1, 0, 2]]
    if len(rows.rest):
        rest = _rest(ring, copy, rows, staged.address + 4 * len(rows.near_slots), tables, stream)
        more = np.zeros((len(rest), 4), np.int64)
        more[:, 0] = len(slot) + np.arange(len(rest))
        more[:, 1] = BLOCKS_FETCH if shape.fetch else BLOCKS_PUSH
        more[:, 2:] = len(runs)
        arguments, table = np.concatenate((arguments, rest)), np.concatenate((table, more))
    return Works(arguments, table, runs, fetch=shape.fetch, staged=staged)


def _acquire(gpu: Gpu, key: object, pairs: Int64s, tables: ExitStack, stream: int) -> int:
    address = gpu.tables.acquire(key, pairs)
    tables.callback(gpu.tables.release, key, stream)
    return address


def _rest(
    ring: StagingRing, copy: CheckedCopy, rows: Through, listed: int, tables: ExitStack, stream: int
) -> NDArray[Any]:  # fmt: skip
    """Launches for the rows that bypass the ring, ARGUMENT (n,), each of at most a slot's bytes."""
    count, pairing = len(rows.rest), rows.shape.pairing
    step = max(1, ring.slot_bytes // pairing.row_bytes)
    target_side, source_side = (
        Side(None, 0, 1, False, 1, count, limit, True) for limit in (pairing.target_slots, pairing.source_slots)
    )
    launch = launch_of(copy.target, copy.source, target_side, source_side, count)
    launch.argument.pairs = _acquire(ring.gpu, launch.key, launch.pairs, tables, stream)
    first = np.arange(0, count, step)
    arguments = np.repeat(_array(launch.argument), len(first))
    arguments["count"] = np.minimum(step, count - first)
    arguments["source"]["entries"] = listed + 4 * first
    arguments["target"]["entries"] = listed + 4 * (count + first)
    return arguments


@dataclass(frozen=True, slots=True, eq=False)
class _RingTables:
    """The pairs of every slot of a ring, and an argument that lacks addresses and counts."""

    pairs: Int64s  # slot by slot
    slot_bytes: int  # of one slot's pairs
    starts: Int64s  # where each stretch's pairs begin within a slot's pairs, and their end
    argument: NDArray[Any]  # ARGUMENT (1,)
    shape: RingShape


class _Template(NamedTuple):
    """The part of a ring's works that depends only on the chunks."""

    arguments: NDArray[Any]  # `pairs` is an offset within a slot's pairs, `entries` an offset within the listing
    table: Int64s
    order: Int64s
    chunk_of_run: Int64s


def _template(tables: _RingTables, chunks: Chunks, blocks: int) -> _Template:
    shape, starts, count = tables.shape, tables.starts, len(chunks.table)
    arguments, (first, end, low, high) = np.repeat(tables.argument, count), chunks.table.T
    arguments["pairs"] = starts[first] * tables.pairs.strides[0]
    arguments["pair_count"] = starts[end] - starts[first]
    arguments["count"] = (high - low) * shape.block
    arguments["target" if shape.fetch else "source"]["entries"] = 4 * low * shape.block
    order = np.arange(count)
    table = np.stack((order, np.full(count, blocks), chunks.edges[:-1], chunks.edges[1:]), axis=1)
    return _Template(arguments, read_only(table), order, np.repeat(order, np.diff(chunks.edges)))


_cached_template = lru_cache(_TABLES_MAX)(_template)  # for chunks that repeat


@lru_cache(_TABLES_MAX)
def _tables(shape: RingShape, near: int, slots: tuple[int, ...]) -> _RingTables:
    tables = [_of_slot(shape, near, slot) for slot in slots]
    return replace(tables[0], pairs=read_only(np.concatenate([table.pairs for table in tables])))


def _of_slot(shape: RingShape, near: int, slot: int) -> _RingTables:
    parts: list[Int64s] = []
    for index in range(len(shape.stretches)):
        region = slot + index % shape.together * shape.region_bytes
        addresses = (region, near) if shape.fetch else (near, region)
        parts.append(device_pairs(shape.ring_pairing(index), source_address=addresses[0], target_address=addresses[1]))
    pairs, pairing = read_only(np.concatenate(parts)), shape.pairing
    page_size = pairing.target_page_size if shape.fetch else pairing.source_page_size
    limit = pairing.target_slots if shape.fetch else pairing.source_slots
    near_side = SlotsArgument(entry_limit=limit, page_shift=page_size.bit_length() - 1)
    ring_side = SlotsArgument(entry_limit=shape.room * shape.block, page_shift=shape.block.bit_length() - 1)
    argument = CopyArgument(
        source=ring_side if shape.fetch else near_side,
        target=near_side if shape.fetch else ring_side,
        group_shift=lanes_of(pairs, far=False).bit_length() - 1,
        pair_major=pair_major(parts[0], base=3, stride=5),
    )
    return _RingTables(pairs, pairs.nbytes, np.cumsum([0, *map(len, parts)]), _array(argument), shape)


def _array(argument: CopyArgument) -> NDArray[Any]:
    return np.frombuffer(bytes(argument), ARGUMENT)


def on_cpu(
    copy: CheckedCopy, work: Plan | Through, slot_bytes: int, *, progress: Progress | None, cancel: CancelWord
) -> None:
    """Copies between pools of this process, with a ring of one slot. Returns when the copy is done."""
    if progress is not None:
        progress.begin()
    if isinstance(work, Plan):
        complete = _runs_on_cpu(copy, work, slot_bytes, cancel)
    else:
        complete = _ring_on_cpu(copy, work, slot_bytes, cancel)
    if progress is not None:
        progress.end(State.COMPLETE if complete else State.CANCELLED)


def _runs_on_cpu(copy: CheckedCopy, work: Plan, bytes_max: int, cancel: CancelWord) -> bool:
    works = direct_works(copy.target, copy.source, work, bytes_max=bytes_max)
    for first, end in works.table[:, 2:].tolist():
        if cancel.is_set:
            return False
        _move(works.runs[first:end])
    return True


def _ring_on_cpu(copy: CheckedCopy, rows: Through, slot_bytes: int, cancel: CancelWord) -> bool:
    ring, shape, chunks = np.empty(slot_bytes, np.uint8), rows.shape, rows.chunks
    slot, moved = ring.ctypes.data, chunks.runs.copy()
    moved[:, 1] = rows.far_offsets(chunks)
    for index, (first_stretch, end_stretch, first, end) in enumerate(chunks.table.tolist()):
        if cancel.is_set:
            return False
        runs = moved[chunks.edges[index] : chunks.edges[index + 1]]
        near = rows.near_slots[first * shape.block : end * shape.block]
        if shape.fetch:
            _move(runs[:, [1, 0, 2]] + np.array((copy.source.address, slot, 0)))
        for stretch in range(first_stretch, end_stretch):
            region = slot + (stretch - first_stretch) * shape.region_bytes
            pairing, in_ring = shape.ring_pairing(stretch), np.arange(len(near))
            if shape.fetch:
                host_copy(plan(pairing, in_ring, near), region, copy.target.address)
            else:
                host_copy(plan(pairing, near, in_ring), copy.source.address, region)
        if not shape.fetch:
            _move(runs + np.array((slot, copy.target.address, 0)))
    if cancel.is_set and len(rows.rest):
        return False
    target_slots, source_slots = copy.target_slots[rows.rest], copy.source_slots[rows.rest]
    kv_copy(copy.target, copy.source, target_slots, source_slots, len(rows.rest))
    return True


def _move(runs: Int64s) -> None:
    for source, target, byte_count in runs.tolist():
        ctypes.memmove(target, source, byte_count)

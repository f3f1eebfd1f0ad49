"""The bytes to copy: runs of slots, times planes, multiplied out only where a transport needs bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from .geometry import FEW, Int64s, read_only
from .pairing import Pairing

_BLOCK = 16_384  # slots a step: intermediate arrays stay in the cache and need no new pages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Rows to copy: `runs` of slots, times the planes of `pairing`.

    `runs` is read-only int64 (n, 3): source_start, target_start, count. Both sides advance slot by slot and cross no
    page of their side in `pairing`. So a run is, in every plane and on either side, `count` rows of the plane's bytes
    from address(start) on, row_stride apart.
    """

    pairing: Pairing
    runs: Int64s
    rows: int  # slots on either side: the sum of all counts

    @property
    def bytes(self) -> int:
        """Bytes over all runs and planes."""
        return self.rows * self.pairing.row_bytes

    def pieces(self, bytes_max: int) -> Iterator[Plan]:
        """The same rows in the same order, in plans of at most `bytes_max` bytes, or of one row if rows are larger."""
        if 0 < self.bytes <= bytes_max:
            yield self
        elif self.bytes:
            for runs in pieces_of(self.runs, max(1, bytes_max // self.pairing.row_bytes)):
                yield Plan(pairing=self.pairing, runs=read_only(runs), rows=int(runs[:, 2].sum()))

    def strided(self) -> tuple[Int64s, Int64s]:
        """Every byte to copy as rows, run by run and plane by plane, in two int64 (m, 3) arrays. The first has the
        source offset, target offset and bytes of a row. The second has the stride in the source, the stride in the
        target, and the number of rows."""
        table, count = self.pairing.table, len(self.runs)
        rows = np.empty((count, len(table), 3), dtype=np.int64)
        rows[:, :, :2] = _offsets(self.runs, self.pairing, table)
        rows[:, :, 2] = table[:, 6]
        strides = np.empty_like(rows)
        strides[:, :, :2], strides[:, :, 2] = table[:, [2, 5]], self.runs[:, 2:]
        alone = self.runs[:, 2] == 1
        strides[alone, :, :2] = table[:, 6:]  # joined planes may be wider than a slot's stride
        return rows.reshape(-1, 3), strides.reshape(-1, 3)

    def byte_runs(self) -> Int64s:
        """Every byte to copy as int64 (m, 3): source offset, target offset, length; ascending by target offset.

        Coalesced over slots and neighbouring planes: no run goes on where another ends on both sides. Offsets are of
        the layouts' own bases. At worst rows x planes long: take it of `pieces`.
        """
        pairing = self.pairing.fused()
        table, width = pairing.table, pairing.table[:, 6]
        # A plane whose rows touch on both sides copies a run at once, other planes copy row by row.
        touching = (table[:, 2] == width) & (table[:, 5] == width)
        runs = _times(self.runs, pairing, touching)
        if not touching.all():
            runs = np.concatenate((runs, _times(_rows_of(self.runs), pairing, ~touching)))
        runs = runs[np.argsort(runs[:, 1], kind="stable")]
        opens = np.ones(len(runs), dtype=np.bool_)
        opens[1:] = (runs[1:, :2] != runs[:-1, :2] + runs[:-1, 2:]).any(axis=1)
        if opens.all():
            return runs
        coalesced = runs[opens]
        coalesced[:, 2] = np.add.reduceat(runs[:, 2], np.flatnonzero(opens))
        return coalesced


def plan(pairing: Pairing, source_slots: Int64s, target_slots: Int64s) -> Plan:
    """The maximal runs that carry source_slots[i] to target_slots[i], both int64 (n,), in that order.

    Slots were checked for repetition before (layout.check_slots). Raises LocalProtocolError with the values for lists
    of different lengths and a slot outside its side, since a plan is written without further checks.
    """
    if not source_slots.shape == target_slots.shape == (len(source_slots),):
        raise LocalProtocolError(f"source_slots {source_slots.shape}, target_slots {target_slots.shape}: not (n,) each")
    rows = len(source_slots)
    runs_of = _runs_of_few if rows <= FEW else _runs_of_many
    return Plan(pairing=pairing, runs=read_only(runs_of(pairing, source_slots, target_slots)), rows=rows)


def _runs_of_few(pairing: Pairing, source_slots: Int64s, target_slots: Int64s) -> Int64s:
    sources, targets = source_slots.tolist(), target_slots.tolist()
    for name, slots, listed, limit in (
        ("source_slots", source_slots, sources, pairing.source_slots),
        ("target_slots", target_slots, targets, pairing.target_slots),
    ):
        _check_inside(name, slots, min(listed, default=0), max(listed, default=0), limit)
    source_row, target_row = pairing.source_page_size - 1 or -1, pairing.target_page_size - 1 or -1  # masks
    runs: list[list[int]] = []
    source_next = target_next = -1
    for source, target in zip(sources, targets, strict=True):
        if source == source_next and target == target_next and source & source_row and target & target_row:
            runs[-1][2] += 1
        else:
            runs.append([source, target, 1])
        source_next, target_next = source + 1, target + 1
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def _runs_of_many(pairing: Pairing, source_slots: Int64s, target_slots: Int64s) -> Int64s:
    count = len(source_slots)
    opens = np.ones(count + 1, dtype=np.bool_)  # where a run starts; the last one ends the last run
    opens[1:count] = False
    for name, slots, limit, page_size in (
        ("source_slots", source_slots, pairing.source_slots, pairing.source_page_size),
        ("target_slots", target_slots, pairing.target_slots, pairing.target_page_size),
    ):
        _check_inside(name, slots, int(slots.min(initial=0)), int(slots.max(initial=0)), limit)
        for low in range(1, count, _BLOCK):
            high = min(low + _BLOCK, count)
            opens[low:high] |= slots[low:high] - slots[low - 1 : high - 1] != 1
            if page_size > 1:
                opens[low:high] |= slots[low:high] & (page_size - 1) == 0
    edges = np.flatnonzero(opens)
    runs = np.empty((len(edges) - 1, 3), dtype=np.int64)
    for low in range(0, len(runs), _BLOCK):
        block, starts = runs[low : low + _BLOCK], edges[low : low + _BLOCK + 1]
        block[:, 0], block[:, 1] = source_slots[starts[:-1]], target_slots[starts[:-1]]
        np.subtract(starts[1:], starts[:-1], out=block[:, 2])
    return runs


def _check_inside(name: str, slots: Int64s, low: int, high: int, limit: int) -> None:
    """Raises LocalProtocolError unless the lowest slot and the highest lie in [0, limit)."""
    if low < 0 or high >= limit:
        outside = slots[(slots < 0) | (slots >= limit)]
        raise LocalProtocolError(f"{name}: {outside[0]} and {len(outside) - 1} more are outside 0..{limit - 1}")


def _rows_of(runs: Int64s) -> Int64s:
    """The same slots in runs of length one."""
    counts = runs[:, 2]
    if (counts == 1).all():
        return runs
    ends = np.cumsum(counts)
    rows = np.repeat(runs, counts, axis=0)
    rows[:, :2] += (np.arange(len(rows)) - np.repeat(ends - counts, counts))[:, None]
    rows[:, 2] = 1
    return rows


def _times(runs: Int64s, pairing: Pairing, planes: NDArray[np.bool_]) -> Int64s:
    """Runs times planes as byte runs, int64 (runs * planes, 3); in each of `planes` a run must be contiguous bytes."""
    table = pairing.table[planes]
    product = np.empty((len(runs), len(table), 3), dtype=np.int64)
    product[:, :, :2] = _offsets(runs, pairing, table)
    product[:, :, 2] = runs[:, 2, None] * table[:, 6]
    return product.reshape(-1, 3)


def _offsets(runs: Int64s, pairing: Pairing, table: Int64s) -> Int64s:
    """The offsets of each run's first row in each of these planes, in source and target: int64 (runs, planes, 2)."""
    offsets = np.empty((len(runs), len(table), 2), dtype=np.int64)
    for side, page_size in enumerate((pairing.source_page_size, pairing.target_page_size)):
        base, page_stride, row_stride = table[:, 3 * side : 3 * side + 3].T
        page, row = np.divmod(runs[:, side, None], page_size)
        offsets[:, :, side] = base + page * page_stride + row * row_stride
    return offsets


def pieces_of(runs: Int64s, rows_max: int) -> Iterator[Int64s]:
    """Runs int64 (n, 3), of two firsts and a count: the same rows in the same order, at most `rows_max` at a time."""
    ends = np.cumsum(runs[:, 2])
    rows = int(ends[-1]) if len(ends) else 0
    if 0 < rows <= rows_max:
        yield runs
        return
    for start in range(0, rows, rows_max):
        end = min(start + rows_max, rows)
        low, high = np.searchsorted(ends, (start + 1, end))
        piece = runs[low : high + 1].copy()
        piece[-1, 2] -= ends[high] - end
        skipped = start - (ends[low] - runs[low, 2])
        piece[0] += (skipped, skipped, -skipped)
        yield piece

"""The send ring: rows are gathered into its slots in the order in which they lie in the arena, and sent from there.

Where a piece's bytes lie in long runs on both sides, they may be sent from the pool itself. Then its slot has only the
table of its operations.

A piece is some rows of some planes, and fills one slot. Where a slot of the arena is one run of bytes, a piece holds
whole rows, one after another. Else it holds plane after plane, so that runs of slots are runs of bytes in both cases.
For a GPU a ring is a pool, whose pages are the ring's slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import TransportError
from ...kernels.registered import Registrar
from ...layout.geometry import Int64s, read_only
from ...layout.layout import Layout, Plane
from ...layout.pairing import Pairing
from ...layout.plan import Plan, plan
from ...memory.arena_memory import ArenaMemory
from .child import OPERATION

SLOTS = 16
SLOT_BYTES = 4 << 20  # gathered at a time: Python takes less than a tenth of the time of such a copy
FIRST_BYTES = 1 << 20  # of a write's first piece
PIECE_BYTES = 16 << 20  # of a piece that is sent from the pool
OPERATIONS_MAX = 4_096  # of one slot
STRAIGHT_BYTES_MIN = 64 << 10  # of an operation, on average: it costs less than a copy of this many bytes then
_PLANNED_ALONE = 2  # slots: the pieces of a write of fewer are planned one by one
_SHAPES_MAX = 64  # of pieces that one cut caches: most writes have pieces of one shape, but for the last
_TABLE_BYTES = OPERATIONS_MAX * OPERATION.size


class SendRing:
    """Slots of shared memory, each with a table of the operations that send it."""

    def __init__(self) -> None:
        self._memory = ArenaMemory.create(
            SLOTS * (SLOT_BYTES + _TABLE_BYTES), huge_pages="never", name="pdtransfer-ring"
        )
        self.free = list(range(SLOTS))

    def register(self, gpu: Registrar) -> None:
        """Backs it, and registers it with a GPU until close; not on the loop. Raises WorldError."""
        self._memory.gpu = gpu
        self._memory.prefault()

    @property
    def fd(self) -> int:
        """The memfd."""
        return self._memory.fd

    @property
    def byte_count(self) -> int:
        """The length of all of it, tables included."""
        return self._memory.byte_count

    def address(self, slot: int) -> int:
        """The address of the slot's bytes in this process."""
        return self._memory.mapping.address + slot * SLOT_BYTES

    @property
    def device_address(self) -> int:
        """The address of the first slot for its GPU."""
        registered = self._memory.mapping.registered
        assert registered is not None
        return registered.device_address

    def write_table(self, slot: int, runs: Int64s, base: int, *, straight: bool = False) -> tuple[int, int]:
        """Writes the operations of `runs`, int64 (n, 3): offset in the slot, or if `straight` in the pool; offset in
        the arena that is mapped at `base`; bytes. Returns the table's offset in the ring, and its length."""
        assert len(runs) <= OPERATIONS_MAX
        offset = SLOTS * SLOT_BYTES + slot * _TABLE_BYTES
        table = self._memory.mapping.array[offset : offset + runs.nbytes].view(np.int64).reshape(-1, 3)
        table[:] = runs
        table[:, 0] += self.byte_count if straight else slot * SLOT_BYTES
        table[:, 1] += base
        return offset, len(runs)

    def close(self) -> None:
        """Unmaps it; nothing writes or reads it by then. Raises WorldError, and leaves it mapped, where its GPU keeps
        it."""
        self._memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The content of one slot: rows [first, end) of a write, and planes [low, high) of its pairing. `room` rows fit a
    slot."""

    first: int
    end: int
    low: int
    high: int
    room: int

    @property
    def rows(self) -> int:
        """Their number."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sides:
    """The two steps of pieces of one shape: from the pool into a slot, and from there into the arena."""

    inwards: Pairing
    outwards: Pairing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A pairing as its rows pass through a ring. `woven`: a piece holds whole rows, one after another; `paged`: slots
    have room for a power of two of rows, as pages have."""

    pairing: Pairing
    woven: bool
    paged: bool = False
    _layouts: dict[tuple[int, int, int], tuple[Layout, Layout]] = field(default_factory=dict[Any, Any])
    _sides: dict[tuple[int, int, int, int], _Sides] = field(default_factory=dict[Any, Any])

    def long(self, source_slots: Int64s, target_slots: Int64s) -> bool:
        """True if the bytes of these rows lie in runs of STRAIGHT_BYTES_MIN on both sides, on average."""
        pairing, rows = self.pairing, len(source_slots)
        width = pairing.table[:, 6]
        if (pairing.table[:, [2, 5]] != width[:, None]).any():  # a plane's rows do not touch: each run is one row
            return bool(width.mean() >= STRAIGHT_BYTES_MIN)
        breaks = 1
        for slots, page_size in ((source_slots, pairing.source_page_size), (target_slots, pairing.target_page_size)):
            breaks += int(np.count_nonzero(slots[1:] - slots[:-1] != 1)) + (rows // page_size if page_size > 1 else 0)
        return rows * pairing.row_bytes >= breaks * len(width) * STRAIGHT_BYTES_MIN

    def pieces(self, rows: int, *, straight: bool = False) -> Iterator[Piece]:
        """All rows, in pieces of at most SLOT_BYTES, or of PIECE_BYTES that go straight, and OPERATIONS_MAX operations.

        The first piece of whole rows is small, so that sending begins early, while the next one is gathered.
        """
        widths, woven = self.pairing.table[:, 6], self.woven or straight
        byte_count = PIECE_BYTES if straight else SLOT_BYTES
        most = _page(2 * rows - 1) if self.paged else rows  # their number, or the next power of two
        for low, high in self._groups(1 if woven else most, byte_count):
            row_bytes, first = int(widths[low:high].sum()), 0
            room = min(byte_count // row_bytes, OPERATIONS_MAX // (high - low))
            if self.paged:
                room = _page(room) if self.woven else min(_page(room), most)
            early = woven and not straight and not self.paged
            step = min(room, max(1, FIRST_BYTES // row_bytes)) if early else room
            while first < rows:
                end = min(first + step, rows)
                yield Piece(first=first, end=end, low=low, high=high, room=room if self.paged else end - first)
                first, step = end, min(2 * step, room)

    def byte_count(self, piece: Piece) -> int:
        """The bytes that it sends."""
        return piece.rows * int(self.pairing.table[piece.low : piece.high, 6].sum())

    def whole(self, piece: Piece) -> bool:
        """True if it has all planes of its rows."""
        return piece.high - piece.low == len(self.pairing.table)

    def last(self, piece: Piece, rows: int) -> bool:
        """True if it is the last piece of this many rows."""
        return piece.end == rows and piece.high == len(self.pairing.table)

    def _groups(self, rows: int, byte_count: int) -> Iterator[tuple[int, int]]:
        """Groups of neighbouring planes, each so large that `rows` rows of it, and an operation each, fit a slot."""
        most, planes_max = max(1, byte_count // max(1, rows)), max(1, OPERATIONS_MAX // max(1, rows))
        low, group_bytes = 0, 0
        widths = self.pairing.table[:, 6].tolist()
        for index, width in enumerate(widths):
            if index > low and (group_bytes + width > most or index - low >= planes_max):
                yield low, index
                low, group_bytes = index, 0
            group_bytes += width
        yield low, len(widths)

    def gather(self, piece: Piece, source_slots: Int64s) -> Plan:
        """From the pool into a slot of the ring; `source_slots` are the whole write's."""
        return plan(self._sides_of(piece).inwards, source_slots[piece.first : piece.end], np.arange(piece.rows))

    def runs(self, piece: Piece, target_slots: Int64s) -> Int64s:
        """From a slot of the ring into the arena, as Plan.byte_runs."""
        outwards, rows = self._sides_of(piece).outwards, np.arange(piece.rows)
        return plan(outwards, rows, target_slots[piece.first : piece.end]).byte_runs()

    def all_runs(self, target_slots: Int64s) -> Int64s | None:
        """As `runs`, for all rows of a write as if one slot held them, ascending by the offset in it. None where the
        rows are few, or where pieces do not hold whole rows that are each one run of bytes in the arena."""
        rows, planes = len(target_slots), len(self.pairing.table)
        if not self.woven or self.paged or rows * self.pairing.row_bytes <= _PLANNED_ALONE * SLOT_BYTES:
            return None
        if not self.whole(next(self.pieces(rows))):
            return None
        outwards = self._made(Piece(first=0, end=rows, low=0, high=planes, room=rows)).outwards
        if len(outwards.table) > 1:
            return None
        runs = plan(outwards, np.arange(rows), target_slots).byte_runs()
        return runs[np.argsort(runs[:, 0])]

    def runs_within(self, piece: Piece, all_runs: Int64s) -> Int64s:
        """A piece's part of `all_runs`. It takes much less of a copy thread's time than to plan the piece, whose code
        and tables a copy has pushed out of the cache."""
        row_bytes, offsets = self.pairing.row_bytes, all_runs[:, 0]
        first, end = piece.first * row_bytes, piece.end * row_bytes
        runs = all_runs[bisect_right(offsets, first) - 1 : bisect_left(offsets, end)].copy()
        runs[-1, 2] = end - runs[-1, 0]
        skipped = first - runs[0, 0]
        runs[0] += (skipped, skipped, -skipped)
        runs[:, 0] -= first
        return runs

    def _sides_of(self, piece: Piece) -> _Sides:
        """Cached for each shape, since making it takes longer than planning a slot."""
        shape = piece.low, piece.high, piece.rows, piece.room
        if (sides := self._sides.get(shape)) is None:
            if len(self._sides) >= _SHAPES_MAX:
                self._sides.clear()
            sides = self._sides[shape] = self._made(piece)
        return sides

    def _made(self, piece: Piece) -> _Sides:
        ours, place = self.columns(piece)
        layers, width, rows = self._layers(piece), ours[:, 6:], piece.rows
        inwards = replace(
            self.pairing, table=_table(ours[:, :3], place, width), layers=layers, target_page_size=1, target_slots=rows
        )
        outwards = replace(
            self.pairing, table=_table(place, ours[:, 3:6], width), layers=layers, source_page_size=1, source_slots=rows
        )
        return _Sides(inwards=inwards, outwards=outwards.fused())

    def layouts(self, piece: Piece) -> tuple[Layout, Layout]:
        """The piece's planes in the pool and in the ring, each slot of which is a page of `piece.room` rows. They are
        cached: a GPU's tables of two layouts serve every slot, and all writes of about as many rows."""
        assert self.paged
        key = piece.low, piece.high, piece.room
        if (pair := self._layouts.get(key)) is None:
            ours, place = self.columns(piece)
            theirs = np.stack((place[:, 0], np.full(len(ours), SLOT_BYTES), place[:, 2]), axis=1)
            pairing, width = self.pairing, ours[:, 6]
            pair = self._layouts[key] = (
                _layout(ours[:, :3], width, pairing.source_page_size, pairing.source_slots),
                _layout(theirs, width, piece.room, SLOTS * piece.room),
            )
        return pair

    def straight(self, piece: Piece, source_slots: Int64s, target_slots: Int64s) -> Int64s:
        """From the pool into the arena, as Plan.byte_runs."""
        table = read_only(self.pairing.table[piece.low : piece.high])
        sides = replace(self.pairing, table=table, layers=self._layers(piece))
        return plan(sides, source_slots[piece.first : piece.end], target_slots[piece.first : piece.end]).byte_runs()

    def _layers(self, piece: Piece) -> Int64s:
        return self.pairing.layers[piece.low : piece.high]

    def columns(self, piece: Piece) -> tuple[Int64s, Int64s]:
        """The piece's planes, and base, page_stride, row_stride of each in the slot."""
        table = self.pairing.table[piece.low : piece.high]
        width = table[:, 6]
        before = np.cumsum(width) - width
        place = np.empty((len(table), 3), np.int64)
        if self.woven:
            place[:, 0], place[:, 1:] = before, width.sum()
        else:
            place[:, 0], place[:, 1:] = before * piece.room, width[:, None]
        return table, place


def cut(pairing: Pairing, *, paged: bool = False) -> Cut:
    """How rows of this pairing pass through a ring."""
    if not pairing.row_bytes:
        raise TransportError("a write of no bytes")
    pairing = _narrowed(pairing)
    whole = Cut(pairing=pairing, woven=True, paged=paged)
    table, place = whole.columns(Piece(first=0, end=1, low=0, high=len(pairing.table), room=1))
    staged = replace(pairing, table=_table(place, table[:, 3:6], table[:, 6:]), source_page_size=1, source_slots=1)
    return whole if len(staged.fused().table) < len(table) else replace(whole, woven=len(table) == 1)


def _narrowed(pairing: Pairing) -> Pairing:
    """The same bytes, in planes of which one row fits a slot."""
    table = pairing.table
    if (table[:, 6] <= SLOT_BYTES).all():
        return pairing
    parts = -(-table[:, 6] // SLOT_BYTES)
    rows = np.repeat(table, parts, axis=0)
    skipped = (np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)) * SLOT_BYTES
    rows[:, [0, 3]] += skipped[:, None]
    rows[:, 6] = np.minimum(SLOT_BYTES, rows[:, 6] - skipped)
    return replace(pairing, table=read_only(rows), layers=read_only(np.repeat(pairing.layers, parts)))


def _table(source: Int64s, target: Int64s, width: Int64s) -> Int64s:
    """The table of a pairing."""
    return read_only(np.ascontiguousarray(np.concatenate((source, target, width), axis=1)))


def _layout(places: Int64s, widths: Int64s, page_size: int, slots: int) -> Layout:
    """A layout of planes at these bases and strides, int64 (n, 3), which differ in their number alone."""
    planes = [
        Plane(index, "rows", "uint8", 0, 1, base, page_stride, row_stride, width)
        for index, ((base, page_stride, row_stride), width) in enumerate(
            zip(places.tolist(), widths.tolist(), strict=True)
        )
    ]
    return Layout(tuple(planes), page_size, slots)


def _page(rows: int) -> int:
    """The highest power of two that is not above `rows`."""
    return 1 << rows.bit_length() - 1

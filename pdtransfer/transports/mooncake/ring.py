"""The send ring: rows leave their pool for it in the order in which they lie in the arena, in pieces of one slot.

Where a piece's bytes lie in long runs on either side they may be sent from the pool itself: then its slot has no more
than the table of its operations.

A piece is some rows of some planes. Where a slot of the arena is one stretch of bytes, a piece holds whole rows, one
after another; else it holds plane after plane, so that runs of slots are runs of bytes either way. To a card a ring is
a pool, whose pages are the ring's slots.
"""

from __future__ import annotations

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
from ...memory.arena_memory import Arena
from .child import OPERATION

SLOTS = 16
SLOT_BYTES = 4 << 20  # gathered at a time: what Python does for it costs less than a tenth
FIRST_BYTES = 1 << 20  # of a write
PIECE_BYTES = 16 << 20  # of what is sent from the pool
OPERATIONS_MAX = 4_096  # of one slot
STRAIGHT_BYTES_MIN = 64 << 10  # of an operation, in the mean: what it costs is then less than a copy of so much
_SHAPES_MAX = 64  # of pieces that one cut remembers: of most writes all are alike, but the last
_TABLE_BYTES = OPERATIONS_MAX * OPERATION.size


class Ring:
    """Slots of shared memory, each with a table of the operations that send it."""

    def __init__(self) -> None:
        self._memory = Arena.create(SLOTS * (SLOT_BYTES + _TABLE_BYTES), huge_pages="never", name="pdtransfer-ring")
        self.free = list(range(SLOTS))

    def register(self, card: Registrar) -> None:
        """Backs it, and lets a card reach it, until close; not on the loop. WorldError where that cannot be."""
        self._memory.card = card
        self._memory.prefault()

    @property
    def fd(self) -> int:
        """The memfd."""
        return self._memory.fd

    @property
    def byte_count(self) -> int:
        """All of it, tables included."""
        return self._memory.byte_count

    def address(self, slot: int) -> int:
        """Where the slot's bytes are, in this process."""
        return self._memory.mapping.address + slot * SLOT_BYTES

    @property
    def device_address(self) -> int:
        """Where its card sees the first slot."""
        registered = self._memory.mapping.registered
        assert registered is not None
        return registered.device_address

    def tell(self, slot: int, runs: Int64s, base: int, *, straight: bool = False) -> tuple[int, int]:
        """Writes the operations of `runs`, int64 (n, 3): offset in the slot, or if `straight` in the pool; offset in
        the arena that is mapped at `base`; bytes. Returns where their table is in the ring, and how many there are."""
        assert len(runs) <= OPERATIONS_MAX
        offset = SLOTS * SLOT_BYTES + slot * _TABLE_BYTES
        table = self._memory.mapping.array[offset : offset + runs.nbytes].view(np.int64).reshape(-1, 3)
        table[:] = runs
        table[:, 0] += self.byte_count if straight else slot * SLOT_BYTES
        table[:, 1] += base
        return offset, len(runs)

    def close(self) -> None:
        """Once nobody writes or reads it any more. Raises WorldError, and leaves it mapped, where its card does not let
        go of it."""
        self._memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [first, end) of a write and planes [low, high) of its pairing: what one slot holds, and for how many rows a
    slot has room."""

    first: int
    end: int
    low: int
    high: int
    room: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sides:
    """Of pieces of one shape: from the pool into a slot, and from there into the arena."""

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
        """Whether the bytes of these rows lie in runs of STRAIGHT_BYTES_MIN on either side, in the mean."""
        pairing, rows = self.pairing, len(source_slots)
        width = pairing.table[:, 6]
        if (pairing.table[:, [2, 5]] != width[:, None]).any():  # a plane's rows do not touch: run by run it is a row
            return bool(width.mean() >= STRAIGHT_BYTES_MIN)
        breaks = 1
        for slots, page_size in (
            (source_slots, pairing.source_page_size),
            (target_slots, pairing.target_page_size),
        ):
            breaks += int(np.count_nonzero(slots[1:] - slots[:-1] != 1)) + (rows // page_size if page_size > 1 else 0)
        return rows * pairing.row_bytes >= breaks * len(width) * STRAIGHT_BYTES_MIN

    def pieces(self, rows: int, *, straight: bool = False) -> Iterator[Piece]:
        """All rows, in pieces of at most SLOT_BYTES, or of PIECE_BYTES that go straight, and OPERATIONS_MAX operations.

        Of whole rows the first are few: what is sent while the next are gathered begins the sooner.
        """
        widths, woven = self.pairing.table[:, 6], self.woven or straight
        byte_count = PIECE_BYTES if straight else SLOT_BYTES
        most = _page(2 * rows - 1) if self.paged else rows  # as many as there are, or the next power of two
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
        """All that it sends."""
        return piece.rows * int(self.pairing.table[piece.low : piece.high, 6].sum())

    def whole(self, piece: Piece) -> bool:
        """Whether it has all planes of its rows."""
        return piece.high - piece.low == len(self.pairing.table)

    def last(self, piece: Piece, rows: int) -> bool:
        """Whether no piece of so many rows comes behind it."""
        return piece.end == rows and piece.high == len(self.pairing.table)

    def _groups(self, rows: int, byte_count: int) -> Iterator[tuple[int, int]]:
        """As many neighbouring planes at a time as `rows` rows of them, and an operation each, leave room for."""
        most, planes_max, low, held = max(1, byte_count // max(1, rows)), max(1, OPERATIONS_MAX // max(1, rows)), 0, 0
        widths = self.pairing.table[:, 6].tolist()
        for at, width in enumerate(widths):
            if at > low and (held + width > most or at - low >= planes_max):
                yield low, at
                low, held = at, 0
            held += width
        yield low, len(widths)

    def gather(self, piece: Piece, source_slots: Int64s) -> Plan:
        """From the pool into a slot of the ring; `source_slots` are the whole write's."""
        return plan(self._sides_of(piece).inwards, source_slots[piece.first : piece.end], _rows(piece))

    def runs(self, piece: Piece, target_slots: Int64s) -> Int64s:
        """From a slot of the ring into the arena, as Plan.byte_runs."""
        return plan(self._sides_of(piece).outwards, _rows(piece), target_slots[piece.first : piece.end]).byte_runs()

    def _sides_of(self, piece: Piece) -> _Sides:
        """Made once for all pieces of a shape: it takes longer than a slot's plan."""
        shape = piece.low, piece.high, piece.rows, piece.room
        if (found := self._sides.get(shape)) is None:
            if len(self._sides) >= _SHAPES_MAX:
                self._sides.clear()
            found = self._sides[shape] = self._made(piece)
        return found

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
        """The piece's planes in the pool and in the ring, each slot of which is a page of `piece.room` rows. There are
        few of them: the table that a card is given of two serves every slot, and writes of as many rows or so."""
        assert self.paged
        key = piece.low, piece.high, piece.room
        if (found := self._layouts.get(key)) is None:
            ours, place = self.columns(piece)
            theirs = np.stack((place[:, 0], np.full(len(ours), SLOT_BYTES), place[:, 2]), axis=1)
            pairing, width = self.pairing, ours[:, 6]
            found = self._layouts[key] = (
                _layout(ours[:, :3], width, pairing.source_page_size, pairing.source_slots),
                _layout(theirs, width, piece.room, SLOTS * piece.room),
            )
        return found

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


def _rows(piece: Piece) -> Int64s:
    """A piece's, as they are counted in its slot."""
    return np.arange(piece.rows)


def cut(pairing: Pairing, *, paged: bool = False) -> Cut:
    """How rows of this pairing pass through a ring."""
    _check_planes(pairing)
    pairing = _narrowed(pairing)
    whole = Cut(pairing=pairing, woven=True, paged=paged)
    table, place = whole.columns(Piece(first=0, end=1, low=0, high=len(pairing.table), room=1))
    there = replace(pairing, table=_table(place, table[:, 3:6], table[:, 6:]), source_page_size=1, source_slots=1)
    return whole if len(there.fused().table) < len(table) else replace(whole, woven=len(table) == 1)


def _check_planes(pairing: Pairing) -> None:
    if not pairing.row_bytes:
        raise TransportError("a write of no bytes")


def _narrowed(pairing: Pairing) -> Pairing:
    """The same bytes, in planes of which a slot holds a row."""
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
    """A pairing's."""
    return read_only(np.ascontiguousarray(np.concatenate((source, target, width), axis=1)))


def _layout(places: Int64s, widths: Int64s, page_size: int, slots: int) -> Layout:
    """Of planes at these bases and strides, int64 (n, 3), told apart by their number alone."""
    planes = [
        Plane(at, "rows", "uint8", 0, 1, base, page_stride, row_stride, width)
        for at, ((base, page_stride, row_stride), width) in enumerate(
            zip(places.tolist(), widths.tolist(), strict=True)
        )
    ]
    return Layout(tuple(planes), page_size, slots)


def _page(rows: int) -> int:
    """The highest power of two up to `rows`."""
    return 1 << rows.bit_length() - 1

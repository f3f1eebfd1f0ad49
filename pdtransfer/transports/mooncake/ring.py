"""The send ring: rows leave their pool for it in the order in which they lie in the arena, in pieces of one slot.

A piece is some rows of some planes. Where a slot of the arena is one stretch of bytes, a piece holds whole rows, one
after another; else it holds plane after plane, so that runs of slots are runs of bytes either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...errors import TransportError
from ...geometry import Int64s, read_only
from ...memory import Arena
from ...pairing import Pairing
from ...plan import Plan, plan
from .child import OPERATION

SLOTS = 16
SLOT_BYTES = 2 << 20  # gathered at a time: what Python does for it costs less than a tenth
OPERATIONS_MAX = 4_096  # of one slot
_TABLE_BYTES = OPERATIONS_MAX * OPERATION.size


class Ring:
    """Slots of shared memory, each with a table of the operations that send it."""

    def __init__(self) -> None:
        self._memory = Arena.create(SLOTS * (SLOT_BYTES + _TABLE_BYTES), huge_pages="never", name="pdtransfer-ring")
        self.free = list(range(SLOTS))

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

    def tell(self, slot: int, runs: Int64s, base: int) -> tuple[int, int]:
        """Writes the operations of `runs`, int64 (n, 3): offset in the slot, offset in the arena that is mapped at
        `base`, bytes. Returns where their table is in the ring, and how many there are."""
        assert len(runs) <= OPERATIONS_MAX
        offset = SLOTS * SLOT_BYTES + slot * _TABLE_BYTES
        table = self._memory.mapping.array[offset : offset + runs.nbytes].view(np.int64).reshape(-1, 3)
        table[:] = runs
        table[:, 0] += slot * SLOT_BYTES
        table[:, 1] += base
        return offset, len(runs)

    def close(self) -> None:
        """Once nobody writes or reads it any more."""
        self._memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [first, end) of a write and planes [low, high) of its pairing: what one slot holds."""

    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A pairing as its rows pass through a ring. `woven`: a piece holds whole rows, one after another."""

    pairing: Pairing
    woven: bool

    def pieces(self, rows: int) -> Iterator[Piece]:
        """All rows, in pieces of at most SLOT_BYTES and OPERATIONS_MAX operations."""
        widths = self.pairing.table[:, 6]
        for low, high in self._groups(1 if self.woven else rows):
            planes = high - low
            step = min(SLOT_BYTES // int(widths[low:high].sum()), OPERATIONS_MAX // planes)
            for first in range(0, rows, step):
                yield Piece(first=first, end=min(first + step, rows), low=low, high=high)

    def whole(self, piece: Piece) -> bool:
        """Whether it has all planes of its rows."""
        return piece.high - piece.low == len(self.pairing.table)

    def last(self, piece: Piece, rows: int) -> bool:
        """Whether no piece of so many rows comes behind it."""
        return piece.end == rows and piece.high == len(self.pairing.table)

    def _groups(self, rows: int) -> Iterator[tuple[int, int]]:
        """As many neighbouring planes at a time as `rows` rows of them, and an operation each, leave room for."""
        most, planes_max, low, held = max(1, SLOT_BYTES // max(1, rows)), max(1, OPERATIONS_MAX // max(1, rows)), 0, 0
        widths = self.pairing.table[:, 6].tolist()
        for at, width in enumerate(widths):
            if at > low and (held + width > most or at - low >= planes_max):
                yield low, at
                low, held = at, 0
            held += width
        yield low, len(widths)

    def gather(self, piece: Piece, source_slots: Int64s) -> Plan:
        """From the pool into a slot of the ring; `source_slots` are the whole write's."""
        ours, theirs = self.columns(piece)
        sides = replace(
            self.pairing, table=_table(ours[:, :3], theirs, ours[:, 6:]), layers=self._layers(piece),
            target_page_size=1, target_slots=piece.end - piece.first,
        )  # fmt: skip
        return plan(sides, source_slots[piece.first : piece.end], np.arange(piece.end - piece.first))

    def runs(self, piece: Piece, target_slots: Int64s) -> Int64s:
        """From a slot of the ring into the arena, as Plan.byte_runs."""
        ours, theirs = self.columns(piece)
        sides = replace(
            self.pairing, table=_table(theirs, ours[:, 3:6], ours[:, 6:]), layers=self._layers(piece),
            source_page_size=1, source_slots=piece.end - piece.first,
        )  # fmt: skip
        return plan(sides, np.arange(piece.end - piece.first), target_slots[piece.first : piece.end]).byte_runs()

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
            place[:, 0], place[:, 1:] = before * (piece.end - piece.first), width[:, None]
        return table, place


def cut(pairing: Pairing) -> Cut:
    """How rows of this pairing pass through a ring."""
    _check_planes(pairing)
    pairing = _narrowed(pairing)
    whole = Cut(pairing=pairing, woven=True)
    table, place = whole.columns(Piece(first=0, end=1, low=0, high=len(pairing.table)))
    there = replace(pairing, table=_table(place, table[:, 3:6], table[:, 6:]), source_page_size=1, source_slots=1)
    return whole if len(there.fused().table) < len(table) else Cut(pairing=pairing, woven=len(table) == 1)


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

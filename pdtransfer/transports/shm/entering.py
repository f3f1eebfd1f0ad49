"""The bytes of a received arena that a writer has entered: in its page table, and registered with its GPU.

Entering takes as long as the arena is large, so a session does not wait for it. What rows are about to land in is
entered first, by whole pieces. The rest follows behind it, in steps that leave the driver free for launches in between.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from ...errors import TransportError
from ...handoff.slot_allocator import Extents
from ...kernels.registered import Registrar
from ...layout.geometry import Int64s
from ...layout.pairing import Pairing
from ...memory.mapping import Mapping, backed_end

PIECE_BYTES = 2 << 20  # entered as one, or not at all: a huge page, and so a bound of how many registrations there are
STEP_BYTES = 32 << 20  # entered by one call: some 6 ms, during which rows that are about to land wait
_ROUNDED_MAX = 1 << 20  # pairs of a plane and an extent whose pieces are looked for at a time


class Parts:
    """Disjoint parts [first, end) of a range of bytes; those that touch are one."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self) -> None:
        self._firsts, self._ends = list[int](), list[int]()  # both ascending

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of [first, end) that are not here, ascending."""
        gaps = list[tuple[int, int]]()
        for index in range(bisect_right(self._ends, first), len(self._firsts)):
            if self._firsts[index] >= end:
                break
            if first < self._firsts[index]:
                gaps.append((first, self._firsts[index]))
            first = self._ends[index]
        return gaps if first >= end else [*gaps, (first, end)]

    def add(self, first: int, end: int) -> None:
        """Adds a part, no byte of which is here."""
        index = bisect_right(self._firsts, first)
        assert not index or self._ends[index - 1] <= first
        assert index == len(self._firsts) or end <= self._firsts[index]
        if index < len(self._firsts) and self._firsts[index] == end:
            end = self._ends.pop(index)
            del self._firsts[index]
        if index and self._ends[index - 1] == first:
            self._ends[index - 1] = end
        else:
            self._firsts.insert(index, first)
            self._ends.insert(index, end)


def parts_of(pairing: Pairing, extents: Extents) -> Int64s:
    """The pieces of the target in which rows of these slots lie, as disjoint parts: int64 (n, 2), ascending, each the
    first byte and the end."""
    if not len(pairing.table) or not len(extents):
        return np.empty((0, 2), np.int64)
    planes = max(1, _ROUNDED_MAX // len(extents))
    tables = [pairing.table[first : first + planes] for first in range(0, len(pairing.table), planes)]
    pieces = [_joined(*_pieces(table, pairing.target_page_size, extents)) for table in tables]
    return pieces[0] if len(pieces) == 1 else _joined(*np.concatenate(pieces).T)


def _pieces(table: Int64s, page_size: int, extents: Extents) -> tuple[Int64s, Int64s]:
    """The first byte and the end of the pieces around each extent of each plane."""
    base, page_stride, row_stride, row_bytes = table[:, 3:].T[:, :, None]
    first_page, last_page = extents[:, 0] // page_size, (extents.sum(axis=1) - 1) // page_size
    firsts = (base + first_page * page_stride).ravel() // PIECE_BYTES * PIECE_BYTES
    ends = (base + last_page * page_stride + (page_size - 1) * row_stride + row_bytes).ravel()
    return firsts, -(-ends // PIECE_BYTES) * PIECE_BYTES


def _joined(firsts: Int64s, ends: Int64s) -> Int64s:
    """Parts that touch as one."""
    order = np.argsort(firsts, kind="stable")
    firsts, ends = firsts[order], np.maximum.accumulate(ends[order])
    opens = np.flatnonzero(np.concatenate(([True], firsts[1:] > ends[:-1])))
    return np.stack((firsts[opens], ends[np.append(opens[1:], len(ends)) - 1]), axis=1)


class EnteredArena:
    """Enters the first `needed` bytes of a received arena, and with a `gpu` registers them, part by part and each once.

    It is called in worker threads, for a step at a time, so that sessions take turns. One enters at a time; those whose
    rows are computed come first.
    """

    def __init__(self, mapping: Mapping, fd: int, needed: int, gpu: Registrar | None) -> None:
        """Takes `fd`, the arena's descriptor, over."""
        self._mapping, self._fd, self._needed, self._gpu = mapping, fd, needed, gpu
        self._turn, self._busy, self._urgent = threading.Condition(), False, 0
        self._entered = Parts()
        self._backed = 0  # by the arena's owner, when last looked
        self.bytes_ready = 0  # that its owner has backed: rows may be granted there
        self.whole = not needed  # whether all is entered

    @property
    def is_ready(self) -> bool:
        """True if its owner has backed all that is needed."""
        return self.bytes_ready == self._needed

    def enter(self, parts: Int64s, *, urgent: bool = False) -> Int64s:
        """Enters a step of what is missing of these parts, which rows are about to land in; `urgent` where the rows are
        computed. Returns the parts that are left for the next steps.

        Raises TransportError where the owner has not backed them, WorldError where there is no memory for the page
        table, or the GPU refuses; what was entered before stays.
        """
        left = STEP_BYTES
        for index, (first, end) in enumerate(parts.tolist()):
            for start in range(first, end, STEP_BYTES):
                with self._alone(urgent=urgent):
                    if self.whole:
                        return parts[:0]
                    self._look()
                    left -= self._enter(start, min(start + STEP_BYTES, end, max(start + 1, self.bytes_ready)))
                if left <= 0:
                    rest = parts[index:].copy()
                    rest[0, 0] = min(start + STEP_BYTES, end)
                    return rest if rest[0, 0] < end else rest[1:]
        return parts[:0]

    def enter_next(self) -> bool:
        """Enters a step of what is missing from the beginning; whether there was any. Raises as `enter`."""
        with self._alone():
            self._look()
            gap = next(iter(self._entered.missing(0, self._backed)), None)
            if gap is not None:
                self._enter(gap[0], min(gap[1], gap[0] + STEP_BYTES))
            return gap is not None

    def look(self) -> bool:
        """Only looks what its owner has backed meanwhile. Returns False: nothing is entered."""
        with self._alone():
            self._look()
        return False

    @contextmanager
    def _alone(self, *, urgent: bool = False) -> Generator[None]:
        with self._turn:
            self._urgent += urgent
            self._turn.wait_for(lambda: not self._busy and (urgent or not self._urgent))
            self._urgent -= urgent
            self._busy = True
        try:
            yield
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _look(self) -> None:
        self._backed = backed_end(self._fd, self._needed, self._backed)
        self.bytes_ready = max(self.bytes_ready, self._backed)

    def _enter(self, first: int, end: int) -> int:
        """Returns how many bytes were missing."""
        if end > self._backed:
            raise TransportError(f"arena: rows are to land below byte {end}, its owner has backed {self._backed}")
        gaps = self._entered.missing(first, end)
        for gap_first, gap_end in gaps:
            for start in range(gap_first, gap_end, STEP_BYTES):
                stop = min(start + STEP_BYTES, gap_end)
                self._mapping.prefault(first=start, end=stop)
                if self._gpu is not None:
                    self._mapping.register_part(self._gpu, start, stop)
                self._entered.add(start, stop)
        self.whole = not self._entered.missing(0, self._needed)
        return sum([gap_end - gap_first for gap_first, gap_end in gaps])

    def close_fd(self) -> None:
        """Closes the descriptor, which nothing here needs any more; the mapping keeps the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

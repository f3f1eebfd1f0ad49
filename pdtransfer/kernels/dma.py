"""Runs of bytes for the copy engine: none across two registrations, and many in one call where the driver can."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ..layout.geometry import Int64s
from .card import Card


class _Rows(NamedTuple):
    """So many rows of some bytes, from one to the next `theirs` in the source and `ours` in the target."""

    source: int
    target: int
    bytes: int
    theirs: int
    ours: int
    rows: int

    def some(self, first: int, end: int) -> _Rows:
        """Rows first to end - 1."""
        at = self.source + first * self.theirs, self.target + first * self.ours
        return self._replace(source=at[0], target=at[1], rows=end - first)

    def halves(self, byte_count: int) -> tuple[_Rows, _Rows]:
        """The first bytes of a single row, and the others."""
        rest = self._replace(
            source=self.source + byte_count, target=self.target + byte_count, bytes=self.bytes - byte_count
        )
        return self._replace(bytes=byte_count), rest


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes; where memory lies need not be said of what was allocated or registered."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def copy_runs(here: Card, runs: Int64s, strides: Int64s | None, stream: int) -> None:
    """Queues `runs`, int64 (n, 3): source address, target address, bytes; one call each. With `strides`, int64 (n, 3),
    a run is rows: from one to the next in the source, in the target, and how many."""
    if strides is None:
        for source, target, byte_count in runs.tolist():
            here.copy(target, source, byte_count, stream)
        return
    for (source, target, byte_count), (theirs, ours, rows) in zip(runs.tolist(), strides.tolist(), strict=True):
        here.copy_rows(target, source, byte_count, pitches=(ours, theirs), rows=rows, stream=stream)


def cut_rows(runs: Int64s, strides: Int64s, borders: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """As `cut`, of runs that are rows, `strides` apart: a row with a border in it goes in pieces of its own."""
    origins, ends = np.arange(len(runs)), runs[:, :2] + runs[:, 2:] + strides[:, :2] * (strides[:, 2:] - 1)
    whole = np.searchsorted(borders, runs[:, :2], side="right") >= np.searchsorted(borders, ends, side="left")
    if whole.all():
        return runs, strides, origins  # what nearly always is so
    made = [
        (*part, origin)
        for origin, columns in enumerate(np.hstack((runs, strides)).tolist())
        for part in _parts(_Rows(*columns), borders)
    ]
    table = np.array(made, np.int64)
    return table[:, :3], table[:, 3:6], table[:, 6]


def _parts(rows: _Rows, borders: Int64s) -> list[_Rows]:
    """In parts that cross no border."""
    for start, stride in ((rows.source, rows.theirs), (rows.target, rows.ours)):
        end = start + stride * (rows.rows - 1) + rows.bytes
        at = int(np.searchsorted(borders, start, side="right"))
        if at == len(borders) or borders[at] >= end:
            continue
        row, inside = divmod(int(borders[at]) - start, stride)  # the last row that begins before it, or there
        parts = [rows.some(0, row), rows.some(row, row + 1), rows.some(row + 1, rows.rows)]
        if 0 < inside < rows.bytes:
            parts[1:2] = parts[1].halves(inside)
        elif inside:  # in the gap behind that row
            parts = [rows.some(0, row + 1), rows.some(row + 1, rows.rows)]
        return [part for each in parts if each.rows for part in _parts(each, borders)]
    return [rows]


def cut(runs: Int64s, borders: Int64s) -> tuple[Int64s, Int64s]:
    """The same bytes in the same order, in runs that cross none of the addresses `borders`, which ascend, on either
    side; and of which run each of them is, int64 (m,)."""
    origins, ends = np.arange(len(runs)), runs[:, :2] + runs[:, 2:]
    if (np.searchsorted(borders, runs[:, :2], side="right") >= np.searchsorted(borders, ends, side="left")).all():
        return runs, origins  # what nearly always is so
    for column in (0, 1):
        starts, ends = runs[:, column], runs[:, column] + runs[:, 2]
        low, high = np.searchsorted(borders, starts, side="right"), np.searchsorted(borders, ends, side="left")
        crossed = np.maximum(high - low, 0)
        if not crossed.any():
            continue
        origin = np.repeat(np.arange(len(runs)), crossed + 1)
        number = np.arange(len(origin)) - np.searchsorted(origin, origin)
        begins = np.where(number == 0, starts[origin], borders[np.maximum(low[origin] + number - 1, 0)])
        stops = np.append(begins[1:], 0)
        last = number == crossed[origin]
        stops[last] = ends[origin[last]]
        parts = runs[origin].copy()
        parts[:, :2] += (begins - starts[origin])[:, None]
        parts[:, 2] = stops - begins
        runs, origins = parts, origins[origin]
    return runs, origins

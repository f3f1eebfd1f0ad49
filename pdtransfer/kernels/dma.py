"""Runs of bytes for the copy engine: none across two registrations, and many in one call where the driver can."""

from __future__ import annotations

import ctypes

import numpy as np

from ..geometry import Int64s
from .card import Card


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes; where memory lies need not be said of what was allocated or registered."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def copy_runs(here: Card, runs: Int64s, stream: int) -> None:
    """Queues `runs`, int64 (n, 3): source address, target address, bytes; one call each."""
    for source, target, byte_count in runs.tolist():
        here.copy(target, source, byte_count, stream)


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

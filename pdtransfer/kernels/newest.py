"""Where the token that a step computes goes, on the device and in the arena: on a card, or on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .card import card
from .swap import HotBuffers, address_of

_THREADS = 128


class NewestArgument(ctypes.Structure):
    """Newest of kernels/newest.h."""

    _fields_ = (
        ("positions", ctypes.c_uint64), ("rows", ctypes.c_uint64), ("real", ctypes.c_uint64),
        ("host_slots", ctypes.c_uint64), ("hot_slots", ctypes.c_uint64), ("own_slots", ctypes.c_uint64),
        ("device", ctypes.c_uint64), ("host", ctypes.c_uint64), ("refused", ctypes.c_uint64),
        ("host_stride", ctypes.c_int64), ("requests", ctypes.c_int32), ("hot", ctypes.c_int32),
        ("row_count", ctypes.c_int32), ("spare", ctypes.c_int32),
    )  # fmt: skip


def newest_slots(
    hot: HotBuffers,
    own_slots: Any,
    positions: Any,
    rows: Any,
    *,
    device: Any,
    host: Any,
    refused: Any,
    spare: int,
    real: Any = None,
    stream: int = 0,
) -> None:
    """Of each request's token at `positions` (requests,) its slots into `device` and `host` (requests,), all int32.

    A position below the buffer's size has its own place; any other the row's slot of `own_slots` (rows,). A request
    that has no slot for it, on either side, gets `spare` and -1, and adds to its row of `refused` (rows,); so does
    padding, but it adds to nothing. Arrays are all of numpy, or all in a card's memory, where one launch is queued.
    """
    requests = int(positions.shape[0])
    if not getattr(positions, "is_cuda", False):
        count = requests if real is None else int(real[0])
        _on_cpu(hot, own_slots, positions, rows, device, host, refused, spare, count)
    elif requests:
        argument = argument_of(hot, own_slots, positions, rows, device, host, refused, spare, real)
        blocks = -(-requests // _THREADS)
        card(positions.device.index).launch("newest", argument, blocks=blocks, threads=_THREADS, stream=stream)


def argument_of(
    hot: HotBuffers, own_slots: Any, positions: Any, rows: Any, device: Any, host: Any, refused: Any, spare: int,
    real: Any,
) -> NewestArgument:  # fmt: skip
    """What the kernel is told."""
    return NewestArgument(
        positions=address_of("positions", positions), rows=address_of("rows", rows),
        real=0 if real is None else address_of("real", real), host_slots=address_of("host_slots", hot.host_slots),
        hot_slots=address_of("hot_slots", hot.hot_slots), own_slots=address_of("own_slots", own_slots),
        device=address_of("device", device), host=address_of("host", host), refused=address_of("refused", refused),
        host_stride=hot.host_slots.shape[1], requests=positions.shape[0], hot=hot.hot_slots.shape[1],
        row_count=hot.hot_slots.shape[0], spare=spare,
    )  # fmt: skip


def _on_cpu(
    hot: HotBuffers, own_slots: Any, positions: Any, rows: Any, device: Any, host: Any, refused: Any, spare: int,
    real: int,
) -> None:  # fmt: skip
    row_count, length = hot.host_slots.shape
    device[:], host[:] = spare, -1
    requests = np.arange(len(positions))
    known = requests[(requests < real) & (rows >= 0) & (rows < row_count)]
    row, position = rows[known], positions[known]
    inside = (position >= 0) & (position < length)
    theirs = np.where(inside, hot.host_slots[row, np.where(inside, position, 0)], -1)
    placed = inside & (position < hot.hot_slots.shape[1])
    ours = own_slots[row]
    ours[placed] = hot.hot_slots[row[placed], position[placed]]
    found = inside & (theirs >= 0) & (ours >= 0)
    device[known[found]], host[known[found]] = ours[found], theirs[found]
    np.add.at(refused, row[~found], 1)

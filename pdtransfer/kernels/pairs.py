"""A pairing as the card takes it: addresses instead of offsets, whole pages where they can move whole, wide rows in
pieces. All that tells one layout from another for the kernel is in this table."""

from __future__ import annotations

import numpy as np

from ..layout.geometry import Int64s, read_only
from ..layout.pairing import Pairing

_PIECE_BYTES = 2_048  # 32 lanes with 64 bytes each
_LINE_BYTES = 128
_UNIT_BYTES = 16
_LANE_UNITS = 4


def device_pairs(pairing: Pairing, *, source_address: int, target_address: int, granule: int = 1) -> Int64s:
    """int64 (n, 7), columns as Pairing.table's, ascending by target; `granule` is what `granule_of` allowed."""
    table = pairing.table.copy()
    if granule > 1:
        page_strides = _page_strides(pairing, granule)
        table[:, 6] *= granule
        table[:, [1, 2]], table[:, [4, 5]] = page_strides[0][:, None], page_strides[1][:, None]
    table[:, 0] += source_address
    table[:, 3] += target_address
    return _in_pieces(table)


def granule_of(pairing: Pairing, page_size: int) -> int:
    """`page_size` if each page of so many slots is one stretch of bytes in every plane of both sides, otherwise 1."""
    width = pairing.table[:, 6]
    whole = all(
        size in (1, page_size) and np.array_equal(pairing.table[:, column], width)
        for size, column in ((pairing.source_page_size, 2), (pairing.target_page_size, 5))
    )
    return page_size if whole else 1


def lanes_of(pairs: Int64s) -> int:
    """Lanes for one row, a power of two up to a warp: each takes 64 bytes of the widest, all of a line together."""
    units = -(-int(pairs[:, 6].max()) // _UNIT_BYTES)
    line = min(units, _LINE_BYTES // _UNIT_BYTES)
    return min(32, 1 << (max(-(-units // _LANE_UNITS), line) - 1).bit_length())


def pair_major(pairs: Int64s, *, base: int, stride: int) -> bool:
    """Whether rows of one pair lie nearer to each other than the pairs of one row: columns of the side to go by."""
    if len(pairs) == 1:
        return False
    bases = np.sort(pairs[:, base])
    return bool((bases[1:] - bases[:-1]).min() >= pairs[:, stride].min())


def _page_strides(pairing: Pairing, page_size: int) -> tuple[Int64s, Int64s]:
    """From a page to the next on either side: a side without gaps has page_size 1 here, and rows that touch."""
    source, target = (
        pairing.table[:, column] * page_size if size == 1 else pairing.table[:, column - 1]
        for size, column in ((pairing.source_page_size, 2), (pairing.target_page_size, 5))
    )
    return source, target


def _in_pieces(table: Int64s) -> Int64s:
    """Rows wider than what a warp takes at once become several, about equal, cut where lines are."""
    widths = table[:, 6]
    counts = -(-widths // _PIECE_BYTES)
    if (counts == 1).all():
        return read_only(table)
    steps = -(-widths // counts)
    steps = np.where(counts > 1, -(-steps // _LINE_BYTES) * _LINE_BYTES, steps)
    counts = -(-widths // steps)
    pieces = np.repeat(table, counts, axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * np.repeat(steps, counts)
    pieces[:, 0] += starts
    pieces[:, 3] += starts
    pieces[:, 6] = np.minimum(np.repeat(steps, counts), pieces[:, 6] - starts)
    return read_only(pieces)

"""Planes as columns of integers: their bounds, and a proof that no two rows overlap. Independent of Layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import LocalProtocolError

Int64s = NDArray[np.int64]

BYTES_MAX = 1 << 62  # every address and every sum of two is within int64
ROW_BYTES_MAX = 1 << 30
FEW = 32  # values up to which plain Python is faster than numpy

COLUMNS = ("layer", "head_start", "head_count", "base", "page_stride", "row_stride", "row_bytes")
_LOW = (0, 0, 1, 0, 0, 0, 1)
_HIGH = (0xFFFF, 0xFFFF, 0xFFFF, BYTES_MAX, BYTES_MAX, BYTES_MAX, ROW_BYTES_MAX)


def table_of(rows: list[tuple[int, ...]]) -> Int64s:
    """COLUMNS of each plane as read-only int64 (planes, 7); ValueError for values that are not integers within their
    bounds."""
    table = np.array(rows)
    if table.dtype == np.int64:
        inside = (table >= _LOW) & (table <= _HIGH)
    else:  # some value is not an integer, or beyond int64
        inside = np.array(
            [[type(v) is int and a <= v <= b for v, a, b in zip(row, _LOW, _HIGH, strict=True)] for row in rows]
        )
    if not inside.all():
        plane, column = divmod(int(inside.argmin()), len(COLUMNS))
        value, bounds = rows[plane][column], f"{_LOW[column]}..{_HIGH[column]}"
        raise ValueError(f"planes[{plane}].{COLUMNS[column]}: {value!r} is not an integer of {bounds}")
    return read_only(table)


def integers(field: str, values: ArrayLike, count: int | None = None) -> NDArray[np.integer[Any]]:
    """The values, integers (count,) or of any count, as an array. Raises LocalProtocolError that names the field."""
    try:
        array = np.asarray(values)
    except Exception as error:  # noqa: BLE001 (whatever library they are of)
        raise LocalProtocolError(f"{field}: {error}") from None
    if array.ndim != 1 or count not in (None, len(array)) or (array.size and array.dtype.kind not in "iu"):
        expected = "n" if count is None else count
        raise LocalProtocolError(f"{field}: {array.dtype} of shape {array.shape}, not integers ({expected},)")
    return array


def distinct(values: Int64s) -> Int64s:
    """Each value once, ascending. np.unique would do, but its first call imports for longer than a loop may block."""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]


def ends_of(table: Int64s, page_size: int, slots: int) -> Int64s:
    """One past each plane's highest byte, read-only int64 (planes,)."""
    _, _, _, base, page_stride, row_stride, row_bytes = table.T
    return read_only(base + (slots // page_size - 1) * page_stride + (page_size - 1) * row_stride + row_bytes)


def check_strides(table: Int64s, page_size: int, slots: int) -> None:
    """Raises ValueError unless strides clear what they step over, all bytes lie below 2**62, and no rows overlap."""
    page_count = slots // page_size
    _, _, _, base, page_stride, row_stride, row_bytes = table.T
    if page_size > 1 and (index := first_true(row_stride < row_bytes)) is not None:
        raise ValueError(f"planes[{index}].row_stride: {row_stride[index]} is below row_bytes {row_bytes[index]}")
    # Floats find values far beyond int64, where it has wrapped; int64 decides the rest exactly.
    rough = base + (page_count - 1.0) * page_stride + (page_size - 1.0) * row_stride + row_bytes
    ends = ends_of(table, page_size, slots)
    if (index := first_true((rough > 1.5 * BYTES_MAX) | (ends > BYTES_MAX))) is not None:
        strides = f"base {base[index]}, page_stride {page_stride[index]}, row_stride {row_stride[index]}"
        raise ValueError(f"planes[{index}]: {strides} and {slots} slots end beyond byte {BYTES_MAX}")
    page_extent = (page_size - 1) * row_stride + row_bytes
    if page_count > 1 and (index := first_true(page_stride < page_extent)) is not None:
        page = f"the {page_extent[index]} bytes of a page"
        raise ValueError(f"planes[{index}].page_stride: {page_stride[index]} is below {page}")
    nest = [(np.full_like(base, np.iinfo(np.int64).max), ends - base)]
    nest += [(page_stride, page_extent)] if page_count > 1 else []
    nest += [(row_stride, row_bytes)] if page_size > 1 else []
    if (two := first_overlap(base, nest)) is not None:
        named = " and ".join(f"planes[{index}].base {base[index]}" for index in two)
        raise ValueError(f"{named}: their rows overlap, or interleave at unequal strides")


def first_overlap(starts: Int64s, nest: Sequence[tuple[Int64s, Int64s]]) -> tuple[int, int] | None:
    """Two of n nested progressions of bytes that may overlap, or None: proof that no two do.

    `starts` is int64 (n,). `nest` goes from outside in: at each level the (stride, extent) of every progression,
    int64 (n,) each, an extent within its stride. What repeats at one level fills the extent of the level above, and
    the innermost extent is one row's bytes. Sound, not complete: progressions that cross at one level must share the
    stride of the next, as all do in the field. O(levels * n log n); no value beyond the largest of starts + extents.
    """
    order = np.argsort(starts)
    starts = starts[order]
    group = np.zeros(len(starts), dtype=np.int64)
    opens = np.ones(len(starts), dtype=np.bool_)
    for stride, extent in nest:
        # The first of a group is its origin: crossing progressions repeat in step, so only phases within a stride
        # count.
        origin = np.searchsorted(group, group)
        strides, extents = stride[order], extent[order]
        starts = (starts - starts[origin]) % strides
        if (index := first_true((strides != strides[origin]) | (starts > strides - extents))) is not None:
            return int(order[origin[index]]), int(order[index])
        sort = np.lexsort((starts, group))
        order, group, starts = order[sort], group[sort], starts[sort]
        # Neighbours suffice: one that contains another still does at the next level, and is found at the last.
        opens[1:] = (group[1:] != group[:-1]) | (starts[1:] >= (starts + extents[sort])[:-1])
        group = np.cumsum(opens) - 1
        if opens.all():
            return None
    index = int(opens.argmin())
    return int(order[index - 1]), int(order[index])


def holder_of(points: Int64s, starts: Int64s, ends: Int64s) -> Int64s:
    """The index of the interval [start, end) that holds each point; -1 if none does."""
    order = np.argsort(starts)
    before = np.searchsorted(starts[order], points, side="right") - 1
    holder = order[before]
    return np.where((before >= 0) & (points < ends[holder]), holder, -1)


def first_true(flags: NDArray[np.bool_]) -> int | None:
    """The index of the first True."""
    return int(flags.argmax()) if flags.any() else None


def bounds_of(values: NDArray[np.integer[Any]]) -> tuple[int, int]:
    """The lowest and the highest of some values, at least one."""
    if len(values) <= FEW:
        listed = values.tolist()
        return min(listed), max(listed)
    return int(values.min()), int(values.max())


def read_only(array: Int64s) -> Int64s:
    """The array itself, made read-only."""
    array.setflags(write=False)
    return array

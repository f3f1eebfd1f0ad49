"""Checksums of rows that lie in this process's memory, with the compiled kernel; without one, with numpy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import kernels, rows
from .cancel import Cancel
from .checksum import MASK, Lines, hashes, pieces_of, row_seeds
from .geometry import Int64s

_ABI = 1  # of kernels/host_checksum.c
_PIECE_BYTES = 4 << 20  # of numpy's, between two looks at the cancel word

_Sum = Callable[[int, int, int, int, int, int, int, int, int, int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Native:
    """Which sum this process has: the compiled one at `path`, or numpy (None); `text` tells a person which, or why."""

    path: Path | None
    text: str
    wide: bool = False  # AVX-512
    sum: _Sum | None = None


NUMPY = Native(path=None, text="numpy checksums")

_lock = threading.Lock()
_chosen: Native | None = None


def native(cache: Path | None = None) -> Native:
    """The sum of this process, chosen once, as kernels.native is: make the first call off the loop."""
    global _chosen  # noqa: PLW0603 (one process has one sum)
    with _lock:
        if _chosen is None:
            _chosen = load(cache)
        return _chosen


def load(cache: Path | None = None) -> Native:
    """What `native` finds, found anew."""
    try:
        return kernels.loaded("host_checksum", cache, _opened)
    except kernels.UnusableError as error:
        return Native(path=None, text=f"numpy checksums: {error}")


def _opened(path: Path) -> Native:
    try:
        library = ctypes.CDLL(str(path))
        abi = library.pdtransfer_checksum_abi()
        wide = bool(library.pdtransfer_checksum_wide())
        function = library.pdtransfer_checksum
    except (OSError, AttributeError) as error:
        raise kernels.UnusableError(f"{path}: {error}") from None
    if abi != _ABI:
        raise kernels.UnusableError(f"{path}: its interface is {abi}, not {_ABI}")
    address, count, flag = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
    function.argtypes = (
        address, count, address, address, count, count, address, flag, flag, address, ctypes.c_void_p,
    )  # fmt: skip
    function.restype = ctypes.c_int32
    text = f"compiled checksum, {'AVX-512' if wide else 'plain'}: {path}"
    return Native(path=path, text=text, wide=wide, sum=function)


def checksum(
    lines: Lines, runs: Int64s, address: int, *, cancel: Cancel | None = None, by: Native | None = None
) -> int | None:
    """The sum over all lines and all rows of `runs` (slot, row, count); None when `cancel` stopped it.

    `address` is added to the lines' bases. It holds the GIL for no hashed byte. Slots are the caller's to have checked.
    """
    by, cancel = by or native(), cancel or Cancel()
    if by.sum is None:
        return _with_numpy(lines, runs, address, cancel)
    runs = np.ascontiguousarray(runs)
    assert runs.dtype == lines.table.dtype == np.int64
    assert lines.table.flags.c_contiguous
    assert lines.seeds.flags.c_contiguous
    found = ctypes.c_uint64(0)
    complete = by.sum(
        lines.table.ctypes.data, len(lines.table), lines.seeds.ctypes.data, runs.ctypes.data, len(runs),
        lines.page_size, address, lines.woven, by.wide, cancel.address, ctypes.addressof(found),
    )  # fmt: skip
    return found.value if complete else None


def _with_numpy(lines: Lines, runs: Int64s, address: int, cancel: Cancel) -> int | None:
    total, size, seeds = 0, (lines.slots, lines.page_size), lines.seeds.tolist()
    for piece in pieces_of(runs, max(1, _PIECE_BYTES // max(1, lines.row_bytes))):
        if cancel.is_set:
            return None
        counts = piece[:, 2]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        slots, numbers = (np.repeat(piece[:, at], counts) + within for at in (0, 1))
        for base, page_stride, row_stride, heads, head_bytes, first in lines.table.tolist():
            for head in range(heads):
                place = [base + head * head_bytes, page_stride, row_stride]
                found = rows.gather(address, place, slots, size, head_bytes)
                total += int(hashes(found, row_seeds(seeds[first + head], numbers)).sum())
    return None if cancel.is_set else total & MASK

"""Checksums of rows that lie in this process's memory, or are copied; without the compiled kernel, with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import kernels
from ..layout.checksum import MASK, Lines, hashes, pieces_of, row_seeds, runs_of
from ..layout.geometry import Int64s
from ..layout.plan import Plan
from . import numpy_copy
from .cancel import Cancel

_ABI = 2  # of kernels/host_checksum.c
_SLICE_BYTES = 256 << 10  # summed, then copied out of the cache
_PIECE_BYTES = 4 << 20  # of numpy's, between two looks at the cancel word

_Function = Callable[..., int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Native:
    """Which sum this process has: the compiled one at `path`, or numpy (None); `text` tells a person which, or why."""

    path: Path | None
    text: str
    wide: bool = False  # AVX-512
    sum: _Function | None = None
    copy: _Function | None = None


NUMPY = Native(path=None, text="numpy checksums")


def load(cache: Path | None = None) -> Native:
    """The sum that there is, as kernels.load finds the copy."""
    try:
        return kernels.loaded("host_checksum", cache, _opened)
    except kernels.UnusableError as error:
        return Native(path=None, text=f"numpy checksums: {error}")


native = kernels.Once(load)
"""The sum of this process."""


def _opened(path: Path) -> Native:
    library = kernels.library_at(path, abi_name="pdtransfer_checksum_abi", abi=_ABI)
    wide = bool(library.pdtransfer_checksum_wide())
    address, count, flag = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
    total, copied = library.pdtransfer_checksum, library.pdtransfer_checksum_copy
    total.argtypes = (
        address, count, address, address, count, count, address, flag, flag, address, ctypes.c_void_p,
    )  # fmt: skip
    copied.argtypes = (
        address, count, address, count, address, flag, flag, count, count,
        address, address, count, address, count, count, count, address, flag, address, ctypes.c_void_p,
    )  # fmt: skip
    total.restype = copied.restype = ctypes.c_int32
    text = f"compiled checksum, {'AVX-512' if wide else 'plain'}: {path}"
    return Native(path=path, text=text, wide=wide, sum=total, copy=copied)


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


def copy(
    plan: Plan,
    source_address: int,
    target_address: int,
    *,
    lines: Lines,
    first_row: int,
    cancel: Cancel | None = None,
    by: Native | None = None,
) -> int | None:
    """As kernels.copy, and sums what it reads: `lines` are the source's, and the plan's rows the room's from
    `first_row` on. None when `cancel` stopped it."""
    by, cancel, copier = by or native(), cancel or Cancel(), kernels.native()
    if by.copy is None or not copier.used:
        runs = runs_of(plan.runs[:, 0], plan.runs[:, 2], first_row)
        found = checksum(lines, runs, source_address, cancel=cancel, by=by)
        return found if kernels.copy(plan, source_address, target_address, cancel=cancel) else None
    table, runs, total = plan.pairing.table, plan.runs, ctypes.c_uint64(0)
    assert runs.dtype == table.dtype == lines.table.dtype == np.int64
    assert all(each.flags.c_contiguous for each in (runs, table, lines.table, lines.seeds))
    complete = by.copy(
        lines.table.ctypes.data, len(lines.table), lines.seeds.ctypes.data, lines.page_size, source_address,
        lines.woven, by.wide, first_row, max(1, _SLICE_BYTES // max(1, plan.pairing.row_bytes)),
        copier.address, table.ctypes.data, len(table), runs.ctypes.data, len(runs),
        plan.pairing.source_page_size, plan.pairing.target_page_size, target_address,
        kernels.streams_for(plan, copier), cancel.address, ctypes.addressof(total),
    )  # fmt: skip
    return total.value if complete else None


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
                found = numpy_copy.gather(address, place, slots, size, head_bytes)
                total += int(hashes(found, row_seeds(seeds[first + head], numbers)).sum())
    return None if cancel.is_set else total & MASK

"""Checksums rows in this process's memory, alone or while copying them: compiled, or with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import kernels
from ..layout.checksum import MASK, Lines, hashes, row_seeds, runs_of
from ..layout.geometry import Int64s
from ..layout.plan import Plan, pieces_of
from . import numpy_copy
from .cancel import CancelWord

_SLICE_BYTES = 256 << 10  # summed, then copied from the CPU's cache
_PIECE_BYTES = 4 << 20  # summed by numpy between two reads of the cancel word

_Function = Callable[..., int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeChecksum:
    """This process's checksum: the compiled library at `path`, or numpy (None). `text` describes it for a person."""

    path: Path | None
    text: str
    wide: bool = False  # AVX-512
    sum: _Function | None = None
    copy: _Function | None = None


NUMPY = NativeChecksum(path=None, text="numpy checksums")


def load(cache: Path | None = None) -> NativeChecksum:
    """Loads the compiled checksum, or numpy's, as kernels.load does for the copy."""
    try:
        return kernels.load_library("host_checksum", cache, _open)
    except kernels.UnusableError as error:
        return NativeChecksum(path=None, text=f"numpy checksums: {error}")


native = kernels.Once(load)
"""Returns this process's checksum."""


def _open(path: Path) -> NativeChecksum:
    library = kernels.library_at(path)
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
    return NativeChecksum(path=path, text=text, wide=wide, sum=total, copy=copied)


def checksum(
    lines: Lines, runs: Int64s, address: int, *, cancel: CancelWord | None = None, by: NativeChecksum | None = None
) -> int | None:
    """Sums all lines and all rows of `runs` (slot, row, count). Returns None if `cancel` stopped it.

    `address` is added to the lines' bases. Hashing does not hold the GIL. The caller must have checked the slots.
    """
    by, cancel = by or native(), cancel or CancelWord()
    if by.sum is None:
        return _with_numpy(lines, runs, address, cancel)
    runs = np.ascontiguousarray(runs)
    assert runs.dtype == lines.table.dtype == np.int64
    assert lines.table.flags.c_contiguous
    assert lines.seeds.flags.c_contiguous
    total = ctypes.c_uint64(0)
    complete = by.sum(
        lines.table.ctypes.data, len(lines.table), lines.seeds.ctypes.data, runs.ctypes.data, len(runs),
        lines.page_size, address, lines.woven, by.wide, cancel.address, ctypes.addressof(total),
    )  # fmt: skip
    return total.value if complete else None


def copy(
    plan: Plan, source_address: int, target_address: int, *, lines: Lines, first_row: int,
    cancel: CancelWord | None = None, by: NativeChecksum | None = None,
) -> int | None:  # fmt: skip
    """Copies as kernels.copy does and returns the checksum of the source rows, or None if `cancel` stopped it.

    `lines` describe the source. The plan's first row is the room's row `first_row`.
    """
    by, cancel, copier = by or native(), cancel or CancelWord(), kernels.native()
    if by.copy is None or not copier.used:
        runs = runs_of(plan.runs[:, 0], plan.runs[:, 2], first_row)
        checksum_ = checksum(lines, runs, source_address, cancel=cancel, by=by)
        return checksum_ if kernels.copy(plan, source_address, target_address, cancel=cancel) else None
    table, runs, total = plan.pairing.table, plan.runs, ctypes.c_uint64(0)
    assert runs.dtype == table.dtype == lines.table.dtype == np.int64
    assert all(array.flags.c_contiguous for array in (runs, table, lines.table, lines.seeds))
    complete = by.copy(
        lines.table.ctypes.data, len(lines.table), lines.seeds.ctypes.data, lines.page_size, source_address,
        lines.woven, by.wide, first_row, max(1, _SLICE_BYTES // max(1, plan.pairing.row_bytes)),
        copier.address, table.ctypes.data, len(table), runs.ctypes.data, len(runs),
        plan.pairing.source_page_size, plan.pairing.target_page_size, target_address,
        kernels.streams_for(plan, copier), cancel.address, ctypes.addressof(total),
    )  # fmt: skip
    return total.value if complete else None


def _with_numpy(lines: Lines, runs: Int64s, address: int, cancel: CancelWord) -> int | None:
    total, size, seeds = 0, (lines.slots, lines.page_size), lines.seeds.tolist()
    for piece in pieces_of(runs, max(1, _PIECE_BYTES // max(1, lines.row_bytes))):
        if cancel.is_set:
            return None
        counts = piece[:, 2]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        slots, numbers = (np.repeat(piece[:, column], counts) + within for column in (0, 1))
        for base, page_stride, row_stride, heads, head_bytes, first in lines.table.tolist():
            for head in range(heads):
                plane = [base + head * head_bytes, page_stride, row_stride]
                rows = numpy_copy.gather(address, plane, slots, size, head_bytes)
                total += int(hashes(rows, row_seeds(seeds[first + head], numbers)).sum())
    return None if cancel.is_set else total & MASK

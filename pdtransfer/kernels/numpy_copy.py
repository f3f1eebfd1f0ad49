"""Copies the rows of a plan with numpy: the fallback without a compiler, and the reference for the compiled copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..layout.geometry import Int64s
from ..layout.plan import Plan
from .cancel import CancelWord

_PIECE_BYTES = 4 << 20  # copied between two reads of the cancel word
_LONG_RUN_ROWS = 8  # mean run length from which one slice per run is faster than one index per row

_Index = tuple[int, slice] | tuple[Int64s, Int64s]


class _Memory:
    """Memory of this process as a numpy array. The caller keeps it mapped."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], row_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": f"|V{row_bytes}", "version": 3,
        }  # fmt: skip


def copy(plan: Plan, source_address: int, target_address: int, cancel: CancelWord) -> bool:
    """As kernels.copy: returns False if `cancel` stopped it."""
    pairing = plan.pairing
    source_size = pairing.source_slots, pairing.source_page_size
    target_size = pairing.target_slots, pairing.target_page_size
    for piece in plan.pieces(_PIECE_BYTES):
        if cancel.is_set:
            return False
        index = _index_runs if piece.rows >= _LONG_RUN_ROWS * len(piece.runs) else _index_rows
        source_indices = index(piece.runs, 0, *source_size)
        target_indices = index(piece.runs, 1, *target_size)
        for *source_plane, target_base, target_page, target_row, width in pairing.table.tolist():
            source = _pool(source_address, source_plane, *source_size, width)
            target = _pool(target_address, [target_base, target_page, target_row], *target_size, width)
            for target_index, source_index in zip(target_indices, source_indices, strict=True):
                target[target_index] = source[source_index]
    return not cancel.is_set


def gather(address: int, plane: list[int], slots: Int64s, size: tuple[int, int], width: int) -> NDArray[np.uint8]:
    """Reads `width` bytes of each slot, uint8 (n, width).

    `plane` is (base, page_stride, row_stride); `size` is (slots, page_size).
    """
    page_size = size[1] if size[1] > 1 else size[0]
    rows = _pool(address, plane, *size, width)[np.divmod(slots, page_size)]
    return rows.view(np.uint8).reshape(len(slots), width)


def _pool(address: int, plane: list[int], slots: int, page_size: int, width: int) -> NDArray[np.void]:
    """One plane as an array of rows, (pages, page_size), or (1, slots) if a page is one slot."""
    base, page_stride, row_stride = plane
    shape = (slots // page_size, page_size) if page_size > 1 else (1, slots)
    return np.asarray(_Memory(address + base, shape, (page_stride, row_stride), width))


def _index_runs(runs: Int64s, side: int, slots: int, page_size: int) -> list[_Index]:
    """One index into `_pool`'s array for each run on one side."""
    pages, firsts = np.divmod(runs[:, side], page_size if page_size > 1 else slots)
    ends = firsts + runs[:, 2]
    spans = zip(pages.tolist(), firsts.tolist(), ends.tolist(), strict=True)
    return [(page, slice(first, end)) for page, first, end in spans]


def _index_rows(runs: Int64s, side: int, slots: int, page_size: int) -> list[_Index]:
    """One index into `_pool`'s array for all rows on one side."""
    counts = runs[:, 2]
    before = np.cumsum(counts) - counts
    rows = np.repeat(runs[:, side] - before, counts) + np.arange(int(counts.sum()))
    return [np.divmod(rows, page_size if page_size > 1 else slots)]

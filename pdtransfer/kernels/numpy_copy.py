"""Copies the rows of a plan with numpy: what a host without a compiler has, and what the compiled copy must equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..layout.geometry import Int64s
from ..layout.plan import Plan
from .cancel import Cancel

_PIECE_BYTES = 4 << 20  # between two looks at the cancel word
_LONG_RUN_ROWS = 8  # on average: from here on a slice a run is faster than an index a row

_Place = tuple[int, slice] | tuple[Int64s, Int64s]


class _Memory:
    """Memory of this process as numpy's array interface describes it; whoever names it keeps it mapped."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], row_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": f"|V{row_bytes}", "version": 3,
        }  # fmt: skip


def copy(plan: Plan, source_address: int, target_address: int, cancel: Cancel) -> bool:
    """As kernels.copy; False when `cancel` stopped it."""
    pairing = plan.pairing
    source_size = pairing.source_slots, pairing.source_page_size
    target_size = pairing.target_slots, pairing.target_page_size
    for piece in plan.pieces(_PIECE_BYTES):
        if cancel.is_set:
            return False
        places = _by_run if piece.rows >= _LONG_RUN_ROWS * len(piece.runs) else _by_row
        source_at = places(piece.runs, 0, *source_size)
        target_at = places(piece.runs, 1, *target_size)
        for *source, target_base, target_page, target_row, width in pairing.table.tolist():
            ours = _pool(source_address, source, *source_size, width)
            target = [target_base, target_page, target_row]
            theirs = _pool(target_address, target, *target_size, width)
            for into, of in zip(target_at, source_at, strict=True):
                theirs[into] = ours[of]
    return not cancel.is_set


def gather(address: int, plane: list[int], slots: Int64s, size: tuple[int, int], width: int) -> NDArray[np.uint8]:
    """`width` bytes of each slot, uint8 (n, width).

    `plane` is base, page_stride, row_stride, and `size` slots, page_size.
    """
    page_size = size[1] if size[1] > 1 else size[0]
    found = _pool(address, plane, *size, width)[np.divmod(slots, page_size)]
    return found.view(np.uint8).reshape(len(slots), width)


def _pool(address: int, plane: list[int], slots: int, page_size: int, width: int) -> NDArray[np.void]:
    """One plane as an array of whole rows, (pages, page_size); where a page is one slot, (1, slots)."""
    base, page_stride, row_stride = plane
    shape = (slots // page_size, page_size) if page_size > 1 else (1, slots)
    return np.asarray(_Memory(address + base, shape, (page_stride, row_stride), width))


def _by_run(runs: Int64s, side: int, slots: int, page_size: int) -> list[_Place]:
    """Where each run is on one side, as indices into `_pool`'s array."""
    pages, firsts = np.divmod(runs[:, side], page_size if page_size > 1 else slots)
    ends = firsts + runs[:, 2]
    where = zip(pages.tolist(), firsts.tolist(), ends.tolist(), strict=True)
    return [(page, slice(first, end)) for page, first, end in where]


def _by_row(runs: Int64s, side: int, slots: int, page_size: int) -> list[_Place]:
    """Where all rows are on one side, as one index into `_pool`'s array."""
    counts = runs[:, 2]
    before = np.cumsum(counts) - counts
    rows = np.repeat(runs[:, side] - before, counts) + np.arange(int(counts.sum()))
    return [np.divmod(rows, page_size if page_size > 1 else slots)]

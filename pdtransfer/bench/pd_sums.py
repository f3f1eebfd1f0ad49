"""Sums of a prompt's rows where they lie, by plane: equal on both sides only if every word is in its row's place.

They are made by numpy or torch, of addresses alone: what carried the rows has no part in it.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np

from ..layout.geometry import Int64s
from ..layout.layout import Layout

Sums: TypeAlias = dict[tuple[str, int, str, int], int]
"""By component, layer, kind and first head: sum over rows r and words w of word * odd(r) * odd(w), mod 2**64."""

_PART = 4_096  # rows at once


def host_sums(component: str, layout: Layout, address: int, slots: Int64s, first_row: int) -> Sums:
    """Of rows first_row .. of a room, in memory of this process. Rows are whole words of 4 bytes."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * layout.end).from_address(address))
    return _sums(component, layout, slots, first_row, memory, np)


def card_sums(component: str, layout: Layout, card: int, address: int, slots: Int64s, first_row: int) -> Sums:
    """The same in a card's memory; waits for the card."""
    import torch

    device = torch.device("cuda", card)
    memory = torch.as_tensor(_Bytes(address, layout.end), device=device)
    return _sums(component, layout, slots, first_row, memory, torch)


class _Bytes:
    """Bytes of a card, as torch takes them over."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (byte_count,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _sums(component: str, layout: Layout, slots: Int64s, first_row: int, memory: Any, library: Any) -> Sums:
    """`memory` is bytes of numpy or torch, the `library`."""
    sums: Sums = {}
    pages, places = slots // layout.page_size, slots % layout.page_size
    for plane in layout.planes:
        sizes = plane.base, plane.page_stride, plane.row_stride, plane.row_bytes
        word = 8 if not any(size % 8 for size in sizes) else 4
        count, starts = plane.row_bytes // word, (plane.base + pages * sizes[1] + places * sizes[2]) // word
        whole = memory[: layout.end // word * word].view(library.int64 if word == 8 else library.int32)
        rows_at = _windows(whole, count, library)  # row i begins at word i
        columns = _odd(np.arange(count), 0xC2B2AE3D27D4EB4F)
        total = 0
        for at in range(0, len(slots), _PART):
            own = starts[at : at + _PART]
            rows = _odd(np.arange(first_row + at, first_row + at + len(own)), 0x9E3779B97F4A7C15)
            if library is np:
                taken = rows_at[own].astype(np.int64)
            else:
                own, rows, columns = (library.as_tensor(each, device=memory.device) for each in (own, rows, columns))
                taken = rows_at[own].to(library.int64)
            total += int(((taken * columns).sum(1) * rows).sum())
        sums[component, plane.layer, plane.kind, plane.head_start] = total % (1 << 64)
    return sums


def _windows(whole: Any, count: int, library: Any) -> Any:
    """(words - count + 1, count): the words from each on, of the same memory."""
    if library is np:
        return np.lib.stride_tricks.sliding_window_view(whole, count)
    return whole.as_strided((len(whole) - count + 1, count), (1, 1))


def _odd(numbers: Int64s, factor: int) -> Int64s:
    """Odd int64 that look like chance, one for each number."""
    with np.errstate(over="ignore"):
        return ((numbers.astype(np.uint64) * np.uint64(factor)) | np.uint64(1)).view(np.int64)

"""The bytes of a memory that this process has read or written, by the kernel's page table: no path leads around it.

Each page that any thread or copy of this process touches gets an entry. The kernel enters up to 64 KiB around it as
well, so a count is exact only where it is 0.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.hisparse.hot_requests import HotRequests

_PRESENT = np.uint64(63)  # the bit of a page that the process has mapped in
_ENTRY_BYTES = 8


class WatchedMemory:
    """Shared memory, as an arena is; its content stays when the page table forgets it."""

    def __init__(self, byte_count: int) -> None:
        self._map = mmap.mmap(-1, byte_count)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def forget(self) -> None:
        """From now on nothing has been touched."""
        self._map.madvise(mmap.MADV_DONTNEED)
        assert self.touched_bytes == 0

    @property
    def touched_bytes(self) -> int:
        """Of the pages that have been read or written since `forget`."""
        pages = -(-len(self.bytes) // mmap.PAGESIZE)
        with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
            table.seek(self.bytes.ctypes.data // mmap.PAGESIZE * _ENTRY_BYTES)
            entries = np.frombuffer(table.read(pages * _ENTRY_BYTES), np.uint64)
        assert len(entries) == pages
        return int((entries >> _PRESENT).sum()) * mmap.PAGESIZE


def touched_at_picks(memory: WatchedMemory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, at each pick of a HiSparse step, what has been touched by then."""
    touched: list[int] = []
    plain = HotRequests.place

    def place(hot: HotRequests, group: int, picks: Tensor) -> Tensor:
        touched.append(memory.touched_bytes)
        return plain(hot, group, picks)

    monkeypatch.setattr(HotRequests, "place", place)
    return touched

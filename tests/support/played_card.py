"""A GPU's memory that is none, for an engine's process, which loads this module by its path in place of `card`: a
memory file of the test's process, which the handle names. It imports nothing of the package."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

NO_GPU = bytes(16)  # the UUID of one that an engine's process does not see
BLIND = b"\1" * 16  # of one that a trial reaches, and no session


class PlayedCard:
    """The GPU with this UUID, as `card.CudaCard`."""

    def __init__(self, uuid: bytes) -> None:
        if uuid == NO_GPU:
            raise RuntimeError("GPU 00 is not one of the 0 that the engine's process sees")
        self._uuid, self._kept = uuid, list[mmap.mmap]()

    def open(self, handle: bytes, offset: int, byte_count: int, used: Sequence[tuple[int, int]]) -> int:
        if self._uuid == BLIND:
            raise RuntimeError("cuIpcOpenMemHandle answers 2 (out of memory)")
        with open(handle.rstrip(b"\0").decode(), "r+b") as file:
            self._kept.append(mmap.mmap(file.fileno(), offset + byte_count))
        address = self._address(self._kept[-1]) + offset
        assert all(end <= address or address + byte_count <= first for first, end in used)
        return address

    def close(self) -> None:
        self._kept.clear()

    def allocate(self, byte_count: int) -> int:
        self._kept.append(mmap.mmap(-1, byte_count))
        return self._address(self._kept[-1])

    def upload(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def download(self, address: int, byte_count: int) -> bytes:
        return ctypes.string_at(address, byte_count)

    @staticmethod
    def _address(memory: mmap.mmap) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))


CARD = PlayedCard

"""Memory for the slots of one launch at a time, which the kernel itself brings to the GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import BLOCKS_PUSH, THREADS, CopyArgument, SlotsArgument
from .gpu import Gpu

_BYTES_MIN = 64 << 10
_PIECE_BYTES = 2_048  # of a list, for one warp of kv_copy


@dataclass(slots=True, eq=False)
class Staging:
    """Pinned memory and GPU memory for one list of slots at a time. It grows, and is never freed.

    The kernel copies the list, since the copy engine would do so only after its queued transfers.
    """

    event: Any  # after the last work that reads the list
    byte_count: int = 0
    address: int = 0  # device address of the list
    blocks: int = 0
    argument: CopyArgument = field(default_factory=CopyArgument)  # of the launch that copies the list
    _host: int = 0

    def put(self, gpu: Gpu, content: NDArray[np.int32]) -> None:
        """Stages a new list and prepares `argument`. Waits until the previous list is no longer read."""
        if self.byte_count < content.nbytes:
            byte_count = max(_BYTES_MIN, 1 << content.nbytes.bit_length())
            host, device = gpu.pinned(_PIECE_BYTES + byte_count)
            self.address, self._host = gpu.allocate(byte_count), host + _PIECE_BYTES
            pair = device + _PIECE_BYTES, _PIECE_BYTES, 0, self.address, _PIECE_BYTES, 0, _PIECE_BYTES
            ctypes.memmove(host, (ctypes.c_int64 * 7)(*pair), 56)
            side = SlotsArgument(entry_limit=byte_count // _PIECE_BYTES)
            self.argument = CopyArgument(
                pairs=device, pair_count=1, source=side, target=side, group_shift=3, by_source=1
            )  # fmt: skip
            self.byte_count = byte_count  # last, since the allocations may fail
        else:
            gpu.reach(self.event)
        ctypes.memmove(self._host, content.ctypes.data, content.nbytes)
        self.argument.count = -(-content.nbytes // _PIECE_BYTES)
        self.blocks = min(BLOCKS_PUSH, -(-self.argument.count * 8 // THREADS))

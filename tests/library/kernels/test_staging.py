"""The pinned memory that a ring's lists of slots go through, and the memory that the GPU has beside it."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.kernels.staging import Staging


def test_what_got_no_larger_memory_goes_on_with_what_it_has_and_never_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may have no more memory to pin for now; the next list must not take the old for the larger one."""
    monkeypatch.setattr("pdtransfer.kernels.staging._BYTES_MIN", 2_048)
    memory, refuses = list[Any](), [False]

    def pinned(byte_count: int) -> tuple[int, int]:
        if refuses[0]:
            raise WorldError("GPU 0: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        memory.append(np.zeros(byte_count, np.uint8))
        return memory[-1].ctypes.data, memory[-1].ctypes.data

    def allocate(byte_count: int) -> int:
        memory.append(np.zeros(byte_count, np.uint8))
        return memory[-1].ctypes.data

    def brought(content: Any) -> None:
        """What the kernel reads and writes for it lies in memory that there is, and it is the list."""
        staging.put(gpu, content)
        source, _, _, target, _, _, width = (ctypes.c_int64 * 7).from_address(staging.argument.pairs)
        room = {each.ctypes.data: each.nbytes for each in memory}
        byte_count = staging.argument.count * width
        assert content.nbytes <= byte_count <= staging.argument.source.entry_limit * width
        assert byte_count <= room[target]
        assert source - staging.argument.pairs + byte_count <= room[staging.argument.pairs]
        assert target == staging.address
        assert ctypes.string_at(source, content.nbytes) == content.tobytes()

    gpu = Mock(pinned=pinned, allocate=allocate)
    staging = Staging(event=None)
    brought(np.full(512, 3, np.int32))
    for refuses[0] in (True, True):
        with pytest.raises(WorldError, match="OUT_OF_MEMORY"):
            staging.put(gpu, np.zeros(2_000, np.int32))
    brought(np.ones(500, np.int32))
    refuses[0] = False
    brought(np.full(2_000, 2, np.int32))

"""The pinned memory that a ring's uploads go through."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.kernels.lanes import _Staging


def test_what_did_not_get_larger_memory_goes_on_with_what_it_has_and_never_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host may have no more memory to pin for now; the next upload must not take the old for the larger one."""
    monkeypatch.setattr("pdtransfer.kernels.lanes._STAGING_BYTES_MIN", 64)
    memory, refuses, put = list[Any](), [False], list[tuple[int, int]]()

    def pinned(byte_count: int) -> tuple[int, int]:
        if refuses[0]:
            raise WorldError("card 0: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        memory.append(np.zeros(byte_count, np.uint8))
        return memory[-1].ctypes.data, memory[-1].ctypes.data

    card = Mock(pinned=pinned, stage=lambda _, there, byte_count, __: put.append((there, byte_count)))
    staging = _Staging(event=None)
    staging.put(card, 1, np.zeros(16, np.int32), 0)
    for refuses[0] in (True, True):
        with pytest.raises(WorldError, match="OUT_OF_MEMORY"):
            staging.put(card, 1, np.zeros(64, np.int32), 0)
    staging.put(card, 1, np.ones(16, np.int32), 0)
    refuses[0] = False
    staging.put(card, 1, np.full(64, 2, np.int32), 0)
    room = {each.ctypes.data: each.nbytes for each in memory}
    assert [byte_count for _, byte_count in put] == [64, 64, 256]
    assert all(byte_count <= room[there] for there, byte_count in put)

"""Memory beside the arena: HBM and what of it others may write, pools that others may read, and free pages."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.errors import WorldError
from pdtransfer.memory import cuda_ipc, hbm, shared_pool
from pdtransfer.memory.available_memory import AvailableMemory
from pdtransfer.memory.free_pages import FreePages
from pdtransfer.memory.hbm import Hbm

SIZE = 4_096


class OneAllocation:
    """A GPU with memory of another tenant."""

    uuid = b"u" * 16
    refuses = False

    def __init__(self) -> None:
        self.memory = np.full(2 * SIZE, 0xA5, np.uint8)
        self.freed: list[int] = []

    def allocate(self, byte_count: int) -> int:
        return self.memory.ctypes.data

    def clear(self, address: int, byte_count: int) -> None:
        self.memory[address - self.memory.ctypes.data :][:byte_count] = 0

    def range_of(self, address: int) -> tuple[int, int]:
        return self.memory.ctypes.data, SIZE

    def ipc_handle(self, base: int) -> bytes:
        if self.refuses:
            raise WorldError("it has no handle")
        return b"h" * 64

    def free(self, address: int) -> None:
        if self.refuses:
            raise WorldError("the GPU is lost")
        self.freed.append(address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneAllocation:
    card = OneAllocation()
    for module in (hbm, cuda_ipc.gpus):
        monkeypatch.setattr(module, "gpu_at", lambda _: card)
    return card


def test_hbm_is_all_zero_and_others_get_its_handle(gpu: OneAllocation) -> None:
    memory = Hbm.of_gpu(3, base=SIZE, byte_count=SIZE)
    assert not gpu.memory[:SIZE].any(), "no row of who had it before"
    assert gpu.memory[SIZE:].all()
    handle = cuda_ipc.Handle.unpack(memory.handle)
    assert (handle.byte_count, handle.offset, handle.gpu) == (SIZE, 0, gpu.uuid)
    assert (memory.engine_memory.device, memory.engine_memory.address) == (3, gpu.memory.ctypes.data)
    memory.close()
    memory.close()
    assert gpu.freed == [gpu.memory.ctypes.data]


@pytest.mark.parametrize("why", ["a writer", "no handle", "lost"])
def test_hbm_is_freed_once_and_only_where_no_writer_is_left(
    gpu: OneAllocation, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.refuses = why == "no handle"
    memory = Hbm.of_gpu(0, base=0, byte_count=SIZE)
    assert (memory.handle == b"") == (why == "no handle")
    gpu.refuses = why == "lost"
    memory.watch(lambda: why != "a writer")
    if why == "lost":
        with pytest.raises(WorldError, match="lost"):
            memory.close()
    gpu.refuses = False
    memory.close()
    memory.watch(lambda: True)
    memory.close()
    assert len(gpu.freed) == (why == "no handle")
    levels = {"a writer": ["WARNING"], "lost": ["CRITICAL"], "no handle": []}
    assert [record.levelname for record in caplog.records if "stay allocated" in record.message] == levels[why]


def test_a_buffer_is_no_larger_than_the_hbm_that_it_is_for() -> None:
    assert [hbm.staging_bytes(0.5, size) for size in (1 << 20, 1 << 30)] == [1 << 20, 1 << 29]


def test_a_shared_pool_is_read_by_others_and_neither_written_nor_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner: ...

    owner = Owner()
    pool = shared_pool.shared_memory(SIZE, owner)
    pool.view[:2] = b"ab"
    assert mmap.mmap(pool.fd, SIZE, prot=mmap.PROT_READ)[:3] == b"ab\0"
    for change in (
        lambda: mmap.mmap(pool.fd, SIZE),
        lambda: os.ftruncate(pool.fd, 0),
        lambda: os.ftruncate(pool.fd, 2 * SIZE),
    ):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, 1033, 8)  # no further seal
    del owner
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(pool.fd)
    monkeypatch.setattr(shared_pool, "available_memory", lambda: AvailableMemory("a cgroup", SIZE))
    with pytest.raises(WorldError, match=f"a pool of {SIZE + 1} bytes: a cgroup is {SIZE} bytes"):
        shared_pool.shared_memory(SIZE + 1, Owner())
    assert shared_pool.shared_memory(SIZE, Owner()).view.nbytes == SIZE


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30))
def test_pages_are_taken_all_or_none_and_the_last_given_first(steps: list[tuple[bool, int]]) -> None:
    pages, free, taken = FreePages(count=8, page_size=3), list(range(7, -1, -1)), list[list[int]]()
    for gives, tokens in steps:
        if gives and taken:
            pages.give(np.array(taken[0], np.int64))
            free += taken.pop(0)
        elif not gives:
            count, rows = -(-tokens // 3), pages.take(tokens)
            expected = [free.pop() for _ in range(count)] if count <= len(free) else None
            assert (None if rows is None else rows.tolist()) == expected
            taken += [expected] if expected else []

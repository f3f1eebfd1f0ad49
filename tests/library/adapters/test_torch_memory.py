"""An engine's tensors inside an arena: the same tensors as without it, and no byte twice."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.torch_memory import PooledTensors, arena_tensor, pooled_bytes
from pdtransfer.memory.arena_memory import ArenaMemory

SIZES = [1000, 8192, 1000]


def test_wanted_tensors_lie_in_the_arena_one_behind_the_other() -> None:
    arena = ArenaMemory.create(pooled_bytes(SIZES))
    first, end = arena.mapping.address, arena.mapping.address + arena.byte_count
    with PooledTensors(arena_tensor(arena), SIZES.__contains__):
        one = torch.zeros(1000, dtype=torch.int8)
        two = torch.zeros((2, 1024), dtype=torch.float32, device="cpu")
        three = torch.empty(500, dtype=torch.bfloat16, device=torch.device("cpu"))
        fourth = torch.zeros(1000, dtype=torch.int8)  # one more than there is place for
        other = torch.zeros(77)
    later = torch.zeros(1000, dtype=torch.int8)
    assert [each.data_ptr() - first for each in (one, two, three)] == [0, 4096, 12_288]
    assert [(tuple(each.shape), each.dtype) for each in (two, three)] == [
        ((2, 1024), torch.float32), ((500,), torch.bfloat16)
    ]  # fmt: skip
    for outside in (fourth, other, later):
        assert not first <= outside.data_ptr() < end
    two.fill_(2.0)
    assert arena.mapping.view[4096:4100] == bytes([0, 0, 0, 64])
    assert not one.any()
    assert not three.any()


def test_tensors_of_other_devices_and_tables_are_left_alone() -> None:
    backing = torch.zeros(4096, dtype=torch.uint8)
    with PooledTensors(backing, lambda _: True):
        assert torch.zeros(10, device="meta").device.type == "meta"
        assert torch.zeros(10, dtype=torch.int32).data_ptr() != backing.data_ptr()
        assert torch.ones(10).sum() == 10


def test_a_tensor_keeps_its_arena_mapped() -> None:
    arena = ArenaMemory.create(4096)
    tensor = arena_tensor(arena)
    with pytest.raises(BufferError):
        arena.close()
    del tensor
    arena.close()


def test_what_an_engine_allocates_is_measured() -> None:
    with PooledTensors(torch.empty(0, dtype=torch.uint8), lambda _: True) as measured:
        torch.zeros((2, 500), dtype=torch.bfloat16)
        torch.empty(1000, dtype=torch.uint8, device="cpu")
        torch.zeros(64, dtype=torch.int32)  # a table
        torch.zeros(10, device="meta")
        torch.ones(10)
    torch.zeros(10)
    assert measured.sizes == [2000, 1000]

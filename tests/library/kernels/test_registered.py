"""Arenas that a GPU may reach: registered chunk by chunk as they are backed, let go before they are unmapped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdtransfer.errors import WorldError
from pdtransfer.kernels import registered
from pdtransfer.memory import mapping as mappings
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import map_received
from tests.support.fake_gpu import FakeRegistrar, mapped

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(registered, "CHUNK_BYTES", 2 * MIB)


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    arena_memory = ArenaMemory.create(5 * MIB, huge_pages="never")
    yield arena_memory
    arena_memory.close()


def test_what_is_ready_is_backed_and_registered(arena: ArenaMemory) -> None:
    gpu, reported = FakeRegistrar(), list[int]()
    arena.gpu = gpu
    assert arena.prefault(reported.append)
    assert reported == [2 * MIB, 4 * MIB, 5 * MIB]
    assert arena.bytes_ready == arena.byte_count
    assert gpu.registered == {arena.mapping.address + at * MIB: min(2, 5 - at) * MIB for at in (0, 2, 4)}
    assert arena.mapping.registered is not None
    assert arena.mapping.registered.device_address == arena.mapping.address + gpu.shift


def test_a_prefault_that_stopped_goes_on_where_the_card_can_reach(arena: ArenaMemory) -> None:
    gpu, reported = FakeRegistrar(), list[int]()
    arena.gpu = gpu
    assert not arena.prefault(reported.append, lambda: arena.bytes_ready > 0)
    assert reported == [arena.bytes_ready] == [2 * MIB]
    assert arena.prefault(reported.append)
    assert reported == [2 * MIB, 4 * MIB, 5 * MIB]


def test_what_is_needed_first_is_registered_to_its_end_and_the_rest_behind_it() -> None:
    arena, gpu, reported = (
        ArenaMemory.create(3 * MIB, huge_pages="never", staging_bytes=5 * MIB),
        FakeRegistrar(),
        list[int](),
    )
    arena.gpu = gpu
    assert arena.prefault(reported.append)
    assert reported == [2 * MIB, 3 * MIB]
    arena.need_all()
    assert arena.prefault(reported.append)
    assert reported[2:] == [5 * MIB, 7 * MIB, 8 * MIB]
    sizes = {0: 2, 2: 1, 3: 2, 5: 2, 7: 1}
    assert gpu.registered == {arena.mapping.address + at * MIB: size * MIB for at, size in sizes.items()}
    arena.close()


def test_what_an_engine_registers_itself_is_backed_and_left_to_it() -> None:
    """What it has begins with another border than the chunks do."""
    arena, gpu, reported = (
        ArenaMemory.create(3 * MIB, huge_pages="never", staging_bytes=4 * MIB), FakeRegistrar(), list[int]()
    )  # fmt: skip
    arena.gpu, arena.registered_by_engine = gpu, 3 * MIB
    assert arena.prefault(reported.append)
    assert (reported, gpu.registered) == ([1 * MIB, 2 * MIB, 3 * MIB], {})
    arena.need_all()
    assert arena.prefault(reported.append)
    assert reported[3:] == [5 * MIB, 7 * MIB]
    assert gpu.registered == {arena.mapping.address + at * MIB: 2 * MIB for at in (3, 5)}
    assert arena.mapping.registered is not None
    assert arena.mapping.registered.device_address == arena.mapping.address + gpu.shift
    arena.close()
    assert gpu.registered == {}


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_refusal_in_the_middle_leaves_what_was_ready_and_is_let_go_in_the_end(refused: int) -> None:
    arena, gpu = ArenaMemory.create(5 * MIB, huge_pages="never"), FakeRegistrar(refused=refused)
    arena.gpu = gpu
    with pytest.raises(WorldError, match=rf"bytes {2 * MIB * refused} to .* of {5 * MIB} .*CUDA_ERROR_OUT_OF_MEMORY"):
        arena.prefault()
    assert arena.bytes_ready == 2 * MIB * refused
    assert len(gpu.registered) == refused
    arena.close()
    assert gpu.registered == {}


def test_chunks_are_let_go_last_first_before_the_arena_is_unmapped(arena: ArenaMemory) -> None:
    gpu = FakeRegistrar()  # asserts that they are mapped
    arena.gpu = gpu
    arena.prefault()
    arena.close()
    arena.close()
    assert gpu.log[3:] == [f"unregister {size * MIB}" for size in (1, 2, 2)]
    assert arena.mapping._map.closed


def test_what_a_card_does_not_let_go_of_stays_mapped() -> None:
    arena, gpu = ArenaMemory.create(5 * MIB, huge_pages="never"), FakeRegistrar()
    arena.gpu = gpu
    arena.prefault()
    address, gpu.keeps = arena.mapping.address, True
    with pytest.raises(WorldError, match=r"3 chunks of host memory stay registered.*ILLEGAL_ADDRESS"):
        arena.close()
    assert mapped(address, 5 * MIB)
    gpu.keeps = False
    arena.close()
    assert gpu.registered == {}
    assert arena.mapping._map.closed


def test_chunks_that_a_card_sees_apart_are_an_error(arena: ArenaMemory) -> None:
    gpu = FakeRegistrar()
    arena.mapping.register(gpu, 2 * MIB)
    gpu.shift += 4_096
    with pytest.raises(WorldError, match="is not contiguous"):
        arena.mapping.register(gpu, 5 * MIB)
    assert arena.mapping.registered is not None
    assert arena.mapping.registered.bytes_ready == 2 * MIB
    arena.close()
    assert gpu.registered == {}, "also the one that lies elsewhere"


def test_a_received_arena_is_registered_as_the_owners_is(arena: ArenaMemory) -> None:
    arena.prefault()
    fd, gpu = arena.reopen(), FakeRegistrar()
    received = map_received(fd, arena.byte_count)
    os.close(fd)
    assert [received.register(gpu, end) for end in (MIB, 3 * MIB, 5 * MIB)] == [0, 2 * MIB, 5 * MIB]
    received.close()
    assert gpu.registered == {}


def test_parts_are_registered_in_any_order_at_the_addresses_of_one_range(arena: ArenaMemory) -> None:
    gpu = FakeRegistrar()
    arena.prefault()
    for first, end in ((3 * MIB, 5 * MIB), (0, MIB)):
        arena.mapping.register_part(gpu, first, end)
    assert arena.mapping.registered is not None
    assert arena.mapping.registered.device_address == arena.mapping.address + gpu.shift
    assert gpu.registered == {arena.mapping.address: MIB, arena.mapping.address + 3 * MIB: 2 * MIB}
    gpu.shift += 4_096
    with pytest.raises(WorldError, match="is not contiguous"):
        arena.mapping.register_part(gpu, MIB, 2 * MIB)
    arena.close()
    assert gpu.registered == {}


def test_a_node_of_memory_is_preferred_or_nothing_changes(arena: ArenaMemory) -> None:
    arena.mapping.bind(0)  # a container may forbid it
    assert not arena.mapping.bind(64), "no kernel that we know has it"
    assert arena.prefault()
    assert arena.bytes_ready == arena.byte_count

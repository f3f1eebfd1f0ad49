"""A writer of HBM components whose GPU is none: where rows go, and that the lock outlives what a GPU may write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pdtransfer.errors import TransportError
from pdtransfer.handoff.effects import Outcome
from pdtransfer.kernels import registered
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.shm import writer as shm_writer
from pdtransfer.transports.shm.arena import ShmArena
from tests.support.fake_gpu import FakeExported, FakeGpu
from tests.support.shm_pair import LAYERS, ROW, SLOTS, WRITER, Pair, component, opened, page_first, to_map
from tests.support.waiting import until

SIZE = SLOTS * LAYERS * ROW
BASE = 1 << 16
EVERY = np.arange(SLOTS)
HANDLE = b"handle"


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    """HBM is apart, in memory of this process that the fake GPU has exported."""
    made = ArenaMemory.create(BASE + SIZE, huge_pages="never")
    made.hbm = Hbm.of_process(base=BASE, byte_count=SIZE)
    made.hbm.handle = HANDLE
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "CHUNK_BYTES", 2 << 20)
    monkeypatch.setattr(shm_writer, "_lost", [])


class HbmPair(Pair):
    """Its one component is in HBM; `hbm` is what the other memory must hold."""

    def __init__(self, arena: ArenaMemory, directory: Path, gpu: FakeGpu) -> None:
        super().__init__(arena, directory, gpu=gpu)
        gpu.is_locked = lambda: not self.owner.quiet(WRITER)
        self.target = page_first()

    @property
    def component(self) -> Component:
        return replace(component(self.target.rebase(BASE)), memory="hbm")

    async def map(self, session: int = WRITER) -> int:
        return await self.writer.map(to_map(session, await self.owner.offer(session), (self.component,)))

    @property
    def hbm(self) -> np.ndarray:
        assert self.arena.hbm is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(self.arena.hbm.address))


@pytest.fixture
def gpu(arena: ArenaMemory) -> FakeGpu:
    """It has exported HBM."""
    gpu = FakeGpu()
    assert arena.hbm is not None
    gpu.exported[HANDLE] = FakeExported(gpu, arena.hbm.address, arena.hbm.byte_count)
    return gpu


@pytest.fixture
def both(arena: ArenaMemory, directory: Path, gpu: FakeGpu) -> AbstractAsyncContextManager[HbmPair]:
    return opened(HbmPair, arena, directory, gpu=gpu)


async def wrote(both: HbmPair) -> None:
    order = both.write(EVERY, EVERY[::-1].copy(), grant=1)
    await until(lambda: len(both.ended) == both.writes)
    assert both.ended[-1][1] is Outcome.LANDED
    both.want(order)


async def test_rows_go_to_the_memory_that_the_card_reaches_and_not_to_the_arena(both: HbmPair) -> None:
    await both.map()
    assert both.writer.hbm_direct(WRITER)
    await wrote(both)
    assert np.array_equal(both.hbm, both.wanted[:SIZE])
    assert not both.arena.mapping.array.any()


async def test_rows_land_in_the_arena_where_the_card_cannot_reach_that_memory(gpu: FakeGpu, both: HbmPair) -> None:
    gpu.exported.clear()
    await both.map()
    assert not both.writer.hbm_direct(WRITER)
    await wrote(both)
    assert np.array_equal(both.arena.mapping.array[BASE : BASE + SIZE], both.wanted[:SIZE])
    assert not both.hbm.any()


async def test_nobody_learns_of_a_gpus_memory_where_rows_are_to_be_read_back(gpu: FakeGpu, both: HbmPair) -> None:
    both.owner._hbm_direct = False
    assert (await both.owner.offer(WRITER)).hbm_handle == b""
    await both.map()
    assert not both.writer.hbm_direct(WRITER)
    assert "open exported" not in gpu.log


async def test_a_cards_memory_is_opened_under_the_lock_and_let_go_before_it(gpu: FakeGpu, both: HbmPair) -> None:
    await both.map()
    assert not both.owner.quiet(WRITER)
    await wrote(both)
    both.owner.revoke(WRITER)
    both.writer.unmap(WRITER)
    await until(lambda: both.owner.quiet(WRITER))
    assert gpu.log == ["open exported", "close exported"], "nothing of the arena is registered: no row lands there"


async def test_a_card_that_does_not_let_go_of_it_keeps_the_lock_held(
    gpu: FakeGpu, both: HbmPair, arena: ArenaMemory
) -> None:
    gpu.exported[HANDLE].keeps = True
    await both.map()
    both.owner.revoke(WRITER)
    both.writer.unmap(WRITER)
    await both.close()
    assert not both.owner.quiet(WRITER), "it may write there as long as its process lives"
    (lost,) = shm_writer._lost
    hbm, arena.hbm = arena.hbm, None
    assert hbm is not None
    freed, hbm._free = list[int](), lambda: freed.append(1)
    hbm.close()
    assert freed == [], "and it is not given back"
    gpu.exported[HANDLE].keeps = False
    lost.close()


async def test_memory_is_given_back_once_every_writer_is_gone(owner: ShmArena, arena: ArenaMemory) -> None:
    given = list[int]()
    assert arena.hbm is not None
    free = arena.hbm._free
    arena.hbm._free = lambda: given.append(1)
    hbm = arena.hbm
    await owner.offer(WRITER)
    assert not owner._all_quiet(), "somebody may still be let in"
    await owner.close()
    hbm.close()
    hbm.close()
    assert given == [1]
    assert free is not None
    free()
    arena.hbm = None


async def test_less_memory_than_was_announced_is_refused_and_closed(gpu: FakeGpu, both: HbmPair) -> None:
    gpu.exported[HANDLE].byte_count -= 1
    with pytest.raises(TransportError, match=f"{SIZE - 1} bytes were opened, {SIZE} were announced"):
        await both.map()
    assert "close exported" in gpu.log
    both.owner.revoke(WRITER)
    assert both.owner.quiet(WRITER)

"""What every transport promises, the fake one too, and what tests can ask of the fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray

from pdtransfer.errors import TransportError
from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.kernels import checksum_copy
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.base import ArenaTransport, WriterTransport, Wrote
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.engines.writer import EngineWriter
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.nixl import NixlLibrary
from pdtransfer.transports.options import Network, WriterOptions
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.transports.shm.writer import ShmWriter
from tests.library.transports.fake_transport import FakeArena, FakeWriter
from tests.support.shm_pair import to_map
from tests.support.waiting import on_loop, until

SLOTS, ROW, SESSION = 32, 48, 5
LAYOUT = Layout(tuple(Plane(at, "k", "uint8", 0, 1, at * SLOTS * ROW, ROW, ROW, ROW) for at in range(3)), 1, SLOTS)
COMPONENT = Component("kv", "dram", 1, Span(), LAYOUT)


@dataclass
class World:
    """One owner, one writer, and what was reported."""

    owner: ArenaTransport
    make_writer: InitVar[Callable[[Wrote], WriterTransport]]
    pool: NDArray[np.uint8]
    memory: Callable[[], NDArray[np.uint8]]
    ended: list[tuple[int, Outcome]] = field(default_factory=list[tuple[int, Outcome]])
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    writer: WriterTransport = field(init=False)

    def __post_init__(self, make_writer: Callable[[Wrote], WriterTransport]) -> None:
        self.writer = make_writer(self._wrote)

    async def map(self) -> int:
        return await self.writer.map(to_map(SESSION, await self.owner.offer(SESSION), (COMPONENT,)))

    def write(self, number: int, slots: list[int], layers: tuple[int, int] = (0, 3), **more: Any) -> None:
        order = Write(
            session=SESSION, grant=number, room=number, write=number, component=0, layers=layers,
            source_slots=np.array(slots), target_slots=np.array(slots)[::-1].copy(), **more,
        )  # fmt: skip
        self.writer.write(order)

    def _wrote(self, order: Write, outcome: Outcome, text: str, checksum: int) -> None:
        self.ended.append((order.write, outcome))
        self.checksums[order.write] = checksum

    def landed(self, slots: list[int], layers: tuple[int, int]) -> bool:
        """Whether just these rows are there, each where the write puts it."""
        wanted = np.zeros((3, SLOTS, ROW), np.uint8)
        source = self.pool.reshape(3, SLOTS, ROW)
        for layer in range(*layers):
            wanted[layer, slots[::-1]] = source[layer, slots]
        return np.array_equal(self.memory()[: wanted.size], wanted.reshape(-1))


def pool() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(1, 256, LAYOUT.end, np.uint8)


@asynccontextmanager
async def fake(_: Path) -> AsyncIterator[World]:
    owner, source = FakeArena(LAYOUT.end), pool()

    def writer(wrote: Wrote) -> WriterTransport:
        return FakeWriter(owner, (COMPONENT,), source, wrote, outcome=Outcome.LANDED)

    yield World(owner, writer, source, lambda: owner.memory)


@asynccontextmanager
async def shm(directory: Path) -> AsyncIterator[World]:
    arena, source = ArenaMemory.create(LAYOUT.end, huge_pages="never"), pool()
    owner = ShmArena(arena, directory=directory / "s")
    options = WriterOptions(pool_address=source.ctypes.data)
    world = World(owner, partial(ShmWriter, (COMPONENT,), options), source, lambda: arena.mapping.array)
    yield world
    await world.writer.close()
    await owner.close()
    arena.close()


@asynccontextmanager
async def engines(library: Library) -> AsyncIterator[World]:
    if reason := library.why_not():
        pytest.skip(reason)
    arena, source = ArenaMemory.create(LAYOUT.end, huge_pages="never"), pool()
    owner, options = EngineArena(library, arena, Network()), WriterOptions(pool_address=source.ctypes.data)
    world = World(owner, partial(EngineWriter, library, (COMPONENT,), options), source, lambda: arena.mapping.array)
    yield world
    await world.writer.close()
    await owner.close()
    arena.close()


def mooncake(_: Path) -> AbstractAsyncContextManager[World]:
    return engines(MooncakeLibrary())


def nixl(_: Path) -> AbstractAsyncContextManager[World]:
    return engines(NixlLibrary())


def on_each_transport(test: Callable[[World], Awaitable[None]]) -> Callable[..., None]:
    @pytest.mark.parametrize("transport", [fake, shm, mooncake, nixl])
    async def case(
        tmp_path_factory: pytest.TempPathFactory, transport: Callable[[Path], AbstractAsyncContextManager[World]]
    ) -> None:
        async with transport(tmp_path_factory.mktemp("t")) as world:
            await test(world)

    return on_loop(case)


@on_each_transport
async def test_a_write_lands_its_rows_and_reports_later(world: World) -> None:
    assert await world.map() >= LAYOUT.end
    world.write(1, [3, 4, 9], (1, 3))
    assert not world.ended
    await until(lambda: world.ended == [(1, Outcome.LANDED)])
    assert world.landed([3, 4, 9], (1, 3))


@on_each_transport
async def test_a_hand_over_is_good_once_and_never_after_revoke(world: World) -> None:
    reach = await world.owner.offer(SESSION)
    await world.writer.map(to_map(SESSION, reach, (COMPONENT,)))
    world.writer.unmap(SESSION)
    world.owner.revoke(SESSION)
    await until(lambda: world.owner.quiet(SESSION))
    with pytest.raises(TransportError):
        await world.writer.map(to_map(SESSION, reach, (COMPONENT,)))
    late = await world.owner.offer(6)
    world.owner.revoke(6)
    with pytest.raises(TransportError):
        await world.writer.map(to_map(6, late, (COMPONENT,)))


@on_each_transport
async def test_a_session_is_quiet_from_unmap_to_forever(world: World) -> None:
    reach = await world.owner.offer(SESSION)
    assert not world.owner.quiet(SESSION)
    await world.writer.map(to_map(SESSION, reach, (COMPONENT,)))
    world.owner.revoke(SESSION)
    assert not world.owner.quiet(SESSION)
    world.writer.unmap(SESSION)
    world.writer.unmap(SESSION)
    await until(lambda: world.owner.quiet(SESSION))
    world.write(1, [0])
    await until(lambda: world.ended == [(1, Outcome.FAILED)])
    assert world.landed([], (0, 3))
    world.owner.forget(SESSION)


@on_each_transport
async def test_close_ends_every_write(world: World) -> None:
    await world.map()
    for number in range(20):
        world.write(number, [number])
    await world.writer.close()
    assert sorted(number for number, _ in world.ended) == list(range(20))


def alone(test: Callable[[FakeWriter, World], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120), fake(Path()) as world:
                assert isinstance(world.writer, FakeWriter)
                world.writer.outcome = None
                await world.map()
                world.owner.revoke(SESSION)
                await test(world.writer, world)

        uvloop.run(bounded())

    return run


@alone
async def test_a_fake_write_ends_as_its_script_asks(writer: FakeWriter, world: World) -> None:
    for number in (1, 2):
        world.write(number, [number])
    writer.cancel(SESSION, 2)
    first, second = writer.pending
    assert (first.cancelled, second.cancelled) == (False, True)
    writer.end(second, Outcome.FAILED)
    writer.end(first, Outcome.LANDED)
    await until(lambda: world.ended == [(2, Outcome.FAILED), (1, Outcome.LANDED)])
    assert world.landed([1], (0, 3))


@alone
async def test_an_unknown_fake_write_keeps_its_session_from_being_quiet_and_may_land(
    writer: FakeWriter, world: World
) -> None:
    world.write(1, [7, 8])
    (pending,) = writer.pending
    writer.end(pending, Outcome.UNKNOWN)
    writer.unmap(SESSION)
    await until(lambda: world.ended == [(1, Outcome.UNKNOWN)])
    assert not world.owner.quiet(SESSION)
    assert world.landed([], (0, 3))
    writer.land(pending)
    assert world.landed([7, 8], (0, 3))
    assert world.owner.quiet(SESSION)


@alone
async def test_a_fake_writer_that_died_is_quiet_and_reports_nothing(writer: FakeWriter, world: World) -> None:
    world.write(1, [7])
    writer.die()
    assert world.owner.quiet(SESSION)
    await asyncio.sleep(0.01)
    assert world.ended == []


@on_each_transport
async def test_a_write_that_is_to_be_verified_reports_the_sum_of_what_it_read(world: World) -> None:
    await world.map()
    for number, slots in enumerate(([3, 4, 9], [4, 3, 9]), 1):
        world.write(number, slots, (1, 3), first_row=7, verify=True)
    await until(lambda: len(world.ended) == 2)
    lines = lines_of("kv", LAYOUT, layers=(1, 3))
    runs = runs_of(np.array([3, 4, 9]), np.ones(3, np.int64), 7)
    assert world.checksums[1] == checksum_copy.checksum(lines, runs, world.pool.ctypes.data)
    assert world.checksums[2] not in (0, world.checksums[1]), "rows in another order"

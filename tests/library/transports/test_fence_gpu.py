"""The fence where a GPU is writing: whoever is killed in whatever state, slots are reused after the last write."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdtransfer.kernels import driver
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.shm.arena import ShmArena
from tests.support.card_process import CardProcess
from tests.support.processes import deliver
from tests.support.shm_pair import WRITER
from tests.support.waiting import until

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

ARENA_BYTES = 256 << 20  # some 5 ms of the bus
STILL_SECONDS = 0.5  # a hundred launches


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    made = ArenaMemory.create(ARENA_BYTES)
    made.prefault()
    yield made
    made.close()


def sample(arena: ArenaMemory) -> bytes:
    """Some bytes of every row."""
    return arena.mapping.array[::4_096].tobytes()


async def changes(arena: ArenaMemory) -> None:
    """Returns once the arena has been seen to change."""
    before = sample(arena)
    await until(lambda: sample(arena) != before)


async def is_still(arena: ArenaMemory) -> None:
    """Whatever is put there now stays."""
    arena.mapping.array[:] = 0xA5
    await asyncio.sleep(STILL_SECONDS)
    assert bool((arena.mapping.array == 0xA5).all()), "written after the fence"


@pytest.mark.parametrize("turn", range(4))
async def test_a_killed_writer_is_quiet_only_after_its_cards_last_write(
    arena: ArenaMemory, tmp_path: Path, turn: int, measured: Callable[[str], None]
) -> None:
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.send("push")
        await changes(arena)
        owner.revoke(WRITER)
        assert not owner.quiet(WRITER)
        killed = time.monotonic()
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
        quiet = time.monotonic()
        await is_still(arena)
        measured(f"quiet {quiet - killed:.3f} s after SIGKILL")
    await owner.close()


@pytest.mark.parametrize("turn", range(3))
async def test_a_forked_child_keeps_a_card_writing_and_the_fence_closed(
    arena: ArenaMemory, tmp_path: Path, turn: int, measured: Callable[[str], None]
) -> None:
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        child = await process.child("fork")
        process.send("push")
        await changes(arena)
        owner.revoke(WRITER)
        killed = time.monotonic()
        process.started.kill()
        process.started.wait()
        changed, last = 0, sample(arena)
        while time.monotonic() < killed + 6:
            assert not owner.quiet(WRITER), "its child has the mapping, and the GPU's context"
            await asyncio.sleep(0.01)
            if (now := sample(arena)) != last:
                changed, last = changed + 1, now
                ended = time.monotonic()
        os.kill(child, signal.SIGKILL)
        process.forked.clear()
        await until(lambda: owner.quiet(WRITER))
        await is_still(arena)
        measured(f"seen changed {changed} times after SIGKILL, until {ended - killed if changed else 0:.2f} s")
    await owner.close()


@pytest.mark.parametrize("turn", range(3))
async def test_a_child_that_runs_another_program_keeps_no_card_writing(
    arena: ArenaMemory, tmp_path: Path, turn: int, measured: Callable[[str], None]
) -> None:
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        await process.child("exec")
        process.send("push")
        await changes(arena)
        owner.revoke(WRITER)
        killed = time.monotonic()
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
        measured(f"quiet {time.monotonic() - killed:.3f} s after SIGKILL")
        await is_still(arena)
    await owner.close()


async def test_a_frozen_writers_card_writes_on_and_the_fence_stays_closed(arena: ArenaMemory, tmp_path: Path) -> None:
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.send("push")
        await changes(arena)
        owner.revoke(WRITER)
        deliver([process.started.pid], signal.SIGSTOP)
        await changes(arena)
        assert not owner.quiet(WRITER)
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
        await is_still(arena)
    await owner.close()


@pytest.mark.skipif(driver.count() < 2, reason="one GPU here")
async def test_two_processes_write_one_arena_each_by_its_own_card(arena: ArenaMemory, tmp_path: Path) -> None:
    owner = ShmArena(arena, directory=tmp_path / "s")
    reaches = await owner.offer(1), await owner.offer(2)
    async with CardProcess(reaches[0], 1, device=0) as first, CardProcess(reaches[1], 2, device=1) as second:
        for process in (first, second):
            process.send("half")
        assert [await process.receive() for process in (first, second)] == ["done", "done"]
        half = ARENA_BYTES // 2
        for device in (0, 1):
            content = np.random.default_rng(device).integers(1, 256, ARENA_BYTES, dtype=np.uint8)[:half]
            assert np.array_equal(arena.mapping.array[device * half :][:half], content)
        second.send("push")
        await changes(arena)
        for session in (1, 2):
            owner.revoke(session)
        first.started.kill()
        await until(lambda: owner.quiet(1))
        await changes(arena)
        assert not owner.quiet(2), "one GPU's end says nothing of the other's"
        second.started.kill()
        await until(lambda: owner.quiet(2))
        await is_still(arena)
    await owner.close()

"""Whoever is killed while one device writes another's memory, or the arena: slots are reused after the last write, and
what others have there stays as it is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pdtransfer.bounds import device_index
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.shm.arena import ShmArena
from tests.lab.two_gpu.clients import fill, holds, tensor_of
from tests.support.card_process import CardProcess
from tests.support.layout_tensors import CANARY
from tests.support.shm_pair import WRITER
from tests.support.waiting import until

ARENA_BYTES, HBM_BYTES = 64 << 20, 256 << 20
STILL_S = 0.3
LOOKS = 30  # at a lock that a child holds


@pytest.fixture
def arena(devices: tuple[str, str]) -> Iterator[ArenaMemory]:
    """Registered with decode's GPU, and that GPU's HBM beside it, if it is one; canaries in both."""
    ours = device_index(devices[1])
    arena_memory = ArenaMemory.create(ARENA_BYTES, huge_pages="never")
    if ours is not None:
        arena_memory.gpu = gpus.gpu_at(ours)
    arena_memory.prefault()
    if ours is not None:
        arena_memory.hbm = Hbm.of_gpu(ours, base=ARENA_BYTES, byte_count=HBM_BYTES)
        fill(tensor_of(arena_memory.hbm))
    arena_memory.mapping.array[:] = CANARY
    yield arena_memory
    arena_memory.close()


def part_of(arena: ArenaMemory, memory: str, part: int) -> torch.Tensor:
    """The half that the writer writes, 0, or the one that is others'."""
    if memory == "hbm":
        assert arena.hbm is not None
        whole = tensor_of(arena.hbm)
    else:
        whole = torch.from_numpy(arena.mapping.array)
    return whole.view(2, -1)[part]


async def changes(part: Callable[[], torch.Tensor]) -> None:
    """Returns once it has been seen to change three times: the writer goes on and on."""
    for _ in range(3):
        before = part()[::4_096].clone()
        await until(lambda before=before: not torch.equal(part()[::4_096], before))


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize("memory", ["arena", "hbm"])
async def test_slots_of_a_killed_writer_are_quiet_only_after_the_last_write_and_others_are_never_touched(
    devices: tuple[str, str], memory: str, forked: bool, arena: ArenaMemory, tmp_path: Path
) -> None:
    if memory == "hbm" and arena.hbm is None:
        pytest.skip("without a GPU no other process reaches what stands for HBM")
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER), device=device_index(devices[0])) as process:
        child = await process.child("fork") if forked else 0
        process.send("push half" if memory == "arena" else "hbm")
        if memory == "hbm":
            assert await process.receive() == "opened"
        await changes(lambda: part_of(arena, memory, 0))
        owner.revoke(WRITER)
        assert not owner.quiet(WRITER)
        process.started.kill()
        process.started.wait()
        for _ in range(LOOKS if forked else 0):
            assert not owner.quiet(WRITER), "its child has the mapping, and the GPU's context"
            await asyncio.sleep(0.01)
        if forked:
            os.kill(child, signal.SIGKILL)
            process.forked.clear()
        await until(lambda: owner.quiet(WRITER))
        fill(part_of(arena, memory, 0), 0xA5)
        await asyncio.sleep(STILL_S)
        assert holds(part_of(arena, memory, 0), 0xA5), "written after the fence"
        assert holds(part_of(arena, memory, 1)), "these are others'"
        other = "hbm" if memory == "arena" else "arena"
        if other == "arena" or arena.hbm is not None:
            assert holds(part_of(arena, other, 0))
            assert holds(part_of(arena, other, 1))
    await owner.close()

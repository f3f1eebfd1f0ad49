"""The fence where a GPU writes another process's GPU memory, through CUDA IPC; rooms that land there: two_gpu."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.kernels import driver
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.shm.arena import ShmArena
from tests.lab.two_gpu.clients import tensor_of
from tests.support.card_process import CardProcess
from tests.support.layout_tensors import CANARY
from tests.support.shm_pair import WRITER
from tests.support.waiting import until

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

STILL_S = 0.5


@pytest.fixture
def owned() -> Iterator[ArenaMemory]:
    arena = ArenaMemory.create(8 << 20)
    arena.prefault()
    arena.hbm = Hbm.of_gpu(0, base=4 << 20, byte_count=256 << 20)
    yield arena
    arena.close()


async def changes(hbm: torch.Tensor) -> None:
    """Returns once it has been seen to change three times: the writer goes on and on."""
    for _ in range(3):
        before = hbm[: len(hbm) // 2 : 4_096].clone()
        await until(lambda before=before: bool((hbm[: len(hbm) // 2 : 4_096] != before).any()))


async def is_still(hbm: torch.Tensor) -> None:
    """Whatever is put there now stays."""
    hbm.fill_(0xA5)
    torch.cuda.synchronize()
    await asyncio.sleep(STILL_S)
    assert bool((hbm == 0xA5).all()), "written after the fence"


@pytest.mark.parametrize("turn", range(4))
async def test_a_killed_writers_card_is_done_with_our_memory_when_its_lock_is_free(
    owned: ArenaMemory, tmp_path: Path, turn: int, measured: Callable[[str], None]
) -> None:
    owner = ShmArena(owned, directory=tmp_path / "s")
    assert owned.hbm is not None
    hbm = tensor_of(owned.hbm)
    hbm.fill_(CANARY)
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.send("hbm")
        assert await process.receive() == "opened"
        await changes(hbm)
        assert bool((hbm[len(hbm) // 2 :] == CANARY).all()), "slots that are nobody's business"
        owner.revoke(WRITER)
        assert not owner.quiet(WRITER)
        killed = time.monotonic()
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
        measured(f"quiet {time.monotonic() - killed:.3f} s after SIGKILL")
        await is_still(hbm)
    await owner.close()


@pytest.mark.parametrize("turn", range(2))
async def test_a_forked_child_keeps_the_lock_and_maybe_the_card_writing(
    owned: ArenaMemory, tmp_path: Path, turn: int, measured: Callable[[str], None]
) -> None:
    owner = ShmArena(owned, directory=tmp_path / "s")
    assert owned.hbm is not None
    hbm = tensor_of(owned.hbm)
    async with CardProcess(await owner.offer(WRITER)) as process:
        child = await process.child("fork")
        process.send("hbm")
        assert await process.receive() == "opened"
        await changes(hbm)
        owner.revoke(WRITER)
        killed = ended = time.monotonic()
        process.started.kill()
        process.started.wait()
        changed, last = 0, hbm[::4_096].clone()
        while time.monotonic() < killed + 5:
            assert not owner.quiet(WRITER), "its child has the mapping, and the GPU's context"
            await asyncio.sleep(0.01)
            now = hbm[::4_096].clone()
            if bool((now != last).any()):
                changed, last, ended = changed + 1, now, time.monotonic()
        os.kill(child, signal.SIGKILL)
        process.forked.clear()
        await until(lambda: owner.quiet(WRITER))
        await is_still(hbm)
        measured(f"seen changed {changed} times after SIGKILL, until {ended - killed:.2f} s")
    await owner.close()


async def test_memory_is_not_given_back_while_a_writer_may_be_there(tmp_path: Path) -> None:
    arena = ArenaMemory.create(8 << 20)
    arena.prefault()
    hbm = arena.hbm = Hbm.of_gpu(0, base=4 << 20, byte_count=64 << 20)
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.send("hbm")
        assert await process.receive() == "opened"
        await owner.close()
        view = tensor_of(hbm)
        hbm.close()
        await changes(view)  # it is there still, and written
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
    arena.close()

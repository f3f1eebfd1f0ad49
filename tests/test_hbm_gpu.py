"""HBM components on a card: another process writes them through CUDA IPC, or they are copied up; and the fence where a
card writes another process's card memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdtransfer.client import DecodeClient
from pdtransfer.effects import Ready, RoomFailed
from pdtransfer.engine.base import HBM_ALIGNMENT
from pdtransfer.hbm import Hbm
from pdtransfer.kernels import card as cards
from pdtransfer.memory import Arena
from pdtransfer.transports.shm import ShmArena

from .card_process import CardProcess
from .client_pair import Expected, settings, slots_of_pages
from .hbm_prefill import INDEX, KV, PAGE, SLOTS, named, pool_of
from .layout_tensors import CANARY
from .test_shm import WRITER, on_loop, until

if cards.count() == 0:
    pytest.skip("no card here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

REPO = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0
STILL_S = 0.5


class _Bytes:
    """A card's memory, for torch to take."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def tensor_of(hbm: Hbm) -> torch.Tensor:
    return torch.as_tensor(_Bytes(hbm.address, hbm.byte_count), device="cuda:0")


@dataclass
class Two:
    """A decode client here, a prefill client in another process, on one card."""

    decode: DecodeClient
    process: subprocess.Popen[str]
    endpoint: str
    arena: Arena
    hbm: torch.Tensor
    said: list[Ready | RoomFailed] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    @property
    def core(self) -> Any:
        return self.decode._node.core

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hears(self, line: str) -> None:
        assert self.process.stdout is not None
        while line not in self.heard:
            got = self.process.stdout.readline()
            assert got, "the other process has ended"
            self.heard.append(got.strip())

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)
            self.said += self.decode.poll()

    def end_of(self, room: int) -> Ready | RoomFailed:
        self.until(lambda: any(each.room == room for each in self.said))
        return next(each for each in self.said if each.room == room)


@contextmanager
def two(**options: Any) -> Iterator[Two]:
    """The KV in DRAM, the index in HBM, with canaries in both."""
    kv, index = pool_of(KV, name="page_first", page_size=1), pool_of(INDEX, name="page_first")
    base = -(-len(kv.memory) // HBM_ALIGNMENT) * HBM_ALIGNMENT
    arena = Arena.create(base + len(index.memory), huge_pages="never")
    arena.card = cards.card(0)
    arena.prefault()
    arena.mapping.array[:] = CANARY
    arena.hbm = Hbm.of_card(0, base=base, byte_count=len(index.memory))
    hbm = tensor_of(arena.hbm)
    hbm.fill_(CANARY)
    torch.cuda.synchronize()
    own = [named(kv, "kv"), named(index, "index", memory="hbm", base=base)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hbm_prefill"], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        with DecodeClient(settings("d"), own, arena, **options) as decode:
            yield Two(decode, process, endpoint, arena, hbm)
            process.kill()
            process.wait()
    finally:
        process.kill()
        process.wait()
        arena.close()


def untouched(it: Two) -> bool:
    """Whether nothing has landed in the arena's range for HBM."""
    assert it.arena.hbm is not None
    landing = it.arena.mapping.array[it.arena.hbm.base :][: it.arena.hbm.byte_count]
    return bool((landing == CANARY).all())


def landed(ready: Ready, room: int, tokens: int, into: dict[str, Expected]) -> None:
    pages = np.random.default_rng(room).permutation(SLOTS // PAGE)
    for name, expected in into.items():
        expected.land(slots_of_pages(pages, PAGE, tokens), ready.slots[name][:tokens])


def both_expected() -> dict[str, Expected]:
    return {
        "kv": Expected(pool_of(KV, name="page_first", page_size=1)),
        "index": Expected(pool_of(INDEX, name="page_first")),
    }


def check(it: Two, into: dict[str, Expected]) -> None:
    kv = into["kv"].pool.memory
    assert (it.arena.mapping.array[: len(kv)] == kv).all()
    torch.cuda.synchronize()
    assert np.array_equal(it.hbm.cpu().numpy(), into["index"].pool.memory)


@pytest.mark.parametrize("direct", [True, False], ids=["ipc", "copied-up"])
def test_both_components_of_a_room_are_exact_to_the_byte_and_nothing_else_is_touched(
    direct: bool,
) -> None:
    with two(prefix_cache=False) as it:
        if not direct:
            assert it.arena.hbm is not None
            it.arena.hbm.handle = b""
        into = both_expected()
        for room, tokens in ((1, 1), (2, 1_000), (3, 2_111), (4, 64)):
            it.decode.expect(room, tokens=tokens, sources=[it.endpoint], growth=5)
            it.tell("send", room, tokens)
        for room, tokens in ((1, 1), (2, 1_000), (3, 2_111), (4, 64)):
            ready = it.end_of(room)
            assert isinstance(ready, Ready), ready
            landed(ready, room, tokens, into)
        check(it, into)
        lifts = it.core.settling.lifts
        assert lifts.copies.total() == (0 if direct else 4)
        (session,) = it.core.links.sessions.values()
        assert session.hbm_direct is direct
        assert untouched(it) is direct, "where they are written to HBM, the arena's range stays as it is"
        for room in range(1, 5):
            it.decode.release(room)
        it.until(lambda: it.core.idle)


@pytest.mark.parametrize("direct", [True, False], ids=["ipc", "copied-up"])
def test_rooms_that_are_aborted_on_the_way_give_slots_back_that_nobody_writes_any_more(direct: bool) -> None:
    with two(prefix_cache=False) as it:
        if not direct:
            assert it.arena.hbm is not None
            it.arena.hbm.handle = b""
        free = [each.free_slots for each in it.core.arena.free]
        for room in range(1, 31):
            it.decode.expect(room, tokens=8_000, sources=[it.endpoint])
            it.tell("send", room, 8_000)
            it.hears(f"Leased {room}")
            if room % 3:
                time.sleep(0.0007 * (room % 5))
            it.decode.abort(room)
            end = it.end_of(room)
            if isinstance(end, Ready):
                it.decode.release(room)
            it.until(lambda: [each.free_slots for each in it.core.arena.free] == free)
            it.hbm.fill_(CANARY)  # all of it is nobody's
            torch.cuda.synchronize()
            assert bool((it.hbm == CANARY).all()), "written after its proof"
        failed = sum(isinstance(each, RoomFailed) for each in it.said)
        print(f"{failed} of 30 rooms were aborted on the way")
        assert failed
        time.sleep(0.05)
        assert bool((it.hbm == CANARY).all())


def test_a_killed_prefills_slots_stay_in_quarantine_until_its_lock_is_free() -> None:
    with two(prefix_cache=False) as it:
        into = both_expected()
        it.decode.expect(1, tokens=100, sources=[it.endpoint])
        it.tell("send", 1, 100)
        ready = it.end_of(1)
        assert isinstance(ready, Ready)
        landed(ready, 1, 100, into)
        free = [each.free_slots for each in it.core.arena.free]
        it.decode.expect(2, tokens=8_000, sources=[it.endpoint])
        it.tell("send", 2, 8_000)
        it.hears("Leased 2")
        it.process.send_signal(signal.SIGKILL)
        shm = it.decode._node.transport._shm
        (session,) = it.core.links.sessions.values()

        def fenced() -> bool:
            now = [each.free_slots for each in it.core.arena.free]
            if now == free:
                assert all(shm.quiet(each) for each in list(shm._sessions)), "its lock is held, and its slots are free"
            return now == free

        it.until(fenced)
        assert session.id not in it.core.links.sessions or not session.leases
        before = it.hbm.clone()
        torch.cuda.synchronize()
        time.sleep(STILL_S)
        assert bool((it.hbm == before).all()), "written after the fence"
        index = into["index"].pool
        taken = index.memory != CANARY  # room 1's rows: READY, and not the killed one's
        assert np.array_equal(it.hbm.cpu().numpy()[taken], index.memory[taken])


# The fence alone


@pytest.fixture
def owned() -> Iterator[Arena]:
    arena = Arena.create(8 << 20)
    arena.prefault()
    arena.hbm = Hbm.of_card(0, base=4 << 20, byte_count=256 << 20)
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
@on_loop
async def test_a_killed_writers_card_is_done_with_our_memory_when_its_lock_is_free(
    owned: Arena, tmp_path: Path, turn: int
) -> None:
    owner = ShmArena(owned, directory=tmp_path / "s")
    assert owned.hbm is not None
    hbm = tensor_of(owned.hbm)
    hbm.fill_(CANARY)
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.say("hbm")
        assert await process.heard() == "opened"
        await changes(hbm)
        assert bool((hbm[len(hbm) // 2 :] == CANARY).all()), "slots that are nobody's business"
        owner.revoke(WRITER)
        assert not owner.quiet(WRITER)
        killed = time.monotonic()
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
        print(f"turn {turn}: quiet {time.monotonic() - killed:.3f} s after SIGKILL")
        await is_still(hbm)
    await owner.close()


@pytest.mark.parametrize("turn", range(2))
@on_loop
async def test_a_forked_child_keeps_the_lock_and_maybe_the_card_writing(
    owned: Arena, tmp_path: Path, turn: int
) -> None:
    owner = ShmArena(owned, directory=tmp_path / "s")
    assert owned.hbm is not None
    hbm = tensor_of(owned.hbm)
    async with CardProcess(await owner.offer(WRITER)) as process:
        child = await process.child("fork")
        process.say("hbm")
        assert await process.heard() == "opened"
        await changes(hbm)
        owner.revoke(WRITER)
        killed = ended = time.monotonic()
        process.started.kill()
        process.started.wait()
        changed, last = 0, hbm[::4_096].clone()
        while time.monotonic() < killed + 5:
            assert not owner.quiet(WRITER), "its child has the mapping, and the card's context"
            await asyncio.sleep(0.01)
            now = hbm[::4_096].clone()
            if bool((now != last).any()):
                changed, last, ended = changed + 1, now, time.monotonic()
        os.kill(child, signal.SIGKILL)
        process.forked.clear()
        await until(lambda: owner.quiet(WRITER))
        await is_still(hbm)
        print(f"turn {turn}: seen changed {changed} times after SIGKILL, until {ended - killed:.2f} s")
    await owner.close()


@on_loop
async def test_memory_is_not_given_back_while_a_writer_may_be_there(tmp_path: Path) -> None:
    arena = Arena.create(8 << 20)
    arena.prefault()
    hbm = arena.hbm = Hbm.of_card(0, base=4 << 20, byte_count=64 << 20)
    owner = ShmArena(arena, directory=tmp_path / "s")
    async with CardProcess(await owner.offer(WRITER)) as process:
        process.say("hbm")
        assert await process.heard() == "opened"
        await owner.close()
        view = tensor_of(hbm)
        hbm.close()
        await changes(view)  # it is there still, and written
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))
    arena.close()

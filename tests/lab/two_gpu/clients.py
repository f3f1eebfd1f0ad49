"""A decode client here and a prefill client in another process, each with memory on a device of its own.

The KV lands in the arena, the index in HBM: decode's GPU's, or memory of this process where there is no GPU, which
nobody else reaches, so that rows land in the staging buffer and are copied up. All hold canaries wherever nothing has
landed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pdtransfer.bounds import device_index
from pdtransfer.client.clients import DecodeClient
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.serve.engine_api import HBM_ALIGNMENT
from pdtransfer.transports.options import ArenaOptions
from tests.lab.two_gpu.hbm_prefill import INDEX, KV, PAGE, SLOTS, named, pool_of
from tests.support.client_pair import Expected, settings, slots_of_pages
from tests.support.internals import core_of
from tests.support.layout_tensors import CANARY
from tests.support.paths import REPO

PATIENCE_S = 60.0
BUFFER_BYTES = 256 << 10  # an eighth of the index: a large room crosses in dozens of pieces


class _Bytes:
    """A GPU's memory, for torch to take."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def tensor_of(hbm: Hbm) -> torch.Tensor:
    """Its bytes, where they are."""
    if hbm.device is None:
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * hbm.byte_count).from_address(hbm.address)))
    return torch.as_tensor(_Bytes(hbm.address, hbm.byte_count), device=f"cuda:{hbm.device}")


@dataclass
class Two:
    """A decode client here, a prefill client in another process."""

    decode: DecodeClient
    process: subprocess.Popen[str]
    endpoint: str
    arena: ArenaMemory
    hbm: torch.Tensor
    events: list[RoomReady | RoomFailed] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def core(self) -> Any:
        return core_of(self.decode)

    @property
    def free(self) -> list[int]:
        """Slots of each component that nobody has."""
        return [each.free_slots for each in self.core.arena.free]

    def send(self, room: int, tokens: int, growth: int = 0, *, how: str = "send") -> None:
        """Has the room leased here and pushed there; with `begin` in place of `send`, its end is never said there."""
        self.decode.expect(room, tokens=tokens, sources=[self.endpoint], growth=growth)
        self.write(how, room, tokens)

    def write(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def wait_for_line(self, line: str) -> None:
        assert self.process.stdout is not None
        while line not in self.lines:
            got = self.process.stdout.readline()
            assert got, "the other process has ended"
            self.lines.append(got.strip())

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.002)
            self.events += self.decode.poll()

    def end_of(self, room: int) -> RoomReady | RoomFailed:
        self.until(lambda: any(event.room == room for event in self.events))
        return next(event for event in self.events if event.room == room)

    def ready(self, room: int) -> RoomReady:
        end = self.end_of(room)
        assert isinstance(end, RoomReady), end
        return end


@contextmanager
def two(devices: tuple[str, str], *, transport: str = "auto", **options: Any) -> Iterator[Two]:
    """Prefill's pool on the first device, decode's HBM, and the GPU that its arena is registered with, the second."""
    ours = device_index(devices[1])
    kv, index = pool_of(KV, name="page_first", page_size=1), pool_of(INDEX, name="page_first")
    base = -(-len(kv.memory) // HBM_ALIGNMENT) * HBM_ALIGNMENT
    arena = ArenaMemory.create(len(kv.memory), huge_pages="never", staging_bytes=BUFFER_BYTES)
    if ours is not None:
        arena.gpu = gpus.gpu_at(ours)
    arena.need_all()
    arena.prefault()
    arena.mapping.array[:] = CANARY
    place = {"base": base, "byte_count": len(index.memory)}
    arena.hbm = Hbm.of_process(**place) if ours is None else Hbm.of_gpu(ours, **place)
    hbm = tensor_of(arena.hbm)
    fill(hbm)
    own = [named(kv, "kv"), named(index, "index", memory="hbm", base=base)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lab.two_gpu.hbm_prefill", devices[0], transport], cwd=REPO,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        arena_options = ArenaOptions(transport=transport)
        with DecodeClient(settings("d"), own, arena, options=arena_options, **options) as decode:
            yield Two(decode, process, endpoint, arena, hbm)
            process.kill()
            process.wait()
    finally:
        process.kill()
        process.communicate()
        arena.close()


def fill(hbm: torch.Tensor, byte: int = CANARY) -> None:
    """Every byte of it, for all to see."""
    hbm.fill_(byte)
    if hbm.is_cuda:
        torch.cuda.synchronize(hbm.device)


def holds(hbm: torch.Tensor, byte: int = CANARY) -> bool:
    """Whether every byte of it is this one."""
    return bool((hbm == byte).all())


class Landed:
    """What both memories are to hold."""

    def __init__(self) -> None:
        self.kv = Expected(pool_of(KV, name="page_first", page_size=1))
        self.index = Expected(pool_of(INDEX, name="page_first"))

    def add(self, ready: RoomReady, room: int, tokens: int) -> None:
        """The room's rows, where it says that they are."""
        pages = np.random.default_rng(room).permutation(SLOTS // PAGE)
        for name, expected in (("kv", self.kv), ("index", self.index)):
            expected.land(slots_of_pages(pages, PAGE, tokens), ready.slots[name][:tokens])

    def check(self, it: Two) -> None:
        """Every byte of both is as it should be, canaries and all."""
        kv = self.kv.pool.memory
        assert (it.arena.mapping.array[: len(kv)] == kv).all()
        assert np.array_equal(it.hbm.cpu().numpy(), self.index.pool.memory)

    def kept(self, it: Two) -> None:
        """Every row that has landed is there still, whatever is beside it."""
        for expected, now in ((self.kv, it.arena.mapping.array), (self.index, it.hbm.cpu().numpy())):
            landed = expected.pool.memory != CANARY
            assert np.array_equal(now[: len(landed)][landed], expected.pool.memory[landed])

"""The staging buffer between processes: who is killed between two pieces, and what memory either end has."""

from __future__ import annotations

import asyncio
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtransfer.client.clients import DecodeClient
from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import RoomFailed, RoomReady, Settle
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.hbm_copier import HbmCopier
from tests.library.client.staged_writer import PAGE, SLOTS, pages_of
from tests.library.handoff.decode.hbm_pair import in_hbm
from tests.support.client_pair import Expected, component, settings, slots_of_pages
from tests.support.internals import core_of, node_of
from tests.support.layout_tensors import CANARY, Pool, mla
from tests.support.paths import REPO
from tests.support.waiting import wait_for

BUFFER_ROWS = 64  # of the staging buffer, a 64th of the cache: four pieces of 16 rows, two of them one peer's
NAME = "staging-test"
MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .* /memfd:(?P<name>\S+)")


class Far:
    """A decode client here, whose HBM is memory of this process: writers in other processes do not reach it."""

    def __init__(self, decode: DecodeClient, arena: ArenaMemory, target: Pool) -> None:
        self.decode, self.arena, self.target = decode, arena, target
        self.events: list[Any] = []
        self.core = core_of(decode)
        self.expected = Expected(Pool(name="page_first", model=target.model, page_size=1, slots=SLOTS))

    def send(self, writer: Writer, room: int, tokens: int) -> None:
        self.decode.expect(room, tokens=tokens, sources=[writer.endpoint])
        writer.send(room, tokens)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def polled() -> object:
            self.events += self.decode.poll()
            return condition()

        wait_for(polled, what)

    def end_of(self, room: int) -> RoomReady | RoomFailed:
        self.until(lambda: any(event.room == room for event in self.events), f"room {room} does not end")
        return next(event for event in self.events if event.room == room)

    def check(self, room: int, tokens: int) -> None:
        """The room is READY, and HBM has its rows, and canaries where nothing belongs."""
        ready = self.end_of(room)
        assert isinstance(ready, RoomReady), ready
        self.expected.land(slots_of_pages(pages_of(room, tokens), PAGE, tokens), ready.slots["kv"])
        assert self.expected.holds(self.hbm)

    @property
    def hbm(self) -> np.ndarray:
        assert self.arena.hbm is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.arena.hbm.byte_count).from_address(self.arena.hbm.address))

    @property
    def staged(self) -> int:
        """Slots of the buffer that are in use."""
        (free,) = self.core.staging.slots.free
        return free.slots - free.free_slots


class Writer:
    """A process of staged_writer.py."""

    def __init__(self, node: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.library.client.staged_writer", node], cwd=REPO,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @cached_property
    def endpoint(self) -> str:
        """Once it listens: another may be started meanwhile."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, room: int, tokens: int) -> None:
        assert self.process.stdin is not None
        print(room, tokens, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@contextmanager
def writing(node: str) -> Iterator[Writer]:
    writer = Writer(node)
    try:
        yield writer
    finally:
        writer.kill()


@pytest.fixture
def far() -> Iterator[Far]:
    target = Pool(name="page_first", model=mla(layers=range(2)), page_size=1, slots=SLOTS)
    buffer_bytes = BUFFER_ROWS * target.layout.row_bytes + 256
    arena = ArenaMemory.create(0, name=NAME, huge_pages="never", staging_bytes=buffer_bytes)
    arena.prefault()
    arena.hbm = Hbm.of_process(base=0, byte_count=len(target.memory))
    with DecodeClient(settings("d"), [in_hbm(component(target), 0)], arena) as decode:
        made = Far(decode, arena, target)
        made.hbm[:] = CANARY
        yield made
    del made
    arena.close()


class HeldCopies:
    """Copies up that do not begin before they are let go, as on a GPU that takes its time; none can be cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[Settle] = []
        self._begin: list[Callable[[], None]] = []
        lift = HbmCopier.lift

        def hold(copier: HbmCopier, order: Settle) -> None:
            loop = asyncio.get_running_loop()
            self._begin.append(lambda: loop.call_soon_threadsafe(lift, copier, order))
            self.orders.append(order)

        monkeypatch.setattr(HbmCopier, "lift", hold)
        monkeypatch.setattr(HbmCopier, "stop", lambda _copier, _session, _grant: None)

    def slots_of(self, first: int, end: int) -> set[int]:
        """The first slots of the buffer's extents that these orders read."""
        return {int(start) for order in self.orders[first:end] for start, _ in order.parts[0].extents}

    def let_go(self) -> None:
        for begin in self._begin:
            begin()


def test_a_writer_killed_between_two_pieces_leaves_slots_to_nobody_before_they_are_copied(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces have landed and are being copied up. The room has no grant, and waits for slots."""
    with writing("p0") as killed, writing("p1") as other:
        far.send(other, 1, 40)
        far.check(1, 40)
        held = HeldCopies(monkeypatch)
        far.send(killed, 2, 1_000)
        far.until(lambda: len(held.orders) == 2 and 2 in far.core.staging.line, "its first pieces do not land")
        assert far.staged == BUFFER_ROWS // 2
        killed.kill()
        failed = far.end_of(2)
        assert isinstance(failed, RoomFailed)
        assert failed.cause is Cause.PEER_LOST
        far.until(lambda: len(far.core.prefill_peers.sessions) == 1, "its session is not fenced")
        assert far.staged == BUFFER_ROWS // 2, "both pieces are still read by the copies"
        for room in (3, 4):
            far.send(other, room, 16)
        far.until(lambda: len(held.orders) == 4, "the other writer has no slots")
        assert not held.slots_of(0, 2) & held.slots_of(2, 4)
        held.let_go()
        for room in (1, 3, 4):
            assert isinstance(far.end_of(room), RoomReady)
            far.decode.release(room)
        far.until(lambda: not far.staged, "slots of the buffer are not free")
        far.until(lambda: far.core.arena.free[0].free_slots == SLOTS, "slots of HBM are not free")


@pytest.mark.parametrize("pause_ms", [0, 3, 10, 30])
def test_a_writer_killed_anywhere_in_its_pieces_harms_no_other(far: Far, pause_ms: int) -> None:
    """At whatever moment: another writer's rooms land byte for byte, before, meanwhile and after."""
    with writing("p0") as killed, writing("p1") as other:
        far.send(other, 1, 100)
        far.check(1, 100)
        far.send(killed, 2, 3_500)
        far.until(lambda: 2 in far.core.rooms and far.core.rooms[2].stop, "its first piece does not land")
        far.send(other, 3, 100)
        time.sleep(pause_ms / 1e3)
        killed.kill()
        far.end_of(2)
        assert isinstance(far.end_of(3), RoomReady)
        far.decode.release(3)
        far.until(lambda: not far.staged, "slots of the buffer are not free")
        far.hbm[:] = CANARY
        far.expected = Expected(far.expected.like)
        far.send(other, 4, 300)
        far.check(4, 300)


def mapped_bytes(pid: int | str) -> tuple[int, int]:
    """Bytes of address space and of memory that a process has of the arena, by the kernel."""
    size = resident = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            found = MAPPED.match(line)
            inside = found is not None and found["name"] == NAME
        elif inside and line.startswith(("Size:", "Rss:")):
            name, count, _ = line.split()
            size, resident = size + (name == "Size:") * int(count), resident + (name == "Rss:") * int(count)
    return size << 10, resident << 10


def test_either_end_has_the_buffer_in_memory_and_no_more_however_large_the_cache(far: Far) -> None:
    limit = far.arena.byte_count
    assert limit <= BUFFER_ROWS * far.target.layout.row_bytes + 2 * 4_096 < len(far.target.memory) / 32
    with writing("p0") as writer:
        assert mapped_bytes("self") == (limit, 4_096), "nobody has needed the buffer"
        far.send(writer, 1, SLOTS)
        far.check(1, SLOTS)
        for pid in ("self", writer.process.pid):
            size, resident = mapped_bytes(pid)
            assert size == limit
            assert 4_096 < resident <= limit
        assert node_of(far.decode).lifted_bytes == SLOTS * far.target.layout.row_bytes

"""A GPU that is none: what is registered with it, and whether it was let go in time."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pdtransfer.errors import TransportError, WorldError
from pdtransfer.handoff.ready_gate import ReadyGate
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import Pool, Progress, Slots, State
from pdtransfer.layout.layout import Layout
from pdtransfer.memory.cuda_ipc import Handle
from pdtransfer.serve.tracing.spans import Timeline

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p)


class FakeRegistrar:
    """Sees host memory `shift` bytes further up; refuses the registration with number `refused`, from 0 on."""

    def __init__(self, *, refused: int = -1, shift: int = 1 << 40) -> None:
        self.refused, self.shift = refused, shift
        self.calls = 0
        self.keeps = False  # refuses to let go
        self.registered: dict[int, int] = {}
        self.log: list[str] = []

    def host_register(self, address: int, byte_count: int) -> int:
        self.calls += 1
        assert mapped(address, byte_count)
        if self.calls - 1 == self.refused:
            raise WorldError("GPU 0: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")
        assert not any(a < address + byte_count and address < a + n for a, n in self.registered.copy().items()), "twice"
        self.registered[address] = byte_count
        self.log.append(f"register {byte_count}")
        return address + self.shift

    def reaches(self, pool: Pool, slots: Slots) -> bool:
        """Whether the rows of these slots of a host pool are registered."""
        # Another thread may register more meanwhile.
        parts = np.array(sorted(self.registered.copy().items()), np.int64)
        rows = np.arange(slots.start, slots.stop) if isinstance(slots, range) else slots
        for index, plane in enumerate(pool.layout.planes):
            first = pool.address - self.shift + pool.layout.address(index, rows.astype(np.int64))
            for byte in (first, first + plane.row_bytes - 1):
                part = np.searchsorted(parts[:, 0], byte, side="right") - 1
                if (part < 0).any() or (byte >= parts[part].sum(axis=1)).any():
                    return False
        return True

    def host_unregister(self, address: int) -> None:
        byte_count = self.registered[address]
        assert mapped(address, byte_count), "unmapped before it was unregistered"
        if self.keeps:
            raise WorldError("GPU 0: cuMemHostUnregister: CUDA_ERROR_ILLEGAL_ADDRESS")
        del self.registered[address]
        self.log.append(f"unregister {byte_count}")


def mapped(address: int, byte_count: int) -> bool:
    """Whether every page of it is mapped into this process."""
    return not _libc.mincore(address, byte_count, bytes(-(-byte_count // mmap.PAGESIZE)))


class FakeLauncher:
    """Launches that copy on the CPU, when they are waited for or drained; `shift` as the registrar's."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.queued: dict[int, tuple[Pool, Pool, Slots, Slots, int, CancelWord]] = {}
        self.drained: dict[int, State] = {}  # and not waited for yet
        self.called = threading.Event()

    def word(self) -> CancelWord:
        if not self.gpu.words:
            return CancelWord()
        return self.gpu.words.pop()

    def reuse(self, word: CancelWord) -> None:
        assert all(launch[-1] is not word for launch in self.queued.values()), "a launch still looks at it"
        word._word.value = 0
        self.gpu.words.append(word)

    def prepare(
        self, place: int, target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, rows: int,
        cancel: CancelWord, *, spare: bool,
    ) -> Callable[[], None]:  # fmt: skip
        assert place not in self.queued, "two launches in one place"
        self.gpu.preparations += 1
        self.gpu.spared.append(spare)

        def queue(number: int = self.gpu.preparations) -> None:
            assert number == self.gpu.preparations, "another was prepared meanwhile"
            assert place not in self.queued, "another is in flight there"
            self.gpu.slots.append(place)
            self.drained.pop(place, None)
            self.queued[place] = target, source, target_slots, source_slots, rows, cancel
            self.gpu.launched.append((len(self.queued), rows))
            self.gpu.launching()

        return queue

    def wait(self, place: int | None, gates: Sequence[ReadyGate], until_ns: int) -> bool:
        while not self.called.is_set() and time.monotonic_ns() < until_ns:
            for gate in gates:
                assert gate.next is not None
                number, event = gate.next
                if event in self.gpu.broken_events:
                    gate.broken = self.gpu.broken_events[event]
                    return False
                if event in self.gpu.fired:
                    gate.fired(number, 1)
                    return False
            if place is not None:
                self.gpu.waiting()
                return True
            self.gpu.asleep.set()
            self.called.wait(0.001)
        self.called.clear()
        return False

    def look(self, gate: ReadyGate) -> None:
        while gate.next is not None and not gate.broken:
            number, event = gate.next
            if event in self.gpu.broken_events:
                gate.broken = self.gpu.broken_events[event]
            elif event in self.gpu.fired:
                gate.fired(number, 1)
            else:
                return

    def wake(self) -> None:
        self.called.set()

    def ended(self, place: int) -> tuple[State, int]:
        state = self.drained.pop(place) if place in self.drained else self._carried(place)
        return state, self.gpu.left_out

    def fetch(self, source: Pool, layout: Layout, slots: Slots, rows: int) -> int:
        self.gpu.fetching()
        self.fetched = np.zeros(layout.end, np.uint8)
        target = Pool(layout=layout, address=self.fetched.ctypes.data)
        kv_copy(target, replace(source, device=None), range(rows), slots, rows)
        return target.address

    def drain(self) -> None:
        self.gpu.draining()
        for place in sorted(self.queued):
            self.drained[place] = self._carried(place)

    def _carried(self, place: int) -> State:
        target, source, ours, theirs, rows, cancel = self.queued.pop(place)
        assert not source.host
        assert target.device == source.device == self.gpu.ordinal
        shift = self.gpu.shift if target.host else 0
        assert not target.host or self.gpu.reaches(target, ours), "rows outside of what is registered"
        there = Pool(layout=target.layout, address=target.address - shift)
        progress = Progress()
        kv_copy(there, replace(source, device=None), ours, theirs, rows, progress=progress, cancel=cancel)
        return progress.state


class FakeExported:
    """Memory of this process, as what another one has exported."""

    def __init__(self, gpu: FakeGpu, address: int, byte_count: int) -> None:
        self.gpu, self.address, self.byte_count, self.keeps = gpu, address, byte_count, False
        self.same_gpu = True

    def close(self) -> None:
        assert self.gpu.is_locked(), "the arena's mapping, and so the lock, went before"
        self.gpu.log.append("close exported")
        if self.keeps:
            raise WorldError("GPU 5: cuIpcCloseMemHandle: CUDA_ERROR_ILLEGAL_ADDRESS")


class FakeGpu(FakeRegistrar):
    """A WriterGpu on the CPU. What is called `...ing` is a test's to replace: it happens in the middle of things."""

    ordinal = 5

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[int, int]] = []  # how many were in flight then, and rows
        self.slots: list[int] = []  # of each launch
        self.words: list[CancelWord] = []
        self.left_out = 0
        self.prepared = self.preparations = 0
        self.spared: list[bool] = []  # of each preparation
        self.fired = set[int]()  # CUDA events
        self.broken_events: dict[int, str] = {}
        self.asleep = threading.Event()  # it waits for gates
        self.spans: Timeline | None = None
        self.exported: dict[bytes, FakeExported] = {}  # by handle
        self.named: Handle | None = None  # its memory, for a process of this writer
        self.is_locked: Callable[[], bool] = lambda: True  # whether this writer's lock on the arena is held
        self.launching: Callable[[], None] = lambda: None
        self.waiting: Callable[[], None] = lambda: None
        self.draining: Callable[[], None] = lambda: None
        self.fetching: Callable[[], None] = lambda: None

    def export(self, address: int, byte_count: int) -> Handle:
        if self.named is None:
            raise WorldError("GPU 5: cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")
        assert mapped(address, byte_count)
        return self.named

    def open(self, handle: bytes) -> FakeExported:
        if handle not in self.exported:
            raise TransportError("exported memory is on a GPU which this process does not see")
        assert self.is_locked(), "it may be written from here on"
        self.log.append("open exported")
        return self.exported[handle]

    def prepare(self) -> None:
        self.prepared += 1

    def launcher(self) -> FakeLauncher:
        return FakeLauncher(self)


class Held:
    """Holds the first launch that is waited for until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(60)

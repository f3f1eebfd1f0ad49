"""A GPU of this process: streams whose work is done late and in any order that events allow, kernels as host code."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pdtransfer.errors import WorldError
from pdtransfer.kernels.arguments import CopyArgument
from pdtransfer.kernels.driver import Calls
from pdtransfer.kernels.gpu import DeviceTables, Gpu, words


class GpuOnHost(Gpu):
    """What the kernels' shells need of a GPU, with addresses of this process. Queued work is done when somebody waits,
    a step of some stream at a time; what is never waited for is done by `finish`."""

    def __init__(self, lib: ctypes.CDLL, seed: int = 0) -> None:
        self.ordinal, self.multiprocessors, self.borders = 0, 4, np.empty(0, np.int64)
        self._lib, self._random = lib, random.Random(seed)
        self._held: dict[int, Any] = {}
        self._queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], object]]]] = {0: deque()}
        self._recorded: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._side_stream = self.stream()
        self.tables = DeviceTables(self, most=2)  # so that they go while others are in use, or may still be read
        self.batches = bool(seed % 2)  # whether its driver has them
        self.copies: list[tuple[int, int, int]] = []  # source, target, bytes of each transfer that was done
        self.extents: list[tuple[int, int]] = []  # address and bytes that a transfer of rows spans, either side
        self.launches = 0
        self.refuses: str | None = None  # the call that fails from now on

    # Streams

    def stream(self) -> int:
        self._queues[len(self._queues)] = deque()
        return len(self._queues) - 1

    def event(self) -> int:
        number = len(self._recorded) + 1
        self._recorded[number] = self._reached[number] = 0
        return number

    def record(self, event: int, stream: int) -> None:
        self._recorded[event] += 1
        self._queue(stream, lambda: self._reached.__setitem__(event, self._reached[event] + 1))

    def follow(self, stream: int, event: int) -> None:
        wanted = self._recorded[event]
        self._queues[stream].append((lambda: self._reached[event] >= wanted, lambda: None))

    def reach(self, event: int) -> None:
        wanted = self._recorded[event]
        while self._reached[event] < wanted:
            self.step()

    def passed(self, event: int) -> bool:
        return self._reached[event] == self._recorded[event]

    def synchronise(self, stream: int) -> None:
        while self._queues[stream]:
            self.step()

    def finish(self) -> None:
        for stream in self._queues:
            self.synchronise(stream)

    def step(self) -> bool:
        """Does one thing that may be done now; whether there was one."""
        ready = [queue for queue in self._queues.values() if queue and queue[0][0]()]
        if not ready:
            assert not any(self._queues.values()), "every stream waits for another"
            return False
        self._random.choice(ready).popleft()[1]()
        return True

    def _queue(self, stream: int, what: Callable[[], object]) -> None:
        self._queues[stream].append((lambda: True, what))

    def enter(self) -> None:
        pass

    # Memory and work

    def allocate(self, byte_count: int, stream: int | None = None) -> int:
        del stream
        memory = np.full(byte_count, 0xA5, np.uint8)
        self._held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int, stream: int | None = None) -> None:
        memory = self._held[address]
        assert stream is not None, "it would wait for the GPU"
        self._queue(stream, lambda: memory.fill(0xFF))

    def clear(self, address: int, byte_count: int) -> None:
        ctypes.memset(address, 0, byte_count)

    def pinned(self, byte_count: int) -> tuple[int, int]:
        address = self.allocate(byte_count)
        ctypes.memset(address, 0, byte_count)
        return address, address

    def upload(self, address: int, content: Any, stream: int) -> None:
        if content.nbytes > 64 << 10:
            self.synchronise(stream)  # as a driver may
        kept = content.copy()
        self._queue(stream, lambda: ctypes.memmove(address, kept.ctypes.data, kept.nbytes))

    def copy(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._refuse("copy")

        def carry() -> None:
            ctypes.memmove(target, source, byte_count)
            self.copies.append((source, target, byte_count))

        self._queue(stream, carry)

    def copy_rows(
        self, target: int, source: int, byte_count: int, *, pitches: tuple[int, int], rows: int, stream: int
    ) -> None:
        assert min(pitches) >= byte_count, "what a driver refuses"
        spans = [pitch * (rows - 1) + byte_count for pitch in pitches]
        self.extents.append((target, spans[0]))
        self.extents.append((source, spans[1]))
        for row in range(rows):
            self.copy(target + row * pitches[0], source + row * pitches[1], byte_count, stream)

    def launch(
        self, kernel: str, arguments: ctypes.Structure, *, blocks: int, threads: Any, stream: int = 0, **how: Any
    ) -> None:
        assert (kernel, how) == ("kv_copy", {})
        self._refuse("launch")
        copied = CopyArgument.from_buffer_copy(arguments)
        self.launches += 1
        self._queue(stream, lambda: self._lib.kv_copy_on_host(ctypes.byref(copied), min(blocks, 2), 64))

    def write(self, address: int, word: int, stream: int) -> None:
        self._queue(stream, lambda: words(address, 1).__setitem__(0, word))

    def _refuse(self, name: str) -> None:
        if self.refuses == name:
            raise WorldError(f"GPU 0: {name}: refused")

    # What C calls

    context = 1

    def function(self, kernel: str) -> int:
        return {"kv_copy": 7}[kernel]

    def status_of(self, number: int) -> str:
        return {1: "refused"}[number]

    def calls(self) -> Calls:
        """The driver's functions, as C sees them."""
        word, number, size = ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t
        shapes = (
            (lambda context: 0 if context == 1 else 1, [word]),
            (self._launched, [word, *[number] * 7, word, ctypes.POINTER(word), word]),
            (lambda *run: self._answer(lambda: self.copy(*run)), [word, word, size, word]),
            (self._batched, [*[ctypes.POINTER(word)] * 3, size, word, word, size, word, word]),
            (lambda event, stream: self._answer(lambda: self.record(event, stream)), [word, word]),
            (lambda stream, event, _: self._answer(lambda: self.follow(stream, event)), [word, word, number]),
            (
                lambda event: self._answer(lambda: self.reach(event)) or (600 if self._random.random() < 0.5 else 0),
                [word],
            ),
            (self._rows, [ctypes.POINTER(word), word]),
        )
        self._callbacks = [ctypes.CFUNCTYPE(ctypes.c_int, *taken)(function) for function, taken in shapes]
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks]
        if not self.batches:
            addresses[3] = 0
        return Calls(*addresses)

    def _answer(self, what: Callable[[], object]) -> int:
        try:
            what()
        except WorldError:
            return 1
        return 0

    def _launched(self, *given: Any) -> int:
        function, blocks, threads, stream, arguments = given[0], given[1], given[4], given[8], given[9]
        assert function == 7
        argument = CopyArgument.from_address(arguments[0])
        return self._answer(lambda: self.launch("kv_copy", argument, blocks=blocks, threads=threads, stream=stream))

    def _rows(self, asked: Any, stream: int) -> int:
        source, pitch_in, target, pitch_out, width, rows = (asked[at] for at in (4, 6, 11, 13, 14, 15))
        assert asked[2] & 0xFFFF_FFFF == asked[9] & 0xFFFF_FFFF == 4, "either kind of memory"
        assert not any(asked[at] for at in (0, 1, 7, 8))
        return self._answer(
            lambda: self.copy_rows(target, source, width, pitches=(pitch_out, pitch_in), rows=rows, stream=stream)
        )

    def _batched(self, targets: Any, sources: Any, sizes: Any, count: int, attributes: int, *rest: int) -> int:
        assert ctypes.c_int.from_address(attributes).value == 1, "in the stream's order"
        assert rest[1] == 1
        runs = list(zip(targets[:count], sources[:count], sizes[:count], strict=True))
        self._random.shuffle(runs)
        return max(self._answer(lambda run=run: self.copy(*run, rest[-1])) for run in runs)

"""Times work of a GPU by replays of a graph: no launch waits for the CPU. And the memory that it is done in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pdtransfer.kernels.gpu import Gpu
from pdtransfer.memory.arena_memory import ArenaMemory


class Seconds(NamedTuple):
    """The median of several replays, the shortest and the longest."""

    median: float
    low: float
    high: float


class Replays:
    """A stream of a GPU, and what it takes there to do some work many times over."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        gpu.enter()
        self.stream = int(gpu.call("cuStreamCreate", 1))
        self._events = [gpu.call("cuEventCreate", 0) for _ in range(2)]

    def seconds(self, work: Callable[[int], object], *, nodes: int, runs: int) -> Seconds:
        """Of one of `nodes` that are queued one after another; `work` queues one to the stream that it is given."""
        return self.in_turn([work], nodes=nodes, runs=runs)[0]

    def in_turn(self, works: Sequence[Callable[[int], object]], *, nodes: int, runs: int) -> list[Seconds]:
        """Of each of several works, whose replays take turns: A B, B A, A B and so on, `runs` of each.

        So each follows itself and the others equally often, and whatever slows the GPU for a while slows all of them.
        """
        replays = [self._captured(work, nodes) for work in works]
        for replay in replays:
            self._once(replay)
        times: list[list[float]] = [[] for _ in works]
        for run in range(runs):
            for index in range(len(works))[:: 1 if run % 2 == 0 else -1]:
                times[index].append(self._once(replays[index]) / nodes)
        for replay in replays:
            self._gpu.call("cuGraphExecDestroy", replay)
        return [Seconds(median(seconds), min(seconds), max(seconds)) for seconds in times]

    def _captured(self, work: Callable[[int], object], nodes: int) -> Any:
        """A graph of `nodes` launches, ready to be replayed."""
        call, driver = self._gpu.call, self._gpu.driver
        self._gpu.enter()
        work(self.stream)  # what is compiled, loaded and uploaded once
        call("cuStreamSynchronize", self.stream)
        call("cuStreamBeginCapture", self.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            for _ in range(nodes):
                work(self.stream)
        except BaseException:
            driver.cuStreamEndCapture(self.stream)  # whatever it reports: the stream is needed for the next work
            raise
        graph = call("cuStreamEndCapture", self.stream)
        replay = call("cuGraphInstantiate", graph, 0)
        call("cuGraphDestroy", graph)
        return replay

    def _once(self, replay: Any) -> float:
        start, end = self._events
        self._gpu.call("cuEventRecord", start, self.stream)
        self._gpu.call("cuGraphLaunch", replay, self.stream)
        self._gpu.call("cuEventRecord", end, self.stream)
        self._gpu.call("cuEventSynchronize", end)
        return float(self._gpu.call("cuEventElapsedTime", start, end)) / 1e3


@contextmanager
def registered(gpu: Gpu, byte_count: int) -> Generator[int]:
    """The address at which the GPU sees an arena of this many bytes, which is backed."""
    arena = ArenaMemory.create(byte_count)
    arena.gpu = gpu
    try:
        arena.prefault()
        assert arena.mapping.registered is not None
        yield arena.mapping.registered.device_address
    finally:
        arena.close()


@contextmanager
def filled(gpu: Gpu, byte_count: int) -> Generator[int]:
    """The address of this many random bytes in the GPU's memory: copies of zeros may be faster."""
    address = gpu.allocate(byte_count)
    try:
        part: Any = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
        for offset in range(0, byte_count, len(part)):
            gpu.upload(address + offset, part[: byte_count - offset], 0)
        gpu.synchronise(0)
        yield address
    finally:
        gpu.free(address)

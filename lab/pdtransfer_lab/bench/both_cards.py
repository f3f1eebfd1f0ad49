"""Two GPUs that push into the host at once, each from a process of its own, beside either of them alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from pdtransfer.errors import PDTransferError, WorldError
from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.kernels.gpu import gpu_at
from pdtransfer.kernels.pools import Pool
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.process.setup import prepare
from pdtransfer.transports.gpu_launcher import WriterGpu
from pdtransfer.transports.gpu_writer import GpuWrite, GpuWriter

from .models import PAGE_SIZE, latent_layout
from .processes import Failure, answer, begun

_SLOTS, _TOKENS, _WRITES = 8_192, 4_096, 64  # 288 MB a write; some 0.35 s in all
_ROUNDS = 3
_AHEAD_S = 0.05  # from the order until both begin
_ANSWER_S = 60.0
_answer = partial(answer, who="a pushing process", within_s=_ANSWER_S)


def measure(ordinals: Sequence[int]) -> tuple[tuple[float, float], tuple[float, float]]:
    """GB/s of each of two GPUs while it pushes alone, and while both do: medians of three rounds, in turn.

    Each is what a writer's thread reaches with 64 writes of 4,096 tokens, 61 planes of 1,152 bytes. They go from pages
    anywhere in a pool in the GPU's memory to one run of slots of a page_first arena. The arena's memory is of the GPU's
    NUMA node.
    """
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for ordinal in ordinals:
            process, ours = begun(_serve, ordinal)
            stack.callback(process.kill)
            stack.callback(ours.close)
            pipes.append(ours)
        for pipe in pipes:
            _answer(pipe)
        alone, together = ([list[float](), list[float]()] for _ in range(2))
        for _ in range(_ROUNDS):
            for index, pipe in enumerate(pipes):
                alone[index] += _push((pipe,))
            for index, rate in enumerate(_push(pipes)):
                together[index].append(rate)
        return (median(alone[0]), median(alone[1])), (median(together[0]), median(together[1]))


def _push(pipes: Sequence[Connection]) -> list[float]:
    start_s = time.monotonic() + _AHEAD_S
    for pipe in pipes:
        pipe.send(start_s)
    return [_answer(pipe) for pipe in pipes]


def _serve(pipe: Connection, ordinal: int) -> None:
    """Pushes from each time on that the pipe brings, until the pipe ends."""
    prepare()
    try:
        asyncio.run(_pushed(pipe, ordinal))
    except PDTransferError as error:
        pipe.send(Failure(str(error)))
    except (EOFError, ConnectionResetError):
        pass


async def _pushed(pipe: Connection, ordinal: int) -> None:
    pushing = _Pushing(ordinal)
    await pushing.rate(0.0)
    pipe.send(0.0)
    while True:
        pipe.send(await pushing.rate(pipe.recv()))


class _Pushing:
    """A pool, an arena and a writer's thread; they last as long as the process."""

    def __init__(self, ordinal: int) -> None:
        gpu = gpu_at(ordinal)
        near = latent_layout("layer_first", slots=_SLOTS, page_size=PAGE_SIZE)
        far = latent_layout("page_first", slots=_TOKENS, page_size=1)
        arena = ArenaMemory.create(far.end)
        if (node := gpu.numa_node) is not None:
            arena.mapping.bind(node)
        arena.gpu = gpu
        arena.prefault()
        assert arena.mapping.registered is not None
        self._arena = arena  # stays mapped
        self._source = Pool(layout=near, address=gpu.allocate(near.end), device=ordinal)
        self._target = Pool(layout=far, address=arena.mapping.registered.device_address, device=ordinal, host=True)
        pages = np.random.default_rng(ordinal).permutation(_SLOTS // PAGE_SIZE)[: _TOKENS // PAGE_SIZE]
        self._slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel().astype(np.int64)
        writer = WriterGpu(ordinal)
        writer.prepare()
        self._left, self._over, self._text = 0, asyncio.Event(), ""
        self._pusher = GpuWriter(writer.launcher)

    async def rate(self, start_s: float) -> float:
        """GB/s from that second on."""
        self._left = _WRITES
        self._over.clear()
        writes = [self._write(number) for number in range(_WRITES)]
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        begin_s = time.monotonic()
        for write in writes:
            self._pusher.add(write)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _ANSWER_S)
        if self._text or self._left:
            raise WorldError(f"a push ended otherwise: {self._text or 'not at all'}")
        return _WRITES * _TOKENS * self._target.layout.row_bytes / (time.monotonic() - begin_s) / 1e9

    def _write(self, number: int) -> GpuWrite:
        order = Write(
            session=1, grant=1, room=1, write=number, component=0, layers=self._target.layout.layer_range,
            source_slots=self._slots, target_slots=np.arange(_TOKENS, dtype=np.int64),
        )  # fmt: skip
        return GpuWrite(order=order, source=self._source, target=self._target, report=self._ended)

    def _ended(self, push: GpuWrite) -> None:
        if push.outcome is not Outcome.LANDED:
            self._text = push.text or push.outcome.name
        self._left -= 1
        if not self._left:
            self._over.set()

"""What `push` reaches by each backend, beside the copy engine with the same bytes, and what a model loses meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import numpy as np

from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.pools import Pool, Progress, State
from pdtransfer.kernels.push import Backend, push
from pdtransfer.layout.layout import Layout, Plane

from .models import PAGE_SIZE, latent_layout
from .replays import filled, registered
from .report import Figures, Line

_RUNS = 5
_SLOTS, _LAYERS, _ROW = 16_384, 61, 1_152
_TURN_BYTES = 4 << 30  # by pushes one after another: 80 ms, of which the first one's planning is little
_CHUNK_BYTES = 256 << 20  # the arena is registered in such chunks
_GIB = 1 << 30

TOKENS = (228, 456, 1_024, 4_096)  # 16, 32, 72 and 288 MB
RUNS = (65_536, 131_072, 262_144, 1 << 20)  # bytes that lie together on both sides
MATMULS = ((8_192, 30), (2_048, 1_500))  # size, and how many in a row
BACKENDS: tuple[Backend, ...] = ("kernel", "ring")

LINES = (
    *(
        Line(
            f"{way} {tokens} tokens by {backend}",
            f"{{{way}_{backend}_{tokens}:.3f}}",
            f"one alone {{{way}_{backend}_{tokens}_alone:.3f}}"
            + ("; aim 0.98" if (way, backend) == ("push", "ring") else ""),
        )
        for way in ("push", "fetch")
        for backend in BACKENDS
        for tokens in TOKENS
    ),
    *(
        Line(f"push runs of {run >> 10} KiB", f"{{direct_{run}:.3f}}", f"direct, 72 MB; kernel {{kernel_{run}:.3f}}")
        for run in RUNS
    ),
    *(
        Line(
            f"matmul {size} beside {backend}",
            f"{{matmul_{size}_{backend}:.3f}}",
            f"of its speed; aim 0.97; the push meanwhile {{matmul_{size}_{backend}_gbs:.1f}} GB/s",
        )
        for size, _ in MATMULS
        for backend in BACKENDS
    ),
)


class _Clock:
    """Times what is queued to two streams in turn, so that one push is planned and begun while another ends."""

    def __init__(self, gpu: Gpu) -> None:
        self._here, self.streams = gpu, [gpu.stream(), gpu.stream()]
        self._start, self._end, self._between = (gpu.call("cuEventCreate", 0) for _ in range(3))

    def seconds(self, work: Callable[[int], object], count: int) -> float:
        """Of one of `count`."""
        gpu, (first, second) = self._here, self.streams
        work(first)
        gpu.synchronise(first)
        times: list[float] = []
        for _ in range(_RUNS):
            gpu.record(self._start, first)
            gpu.follow(second, self._start)
            for turn in range(count):
                work(self.streams[turn % 2])
            gpu.record(self._between, second)
            gpu.follow(first, self._between)
            gpu.record(self._end, first)
            gpu.synchronise(first)
            times.append(float(gpu.call("cuEventElapsedTime", self._start, self._end)) / 1e3 / count)
        return median(times)

    def alone(self, work: Callable[[int], object]) -> float:
        """By the wall clock, from the call to its end."""
        times: list[float] = []
        for _ in range(2 * _RUNS):
            start = time.perf_counter()
            work(self.streams[0])
            self._here.synchronise(self.streams[0])
            times.append(time.perf_counter() - start)
        return median(times)


def measure() -> Figures:
    """Shares of the copy engine's time on GPU 0: pushes in turn on two streams, and one alone by the wall clock.

    Rows are 61 planes of 1,152 bytes. They are at random slots of a layer_first pool in the GPU's memory, and in one
    run of a page_first arena in a registered memfd. `direct` has one plane, at random places on both sides. Matmuls are
    bfloat16 from torch, each share the median of three with and without pushes of 288 MB beside them. WorldError
    without a GPU.
    """
    gpu = gpu_at(0)
    with ExitStack() as stack:
        host, memory = (stack.enter_context(allocated(gpu, 2 * _GIB)) for allocated in (registered, filled))
        clock, figures = _Clock(gpu), Figures()
        names = ("layer_first", "page_first")
        near, far = (
            latent_layout(name, slots=_SLOTS, page_size=PAGE_SIZE if name == "layer_first" else 1, layers=_LAYERS)
            for name in names
        )
        pool, host_pool = (
            Pool(layout=near, address=memory, device=0),
            Pool(layout=far, address=host, device=0, host=True),
        )
        for tokens in TOKENS:
            _in_runs(figures, clock, gpu, pool, host_pool, tokens)
        for run in RUNS:
            _scattered(figures, clock, gpu, memory, host, run)
        for size, count in MATMULS:
            for backend in BACKENDS:
                _beside(figures, pool, host_pool, clock.streams[0], backend, size, count)
        return figures


def _in_runs(figures: Figures, clock: _Clock, gpu: Gpu, pool: Pool, arena: Pool, tokens: int) -> None:
    anywhere = np.random.default_rng(tokens).permutation(_SLOTS)[:tokens]
    byte_count = tokens * _LAYERS * _ROW
    count = max(4, _TURN_BYTES // byte_count)
    for way, target, source in (("push", arena, pool), ("fetch", pool, arena)):
        slots = (range(tokens), anywhere) if way == "push" else (anywhere, range(tokens))
        dma = _dma(gpu, target.address, source.address, byte_count)
        reference = clock.seconds(dma, count), clock.alone(dma)
        for backend in BACKENDS:

            def carry(stream: int, backend: Backend = backend) -> None:
                push(target, source, slots[0], slots[1], tokens, backend=backend, stream=stream)  # noqa: B023

            figures[f"{way}_{backend}_{tokens}"] = reference[0] / clock.seconds(carry, count)
            figures[f"{way}_{backend}_{tokens}_alone"] = reference[1] / clock.alone(carry)


def _scattered(figures: Figures, clock: _Clock, gpu: Gpu, memory: int, host: int, run: int) -> None:
    rows, rng = (72 << 20) // run, np.random.default_rng(run)
    layout = Layout((Plane(0, "latent", "uint8", 0, 1, 0, run, run, run),), 1, _GIB // run)
    target, source = (
        Pool(layout=layout, address=host, device=0, host=True),
        Pool(layout=layout, address=memory, device=0),
    )
    slots = [rng.permutation(_GIB // run)[:rows] for _ in range(2)]
    reference = clock.seconds(_dma(gpu, host, memory, rows * run), 4)
    backends: tuple[Backend, ...] = ("direct", "kernel")
    for backend in backends:

        def carry(stream: int, backend: Backend = backend) -> None:
            push(target, source, slots[0], slots[1], rows, backend=backend, stream=stream)

        figures[f"{backend}_{run}"] = reference / clock.seconds(carry, 4)


def _dma(gpu: Gpu, target: int, source: int, byte_count: int) -> Callable[[int], None]:
    def copy(stream: int) -> None:
        for offset in range(0, byte_count, _CHUNK_BYTES):
            gpu.copy(target + offset, source + offset, min(_CHUNK_BYTES, byte_count - offset), stream)

    return copy


def _beside(figures: Figures, pool: Pool, arena: Pool, stream: int, backend: Backend, size: int, count: int) -> None:
    import torch

    sides = [torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    tokens, progress = TOKENS[-1], Progress(0)
    anywhere = np.random.default_rng(0).permutation(_SLOTS)[:tokens]
    stop, moved = threading.Event(), 0

    def pushing() -> None:
        nonlocal moved
        while not stop.is_set():
            push(arena, pool, range(tokens), anywhere, tokens, backend=backend, progress=progress, stream=stream)
            while progress.state is State.RUNNING:
                time.sleep(1e-4)
            moved += tokens * _LAYERS * _ROW

    def matmuls() -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before, since = moved, time.perf_counter()
        start.record()
        for _ in range(count):
            torch.mm(sides[0], sides[1])
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)), (moved - before) / (time.perf_counter() - since) / 1e9

    matmuls()
    shares: list[float] = []
    rates: list[float] = []
    for _ in range(3):
        alone = matmuls()[0]
        stop.clear()
        thread = threading.Thread(target=pushing)
        thread.start()
        time.sleep(0.02)
        beside, rate = matmuls()
        stop.set()
        thread.join()
        shares.append(alone / beside)
        rates.append(rate)
    figures[f"matmul_{size}_{backend}"] = median(shares)
    figures[f"matmul_{size}_{backend}_gbs"] = median(rates)

"""What the kernels reach on this host's GPU, beside the copy engine with the same bytes in the same run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import GpuArray, Pool
from pdtransfer.layout.layout import Layout, Plane

from .models import PAGE_SIZE, latent_layout
from .replays import Replays, Seconds, filled, registered
from .report import Figures, Line

_SLOTS = 16_384
_RUNS = 7
_NODES_BYTES = 64 << 20  # copied by one graph, or more, so that its own start does not count
_TURN_BYTES = 512 << 20  # gathered before a row comes again: no cache of the host's has it still
_MATMUL = 8_192
_GIB = 1 << 30

PUSHES = ((1, 0.70), (16, 0.75), (64, 0.90), (228, 0.93), (1_024, 0.945), (4_096, 0.945))  # tokens, and the aim
ROWS = ((640, 0.0), (656, 0.0), (584, 0.0), (2_048, 0.945))  # bytes of a row in a push of 72 MB, and the aim
GATHERS = ((656, 2_048, 0.0), (656, 16_384, 0.87), (656, 41_000, 0.87), (1_152, 2_048, 0.65), (1_152, 8_192, 0.92),
           (1_152, 41_000, 0.92))  # fmt: skip

LINES = (
    Line("card", "{card}", "{blocks} blocks a push; shares are of the copy engine's time for the same bytes"),
    *(
        Line(
            f"push {tokens} tokens", f"{{push_{tokens}_share:.3f}}",
            f"{{push_{tokens}_low:.3f}}..{{push_{tokens}_high:.3f}}, {{push_{tokens}_us:.1f}} us; aim {aim}",
        )
        for tokens, aim in PUSHES
    ),
    *(
        Line(f"push rows of {row}", f"{{push_row_{row}_share:.3f}}", f"72 MB; aim {aim or 'within 5 % of 640'}")
        for row, aim in ROWS
    ),
    *(
        Line(
            f"gather {rows} x {row}",
            f"{{gather_{row}_{rows}_share:.3f}}",
            f"{{gather_{row}_{rows}_us:.1f}} us; aim {aim}",
        )
        for row, rows, aim in GATHERS
    ),
    Line("matmul beside a push", "{matmul_share:.3f}", "of its speed alone; aim 0.97"),
)  # fmt: skip


class _Bench(NamedTuple):
    """What every part takes: a GPU, its pool, an arena, and the arena as the GPU sees it."""

    gpu: Gpu
    replays: Replays
    pool: int
    arena: int
    slots: Callable[[int, int], int]


def measure(*, runs: int = _RUNS) -> Figures:
    """Shares on GPU 0: median, least and most of `runs` replays of a graph that copies 64 MiB or more.

    `push` has 61 planes of 1,152-byte rows. They go from random slots of a layer_first pool in the GPU's memory to
    random slots of a page_first arena in a registered memfd. `gather` goes from random rows of 1.5 GiB of the arena to
    consecutive ones in the GPU, one plane, other rows each time. Each share is (time of one contiguous DMA of the same
    bytes, in a graph of as many) / (time of the launch). The matmul is bfloat16, 8,192 cubed, alone and beside pushes.
    WorldError where there is no GPU.
    """
    gpu = gpu_at(0)
    with ExitStack() as stack:
        arena, pool = (stack.enter_context(allocated(gpu, 2 * _GIB)) for allocated in (registered, filled))
        rng = np.random.default_rng(0)

        def slots(count: int, limit: int) -> int:
            address = gpu.allocate(8 * count)
            stack.callback(gpu.free, address)
            gpu.upload(address, rng.permutation(limit)[:count], 0)
            return address

        bench = _Bench(gpu, Replays(gpu), pool, arena, slots)
        figures: Figures = {"card": gpu.architecture, "blocks": 4}
        for tokens, _ in PUSHES:
            _record(figures, f"push_{tokens}", *_push(bench, 1_152, 61, tokens, runs))
        for row, _ in ROWS:
            planes = 64 if row == 2_048 else 61
            _record(figures, f"push_row_{row}", *_push(bench, row, planes, (72 << 20) // (row * planes), runs))
        for row, rows, _ in GATHERS:
            _record(figures, f"gather_{row}_{rows}", *_gather(bench, row, rows, runs))
        figures["matmul_share"] = _matmul_share(bench)
        return figures


def _push(bench: _Bench, row: int, planes: int, tokens: int, runs: int) -> tuple[Seconds, Seconds]:
    source, target = (_layout(name, row, planes) for name in ("layer_first", "page_first"))
    return _timed(
        bench,
        Pool(layout=target, address=bench.arena, device=0, host=True),
        Pool(layout=source, address=bench.pool, device=0),
        GpuArray(bench.slots(tokens, _SLOTS), tokens),
        [GpuArray(bench.slots(tokens, _SLOTS), tokens)],
        tokens,
        runs,
    )


def _gather(bench: _Bench, row: int, rows: int, runs: int) -> tuple[Seconds, Seconds]:
    slot_count = (3 * _GIB // 2) // row
    plane = Plane(0, "latent", "uint8", 0, 1, 0, row, row, row)
    source, target = (Layout((plane,), 1, slots) for slots in (slot_count, rows))
    return _timed(
        bench,
        Pool(layout=target, address=bench.pool, device=0),
        Pool(layout=source, address=bench.arena, device=0, host=True),
        range(rows),
        [GpuArray(bench.slots(rows, slot_count), rows) for _ in range(_TURN_BYTES // (rows * row))],
        rows,
        runs,
    )


def _timed(
    bench: _Bench, target: Pool, source: Pool, target_slots: Any, source_slots: list[Any], rows: int, runs: int
) -> tuple[Seconds, Seconds]:
    byte_count = rows * source.layout.row_bytes
    nodes = max(2, len(source_slots), min(64, _NODES_BYTES // byte_count))
    turns = cycle(source_slots)

    def launch(stream: int) -> None:
        kv_copy(target, source, target_slots, next(turns), rows, stream=stream)

    def dma(stream: int) -> None:
        for offset in range(0, byte_count, 256 << 20):  # the arena is registered in such chunks
            bench.gpu.copy(
                target.address + offset, source.address + offset, min(256 << 20, byte_count - offset), stream
            )

    return bench.replays.seconds(launch, nodes=nodes, runs=runs), bench.replays.seconds(dma, nodes=nodes, runs=runs)


def _record(figures: Figures, name: str, ours: Seconds, dma: Seconds) -> None:
    figures[f"{name}_share"] = dma.median / ours.median
    figures[f"{name}_low"], figures[f"{name}_high"] = dma.median / ours.high, dma.median / ours.low
    figures[f"{name}_us"], figures[f"{name}_dma_us"] = ours.median * 1e6, dma.median * 1e6


def _layout(name: str, row: int, planes: int) -> Layout:
    if row == 1_152:
        return latent_layout(name, slots=_SLOTS, page_size=PAGE_SIZE if name == "layer_first" else 1, layers=planes)
    strides = (row * _SLOTS, row) if name == "layer_first" else (row, row * planes)
    return Layout(
        tuple(
            Plane(index, "latent", "uint8", 0, 1, index * strides[0], strides[1], strides[1], row)
            for index in range(planes)
        ),
        1,
        _SLOTS,
    )


def _matmul_share(bench: _Bench) -> float:
    """Time of matmuls alone to their time beside pushes that last longer than they do."""
    import torch

    sides = [torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    source, target = (_layout(name, 1_152, 61) for name in ("layer_first", "page_first"))
    arena = Pool(layout=target, address=bench.arena, device=0, host=True)
    pool = Pool(layout=source, address=bench.pool, device=0)
    ours, theirs = (GpuArray(bench.slots(_SLOTS, _SLOTS), _SLOTS) for _ in range(2))

    def matmuls(beside: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if beside:
            for _ in range(4):
                kv_copy(arena, pool, ours, theirs, _SLOTS, stream=bench.replays.stream)
        start.record()
        for _ in range(40):
            torch.mm(sides[0], sides[1])
        end.record()
        end.synchronize()
        bench.gpu.synchronise(bench.replays.stream)
        return float(start.elapsed_time(end))

    matmuls(False)
    return float(np.median([matmuls(False) / matmuls(True) for _ in range(5)]))

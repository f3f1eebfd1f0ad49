"""What a decode step asks of a GPU: new rows scattered into their pages, missing tokens swapped in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pdtransfer.hisparse.swap import HotBuffers, SwapPlan, swap_plan
from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.kv_copy import PlannedCopy
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.set_mla import argument_of, launch
from pdtransfer.layout.layout import Layout, Plane

from .replays import Replays, registered
from .report import Figures, Line

_RUNS = 7
_NODES = 96
_SETS_BYTES = 256 << 20  # of rows that are used in turn: beyond the GPU's L2
_SETS_MAX = 16
_SLOTS = 200_000
_GIB = 1 << 30
_TOP, _HOT, _LENGTH = 2_048, 4_096, 20_000
_STEPS = 16  # top-k sets in turn: what a step swaps out has been asked for again by then

SCATTERS = ((1, 0.75), (32, 0.88), (512, 0.92), (2_048, 0.87), (8_192, 0.90), (16_384, 0.96))  # rows, and the aim
SWAPS = ((656, 1, 40), (656, 10, 75), (656, 100, 570), (1_152, 1, 45), (1_152, 10, 105), (1_152, 100, 935))

LINES = (
    *(
        Line(
            f"set_mla {rows}", f"{{set_mla_{rows}_share:.2f}}",
            f"{{set_mla_{rows}_us:.2f}} us, of a copy's {{set_mla_{rows}_copy_us:.2f}}; aim {aim}",
        )
        for rows, aim in SCATTERS
    ),
    *(
        Line(
            f"swap-in {row} B, batch {batch}", f"{{swap_{row}_{batch}_us:.1f}} us",
            f"20 % misses, plan {{swap_{row}_{batch}_plan_us:.1f}} us; aim {aim}",
        )
        for row, batch, aim in SWAPS
    ),
    *(
        Line(
            f"swap-in 656 B, batch {batch}", f"{{swap_few_{batch}_us:.1f}} us",
            f"0.1 % misses, with all of them listed {{swap_few_{batch}_listed_us:.1f}} us; aim 12",
        )
        for batch in (1, 100)
    ),
)  # fmt: skip


def measure(*, runs: int = _RUNS) -> Figures:
    """Medians of `runs` replays of a graph, on GPU 0; WorldError without one.

    `set_mla` is the time of rows of 1,024 + 128 bytes to random slots, as a share of one copy of the same bytes within
    the GPU. Either takes several sets of buffers in turn, more than the L2 holds. `swap` plans one step for each
    request, K 2,048 of 20,000 tokens, hot 4,096. It copies what is missing, rows of one plane, from an arena of 3 GiB
    where each request's tokens lie one after another. Steps differ in a fifth, or in two, of their positions.
    """
    gpu = gpu_at(0)
    replays = Replays(gpu)
    figures: Figures = {}
    for rows, _ in SCATTERS:
        _scatter(figures, gpu, replays, rows, runs)
    with registered(gpu, 3 * _GIB) as arena:
        for row, batch, _ in SWAPS:
            steps = _Swapping(arena, row, batch, misses=_TOP // 5, steps=_STEPS)
            figures[f"swap_{row}_{batch}_us"] = steps.microseconds(replays, runs, copy=True)
            figures[f"swap_{row}_{batch}_plan_us"] = steps.microseconds(replays, runs, copy=False)
        for batch in (1, 100):
            steps = _Swapping(arena, 656, batch, misses=2, steps=1_100)
            figures[f"swap_few_{batch}_us"] = steps.microseconds(replays, runs, copy=True)
            figures[f"swap_few_{batch}_listed_us"] = steps.microseconds(replays, runs, copy=True, bring=False)
    return figures


def _scatter(figures: Figures, gpu: Gpu, replays: Replays, rows: int, runs: int) -> None:
    import torch

    def drawn(count: int, width: int) -> Any:
        return torch.randint(0, 255, (count, width), dtype=torch.uint8, device="cuda")

    sets = max(1, min(_SETS_MAX, _SETS_BYTES // (2_304 * rows)))
    buffers = [drawn(_SLOTS, 1_152) for _ in range(2)]
    given = [(torch.randperm(_SLOTS, device="cuda")[:rows], drawn(rows, 1_024), drawn(rows, 128)) for _ in range(sets)]
    flat = [(drawn(rows, 1_152), drawn(rows, 1_152)) for _ in range(sets)]
    turn = 0

    def scatter(stream: int) -> None:
        nonlocal turn
        turn += 1
        launch(gpu, argument_of(buffers[turn % 2], *given[turn % sets], None), stream)

    def copy(stream: int) -> None:
        nonlocal turn
        turn += 1
        target, source = flat[turn % sets]
        gpu.copy(target.data_ptr(), source.data_ptr(), rows * 1_152, stream)

    ours, beside = (replays.seconds(work, nodes=_NODES, runs=runs) for work in (scatter, copy))
    figures[f"set_mla_{rows}_us"], figures[f"set_mla_{rows}_copy_us"] = ours.median * 1e6, beside.median * 1e6
    figures[f"set_mla_{rows}_share"] = ours.median / beside.median


class _Swapping:
    """Steps of a batch, one after another, each with `misses` positions that the hot buffers do not hold."""

    def __init__(self, arena: int, row: int, batch: int, *, misses: int, steps: int) -> None:
        import torch

        def there(array: ArrayLike) -> Any:
            return torch.tensor(np.asarray(array, np.int32)).cuda()

        rng = np.random.default_rng(batch)
        drawn = there([rng.permutation(_LENGTH) for _ in range(batch)])
        common, fresh = drawn[:, : _TOP - misses], drawn[:, _TOP - misses :]
        self._positions = [
            torch.cat((common, fresh[:, index * misses : (index + 1) * misses]), 1).contiguous()
            for index in range(steps)
        ]
        self._hot = HotBuffers(
            held=there(np.full((batch, _HOT), -1)),
            order=there(np.tile(np.arange(_HOT), (batch, 1))),
            hot_slots=there(np.arange(batch * _HOT).reshape(batch, _HOT)),
            host_slots=there(np.arange(batch * _LENGTH).reshape(batch, _LENGTH)),
        )
        lists = [there(np.zeros(batch * _TOP)) for _ in range(3)]
        self._plan = SwapPlan(
            slots=lists[0].view(batch, _TOP), sources=lists[1], targets=lists[2], counts=there(np.zeros(5))
        )
        self._lengths, self._rows = there(np.full(batch, _LENGTH)), there(np.arange(batch))
        self._device = torch.empty(batch * _HOT, row, dtype=torch.uint8, device="cuda")
        plane = Plane(0, "latent", "uint8", 0, 1, 0, row, row, row)
        self._source = Pool(layout=Layout((plane,), 1, 3 * _GIB // row), address=arena, device=0, host=True)
        self._target = Pool(layout=Layout((plane,), 1, batch * _HOT), address=self._device.data_ptr(), device=0)
        listed = self._plan.targets, self._plan.sources
        self._copy = PlannedCopy(self._target, self._source, *listed, counts=self._plan.counts)
        self._turn = 0

    def microseconds(self, replays: Replays, runs: int, *, copy: bool, bring: bool = True) -> float:
        """Of one step, plan and copy, or the plan alone; without `bring` the copy carries everything."""

        def step(stream: int) -> None:
            positions = self._positions[self._turn % len(self._positions)]
            self._turn += 1
            swap_plan(
                self._hot, positions, self._lengths, self._rows, self._plan,
                bring=self._copy if copy and bring else None, stream=stream,
            )  # fmt: skip
            if copy:
                self._copy.queue(positions.numel(), stream=stream)

        self._turn = len(self._positions) - 1  # the step that warms up stands before the first of the graph
        return replays.seconds(step, nodes=len(self._positions), runs=runs).median * 1e6

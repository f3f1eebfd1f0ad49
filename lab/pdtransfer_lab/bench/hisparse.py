"""What steps cost whose KV lies in host memory, the hot tokens on the device, and how many requests that carries.

On a host with a GPU the device is GPU 0, and host memory is an arena that is registered with it. Elsewhere the device
is other memory of this process.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pdtransfer.hisparse.coordinator import Capacity, Coordinator
from pdtransfer.hisparse.hot_pool import HotPool
from pdtransfer.kernels.driver import count
from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.pools import Pool
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, host_layout
from pdtransfer.memory.arena_memory import ArenaMemory

from .report import Figures, Line

ROW_BYTES = 656  # DeepSeek V3.2's: 512 of fp8, four scales, 64 of bfloat16
INDEX_BYTES = 132  # its indexer's key and scale, which stay on the device
_HEADS = 16  # of a query, in the plain attention that a step is measured with
_CHUNK_BYTES = 256 << 20  # the arena is registered in such chunks, and no transfer may cross two
_PREFAULT_BYTES = 64 << 20
_ADMISSIONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a batch: requests of this many tokens each, in layers of which `share` follow one plan."""

    requests: int
    tokens: int
    layers: int
    top: int
    hot: int
    share: int = 1
    layout: str = "layer_first"  # of the host memory
    steps: int = 20

    @property
    def row_bytes(self) -> int:
        return self.layers * ROW_BYTES

    @property
    def groups(self) -> list[range]:
        return [range(offset, min(offset + self.share, self.layers)) for offset in range(0, self.layers, self.share)]


RATES = (0.001, 0.05, 0.20)  # of a step's positions that the buffer lacks
ON_CPU = Size(requests=4, tokens=4_096, layers=4, top=256, hot=512, steps=10)
ON_CARD = Size(requests=64, tokens=32_768, layers=61, top=2_048, hot=4_096)


def _name(rate: float) -> str:
    return f"miss_{round(rate * 1_000)}"


LINES = (
    Line("batch", "{requests} x {tokens:,} tokens", "{layers} layers of 656 B, {plans} plans a step; {where}"),
    Line("device memory", "{device_mib:,.0f} MiB", "tables {table_mib:.1f} MiB; top-k {top}, buffer {hot}"),
    Line("requests in it", "{requests}", "all tokens resident: {resident_requests:.1f}, so {carried:.1f} times; aim 5"),
    Line("the same, with an index", "{carried_with_index:.1f} times", "132 B a token and plan, resident in both"),
    Line("admission", "{admit_us:.1f} us", "until the device has it {admit_done_us:.1f} us; aim 100"),
    Line("attention, all resident", "{resident_us:,.0f} us", "a step of all layers, nothing else"),
    *(
        Line(
            f"step, {100 * rate:g} % misses",
            f"{{{_name(rate)}_step_us:,.0f}} us",
            f"plan {{{_name(rate)}_plan_us:,.0f}}, copy {{{_name(rate)}_copy_us:,.0f}}, attention "
            f"{{{_name(rate)}_attention_us:,.0f}}; hits {{{_name(rate)}_hit_rate:.4f}}, "
            f"{{{_name(rate)}_misses:,.0f}} misses, {{{_name(rate)}_bytes:,.0f}} B, "
            f"by one copy {{{_name(rate)}_dma_us:,.0f}} us",
        )
        for rate in RATES
    ),
)  # fmt: skip


def measure(size: Size | None = None) -> Figures:
    """Medians of `steps` steps for each miss rate. A part of a step's positions is the same each time, the rest was not
    asked for since it was last replaced. Each plan of a step asks for positions and has buffers of its own.

    `plan` and `copy` are HotPool's halves of a swap-in, for all layers, `attention` is a plain one over picked rows,
    `backup` the newest token's slot and its copy. On a GPU each step is one replay of a graph, its launch included.
    Three graphs are timed: plans alone, plans and copies, and all of it. A part is the difference of two (attention is
    with backup there). `dma` is the time of one contiguous copy of the missed bytes. `admit` is
    Coordinator.admit_direct and HotPool.start of a request whose tokens are all in host memory, none on the device.
    `carried` divides what requests take with every token resident by what they take here, tables included.
    """
    on_card = count() > 0
    size = size or (ON_CARD if on_card else ON_CPU)
    with ExitStack() as stack:
        batch = HotBatch(size, gpu_at(0) if on_card else None, stack)
        figures = batch.sizes() | batch.admission()
        batch.fill()
        figures["resident_us"] = 1e6 * batch.resident_seconds()
        for rate in RATES:
            figures |= {f"{_name(rate)}_{name}": value for name, value in batch.steps(rate).items()}
        return figures


def _silent(_: str) -> None:
    pass


def _nothing() -> None:
    pass


class HotBatch:
    """A batch in host memory, its hot pool, and clocks."""

    def __init__(self, size: Size, gpu: Gpu | None, stack: ExitStack) -> None:
        import torch

        self.size, self._gpu = size, gpu
        self._where = torch.device("cpu") if gpu is None else torch.device("cuda", 0)
        if gpu is None:
            torch.set_num_threads(1)  # several wait for one another where others are busy
        self._torch = torch
        self._dtype = torch.float32 if gpu is None else torch.bfloat16
        self._width = ROW_BYTES // self._dtype.itemsize
        slots = size.requests * size.tokens
        layout = _layout(size.layout, size.layers, slots)
        self._arena = ArenaMemory.create(layout.end, huge_pages="never")
        stack.callback(self._arena.close)
        address, self._arena_figures = _backed(self._arena, gpu)
        host = Pool(layout=layout, address=address, device=None if gpu is None else 0, host=gpu is not None)
        self._buffer_layout = _layout("layer_first", size.layers, size.requests * (size.hot + 1))
        self._buffer = torch.zeros(self._buffer_layout.end, dtype=torch.uint8, device=self._where)
        self.pool = HotPool(
            host,
            Pool(layout=self._buffer_layout, address=self._buffer.data_ptr(), device=host.device),
            groups=size.groups, rows=size.requests, hot=size.hot, top=size.top, tokens_max=size.tokens,
        )  # fmt: skip
        stack.callback(self.pool.close)
        rng = np.random.default_rng(0)
        drawn: Any = np.stack([rng.permutation(size.tokens - 1) for _ in range(size.requests)]).astype(np.int32)
        self._drawn = torch.as_tensor(drawn).to(self._where)
        # Each plan asks for other positions, as an engine's do: where all layers ask for the same ones, and lie a large
        # power of two of bytes apart, they contend for the same few places of the units that translate addresses.
        shifts = rng.integers(0, size.tokens - 1, (len(size.groups), size.requests, 1), dtype=np.int32)
        self._shifts = torch.as_tensor(shifts).to(self._where)
        self._positions = self._of_each_plan(self._drawn[:, : size.top])
        self._lengths = torch.full((size.requests,), size.tokens - 1, dtype=torch.int32, device=self._where)
        self._rows = torch.arange(size.requests, dtype=torch.int32, device=self._where)
        self._queries = torch.randn(size.requests, _HEADS, self._width, device=self._where, dtype=self._dtype)
        self._resident: Any = torch.zeros(slots, self._width, dtype=self._dtype, device=self._where)
        self._resident_slots = self._positions[0] + self._rows[:, None] * size.tokens
        self._turn = 0

    def sizes(self) -> Figures:
        """What requests take of the device's memory, and how many more that makes."""
        size = self.size
        device_bytes = self._buffer_layout.end + self.pool.table_bytes
        resident_bytes = size.tokens * size.row_bytes
        index_bytes = size.tokens * INDEX_BYTES * len(size.groups)
        return {
            "where": "the CPU" if self._gpu is None else self._gpu.architecture,
            "requests": size.requests, "tokens": size.tokens, "layers": size.layers, "plans": len(size.groups),
            "top": size.top, "hot": size.hot, "host_layout": size.layout,
            "host_gib": size.requests * resident_bytes / (1 << 30), **self._arena_figures,
            "device_mib": device_bytes / (1 << 20), "table_mib": self.pool.table_bytes / (1 << 20),
            "resident_requests": device_bytes / resident_bytes,
            "carried": size.requests * resident_bytes / device_bytes,
            "carried_with_index": (resident_bytes + index_bytes) / (device_bytes / size.requests + index_bytes),
        }  # fmt: skip

    def admission(self) -> Figures:
        """Of one request after another, in every row; all of them stay."""
        size = self.size
        total = (size.requests + _ADMISSIONS) * size.tokens
        coordinator = Coordinator(
            Capacity(
                rows=size.requests, logical_tokens=total, device_slots=size.requests * (size.hot + 1), hot=size.hot,
                top_k=size.top,
            )
        )  # fmt: skip
        calls: list[float] = []
        done: list[float] = []
        rows: list[int] = []
        for request in range(size.requests + _ADMISSIONS):
            first = request % size.requests * size.tokens
            host_slots = np.arange(first, first + size.tokens)
            coordinator.alloc_logical_only(request, tokens=size.tokens - 1, growth=1)
            if request >= size.requests:
                self.pool.stop(rows[request - size.requests])
                coordinator.finish(request - size.requests, after=self.pool.fence())
                self._wait()
                coordinator.collect()
            start = time.perf_counter()
            placed = coordinator.admit_direct(request, host_slots)
            assert placed is not None
            rows.append(placed.row)
            self.pool.start(placed.row, host_slots, placed.tokens, placed.device_slots)
            calls.append(time.perf_counter() - start)
            self._wait()
            done.append(time.perf_counter() - start)
        calls, done = calls[-_ADMISSIONS:], done[-_ADMISSIONS:]
        return {
            "admit_us": 1e6 * median(calls), "admit_max_us": 1e6 * max(calls),
            "admit_done_us": 1e6 * median(done), "admit_done_max_us": 1e6 * max(done),
        }  # fmt: skip

    def fill(self) -> None:
        """A first step, of which everything is missing, and whose rows are all looked at: each begins and ends with its
        layer and its slot."""
        size, slots = self.size, self.size.requests * self.size.tokens
        for layer, plane in enumerate(self.pool.host_pool.layout.planes):
            _mark(self._arena, plane, slots, layer)
        for group, layers in enumerate(size.groups):
            wanted = self._rows[:, None] * size.tokens + self._positions[group]
            slots_on_device = self.pool.swap_in(group, self._positions[group], self._lengths, self._rows)
            device_slots = self._torch.as_tensor(slots_on_device).long()
            for layer in layers:
                words = self._plane(layer).view(self._torch.int64)[device_slots.view(-1)].view(*device_slots.shape, -1)
                assert bool((words[:, :, 0] == wanted + layer * slots).all()), layer
                assert bool((words[:, :, -1] == ~(wanted + layer * slots)).all()), layer
        misses = self.pool.counters().misses
        assert misses == size.requests * size.top * len(size.groups), misses

    def resident_seconds(self) -> float:
        """Of every layer's attention over as many picked rows, of one layer that has all of them."""

        def attend() -> None:
            for _ in range(self.size.layers):
                self._attend(self._resident, self._resident_slots)

        return self._seconds(attend, prepare=_nothing)

    def steps(self, rate: float) -> Figures:
        """Of steps that each lack this share of their positions."""
        size = self.size
        misses = max(1, round(rate * size.top))
        common = size.top - misses
        turns = (self._drawn.shape[1] - common) // misses

        def ask() -> None:
            """The same ones, and some in turn of all others; they ascend, as an indexer's picks do."""
            first = common + self._turn % turns * misses
            picked = self._torch.cat((self._drawn[:, :common], self._drawn[:, first : first + misses]), 1)
            self._positions.copy_(self._of_each_plan(picked))
            self._turn += 1

        for _ in range(3):  # until nothing is held but what this rate's steps have asked for
            ask()
            self._swap()
        before = self.pool.counters()
        figures = self._split(ask) if self._gpu is None else {}
        swap_us = 0.0 if self._gpu is None else 1e6 * self._seconds(self._swap, prepare=ask)
        after = self.pool.counters()
        if self._gpu is not None:
            figures |= self._split_on_card(ask, swap_us)
        missed, asked = after.misses - before.misses, after.hits - before.hits + after.misses - before.misses
        ran = asked / (size.requests * size.top * len(size.groups))
        byte_count = round((after.swapped_bytes - before.swapped_bytes) / ran)
        return figures | {
            "misses": missed / ran, "bytes": byte_count, "hit_rate": 1 - missed / asked,
            "dma_us": 1e6 * self._copied(byte_count),
        }  # fmt: skip

    def _of_each_plan(self, picked: Any) -> Any:
        """int32 (plans, requests, top): the positions, each plan's moved along by as much as it draws, ascending."""
        return ((picked + self._shifts) % (self.size.tokens - 1)).sort(2).values

    def _split(self, ask: Callable[[], None]) -> Figures:
        """On the CPU: each part by the clock."""
        parts: dict[str, list[float]] = {name: [] for name in ("plan", "copy", "attention", "backup", "step")}
        for _ in range(self.size.steps):
            ask()
            taken = dict.fromkeys(parts, 0.0)
            last = start = time.perf_counter()

            def tick(name: str, taken: dict[str, float] = taken) -> None:
                nonlocal last
                now = time.perf_counter()
                taken[name], last = taken[name] + now - last, now

            self._whole(tick)
            taken["step"] = time.perf_counter() - start
            for name, seconds in taken.items():
                parts[name].append(seconds)
        return {f"{name}_us": 1e6 * median(times) for name, times in parts.items()}

    def _split_on_card(self, ask: Callable[[], None], swap_us: float) -> Figures:
        whole = 1e6 * self._seconds(self._whole, prepare=ask)
        backup = 1e6 * self._seconds(self._back_up, prepare=ask)
        plan = 1e6 * self._seconds(self._plan, prepare=ask)  # last: it marks tokens as held that were not copied
        return {
            "plan_us": plan, "copy_us": swap_us - plan, "attention_us": whole - swap_us, "backup_us": backup,
            "swap_us": swap_us, "step_us": whole,
        }  # fmt: skip

    def _plan(self) -> None:
        for group in range(len(self.size.groups)):
            self.pool.plan(group, self._positions[group], self._lengths, self._rows)

    def _swap(self) -> None:
        for group in range(len(self.size.groups)):
            self.pool.swap_in(group, self._positions[group], self._lengths, self._rows)

    def _whole(self, tick: Callable[[str], None] = _silent) -> None:
        for group, layers in enumerate(self.size.groups):
            slots = self._torch.as_tensor(self.pool.plan(group, self._positions[group], self._lengths, self._rows))
            tick("plan")
            self.pool.bring(group)
            tick("copy")
            for layer in layers:
                self._attend(self._plane(layer), slots)
            tick("attention")
        self._back_up()
        tick("backup")

    def _back_up(self) -> None:
        self.pool.newest(self._rows, self._lengths)
        self.pool.store(self._rows, self._lengths)

    def _plane(self, layer: int) -> Any:
        """(slots, elements) of the buffers: how many bytes there are is what counts here."""
        base = self._buffer_layout.planes[layer].base
        rows = self._buffer[base : base + self._buffer_layout.slots * ROW_BYTES]
        return rows.view(self._dtype).view(-1, self._width)

    def _attend(self, rows: Any, slots: Any) -> None:
        torch, size = self._torch, self.size
        picked = rows.index_select(0, slots.view(-1)).view(size.requests, size.top, self._width)
        weights = torch.softmax(torch.bmm(self._queries, picked.transpose(1, 2)), 2)
        torch.bmm(weights, picked)

    def _seconds(self, work: Callable[[], None], *, prepare: Callable[[], None]) -> float:
        """The median of the steps'; on a GPU of a graph's replays, after one that is not counted."""
        if self._gpu is None:
            return median(_timed(prepare, work) for _ in range(self.size.steps))
        torch = self._torch
        prepare()
        work()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self.size.steps)]
        for turn in range(-1, self.size.steps):
            prepare()
            if turn >= 0:
                marks[2 * turn].record()
            graph.replay()
            if turn >= 0:
                marks[2 * turn + 1].record()
        torch.cuda.synchronize()
        times = [marks[2 * index].elapsed_time(marks[2 * index + 1]) / 1e3 for index in range(self.size.steps)]
        return float(median(times))

    def _copied(self, byte_count: int) -> float:
        """This many bytes from the start of the host memory, by the copy engine, or by the CPU."""
        host, target = self.pool.host_pool.address, self._buffer
        byte_count = min(byte_count, target.numel(), self.pool.host_pool.layout.end)
        if self._gpu is None:
            return median(
                _timed(_nothing, lambda: ctypes.memmove(target.data_ptr(), host, byte_count)) for _ in range(5)
            )
        gpu, torch, times = self._gpu, self._torch, list[float]()
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for offset in range(0, byte_count, _CHUNK_BYTES):
                part = min(_CHUNK_BYTES, byte_count - offset)
                gpu.copy(target.data_ptr() + offset, host + offset, part, torch.cuda.current_stream().cuda_stream)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return median(times[1:])

    def _wait(self) -> None:
        if self._gpu is not None:
            self._torch.cuda.synchronize()


def _layout(name: str, layers: int, slots: int) -> Layout:
    assert name in HOST_LAYOUTS
    return host_layout(
        name, kinds=("latent",), layers=layers, heads=1, head_bytes=ROW_BYTES, dtype="uint8", slots=slots, page_size=1
    )


def _mark(arena: ArenaMemory, plane: Plane, slots: int, layer: int) -> None:
    numbers = np.arange(layer * slots, (layer + 1) * slots)
    bytes_ = arena.mapping.array[plane.base :]
    for offset, values in ((0, numbers), (ROW_BYTES - 8, ~numbers)):
        words: Any = as_strided(bytes_[offset : offset + 8].view(np.int64), (slots,), (plane.page_stride,))
        words[:] = values


def _backed(arena: ArenaMemory, gpu: Gpu | None) -> tuple[int, Figures]:
    """Has several threads back it with memory; where the device sees it, and what that took."""
    start = time.perf_counter()
    threads = min(16, len(os.sched_getaffinity(0)))
    part = -(-arena.byte_count // threads // _PREFAULT_BYTES) * _PREFAULT_BYTES
    ends = [min((index + 1) * part, arena.byte_count) for index in range(threads)]
    workers = [
        threading.Thread(target=arena.mapping.prefault, kwargs={"first": min(index * part, end), "end": end})
        for index, end in enumerate(ends)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    backed = time.perf_counter()
    gib, address = arena.byte_count / (1 << 30), arena.mapping.address
    if gpu is not None:
        arena.mapping.register(gpu, arena.byte_count)
        assert arena.mapping.registered is not None
        address = arena.mapping.registered.device_address
    registered = time.perf_counter()
    return address, {
        "prefault_ms_per_gib": 1e3 * (backed - start) / gib,
        "register_ms_per_gib": 1e3 * (registered - backed) / gib,
    }


def _timed(prepare: Callable[[], object], work: Callable[[], object]) -> float:
    prepare()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

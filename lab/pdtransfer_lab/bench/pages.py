"""Pages of 4 KiB against what `auto` finds: what backing, entering and registering an arena costs, and copies in it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from pdtransfer import kernels
from pdtransfer.kernels.driver import count
from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.registered import RegisteredMemory
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import plan
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import HugePages, Mapping, allocate, map_received

from .models import PAGE_SIZE, latent_layout
from .replays import Replays
from .report import Figures, Line

KINDS: dict[str, HugePages] = {"small": "never", "auto": "auto"}
_GATHER_ROW, _GATHER_ROWS, _GATHERS = 656, 16_384, 48
_DMA_BYTES = 256 << 20  # what is registered at a time: no copy may cross two
_TOKEN_BYTES = 61 * 1_152
_REPEATS = 7

_ON_CPU = (
    Line("pages", "{small_pages} | {auto_pages}", "an arena of {gib:g} GiB each, made `never` | `auto`"),
    Line("back it, one thread", "{small_back_ms:.0f} | {auto_back_ms:.0f} ms a GiB"),
    Line("enter it, as a writer does", "{small_enter_ms:.0f} | {auto_enter_ms:.0f} ms a GiB"),
    Line("one memcpy into it", "{small_memcpy_gb_s:.1f} | {auto_memcpy_gb_s:.1f} GB/s"),
    Line("rows anywhere into it", "{small_scatter_gb_s:.1f} | {auto_scatter_gb_s:.1f} GB/s", "61 x 1,152 B a token"),
    Line("rows anywhere out of it", "{small_collect_gb_s:.1f} | {auto_collect_gb_s:.1f} GB/s"),
)
_ON_CARD = (
    Line("register; unregister", "{small_register_ms:.0f}; {small_unregister_ms:.0f} | "
         "{auto_register_ms:.0f}; {auto_unregister_ms:.0f} ms a GiB"),
    Line("DMA to it; from it", "{small_to_gb_s:.1f}; {small_from_gb_s:.1f} | {auto_to_gb_s:.1f}; {auto_from_gb_s:.1f} "
         "GB/s"),
    Line("gather of rows anywhere", "{small_gather_gb_s:.1f} | {auto_gather_gb_s:.1f} GB/s", "16,384 of 656 B"),
    Line("push of 4,096 tokens", "{small_push_gb_s:.1f} | {auto_push_gb_s:.1f} GB/s", "to slots anywhere"),
)  # fmt: skip


def lines(figures: Figures) -> tuple[Line, ...]:
    """Lines for these figures."""
    return _ON_CPU + (_ON_CARD if "small_register_ms" in figures else ())


def measure(*, gib: float = 1.0, repeats: int = _REPEATS) -> Figures:
    """Two arenas of `gib` GiB, both backed, in turn: medians of `repeats`, but for what can be done only once.

    `pages` is the size that the kernel reports. `enter` is a second mapping's prefault, in this process;
    `memcpy` is of an eighth of the arena. Rows anywhere are tokens of 61 planes, page_first in the arena, one by one
    to and from a layer_first pool on one thread. On GPU 0, if there is one: registering in chunks of 256 MiB, one DMA
    of such a chunk, and kernels from and to all of the arena; there gathers take other rows each time.
    """
    byte_count = int(gib * (1 << 30))
    figures: Figures = {"gib": gib}
    gpu = gpu_at(0) if count() else None
    with ExitStack() as stack:
        arenas: dict[str, ArenaMemory] = {}
        for name, pages in KINDS.items():
            arena = arenas[name] = ArenaMemory.create(byte_count, huge_pages=pages)
            stack.callback(arena.close)
            start = perf_counter()
            arena.prefault()
            figures[f"{name}_back_ms"] = 1e3 * (perf_counter() - start) / gib
            figures[f"{name}_enter_ms"] = 1e3 * _entered(arena) / gib
            figures[f"{name}_pages"] = "2 MiB, set aside" if arena.huge else _seen(arena.mapping)
        tokens = _tokens(byte_count)
        pool = allocate(max(2 * tokens * _TOKEN_BYTES, byte_count // 8))
        stack.callback(pool.close)
        pool.array[:] = 7
        for copy, (moved, works) in _copies(arenas, pool, tokens, byte_count).items():
            taken = _in_turn(works, repeats)
            figures |= {f"{name}_{copy}_gb_s": moved / seconds / 1e9 for name, seconds in taken.items()}
        if gpu is not None:
            for name, arena in arenas.items():
                figures |= {f"{name}_{figure}": value for figure, value in _on_card(gpu, arena, gib, repeats).items()}
    return figures


def _in_turn(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each, the median; what each touches for the first time is not counted."""
    for work in works.values():
        work()
    times = [{name: _seconds(work) for name, work in works.items()} for _ in range(repeats)]
    return {name: median(seconds[name] for seconds in times) for name in works}


def _copies(
    arenas: dict[str, ArenaMemory], pool: Mapping, tokens: int, byte_count: int
) -> dict[str, tuple[int, dict[str, Callable[[], object]]]]:
    """By name: how many bytes each moves, and how, for each arena."""
    rng = np.random.default_rng(0)
    slots = byte_count // _TOKEN_BYTES
    arena_layout = latent_layout("page_first", slots=slots, page_size=1)
    pool_layout = latent_layout("layer_first", slots=2 * tokens, page_size=PAGE_SIZE)
    ours, theirs = rng.permutation(2 * tokens)[:tokens], rng.permutation(slots)[:tokens]
    into, out = (
        plan(pair(pool_layout, arena_layout).fused(), ours, theirs),
        plan(pair(arena_layout, pool_layout).fused(), theirs, ours),
    )
    memcpy, eighth = ctypes.CDLL(None).memcpy, byte_count // 8
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    addresses = {name: arena.mapping.address for name, arena in arenas.items()}
    return {
        "memcpy": (eighth, {n: lambda a=a: memcpy(a, pool.address, eighth) for n, a in addresses.items()}),
        "scatter": (into.bytes, {n: lambda a=a: kernels.copy(into, pool.address, a) for n, a in addresses.items()}),
        "collect": (out.bytes, {n: lambda a=a: kernels.copy(out, a, pool.address) for n, a in addresses.items()}),
    }


def _entered(arena: ArenaMemory) -> float:
    """Seconds that a writer needs to enter what its owner has backed in its own page table."""
    mapping = map_received(arena.fd, arena.byte_count)
    start = perf_counter()
    mapping.prefault()
    taken = perf_counter() - start
    mapping.close()
    return taken


def _seen(mapping: Mapping) -> str:
    """What the kernel has put behind most of it."""
    maps = Path("/proc/self/smaps").read_text()
    mapped = re.search(rf"^{mapping.address:x}-.*?^ShmemPmdMapped: +(\d+) kB", maps, re.MULTILINE | re.DOTALL)
    huge = mapped is not None and (int(mapped[1]) << 11) > mapping.byte_count
    return "2 MiB, transparent" if huge else "4 KiB"


def _on_card(gpu: Gpu, arena: ArenaMemory, gib: float, repeats: int) -> Figures:
    start = perf_counter()
    registered = RegisteredMemory(gpu, arena.mapping.address, arena.byte_count)
    registered.grow(arena.byte_count)
    figures: Figures = {"register_ms": 1e3 * (perf_counter() - start) / gib}
    replays, address = Replays(gpu), registered.device_address
    tokens = _tokens(arena.byte_count)
    pool = gpu.allocate(max(2 * tokens * _TOKEN_BYTES, _DMA_BYTES))
    moved = min(_DMA_BYTES, arena.byte_count)

    def rate(byte_count: int, work: Callable[[int], object], nodes: int) -> float:
        return byte_count / replays.seconds(work, nodes=nodes, runs=repeats).median / 1e9

    try:
        figures["to_gb_s"] = rate(moved, lambda stream: gpu.copy(address, pool, moved, stream), 4)
        figures["from_gb_s"] = rate(moved, lambda stream: gpu.copy(pool, address, moved, stream), 4)
        figures["gather_gb_s"] = rate(*_gathers(address, arena.byte_count, pool), _GATHERS)
        figures["push_gb_s"] = rate(*_pushes(address, arena.byte_count, pool, tokens), 4)
    finally:
        gpu.free(pool)
    start = perf_counter()
    registered.close()
    return figures | {"unregister_ms": 1e3 * (perf_counter() - start) / gib}


def _gathers(address: int, byte_count: int, pool: int) -> tuple[int, Callable[[int], object]]:
    rng, plane = np.random.default_rng(0), Plane(0, "latent", "uint8", 0, 1, 0, _GATHER_ROW, _GATHER_ROW, _GATHER_ROW)
    slot_count = byte_count // _GATHER_ROW
    rows = min(_GATHER_ROWS, slot_count)
    source = Pool(layout=Layout((plane,), 1, slot_count), address=address, device=0, host=True)
    target = Pool(layout=Layout((plane,), 1, rows), address=pool, device=0)
    slots = [_there(rng.integers(0, slot_count, rows)) for _ in range(_GATHERS)]
    turn = iter(slots * 2)  # once before the graph, and once in it

    def gather(stream: int) -> None:
        kv_copy(target, source, range(rows), next(turn), rows, stream=stream)

    return rows * _GATHER_ROW, gather


def _pushes(address: int, byte_count: int, pool: int, tokens: int) -> tuple[int, Callable[[int], object]]:
    rng, slots = np.random.default_rng(0), byte_count // _TOKEN_BYTES
    arena_layout, ours = (
        latent_layout("page_first", slots=slots, page_size=1),
        latent_layout("layer_first", slots=2 * tokens, page_size=PAGE_SIZE),
    )
    target = Pool(layout=arena_layout, address=address, device=0, host=True)
    source = Pool(layout=ours, address=pool, device=0)
    to, of = _there(rng.permutation(slots)[:tokens]), _there(rng.permutation(2 * tokens)[:tokens])

    def push(stream: int) -> None:
        kv_copy(target, source, to, of, tokens, stream=stream)

    return tokens * _TOKEN_BYTES, push


def _tokens(byte_count: int) -> int:
    """What is copied at once, whole pages."""
    return min(4_096, byte_count // _TOKEN_BYTES // PAGE_SIZE * PAGE_SIZE)


def _there(slots: Int64s) -> Any:
    import torch

    return torch.as_tensor(slots).to("cuda:0")


def _seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start

"""How fast plans are copied on the CPU, each beside one memcpy of the same bytes in the same run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from pdtransfer import kernels
from pdtransfer.kernels import NativeCopy
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import expand_pages
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import Plan, plan
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import Mapping, allocate

from .models import PAGE_SIZE, latent_layout
from .report import Figures, Line

_NUMPY = NativeCopy(path=None, text="numpy")

_CASES = (
    ("pages_layer_first_to_layer_first", "pages to pages, layer_first to layer_first"),
    ("pages_layer_first_to_page_first", "pages to pages, layer_first to page_first"),
    ("pages_page_first_to_layer_first", "pages to pages, page_first to layer_first"),
    ("extent_layer_first_to_page_first", "pages to one extent, layer_first to page_first"),
    ("scattered_layer_first_to_layer_first", "rows anywhere, layer_first to layer_first"),
    ("scattered_layer_first_to_page_first", "rows anywhere, layer_first to page_first"),
)

LINES = (
    Line("one memcpy", "{memcpy_gb_s:.1f} GB/s", "{bytes:,} bytes; what follows are shares of it"),
    *(
        Line(what, f"{{{name}_1:.2f}}, {{{name}_2:.2f}}", f"one thread, two; numpy {{{name}_numpy:.2f}}")
        for name, what in _CASES
    ),
    Line("aims", "0.7, 1.2", "pages; rows anywhere 0.5, 1.0"),
)


def measure(*, tokens: int = 4_096, repeats: int = 9) -> Figures:
    """Shares of one memcpy's rate for an MLA request, 61 planes of 1,152-byte rows, from a pool into a shared arena.

    The room has `tokens` tokens, rounded up to whole pages, and either pool twice as many slots. Each figure is the
    median over `repeats` of (time of a memcpy of the same bytes) / (time of the copy). The two are timed one after the
    other, so that a busy host costs both. Destinations are shared 4 KiB pages, all touched. `pages` go from scattered
    pages of 64 to scattered pages, `extent` to consecutive slots; `scattered` goes from random slots to random slots,
    row by row.
    """
    tokens = -(-tokens // PAGE_SIZE) * PAGE_SIZE
    slots = 2 * tokens
    shuffle = np.random.default_rng(0).permutation

    def pages() -> Int64s:
        return expand_pages(shuffle(slots // PAGE_SIZE)[: tokens // PAGE_SIZE], PAGE_SIZE, tokens)

    def rows() -> Int64s:
        return shuffle(slots)[:tokens]

    extent = np.arange(tokens)
    cases = {
        "pages_layer_first_to_layer_first": _plan("layer_first", "layer_first", slots, pages(), pages()),
        "pages_layer_first_to_page_first": _plan("layer_first", "page_first", slots, pages(), pages()),
        "pages_page_first_to_layer_first": _plan("page_first", "layer_first", slots, pages(), pages()),
        "extent_layer_first_to_page_first": _plan("layer_first", "page_first", slots, pages(), extent),
        "scattered_layer_first_to_layer_first": _plan("layer_first", "layer_first", slots, rows(), rows()),
        "scattered_layer_first_to_page_first": _plan("layer_first", "page_first", slots, rows(), rows()),
    }
    native, bytes_copied = kernels.native(), next(iter(cases.values())).bytes
    pool_bytes = 2 * bytes_copied
    source, arena = allocate(pool_bytes), ArenaMemory.create(pool_bytes, huge_pages="never")
    try:
        source.array[:] = 7
        arena.prefault()
        memcpy = _memcpy(source, arena.mapping, bytes_copied)
        figures: Figures = {"native": native.text, "bytes": bytes_copied}
        figures["memcpy_gb_s"] = bytes_copied / median(_seconds(memcpy) for _ in range(repeats)) / 1e9
        for name, work in cases.items():
            for label, threads, by in (("1", 1, native), ("2", 2, native), ("numpy", 1, _NUMPY)):
                copy = _copy(work, source, arena.mapping, threads, by)
                figures[f"{name}_{label}"] = median(_seconds(memcpy) / _seconds(copy) for _ in range(repeats))
        return figures
    finally:
        source.close()
        arena.close()


def _plan(source: str, target: str, slots: int, source_slots: Int64s, target_slots: Int64s) -> Plan:
    layouts = (latent_layout(name, slots=slots, page_size=PAGE_SIZE) for name in (source, target))
    return plan(pair(*layouts).fused(), source_slots, target_slots)


def _memcpy(source: Mapping, target: Mapping, byte_count: int) -> Callable[[], object]:
    function = ctypes.CDLL(None).memcpy
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return lambda: function(target.address, source.address, byte_count)


def _copy(work: Plan, source: Mapping, target: Mapping, threads: int, by: NativeCopy) -> Callable[[], object]:
    """A copy by this many threads, each of as many rows."""
    parts = list(work.pieces(-(-work.rows // threads) * work.pairing.row_bytes))

    def copy_part(part: Plan) -> None:
        kernels.copy(part, source.address, target.address, by=by)

    def run() -> None:
        others = [threading.Thread(target=copy_part, args=(part,)) for part in parts[1:]]
        for other in others:
            other.start()
        copy_part(parts[0])
        for other in others:
            other.join()

    return run


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start

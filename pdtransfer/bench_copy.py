"""How fast plans are copied on the CPU, each beside one memcpy of the same bytes in the same run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from . import kernels
from .geometry import Int64s
from .kernels import Native
from .layout import Layout, expand_pages, pair
from .layouts import host_layout
from .memory import Arena, Mapping, allocate
from .plan import Plan, plan

_LAYERS, _ROW_BYTES, _PAGE_SIZE = 61, 1_152, 64  # MLA, bfloat16
_NUMPY = Native(path=None, text="numpy")


def copy_benchmark(*, tokens: int = 4_096, slots: int = 8_192, repeats: int = 9) -> dict[str, float | str]:
    """Shares of one memcpy's rate for an MLA request, 61 planes of 1,152-byte rows, from a pool into a shared arena.

    Each figure is the median over `repeats` of (time of a memcpy of the same bytes) / (time of the copy), the two
    timed one after the other, so that a busy host costs both; destinations are shared 4 KiB pages, all touched.
    `pages` go from scattered pages of 64 to scattered pages, `extent` to consecutive slots; `scattered` goes from
    random slots to random slots, row by row.
    """
    shuffle = np.random.default_rng(0).permutation

    def pages() -> Int64s:
        return expand_pages(shuffle(slots // _PAGE_SIZE)[: tokens // _PAGE_SIZE], _PAGE_SIZE, tokens)

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
    native = kernels.native()
    pool_bytes = slots * _LAYERS * _ROW_BYTES
    source, arena = allocate(pool_bytes), Arena.create(pool_bytes, huge_pages="never")
    try:
        source.array[:] = 7
        arena.prefault()
        memcpy = _memcpy(source, arena.mapping, next(iter(cases.values())).bytes)
        figures: dict[str, float | str] = {"native": native.text, "bytes": next(iter(cases.values())).bytes}
        figures["memcpy_gb_s"] = float(figures["bytes"]) / median(_seconds(memcpy) for _ in range(repeats)) / 1e9
        for name, work in cases.items():
            for label, threads, by in (("1", 1, native), ("2", 2, native), ("numpy", 1, _NUMPY)):
                copy = _copy(work, source, arena.mapping, threads, by)
                figures[f"{name}_{label}"] = median(_seconds(memcpy) / _seconds(copy) for _ in range(repeats))
        return figures
    finally:
        source.close()
        arena.close()


def _plan(source: str, target: str, slots: int, source_slots: Int64s, target_slots: Int64s) -> Plan:
    pairing = pair(_layout(source, slots, _PAGE_SIZE), _layout(target, slots, _PAGE_SIZE)).fused()
    return plan(pairing, source_slots, target_slots)


def _layout(name: str, slots: int, page_size: int) -> Layout:
    return host_layout(
        name,
        kinds=("latent",),
        layers=_LAYERS,
        heads=1,
        head_bytes=_ROW_BYTES,
        dtype="bfloat16",
        slots=slots,
        page_size=page_size,
    )


def _memcpy(source: Mapping, target: Mapping, byte_count: int) -> Callable[[], object]:
    function = ctypes.CDLL(None).memcpy
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return lambda: function(target.address, source.address, byte_count)


def _copy(work: Plan, source: Mapping, target: Mapping, threads: int, by: Native) -> Callable[[], object]:
    return lambda: kernels.copy(work, source.address, target.address, threads=threads, by=by)


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start

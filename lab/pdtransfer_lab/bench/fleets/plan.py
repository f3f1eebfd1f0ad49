"""How long a plan takes: whether planning can stay off the list of costs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from pdtransfer.layout.layout import expand_pages
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import plan

from ..models import latent_layout
from ..report import Figures, Line

_PIECE_BYTES = 4 << 20  # about what a ring takes at a time


LINES = (
    Line("pages into one extent", "{contiguous_ms:.2f} ms", "{tokens} tokens x {planes} planes; aim: 1"),
    Line("tokens from anywhere to anywhere", "{scattered_ms:.2f} ms", "aim: 5"),
    Line("pages into one extent, as byte runs", "{pieces_ms:.1f} ms", "what a network transport asks for"),
    Line("pairing of two layouts", "{pair_ms:.2f} ms", "once a session"),
)


def measure(*, tokens: int = 131_072, layers: int = 61, page_size: int = 64, repeats: int = 51) -> Figures:
    """Medians in milliseconds for one MLA request from layer_first pages into a token-granular page_first arena.

    Contiguous: scattered pages into one extent. Scattered: every token from anywhere to anywhere. `pieces` multiplies
    the contiguous plan out to byte runs, 4 MiB at a time, as a network transport does.
    """
    slots = 2 * -(-tokens // page_size) * page_size
    source = latent_layout("layer_first", layers=layers, slots=slots, page_size=page_size)
    target = latent_layout("page_first", layers=layers, slots=slots, page_size=1)
    pairing = pair(source, target)
    shuffle = np.random.default_rng(0).permutation
    paged = expand_pages(shuffle(slots // page_size)[: slots // page_size // 2], page_size, tokens)
    extent = np.arange(tokens)
    anywhere = shuffle(slots)[:tokens], shuffle(slots)[:tokens]
    contiguous = plan(pairing, paged, extent)
    return {
        "tokens": tokens,
        "planes": layers,
        "bytes": contiguous.bytes,
        "runs_contiguous": len(contiguous.runs),
        "pair_ms": _median_ms(lambda: pair(source, target), repeats),
        "contiguous_ms": _median_ms(lambda: plan(pairing, paged, extent), repeats),
        "scattered_ms": _median_ms(lambda: plan(pairing, *anywhere), repeats),
        "pieces_ms": _median_ms(lambda: [piece.byte_runs() for piece in contiguous.pieces(_PIECE_BYTES)], 1),
    }


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return 1e3 * median(times)

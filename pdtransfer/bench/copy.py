"""The CPU copy, told: what was measured is in bench_copy."""

from __future__ import annotations

from ..bench_copy import copy_benchmark
from .report import Figures, Line

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


def measure(*, tokens: int = 4_096) -> Figures:
    """As copy_benchmark, in a pool of twice as many slots."""
    tokens = -(-tokens // 64) * 64
    return dict(copy_benchmark(tokens=tokens, slots=2 * tokens))

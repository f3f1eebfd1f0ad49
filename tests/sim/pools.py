"""Small pools and arenas, and the words that rows have to read as."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pdtransfer.layout import Component, Layout, Plane, Span

Int64s = NDArray[np.int64]

ROW = 8  # bytes: one word, which names the room, the component, the row and the layer that it belongs to
LAYERS = 3


def words(room: int, component: int, rows: Int64s, layer: int) -> Int64s:
    """What rows of a room have to read as."""
    return room * 1_000_003 + component * 40_009 + rows * 101 + layer + 1


def layout(slots: int, page: int, base: int, *, page_first: bool) -> Layout:
    """LAYERS planes of one word a row, layer_first or page_first_direct."""
    planes: list[Plane] = []
    for layer in range(LAYERS):
        if page_first:
            start, stride = base + layer * page * ROW, LAYERS * page * ROW
        else:
            start, stride = base + layer * slots * ROW, page * ROW
        planes.append(Plane(layer, "latent", "int64", 0, 1, start, stride, ROW, ROW))
    return Layout(tuple(planes), page, slots)


@cache
def components(tokens: int, page: int, *, page_first: bool) -> tuple[Component, ...]:
    """A KV with a row a token, and a compressed one with a row per 4 tokens."""
    kv = layout(tokens, page, 0, page_first=page_first)
    c4 = layout(tokens, page, tokens * LAYERS * ROW, page_first=page_first)
    return Component("kv", "dram", 1, Span(), kv), Component("c4", "dram", 4, Span(), c4)


@cache
def places(component: Component) -> Int64s:
    """The word that each slot's row of each layer is in: int64 (layers, slots)."""
    slots = np.arange(component.layout.slots)
    return np.stack([component.layout.address(layer, slots) // ROW for layer in range(LAYERS)])


def memory(of: tuple[Component, ...]) -> Int64s:
    """All words of a pool or an arena, zero."""
    return np.zeros(max(component.layout.end for component in of) // ROW, dtype=np.int64)

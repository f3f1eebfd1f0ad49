"""Small pools and arenas, and the words that rows have to read as."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pdtransfer.layout.checksum import Words, lines_of
from pdtransfer.layout.checksum import _of_words as hash_words
from pdtransfer.layout.layout import Component, Layout, Plane, Span

Int64s = NDArray[np.int64]

ROW = 8  # bytes of one head's row: a word, which names the room, component, row, layer and head that it belongs to
ROWS_MAX = 64  # of a room
LAYERS = 3
BLOCK = 8  # tokens that rooms share or do not
PAGE = 4  # tokens of a page of a pool
STAND_INS = {"kv": "blocks"}  # a row a token stands in for a row a page


@dataclass(frozen=True, slots=True)
class Shape:
    """What a rank holds of the model: layers and KV heads, each [first, end)."""

    layers: tuple[int, int] = (0, LAYERS)
    heads: tuple[int, int] = (0, 1)


ONE_HEAD = Shape()


def words(room: int | Int64s, component: int, rows: tuple[int, int], shape: Shape) -> Int64s:
    """What rows [first, end) of a room, or of one room each, have to read as: int64 (layers, heads, rows)."""
    return _words(component, shape)[:, :, slice(*rows)] + room * 1_000_003


@cache
def _words(component: int, shape: Shape) -> Int64s:
    layers, heads, rows = np.ix_(np.arange(*shape.layers), np.arange(*shape.heads), np.arange(ROWS_MAX))
    return layers + heads * 11 + rows * 101 + component * 40_009 + 1


def layout(slots: int, page: int, base: int, shape: Shape, *, page_first: bool) -> Layout:
    """A plane a layer, with a word a head in each row; layer_first or page_first_direct."""
    count = shape.layers[1] - shape.layers[0]
    row = ROW * (shape.heads[1] - shape.heads[0])
    planes: list[Plane] = []
    for place, layer in enumerate(range(*shape.layers)):
        if page_first:
            start, stride = base + place * page * row, count * page * row
        else:
            start, stride = base + place * slots * row, page * row
        heads = shape.heads[1] - shape.heads[0]
        planes.append(Plane(layer, "latent", "int64", shape.heads[0], heads, start, stride, row, row))
    return Layout(tuple(planes), page, slots)


@cache
def components(
    tokens: int, page: int, shape: Shape = ONE_HEAD, *, page_first: bool, kv_first: bool = True, blocks: bool = False
) -> tuple[Component, ...]:
    """A KV with a row a token, and a compressed one of a single head with a row per 4 tokens. With `blocks` the KV is
    described once more, by its pages."""
    one = Shape(shape.layers, (0, 1))
    kv = layout(tokens, page, 0, shape, page_first=page_first)
    c4 = layout(tokens, page, kv.end if kv_first else 0, one, page_first=page_first)
    if not kv_first:
        kv = layout(tokens, page, c4.end, shape, page_first=page_first)
    by_token = Component("kv", "dram", 1, Span(), kv), Component("c4", "dram", 4, Span(), c4)
    return (*by_token, Component("blocks", "dram", PAGE, Span(), _by_page(kv))) if blocks else by_token


def _by_page(kv: Layout) -> Layout:
    """The same bytes with a row a page: each of its tokens counts as a head of the row."""
    assert kv.page_size == PAGE
    row = PAGE * ROW
    planes = [
        Plane(plane.layer, plane.kind, plane.dtype, 0, PAGE, plane.base, plane.page_stride, row, row)
        for plane in kv.planes
    ]
    return Layout(tuple(planes), 1, kv.slots // PAGE)


@cache
def holds(component: Component) -> Shape:
    """Layers and heads that are in it."""
    plane = component.layout.planes[0]
    return Shape(component.layout.layer_range, (plane.head_start, plane.head_start + plane.head_count))


@cache
def places(component: Component) -> Int64s:
    """The word that each row of each layer and head is in: int64 (layers, heads, slots), from the first of each."""
    slots, planes = np.arange(component.layout.slots), component.layout.planes
    at = np.stack([component.layout.address(plane, slots) // ROW for plane in range(len(planes))])
    return at[:, None, :] + np.arange(planes[0].head_count)[None, :, None]


@cache
def _seeds(component: Component, layers: tuple[int, int]) -> Words:
    """Of the checksums of its rows: uint64 (layers, heads, rows)."""
    of_heads = lines_of(component.name, component.layout, layers=layers).seeds.reshape(layers[1] - layers[0], -1, 1)
    return hash_words(np.arange(ROWS_MAX, dtype=np.uint64), of_heads)


def checksum(component: Component, layers: tuple[int, int], first_row: int, got: Int64s) -> int:
    """Of what was read as rows first_row, first_row + 1, ..., int64 (layers, heads, rows); a head is one word."""
    seeds = _seeds(component, layers)[:, :, first_row : first_row + got.shape[2]]
    return int(hash_words(got.view(np.uint64), seeds).sum())


def memory(of: tuple[Component, ...]) -> Int64s:
    """All words of a pool or an arena, zero."""
    return np.zeros(max(component.layout.end for component in of) // ROW, dtype=np.int64)

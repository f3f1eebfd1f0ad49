"""Layouts made of an engine's own tensor views: every row is where the view itself has it."""

from __future__ import annotations

from itertools import count, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.errors import LocalProtocolError
from pdtransfer.layout.layout import DTYPE_BYTES, Component, Layout, Plane, Span
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, host_layout, strided_layout
from pdtransfer.layout.pairing import pair
from tests.support.effort import some
from tests.support.layout_tensors import Model, Pool, mha, mla

bounded = settings(max_examples=some(200), deadline=None)

NAMED = ("page", "row", "head")
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


@st.composite
def allocated(draw: Any) -> tuple[dict[tuple[int, str], np.ndarray], tuple[str, ...], dict[str, int], int, int]:
    """Views into one allocation whose axes lie in any order, some with padding behind them; the names of the first
    axes of each view, the counts by name, and the elements and bytes of one head."""
    axes = draw(
        st.sampled_from([order for n in (1, 2, 3) for order in permutations(NAMED, n) if {"page", "row"} & set(order)])
    )
    counts = {axis: draw(st.integers(1, 4)) for axis in axes}
    if "page" in axes and "row" in axes:
        counts["row"] = 1 << draw(st.integers(0, 2))
    layers, kinds = draw(st.integers(1, 3)), draw(st.sampled_from([("kv",), ("k", "v")]))
    dtype = draw(st.sampled_from([np.uint8, np.float16, np.float32]))
    payload = draw(st.lists(st.integers(1, 3), max_size=2))
    outer = draw(st.permutations(["layer", "kind", *axes]).filter(pages_hold_rows))
    sizes = {"layer": layers, "kind": len(kinds), **counts}
    padded = [sizes[axis] + draw(st.integers(0, 1)) for axis in outer]
    whole = np.zeros([*padded, *payload], dtype)
    used = whole[tuple(slice(sizes[axis]) for axis in outer)]
    turned = used.transpose(
        [outer.index(axis) for axis in ("kind", "layer", *axes)] + [len(outer) + index for index in range(len(payload))]
    )
    views = {(layer, kind): turned[index, layer] for index, kind in enumerate(kinds) for layer in range(layers)}
    elements = int(np.prod(payload, dtype=int))
    return views, axes, counts, elements, elements * whole.itemsize


def pages_hold_rows(outer: list[str]) -> bool:
    """No Layout has it the other way round."""
    return not {"page", "row"} <= set(outer) or outer.index("page") < outer.index("row")


@bounded
@given(allocated(), st.integers(0, 5), st.booleans())
def test_every_row_of_every_plane_is_where_the_view_has_it(made: Any, head_start: int, as_torch: bool) -> None:
    views, axes, counts, elements, head_bytes = made
    page_size = None if "page" in axes else 1 << (counts["row"] % 2 == 0)
    heads = range(head_start, head_start + counts.get("head", 1))
    given_views = {at: torch.from_numpy(view) for at, view in views.items()} if as_torch else views
    layout = strided_layout(given_views, axes=axes, page_size=page_size, heads=heads)
    assert layout.slots == counts.get("page", 1) * counts.get("row", 1)
    assert layout.page_size == (counts.get("row", 1) if "page" in axes else page_size)
    seen = set()
    for index, plane in enumerate(layout.planes):
        view = views[plane.layer, plane.kind]
        assert plane.head_bytes == head_bytes
        for slot in range(layout.slots):
            page, row = divmod(slot, counts.get("row", 1))
            for at in range(plane.head_count):
                head = plane.head_start + at - head_start
                place = {"page": page, "row": row, "head": head}
                rows = view[*(place[axis] for axis in axes), ...]
                assert rows.size == elements
                assert layout.address(index, slot) + at * head_bytes == rows.ctypes.data
                seen.add((plane.layer, plane.kind, head, slot))
    assert len(seen) == len(views) * layout.slots * counts.get("head", 1)


@pytest.mark.parametrize("name", HOST_LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "model", [mha(), mha(dtype="float8_e4m3", heads=range(4, 8)), mla()], ids=["mha", "fp8", "mla"]
)
def test_views_of_a_known_layout_make_that_layout(name: str, page_size: int, model: Model) -> None:
    pool = Pool(name=name, model=model, page_size=page_size, slots=3 * page_size, base=64)
    views = {(layer, kind): rows_of(pool, kind, layer) for kind, _, _ in model.parts for layer in model.layers}
    memory = {"origin": pool.memory.ctypes.data, "byte_count": len(pool.memory)}
    layout = strided_layout(views, axes=NAMED, heads=model.heads, **memory)
    assert meant(layout) == meant(pool.layout)


def rows_of(pool: Pool, kind: str, layer: int) -> torch.Tensor:
    """(pages, page_size, heads, elements) of the pool's tensor."""
    heads = [pool.view(kind, layer, head) for head in pool.model.heads]
    one = heads[0]
    step = heads[-1].ctypes.data - one.ctypes.data
    shape = (*one.shape[:2], len(heads), one.shape[2])
    strides = (*one.strides[:2], step // max(1, len(heads) - 1), one.strides[2])
    rows = np.lib.stride_tricks.as_strided(one, shape, strides)
    return torch.from_numpy(rows).view(TORCH_DTYPES[pool.model.parts[0][1]])


def meant(layout: Layout) -> tuple[Plane, ...]:
    """The planes, without the stride from one row to the next where pages have one."""
    paged = layout.page_size > 1
    return tuple(replace(plane, row_stride=plane.row_stride if paged else 0) for plane in layout.planes)


def test_a_pool_of_slots_takes_the_page_size_that_its_engine_counts_in() -> None:
    """SGLang's: a tensor [slots, H, D] a layer and kind."""
    k, v = torch.zeros(2, 2, 64, 4, 8, dtype=torch.bfloat16)
    views = {(layer, kind): each[layer] for kind, each in (("k", k), ("v", v)) for layer in range(2)}
    layout = strided_layout(views, axes=("row", "head"), page_size=16, origin=k.data_ptr())
    common = {"kinds": ("k", "v"), "layers": 2, "heads": 4, "head_bytes": 16, "dtype": "bfloat16"}
    assert layout == host_layout("layer_first", slots=64, page_size=16, **common)


def test_opaque_blocks_are_rows_whose_heads_can_be_cut() -> None:
    """vLLM's [B, H, N, 2D], where layers of a block lie side by side."""
    backing = torch.zeros(6, 3, 4, 16, 8, dtype=torch.bfloat16)  # blocks, layers, heads, N, 2D
    views = {(layer, "kv"): backing[:, layer] for layer in range(3)}
    layout = strided_layout(views, axes=("page", "head"), heads=range(4, 8), origin=backing.data_ptr())
    block = 16 * 8 * 2
    assert (layout.page_size, layout.slots) == (1, 6)
    assert [(p.layer, p.head_start, p.head_count, p.base, p.page_stride, p.row_bytes) for p in layout.planes] == [
        (layer, 4, 4, layer * 4 * block, 12 * block, 4 * block) for layer in range(3)
    ]
    assert layout.heads(5, 6).planes[0].base == block
    component = Component("g0", "dram", 16, Span(), layout)
    assert component.rows(40) == 3
    apart = backing.transpose(1, 2).contiguous().transpose(1, 2)  # heads outside layers: a plane each
    split = strided_layout({(layer, "kv"): apart[:, layer] for layer in range(3)}, axes=("page", "head"))
    assert [p.head_count for p in split.planes] == [1] * 12
    assert pair(strided_layout(views, axes=("page", "head")), split).row_bytes == layout.row_bytes


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *[(dtype, name) for name, dtype in TORCH_DTYPES.items()],
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.int8, "int8"),
    ],
)
def test_dtypes_have_the_names_that_peers_compare(dtype: torch.dtype, name: str) -> None:
    assert strided_layout({(0, "kv"): torch.zeros(2, 8, dtype=dtype)}, axes=("page",)).planes[0].dtype == name


def test_elements_that_only_the_engines_know_are_bytes() -> None:
    views = {(0, "scale"): torch.zeros(2, 8, dtype=torch.float8_e8m0fnu)}
    with pytest.raises(LocalProtocolError, match=r"views\[0, 'scale'\].dtype: 'float8_e8m0fnu' must be one of "):
        strided_layout(views, axes=("page",))
    assert strided_layout(views, axes=("page",), dtype="uint8").planes[0].dtype == "uint8"


AXES = "('page', 'row', 'head')"
APART = f"bytes, the axes behind {AXES} are not contiguous"
EMPTY = f"for axes {AXES}, which must all have elements"
CHOICE = "are not some of page, row, head, each once, with page or row"
ROWS = np.zeros((4, 2, 3, 8), np.float16)  # pages, rows, heads, elements
AT = ROWS.ctypes.data


@pytest.mark.parametrize(
    ("views", "more", "text"),
    [
        ({}, {}, "views: must not be empty"),
        ({(0, "k"): [[1.0]]}, {}, "views[0, 'k']: list is neither a torch tensor nor a numpy array"),
        ({(0, "k"): ROWS[0, 0]}, {}, f"views[0, 'k'].shape: (3, 8) {EMPTY}"),
        ({(0, "k"): ROWS[:0]}, {}, f"views[0, 'k'].shape: (0, 2, 3, 8) {EMPTY}"),
        ({(0, "k"): ROWS[..., ::2]}, {}, f"views[0, 'k'].strides: (96, 48, 16, 4) {APART}"),
        ({(0, "k"): ROWS[..., ::-1]}, {}, f"views[0, 'k'].strides: (96, 48, 16, -2) {APART}"),
        ({(0, "k"): ROWS[::-1]}, {}, "views[0, 'k'].strides: -96 bytes from one page to the next do not ascend"),
        ({(0, "k"): np.broadcast_to(ROWS[:1], ROWS.shape)}, {},
         "views[0, 'k'].strides: 0 bytes from one page to the next do not ascend"),
        ({(0, "k"): ROWS, (1, "k"): ROWS[:3]}, {}, "views[1, 'k'].shape: 3 pages of 2 slots, views[0, 'k'] has 4 of 2"),
        ({(0, "k"): ROWS.view(np.complex64)}, {},
         f"views[0, 'k'].dtype: 'complex64' must be one of {', '.join(DTYPE_BYTES)}"),
        ({(0, "k"): ROWS}, {"heads": range(4)}, "views[0, 'k'].shape: 3 heads, where heads=range(0, 4)"),
        ({(0, "k"): ROWS}, {"page_size": 4}, "page_size: 4, views[0, 'k'] has 2 rows a page"),
        ({(0, "k"): ROWS[0]}, {"axes": ("row", "head"), "page_size": 4},
         "views[0, 'k'].shape: 2 rows are not whole pages of 4"),
        ({(0, "k"): ROWS}, {"axes": ("head",)}, f"axes: ('head',) {CHOICE}"),
        ({(0, "k"): ROWS}, {"axes": ("page", "page")}, f"axes: ('page', 'page') {CHOICE}"),
        ({(0, "k"): ROWS}, {"axes": ("page", "token")}, f"axes: ('page', 'token') {CHOICE}"),
        ({(0, "k"): ROWS}, {"origin": AT + 8}, f"views[0, 'k'].address: bytes -8..375 from {AT + 8:#x} on"),
        ({(0, "k"): ROWS}, {"origin": AT, "byte_count": 383},
         f"views[0, 'k'].address: bytes 0..383 from {AT:#x} on, of 383"),
    ],
    ids=count(),  # texts name addresses, which differ between the workers of one run
)  # fmt: skip
def test_views_that_make_no_layout_are_refused_by_name(views: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        strided_layout(views, **({"axes": ("page", "row", "head")} | more))
    assert str(caught.value) == text


def test_views_of_the_same_bytes_overlap() -> None:
    with pytest.raises(ValueError, match="their rows overlap"):
        strided_layout({(0, "k"): ROWS, (1, "k"): ROWS}, axes=NAMED)


def test_a_view_that_just_fits_its_arena_is_taken() -> None:
    layout: Layout = strided_layout({(0, "k"): ROWS}, axes=NAMED, origin=AT, byte_count=384)
    assert layout.end == 384

"""Every common pool layout as a list of planes: the only code that distinguishes layouts by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import LocalProtocolError
from .layout import DTYPE_BYTES, Layout, Plane

_AXES = {  # of one kind's tensor, outermost first; a row's bytes of one head are innermost
    "layer_first": ("layer", "page", "row", "head"),  # (L, N, H, D)
    "page_first": ("page", "row", "layer", "head"),  # (N, L, H, D)
    "page_first_direct": ("page", "layer", "row", "head"),  # (N/P, L, P, H, D)
    "page_head": ("page", "head", "row", "layer"),  # (N/P, H, P, L, D)
}

HOST_LAYOUTS = tuple(_AXES)
ITEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class PagePart(NamedTuple):
    """One kind in a page that keeps its kinds apart: page_size rows of `row_bytes`, one after another."""

    kind: str
    dtype: str
    row_bytes: int


DSA_INDEX_PARTS = (PagePart("index", "float8_e4m3", 128), PagePart("scale", "float32", 4))
C4_PARTS = (
    PagePart("values", "uint8", 576),
    PagePart("scale", "uint8", 8),
)  # 448 fp8 + 64 bfloat16; 7 scales and a pad

Axis = Literal["page", "row", "head"]
_AXES_OF_VIEWS = ("page", "row", "head")
_DTYPE_NAMES = {"float8_e4m3fn": "float8_e4m3"}  # of torch and numpy, where DTYPE_BYTES has another


def host_layout(
    name: str,
    *,
    kinds: Sequence[str],
    layers: int | Sequence[int],
    heads: int | range,
    head_bytes: int,
    dtype: str,
    slots: int,
    page_size: int,
    base: int = 0,
) -> Layout:
    """One of HOST_LAYOUTS: a tensor for each kind, one after another, from `base` on.

    `layers` and `heads` are a count, or those of this rank, heads as a range; `head_bytes` is one head of one token.
    MHA and GQA are kinds ("k", "v"); MLA is ("latent",) with one head. Kinds of unequal shape take two calls, the
    second with the first's `end` as base, and one Layout of all planes. Raises LocalProtocolError for an unknown name,
    and ValueError as Layout does.
    """
    if name not in _AXES:
        raise LocalProtocolError(f"host layout: {name!r} must be one of {', '.join(HOST_LAYOUTS)}")
    layers, heads = _listed(layers), range(heads) if isinstance(heads, int) else heads
    counts = {"layer": len(layers), "page": _page_count(slots, page_size), "row": page_size, "head": len(heads)}
    axes = _AXES[name]
    strides = {axis: head_bytes * prod(counts[inner] for inner in axes[depth + 1 :]) for depth, axis in enumerate(axes)}
    wide = axes[-1] == "head"  # the heads of a row are adjacent
    planes = tuple(
        Plane(
            layer=layer,
            kind=kind,
            dtype=dtype,
            head_start=head,
            head_count=len(heads) if wide else 1,
            base=base
            + kind_at * head_bytes * prod(counts.values())
            + layer_at * strides["layer"]
            + head_at * strides["head"],
            page_stride=strides["page"],
            row_stride=strides["row"],
            row_bytes=head_bytes * (len(heads) if wide else 1),
        )
        for kind_at, kind in enumerate(kinds)
        for layer_at, layer in enumerate(layers)
        for head_at, head in enumerate(heads[:1] if wide else heads)
    )
    return Layout(planes, page_size, slots)


def item_layout(
    name: str,
    *,
    parts: Sequence[PagePart],
    layers: int | Sequence[int],
    slots: int,
    page_size: int,
    item_bytes: int | None = None,
    base: int = 0,
) -> Layout:
    """One of ITEM_LAYOUTS, of pages that keep `parts` apart: all rows of the first, all rows of the next, padding.

    An item is one layer's page, of `item_bytes` with its padding; by default there is none. layer_first is a tensor
    (pages, item) a layer, page_first (pages, L, item), page_first_direct (pages, L, 1, item). Raises as host_layout.
    """
    layers = _listed(layers)
    held_bytes = page_size * sum(part.row_bytes for part in parts)
    item_bytes = held_bytes if item_bytes is None else item_bytes
    if item_bytes < held_bytes:
        raise LocalProtocolError(f"item_bytes: {item_bytes} is below the {held_bytes} bytes of {page_size} rows")
    match name:
        case "layer_first":
            layer_stride, page_stride = _page_count(slots, page_size) * item_bytes, item_bytes
        case "page_first" | "page_first_direct":
            layer_stride, page_stride = item_bytes, len(layers) * item_bytes
        case _:
            kinds = ", ".join(part.kind for part in parts)
            raise LocalProtocolError(f"host layout of {kinds}: {name!r} must be one of {', '.join(ITEM_LAYOUTS)}")
    planes = tuple(
        Plane(
            layer=layer,
            kind=part.kind,
            dtype=part.dtype,
            head_start=0,
            head_count=1,
            base=base + layer_at * layer_stride + page_size * sum(before.row_bytes for before in parts[:part_at]),
            page_stride=page_stride,
            row_stride=part.row_bytes,
            row_bytes=part.row_bytes,
        )
        for layer_at, layer in enumerate(layers)
        for part_at, part in enumerate(parts)
    )
    return Layout(planes, page_size, slots)


def strided_layout(
    views: Mapping[tuple[int, str], Any],
    *,
    axes: Sequence[Axis],
    page_size: int | None = None,
    heads: range | None = None,
    dtype: str | None = None,
    origin: int = 0,
    byte_count: int | None = None,
) -> Layout:
    """The pool that an engine allocated, by its own views: `views[layer, kind]` is a torch tensor or a numpy array.

    `axes` names the first axes of every view. The axes after them are one head of one row, and must be contiguous:

        ("page", "row", "head")  NHD [B, N, H, D], with N slots a page
        ("page", "row")          MLA [B, N, C], one head
        ("row", "head")          [slots, H, D], in pages of `page_size` slots, by default of one
        ("page", "head")         opaque blocks [B, H, N, 2D]: a slot is a block, and N is Component.tokens_per_row

    Any order will do, as ("page", "head", "row") for HND, if in memory a page holds its rows. Heads that lie side by
    side in a row are one wide plane. `heads` are this rank's, by default from 0 on. A view's dtype is kept; give
    `dtype` for elements that only the engines understand, as "uint8". Bases are relative to the address `origin`, or
    absolute by default. With `byte_count`, that of an arena or a pool, every view must lie within that many bytes.

    Raises LocalProtocolError, with the view and its field, for views that do not fit this description or one another.
    Raises ValueError as Layout does, as for two views of the same bytes. Views of other axes take a second call, and
    one Layout of all planes.
    """
    if len(set(axes)) < len(axes) or not set(axes) <= set(_AXES_OF_VIEWS) or not {"page", "row"} & set(axes):
        text = f"axes: {tuple(axes)} are not some of {', '.join(_AXES_OF_VIEWS)}, each once, with page or row"
        raise LocalProtocolError(text)
    if not views:
        raise LocalProtocolError("views: must not be empty")
    strided = [_strided(f"views[{layer}, {kind!r}]", view, axes) for (layer, kind), view in views.items()]
    pages, size = _pages(strided[0], page_size)
    planes: list[Plane] = []
    for (layer, kind), view in zip(views, strided, strict=True):
        if (other := _pages(view, page_size)) != (pages, size):
            text = f"{other[0]} pages of {other[1]} slots, {strided[0].name} has {pages} of {size}"
            raise LocalProtocolError(f"{view.name}.shape: {text}")
        base, end = view.address - origin, view.address - origin + view.extent
        if base < 0 or (byte_count is not None and end > byte_count):
            within = "" if byte_count is None else f", of {byte_count}"
            raise LocalProtocolError(f"{view.name}.address: bytes {base}..{end - 1} from {origin:#x} on{within}")
        count = view.counts.get("head", 1)
        span = range(count) if heads is None else heads
        if len(span) != count or span.step != 1:
            raise LocalProtocolError(f"{view.name}.shape: {count} heads, where heads={span}")
        planes += _planes(
            view, layer=layer, kind=kind, dtype=_dtype(view, dtype), heads=span, base=base, page_size=size
        )
    return Layout(tuple(planes), size, pages * size)


class _Strided(NamedTuple):
    """A view by the names of its first axes; strides and head_bytes are bytes."""

    name: str
    address: int
    counts: dict[Axis, int]
    strides: dict[Axis, int]
    head_bytes: int  # of the axes behind them
    dtype: str

    @property
    def extent(self) -> int:
        """Bytes from the first to the last."""
        return sum((self.counts[axis] - 1) * stride for axis, stride in self.strides.items()) + self.head_bytes


def _strided(name: str, view: Any, axes: Sequence[Axis]) -> _Strided:
    if hasattr(view, "data_ptr"):  # a torch tensor, whose strides are elements
        item_bytes: int = view.element_size()
        address, shape, strides = view.data_ptr(), tuple(view.shape), [step * item_bytes for step in view.stride()]
        dtype = str(view.dtype).removeprefix("torch.")
    elif hasattr(view, "__array_interface__"):
        array = np.asarray(view)
        item_bytes, address = array.itemsize, array.ctypes.data
        shape, strides, dtype = array.shape, list(array.strides), array.dtype.name
    else:
        raise LocalProtocolError(f"{name}: {type(view).__name__} is neither a torch tensor nor a numpy array")
    if len(shape) < len(axes) or not prod(shape):
        raise LocalProtocolError(f"{name}.shape: {shape} for axes {tuple(axes)}, which must all have elements")
    head_bytes = item_bytes
    for size, step in zip(shape[: len(axes) - 1 : -1], strides[: len(axes) - 1 : -1], strict=True):
        if size > 1 and step != head_bytes:
            raise LocalProtocolError(
                f"{name}.strides: {tuple(strides)} bytes, the axes behind {tuple(axes)} are not contiguous"
            )
        head_bytes *= size
    counts, steps = dict(zip(axes, shape, strict=False)), dict(zip(axes, strides, strict=False))
    for axis, step in steps.items():
        if step < 0 or (step == 0 and counts[axis] > 1):
            raise LocalProtocolError(f"{name}.strides: {step} bytes from one {axis} to the next do not ascend")
    return _Strided(name, address, counts, steps, head_bytes, dtype)


def _planes(
    view: _Strided, *, layer: int, kind: str, dtype: str, heads: range, base: int, page_size: int
) -> list[Plane]:
    """A plane for each head, or one where a row's heads are adjacent."""
    head_stride = view.strides.get("head", 0)
    wide = len(heads) == 1 or head_stride == view.head_bytes
    row_bytes = view.head_bytes * (len(heads) if wide else 1)
    row_stride = view.strides.get("row", row_bytes)
    return [
        Plane(
            layer=layer,
            kind=kind,
            dtype=dtype,
            head_start=head,
            head_count=len(heads) if wide else 1,
            base=base + index * head_stride,
            page_stride=view.strides.get("page", page_size * row_stride),
            row_stride=row_stride,
            row_bytes=row_bytes,
        )
        for index, head in enumerate(heads[:1] if wide else heads)
    ]


def _pages(view: _Strided, page_size: int | None) -> tuple[int, int]:
    """Its pages, and the slots of each."""
    if "page" in view.counts:
        pages, size = view.counts["page"], view.counts.get("row", 1)
        if page_size not in (None, size):
            raise LocalProtocolError(f"page_size: {page_size}, {view.name} has {size} rows a page")
        return pages, size
    rows, size = view.counts["row"], 1 if page_size is None else page_size
    pages = _page_count(rows, size)
    if pages * size != rows:
        raise LocalProtocolError(f"{view.name}.shape: {rows} rows are not whole pages of {size}")
    return pages, size


def _dtype(view: _Strided, wanted: str | None) -> str:
    dtype = wanted or _DTYPE_NAMES.get(view.dtype, view.dtype)
    if dtype not in DTYPE_BYTES:
        raise LocalProtocolError(f"{view.name}.dtype: {dtype!r} must be one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _listed(counted: int | Sequence[int]) -> Sequence[int]:
    return range(counted) if isinstance(counted, int) else counted


def _page_count(slots: int, page_size: int) -> int:
    if page_size < 1:
        raise ValueError(f"page_size: {page_size} is below 1")
    return slots // page_size

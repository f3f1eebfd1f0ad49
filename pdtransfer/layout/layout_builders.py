"""Every common pool layout as a list of planes: the only code that distinguishes layouts by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..errors import LocalProtocolError
from .layout import Layout, Plane

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
C4_PAGE_SIZE = 64
C4_PAGE_BYTES = 37_440  # the last 64 are padding, so that a page is a multiple of 576


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
        raise LocalProtocolError(f"host layout: {name!r} is none of {', '.join(HOST_LAYOUTS)}")
    layers, heads = _listed(layers), range(heads) if isinstance(heads, int) else heads
    counts = {"layer": len(layers), "page": _page_count(slots, page_size), "row": page_size, "head": len(heads)}
    axes = _AXES[name]
    strides = {axis: head_bytes * prod(counts[inner] for inner in axes[at + 1 :]) for at, axis in enumerate(axes)}
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
    if name not in ITEM_LAYOUTS:
        kinds = ", ".join(part.kind for part in parts)
        raise LocalProtocolError(f"host layout of {kinds}: {name!r} is none of {', '.join(ITEM_LAYOUTS)}")
    layers = _listed(layers)
    held_bytes = page_size * sum(part.row_bytes for part in parts)
    item_bytes = held_bytes if item_bytes is None else item_bytes
    if item_bytes < held_bytes:
        raise LocalProtocolError(f"item_bytes: {item_bytes} is below the {held_bytes} bytes of {page_size} rows")
    if name == "layer_first":
        layer_stride, page_stride = _page_count(slots, page_size) * item_bytes, item_bytes
    else:
        layer_stride, page_stride = item_bytes, len(layers) * item_bytes
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


def _listed(counted: int | Sequence[int]) -> Sequence[int]:
    return range(counted) if isinstance(counted, int) else counted


def _page_count(slots: int, page_size: int) -> int:
    if page_size < 1:
        raise ValueError(f"page_size: {page_size} is below 1")
    return slots // page_size

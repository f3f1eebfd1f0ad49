"""Planes, layouts and components: the one table that kernels, copies, planner and bounds checks all read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from .limits import COMPONENTS_MAX, NAME_LENGTH_MAX, PLANES_MAX

Count16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Bytes64 = Annotated[int, Meta(ge=0, le=(1 << 62))]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1,
    "uint8": 1, "int8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


class Plane(Struct, frozen=True, array_like=True):
    """One strided run of rows: what one layer keeps of one kind for a span of heads.

    `base` is an offset into an arena or pool on the wire, an address in a process; strides and row_bytes are bytes.
    A row holds `head_count` heads of equal bytes, the first of which is the model's head `head_start`.
    """

    layer: Count16
    kind: Annotated[str, Meta(min_length=1, max_length=16)]  # k, v, latent, index, scale, values, state, ...
    dtype: Annotated[str, Meta(max_length=16)]  # a key of DTYPE_BYTES
    head_start: Count16
    head_count: Count16
    base: Bytes64
    page_stride: Bytes64
    row_stride: Bytes64
    row_bytes: Annotated[int, Meta(ge=1, le=1 << 30)]


class Layout(Struct, frozen=True, array_like=True):
    """A pool as a list of planes: address(plane, slot) = base + (slot // page_size) * page_stride + (slot % page_size) * row_stride."""

    planes: Annotated[tuple[Plane, ...], Meta(min_length=1, max_length=PLANES_MAX)]
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    slots: Annotated[int, Meta(ge=1, le=1 << 40)]


class Span(Struct, frozen=True, array_like=True):
    """Which tokens own a row: all of them, the last `tokens` ones (sliding window), or one row a request (state)."""

    kind: Literal["all", "last", "once"] = "all"
    tokens: Count32 = 0


class Component(Struct, frozen=True, array_like=True):
    """One part of a model's cache, with slots of its own: latent KV, a DSA index, C4 or C128 compressed KV, a state."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    memory: Literal["dram", "hbm"]
    tokens_per_row: Annotated[int, Meta(ge=1, le=0xFFFF)]
    span: Span
    layout: Layout


Components = Annotated[tuple[Component, ...], Meta(max_length=COMPONENTS_MAX)]

_ = msgspec

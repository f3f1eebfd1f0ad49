"""Planes, layouts and components: the one table that kernels, copies, planner and bounds checks all read.

What is built here is valid: a Layout whose rows overlap, or whose addresses leave int64, cannot be made.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple, overload

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import ArrayLike

from ..errors import LocalProtocolError
from ..limits import COMPONENTS_MAX, NAME_LENGTH_MAX, PLANES_MAX
from . import geometry
from .geometry import BYTES_MAX, COLUMNS, ROW_BYTES_MAX, Int64s, bounds_of, first_true, integers

Count16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Bytes64 = Annotated[int, Meta(ge=0, le=BYTES_MAX)]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1,
    "uint8": 1, "int8": 1, "int32": 4, "int64": 8,
}  # fmt: skip

_KIND_LENGTH_MAX = 16
_PAGE_SIZE_MAX = 1 << 20
_SLOTS_MAX = 1 << 40
_INT64_MAX = (1 << 63) - 1


class Plane(Struct, frozen=True, array_like=True):
    """One strided run of rows: what one layer keeps of one kind for a span of heads.

    `base` is an offset into an arena or pool on the wire, an address in a process; strides and row_bytes are bytes.
    A row holds `head_count` heads of equal bytes, the first of which is the model's head `head_start`.
    """

    layer: Count16
    kind: Annotated[str, Meta(min_length=1, max_length=_KIND_LENGTH_MAX)]  # k, v, latent, index, scale, values, ...
    dtype: Annotated[str, Meta(max_length=16)]  # a key of DTYPE_BYTES
    head_start: Count16
    head_count: Count16
    base: Bytes64
    page_stride: Bytes64
    row_stride: Bytes64  # of no meaning where page_size is 1
    row_bytes: Annotated[int, Meta(ge=1, le=ROW_BYTES_MAX)]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one row."""
        return self.row_bytes // self.head_count

    def heads(self, first: int, end: int) -> list[Plane]:
        """Its part of heads [first, end), as one plane, or an empty list."""
        start, stop = max(first, self.head_start), min(end, self.head_start + self.head_count)
        if start >= stop or stop - start == self.head_count:
            return [self] if start < stop else []
        base, row_bytes = self.base + (start - self.head_start) * self.head_bytes, (stop - start) * self.head_bytes
        cut = {"head_start": start, "head_count": stop - start, "base": base, "row_bytes": row_bytes}
        return [msgspec.structs.replace(self, **cut)]


_columns = attrgetter(*COLUMNS)


class Buffer(NamedTuple):
    """A range of memory as a transport registers it: page i of every plane in it begins at start + i * item_bytes.

    It ends with its last row; padding may follow, or memory may end.
    """

    start: int  # as bases: an offset, or an address after `rebase`
    byte_count: int
    item_bytes: int  # from one page to the next; all of it, if there is one page


class Layout(Struct, frozen=True, array_like=True, dict=True, cache_hash=True):
    """A pool as a list of planes; each row lies at

        address(plane, slot) = base + (slot // page_size) * page_stride + (slot % page_size) * row_stride

    Raises ValueError, which msgspec.convert turns into its ValidationError, naming the field and both values, unless
    all hold: page_size is a power of two and divides slots. Each field is within its bounds, if made directly too.
    Every plane's dtype is known and its row a whole number of elements a head. No (kind, layer, head) is there twice.
    All bytes lie below 2**62. A plane's rows follow one another within a page and its pages within the pool. No row of
    any plane overlaps another, by a sufficient test: planes that interleave share that stride.
    """

    planes: Annotated[tuple[Plane, ...], Meta(min_length=1, max_length=PLANES_MAX)]
    page_size: Annotated[int, Meta(ge=1, le=_PAGE_SIZE_MAX)]
    slots: Annotated[int, Meta(ge=1, le=_SLOTS_MAX)]

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_names(self)
        _check_rows(self)
        geometry.check_strides(self.table, self.page_size, self.slots)
        _check_heads(self)

    @cached_property
    def table(self) -> Int64s:
        """Read-only int64 (planes, 7): layer, head_start, head_count, base, page_stride, row_stride, row_bytes."""
        return geometry.table_of([_columns(plane) for plane in self.planes])

    @cached_property
    def ends(self) -> Int64s:
        """Read-only int64 (planes,): one past the highest byte of each plane."""
        return geometry.ends_of(self.table, self.page_size, self.slots)

    @property
    def end(self) -> int:
        """One past the highest byte that a row of this layout touches."""
        return int(self.ends.max())

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one slot over all planes."""
        return int(self.table[:, 6].sum())

    def row_bytes_of(self, first_layer: int, end_layer: int) -> int:
        """Bytes of one slot over the planes of layers [first_layer, end_layer)."""
        layers, below = self._bytes_below
        return max(0, below[bisect_left(layers, end_layer)] - below[bisect_left(layers, first_layer)])

    @cached_property
    def _bytes_below(self) -> tuple[list[int], list[int]]:
        """The planes' layers in order, and the bytes of one slot over the planes before each; the last entry is the
        total."""
        order = np.argsort(self.table[:, 0], kind="stable")
        return self.table[order, 0].tolist(), [0, *np.cumsum(self.table[order, 6]).tolist()]

    @cached_property
    def layer_range(self) -> tuple[int, int]:
        """[first, end) of the layers; some between may be missing."""
        layers = self.table[:, 0]
        return int(layers.min()), int(layers.max()) + 1

    @property
    def granule(self) -> int:
        """Slots that are allocated together: a page."""
        return self.page_size

    @overload
    def address(self, plane_index: int, slot: int) -> int: ...
    @overload
    def address(self, plane_index: int, slot: Int64s) -> Int64s: ...
    def address(self, plane_index: int, slot: int | Int64s) -> int | Int64s:
        """Where a slot's row starts. The caller has checked that 0 <= slot < slots."""
        plane = self.planes[plane_index]
        return plane.base + slot // self.page_size * plane.page_stride + slot % self.page_size * plane.row_stride

    def layers(self, first: int, end: int) -> Layout:
        """The planes of layers [first, end), a pipeline stage; LocalProtocolError if there are none."""
        return self._of([plane for plane in self.planes if first <= plane.layer < end], f"layers {first}..{end - 1}")

    def heads(self, first: int, end: int) -> Layout:
        """Heads [first, end) of every plane, a tensor-parallel slice; LocalProtocolError without one.

        A wide row is split at head boundaries: its base moves, row_bytes shrinks, the strides stay.
        """
        parts = [part for plane in self.planes for part in plane.heads(first, end)]
        return self._of(parts, f"heads {first}..{end - 1}")

    def rebase(self, delta: int) -> Layout:
        """The same bytes in another mapping, `delta` bytes further on; ValueError if a base leaves its bounds."""
        planes = tuple(msgspec.structs.replace(plane, base=plane.base + delta) for plane in self.planes)
        return Layout(planes, self.page_size, self.slots)

    def contiguous_buffers(self) -> tuple[Buffer, ...]:
        """The fewest ranges that hold every row of every plane: ascending, disjoint, none longer than its rows need.

        Planes that interleave share a range, with whatever lies between their rows. Planes that only touch stay apart,
        so that each has its own pages. layer_first has one a layer and kind, page_first and its like one a kind.
        Layouts whose pages keep their kinds apart have one a layer, or one in all.
        """
        order = np.argsort(self.table[:, 3])
        # Of planes that interleave, the last to begin is the last to end.
        starts, ends = self.table[order, 3], self.ends[order]
        first = np.flatnonzero(np.concatenate([[True], starts[1:] >= ends[:-1]]))
        starts, ends = starts[first], ends[np.append(first[1:], len(ends)) - 1]
        # Planes that interleave by pages share the stride, as Layout has checked.
        items = self.table[order[first], 4] if self.slots > self.page_size else ends - starts
        return tuple(map(Buffer, starts.tolist(), (ends - starts).tolist(), items.tolist()))

    def check_within(self, byte_count: int, where: str) -> None:
        """Raises ValueError, named by `where`, with the plane and both values, unless every row lies in [0,
        byte_count)."""
        if self.end > byte_count:
            index = int(self.ends.argmax())
            named = f"planes[{index}] (kind {self.planes[index].kind}, layer {self.planes[index].layer})"
            raise ValueError(f"{where}: {named} ends at byte {self.end}, of {byte_count}")

    def _of(self, planes: list[Plane], wanted: str) -> Layout:
        if not planes:
            first, end = self.layer_range
            raise LocalProtocolError(f"{wanted}: not among the {len(self.planes)} planes of layers {first}..{end - 1}")
        return Layout(tuple(planes), self.page_size, self.slots)


def _check_counts(layout: Layout) -> None:
    page_size, slots, count = layout.page_size, layout.slots, len(layout.planes)
    if not 1 <= page_size <= _PAGE_SIZE_MAX or page_size & (page_size - 1):
        raise ValueError(f"page_size: {page_size} is not a power of two of 1..{_PAGE_SIZE_MAX}")
    if not 1 <= slots <= _SLOTS_MAX or slots % page_size:
        raise ValueError(f"slots: {slots} is not a multiple of page_size {page_size} of 1..{_SLOTS_MAX}")
    if not 1 <= count <= PLANES_MAX:
        raise ValueError(f"planes: {count}, must be 1 to {PLANES_MAX}")


def _check_names(layout: Layout) -> None:
    dtypes, kinds = [plane.dtype for plane in layout.planes], [plane.kind for plane in layout.planes]
    for dtype in set(dtypes) - DTYPE_BYTES.keys():
        raise ValueError(f"planes[{dtypes.index(dtype)}].dtype: {dtype[:32]!r} must be one of {', '.join(DTYPE_BYTES)}")
    for kind in set(kinds):
        if not (1 <= len(kind) <= _KIND_LENGTH_MAX and kind.isascii() and kind.isprintable()):
            raise ValueError(f"planes[{kinds.index(kind)}].kind: {kind[:32]!r} is not 1..16 printable ASCII characters")


def _check_rows(layout: Layout) -> None:
    head_count, row_bytes = layout.table[:, 2], layout.table[:, 6]
    element = head_count * np.array([DTYPE_BYTES[plane.dtype] for plane in layout.planes])
    if (index := first_true(row_bytes % element != 0)) is not None:
        by = f"head_count {head_count[index]} x {layout.planes[index].dtype}, {element[index]} bytes"
        raise ValueError(f"planes[{index}].row_bytes: {row_bytes[index]} is not a multiple of {by}")


def _check_heads(layout: Layout) -> None:
    kinds = {plane.kind for plane in layout.planes}
    starts, ends = head_keys(layout, {kind: index for index, kind in enumerate(kinds)})
    order = np.argsort(starts)
    if (index := first_true(starts[order[1:]] < ends[order[:-1]])) is not None:
        two = int(order[index]), int(order[index + 1])
        named, planes = " and ".join(f"planes[{index}]" for index in two), [layout.planes[index] for index in two]
        heads = " and ".join(f"{plane.head_start}..{plane.head_start + plane.head_count - 1}" for plane in planes)
        raise ValueError(f"{named}: kind {planes[0].kind} layer {planes[0].layer} heads {heads} overlap")


def head_keys(layout: Layout, kinds: dict[str, int]) -> tuple[Int64s, Int64s]:
    """Each plane as an interval [start, end) in one numbering of all (kind, layer, head), in which no two layers
    touch."""
    kind = np.array([kinds[plane.kind] for plane in layout.planes])
    layer, head_start, head_count = layout.table.T[:3]
    starts = (kind << 33) + (layer << 17) + head_start
    return starts, starts + head_count


class Span(Struct, frozen=True, array_like=True):
    """Which tokens own a row: all of them, the last `tokens` ones (sliding window), or one row a request (state).

    Raises ValueError unless `tokens` is at least 1 for last, and 0 for the others.
    """

    kind: Literal["all", "last", "once"] = "all"
    tokens: Count32 = 0

    def __post_init__(self) -> None:
        bounds = {"all": (0, 0), "last": (1, 0xFFFF_FFFF), "once": (0, 0)}
        if self.kind not in bounds:
            raise ValueError(f"kind: {self.kind[:32]!r} must be one of {', '.join(bounds)}")
        low, high = bounds[self.kind]
        if not low <= self.tokens <= high:
            raise ValueError(f"tokens: {self.tokens} for kind {self.kind} is not in {low}..{high}")


class Component(Struct, frozen=True, array_like=True):
    """One part of a model's cache, with slots of its own: latent KV, a DSA index, C4 or C128 compressed KV, a state."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    memory: Literal["dram", "hbm"]
    tokens_per_row: Annotated[int, Meta(ge=1, le=0xFFFF)]
    span: Span
    layout: Layout

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= NAME_LENGTH_MAX:
            raise ValueError(f"name: {len(self.name)} characters are not 1..{NAME_LENGTH_MAX}")
        if self.memory not in ("dram", "hbm"):
            raise ValueError(f"memory: {self.memory[:32]!r} must be one of dram, hbm")
        if not 1 <= self.tokens_per_row <= 0xFFFF:
            raise ValueError(f"tokens_per_row: {self.tokens_per_row} is not in 1..65535")

    def rows(self, tokens: int) -> int:
        """Rows, and so slots, of a request of this many tokens."""
        match self.span.kind:
            case "all":
                return -(-tokens // self.tokens_per_row)
            case "last":
                return -(-min(tokens, self.span.tokens) // self.tokens_per_row)
            case "once":
                return min(tokens, 1)

    def bytes_of(self, rows: int) -> int:
        """Bytes of this many rows over all planes."""
        return rows * self.layout.row_bytes


Components = Annotated[tuple[Component, ...], Meta(max_length=COMPONENTS_MAX)]


def expand_pages(pages: ArrayLike, page_size: int, tokens: int) -> Int64s:
    """The slot of each of `tokens` tokens, int64 (tokens,), whose pages are `pages`, integers (n,), in order.

    Raises LocalProtocolError unless (n - 1) * page_size < tokens <= n * page_size: a silent clip would hide a page size
    that is not the pool's. It is raised as well for a negative count of tokens or page, and for slots beyond int64.
    """
    indices = integers("pages", pages)
    if page_size < 1 or page_size & (page_size - 1):
        raise LocalProtocolError(f"page_size: {page_size} is not a power of two")
    if tokens < 0 or not (len(indices) - 1) * page_size < tokens <= len(indices) * page_size:
        raise LocalProtocolError(f"tokens: {tokens} do not end in the last of {len(indices)} pages of {page_size}")
    limit = _INT64_MAX // page_size
    low, high = bounds_of(indices) if len(indices) else (0, 0)
    if low < 0 or high >= limit:
        index = first_true((indices < 0) | (indices >= limit))
        raise LocalProtocolError(f"pages[{index}]: {indices[index]} is not in 0..{limit - 1}")
    slots = indices.astype(np.int64)[:, None] * page_size + np.arange(page_size)
    return slots.reshape(-1)[:tokens]


def slots_of_rows(pages: ArrayLike, page_size: int, rows: tuple[int, int], *, skip: int = 0) -> Int64s:
    """The slots of rows [first, end) of a request, int64, whose pages from row 0 on are `pages`; there may be more.

    Row 0 is `skip` slots into the first page: a sliding window begins anywhere. Raises LocalProtocolError as
    expand_pages does, where a row has no page, for no rows, and for a skip of a whole page.
    """
    first, end = rows
    if not 0 <= first < end:
        raise LocalProtocolError(f"rows: [{first}, {end}) is empty")
    if not 0 <= skip < page_size:
        raise LocalProtocolError(f"skip: {skip} is not within a page of {page_size}")
    needed = -(-(skip + end) // page_size)
    return expand_pages(integers("pages", pages)[:needed], page_size, skip + end)[skip + first :]


def check_slots(slots: Int64s, limit: int, field: str) -> None:
    """Raises ValueError, named by `field`, for a slot outside [0, limit) or repeated; callers know whose fault."""
    if (index := first_true((slots < 0) | (slots >= limit))) is not None:
        raise ValueError(f"{field}: slot {slots[index]} is outside 0..{limit - 1}")
    ordered = np.sort(slots)
    if (index := first_true(ordered[1:] == ordered[:-1])) is not None:
        raise ValueError(f"{field}: slot {ordered[index]} is there twice")

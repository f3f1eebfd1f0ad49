"""Pools as the field allocates them: tensors of the real shapes, to hold every layout's table against.

They are numpy arrays whose elements have the width of the field's. A pool's tensor and its layout look at the same
bytes. Contents are hashed of (kind, layer, head, token, offset), so that no two planes, slots or offsets hold equal
rows: what lands in a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.layout.layout_builders import C4_PARTS, DSA_INDEX_PARTS, PagePart, host_layout, item_layout

Bytes = NDArray[np.uint8]
Slots = NDArray[np.int64]

CANARY = 0xEE
# Elements of the same width as the dtype's, as numpy has no bfloat16 and no float8.
ELEMENTS = {
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float8_e4m3": np.uint8,
    "uint8": np.uint8,
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What two pools must share to pair. `parts` is (kind, dtype, bytes of a head) of each kind."""

    parts: tuple[tuple[str, str, int], ...]
    layers: Sequence[int]
    heads: range
    page_align: int | None = None  # pages that keep their parts apart are multiples of it; None: a tensor a kind

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Every (kind, layer, head)."""
        for kind, _, _ in self.parts:
            for layer in self.layers:
                for head in self.heads:
                    yield kind, layer, head

    def item_bytes(self, page_size: int) -> int:
        """One layer's page, where pages keep their parts apart, with its padding."""
        assert self.page_align is not None
        return -(-page_size * sum(size for _, _, size in self.parts) // self.page_align) * self.page_align

    def head_bytes(self, kind: str) -> int:
        return next(size for name, _, size in self.parts if name == kind)


def mha(*, layers: range = range(3), heads: range = range(4), head_bytes: int = 16, dtype: str = "bfloat16") -> Model:
    return Model(parts=(("k", dtype, head_bytes), ("v", dtype, head_bytes)), layers=layers, heads=heads)


def mla(*, layers: range = range(3), head_bytes: int = 1_152, dtype: str = "bfloat16") -> Model:
    return Model(parts=(("latent", dtype, head_bytes),), layers=layers, heads=range(1))


def dsa_index(*, layers: range = range(3)) -> Model:
    return Model(parts=tuple(DSA_INDEX_PARTS), layers=layers, heads=range(1), page_align=1)


def c4(*, layers: range = range(3)) -> Model:
    return Model(parts=tuple(C4_PARTS), layers=layers, heads=range(1), page_align=576)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A tensor of `name`'s shape at `base` of its memory, read and written by the tensor's own indexing alone."""

    name: str
    model: Model
    page_size: int
    slots: int
    base: int = 0

    @cached_property
    def layout(self) -> Layout:
        """The table under test."""
        m, common = self.model, {"slots": self.slots, "page_size": self.page_size, "base": self.base}
        if m.page_align is not None:
            parts, item_bytes = [PagePart(*part) for part in m.parts], m.item_bytes(self.page_size)
            return item_layout(self.name, parts=parts, layers=m.layers, item_bytes=item_bytes, **common)
        kinds, (_, dtype, head_bytes) = [kind for kind, _, _ in m.parts], m.parts[0]
        return host_layout(
            self.name, kinds=kinds, layers=m.layers, heads=m.heads, head_bytes=head_bytes, dtype=dtype, **common
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """As DESIGN's table writes them; the head's axis is there also where it is 1, the kind's only for k and v."""
        m, pages = self.model, self.slots // self.page_size
        layers, heads = len(m.layers), len(m.heads)
        if m.page_align is not None:
            item_bytes = m.item_bytes(self.page_size)
            return {
                "layer_first": (layers, pages, item_bytes),
                "page_first": (pages, layers, item_bytes),
                "page_first_direct": (pages, layers, 1, item_bytes),
            }[self.name]
        dim = m.parts[0][2] // self.element.itemsize
        one = {
            "layer_first": (layers, self.slots, heads, dim),
            "page_first": (self.slots, layers, heads, dim),
            "page_first_direct": (pages, layers, self.page_size, heads, dim),
            "page_head": (pages, heads, self.page_size, layers, dim),
        }[self.name]
        return one if len(m.parts) == 1 else (len(m.parts), *one)

    @property
    def element(self) -> np.dtype[Any]:
        """What the tensor's axes count."""
        return np.dtype(np.uint8 if self.model.page_align is not None else ELEMENTS[self.model.parts[0][1]])

    @cached_property
    def memory(self) -> Bytes:
        """The whole mapping: `base` bytes that are not the pool's, the pool, and 64 bytes more."""
        byte_count = int(np.prod(self.shape)) * self.element.itemsize
        return np.full(self.base + byte_count + 64, CANARY, dtype=np.uint8)

    @cached_property
    def tensor(self) -> NDArray[Any]:
        return self.memory[self.base : -64].view(self.element).reshape(self.shape)

    def rows_of(self, kind: str) -> NDArray[Any]:
        """All rows of a kind, as a view (layers, heads, pages, page_size, elements) of the tensor."""
        m, t, size = self.model, self.tensor, self.page_size
        if m.page_align is not None:
            items = {
                "layer_first": lambda: t,
                "page_first": lambda: t.swapaxes(0, 1),
                "page_first_direct": lambda: t[:, :, 0].swapaxes(0, 1),
            }[self.name]()
            names, sizes = [part[0] for part in m.parts], [size * part[2] for part in m.parts]
            part = names.index(kind)
            rows = items[:, None, :, sum(sizes[:part]) : sum(sizes[: part + 1])]
            return rows.reshape(*rows.shape[:3], size, -1)
        if len(m.parts) > 1:
            t = t[[part[0] for part in m.parts].index(kind)]
        return {
            "layer_first": lambda: t.reshape(t.shape[0], -1, size, *t.shape[2:]).transpose(0, 3, 1, 2, 4),
            "page_first": lambda: t.reshape(-1, size, *t.shape[1:]).transpose(2, 3, 0, 1, 4),
            "page_first_direct": lambda: t.transpose(1, 3, 0, 2, 4),
            "page_head": lambda: t.transpose(3, 1, 0, 2, 4),
        }[self.name]()

    def view(self, kind: str, layer: int, head: int) -> NDArray[Any]:
        """All rows of one (kind, layer, head) by slot, as a view (pages, page_size, elements) of the tensor."""
        return self.rows_of(kind)[self.model.layers.index(layer), self.model.heads.index(head)]

    def read(self, kind: str, layer: int, head: int, slots: Slots) -> Bytes:
        """uint8 (n, head_bytes) by the tensor's indexing."""
        pages, rows = np.divmod(slots, self.page_size)
        return np.ascontiguousarray(self.view(kind, layer, head)[pages, rows]).view(np.uint8)

    def put(self, kind: str, layer: int, head: int, slots: Slots, rows: Bytes) -> None:
        """Writes uint8 (n, head_bytes) by the tensor's indexing."""
        self.view(kind, layer, head)[np.divmod(slots, self.page_size)] = rows.view(self.element)

    def fill(self, tokens: Slots) -> None:
        """Gives slot i the content of token tokens[i], by the tensor's indexing."""
        self.land(tokens, np.arange(self.slots))

    def land(self, tokens: Slots, slots: Slots) -> None:
        """Gives slot slots[i] the content of token tokens[i], by the tensor's indexing."""
        for kind, layer, head in self.model.rows():
            self.put(kind, layer, head, slots, content(kind, layer, head, tokens, self.model.head_bytes(kind)))

    def tensors(self) -> Iterator[NDArray[Any]]:
        """Those that engines allocate, each in one piece and of whole pages or slots."""
        whole = [self.tensor]
        if self.model.page_align is None and len(self.model.parts) > 1:
            whole = list(self.tensor)
        for tensor in whole:
            yield from tensor if self.name == "layer_first" else [tensor]


def content(kind: str, layer: int, head: int, tokens: Slots, byte_count: int) -> Bytes:
    """Hashed bytes of each token's row, uint8 (n, byte_count): splitmix64 of place and offset."""
    place = np.uint64(int.from_bytes(kind.encode()[:3].ljust(3), "little") << 40 | layer << 20 | head << 4)
    offsets = np.arange(-(-byte_count // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = _mixed(_mixed(tokens.astype(np.uint64) + place * np.uint64(0x9E3779B97F4A7C15))[:, None] + offsets)
    return np.ascontiguousarray(x).view(np.uint8)[:, :byte_count]


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def models() -> st.SearchStrategy[Model]:
    """Models of every row of DESIGN's table, small; a rank may hold any range of layers and heads."""
    ranges = st.builds(lambda first, count: range(first, first + count), st.integers(0, 40), st.integers(1, 4))
    head_bytes = st.sampled_from([4, 16, 24])
    dtypes = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3", "uint8"])
    return st.one_of(
        st.builds(mha, layers=ranges, heads=ranges, head_bytes=head_bytes, dtype=dtypes),
        st.builds(mla, layers=ranges, head_bytes=st.sampled_from([1_152, 656]), dtype=st.sampled_from(["bfloat16"])),
        st.builds(dsa_index, layers=ranges),
        st.builds(c4, layers=ranges),
    )


@st.composite
def pools(draw: Any, model: Model) -> Pool:
    """Any pool of this model: every layout that it has, any page size that it may have."""
    pages = draw(st.integers(1, 5))
    base = 64 * draw(st.integers(0, 3))
    if model.page_align is None:
        name = draw(st.sampled_from(["layer_first", "page_first", "page_first_direct", "page_head"]))
        page_size = 1 << draw(st.integers(0, 4))
    else:
        name = draw(st.sampled_from(["layer_first", "page_first", "page_first_direct"]))
        page_size = draw(st.sampled_from([1, 2, 4, 64]))
    return Pool(name=name, model=model, page_size=page_size, slots=pages * page_size, base=base)


def planes_of(layout: Layout) -> Iterator[tuple[int, str, int, Sequence[int]]]:
    """(plane index, kind, layer, heads) of every plane."""
    for index, plane in enumerate(layout.planes):
        yield index, plane.kind, plane.layer, range(plane.head_start, plane.head_start + plane.head_count)


def touched(layout: Layout) -> np.ndarray:
    """Every byte of every row, ascending."""
    slots = np.arange(layout.slots)
    rows = [
        layout.address(index, slots)[:, None] + np.arange(plane.row_bytes) for index, plane in enumerate(layout.planes)
    ]
    return np.sort(np.concatenate([row.ravel() for row in rows]))


def plane(**changed: Any) -> Plane:
    """One of 16 slots a page, back to back, unless `changed` says something else."""
    fields: dict[str, Any] = {
        "layer": 0, "kind": "k", "dtype": "bfloat16", "head_start": 0, "head_count": 2, "base": 0, "page_stride": 1024,
        "row_stride": 64, "row_bytes": 64,
    }  # fmt: skip
    return Plane(**(fields | changed))


def bytes_written(memory: np.ndarray) -> int:
    """How many bytes of a memory are not canaries."""
    return int(np.count_nonzero(memory != CANARY))

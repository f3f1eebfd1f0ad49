"""The KV rows of a component in a memory: filled from stamps, and summed as they lie there, in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ....layout.geometry import Int64s
from ....layout.layout import Layout, Plane
from .stamps import GOLDEN, Words, mixed

_TOGETHER = 1_024  # rows that are read at once: their bytes stay in the CPU's cache between two passes


@dataclass(frozen=True, slots=True, eq=False)
class _Plane:
    """What one plane's words are made of."""

    layer: int
    heads: slice  # among those of the component on this rank
    pattern: Words  # (heads, words of 8 bytes that cover a head)
    keys: Words  # (words of 4 bytes of a head,), odd

    def filled(self, stamps: Words) -> NDArray[np.uint32]:
        """The words of the rows with these stamps, (rows, heads, words of a head)."""
        words = stamps[:, None, None] ^ self.pattern
        words *= GOLDEN
        words ^= words >> np.uint64(29)
        return words.view(np.uint32)[..., : len(self.keys)]


class RowWords:
    """The words that rows of a component have by their stamps, without any memory. `name` and `seed` determine them;
    slots, pages, layouts and the division of heads among ranks do not."""

    def __init__(self, layout: Layout, name: str, seed: int) -> None:
        first = min(plane.head_start for plane in layout.planes)
        self.heads = max(plane.head_start + plane.head_count for plane in layout.planes) - first
        self.planes = [_plane(plane, first, name, seed) for plane in layout.planes]

    def sums(self, stamps: Words, layers: range | None = None) -> Words:
        """The sums of rows with these stamps, of these layers: uint64 (rows, heads)."""
        sums = np.zeros((len(stamps), self.heads), np.uint64)
        for first in range(0, len(stamps), _TOGETHER):
            part = slice(first, first + _TOGETHER)
            for plane in self.planes:
                if layers is None or plane.layer in layers:
                    sums[part, plane.heads] += np.dot(plane.filled(stamps[part]), plane.keys)
        return sums


class StampRows:
    """The rows that one memory holds of a component."""

    def __init__(self, memory: Any, layout: Layout, name: str, seed: int) -> None:
        """`memory` is a buffer of this process; the layout's bases are offsets into it."""
        pool_bytes = np.frombuffer(memory, np.uint8)
        words = pool_bytes[: len(pool_bytes) // 4 * 4].view(np.uint32)
        self._page_size, self.words = layout.page_size, RowWords(layout, name, seed)
        self.heads = self.words.heads
        self._planes = [
            (plane, _view(words, layout, plane_layout))
            for plane, plane_layout in zip(self.words.planes, layout.planes, strict=True)
        ]

    def write(self, slots: Int64s, stamps: Words) -> None:
        """Fills the rows of tokens with these stamps, in every plane."""
        pages, rows = np.divmod(slots, self._page_size)
        for plane, view in self._planes:
            view[pages, rows] = plane.filled(stamps)

    def sums(self, slots: Int64s, layers: range | None = None) -> Words:
        """The sums of the rows' bytes as they lie there, of these layers: uint64 (rows, heads)."""
        sums = np.zeros((len(slots), self.heads), np.uint64)
        for first in range(0, len(slots), _TOGETHER):
            part = slice(first, first + _TOGETHER)
            pages, rows = np.divmod(slots[part], self._page_size)
            for plane, view in self._planes:
                if layers is None or plane.layer in layers:
                    sums[part, plane.heads] += np.dot(view[pages, rows], plane.keys)
        return sums

    def wrong(self, slots: Int64s, stamps: Words) -> tuple[int, int] | None:
        """The index and the layer of a row whose bytes are not those of these stamps, or None."""
        pages, rows = np.divmod(slots, self._page_size)
        for plane, view in self._planes:
            differs = (view[pages, rows] != plane.filled(stamps)).any((1, 2))
            if differs.any():
                return int(differs.argmax()), plane.layer
        return None


def _view(words: NDArray[np.uint32], layout: Layout, plane: Plane) -> NDArray[np.uint32]:
    """The plane in memory, (pages, page_size, heads, words of a head)."""
    sizes = plane.base, plane.page_stride, plane.row_stride, plane.head_bytes
    assert not any(size % 4 for size in sizes), f"{plane}: rows consist of whole words"
    return as_strided(
        words[plane.base // 4 :],
        (layout.slots // layout.page_size, layout.page_size, plane.head_count, plane.head_bytes // 4),
        (plane.page_stride, plane.row_stride, plane.head_bytes, 4),
    )


def _plane(plane: Plane, first: int, name: str, seed: int) -> _Plane:
    counts = np.arange(1, plane.head_bytes // 4 + 1, dtype=np.uint64) * GOLDEN
    of_heads = [
        mixed(counts[: -(-len(counts) // 2)] + _seed(seed, name, plane.kind, plane.layer, head))
        for head in range(plane.head_start, plane.head_start + plane.head_count)
    ]
    keys = mixed(counts + _seed(seed, name, plane.kind, plane.layer, "keys")) | np.uint64(1)
    first_head = plane.head_start - first
    return _Plane(plane.layer, slice(first_head, first_head + plane.head_count), np.stack(of_heads), keys)


def _seed(*names: object) -> np.uint64:
    digest = blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))

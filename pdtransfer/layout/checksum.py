"""The checksum of KV: XXH64 of every head's bytes in every row, seeded by their identity, summed mod 2**64.

It depends on component, kind, layer, head, row of the room, and the bytes. It does not depend on layout, page size or
slots, nor on how heads, layers and rows are split between ranks. proto/v1 defines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .geometry import Int64s, read_only
from .layout import Layout

CHECKSUM_BYTES = 8  # little-endian
MASK = (1 << 64) - 1

Words = NDArray[np.uint64]

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_STRIPE = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """Where some heads of a component lie, and the seeds of their hashes.

    `table` is read-only int64 (n, 6), ascending by base: base, page_stride, row_stride, heads, bytes of a head, and an
    index in `seeds`, uint64 (heads,). There those of its heads begin. Where page_size is 1, the strides are equal.
    """

    table: Int64s
    seeds: Words
    page_size: int
    slots: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one slot over all lines."""
        return int((self.table[:, 3] * self.table[:, 4]).sum())

    @cached_property
    def woven(self) -> bool:
        """True if the lines of a slot are adjacent, so that rows are read in one piece."""
        return len(self.table) > 1 and int(self.table[1, 0] - self.table[0, 0]) < int(self.table[0, 2])


def lines_of(name: str, layout: Layout, *, layers: tuple[int, int] | None = None, like: Layout | None = None) -> Lines:
    """The heads of component `name` in `layout` within layers [first, end), and within `like`, if given."""
    counts = layout.table[:, 2]
    plane = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(plane)) - np.repeat(np.cumsum(counts) - counts, counts)
    layer, head = layout.table[plane, 0], layout.table[plane, 1] + within
    kinds = sorted({plane.kind for side in (layout, like or layout) for plane in side.planes})
    wanted = np.ones(len(plane), dtype=np.bool_)
    if layers is not None:
        wanted &= (layer >= layers[0]) & (layer < layers[1])
    if like is not None:
        wanted &= np.isin(_keys(layout, kinds), _keys(like, kinds))
    order = np.flatnonzero(wanted)
    order = order[np.argsort(layout.table[plane[order], 3], kind="stable")]
    seeds = _seeds(name, kinds, _kind_of(layout, kinds)[plane[order]], layer[order], head[order])
    plane, within = plane[order], within[order]
    opens = np.ones(len(order), dtype=np.bool_)
    opens[1:] = (plane[1:] != plane[:-1]) | (within[1:] != within[:-1] + 1)
    first = np.flatnonzero(opens)
    _, _, count, base, page_stride, row_stride, row_bytes = layout.table[plane[first]].T
    table = np.empty((len(first), 6), dtype=np.int64)
    table[:, 4] = row_bytes // count
    table[:, 0] = base + within[first] * table[:, 4]
    table[:, 1] = page_stride
    table[:, 2] = page_stride if layout.page_size == 1 else row_stride
    table[:, 3] = np.diff(first, append=len(order))
    table[:, 5] = first
    return Lines(table=read_only(table), seeds=seeds, page_size=layout.page_size, slots=layout.slots)


def runs_of(slots: Int64s, counts: Int64s, first_row: int) -> Int64s:
    """Runs of slots that hold rows first_row, first_row + 1, ... as int64 (n, 3): slot, row, count."""
    runs = np.empty((len(slots), 3), dtype=np.int64)
    runs[:, 0], runs[:, 2] = slots, counts
    runs[:, 1] = first_row + np.cumsum(counts) - counts
    return runs


def hashes(rows: NDArray[np.uint8], seeds: Words) -> Words:
    """XXH64 of each row of uint8 (n, byte_count), each under its own seed, uint64 (n,)."""
    count, byte_count = rows.shape
    whole = byte_count - byte_count % _STRIPE
    if whole:
        lanes = [seeds + _P1 + _P2, seeds + _P2, seeds, seeds - _P1]
        stripes = np.ascontiguousarray(rows[:, :whole]).view("<u8").reshape(count, -1, 4)
        for stripe in range(whole // _STRIPE):
            lanes = [_round(lane, stripes[:, stripe, index]) for index, lane in enumerate(lanes)]
        digest = sum((_rotl(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)), np.zeros_like(seeds))
        for lane in lanes:
            digest = (digest ^ _round(np.zeros_like(lane), lane)) * _P1 + _P4
    else:
        digest = seeds + _P5
    digest = digest + np.uint64(byte_count)
    return _finished(digest, rows[:, whole:])


def hash_of(text: bytes, seed: int = 0) -> int:
    """XXH64 of a byte string."""
    return int(hashes(np.frombuffer(text, np.uint8)[None], np.array([seed], np.uint64))[0])


def row_seeds(head_seed: int, rows: Int64s) -> Words:
    """The seeds of one head's hashes in these rows of the room."""
    return _of_words(rows.astype(np.uint64), np.full(len(rows), head_seed, np.uint64))


def _seeds(name: str, kinds: list[str], kind: Int64s, layer: Int64s, head: Int64s) -> Words:
    """The head seeds: XXH64 of layer and head, seeded by that of the kind, seeded by that of the name."""
    of_name = hash_of(name.encode())
    of_kinds = np.array([hash_of(kind_name.encode(), of_name) for kind_name in kinds], np.uint64)
    return _of_words(layer.astype(np.uint64) | (head.astype(np.uint64) << np.uint64(32)), of_kinds[kind])


def _kind_of(layout: Layout, kinds: list[str]) -> Int64s:
    return np.array([kinds.index(plane.kind) for plane in layout.planes])


def _keys(layout: Layout, kinds: list[str]) -> Int64s:
    """One number for each head of each plane, in their order: its kind, layer and head."""
    counts = layout.table[:, 2]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat((_kind_of(layout, kinds) << 33) + (layout.table[:, 0] << 17) + layout.table[:, 1], counts) + within


def _of_words(words: Words, seeds: Words) -> Words:
    """XXH64 of one little-endian u64 each."""
    return _avalanche(_rotl((seeds + _P5 + np.uint64(8)) ^ _round(np.zeros_like(words), words), 27) * _P1 + _P4)


def _finished(digest: Words, tail: NDArray[np.uint8]) -> Words:
    end = 0
    for end in range(8, tail.shape[1] + 1, 8):
        word = np.ascontiguousarray(tail[:, end - 8 : end]).view("<u8")[:, 0]
        digest = _rotl(digest ^ _round(np.zeros_like(word), word), 27) * _P1 + _P4
    if tail.shape[1] - end >= 4:
        half = np.ascontiguousarray(tail[:, end : end + 4]).view("<u4")[:, 0].astype(np.uint64)
        digest, end = _rotl(digest ^ (half * _P1), 23) * _P2 + _P3, end + 4
    for byte in range(end, tail.shape[1]):
        digest = _rotl(digest ^ (tail[:, byte].astype(np.uint64) * _P5), 11) * _P1
    return _avalanche(digest)


def _rotl(value: Words, by: int) -> Words:
    return (value << np.uint64(by)) | (value >> np.uint64(64 - by))


def _round(lane: Words, word: Words) -> Words:
    return _rotl(lane + word * _P2, 31) * _P1


def _avalanche(digest: Words) -> Words:
    digest = (digest ^ (digest >> np.uint64(33))) * _P2
    digest = (digest ^ (digest >> np.uint64(29))) * _P3
    return digest ^ (digest >> np.uint64(32))

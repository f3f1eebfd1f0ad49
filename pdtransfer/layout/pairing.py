"""Pairs of planes, source and target, for two layouts of one model: the input of plans, copies and kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import LayoutMismatchError
from . import geometry
from .geometry import Int64s, read_only
from .layout import Layout, head_keys
from .mismatch import Held, differences


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairing:
    """Where each plane's rows come from and go to, for two layouts that hold the same model.

    `table` is read-only int64 (n, 7), ascending by target_base: source_base, source_page_stride, source_row_stride,
    target_base, target_page_stride, target_row_stride, bytes of a row. `layers` is each row's layer, int64 (n,). A
    row of either side lies at base + (slot // page_size) * page_stride + (slot % page_size) * row_stride.

    Slots of a side may lie at one stride in every plane: page size 1, one page, or pages without a gap. Such a side has
    page_size 1 here and page_stride == row_stride, whatever its layout's. So n consecutive slots that cross no page of
    a side are n rows at its row_stride, and a side of page_size 1 has no page to cross.
    """

    table: Int64s
    layers: Int64s
    source_page_size: int
    target_page_size: int
    source_slots: int
    target_slots: int

    def within_layers(self, first: int, end: int) -> Pairing:
        """The planes of layers [first, end), possibly none."""
        inside = (self.layers >= first) & (self.layers < end)
        return replace(self, table=read_only(self.table[inside]), layers=read_only(self.layers[inside]))

    def fused(self) -> Pairing:
        """The same bytes with planes joined that are neighbours in source and target alike.

        Pools that are both page_first become one wide plane a kind. `layers` then names the lowest layer of each.
        """
        width = self.table[:, 6]
        behind = self.table[:-1, :6].copy()
        behind[:, [0, 3]] += width[:-1, None]
        opens = np.ones(len(width), dtype=np.bool_)
        opens[1:] = (self.table[1:, :6] != behind).any(axis=1)
        if opens.all():
            return self
        table = self.table[opens]
        table[:, 6] = np.add.reduceat(width, np.flatnonzero(opens))
        layers = np.minimum.reduceat(self.layers, np.flatnonzero(opens))
        return replace(self, table=read_only(table), layers=read_only(layers))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one slot over all pairs."""
        return int(self.table[:, 6].sum())


def pair(source: Layout, target: Layout) -> Pairing:
    """Pairs two layouts plane by plane on (kind, layer), wide rows split at the other side's head boundaries.

    Both must hold the same (kind, layer, head) set, with equal dtype and bytes a head; page sizes, slots and strides
    are each side's own. Raises LayoutMismatchError, whose `differences` lists every field that differs.
    """
    names = {plane.kind for side in (source, target) for plane in side.planes}
    kinds = {kind: index for index, kind in enumerate(names)}
    source_keys, target_keys = head_keys(source, kinds), head_keys(target, kinds)
    cuts = geometry.distinct(np.concatenate((*source_keys, *target_keys)))
    ours, theirs = geometry.holder_of(cuts[:-1], *source_keys), geometry.holder_of(cuts[:-1], *target_keys)
    common = ours >= 0
    if not np.array_equal(common, theirs >= 0):
        raise _mismatch(source, target)
    ours, theirs, starts = ours[common], theirs[common], cuts[:-1][common]
    head_bytes = [side.table[:, 6] // side.table[:, 2] for side in (source, target)]
    dtypes = [np.array([plane.dtype for plane in side.planes]) for side in (source, target)]
    if ((head_bytes[0][ours] != head_bytes[1][theirs]) | (dtypes[0][ours] != dtypes[1][theirs])).any():
        raise _mismatch(source, target)
    source_page_size, source_strides = _strides(source)
    target_page_size, target_strides = _strides(target)
    per_head = head_bytes[0][ours]
    columns = (
        (source.table[ours, 3] + (starts - source_keys[0][ours]) * per_head)[:, None], source_strides[ours],
        (target.table[theirs, 3] + (starts - target_keys[0][theirs]) * per_head)[:, None], target_strides[theirs],
        ((cuts[1:] - cuts[:-1])[common] * per_head)[:, None],
    )  # fmt: skip
    table = np.concatenate(columns, axis=1)
    order = np.argsort(table[:, 3], kind="stable")
    return Pairing(
        table=read_only(table[order]),
        layers=read_only(source.table[ours, 0][order]),
        source_page_size=source_page_size,
        target_page_size=target_page_size,
        source_slots=source.slots,
        target_slots=target.slots,
    )


def _strides(layout: Layout) -> tuple[int, Int64s]:
    """A pairing's page size and (page_stride, row_stride), int64 (planes, 2), for one side."""
    page_stride, row_stride = layout.table[:, 4], layout.table[:, 5]
    if layout.page_size == 1:
        return 1, np.stack((page_stride, page_stride), axis=1)
    if layout.slots == layout.page_size or np.array_equal(page_stride, layout.page_size * row_stride):
        return 1, np.stack((row_stride, row_stride), axis=1)
    return layout.page_size, np.stack((page_stride, row_stride), axis=1)


def _mismatch(source: Layout, target: Layout) -> LayoutMismatchError:
    def planes_of(layout: Layout) -> list[Held]:
        planes = layout.planes
        return [Held(p.kind, p.layer, p.head_start, p.head_start + p.head_count, p.dtype, p.head_bytes) for p in planes]

    return LayoutMismatchError(differences(planes_of(source), planes_of(target)))

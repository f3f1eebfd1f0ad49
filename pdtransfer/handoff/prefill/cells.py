"""What prefill's engine offers: a room's cells, each checked once, where the engine can still be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import Cause, LocalProtocolError
from ...layout.geometry import bounds_of
from ...layout.layout import Component
from ..ready_gate import Gate
from ..room import PrefillRoom
from ..slot_allocator import ExtentSet
from .writer_grants import DutyEntry


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows [first_row, first_row + len(source_slots)) of layers [first, end) of one component, which may be read once
    `after` is open."""

    component: str
    first_row: int
    layers: tuple[int, int]
    source_slots: NDArray[np.int64]
    after: Gate | None = None


@dataclass(slots=True, eq=False)
class Room:
    """One request on the prefill side."""

    id: int
    tokens: int
    grants: int  # how many decode ranks will grant
    peers: frozenset[str] | None  # who they are; None: whoever knows the label
    deadline: float
    state: PrefillRoom = PrefillRoom.OPEN
    cells: list[Cell] = field(default_factory=list[Cell])
    duties: list[DutyEntry] = field(default_factory=list[DutyEntry])
    aux: bytes = b""
    cause: Cause = Cause.REFUSED
    detail: str = ""
    _offered: dict[tuple[str, int, int], ExtentSet] = field(default_factory=dict[tuple[str, int, int], ExtentSet])

    def offer(self, cell: Cell, components: Mapping[str, Component]) -> None:
        """Keeps a cell. LocalProtocolError where it lies outside the room or the pool, or was offered already."""
        component = components.get(cell.component)
        if component is None:
            raise LocalProtocolError(f"component: {cell.component!r} is none of {sorted(components)}")
        end_row, rows = cell.first_row + len(cell.source_slots), component.rows(self.tokens)
        if not 0 <= cell.first_row < end_row <= rows:
            raise LocalProtocolError(f"rows: [{cell.first_row}, {end_row}) of a room of {rows}")
        first, end = component.layout.layer_range
        if not first <= cell.layers[0] < cell.layers[1] <= end:
            raise LocalProtocolError(f"layers: {list(cell.layers)} of [{first}, {end})")
        low, high = bounds_of(cell.source_slots)
        if low < 0 or high >= component.layout.slots:
            raise LocalProtocolError(f"slots: {low}..{high} of a pool of {component.layout.slots}")
        for (name, other_first, other_end), offered in self._offered.items():
            apart = other_end <= cell.layers[0] or cell.layers[1] <= other_first
            if name == cell.component and not apart and offered.overlaps_run(cell.first_row, end_row - cell.first_row):
                raise LocalProtocolError(f"cell: rows [{cell.first_row}, {end_row}) were offered already")
        key = cell.component, *cell.layers
        if (offered := self._offered.get(key)) is None:
            offered = self._offered[key] = ExtentSet()
        offered.add_run(cell.first_row, end_row - cell.first_row)
        self.cells.append(cell)

"""Joins an engine's cells into larger writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from ...handoff.ready_gate import AllEvents
from ...layout.cell_sizes import is_full
from ...layout.layout import Component, Layout
from ..engine_api import Broken, Computed, Event, Prefilled

Outcome: TypeAlias = Computed | Prefilled | Broken


class Batching(Protocol):
    """Passes on an engine's outcomes. Other outcomes of a room never overtake its cells."""

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Takes outcomes of the engine; returns those to pass on now."""
        ...

    def drop(self, room: int) -> None:
        """Drops the room's cells. Unknown rooms are ignored."""
        ...


class CellBatcher:
    """Batching in order: joins the layers of a chunk by the sizes of layout.cell_sizes."""

    def __init__(self, components: Sequence[Component]) -> None:
        self._layouts = {component.name: component.layout for component in components}
        self._held: dict[int, list[Computed]] = {}  # by room, in order

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        passed: list[Outcome] = []
        for outcome in outcomes:
            if isinstance(outcome, Computed):
                self._add(outcome)
                passed += self._ripe(outcome.room)
            else:
                passed += self._held.pop(outcome.room, ())
                passed.append(outcome)
        return passed

    def drop(self, room: int) -> None:
        self._held.pop(room, None)

    def _add(self, cell: Computed) -> None:
        """Joins the cell to the last one of its component if both make one cell."""
        cells = self._held.setdefault(cell.room, [])
        index = next(
            (index for index in range(len(cells) - 1, -1, -1) if cells[index].component == cell.component), None
        )
        if index is not None and (both := joined(cells[index], cell, self._layouts[cell.component])) is not None:
            cells[index] = both
        else:
            cells.append(cell)

    def _ripe(self, room: int) -> list[Computed]:
        """Returns the cells that have reached their size, and those that no later cell can join."""
        cells = self._held[room]
        last = {cell.component: cell for cell in cells}
        ripe, kept = list[Computed](), list[Computed]()
        for cell in cells:
            (ripe if cell is not last[cell.component] or self._full(cell) else kept).append(cell)
        self._held[room] = kept
        return ripe

    def _full(self, cell: Computed) -> bool:
        """True if the cell is large enough, or as large as what its chunk has left."""
        return is_full(self._layouts[cell.component], cell.layers, cell.rows[1] - cell.rows[0])


def joined(cell: Computed, later: Computed, layout: Layout) -> Computed | None:
    """Joins cells of the same rows if the component has no layer between theirs; else None."""
    end, first = cell.layers[1], later.layers[0]
    if cell.rows != later.rows or cell.skip != later.skip or end > first or layout.row_bytes_of(end, first):
        return None
    return replace(later, layers=(cell.layers[0], later.layers[1]), after=both(cell.after, later.after))


def both(first: Event | None, second: Event | None) -> Event | None:
    """The event of a cell joined from two; `first` belongs to no other cell any more."""
    if first is None or second is None:
        return first or second
    every = first if isinstance(first, AllEvents) else AllEvents((first,))
    every.add(second)
    return every

"""Other ways in which cells may leave, to compare with the daemons' own: each layer by itself, or the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdtransfer.layout.layout import Component
from pdtransfer.serve.engine_api import Computed
from pdtransfer.serve.worker.cell_batching import Outcome, both, joined


class ByLayer:
    """Batching that joins nothing."""

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        return list(outcomes)

    def drop(self, room: int) -> None:
        pass


class AtEnd:
    """Batching that keeps every cell until its room is computed, and joins layers and chunks."""

    def __init__(self, components: Sequence[Component]) -> None:
        self._layouts = {component.name: component.layout for component in components}
        self._held: dict[int, list[Computed]] = {}  # by room, in order

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        passed: list[Outcome] = []
        for outcome in outcomes:
            if isinstance(outcome, Computed):
                self._add(outcome)
            else:
                passed += [*self._held.pop(outcome.room, ()), outcome]
        return passed

    def drop(self, room: int) -> None:
        self._held.pop(room, None)

    def _add(self, cell: Computed) -> None:
        """Joins the cell to the latest one of its component if both make one, and that one to the chunk before."""
        cells = self._held.setdefault(cell.room, [])
        same = [index for index, other in enumerate(cells) if other.component == cell.component]
        if same and (whole := joined(cells[same[-1]], cell, self._layouts[cell.component])) is not None:
            cells[same[-1]] = cell = whole
        else:
            cells.append(cell)
            same.append(len(cells) - 1)
        if len(same) > 1 and _follows(before := cells[same[-2]], cell):
            rows = before.rows[0], cell.rows[1]
            cells[same[-2]] = replace(cell, rows=rows, after=both(before.after, cell.after))
            del cells[same[-1]]


def _follows(cell: Computed, later: Computed) -> bool:
    """Whether `later` continues where `cell` ends, in the same pages."""
    return cell.layers == later.layers and cell.skip == later.skip and cell.rows[1] == later.rows[0]

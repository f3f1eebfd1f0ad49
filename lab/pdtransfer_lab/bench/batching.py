"""Other ways in which cells may leave, to compare with the daemons' own: each layer by itself, or the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdtransfer.serve.engine_api import Computed
from pdtransfer.serve.worker.cell_batching import CellBatcher, Outcome, both


class ByLayer:
    """Batching that joins nothing."""

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        return list(outcomes)

    def drop(self, room: int) -> None:
        pass


class AtEnd(CellBatcher):
    """Batching that keeps every cell until its room is computed, and joins layers and chunks."""

    def _ripe(self, room: int) -> list[Computed]:
        del room
        return []

    def _add(self, cell: Computed) -> None:
        """Joins the cell to its chunk, and the chunk to the one before."""
        super()._add(cell)
        cells = self._held[cell.room]
        same = [index for index, other in enumerate(cells) if other.component == cell.component]
        if len(same) > 1 and _follows(before := cells[same[-2]], whole := cells[same[-1]]):
            rows = before.rows[0], whole.rows[1]
            cells[same[-2]] = replace(whole, rows=rows, after=both(before.after, whole.after))
            del cells[same[-1]]


def _follows(cell: Computed, later: Computed) -> bool:
    """True if `later` continues where `cell` ends, in the same pages."""
    return cell.layers == later.layers and cell.skip == later.skip and cell.rows[1] == later.rows[0]

"""How much of a prompt leaves at a time: an engine's cells, put together as they come.

Each write costs its loops and its card some tenths of a millisecond, whatever its bytes; what leaves last is what
decode waits for when prefill has ended. So cells are as large as is cheap, and get smaller towards a chunk's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from ..engine_api import Broken, Computed, Event, Prefilled
from ..layout.layout import Component, Layout

Push: TypeAlias = Literal["auto", "layers", "end"]

WHOLE_BYTES_MAX = 16 << 20  # a chunk of no more leaves in one cell: it crosses in less than half a millisecond
CELL_BYTES_MIN = 8 << 20  # of a larger chunk, as long as as much is still to come: from here on the copy engine is used

Outcome: TypeAlias = Computed | Prefilled | Broken


class Every:
    """Fires once all of these have."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = deque(events)

    def add(self, event: Event) -> None:
        """One more. Side by side, not one within the other: of a long prompt there are thousands."""
        self._events.extend(event.events if isinstance(event, Every) else (event,))

    @property
    def events(self) -> Sequence[Event]:
        """Those that have not been seen to fire, in order."""
        return self._events

    def query(self) -> bool:
        while self._events and self._events[0].query():
            self._events.popleft()
        return not self._events


class Offers:
    """What an engine's steps say, in its order, but that neighbouring cells become one.

    `layers` changes nothing. `auto` puts the layers of a chunk together by the sizes above. `end` keeps every cell
    until its room is computed, and puts chunks together as well. What is said of a room never overtakes its cells.
    """

    def __init__(self, components: Sequence[Component], push: Push) -> None:
        self._layouts = {component.name: component.layout for component in components}
        self._push: Push = push
        self._held: dict[int, list[Computed]] = {}  # by room, in order

    def take(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """What is to be said now."""
        if self._push == "layers":
            return list(outcomes)
        said: list[Outcome] = []
        for outcome in outcomes:
            if isinstance(outcome, Computed):
                self._add(outcome)
                if self._push == "auto":
                    said += self._ripe(outcome.room)
            else:
                said += self._let(outcome.room)
                said.append(outcome)
        return said

    def drop(self, room: int) -> None:
        """Its cells need not leave any more. Unknown rooms are ignored."""
        self._held.pop(room, None)

    def _add(self, cell: Computed) -> None:
        """Joins it to the last one of its component where both make one cell."""
        held = self._held.setdefault(cell.room, [])
        at = next((at for at in range(len(held) - 1, -1, -1) if held[at].component == cell.component), None)
        if at is not None and (both := _joined(held[at], cell, self._layouts[cell.component])) is not None:
            held[at] = both
        else:
            held.append(cell)

    def _ripe(self, room: int) -> list[Computed]:
        """Those that have come to their size, and those that no later cell can join."""
        held = self._held[room]
        last = {cell.component: cell for cell in held}
        ripe, kept = list[Computed](), list[Computed]()
        for cell in held:
            (ripe if cell is not last[cell.component] or self._full(cell) else kept).append(cell)
        self._held[room] = kept
        return ripe

    def _full(self, cell: Computed) -> bool:
        """Whether it is as large as is wanted, or as what its chunk has left behind it."""
        layout, rows = self._layouts[cell.component], cell.rows[1] - cell.rows[0]
        left = rows * layout.row_bytes_of(cell.layers[1], layout.layer_range[1])
        if not left or rows * layout.row_bytes <= WHOLE_BYTES_MAX:
            return not left
        return rows * layout.row_bytes_of(*cell.layers) >= min(CELL_BYTES_MIN, left)

    def _let(self, room: int) -> list[Computed]:
        """All that is held of a room, chunks that follow one another in one cell."""
        whole: list[Computed] = []
        for cell in self._held.pop(room, ()):
            before = next((at for at, other in enumerate(whole) if _follows(other, cell)), None)
            if before is None:
                whole.append(cell)
            else:
                rows = whole[before].rows[0], cell.rows[1]
                whole[before] = replace(cell, rows=rows, after=_both(whole[before].after, cell.after))
        return whole


def _joined(cell: Computed, later: Computed, layout: Layout) -> Computed | None:
    """Both in one, where they are of the same rows and no layer that the component has lies between theirs."""
    end, first = cell.layers[1], later.layers[0]
    if cell.rows != later.rows or cell.skip != later.skip or end > first or layout.row_bytes_of(end, first):
        return None
    return replace(later, layers=(cell.layers[0], later.layers[1]), after=_both(cell.after, later.after))


def _follows(cell: Computed, later: Computed) -> bool:
    """Whether `later` goes on where `cell` ends, in the same pages."""
    same = cell.component == later.component and cell.layers == later.layers and cell.skip == later.skip
    return same and cell.rows[1] == later.rows[0]


def _both(first: Event | None, second: Event | None) -> Event | None:
    """What the cell that is made of two waits for; `first` is no other cell's any more."""
    if first is None or second is None:
        return first or second
    every = first if isinstance(first, Every) else Every((first,))
    every.add(second)
    return every

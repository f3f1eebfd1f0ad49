"""What a write waits for before it may read its rows: an event of the engine's, or several."""

from __future__ import annotations

from ..engine_api import Event
from ..worker.cell_batching import Every


class Gate:
    """Shared by the writes of a cell, whichever threads carry them out. It opens once, and stays open."""

    __slots__ = ("_events", "_handles", "_passed", "broken", "event", "opened_ns")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.opened_ns = 0  # CLOCK_MONOTONIC of when somebody has seen it open
        self.broken = ""  # why it never opens
        # A handle is good as long as its event is there.
        self._events = tuple(event.events) if isinstance(event, Every) else (event,)
        handles = [int(getattr(each, "cuda_event", 0)) for each in self._events]
        self._handles = handles if all(handles) else []
        self._passed = 0

    @property
    def next(self) -> tuple[int, int] | None:
        """The CUDA event that it waits for, its number and its handle; None once it is open, or where none is."""
        at = self._passed
        return (at, self._handles[at]) if at < len(self._handles) else None

    @property
    def nearly(self) -> bool:
        """Whether the last of its CUDA events is all that it waits for, or it is open."""
        return self._passed >= len(self._handles) - 1

    def fired(self, number: int, now_ns: int) -> None:
        """A card has passed the CUDA event of this number; said twice it is as good."""
        if number + 1 == len(self._handles):  # before `next` has no more: whoever finds it so may go
            self.opened_ns = self.opened_ns or now_ns
        self._passed = number + 1

    def asked(self, now_ns: int) -> bool:
        """Asks the event, on the loop; it may raise whatever library it is of. Whether it is open."""
        if not self.opened_ns and self.event.query():
            self.opened_ns = now_ns
        return bool(self.opened_ns)

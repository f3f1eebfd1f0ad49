"""The gate that a write waits for before it may read its rows: one event of the engine, or several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .events import Event


class AllEvents:
    """Fires once all of its events have."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = deque(events)

    def add(self, event: Event) -> None:
        """Adds an event. Several are flattened: a long prompt has thousands, too many to nest."""
        self._events.extend(event.events if isinstance(event, AllEvents) else (event,))

    @property
    def events(self) -> Sequence[Event]:
        """The events that are not yet known to have fired, in order."""
        return self._events

    def query(self) -> bool:
        while self._events and self._events[0].query():
            self._events.popleft()
        return not self._events


class ReadyGate:
    """Shared by the writes of a cell, on whichever threads they run. It opens once and stays open."""

    __slots__ = ("_events", "_handles", "_passed", "broken", "event", "opened_ns")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.opened_ns = 0  # CLOCK_MONOTONIC of when it was first seen open
        self.broken = ""  # the reason why it never opens
        # A handle is valid as long as its event exists.
        self._events = tuple(event.events) if isinstance(event, AllEvents) else (event,)
        handles = [int(getattr(event, "cuda_event", 0)) for event in self._events]
        self._handles = handles if all(handles) else []
        self._passed = 0

    @property
    def next(self) -> tuple[int, int] | None:
        """The number and the handle of the CUDA event that it waits for; None once it is open, or without CUDA
        events."""
        number = self._passed
        return (number, self._handles[number]) if number < len(self._handles) else None

    @property
    def nearly(self) -> bool:
        """True if at most the last of its CUDA events is missing."""
        return self._passed >= len(self._handles) - 1

    def fired(self, number: int, now_ns: int) -> None:
        """A GPU has passed the CUDA event of this number; repeats are harmless."""
        if number + 1 == len(self._handles):  # before `next` returns None, which lets other threads proceed
            self.opened_ns = self.opened_ns or now_ns
        self._passed = number + 1

    def poll(self, now_ns: int) -> bool:
        """Queries the event, on the loop; returns whether the gate is open. May raise any error of the event's
        library."""
        if not self.opened_ns and self.event.query():
            self.opened_ns = now_ns
        return bool(self.opened_ns)

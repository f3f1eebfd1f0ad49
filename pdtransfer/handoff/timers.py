"""Deadlines and repetitions in one heap, on the caller's clock, and the back-off between repetitions."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeAlias, TypeVar

Key = TypeVar("Key", bound=Hashable)

TimerKey: TypeAlias = tuple[str, str | int, int]
"""What is due: the timer's kind, then a peer, session or room, and a grant's number or 0."""


def backoff_ms(last_ms: int, first_ms: int, max_ms: int) -> int:
    """The delay that follows `last_ms`: `first_ms` after 0, then doubled, up to `max_ms`."""
    return min(max(2 * last_ms, first_ms), max_ms)


class Timers(Generic[Key]):
    """At most one time for each key; a second `set` moves it.

    Stale entries stay in the heap until their time, or until they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._live: dict[Key, int] = {}  # the serial of the valid entry
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0  # orders equal times by age; keys are never compared

    def set(self, key: Key, when: float) -> None:
        """Schedules `key` at `when`, in place of an earlier time."""
        self._serial += 1
        self._live[key] = self._serial
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (when, self._serial, key))

    def clear(self, key: Key) -> None:
        """Removes `key`; unknown keys are ignored."""
        self._live.pop(key, None)

    def next(self) -> float | None:
        """When the next key is due; None without one."""
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Key | None:
        """Removes and returns the earliest due key. One at a time, since acting on it may clear others."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._live[key]
        return key

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def __len__(self) -> int:
        return len(self._live)

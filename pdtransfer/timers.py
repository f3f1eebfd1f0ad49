"""Deadlines and repetitions in one heap; the caller's clock is the only one."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """At most one time a key; setting it again moves it.

    Stale entries stay in the heap until their time, or until they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._when: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0  # orders equal times by age, and keeps keys from being compared

    def set(self, key: Key, when: float) -> None:
        """Calls for `key` at `when`, and at no earlier time that was set before."""
        self._when[key] = when
        self._serial += 1
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [entry for entry in self._heap if self._when.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (when, self._serial, key))

    def clear(self, key: Key) -> None:
        """Forgets `key`; unknown keys are ignored."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the next key is due; None when there is none."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Key | None:
        """Takes out the earliest key whose time has come; one at a time, since acting on it may clear others."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._when[key]
        return key

    def __len__(self) -> int:
        return len(self._when)

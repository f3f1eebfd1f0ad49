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
        self._live: dict[Key, int] = {}  # the serial of the one entry that counts
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0  # orders equal times by age, and keeps keys from being compared

    def set(self, key: Key, when: float) -> None:
        """Calls for `key` at `when`, and at no time that was set before."""
        self._serial += 1
        self._live[key] = self._serial
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (when, self._serial, key))

    def clear(self, key: Key) -> None:
        """Forgets `key`; unknown keys are ignored."""
        self._live.pop(key, None)

    def next(self) -> float | None:
        """When the next key is due; None when there is none."""
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Key | None:
        """Takes out the earliest key whose time has come; one at a time, since acting on it may clear others."""
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

"""Which process of a peer speaks: the one that is there now, or late, one before it."""

from __future__ import annotations

from collections import deque

from ..limits import LIVES_MAX


class Lives:
    """The latest processes of a peer that were followed by another.

    Incarnations have no order, and an old one's first word may come after a new one's. So an earlier process is only
    taken for gone `late_ms` long: whoever still speaks then is the one that is there.
    """

    def __init__(self, late_ms: int) -> None:
        self._late_ms = late_ms
        self._ended: deque[tuple[int, float]] = deque(maxlen=LIVES_MAX)

    def end(self, incarnation: int, now: float) -> None:
        """Another incarnation has been heard of."""
        self._ended.append((incarnation, now))

    def late(self, incarnation: int, now: float) -> bool:
        """Whether a word of this incarnation is an earlier process's."""
        return any(ended == incarnation and (now - at) * 1e3 < self._late_ms for ended, at in self._ended)

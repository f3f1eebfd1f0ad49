"""The latest figures that a worker reported, and the rates between the oldest and the newest of them."""

from __future__ import annotations

from collections import deque
from typing import Literal

from ....wire import WorkerFigures

SAMPLES_MAX = 11  # one for each Pong: five seconds at the default of ping_ms

Total = Literal[
    "rooms_done", "rooms_failed", "tokens", "kv_bytes", "copy_us", "prefix_queried_tokens", "prefix_hit_tokens",
    "hot_hits", "hot_misses", "swapped_bytes",
]  # fmt: skip


class FigureWindow:
    """The figures of one process of a worker. Time is that process's own, so that no two clocks are compared."""

    def __init__(self) -> None:
        self._samples: deque[WorkerFigures] = deque(maxlen=SAMPLES_MAX)

    @property
    def latest(self) -> WorkerFigures | None:
        """The newest figures; None where the worker reported none."""
        return self._samples[-1] if self._samples else None

    def add(self, figures: WorkerFigures) -> None:
        """Takes the figures of a Pong. Those of an earlier moment, which came late, are dropped."""
        latest = self.latest
        if latest is None or figures.uptime_ms > latest.uptime_ms:
            self._samples.append(figures)

    def clear(self) -> None:
        """The worker is lost, or another process."""
        self._samples.clear()

    def grown(self, total: Total) -> int | None:
        """By how much a total has grown within the window; None where that is not known."""
        if len(self._samples) < 2:
            return None
        grown: int = getattr(self._samples[-1], total) - getattr(self._samples[0], total)
        return grown if grown >= 0 else None

    def rate(self, total: Total) -> float | None:
        """By how much it grows in a second."""
        grown = self.grown(total)
        if grown is None:
            return None
        return grown * 1e3 / (self._samples[-1].uptime_ms - self._samples[0].uptime_ms)

    def share(self, part: Total, *whole: Total) -> float | None:
        """`part` of the sum of `whole`, from 0 to 1: within the window, or since the start where nothing of it grew
        in it; None where nothing has."""
        grown, rest = self.grown(part), [self.grown(field) for field in whole]
        if grown is not None and (total := sum(growth or 0 for growth in rest)):
            return min(1.0, grown / total)
        latest = self.latest
        total = sum(getattr(latest, field) for field in whole) if latest is not None else 0
        return min(1.0, getattr(latest, part) / total) if total else None

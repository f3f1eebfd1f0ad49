"""A histogram with labels that peers choose: a bounded number of series.

prometheus_client keeps every value of a label forever: with each peer that comes and goes, too many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

from ...limits import METRICS_LABELS_MAX

OTHER = "other"  # the label of all that have no series of their own
IDLE_S = 900.0  # a series without an observation for this long gives its place to another one


class BoundedHistogram:
    """Of the first label, METRICS_LABELS_MAX values have their own series, and all others are together under `other`.
    A series without an observation for IDLE_S makes room for another one."""

    def __init__(
        self, name: str, text: str, *, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._histogram = Histogram(name, text, labels, buckets=buckets, registry=registry)
        self._series: dict[tuple[str, ...], Histogram] = {}
        self._observed_s: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str, now: float | None = None) -> None:
        """Counts a value under these labels; `now` is in seconds of CLOCK_MONOTONIC."""
        now = time.monotonic() if now is None else now
        if (series := self._series.get(labels)) is None:
            labels = self._admitted(labels, now)
            series = self._series[labels] = self._histogram.labels(*labels)
        self._observed_s[labels] = now
        series.observe(value)

    def _admitted(self, labels: tuple[str, ...], now: float) -> tuple[str, ...]:
        """These labels, if they may have a series of their own, else those of all others."""
        named = [labels for labels in self._series if labels[0] != OTHER]
        if labels[0] != OTHER and len(named) >= METRICS_LABELS_MAX:
            oldest = min(named, key=self._observed_s.__getitem__)
            if now - self._observed_s[oldest] < IDLE_S:
                return OTHER, *labels[1:]
            del self._series[oldest], self._observed_s[oldest]
            self._histogram.remove(*oldest)
        return labels

"""Histograms that are observed and scraped on one thread, with a bounded number of series.

prometheus_client's own take a lock for every bucket and keep every label forever: at each token of each room that is
too slow, and with each peer that comes and goes too many.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...limits import METRICS_LABELS_MAX

OTHER = "other"  # the label of all that have no series of their own
IDLE_S = 900.0  # without an observation for so long a series gives its place to another one


class HistogramSeries:
    """One series: how many values lie up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "observed_s", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0
        self.observed_s = 0.0  # when `LoopHistogram.of` last returned it

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value this many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket, and how many values are up to it."""
        return list(zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True))


class LoopHistogram(Collector):
    """A histogram, or one for each value of its labels: of the first label, METRICS_LABELS_MAX values have their own
    series, and all others are together under `other`. A series without news for IDLE_S makes room for another one."""

    def __init__(
        self,
        name: str,
        text: str,
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
    ) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, tuple(bounds), tuple(labels)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        if not labels:
            self._series[()] = HistogramSeries(self._bounds)
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value this many times, of a histogram without labels."""
        self._series[()].observe(value, times)

    def of(self, *values: str, now: float | None = None) -> HistogramSeries:
        """The series of these labels; `now` is in seconds of CLOCK_MONOTONIC."""
        assert len(values) == len(self._labels), (self._name, values)
        series = self._series.get(values)
        if now is None:
            now = time.monotonic()
        if series is None:
            series = self._made(values, now)
        series.observed_s = now
        return series

    def _made(self, values: tuple[str, ...], now: float) -> HistogramSeries:
        own = [each for each in self._series if each[0] != OTHER]
        if len(own) >= METRICS_LABELS_MAX and values[0] != OTHER:
            oldest = min(own, key=lambda each: self._series[each].observed_s)
            if now - self._series[oldest].observed_s < IDLE_S:
                return self.of(OTHER, *values[1:], now=now)
            del self._series[oldest]
        made = self._series[values] = HistogramSeries(self._bounds)
        return made

    def collect(self) -> Iterator[Metric]:
        """All series, as they are now."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.cumulative(), series.total)
        yield family

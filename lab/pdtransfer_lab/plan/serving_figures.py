"""What a replay found: times to the first token and between tokens, goodput, hits, errors; measured or modelled."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, Final

import numpy as np

PERCENTILES = (50, 90, 95, 99)
OK: Final = "200"
_BIN = 0.005  # of a GapHistogram: the distance of two bins, relative to their times


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to be good: its time to the first token, and its mean time between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def kept(self, ttft_s: float, itl_s: float) -> bool:
        """True if a request that has been answered was good."""
        return (self.ttft_s is None or ttft_s <= self.ttft_s) and (self.itl_s is None or itl_s <= self.itl_s)


class GapHistogram:
    """Times between tokens, counted in bins half a percent apart: a fleet's hour has too many to keep."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._zeros = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Counts a gap this many times."""
        if gap_s > 0:
            self._counts[round(log(gap_s) / _BIN)] += count
        else:
            self._zeros += count

    @property
    def count(self) -> int:
        """All gaps."""
        return self._zeros + self._counts.total()

    def percentile(self, percent: float) -> float | None:
        """Seconds; None without gaps."""
        total = self.count
        if not total:
            return None
        left = percent / 100 * total - self._zeros
        if left <= 0 < self._zeros:
            return 0.0
        for bin_index in sorted(self._counts):
            left -= self._counts[bin_index]
            if left <= 0:
                return exp(bin_index * _BIN)
        return exp(max(self._counts) * _BIN)


@dataclass(slots=True)
class ServingFigures:
    """Requests as they end. Times in seconds; columns, since a fleet's hour may have millions."""

    slo: Slo = field(default_factory=Slo)
    at_s: array[float] = field(default_factory=lambda: array("d"))  # of each answered request: when it came
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))  # its mean time between tokens
    total_s: array[float] = field(default_factory=lambda: array("d"))
    gaps: GapHistogram = field(default_factory=GapHistogram)
    statuses: Counter[str] = field(default_factory=Counter[str])
    good: int = 0
    prompt_tokens: int = 0  # of answered requests
    cached_tokens: int = 0
    output_tokens: int = 0
    ended_s: float = 0.0  # when the last request ended

    def answered(
        self, *, at_s: float, ttft_s: float, total_s: float, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """A request was answered whole. Its gaps are counted apart."""
        itl_s = (total_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else 0.0
        self.at_s.append(at_s)
        self.ttft_s.append(ttft_s)
        self.itl_s.append(itl_s)
        self.total_s.append(total_s)
        self.statuses[OK] += 1
        self.good += self.slo.kept(ttft_s, itl_s)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens
        self.ended_s = max(self.ended_s, at_s + total_s)

    def failed(self, status: str, *, ended_s: float) -> None:
        """A request failed: an HTTP status, or a word for what came before one."""
        self.statuses[status] += 1
        self.ended_s = max(self.ended_s, ended_s)

    @property
    def requests(self) -> int:
        """All that have ended."""
        return self.statuses.total()

    @property
    def good_share(self) -> float:
        """Of all requests, failed ones included."""
        return self.good / self.requests if self.requests else 0.0

    def report(self) -> dict[str, Any]:
        """For programs and for `show`: times in ms, None where nothing was answered."""
        seconds = max(self.ended_s, 1e-9)
        gaps = {f"p{percent}": _ms(self.gaps.percentile(percent)) for percent in PERCENTILES}
        return {
            "requests": self.requests,
            "answered": self.statuses[OK],
            "errors": {status: count for status, count in sorted(self.statuses.items()) if status != OK},
            "seconds": round(self.ended_s, 3),
            "requests_per_s": round(self.statuses[OK] / seconds, 4),
            "output_tokens_per_s": round(self.output_tokens / seconds, 2),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": percentiles_ms(self.ttft_s),
            "itl_ms": gaps,
            "mean_itl_ms": percentiles_ms(self.itl_s),
            "total_ms": percentiles_ms(self.total_s),
            "slo": {"ttft_ms": _ms(self.slo.ttft_s), "itl_ms": _ms(self.slo.itl_s)},
            "good": self.good,
            "good_share": round(self.good_share, 5),
            "goodput_per_s": round(self.good / seconds, 4),
        }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50 to p99 and the greatest, in ms; None without any."""
    names = [*(f"p{percent}" for percent in PERCENTILES), "max"]
    if not len(seconds):
        return dict.fromkeys(names)
    values = np.percentile(np.asarray(seconds), (*PERCENTILES, 100)) * 1e3
    return {name: round(float(value), 3) for name, value in zip(names, values, strict=True)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)

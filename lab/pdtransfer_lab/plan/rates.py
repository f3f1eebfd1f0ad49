"""What engines and links of a fleet do in a second, as flags give it or as benchmarks measured it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any, cast

from pdtransfer.errors import ConfigError

POINTS_MAX = 256


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a size, straight between its points, and beyond the last on as between the last two. Below the first
    point it goes on straight as well, but never below 0; a single point is a line through 0."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[float, float]) -> Curve:
        """From seconds by size. Raises ConfigError for points that no curve has: none, or falling ones."""
        if not 1 <= len(points) <= POINTS_MAX:
            raise ConfigError(f"{len(points)} points, must be 1 to {POINTS_MAX}")
        ordered = sorted(points.items())
        for size, seconds in ordered:
            if not (isfinite(size) and isfinite(seconds) and size > 0 and seconds > 0):
                raise ConfigError(f"{size:g}: {seconds:g}: both must be positive numbers")
        for (size, earlier), (larger, later) in pairwise(ordered):
            if later < earlier:
                raise ConfigError(f"{larger:g} takes {later:g} s, less than {size:g} with {earlier:g} s")
        return cls(tuple(size for size, _ in ordered), tuple(seconds for _, seconds in ordered))

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        index = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        slope = (seconds[index] - seconds[index - 1]) / (sizes[index] - sizes[index - 1])
        return max(0.0, seconds[index - 1] + slope * (size - sizes[index - 1]))

    def largest(self, seconds: float, most: int) -> int:
        """The largest whole size, at most `most`, that takes no longer; 0 if 1 does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self(middle) <= seconds else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one worker of each role."""

    prefill: Curve  # seconds to compute the first n tokens of a prompt
    decode: Curve  # seconds of a step of n requests
    context_s: float = 0.0  # what each token of context adds to a step
    link_bytes_s: float = 10e9  # that one worker's link carries
    handoff_s: float = 1e-3  # from the last byte to the decode engine
    overhead_s: float = 0.0  # of each request's first token: HTTP, router, the way back
    first_step_tokens: int = 2  # that the first decode step reports: prefill's, and the one that it computes


RATE_FIELDS = (
    "prefill_s",
    "decode_step_s",
    "context_s",
    "link_bytes_s",
    "handoff_s",
    "overhead_s",
    "first_step_tokens",
)


def rates_of(documents: Sequence[tuple[str, object]], more: Mapping[str, Any] | None = None) -> Rates:
    """Rates from parsed JSON documents with their names, later ones first in rank, and `more` before them all.

    A document is what `pdtransfer bench pd|transfer|handoff --json` printed, or an object of RATE_FIELDS. Raises
    ConfigError that names the document and the field.
    """
    figures: dict[str, Any] = {}
    for name, document in documents:
        if not isinstance(document, dict):
            raise ConfigError(f"{name}: must be a JSON object")
        figures |= _read(name, cast("dict[str, Any]", document))
    figures |= {field: value for field, value in (more or {}).items() if value is not None}
    for field in ("prefill_s", "decode_step_s"):
        if field not in figures:
            flag = {"prefill_s": "--prefill-tokens-per-s", "decode_step_s": "--decode-step-ms"}[field]
            raise ConfigError(f"{field}: no rate is given; {flag}, or a file for --rates that has it")
    curves = {
        "prefill": _curve("prefill_s", figures.pop("prefill_s")),
        "decode": _curve("decode_step_s", figures.pop("decode_step_s")),
    }
    return Rates(**curves, **figures)


def _curve(field: str, points: Any) -> Curve:
    try:
        return Curve.of({float(size): float(seconds) for size, seconds in points.items()})
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"{field}: must be an object of seconds by size") from None


def _read(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """The rates that one document has."""
    part = document.get("part")
    if part is None:
        document = document.get("rates", document) if isinstance(document.get("rates", {}), dict) else document
        if unknown := sorted(document.keys() - set(RATE_FIELDS)):
            raise ConfigError(f"{name}: {unknown[0]}: must be one of {', '.join(RATE_FIELDS)}")
        for field, least in (("context_s", 0.0), ("link_bytes_s", 1.0), ("handoff_s", 0.0), ("overhead_s", 0.0)):
            if field in document:
                _positive(name, field, document[field], least)
        if document.get("first_step_tokens", 1) not in (1, 2):
            raise ConfigError(f"{name}: first_step_tokens = {document['first_step_tokens']!r}: must be 1 or 2")
        return dict(document)
    match part:
        case "transfer":
            fresh = [field for field in document if field.startswith("fresh") and field.endswith("_gb_s")]
            if not fresh:
                raise ConfigError(f"{name}: fresh_gb_s: missing, which bench transfer prints")
            return {"link_bytes_s": 1e9 * max(_positive(name, field, document[field], 1e-9) for field in fresh)}
        case "handoff":
            return {"handoff_s": _positive(name, "ready_us_p50", document.get("ready_us_p50"), 0.0) / 1e6}
        case "pd":
            return _from_pd(name, document)
        case _:
            raise ConfigError(f"{name}: part = {part!r}: must be one of transfer, handoff, pd")


def _positive(name: str, field: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < least:
        raise ConfigError(f"{name}: {field} = {value!r}: must be a number, at least {least:g}")
    return float(value)


def _from_pd(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """The computing of prompts by their length, a decode step of one request, and the rate of rows alone; of the first
    attention that the document has."""
    try:
        attention = next(iter(document["prompts"]))
        points, alone = document["prompts"][attention], document["rows_alone"][attention]
        computed = {tokens: point["auto"]["compute_ms"] / 1e3 for tokens, point in points.items()}
        step_s = min(point["auto"]["step_ms"] for point in points.values()) / 1e3
        rates = {"prefill_s": _rising(computed), "decode_step_s": {"1": step_s}}
        if alone:
            rates["link_bytes_s"] = 1e9 * max(pair["to_ready_gb_s"] for pair in alone.values())
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{name}: prompts: not what bench pd prints ({error})") from None
    return rates


def _rising(points: Mapping[str, float]) -> dict[str, float]:
    """Without points that took less than a smaller one did: noise of small sizes."""
    kept: dict[str, float] = {}
    for size in sorted(points, key=float, reverse=True):
        if not kept or points[size] <= min(kept.values()):
            kept[size] = points[size]
    return kept

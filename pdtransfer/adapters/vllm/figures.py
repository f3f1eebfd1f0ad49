"""What the workers count, as plain data that vLLM sends from process to process, and sums over ranks and time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECONDS_MAX = 4_096  # observations of one interval; a histogram of more has the same shape

Data = dict[str, Any]
"""rooms: {end: count}, causes: {cause: count}, bytes: {direction: count}, refusals: {fact: count}, copied_up_bytes:
count, computed: count, seconds: [float]."""


def empty() -> Data:
    """Nothing was counted."""
    return {"rooms": {}, "causes": {}, "bytes": {}, "refusals": {}, "copied_up_bytes": 0, "computed": 0, "seconds": []}


def is_empty(data: Mapping[str, Any]) -> bool:
    """True if nothing was counted."""
    return not any(data.values())


def count(data: Data, name: str, label: str, amount: int = 1) -> None:
    """Adds to one label of a counter."""
    data[name][label] = data[name].get(label, 0) + amount


def add(data: Data, more: Mapping[str, Any]) -> None:
    """Adds another rank's, or a later interval's."""
    for name in ("rooms", "causes", "bytes", "refusals"):
        for label, amount in more[name].items():
            count(data, name, label, amount)
    for name in ("copied_up_bytes", "computed"):
        data[name] += more[name]
    data["seconds"] = (data["seconds"] + more["seconds"])[:SECONDS_MAX]


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """What vLLM logs of an interval."""
    shown: dict[str, int | float] = {f"rooms {end}": amount for end, amount in sorted(data["rooms"].items())}
    shown |= {f"MB {direction}": round(amount / 1e6, 3) for direction, amount in sorted(data["bytes"].items())}
    if data["computed"]:
        shown["prompts computed here"] = data["computed"]
    if seconds := sorted(data["seconds"]):
        shown["p50 transfer ms"] = round(seconds[len(seconds) // 2] * 1e3, 3)
        shown["max transfer ms"] = round(seconds[-1] * 1e3, 3)
    return shown

"""Checks of settings; a wrong value is a ConfigError of one line that names the setting."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import cast

from .errors import ConfigError
from .limits import LIMIT_BOUNDS, LIMIT_COUNT, LIMIT_MILLISECONDS, Limits

PORT_MAX = 0xFFFF


def bound(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError unless the value is within [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value}: must be from {low} to {high}")


def power_of_two(name: str, value: int, high: int) -> None:
    """Raises ConfigError unless the value is a power of two up to `high`."""
    if not 1 <= value <= high or value & (value - 1):
        raise ConfigError(f"{name} = {value}: must be a power of two from 1 to {high}")


def match(name: str, value: str, pattern: str, expected: str) -> None:
    """Raises ConfigError unless the value matches; `expected` describes the pattern."""
    if re.fullmatch(pattern, value) is None:
        raise ConfigError(f"{name} = {value!r}: must be {expected}")


def device_index(device: str) -> int | None:
    """Returns the GPU's index in a device name, None for cpu. Raises ConfigError."""
    match("device", device, r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")
    return None if device == "cpu" else int(device.partition(":")[2] or 0)


def check_limits(limits: Limits) -> None:
    """Raises ConfigError for a limit outside its bounds, or above the limit that bounds it."""
    values = {limit.name: cast("float", getattr(limits, limit.name)) for limit in fields(limits)}
    for name, value in values.items():
        bound(f"limits.{name}", value, *LIMIT_BOUNDS.get(name, LIMIT_MILLISECONDS if "_ms" in name else LIMIT_COUNT))
    for name, value in values.items():
        if value > (most := values.get(f"{name}_max", value)):
            raise ConfigError(f"limits.{name} = {value}: above limits.{name}_max {most}")
    for name in ("slow_ms", "silence_ms"):
        if limits.ping_ms >= values[name]:
            raise ConfigError(f"limits.ping_ms = {limits.ping_ms}: must be below limits.{name} {values[name]}")


def port_range(name: str, value: str) -> tuple[int, int]:
    """Returns the first and the last port of `first-last`. Raises ConfigError."""
    match(name, value, r"\d{1,5}-\d{1,5}", "first-last")
    first, last = map(int, value.split("-"))
    bound(name, first, 1, PORT_MAX)
    bound(name, last, first + 1, PORT_MAX)  # an engine takes two
    return first, last

"""Checks of settings, and of what an engine passes to a call. A wrong value is a ConfigError of one line that names the
setting, or a LocalProtocolError that names the argument."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from numbers import Real
from operator import index
from typing import Any, TypeVar, cast

from .errors import ConfigError, LocalProtocolError
from .limits import LIMIT_BOUNDS, LIMIT_COUNT, LIMIT_MILLISECONDS, Limits

PORT_MAX = 0xFFFF
_U64_MAX, _SECONDS_MAX = (1 << 64) - 1, 366 * 86_400
Value = TypeVar("Value")


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


def checked(name: str, value: Any, kind: type[Value]) -> Value:
    """A value of this type."""
    if not isinstance(value, kind):
        raise LocalProtocolError(f"{name}: {value!r:.64} is not of type {kind.__name__}")
    return value


def listed(name: str, values: Collection[Value], kind: type[Value]) -> tuple[Value, ...]:
    """Several values of this type, such as endpoints. A text alone is none."""
    if isinstance(values, str):
        raise LocalProtocolError(f"{name}: {values!r:.64} is one text, not several")
    return tuple(
        [checked(name, value, kind) for value in cast("Collection[object]", checked(name, values, Collection))]
    )


def integer(name: str, value: Any) -> int:
    """An integer of any library, as Python's own."""
    try:
        return index(value)
    except TypeError:
        raise LocalProtocolError(f"{name}: {value!r:.64} is not an integer") from None


def label(room: Any) -> int:
    """A room's number, which peers get as a u64 that is not 0."""
    if not 1 <= (number := integer("room", room)) <= _U64_MAX:
        raise LocalProtocolError(f"room: {number} must be from 1 to {_U64_MAX}")
    return number


def span(name: str, value: Any) -> tuple[int, int]:
    """Two integers, [first, end)."""
    ends = listed(name, value, object)
    if len(ends) != 2:
        raise LocalProtocolError(f"{name}: {value!r:.64} must be two integers, [first, end)")
    return integer(name, ends[0]), integer(name, ends[1])


def seconds(name: str, value: Any) -> float:
    """A number of seconds, which a timer can take: a negative one has passed already, an endless one is very long."""
    number = float(min(max(checked(name, value, Real), -1), _SECONDS_MAX))  # pyright: ignore
    if not -1 <= number <= _SECONDS_MAX:
        raise LocalProtocolError(f"{name}: {value!r} is not a number of seconds")
    return number

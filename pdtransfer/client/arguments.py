"""Checks of what an engine passes to a call of its client; a wrong value is a LocalProtocolError that names it."""

from __future__ import annotations

from collections.abc import Collection
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..errors import LocalProtocolError
from ..layout.geometry import integers
from ..wire import pack_ids

Value = TypeVar("Value")
_SECONDS_MAX = 366 * 86_400
_LABEL_MAX, _TOKEN_ID_MAX = (1 << 64) - 1, (1 << 32) - 1


def integer(name: str, value: Any) -> int:
    """An integer of any library, as Python's own."""
    try:
        return index(value)
    except TypeError:
        raise LocalProtocolError(f"{name}: {value!r} is not an integer") from None


def label(room: Any) -> int:
    """A room's number, which peers get as a u64 that is not 0."""
    if not 1 <= (number := integer("room", room)) <= _LABEL_MAX:
        raise LocalProtocolError(f"room: {number} must be from 1 to {_LABEL_MAX}")
    return number


def span(name: str, value: Any) -> tuple[int, int]:
    """Two integers, [first, end)."""
    try:
        first, end = value
    except (TypeError, ValueError):
        raise LocalProtocolError(f"{name}: {value!r} must be two integers, [first, end)") from None
    return integer(name, first), integer(name, end)


def seconds(name: str, value: Any) -> float:
    """A number of seconds, which a timer can take: a negative one has passed already, an endless one is very long."""
    number = checked(name, value, (int, float, np.integer, np.floating), "a number of seconds")
    if number != number:
        raise LocalProtocolError(f"{name}: {value!r} is not a number of seconds")
    return float(min(max(number, 0), _SECONDS_MAX))


def checked(name: str, value: Any, kind: type[Value] | tuple[type[Value], ...], expected: str) -> Value:
    """A value of this type."""
    if not isinstance(value, kind):
        raise LocalProtocolError(f"{name}: {value!r:.64} is not {expected}")
    return value


def text(name: str, value: Any) -> str:
    """A text for people; what UTF-8 does not have in it is replaced."""
    return checked(name, value, str, "a text").encode(errors="replace").decode()


def octets(name: str, value: Any) -> bytes:
    """Bytes, copied where the caller may change them."""
    return bytes(checked(name, value, (bytes, bytearray, memoryview), "bytes"))


def listed(name: str, values: Collection[Value]) -> Collection[Value]:
    """Several values; a text is none."""
    if isinstance(values, str) or not isinstance(values, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LocalProtocolError(f"{name}: {values!r:.64} is not a list")
    return values


def texts(name: str, values: Collection[str]) -> tuple[str, ...]:
    """Several texts, such as endpoints."""
    return tuple([checked(name, value, str, "a text") for value in listed(name, values)])


def queryable(name: str, value: Value) -> Value:
    """None, or an event that can be queried."""
    if value is not None and not callable(getattr(value, "query", None)):
        raise LocalProtocolError(f"{name}: {value!r:.64} has no query()")
    return value


def token_ids(prompt: ArrayLike, tokens: int) -> bytes:
    """`tokens` u32 token ids, at least one, as bytes on the wire."""
    ids = integers("prompt", prompt, tokens)
    if (low := int(ids.min())) < 0 or int(ids.max()) > _TOKEN_ID_MAX:
        raise LocalProtocolError(f"prompt: ids from {low} to {ids.max()}, they are u32")
    return pack_ids(ids)

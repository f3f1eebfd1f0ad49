"""Turns what msgspec says of a bad value into a RemoteProtocolError with the field's name, the value and its bound."""

from __future__ import annotations

import re
from functools import cache
from typing import cast

from msgspec import inspect

from ..errors import RemoteProtocolError
from ..limits import TEXT_LENGTH_MAX
from .messages import Message

_PATH = re.compile(r" - at `\$((?:\[\d+\])+)`\Z")
_FIELD = re.compile(r"([a-z_]\w*(?:\[\d+\])?(?:\.[a-z_]\w*(?:\[\d+\])?)*): (.*)", re.DOTALL)
_GOT = re.compile(r", got `\w+`\Z")
_SHOWN_LENGTH_MAX = 64
_model = cache(inspect.type_info)


def blame(message_type: type[Message], fields: list[object], text: str) -> RemoteProtocolError:
    """Follows msgspec's path, as `$[5][0][3]`, through the structs and through the values: `Grant.parts[0].extents`."""
    found = _PATH.search(text)
    path = [int(index) for index in re.findall(r"\d+", found[1])] if found else []
    expected = text[: found.start()] if found else text
    name, model = message_type.__name__, _model(message_type)
    value = cast("object", fields)
    for index in path:
        if isinstance(model, inspect.StructType):
            name, model = f"{name}.{model.fields[index].name}", model.fields[index].type
        else:
            assert isinstance(model, inspect.VarTupleType), model
            name, model = f"{name}[{index}]", model.item_type
        value = cast("list[object]", value)[index]
    if not expected.startswith(("Expected ", "Invalid enum value ")):
        # A struct's own check names the values; where it opens with a field, that goes where fields go.
        inner = _FIELD.match(expected)
        return _error(f"{name}.{inner[1]}", inner[2]) if inner else _error(name, expected)
    if isinstance(model, inspect.StructType) and isinstance(value, list):
        count, count_min = len(cast("list[object]", value)), sum(field.required for field in model.fields)
        return _error(f"{name}.{model.fields[count].name}", f"missing: {count} fields, expected {count_min} at least")
    return _error(name, f"{shown(value)}, expected {_bound(model, expected)}")


def _error(field: str, text: str) -> RemoteProtocolError:
    """Short enough to travel in a Reject."""
    return RemoteProtocolError(field, text[: TEXT_LENGTH_MAX - len(field) - 2])


def _bound(model: inspect.Type, expected: str) -> str:
    if isinstance(model, inspect.LiteralType):
        return "one of " + ", ".join(repr(value) for value in model.values)
    return _GOT.sub("", expected.removeprefix("Expected ")).replace("`", "")


def shown(value: object) -> str:
    """A peer's value for a person: short, on one line, and never deep."""
    match value:
        case str():
            text = repr(value[:_SHOWN_LENGTH_MAX])
            whole = len(value) <= _SHOWN_LENGTH_MAX and len(text) <= 2 * _SHOWN_LENGTH_MAX
            return text if whole else f"{text[: 2 * _SHOWN_LENGTH_MAX]}... ({len(value)} characters)"
        case bytes():
            return f"{len(value)} bytes"
        case list():
            return f"an array of {len(cast('list[object]', value))}"
        case _:
            return repr(value)

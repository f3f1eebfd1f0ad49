"""Values from outside, decoded by a schema: what does not fit is one error that names its field.

A server that answers, or a client that hands a value in, may send any JSON. Each such source has one edge where `parse`
or `convert` makes a struct of it. Behind that edge every field has the type that the struct states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar, cast

import msgspec

from .errors import ConfigError, RemoteProtocolError
from .wire.codec import display

Parsed = TypeVar("Parsed")
Named = TypeVar("Named", bound=msgspec.Struct)

_PATH = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?([^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`")
_STEP = re.compile(r"\w+")


def parse(text: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
    """Decodes JSON. Raises RemoteProtocolError."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("JSON", str(error)) from None
    except RecursionError:
        raise RemoteProtocolError("JSON", "nested too deeply") from None


def convert(value: object, kind: type[Parsed]) -> Parsed:
    """Makes a struct of JSON that another library has parsed. No value becomes one of another type. Raises
    RemoteProtocolError."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), value) from None
    except (ValueError, RecursionError) as error:  # an integer of more digits than Python writes
        raise RemoteProtocolError("JSON", str(error)) from None


def options(values: Mapping[str, str], kind: type[Named]) -> Named:
    """Makes a struct of an engine's options. Raises ConfigError, naming the option, if one is unknown, or is not what
    its field takes."""
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        names = kind.__struct_fields__
        if unknown := sorted(values.keys() - set(names)):
            text = f"engine_option = '{unknown[0]}={values[unknown[0]]}': must be one of {', '.join(names)}"
            raise ConfigError(text) from None
        text, _, field = str(error).partition(" - at `$.")
        raise ConfigError(f"engine_option {field.rstrip('`')}: {text}") from None


def _field_error(text: str, value: object) -> RemoteProtocolError:
    """Splits msgspec's message into field and text, with the value where it is at hand."""
    matched = _PATH.match(text)
    text, path = (matched[1], matched[2]) if matched is not None else (text, "")
    if (missing := _MISSING.match(text)) is not None:
        return RemoteProtocolError(f"{path}.{missing[1]}" if path else missing[1], "missing")
    for step in _STEP.findall(path) if "..." not in path else ():
        match value:
            case dict():
                value = cast("dict[object, object]", value).get(step)
            case list() if step.isdecimal():
                value = cast("list[object]", value)[int(step)]
            case _:
                value = None
    shown = "" if value is None or "..." in path else f"{display(value)}, "
    return RemoteProtocolError(path or "JSON", shown + text.replace("`", "").replace("Expected", "expected", 1))

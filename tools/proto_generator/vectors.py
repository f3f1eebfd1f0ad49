"""Golden vectors: frames that every implementation must read alike, and frames that every one must refuse.

They are made from the schema and from one specimen a message, never by our decoder. What was published stays as it is:
a case whose bytes come out otherwise is appended under its name and the next number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pdtransfer.wire import VERSION

from . import hostile
from .hostile import pack
from .schema import Json, schema
from .specimens import SPECIMENS, VARIANTS

_RUN_LENGTH_MIN = 64
_LAYOUT_STRUCTS = {"Plane", "Layout", "Span"}  # their bounds depend on one another: VARIANTS hold the extremes
# Of one more field, as a newer peer would append.
_EXTRAS: dict[str, object] = {
    "nil": None, "bool": True, "int": 2**64 - 1, "negative int": -(2**63), "float": 0.5, "str": "later",
    "bin": b"later", "array": [1, ["later", [b"\0", None]]],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Member:
    """One value of a specimen: its name, its place in the frame, and its type in the schema."""

    name: str
    path: tuple[int, ...]
    owner: str
    type: Json
    value: Any


def hex_of(content: bytes) -> str | list[list[Any]]:
    """Hex digits; where a byte repeats 64 times or more, a list of [hex digits, times]."""
    values = np.frombuffer(content, np.uint8)
    edges = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1, [len(content)]))
    long = np.flatnonzero(np.diff(edges) >= _RUN_LENGTH_MIN)
    runs: list[list[Any]] = []
    end = 0
    for start, stop in zip(edges[long].tolist(), edges[long + 1].tolist(), strict=True):
        if start > end:
            runs.append([content[end:start].hex(), 1])
        runs.append([content[start : start + 1].hex(), stop - start])
        end = stop
    if not runs:
        return content.hex()
    return [*runs, [content[end:].hex(), 1]] if end < len(content) else runs


def appended(old: list[str], cases: list[Json], *, key: str = "frame") -> list[str]:
    """The old lines, untouched, and a line for each case that none of them holds; `key` identifies a case."""
    lines, frames = list(old), {case["name"]: case[key] for case in map(json.loads, old)}
    for case in cases:
        number, name = 1, case["name"]
        while name in frames and frames[name] != case[key]:
            number += 1
            name = f"{case['name']} #{number}"
        if name not in frames:
            frames[name] = case[key]
            lines.append(json.dumps(case | {"name": name}))
    return lines


def valid() -> list[Json]:
    """Frames to read: name, frame, message, and fields by name with what is absent filled in."""
    tables = _Tables()
    cases: list[Json] = []
    for name, array in _valid_arrays(tables):
        message = tables.messages[array[1]]
        cases.append(
            {
                "name": name,
                "frame": hex_of(pack(array)),
                "message": message["name"],
                "fields": tables.named(message, array[2:]),
            }
        )
    for name, frame, array in hostile.odd_encodings(SPECIMENS):
        message = tables.messages[array[1]]
        fields = tables.named(message, array[2:])
        cases.append({"name": name, "frame": hex_of(frame), "message": message["name"], "fields": fields})
    return cases


def invalid() -> list[Json]:
    """Frames to refuse: name, frame, stage (frame, fields, rules, content) and the field to name."""
    tables = _Tables()
    cases = [(name, frame, "frame", field) for name, frame, field in hostile.frames()]
    for array in SPECIMENS.values():
        cases += [(name, pack(bad), "fields", field) for name, bad, field in _breaches(tables, array)]
    for stage, wrong in (("rules", hostile.rules()), ("content", hostile.contents(SPECIMENS))):
        cases += [(name, pack(array), stage, field) for name, array, field in wrong]
    return [
        {"name": name, "frame": hex_of(frame), "stage": stage, "field": field} for name, frame, stage, field in cases
    ]


def _valid_arrays(tables: _Tables) -> Iterator[tuple[str, list[Any]]]:
    for name, array in SPECIMENS.items():
        yield name, array
        for member, table in tables.structs_in(array):
            required = sum("default" not in field for field in table["fields"])
            for count in range(required, len(table["fields"])):
                without = table["fields"][count]["name"]
                yield (
                    f"{member.name}, one step older: ends before {without}",
                    _with(array, member.path, member.value[:count]),
                )
            extras = _EXTRAS if not member.path else {"array": _EXTRAS["array"]}
            for kind, extra in extras.items():
                yield (
                    f"{member.name}, one step newer: one more field, {kind}",
                    _with(array, member.path, [*member.value, extra]),
                )
        for member in tables.members(array):
            if member.owner not in _LAYOUT_STRUCTS:
                for title, value in _inside(member):
                    yield f"{member.name} {title}", _with(array, member.path, value)
    yield from VARIANTS.items()


def _breaches(tables: _Tables, array: list[Any]) -> Iterator[tuple[str, list[Any], str]]:
    for member, table in tables.structs_in(array):
        required = [field["name"] for field in table["fields"] if "default" not in field]
        for count, missing in enumerate(required):
            yield (
                f"{member.name}.{missing} missing",
                _with(array, member.path, member.value[:count]),
                f"{member.name}.{missing}",
            )
    for member in tables.members(array):
        for title, value in (*_outside(member), *_wrong_types(member)):
            yield f"{member.name} {title}", _with(array, member.path, value), member.name


def _inside(member: _Member) -> list[tuple[str, Any]]:
    match member.type:
        case {"is": "int" | "float" as kind, "max": most}:
            least = member.type.get("min", 5e-324)
            number = float if kind == "float" else int
            return [(f"least, {least}", number(least)), (f"most, {most}", number(most))]
        case {"one_of": values}:
            return [(f'"{value}"', value) for value in values]
        case {"is": "str", "length_min": least, "length_max": most}:
            wide = [] if "pattern" in member.type else [("longest, 4 bytes a character", "\N{GRINNING FACE}" * most)]
            return [("shortest", "x" * least), ("longest", "x" * most), *wide]
        case {"is": "bin", "length_max": most}:
            return [("empty", b""), (f"longest, {most} bytes", bytes(most))]
        case {"is": "bool"}:
            return [("false", False), ("true", True)]
        case {"is": "array", "length_min": least, "length_max": most} if most <= 1024:
            item = member.value[0]
            return [(f"of {least}", [item] * least), (f"of {most}", [item] * most)]
        case _:
            return []


def _outside(member: _Member) -> list[tuple[str, Any]]:
    match member.type:
        case {"is": "int", "min": least, "max": most}:
            above = [] if most == 2**64 - 1 else [most + 1, 2**63, 2**64 - 1]
            return [(f"is {value}", value) for value in dict.fromkeys([least - 1, -(2**63), *above])]
        case {"is": "float", "max": most}:
            least = member.type["above"] if "above" in member.type else math.nextafter(member.type["min"], -math.inf)
            values = [least, -math.inf, math.nextafter(most, math.inf), math.inf, math.nan]
            return [(f"is {value}", value) for value in values]
        case {"one_of": [*_]}:
            return [("is of no known kind", "other"), ("is empty", "")]
        case {"is": "str", "length_min": least, "length_max": most}:
            amiss = [(f"is {text!r}", text) for text in ("x!", "X", "é", "x\n")] if "pattern" in member.type else []
            return [("too long", "x" * (most + 1)), *([("empty", "")] if least else []), *amiss]
        case {"is": "bin", "length_max": most}:
            return [("too long", bytes(most + 1))]
        case {"is": "array", "length_min": least, "length_max": most}:
            few = [("empty", cast("list[Any]", []))] if least else []
            return few if most > 1024 else [*few, (f"of {most + 1}", [member.value[0]] * (most + 1))]
        case _:
            return []


def _wrong_types(member: _Member) -> list[tuple[str, Any]]:
    confusable: dict[str, list[tuple[str, Any]]] = {
        "int": [("bool", True), ("float", 1.0), ("str", "1")],
        "float": [("bool", True), ("str", "1.0")],
        "bool": [("int", 1), ("str", "true")],
        "str": [("bin", b"x"), ("int", 1)],
        "bin": [("str", "AAAA"), ("array", [0, 0])],
        "array": [("int", 1), ("bin", b"\x90")],
        "struct": [("int", 1), ("str", "x")],
    }
    return [(f"is a {kind}", value) for kind, value in [("nil", None), *confusable[member.type["is"]]]]


def _with(array: list[Any], path: tuple[int, ...], value: Any) -> list[Any]:
    """A copy of [version, kind, field...] with another value at `path`; the empty path is all fields."""
    if not path:
        return [*array[:2], *value]
    copy = list(array)
    spot, index = copy, path[0] + 2
    for below in path[1:]:
        spot[index] = list(spot[index])
        spot, index = spot[index], below
    spot[index] = value
    return copy


class _Tables:
    """The schema, by kind and by name."""

    def __init__(self) -> None:
        table = schema()
        assert table["version"] == VERSION
        self.messages: dict[int, Json] = {entry["kind"]: entry for entry in table["messages"]}
        self.structs: dict[str, Json] = {entry["name"]: entry for entry in table["structs"]}

    def members(self, array: list[Any]) -> Iterator[_Member]:
        """Every field of a specimen, and the first element of every array, outermost first."""
        message = self.messages[array[1]]
        yield from self._fields(message, message["name"], (), array[2:])

    def structs_in(self, array: list[Any]) -> Iterator[tuple[_Member, Json]]:
        """The message itself, then every struct in it, each with its table."""
        message = self.messages[array[1]]
        whole = {"is": "struct", "struct": message["name"]}
        yield _Member(message["name"], (), message["name"], whole, array[2:]), message
        for member in self.members(array):
            if member.type["is"] == "struct":
                yield member, self.structs[member.type["struct"]]

    def _fields(self, table: Json, name: str, path: tuple[int, ...], values: list[Any]) -> Iterator[_Member]:
        for index, (field, value) in enumerate(zip(table["fields"], values, strict=True)):
            inner = f"{name}.{field['name']}", (*path, index)
            yield from self._value(_Member(*inner, table["name"], field["type"], value))

    def _value(self, member: _Member) -> Iterator[_Member]:
        yield member
        if member.type["is"] == "struct":
            yield from self._fields(self.structs[member.type["struct"]], member.name, member.path, member.value)
        if member.type["is"] == "array":
            first = _Member(f"{member.name}[0]", (*member.path, 0), member.owner, member.type["of"], member.value[0])
            yield from self._value(first)

    def named(self, table: Json, values: list[Any]) -> Json:
        """The fields by name: bin as hex digits, absent ones by their default, unknown ones left out."""
        named: Json = {}
        for index, field in enumerate(table["fields"]):
            present = index < len(values)
            named[field["name"]] = self._plain(field["type"], values[index]) if present else field["default"]
        return named

    def _plain(self, model: Json, value: Any) -> Any:
        match model["is"]:
            case "struct":
                return self.named(self.structs[model["struct"]], value)
            case "array":
                return [self._plain(model["of"], item) for item in value]
            case "bin":
                return {"hex": hex_of(value)}
            case _:
                return value

"""Frames of version 1, read and written by the tables of schema.json: msgpack, and not a line of pdtransfer."""

import json
import math
import re
from pathlib import Path

import msgpack

ROOT = Path(__file__).resolve().parents[3] / "proto" / "v1"
SCHEMA = json.loads((ROOT / "schema.json").read_text())
LIMITS = {name: entry["value"] for name, entry in SCHEMA["limits"].items()}
MESSAGES = {entry["kind"]: entry for entry in SCHEMA["messages"]}
KINDS = {entry["name"]: kind for kind, entry in MESSAGES.items()}
STRUCTS = {entry["name"]: entry for entry in SCHEMA["structs"]}


class Refused(Exception):
    def __init__(self, field):
        super().__init__(field)
        self.field = field


def vectors(name):
    """The published cases, less those of a newer peer whose extra field is one of ours by now."""
    cases = [json.loads(line) for line in (ROOT / "vectors" / f"{name}.jsonl").read_text().splitlines()]
    return [case for case in cases if not overtaken(case)]


def overtaken(case):
    """Whether a case "one step newer" of some struct was published when that had fewer fields than it has now."""
    place, newer, _ = case["name"].partition(", one step newer: ")
    if not newer:
        return False
    named, table = case["fields"], next(each for each in MESSAGES.values() if each["name"] == case["message"])
    for part in place.split(".")[1:]:
        field, _, index = part.partition("[")
        model = next(each["type"] for each in table["fields"] if each["name"] == field)
        named = named[field][int(index[:-1])] if index else named[field]
        table = STRUCTS[(model["of"] if index else model)["struct"]]
    return len(table["fields"]) > len(named)


def unhex(hexed):
    if isinstance(hexed, str):
        return bytes.fromhex(hexed)
    return b"".join(bytes.fromhex(digits) * times for digits, times in hexed)


def write(message, **fields):
    """One frame. Structs are dicts by field name; fields that are left out get their defaults."""
    kind = KINDS[message]
    return msgpack.packb([SCHEMA["version"], kind, *_fields(MESSAGES[kind], fields)])


def _fields(table, named):
    assert named.keys() <= {field["name"] for field in table["fields"]}, (table["name"], sorted(named))
    return [_written(field["type"], _named(field, named)) for field in table["fields"]]


def _named(field, named):
    return named[field["name"]] if field["name"] in named else _default(field)


def _default(field):
    default = field["default"]
    return unhex(default["hex"]) if isinstance(default, dict) else default


def _written(model, value):
    match model["is"]:
        case "struct":
            return _fields(STRUCTS[model["struct"]], value)
        case "array":
            return [_written(model["of"], item) for item in value]
    return value


def read(frame):
    """(message name, fields by name, bin as bytes)."""
    if len(frame) > LIMITS["FRAME_BYTES_MAX"]:
        raise Refused("frame")
    try:
        array = msgpack.unpackb(frame, raw=False, object_hook=_refuse, ext_hook=_refuse)
    except (ValueError, msgpack.UnpackException):
        raise Refused("frame") from None
    _census(array, max(LIMITS["PEERS_MAX"], min(LIMITS["PLANES_MAX"], len(frame) // LIMITS["PLANE_BYTES_MIN"])))
    if not isinstance(array, list) or len(array) < 2:
        raise Refused("frame")
    version, kind, *fields = array
    if type(version) is not int or version != SCHEMA["version"]:
        raise Refused("version")
    if type(kind) is not int or kind not in MESSAGES:
        raise Refused("kind")
    message = MESSAGES[kind]
    return message["name"], _struct(message, fields, message["name"])


def _refuse(*_):
    raise ValueError("v1 has neither map nor ext")


def _census(array, length_max):
    arrays = values = 0
    left = [array]
    while left:
        value = left.pop()
        if isinstance(value, list):
            arrays, values = arrays + 1, values + len(value)
            if len(value) > length_max:
                raise Refused("frame")
            left += value
        elif isinstance(value, msgpack.Timestamp):
            raise Refused("frame")  # an ext that msgpack reads by itself
    if arrays > LIMITS["ARRAYS_MAX"] or values > LIMITS["VALUES_MAX"]:
        raise Refused("frame")


def _struct(table, values, name):
    fields = {}
    for index, field in enumerate(table["fields"]):
        inner = f"{name}.{field['name']}"
        if index < len(values):
            fields[field["name"]] = _value(field["type"], values[index], inner)
        elif "default" in field:
            fields[field["name"]] = _default(field)
        else:
            raise Refused(inner)
    return fields


def _value(model, value, name):
    types = {"bool": bool, "int": int, "float": (int, float), "str": str, "bin": bytes, "array": list, "struct": list}
    if not isinstance(value, types[model["is"]]) or (isinstance(value, bool) and model["is"] != "bool"):
        raise Refused(name)
    match model["is"]:
        case "int" if not model["min"] <= value <= model["max"]:
            raise Refused(name)
        case "float" if not math.isfinite(value) or value > model["max"]:
            raise Refused(name)
        case "float" if value <= model["above"] if "above" in model else value < model["min"]:
            raise Refused(name)
        case "str" if "one_of" in model:
            if value not in model["one_of"]:
                raise Refused(name)
        case "str" | "bin" | "array" if not model["length_min"] <= len(value) <= model["length_max"]:
            raise Refused(name)
        case "str" if not re.fullmatch(model.get("pattern", "(?s:.*)"), value):
            raise Refused(name)
        case "array":
            return [_value(model["of"], item, f"{name}[{index}]") for index, item in enumerate(value)]
        case "struct":
            return _struct(STRUCTS[model["struct"]], value, name)
        case "float":
            return float(value)
    return value

"""The message structs as plain tables: names, types, bounds, defaults, and the meaning that stands beside a field."""

from __future__ import annotations

import ast
import inspect as source
import io
import tokenize
from types import ModuleType
from typing import Any, cast

from msgspec import Struct, inspect

from pdtransfer import limits
from pdtransfer.layout import layout
from pdtransfer.layout.layout import DTYPE_BYTES
from pdtransfer.wire import MESSAGES, VERSION, messages

Json = dict[str, Any]

# Who sends it to whom. Decode dials prefill; the router dials both; a worker's other ranks dial its leader.
WAYS = {
    "Hello": "dialler to listener",
    "Welcome": "listener to dialler",
    "Reject": "either",
    "Register": "decode to prefill",
    "Registered": "prefill to decode",
    "Grant": "decode to prefill",
    "Granted": "prefill to decode",
    "Landed": "prefill to decode",
    "Released": "decode to prefill",
    "Failed": "prefill to decode",
    "Abort": "decode to prefill",
    "Drained": "prefill to decode",
    "Begin": "router to daemon",
    "Begun": "daemon to router",
    "Tokens": "daemon to router",
    "TokensAcked": "router to daemon",
    "End": "daemon to router",
    "Ended": "router to daemon",
    "Cancel": "router to daemon",
    "Load": "daemon to router",
    "Ping": "dialler to listener; among ranks either",
    "Pong": "listener to dialler; among ranks either",
    "Goodbye": "either",
    "RankJoin": "rank to leader",
    "RankMeet": "leader to rank",
    "RankBound": "rank to leader",
    "RankRoom": "leader to rank",
    "StepOrders": "leader to rank",
    "RankFailed": "either rank",
    "RankReload": "leader to rank",
    "RankReady": "decode rank to leader",
    "RankLanded": "prefill rank to leader",
    "RankDrained": "prefill rank to leader",
    "RankPicked": "prefill rank to leader",
}

# The layout module explains its structs as wholes, in paragraphs; a table wants a line a struct and a line a field.
_LAYOUT_DOCS = {"Layout": "A pool as a list of planes; where a row lies is said under Layouts, below."}
_LAYOUT_MEANINGS = {
    "Plane": {
        "layer": "of the model, from 0",
        "head_start": "the model's head that a row begins with",
        "head_count": "heads in a row, of equal bytes; at least 1",
        "base": "byte offset of slot 0 in the arena",
        "page_stride": "bytes from one page to the next",
        "row_stride": "bytes from one slot to the next in a page; without meaning where page_size is 1",
        "row_bytes": "bytes of one slot; a whole number of elements a head",
    },
    "Layout": {
        "planes": "no (layer, kind, head) is there twice",
        "page_size": "slots in a page; a power of two",
        "slots": "slots in the pool; a multiple of page_size",
    },
    "Span": {"kind": "which tokens own a row", "tokens": "how many, for last"},
    "Component": {
        "name": "the same on both sides",
        "memory": "where it lives on the decode side",
        "tokens_per_row": "consecutive tokens that share a row",
        "span": "which tokens own a row",
        "layout": "where its rows are",
    },
}


def schema() -> Json:
    """All of v1 as JSON types. Integers reach 2**64 - 1: read them with a parser that keeps them exact."""
    models = [_struct(inspect.type_info(message)) for _, message in sorted(MESSAGES.items())]
    meanings = _meanings(messages) | _meanings(layout)
    structs: dict[str, inspect.StructType] = {}
    for model in models:
        _collect(model, structs)
    return {
        "protocol": "pdtransfer",
        "version": VERSION,
        "limits": {name: {"value": value, "reason": reason} for name, value, reason in constants()},
        "dtypes": DTYPE_BYTES,
        "messages": [
            {"kind": int(kind), "way": WAYS[message.__name__], **_table(model, meanings)}
            for (kind, message), model in zip(sorted(MESSAGES.items()), models, strict=True)
        ],
        "structs": [_table(model, meanings) for model in structs.values()],
    }


def table_of(struct: type[Struct], module: ModuleType) -> Json:
    """One struct of `module` that stands in no message."""
    return _table(_struct(inspect.type_info(struct)), _meanings(module))


def constants() -> list[tuple[str, int, str]]:
    """What limits.py fixes for v1, its first block of constants: name, value, reason."""
    reasons = _comments(limits)
    rows: list[tuple[str, int, str]] = []
    line = 0
    for node in ast.parse(source.getsource(limits)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if line and node.lineno > line + 1:
                break
            name, line = node.targets[0].id, cast("int", node.end_lineno)
            rows.append((name, getattr(limits, name), reasons[line]))
    return rows


def choices() -> list[tuple[str, Any, str]]:
    """What limits.py lets a host choose: name, default, reason."""
    defaults = limits.Limits()
    return [(name, getattr(defaults, name), meaning) for name, meaning in _meanings(limits)["Limits"].items()]


def _collect(model: inspect.Type, structs: dict[str, inspect.StructType]) -> None:
    if isinstance(model, inspect.VarTupleType):
        _collect(model.item_type, structs)
    if isinstance(model, inspect.StructType):
        for field in model.fields:
            if isinstance(field.type, inspect.StructType):
                structs.setdefault(field.type.cls.__name__, field.type)
            elif isinstance(field.type, inspect.VarTupleType) and isinstance(field.type.item_type, inspect.StructType):
                structs.setdefault(field.type.item_type.cls.__name__, field.type.item_type)
            _collect(field.type, structs)


def _struct(model: inspect.Type) -> inspect.StructType:
    assert isinstance(model, inspect.StructType), model
    return model


def _table(model: inspect.StructType, meanings: dict[str, dict[str, str]]) -> Json:
    name = model.cls.__name__
    doc = _LAYOUT_DOCS.get(name) or (model.cls.__doc__ or "").split("\n\n")[0]
    fields: list[Json] = []
    for field in model.fields:
        meaning = _LAYOUT_MEANINGS.get(name, {}).get(field.name) or meanings[name][field.name]
        entry: Json = {"name": field.name, "type": type_of(field.type), "meaning": meaning}
        if not field.required:
            default = field.default
            entry["default"] = {"hex": default.hex()} if isinstance(default, bytes) else default
        fields.append(entry)
    return {"name": name, "meaning": " ".join(doc.split()), "fields": fields}


def type_of(model: inspect.Type) -> Json:
    """One field's type and bounds, both ends included unless stated otherwise."""
    match model:
        case inspect.BoolType():
            return {"is": "bool"}
        case inspect.IntType():
            least = model.ge if model.gt is None else model.gt + 1
            most = model.le if model.lt is None else model.lt - 1
            return {"is": "int", "min": least, "max": 2**64 - 1 if most is None else most}
        case inspect.FloatType():
            least = model.gt if model.ge is None else model.ge
            assert least is not None, "every float has a least value"
            assert model.le is not None, "every float has a greatest value"
            # typing keeps one of two equal annotations: that somebody wrote 0 for 0.0 elsewhere changes nothing here.
            return {"is": "float", "above" if model.ge is None else "min": float(least), "max": float(model.le)}
        case inspect.StrType():
            bounds: Json = {"is": "str", "length_min": model.min_length or 0, "length_max": model.max_length}
            if model.pattern is None:
                return bounds
            assert model.pattern[:2] + model.pattern[-2:] == r"\A\Z", f"the whole str is to match: {model.pattern}"
            return {**bounds, "pattern": model.pattern[2:-2]}
        case inspect.BytesType():
            return {"is": "bin", "length_min": model.min_length or 0, "length_max": model.max_length}
        case inspect.LiteralType():
            return {"is": "str", "one_of": list(model.values)}
        case inspect.StructType():
            return {"is": "struct", "struct": model.cls.__name__}
        case inspect.VarTupleType():
            lengths = {"length_min": model.min_length or 0, "length_max": model.max_length}
            return {"is": "array", "of": type_of(model.item_type), **lengths}
        case _:
            raise TypeError(f"the wire has no such type: {model}")


def _meanings(module: ModuleType) -> dict[str, dict[str, str]]:
    """The comment beside each field of each class, or all comment lines right above it."""
    comments = _comments(module)
    alone = {
        number
        for number, line in enumerate(source.getsource(module).splitlines(), start=1)
        if line.lstrip().startswith("#")
    }
    meanings: dict[str, dict[str, str]] = {}
    for owner in ast.parse(source.getsource(module)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        fields = meanings[owner.name] = {}
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                line = cast("int", node.end_lineno)
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                above = " ".join(comments[number] for number in range(first, node.lineno))
                fields[node.target.id] = comments.get(line) or above
    return meanings


def _comments(module: ModuleType) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source.getsource(module)).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}

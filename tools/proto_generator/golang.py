"""Version 1's messages as a Go package, from schema.json and nothing else: types, bounds, defaults, and a codec.

What schema.json does not have (the rules of layouts, what a bin holds) the package does not check either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from .schema import Json

RUNTIME = Path(__file__).with_name("msgpack.go")


def package(schema: Json) -> dict[str, str]:
    """The package's files by name."""
    return {"messages.go": _messages(schema), RUNTIME.name: RUNTIME.read_text(encoding="utf-8")}


def _messages(schema: Json) -> str:
    limits = {_camel(name.lower()): limit["value"] for name, limit in schema["limits"].items()}
    widest = max(map(len, limits))
    tables = {entry["name"]: entry for entry in [*schema["structs"], *schema["messages"]]}  # one may be both
    lines = [
        "// Code generated from schema.json; DO NOT EDIT.",
        "",
        f"// Package pdtransfer has the messages of version {schema['version']} of the pdtransfer protocol.",
        "package pdtransfer",
        "",
        'import "strconv"',
        "",
        f"const Version = {schema['version']}",
        "",
        "// The limits of the protocol.",
        "const (",
        *[f"\t{name:{widest}} = {value}" for name, value in limits.items()],
        ")",
        "",
        "// Message is one of the messages below.",
        "type Message interface {",
        "\tKind() uint64",
        "\tName() string",
        "\tread(path string, items []value) error",
        "\tcount() int",
        "\twrite(out []byte) []byte",
        "}",
        "",
        "// Decode reads one frame. Its errors are of type *FieldError.",
        "func Decode(frame []byte) (Message, error) {",
        "\tv, err := parse(frame)",
        "\tif err != nil {",
        "\t\treturn nil, err",
        "\t}",
        "\tif v.kind != isArray || len(v.items) < 2 {",
        '\t\treturn nil, wrong("frame", "expected an array [version, kind, field...]")',
        "\t}",
        '\tif _, err := v.items[0].toInt("version", Version, Version); err != nil {',
        "\t\treturn nil, err",
        "\t}",
        '\tkind, err := v.items[1].toInt("kind", 0, 1<<64-1)',
        "\tif err != nil {",
        "\t\treturn nil, err",
        "\t}",
        "\tvar message Message",
        "\tswitch kind {",
    ]
    for entry in schema["messages"]:
        lines += [f"\tcase {entry['kind']}:", f"\t\tmessage = &{entry['name']}{{}}"]
    lines += [
        "\tdefault:",
        '\t\treturn nil, wrong("kind", "%d is none of version 1", kind)',
        "\t}",
        "\treturn message, message.read(message.Name(), v.items[2:])",
        "}",
        "",
        "// Encode writes one frame, with every field.",
        "func Encode(message Message) []byte {",
        "\tout := putArray(nil, 2+message.count())",
        "\treturn message.write(putInt(putInt(out, Version), message.Kind()))",
        "}",
    ]
    for entry in tables.values():
        lines += ["", *_type(entry), "", *_reader(entry), "", *_writer(entry)]
    for entry in schema["messages"]:
        name = entry["name"]
        lines += [
            "",
            f"// Kind is the second element of every frame of {name}.",
            f"func (m *{name}) Kind() uint64 {{ return {entry['kind']} }}",
            "",
            f"// Name is {json.dumps(name)}.",
            f"func (m *{name}) Name() string {{ return {json.dumps(name)} }}",
        ]
    return "\n".join([*lines, ""])


def _type(entry: Json) -> list[str]:
    fields = [line for field in entry["fields"] for line in _field(field)]
    return [f"// {entry['name']}: {entry['meaning']}", f"type {entry['name']} struct {{", *fields, "}"]


def _field(field: Json) -> list[str]:
    return [f"\t// {field['meaning']}", f"\t{_camel(field['name'])} {_go_type(field['type'])}"]


def _go_type(model: Json) -> str:
    match model["is"]:
        case "array":
            return f"[]{_go_type(model['of'])}"
        case "struct":
            return model["struct"]
        case kind:
            return {"bool": "bool", "int": "uint64", "float": "float64", "str": "string", "bin": "[]byte"}[kind]


def _reader(entry: Json) -> list[str]:
    lines = [f"func (m *{entry['name']}) read(path string, items []value) (err error) {{"]
    for index, field in enumerate(entry["fields"]):
        target, path = f"m.{_camel(field['name'])}", f'path+".{field["name"]}"'
        lines += [f"\tif len(items) > {index} {{", *_read(field["type"], target, f"items[{index}]", path, "\t\t")]
        lines += ["\t} else {", *_absent(field, target, path), "\t}"]
    return [*lines, "\treturn nil", "}"]


def _read(model: Json, target: str, source: str, path: str, indent: str) -> list[str]:
    """Lines that read one value, and return from the function where it is wrong."""
    match model:
        case {"is": "struct"}:
            read = [f"fields, err := {source}.toStruct({_alone(path)})", *_checked]
            return [f"{indent}{line}" for line in [*read, f"if err := {target}.read({path}, fields); err != nil {{",
                                                   "\treturn err", "}"]]  # fmt: skip
        case {"is": "array", "of": inner}:
            call = f"{source}.toArray({path}, {model['length_min']}, {model['length_max']})"
            element = _read(inner, f"{target}[at]", "values[at]", f'{path[:-1]}["+strconv.Itoa(at)+"]"', indent + "\t")
            lines = [f"values, err := {call}", *_checked, f"{target} = make({_go_type(model)}, len(values))"]
            return [
                *[f"{indent}{line}" for line in lines],
                f"{indent}for at := range values {{",
                *element,
                f"{indent}}}",
            ]
        case _:
            call = f"{target}, err = {source}.{_conversion(model, path)}"
            return [f"{indent}if {call}; err != nil {{", f"{indent}\treturn err", f"{indent}}}"]


_checked = ["if err != nil {", "\treturn err", "}"]


def _conversion(model: Json, path: str) -> str:
    match model:
        case {"is": "bool"}:
            return f"toBool({_alone(path)})"
        case {"is": "int", "min": least, "max": most}:
            return f"toInt({path}, {least}, {most})"
        case {"is": "float", "max": most}:
            least = model.get("above", model.get("min"))
            return f"toFloat({path}, {least}, {most}, {json.dumps('above' in model)})"
        case {"is": "str", "one_of": words}:
            return f"toStr({path}, 0, 0, {', '.join(map(json.dumps, words))})"
        case {"is": "str", "length_min": least, "length_max": most}:
            pattern = f"toStrOf({path}, {json.dumps(model['pattern'])}, " if "pattern" in model else f"toStr({path}, "
            return f"{pattern}{least}, {most})"
        case {"is": "bin"}:
            return f"toBin({path}, {model['length_min']}, {model['length_max']})"
        case _:
            raise ValueError(f"schema.json has a type that Go does not know here: {model}")


def _absent(field: Json, target: str, path: str) -> list[str]:
    if "default" not in field:
        return [f'\t\treturn wrong({path}, "missing")']
    return [f"\t\t{target} = {_literal(field['type'], field['default'])}"]


def _literal(model: Json, default: object) -> str:
    match default:
        case {"hex": str(digits)}:
            return "[]byte{" + ", ".join(f"{byte:#x}" for byte in bytes.fromhex(digits)) + "}"
        case list():
            items = cast("list[object]", default)
            return f"{_go_type(model)}{{" + ", ".join(_literal(model["of"], item) for item in items) + "}"
        case _:
            return json.dumps(default)


def _writer(entry: Json) -> list[str]:
    lines = [f"func (m *{entry['name']}) count() int {{ return {len(entry['fields'])} }}", ""]
    lines += [f"func (m *{entry['name']}) write(out []byte) []byte {{"]
    for field in entry["fields"]:
        lines += _write(field["type"], f"m.{_camel(field['name'])}", "\t")
    return [*lines, "\treturn out", "}"]


def _write(model: Json, source: str, indent: str) -> list[str]:
    match model["is"]:
        case "struct":
            return [f"{indent}out = {source}.write(putArray(out, {source}.count()))"]
        case "array":
            element = _write(model["of"], f"{source}[at]", indent + "\t")
            return [f"{indent}out = putArray(out, len({source}))", f"{indent}for at := range {source} {{", *element,
                    f"{indent}}}"]  # fmt: skip
        case kind:
            return [f"{indent}out = put{kind.capitalize()}(out, {source})"]


def _alone(path: str) -> str:
    """As gofmt writes a sum that is the only argument."""
    return path.replace("+", " + ")


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))

import json
import re
import shutil
from typing import Annotated

import msgspec
import pytest

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import MESSAGES, Begin, Grant, Tokens, decode, unpack_extents, unpack_ids
from tests.serve.stranger import messages
from tests.serve.stranger.messages import ROOT, SCHEMA, STRUCTS, unhex
from tools.proto_generator import vectors
from tools.proto_generator.__main__ import main
from tools.proto_generator.schema import type_of


def _expected(plain):
    """A vector's fields with bin as bytes."""
    match plain:
        case {"hex": hexed}:
            return unhex(hexed)
        case dict():
            return {name: _expected(value) for name, value in plain.items()}
        case list():
            return [_expected(value) for value in plain]
        case _:
            return plain


def _agrees(expected, found):
    """Equal, save for fields that were appended after the vector was published."""
    match expected:
        case dict():
            return isinstance(found, dict) and all(_agrees(value, found[name]) for name, value in expected.items())
        case list():
            same_length = isinstance(found, list) and len(expected) == len(found)
            return same_length and all(_agrees(*pair) for pair in zip(expected, found, strict=True))
        case _:
            return type(expected) is type(found) and expected == found


def _by_name(value):
    """Structs as dicts, tuples as lists."""
    if isinstance(value, msgspec.Struct):
        return {name: _by_name(getattr(value, name)) for name in value.__struct_fields__}
    return [_by_name(item) for item in value] if isinstance(value, tuple) else value


def _receive(frame, *, fields_are_right):
    """Decodes, and looks into the bins once the fields are right."""
    message = decode(frame)
    assert fields_are_right, message
    match message:
        case Grant():
            for index, part in enumerate(message.parts):
                unpack_extents(f"Grant.parts[{index}].extents", part.extents)
        case Begin():
            unpack_ids("Begin.prompt", message.prompt)
        case Tokens():
            unpack_ids("Tokens.ids", message.ids)


def test_valid_vectors_decode_to_their_fields():
    for vector in messages.vectors("valid"):
        message = decode(unhex(vector["frame"]))
        assert type(message).__name__ == vector["message"], vector["name"]
        assert _agrees(_expected(vector["fields"]), _by_name(message)), (vector["name"], message)


def test_valid_vectors_are_read_alike_by_a_stranger_with_plain_msgpack():
    for vector in messages.vectors("valid"):
        name, fields = messages.read(unhex(vector["frame"]))
        assert name == vector["message"], vector["name"]
        assert _agrees(_expected(vector["fields"]), fields), (vector["name"], fields)


def test_invalid_vectors_are_refused_under_the_name_of_their_field():
    for vector in messages.vectors("invalid"):
        with pytest.raises(RemoteProtocolError) as caught:
            _receive(unhex(vector["frame"]), fields_are_right=vector["stage"] == "content")
        within = caught.value.field.startswith(vector["field"]) and vector["stage"] == "rules"
        assert caught.value.field == vector["field"] or within, (vector["name"], str(caught.value))


def test_a_stranger_with_only_the_schema_refuses_what_breaks_frame_or_fields():
    for vector in messages.vectors("invalid"):
        if vector["stage"] in ("frame", "fields"):
            with pytest.raises(messages.Refused) as caught:
                raise AssertionError((vector["name"], messages.read(unhex(vector["frame"]))))
            assert caught.value.field == vector["field"], vector["name"]


def test_every_message_has_a_vector_and_every_default_one_absent_and_one_present():
    found = messages.vectors("valid")
    lengths = {}  # message, or struct within it -> how many fields were present
    for vector in found:
        array = messages.msgpack.unpackb(unhex(vector["frame"]))
        for name, count in _lengths(messages.MESSAGES[array[1]], array[2:]):
            lengths.setdefault(name, set()).add(count)
    for table in [*SCHEMA["messages"], *SCHEMA["structs"]]:
        required = sum("default" not in field for field in table["fields"])
        assert lengths[table["name"]] >= set(range(required, len(table["fields"]) + 2)), table["name"]


def _lengths(table, values):
    yield table["name"], len(values)
    for field, value in zip(table["fields"], values, strict=False):
        of_array = field["type"]["is"] == "array"
        model, items = (field["type"]["of"], value) if of_array else (field["type"], [value])
        if model["is"] == "struct":
            for item in items:
                yield from _lengths(STRUCTS[model["struct"]], item)


def test_every_field_has_vectors_just_outside_its_bounds_and_of_another_type():
    refused = {}
    for vector in messages.vectors("invalid"):
        if vector["stage"] == "fields":
            refused.setdefault(vector["field"], []).append(vector["name"])
    for message in SCHEMA["messages"]:
        for name, model in _leaves(message, message["name"]):
            names = refused.get(name, [])
            assert any(" is a nil" in name for name in names), name
            bounded = model["is"] not in ("bool", "struct") and (model["is"] != "array" or model["length_max"] <= 1024)
            assert any(" is a " not in name and not name.endswith("missing") for name in names) or not bounded, name


def _leaves(table, name):
    for field in table["fields"]:
        yield from _leaf(field["type"], f"{name}.{field['name']}")


def _leaf(model, name):
    yield name, model
    if model["is"] == "array":
        yield from _leaf(model["of"], f"{name}[0]")
    if model["is"] == "struct":
        yield from _leaves(STRUCTS[model["struct"]], name)


def test_every_message_and_field_has_a_meaning():
    assert {entry["kind"]: entry["name"] for entry in SCHEMA["messages"]} == {
        kind: message.__name__ for kind, message in MESSAGES.items()
    }
    for entry in [*SCHEMA["messages"], *SCHEMA["structs"]]:
        assert entry["meaning"]
        assert [field["name"] for field in entry["fields"] if not field["meaning"]] == [], entry["name"]


def test_a_float_keeps_its_bounds_where_an_equal_annotation_has_integers():
    shared = msgspec.inspect.type_info(Annotated[float, msgspec.Meta(ge=0, le=7)])
    assert json.dumps(type_of(shared)) == '{"is": "float", "min": 0.0, "max": 7.0}'
    shared = msgspec.inspect.type_info(Annotated[float, msgspec.Meta(gt=0, le=7)])
    assert json.dumps(type_of(shared)) == '{"is": "float", "above": 0.0, "max": 7.0}'


def test_nothing_generated_is_stale():
    assert main(["--check"]) == 0, "run python -m tools.proto_generator, and look at what it changed"


def test_check_notices_a_stale_file_and_writes_nothing(tmp_path):
    root = tmp_path / "v1"
    shutil.copytree(ROOT, root)
    assert main(["--check", "--root", str(root)]) == 0
    for name, marked in _MARKED.items():
        file = root / name
        whole = file.read_text()
        # Of the page and the vectors a line is gone; of the vectors' other lines nothing may be rewritten.
        lines = whole.splitlines(keepends=True)
        spoilt = "".join(line for index, line in enumerate(lines) if index != lines.index(marked(lines)))
        file.write_text(spoilt)
        assert main(["--check", "--root", str(root)]) == 1, name
        assert file.read_text() == spoilt
        file.write_text(whole)


_MARKED = {
    "schema.json": lambda lines: next(line for line in lines if '"kind": 6' in line),
    "README.md": lambda lines: next(line for line in lines if line.startswith("### Grant (")),
    "reference.md": lambda lines: next(line for line in lines if line.startswith("| 5 | `rows_digest`")),
    "vectors/valid.jsonl": lambda lines: lines[3],
    "vectors/invalid.jsonl": lambda lines: lines[3],
    "vectors/checksums.jsonl": lambda lines: lines[3],
}


@pytest.mark.parametrize(("page", "name"), [("life.md", "load_ms"), ("memory.md", "line_bytes_max")])
def test_a_figure_in_a_sentence_is_the_codes(tmp_path, page, name):
    root = tmp_path / "v1"
    shutil.copytree(ROOT, root)
    text = (root / page).read_text()
    (root / page).write_text(re.sub(f"(?<=<!-- {name} -->)[0-9,]+", "7", text))
    assert main(["--check", "--root", str(root)]) == 1
    assert main(["--root", str(root)]) == 0
    assert (root / page).read_text() == text


def test_generation_repairs_what_is_stale_and_keeps_published_lines(tmp_path):
    root = tmp_path / "v1"
    shutil.copytree(ROOT, root)
    (root / "schema.json").unlink()
    published = (root / "vectors" / "valid.jsonl").read_text().splitlines()
    at = next(
        index for index, line in enumerate(published) if json.loads(line)["name"] == "Goodbye"
    )  # it has one form only
    strange = json.dumps(json.loads(published[at]) | {"frame": "940109cd00010a"})
    kept = [*published[:at], strange, *published[at + 1 : -1]]
    (root / "vectors" / "valid.jsonl").write_text("\n".join(kept) + "\n")
    assert main(["--root", str(root)]) == 0
    assert (root / "schema.json").read_text() == (ROOT / "schema.json").read_text()
    lines = (root / "vectors" / "valid.jsonl").read_text().splitlines()
    assert lines[: len(published) - 1] == kept
    appended = {json.loads(line)["name"] for line in lines[len(published) - 1 :]}
    assert appended == {"Goodbye #2", json.loads(published[-1])["name"]}
    assert main(["--check", "--root", str(root)]) == 0


def test_a_published_vector_never_changes_and_a_new_form_of_it_is_appended():
    case = {"name": "Grant", "frame": "aa", "message": "Grant", "fields": {}}
    old = vectors.appended([], [case])
    newer = case | {"frame": "bb"}
    lines = vectors.appended(old, [newer])
    assert lines[0] == old[0]
    assert json.loads(lines[1]) == newer | {"name": "Grant #2"}
    assert vectors.appended(lines, [newer]) == lines
    assert vectors.appended(lines, [case]) == lines
    assert json.loads(vectors.appended(lines, [case | {"frame": "cc"}])[2])["name"] == "Grant #3"


def test_vector_names_are_unique():
    for made in (vectors.valid(), vectors.invalid()):
        names = [case["name"] for case in made]
        assert len(set(names)) == len(names), {name for name in names if names.count(name) > 1}
    for name in ("valid", "invalid"):
        published = [vector["name"] for vector in messages.vectors(name)]
        assert len(set(published)) == len(published)


@pytest.mark.parametrize(
    "content", [b"", b"a", bytes(63), bytes(64), b"ab" + bytes(200) + b"c", b"\xff" * 64 + b"\0" * 64]
)
def test_runs_of_hex_encode_the_same_bytes(content):
    assert unhex(vectors.hex_of(content)) == content
    assert len(json.dumps(vectors.hex_of(content))) < 150


def test_a_case_of_a_newer_peer_is_for_older_decoders_once_its_field_is_one_of_ours():
    fields = {field["name"]: None for field in messages.MESSAGES[5]["fields"]}
    case = {"name": "Registered, one step newer: one more field, nil", "message": "Registered", "fields": fields}
    assert not messages.overtaken(case)
    case["fields"] = dict(list(fields.items())[:-1])
    assert messages.overtaken(case)
    assert not messages.overtaken(case | {"name": "Registered"})

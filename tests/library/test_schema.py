"""Values from outside, made structs: what does not fit is one line that names its field."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.schema import convert, parse
from tests.support.json_values import VALUES


class Inner(Struct):
    port: Annotated[int, Meta(ge=1, le=9)]


class Outer(Struct):
    inner: Inner
    names: list[str] = []
    ranks: dict[str, int] = {}


OUTER = msgspec.json.Decoder(Outer)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "inner: missing"),
        ({"inner": {}}, "inner.port: missing"),
        ({"inner": {"port": "7"}}, "inner.port: '7', expected int, got str"),
        ({"inner": {"port": 10}}, "inner.port: 10, expected int <= 9"),
        ({"inner": {"port": True}}, "inner.port: True, expected int, got bool"),
        ({"inner": {"port": None}}, "inner.port: expected int, got null"),
        ({"inner": {"port": 10**5_000}}, "inner.port: an integer of 16610 bits, expected int <= 9"),
        ({"inner": {"port": 1}, "names": ["a", 2]}, "names[1]: 2, expected str, got int"),
        ({"inner": {"port": 1}, "ranks": {"a": "b"}}, "ranks[...]: expected int, got str"),
        ({"inner": {"port": 1}, "ranks": {7: 1}}, "ranks: an object of 1, expected str, got int"),
        ([], "JSON: an array of 0, expected object, got array"),
        ({"inner": {"port": "x" * 10_000}}, "inner.port: 'xxx"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        convert(value, Outer)
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "JSON: "),
        (b"<html>", "JSON: "),
        (b'{"inner": {"port": "\xff"}}', "inner.port: expected int, got str"),
        (b'{"inner": {"port": 1}, "names": ["\xff"]}', "JSON: "),
        (b'{"inner": {"port": 1}, "x": ' + b"[" * 100_000, "JSON: nested too deeply"),
        (b'{"inner": {"port": 1' + b"0" * 5_000 + b"}}", "inner.port: "),
        (b'{"inner": {"port": 0}}', "inner.port: expected int >= 1"),
    ],
)
def test_an_answer_that_does_not_fit_is_named(answer: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse(answer, OUTER)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_any_value_in_any_place_is_taken_or_named(value: Any) -> None:
    for spoiled in (value, {"inner": value}, {"inner": {"port": value}}, {"inner": {"port": 1}, "names": value}):
        for take in (lambda it: convert(it, Outer), lambda it: parse(json.dumps(it).encode(), OUTER)):
            try:
                assert isinstance(take(spoiled), Outer)
            except RemoteProtocolError as error:
                assert "\n" not in str(error)  # noqa: PT017 (either is right)

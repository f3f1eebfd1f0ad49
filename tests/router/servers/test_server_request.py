"""The bodies that HTTP servers get, and the keys of their text."""

from __future__ import annotations

import json

import pytest

from pdtransfer.router.servers.server_request import ServerIdentity, ServerRequest, identity_of, parse_request


def parsed(*, block_tokens: int = 16, **fields: object) -> ServerRequest:
    return parse_request("/v1/completions", json.dumps(fields).encode(), request_id="r", block_tokens=block_tokens)


def shared(one: ServerRequest, other: ServerRequest) -> int:
    """How many blocks two requests share from their beginning."""
    pairs = list(zip(one.keys, other.keys, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_prompts_share_the_blocks_of_their_common_beginning() -> None:
    one, other = parsed(prompt="a" * 640 + "b" * 640), parsed(prompt="a" * 640 + "c" * 640)
    assert len(one.keys) == len(other.keys) == 20
    assert shared(one, other) == 10
    assert shared(one, parsed(prompt="a" * 640)) == 10
    assert shared(one, parsed(prompt="b" + "a" * 639)) == 0


def test_a_conversation_shares_the_blocks_of_its_earlier_turns() -> None:
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]
    more = [*turns, {"role": "user", "content": "z" * 300}]
    assert shared(parsed(messages=turns), parsed(messages=more)) == len(parsed(messages=turns).keys)
    tools = [{"type": "function", "function": {"name": "f" * 100}}]
    assert shared(parsed(messages=turns), parsed(messages=turns, tools=tools)) == 0


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_other_models_and_salts_share_nothing(field: str) -> None:
    prompt = "a" * 640
    assert shared(parsed(prompt=prompt, **{field: "m"}), parsed(prompt=prompt, **{field: "n"})) == 0
    assert shared(parsed(prompt=prompt, **{field: "m"}), parsed(prompt=prompt)) == 0


def test_no_keys_are_made_where_none_are_wanted() -> None:
    assert parsed(block_tokens=0, prompt="a" * 640).keys == ()


def test_values_stay_as_the_client_wrote_them() -> None:
    body = b'{"seed": 123456789012345678901234567890, "temperature":1.10, "prompt": "\\u00e9 \xc3\xa9"}'
    request = parse_request("/v1/completions", body, request_id="r", block_tokens=0)
    for sent in (request.prefill_body("t"), request.decode_body("t", ServerIdentity("e", "h", 1))):
        for value in (b"123456789012345678901234567890", b"1.10", b'"\\u00e9 \xc3\xa9"'):
            assert value in sent


ANSWER = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 7, "tp_size": 4}


@pytest.mark.parametrize(
    ("params", "identity"),
    [
        (ANSWER, ServerIdentity("e", "h", 7, 4)),
        (ANSWER | {"pp_size": 2, "dcp_size": 3, "anything": [1]}, ServerIdentity("e", "h", 7, 4, 2, 3)),
        ({**ANSWER, "remote_port": "x"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_an_identity_is_what_decode_has_to_be_told(params: object, identity: ServerIdentity | None) -> None:
    found = identity_of(json.dumps({"id": "cmpl", "kv_transfer_params": params}).encode())
    assert found == identity
    if found is not None:
        told = json.loads(parsed(prompt="a").decode_body("t", found))["kv_transfer_params"]
        assert {name: told[name] for name in ANSWER} == ANSWER
        assert ("pp_size" in told) == (identity.pp_size == 2)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"\xff", b"{", b'{"a":' + b"[" * 100_000])
def test_an_answer_of_another_form_has_no_identity(answer: bytes) -> None:
    assert identity_of(answer) is None

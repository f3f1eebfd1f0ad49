"""The bodies that HTTP servers get, and the keys of their text."""

from __future__ import annotations

import json

import pytest

from pdtransfer.router.servers.server_request import ServerRequest, identity_of, parse_request


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
    for sent in (request.prefill_body("t"), request.decode_body("t", IDENTITY)):
        for value in (b"123456789012345678901234567890", b"1.10", b'"\\u00e9 \xc3\xa9"'):
            assert value in sent


IDENTITY = {
    "remote_engine_id": "e", "remote_host": "h", "remote_port": 7, "tp_size": 2, "pp_size": 3, "transfer_mode": "push",
    "remote_endpoints": ["tcp://h:7", "tcp://h:8"],
}  # fmt: skip


def test_an_identity_is_what_prefill_returns_without_the_fields_of_the_one_request() -> None:
    of_one = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "x", "transfer_id": "y",
        "remote_block_ids": [1, 2], "remote_prefill_cached_tokens": 16,
    }  # fmt: skip
    found = identity_of(json.dumps({"id": "cmpl", "kv_transfer_params": IDENTITY | of_one}).encode())
    assert found == IDENTITY
    told = json.loads(parsed(prompt="a").decode_body("t", found))["kv_transfer_params"]
    own = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "r", "transfer_id": "t"}
    assert told == IDENTITY | own


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "h"}, [], 5])
def test_a_server_that_hands_nothing_over_has_no_identity(params: object) -> None:
    assert identity_of(json.dumps({"id": "cmpl", "kv_transfer_params": params}).encode()) is None


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"\xff", b"{", b'{"a":' + b"[" * 100_000])
def test_an_answer_of_another_form_has_no_identity(answer: bytes) -> None:
    assert identity_of(answer) is None

"""What a client's request says, and the keys of its text."""

from __future__ import annotations

import json

import pytest

from pdtransfer.router.completions import BadRequestError
from pdtransfer.router.servers.server_request import ServerRequest, parse_request


def parsed(*, block_tokens: int = 16, **fields: object) -> ServerRequest:
    body = json.dumps(fields).encode()
    return parse_request("/v1/completions", body, request_id="r", block_tokens=block_tokens, reserved=())


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


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_prompts_of_sglangs_own_path_share_blocks_as_well(field: str) -> None:
    one, other = parsed(**{field: [7] * 400 + [8] * 400}), parsed(**{field: [7] * 400 + [9] * 400})
    assert 0 < shared(one, other) < len(one.keys)


@pytest.mark.parametrize("field", ["model", "prompt", "stop", "user"])
def test_half_a_surrogate_pair_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(BadRequestError, match=f"{field}: half of a surrogate pair"):
        parsed(**{"prompt": "a", field: ["b", "\udc00"]})


def test_reserved_fields_are_dropped() -> None:
    request = parse_request("/x", b'{"a": 1, "b": 2, "c": 3}', request_id="r", block_tokens=0, reserved=("b", "d"))
    assert [*request.fields] == ["a", "c"]

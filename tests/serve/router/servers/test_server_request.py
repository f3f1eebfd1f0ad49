"""What a client's request says, and the keys of its text."""

from __future__ import annotations

import pytest

from pdtransfer.limits import BODY_FIELDS_MAX
from pdtransfer.serve.router.backends.servers.server_request import ServerRequest
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from tests.serve.router.servers.relayed import relayed


def parsed(*, block_tokens: int = 16, **fields: object) -> ServerRequest:
    return relayed(fields, block_tokens=block_tokens)


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


@pytest.mark.parametrize(
    ("path", "engine", "counts"),
    [
        ("/v1/completions", "vllm", {"prompt", "prompt_embeds"}),
        ("/v1/chat/completions", "vllm", set()),
        ("/v1/completions", "sglang", {"prompt"}),
        ("/v1/chat/completions", "sglang", set()),
        ("/generate", "sglang", {"text", "input_ids"}),
    ],
)
def test_a_field_is_a_list_of_prompts_only_where_the_server_reads_it(path: str, engine: str, counts: set) -> None:
    for name in ("prompt", "prompt_embeds", "text", "input_ids"):
        read = relayed({name: ["a", "b"]}, path=path, engine=engine)
        assert read.answers == (2 if name in counts else 1), name


def test_no_keys_are_made_where_none_are_wanted() -> None:
    assert parsed(block_tokens=0, prompt="a" * 640).keys == ()


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_prompts_of_sglangs_own_path_share_blocks_as_well(field: str) -> None:
    one, other = parsed(**{field: [7] * 400 + [8] * 400}), parsed(**{field: [7] * 400 + [9] * 400})
    assert 0 < shared(one, other) < len(one.keys)


@pytest.mark.parametrize("field", ["model", "prompt", "stop", "user"])
def test_half_a_surrogate_pair_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(RefusedRequestError, match=f"{field}: half of a surrogate pair"):
        parsed(**{"prompt": "a", field: ["b", "\udc00"]})


def test_reserved_fields_are_dropped() -> None:
    assert [*relayed({"a": 1, "kv_transfer_params": {}, "c": 3}).fields] == ["a", "c"]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2], [3]]}, 3),
        ({"prompt": ["a"], "prompt_embeds": ["QQ==", "QQ=="]}, 3),
        ({"text": ["a", "b"]}, 2),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"input_embeds": [[0.5], [0.5]]}, 1),
        ({"input_embeds": [[[0.5], [0.5]], [[0.5]]]}, 2),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, 1),
    ],
)
def test_prompts_of_a_list_count_and_so_do_the_choices_of_each(fields: dict, prompts: int) -> None:
    of_sglang = any(name in fields for name in ("text", "input_ids", "input_embeds"))
    how = {"path": "/generate", "engine": "sglang"} if of_sglang else {}
    assert relayed(fields, **how).answers == prompts
    n = {"sampling_params": {"n": 5}} if of_sglang else {"n": 5}
    assert relayed(fields | n, **how).answers == 5 * prompts


@pytest.mark.parametrize("n", ["256", 2.5, [256], {"a": 1}, True])
def test_a_number_of_choices_of_another_type_is_refused_since_servers_might_take_it(n: object) -> None:
    with pytest.raises(RefusedRequestError, match=r"^n: Expected `int \| null`"):
        relayed({"prompt": "a", "n": n})


def test_a_body_has_a_bounded_number_of_fields() -> None:
    assert len(relayed({f"f{i}": i for i in range(BODY_FIELDS_MAX)}).fields) == BODY_FIELDS_MAX
    with pytest.raises(RefusedRequestError, match="257 fields, at most 256"):
        relayed({f"f{i}": i for i in range(BODY_FIELDS_MAX + 1)})

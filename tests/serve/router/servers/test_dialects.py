"""What vLLM's and SGLang's servers get about a hand-off."""

from __future__ import annotations

import json

import pytest

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.serve.router.backends.servers.dialect import Dialect
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.backends.servers.server_request import ServerRequest
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from pdtransfer.serve.settings.router import HTTP_ENGINES
from tests.serve.router.servers.relayed import relayed
from tests.support.json_values import spoiled

VLLM, SGLANG = DIALECTS["vllm"], DIALECTS["sglang"]
TRANSFER = bytes(range(240, 256))
AT = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
IDENTITY = {
    "remote_engine_id": "e", "remote_host": "h", "remote_port": 7, "tp_size": 2, "pp_size": 3, "transfer_mode": "push",
    "remote_endpoints": ["tcp://h:7", "tcp://h:8"],
}  # fmt: skip


def request(dialect: Dialect, body: object, path: str = "/v1/completions") -> ServerRequest:
    return relayed(body, path=path, engine="vllm" if dialect is VLLM else "sglang")


def test_every_http_engine_has_a_dialect() -> None:
    assert tuple(DIALECTS) == HTTP_ENGINES


@pytest.mark.parametrize(("dialect", "identity"), [(VLLM, IDENTITY), (SGLANG, AT)], ids=["vllm", "sglang"])
def test_values_stay_as_the_client_wrote_them(dialect: Dialect, identity: dict) -> None:
    body = b'{"seed": 123456789012345678901234567890, "temperature":1.10, "prompt": "\\u00e9 \xc3\xa9"}'
    made = request(dialect, body)
    for sent in (dialect.prefill_body(made, TRANSFER, identity), dialect.decode_body(made, TRANSFER, identity)):
        for value in (b"123456789012345678901234567890", b"1.10", b'"\\u00e9 \xc3\xa9"'):
            assert value in sent


# vLLM


def test_an_identity_is_what_prefill_returns_without_the_fields_of_the_one_request() -> None:
    of_one = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "x", "transfer_id": "y",
        "remote_block_ids": [1, 2], "remote_prefill_cached_tokens": 16,
    }  # fmt: skip
    found = VLLM.identity("http://h", json.dumps({"id": "cmpl", "kv_transfer_params": IDENTITY | of_one}).encode())
    assert found == IDENTITY
    params = json.loads(VLLM.decode_body(request(VLLM, {"prompt": "a"}), TRANSFER, found))["kv_transfer_params"]
    transfer_id = "pdtransfer-f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    own = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "r", "transfer_id": transfer_id
    }  # fmt: skip
    assert params == IDENTITY | own


@pytest.mark.parametrize("params", [None, {}, {"remote_host": "h"}, {"remote_engine_id": None}])
def test_a_server_that_hands_nothing_over_has_no_identity(params: object) -> None:
    assert VLLM.identity("http://h", json.dumps({"id": "cmpl", "kv_transfer_params": params}).encode()) is None


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"\xff", b"{", b'{"a":' + b"[" * 100_000])
def test_an_answer_of_another_form_is_an_error(dialect: Dialect, answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="JSON: "):
        dialect.identity("http://h", answer)


ANSWERS = {"vllm": {"kv_transfer_params": IDENTITY | {"dcp_size": 1}},
           "sglang": {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_no_field_of_an_answer_has_another_type_than_decode_gets(name: str) -> None:
    """Each field with a value of every JSON type: an error that names it, or an identity of the right types."""
    params = ANSWERS[name].get("kv_transfer_params")
    for case, value in spoiled(params or ANSWERS[name]):
        answer = json.dumps({"kv_transfer_params": value} if params else value).encode()
        field = case.partition(" ")[0]
        why, identity = "", None
        try:
            identity = DIALECTS[name].identity("http://h:1", answer)
        except RemoteProtocolError as error:
            why = str(error)
        assert not why or field in why or "answer" in case, (case, why)
        assert "\n" not in why
        for known, was in (IDENTITY | AT).items():
            assert type((identity or {}).get(known, was)) is type(was), case


# SGLang


@pytest.mark.parametrize(
    ("url", "mode", "found"),
    [
        ("http://127.0.0.1:30000", "prefill", AT),
        ("https://p0.example:443", "prefill", {"bootstrap_host": "p0.example", "bootstrap_port": 8998}),
        ("http://[::1]:30000", "prefill", {"bootstrap_host": "::1", "bootstrap_port": 8998}),
        ("http://127.0.0.1:30000", "decode", None),
        ("http://127.0.0.1:30000", "null", None),
    ],
    ids=["ipv4", "name", "ipv6", "decode", "neither"],
)
def test_the_bootstrap_server_is_beside_the_prefill_server(url: str, mode: str, found: dict | None) -> None:
    info = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 8998, "tp_size": 2, "version": "0.5.23"}
    assert SGLANG.identity(url, json.dumps(info).encode()) == found


def test_both_sides_get_the_body_and_the_same_room_of_63_bits() -> None:
    body = {"prompt": "a", "max_tokens": 9, "min_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    made = request(SGLANG, body)
    room = AT | {"bootstrap_room": 0xF0F1F2F3F4F5F6F7 >> 1, "rid": "r-f0f1f2f3"}
    assert json.loads(SGLANG.decode_body(made, TRANSFER, AT)) == body | room
    del body["stream_options"]
    assert json.loads(SGLANG.prefill_body(made, TRANSFER, AT)) == body | room | {"stream": False}
    for extreme in (bytes(16), b"\xff" * 16):
        assert 0 <= json.loads(SGLANG.decode_body(made, extreme, AT))["bootstrap_room"] < 1 << 63


def test_a_client_cannot_name_anothers_room() -> None:
    own = {
        "bootstrap_host": "10.0.0.1", "bootstrap_port": [1], "bootstrap_room": 7, "bootstrap_pair_key": "k",
        "decode_tp_size": 3, "routed_dp_rank": 1, "data_parallel_rank": 1, "disagg_prefill_dp_rank": 1,
    }  # fmt: skip
    made = request(SGLANG, {"prompt": "a"} | own)
    assert json.loads(SGLANG.decode_body(made, TRANSFER, AT)).keys() == {"prompt", *AT, "bootstrap_room", "rid"}


def test_a_request_that_is_given_up_is_named_as_its_servers_know_it() -> None:
    made = request(SGLANG, {"prompt": "a"})
    for role in ("prefill", "decode"):
        order = SGLANG.given_up(role, made, TRANSFER)
        assert order is not None
        assert (order.path, json.loads(order.body)) == ("/abort_request", {"rid": "r-f0f1f2f3"})
    of_client = request(SGLANG, {"prompt": "a", "rid": "mine"})
    assert json.loads(SGLANG.decode_body(of_client, TRANSFER, AT))["rid"] == "mine"
    assert SGLANG.given_up("prefill", of_client, TRANSFER) is None, "another client may have called its request so"

    made = request(VLLM, {"prompt": "a"})
    sent = json.loads(VLLM.prefill_body(made, TRANSFER, None))["kv_transfer_params"]["transfer_id"]
    order = VLLM.given_up("prefill", made, TRANSFER)
    assert order is not None
    assert json.loads(order.body)["kv_transfer_params"] == {"abort_transfer_id": sent}
    assert VLLM.given_up("decode", made, TRANSFER) is None, "closing its connection is enough"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"n": "2"}),
        ("/generate", {"sampling_params": {"n": "2"}}),
        ("/generate", {"sampling_params": [5]}),
    ],
    ids=str,
)
def test_choices_of_another_type_are_refused(path: str, body: dict) -> None:
    with pytest.raises(RefusedRequestError, match="Expected"):
        request(SGLANG, body, path)


@pytest.mark.parametrize(
    "body", [{}, {"n": 1}, {"n": None}, {"text": ["a", "b"], "sampling_params": [{"n": 1, "x": {"n": [2]}}, None]}]
)
def test_one_choice_is_accepted_and_other_fields_are_left_to_the_servers(body: dict) -> None:
    assert request(SGLANG, body, "/generate").choices == 1

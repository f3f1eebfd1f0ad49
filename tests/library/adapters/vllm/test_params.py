"""kv_transfer_params, as proxies and clients send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdtransfer.adapters.kit.peers import USE_BITS, Reachable, RequestError, tag_of
from pdtransfer.adapters.vllm.params import GiveUp, Identify, ReceiveFrom, SendTo, answer, parse, shared_id
from pdtransfer.bus.keys import AllowList, generate_pair
from tests.support.json_values import spoiled

HERE = Reachable()
TOY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
# What vLLM's push proxy makes, and with a transfer_id llm-d's sidecar.
PUSH: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p0", "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1", "remote_port": 7801, "tp_size": 2,
}  # fmt: skip


def test_prefill_is_asked_by_every_proxy_alike() -> None:
    assert parse(TOY, HERE) == SendTo(None)
    assert parse(TOY | {"transfer_id": "xfer-1"}, HERE) == SendTo("xfer-1")
    for none in (None, {}, {"do_remote_decode": False}, {"something": "else"}):
        assert parse(none, HERE) is None


def test_an_engine_is_asked_who_it_is_where_nothing_is_handed_over() -> None:
    assert parse({"identify": True}, HERE) == Identify()
    assert parse({"identify": False}, HERE) is None
    assert parse(TOY | {"identify": True}, HERE) == SendTo(None)
    assert parse({"identify": True, "abort_transfer_id": "xfer-1"}, HERE) == GiveUp("xfer-1")
    with pytest.raises(RequestError, match="identify: 1, expected bool"):
        parse({"identify": 1}, HERE)


def test_decode_finds_each_rank_behind_the_first_ones_port() -> None:
    ranks = ("tcp://127.0.0.1:7801", "tcp://127.0.0.1:7802")
    assert parse(PUSH, HERE) == ReceiveFrom("p0/cmpl-1", ranks)
    sidecar = PUSH | {"transfer_id": "xfer-1", "transfer_mode": "push", "pp_size": 1, "dcp_size": 1}
    assert parse(sidecar, HERE) == ReceiveFrom("xfer-1", ranks)
    assert parse(PUSH | {"remote_port": 7801.0, "tp_size": 1.0}, HERE) == ReceiveFrom("p0/cmpl-1", ranks[:1])
    six = parse(PUSH | {"remote_host": "::1", "tp_size": 1}, HERE)
    assert six == ReceiveFrom("p0/cmpl-1", ("tcp://[::1]:7801",))
    last = parse(PUSH | {"remote_port": 65_534}, HERE)
    assert last == ReceiveFrom("p0/cmpl-1", ("tcp://127.0.0.1:65534", "tcp://127.0.0.1:65535"))


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize("kind", ["cmpl-{}-0", "chatcmpl-{}", "1_cmpl-{}-0"])
def test_a_proxy_that_asks_both_at_once_names_the_request_by_its_own_id(kind: str) -> None:
    """As vLLM's push proxy does: X-Request-Id is the same, and each engine makes another id of it."""
    prefill, decode = (f"{kind.format(UUID)}-{own}" for own in ("deadbeef", "0badcafe"))
    known = shared_id(prefill)
    assert known == shared_id(decode) == kind.format(UUID)
    label = f"p0/{known}"
    for remote in (UUID, known):  # before prefill has answered, and after
        found = parse(PUSH | {"remote_request_id": remote, "tp_size": 1}, HERE, decode)
        assert found == ReceiveFrom(label, ("tcp://127.0.0.1:7801",))


@pytest.mark.parametrize(
    ("remote", "request_id"),
    [
        (f"cmpl-{UUID}-0-deadbeef", f"cmpl-{UUID}-0-0badcafe"),  # a second request with this id
        (f"cmpl-{UUID}-0-deadbeef#1", f"cmpl-{UUID}-0-0badcafe"),  # begun again
        (f"cmpl-{UUID}-0", f"1_cmpl-{UUID}-0-0badcafe"),  # a choice of several, of one prompt
        (f"0_cmpl-{UUID}-0", f"1_cmpl-{UUID}-0-0badcafe"),
        (UUID, "cmpl-00000000-d9cb-469f-a165-70867728950e-0-0badcafe"),  # the proxy gave it another id
        ("0", "cmpl-0-0-0badcafe"),
        ("cmpl", f"cmpl-{UUID}-0-0badcafe"),
    ],
)
def test_what_prefill_has_returned_is_its_id(remote: str, request_id: str) -> None:
    found = parse(PUSH | {"remote_request_id": remote}, HERE, request_id)
    assert isinstance(found, ReceiveFrom)
    assert found.label == f"p0/{remote}"


@pytest.mark.parametrize("name", ["0", "request-1-deadbeef", "cmpl-my-request-0-deadbeef"])
def test_an_id_that_may_come_again_is_of_one_engine_alone(name: str) -> None:
    assert shared_id(name) is None


@pytest.mark.parametrize("number", [7, "7"])
def test_a_request_that_sglang_prefilled_has_one_of_its_rooms(number: object) -> None:
    made = parse({"do_remote_prefill": True, "bootstrap_room": number, "remote_host": "::1", "remote_port": 7801}, HERE)
    assert isinstance(made, ReceiveFrom)
    assert (made.label, made.sources) == ("bootstrap_room 7", ("tcp://[::1]:7801",)), "requests differ by their labels"
    one, again = made.room("request-1"), made.room("request-2")
    assert one >> USE_BITS == again >> USE_BITS == tag_of(7)
    assert one != again, "a retry has another room"
    assert one == made.room("request-1")


@pytest.mark.parametrize("number", [-1, 1 << 64, 1.5, True, "0x7", "", [7]])
def test_a_wrong_number_of_a_room_is_named(number: object) -> None:
    params = {"do_remote_prefill": True, "bootstrap_room": number, "remote_host": "::1", "remote_port": 7801}
    with pytest.raises(RequestError, match=r"bootstrap_room: .*(expected|not an integer of 64 bits)"):
        parse(params, HERE)


def test_an_answer_is_what_decode_takes() -> None:
    endpoints = ["tcp://127.0.0.1:7801", "tcp://127.0.0.1:9999"]  # any ports
    for transfer_id, label in ((None, "p0/cmpl-1"), ("xfer-1", "xfer-1")):
        made = answer(endpoints, tp_size=2, engine_id="p0", request_id="cmpl-1", transfer_id=transfer_id)
        made = json.loads(json.dumps(made))
        assert parse(made | {"remote_prefill_cached_tokens": 3}, HERE) == ReceiveFrom(label, tuple(endpoints))
        assert (made["remote_host"], made["remote_port"], made["tp_size"], made["pp_size"]) == ("127.0.0.1", 7801, 2, 1)
        assert made["transfer_mode"] == "push"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([], "kv_transfer_params: JSON: an array of 0, expected object"),
        ("x", "kv_transfer_params: JSON: 'x', expected object"),
        ({"do_remote_decode": 1}, "do_remote_decode: 1, expected bool"),
        (PUSH | {"do_remote_decode": True}, "do_remote_prefill, do_remote_decode: both are true, one must be false"),
        (PUSH | {"transfer_mode": "pull"}, "transfer_mode: 'pull', not 'push'"),
        (PUSH | {"remote_engine_id": None}, "remote_engine_id: missing"),
        (PUSH | {"remote_request_id": 5}, "remote_request_id: 5, expected str"),
        (PUSH | {"remote_request_id": "a\nb"}, "remote_request_id: 'a\\nb', expected str matching regex"),
        (PUSH | {"transfer_id": ""}, "transfer_id: '', expected str of length >= 1"),
        (PUSH | {"transfer_id": "x" * 257}, "expected str of length <= 256"),
        (PUSH | {"remote_port": None}, "remote_port: missing"),
        (PUSH | {"remote_port": True}, "remote_port: True, expected int"),
        (PUSH | {"remote_port": 65_535}, "tp_size: 2 ranks, from port 65535 on"),
        (PUSH | {"remote_port": 1e300}, "remote_port: 1e+300, expected float <= 65535"),
        (PUSH | {"remote_port": float("nan")}, "remote_port: nan, expected"),
        (PUSH | {"tp_size": 65}, "tp_size: 65, expected int <= 64"),
        (PUSH | {"tp_size": 64, "pp_size": 64}, "tp_size: 4096 ranks"),
        (PUSH | {"remote_host": "127.0.0.1:1/"}, "endpoint"),
        (PUSH | {"remote_host": "*"}, "can be bound, but not dialled"),
        (PUSH | {"remote_host": "10.0.0.1"}, "remote_host: 10.0.0.1 is another host: set key and allow, or insecure"),
        (PUSH | {"remote_host": "evil.example"}, "remote_host: evil.example is another host"),
        (PUSH | {"remote_endpoints": "tcp://127.0.0.1:1"}, "remote_endpoints: 'tcp://127.0.0.1:1', expected array"),
        (PUSH | {"remote_endpoints": []}, "remote_endpoints: an array of 0, expected array of length >= 1"),
        (
            PUSH | {"remote_endpoints": ["tcp://127.0.0.1:1"] * 257},
            "remote_endpoints: an array of 257, expected array of length <= 256",
        ),
        (PUSH | {"remote_endpoints": ["tcp://127.0.0.1:1", 2]}, "remote_endpoints[1]: 2, expected str"),
        (PUSH | {"remote_endpoints": ["tcp://127.0.0.1:1"] * 2}, "remote_endpoints: one is there twice"),
        (PUSH | {"remote_endpoints": ["ipc:///tmp/x"]}, "is not tcp://host:port"),
        (PUSH | {"remote_endpoints": [f"{'a' * 40}@tcp://127.0.0.1:1"]}, "endpoint"),
    ],
)
def test_what_is_wrong_is_named_in_one_short_line(wrong: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(wrong, HERE)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_with_keys_only_listed_peers_are_dialled() -> None:
    one, two, other = (generate_pair().public for _ in range(3))
    listed = Reachable(AllowList({one: "p0", two: "p0-tp1"}))
    ports = ("tcp://10.0.0.1:7801", "tcp://10.0.0.1:7802")
    far = PUSH | {"remote_host": "10.0.0.1"}
    # By the name under which the list has the engine, and its ranks.
    assert parse(far, listed) == ReceiveFrom("p0/cmpl-1", (f"{one}@{ports[0]}", f"{two}@{ports[1]}"))
    given = far | {"remote_endpoints": [f"{two}@{ports[1]}"]}
    assert parse(given, listed) == ReceiveFrom("p0/cmpl-1", (f"{two}@{ports[1]}",))
    for wrong, text in (
        (far | {"remote_engine_id": "p1"}, "remote_engine_id: 'p1' is not on this engine's list of peers"),
        (far | {"remote_endpoints": [f"{other}@{ports[0]}"]}, "its key: not on the allow-list"),
        (far | {"remote_endpoints": [ports[0]]}, "its key: not on the allow-list"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(wrong, listed)
        assert text in str(caught.value)
    assert parse(far, Reachable(insecure=True)) == ReceiveFrom("p0/cmpl-1", ports)
    with pytest.raises(RequestError, match="has a key, this engine has none"):
        parse(given, Reachable(insecure=True))


EVERY: dict[str, Any] = PUSH | {
    "transfer_id": "x", "transfer_mode": "push", "pp_size": 1, "remote_endpoints": ["tcp://127.0.0.1:1"]
}  # fmt: skip


@pytest.mark.parametrize(
    "right",
    [
        EVERY, PUSH, TOY | {"transfer_id": "x"},
        {"do_remote_prefill": True, "bootstrap_room": 7, "remote_host": "::1", "remote_port": 7801},
    ],
    ids=["endpoints", "ranks", "prefill", "bridge"],
)  # fmt: skip
def test_any_value_of_any_field_is_taken_or_fails_its_request_by_name(right: dict[str, Any]) -> None:
    for case, value in spoiled(right):
        why = ""
        try:
            parse(value, Reachable(insecure=True))
        except RequestError as error:
            why = str(error)
        field = case.partition(" ")[0]
        assert not why or field in why or field == "answer" or "missing" in why or "endpoint '" in why, (case, why)
        assert "\n" not in why
        assert len(why) < 600

"""Every argument of every client's call with impossible values: the promised error, no other room disturbed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from pdtransfer.bus.keys import AllowList
from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.errors import LocalProtocolError
from pdtransfer.limits import TOKENS_MAX
from pdtransfer.wire import Member
from tests.support.bus_peers import pair as keys
from tests.support.client_pair import Pair, client_pair

LABELS: list[Any] = [0, -1, 1 << 64, 1.5, "1", None, [1]]
COUNTS = [1.5, "1", [1]]
TEXTS = [5, None, b"x"]
LISTS = ["tcp://127.0.0.1:1", 5, [5], [None]]
RAGGED = [[0], [1, 2]]
ENDPOINTS = [5, None, [], "127.0.0.1:1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:x"]
SECONDS: list[Any] = ["1", None, [1], math.nan]
EVENTS = [5, "x", object()]
SPANS: list[Any] = [(0.0, 1.0), ("a", "b"), (0,), (0, 1, 2), 5]

WRONG: dict[str, dict[str, list[Any]]] = {  # by call and argument
    "prefill.open": {
        "room": LABELS, "tokens": [*COUNTS, 0, -1, TOKENS_MAX + 1], "time_left_s": SECONDS, "grants": COUNTS,
        "peers": ["d", 5, [5]],
    },
    "prefill.push": {
        "room": LABELS, "pages": [None, 5, "x", object(), [], [-1], [0.5], [[0]], RAGGED, [1 << 70], [True]],
        "rows": [*SPANS, None, (0, 0), (1, 0), (-1, 1), (0, 17), (0, 1 << 70)], "layers": SPANS,
        "component": ["index", 5, None, ["kv"]], "skip": [*COUNTS, None, -1, 16], "after": EVENTS,
    },
    "prefill.finish": {"room": LABELS, "aux": [5, None, "x", [1]], "after": EVENTS},
    "prefill.abort": {"room": LABELS, "detail": TEXTS},
    "prefill.set_group": {"members": [None, 5, "p", [5], ["p"], [Member("p", ""), Member("q", 5)]]},
    "decode.dial": {"source": ENDPOINTS},
    "decode.expect": {
        "room": LABELS, "tokens": [*COUNTS, None, 0, -1, TOKENS_MAX + 1], "sources": LISTS, "growth": [*COUNTS, None],
        "prefix": [*COUNTS, None], "time_left_s": SECONDS, "salt": [5, "x", [1]],
        "prompt": [[], 5, "abcde", [0.5] * 5, [[1]] * 5, RAGGED, [-1] * 5, [1 << 32] * 5, [1 << 70] * 5, object(),
                   np.full(5, 1 << 63, np.uint64), np.empty(0, np.int32)],
        "slots": [5, [], {}, {"kv": [0]}], "enable_hisparse": [], "whole_group": [],
    },
    "decode.withdraw": {"room": LABELS, "sources": LISTS, "detail": TEXTS},
    "decode.release": {"room": LABELS, "after": EVENTS},
    "decode.abort": {"room": LABELS, "detail": TEXTS},
}  # fmt: skip
SLOTS: list[Any] = [
    None, 5, [], {}, {"no": [0]}, {"kv": None}, {"kv": []}, {"kv": [0] * 5}, {"kv": [0.5] * 5}, {"kv": RAGGED},
    {"kv": object()}, {"kv": [1 << 70] * 5}, {"kv": np.full(5, 1 << 63, np.uint64)}, {"kv": [-2, 1, 2, 3, 4]},
]  # fmt: skip
RIGHT: dict[str, Any] = {
    "room": 7, "tokens": 5, "pages": [0], "rows": (0, 5), "sources": ["tcp://127.0.0.1:1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with client_pair(prefill_settings={"group": None}) as pair:
        yield pair


def method(client: PrefillClient | DecodeClient, name: str, **wrong: Any) -> Any:
    """The call, with one wrong argument and every other one that it must have right."""
    call = getattr(client, name)
    needed = [of.name for of in inspect.signature(call).parameters.values() if of.default is of.empty]
    return call(**{name: RIGHT.get(name) for name in needed} | wrong)


@pytest.mark.parametrize("call", WRONG)
def test_an_argument_that_cannot_be_is_refused_and_disturbs_no_other_room(
    call: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    side, _, name = call.partition(".")
    client = getattr(pair, side)
    for argument, values in WRONG[call].items():
        for value in values:
            with pytest.raises(LocalProtocolError):
                method(client, name, **{argument: value})
    with suppress(LocalProtocolError):  # it is known already
        pair.prefill.set_group([Member("p", "")])
    room = 100 + list(WRONG).index(call)
    pair.moved(room, 5)
    pair.decode.release(room)
    assert not [record for record in caplog.records if record.name == "asyncio"], "a call has raised on the loop"


@pytest.mark.parametrize("client", [PrefillClient, DecodeClient], ids=["prefill", "decode"])
def test_each_argument_of_each_call_is_tried(client: type[PrefillClient | DecodeClient]) -> None:
    side = client.__name__.removesuffix("Client").lower()
    calls = {name: call for name, call in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
    for name in calls.keys() - {"start", "close", "poll", "fileno", "state", "quiesce", "allow"}:  # tried below
        assert set(inspect.signature(calls[name]).parameters) - {"self"} == WRONG[f"{side}.{name}"].keys(), name


def test_slots_that_an_engine_cannot_have_chosen_are_refused() -> None:
    with client_pair(decode_options={"engine_slots": True}) as pair:
        for slots in SLOTS:
            with pytest.raises(LocalProtocolError, match="slots"):
                method(pair.decode, "expect", slots=slots)
        with pytest.raises(KeyError):
            pair.decode.state(7)


def test_a_state_that_is_not_known_and_a_time_that_is_none(pair: Pair) -> None:
    for client in (pair.prefill, pair.decode):
        for room in (5_000, *LABELS):
            with pytest.raises(KeyError):
                client.state(room)
    with pytest.raises(KeyError):
        pair.prefill.quiesce(5_000, 1.0)
    pair.prefill.open(5_001, tokens=5, time_left_s=math.inf)
    for seconds in SECONDS:
        with pytest.raises(LocalProtocolError, match="timeout_s"):
            pair.prefill.quiesce(5_001, seconds)
    assert pair.prefill.quiesce(5_001, math.inf)


def test_an_allow_list_that_is_none_is_refused() -> None:
    ours = keys()
    with client_pair(start=False, prefill_settings={"keys": ours, "allowed": AllowList({})}) as pair:
        wrong: list[Any] = [None, 5, {}]
        for allowed in wrong:
            with pytest.raises(LocalProtocolError, match="allowed"):
                pair.prefill.allow(allowed)


def test_what_utf8_does_not_have_is_replaced_and_a_number_of_another_library_is_one(pair: Pair) -> None:
    with suppress(LocalProtocolError):
        pair.prefill.set_group([Member("p", "")])
    room: Any = np.int64(5_002)
    pair.expect(room, np.int32(5))  # pyright: ignore[reportArgumentType]
    pair.prefill.open(room, tokens=5)
    pair.prefill.abort(room, "no file \udcff")
    assert pair.failed(5_002).detail.endswith("no file ?")

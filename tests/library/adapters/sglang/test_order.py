"""What each side reports, and when, whatever order a client's events come in: clients with a script in place of real
ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer import (
    Cause,
    KVPoll,
    LocalProtocolError,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    RoomReady,
)
from pdtransfer.adapters.sglang.decode import ReceivingSide
from pdtransfer.adapters.sglang.pools import KVPools
from pdtransfer.adapters.sglang.prefill import SendingSide
from pdtransfer.adapters.sglang.rooms import Change, Uses
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_ranks import AUX, HEADS, Pool, described_of


class ScriptedClient:
    """Returns the events that it is given, and keeps the calls of each name."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.calls: dict[str, list[int]] = {}

    def poll(self) -> list[object]:
        events, self.events = self.events, []
        return events

    def __getattr__(self, name: str) -> Any:
        def call(room: int, *_: object, **__: object) -> bool:
            self.calls.setdefault(name, []).append(room)
            return True

        return call


def described(*states: str) -> KVPools:
    pool = Pool(None, 4, HEADS, states, False)
    return described_of(pool, Ranks(), False, lambda _: (pool.raw.ctypes.data, "dram"))


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


def receiving(client: Any, *states: str) -> ReceivingSide:
    return ReceivingSide(
        client, described(*states), Uses(5), put_aux=lambda *_: None, aux_bytes=len(AUX), time_left_s=60.0
    )


def expected(side: ReceivingSide, client: ScriptedClient, number: int, **more: Any) -> int:
    """The room in which decode asks for two pages."""
    given: dict[str, Any] = {"prefix": 0, "states": [], "aux_index": 3, "sources": ["tcp://127.0.0.1:1"]}
    side.expect(number, np.array([1, 8], np.int32), **given | more)
    return client.calls["expect"][-1]


def sent(client: Any, number: int = 7) -> tuple[SendingSide, int]:
    """A request of prefill that decode has asked for, and its room."""
    side = SendingSide(client, described(), time_left_s=60.0)
    side.begin(number)
    return side, leased(side, client, number)


def leased(side: SendingSide, client: Any, number: int, use: int = 0) -> int:
    room = Uses(use).room(number)
    client.events = [RoomAsked(room, 8, 0)]
    side.turn()
    client.events = [RoomLeased(room, 8, 0)]
    assert side.turn() == [Change(number, KVPoll.WAITING_FOR_INPUT)]
    return room


def ready(room: int) -> RoomReady:
    return RoomReady(room, {}, AUX, 64)


def test_decode_reports_success_once_nobody_can_write_the_pages(client: ScriptedClient) -> None:
    side = receiving(client)
    room = expected(side, client, 7)
    client.events = [ready(room)]
    assert side.turn() == []
    assert not side.is_drained(7)
    client.events = [RoomDrained(room)]
    assert side.turn() == [Change(7, KVPoll.SUCCESS)]
    assert side.is_drained(7)


def test_decode_reports_nothing_of_a_use_that_was_given_up_to_the_next_one(client: ScriptedClient) -> None:
    side = receiving(client)
    before = expected(side, client, 7)
    side.give_up(7)
    room = expected(side, client, 7)
    assert room != before
    client.events = [RoomFailed(before, Cause.ABORTED, "")]
    assert side.turn() == []
    client.events = [ready(room), RoomDrained(room)]
    assert side.turn() == [Change(7, KVPoll.SUCCESS)]
    assert not side.is_drained(7), "the pages of the use before may still be written"
    client.events = [RoomDrained(before)]
    assert side.turn() == []
    assert side.is_drained(7)


def test_more_indices_than_a_state_has_rows_are_refused_by_name(client: ScriptedClient) -> None:
    side = receiving(client, "mamba")
    with pytest.raises(LocalProtocolError, match="mamba: 2 rows, expected 1 for 8 tokens"):
        expected(side, client, 7, states=[np.array([4, 5])])
    assert "expect" not in client.calls
    assert side.is_drained(7)


@pytest.mark.parametrize("end", ["landed", "failed"])
def test_prefill_reports_an_end_once_nothing_reads_the_pages(end: str, client: ScriptedClient) -> None:
    side, room = sent(client)
    side.push(7, np.array([5, 2]), first_page=0, aux=AUX)
    client.events = [RoomLanded(room, 64) if end == "landed" else RoomFailed(room, Cause.DEADLINE, "late")]
    assert side.turn() == []
    client.events = [RoomDrained(room)]
    expected_end = Change(7, KVPoll.SUCCESS) if end == "landed" else Change(7, KVPoll.FAILED, "deadline: late")
    assert side.turn() == [expected_end]


def test_prefill_pushes_nothing_of_a_request_that_has_ended(client: ScriptedClient) -> None:
    """A chunk that was under way as the room failed: its pages are others' soon."""
    side, room = sent(client)
    side.push(7, np.array([5]), first_page=0)
    client.events = [RoomFailed(room, Cause.ABORTED, "")]
    side.turn()
    side.push(7, np.array([2]), first_page=1, aux=AUX)
    assert client.calls["push"] == [room]
    assert "finish" not in client.calls


def test_prefill_gives_an_earlier_request_of_the_same_number_up(client: ScriptedClient) -> None:
    side, before = sent(client)
    side.begin(7)
    assert client.calls["abort"] == [before]
    room = leased(side, client, 7, use=1)
    client.events = [RoomFailed(before, Cause.ABORTED, ""), RoomDrained(before)]
    assert side.turn() == []
    client.events = [RoomLanded(room, 64), RoomDrained(room)]
    assert side.turn() == [Change(7, KVPoll.SUCCESS)]

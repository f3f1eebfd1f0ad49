"""What each side reports in whatever order a client's events come in: scripted clients in place of real ones."""

from __future__ import annotations

from types import SimpleNamespace
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
from tests.library.adapters.sglang.sglang_modules import with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import AUX, HEADS, Pool, described_of, slots_of


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


def test_what_is_offered_before_decode_has_memory_leaves_with_the_result(client: ScriptedClient) -> None:
    side, room = SendingSide(client, described(), time_left_s=60.0), Uses(0).room(7)
    side.begin(7)
    client.events = [RoomAsked(room, 8, 0)]
    side.turn()
    side.push_ahead(7, np.array([1, 8]), start=0, after=None, last=True)
    client.events = [RoomLeased(room, 8, 0)]
    side.turn()
    side.push(7, np.array([1, 8]), first_page=0, aux=AUX)
    assert client.calls["push"] == [room]


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


@pytest.mark.parametrize("but", [{}, {"disaggregation_mode": "decode"}, {"pp_size": 2}, {"drafter": object()}])
def test_pages_are_offered_when_their_step_is_launched(but: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages of a chunk, and all that is left of a prompt with its last one; none that decode has, or before it
    has asked. A drafter may compute more, and stages have other streams."""
    context: dict[str, Any] = {
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "pdtransfer",
        "pp_size": 1,
    } | but
    hooks, offered = with_stand_ins("hooks", monkeypatch, **context), list[tuple[str, list[int], int, bool]]()

    class Sender(hooks.dialect.KVSender):
        def __init__(self, name: str, done: int, dummy: bool) -> None:
            manager = SimpleNamespace(is_dummy_cp_rank=dummy, sending=self)
            self.bootstrap_room, self.offered, self.kv_mgr = name, done, manager

        def push_ahead(self, name: str, pages: Any, *, start: int, after: Any, last: bool) -> None:
            assert after is None, "a CPU has computed them"
            offered.append((name, pages.tolist(), start, last))

    def request(
        name: str, end: int, *, done: int = 0, prefix: int = 0, waits: bool = False, dummy: bool = False
    ) -> Any:
        return SimpleNamespace(
            origin_input_ids=[1] * 10, extend_end=end, start_send_idx=prefix, pending_bootstrap=waits,
            kv=SimpleNamespace(req_pool_idx=0), disagg_kv_sender=Sender(name, done, dummy),
        )  # fmt: skip

    batch = SimpleNamespace(reqs=[
        request("whole", 10), request("chunk", 7), request("rest", 10, done=4), request("known", 10, prefix=8),
        request("short", 3), request("asked later", 10, waits=True), request("rank", 10, dummy=True),
        request("unlike pages", 10, prefix=2), SimpleNamespace(origin_input_ids=[1], disagg_kv_sender=None),
    ])  # fmt: skip
    scheduler = SimpleNamespace(
        draft_worker=context.get("drafter"), device="cpu", enable_overlap=False,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=4, translate_kv_indices_for_transfer=lambda of: of),
        req_to_token_pool=SimpleNamespace(req_to_token=hooks.torch.tensor(slots_of([5, 2, 9], 4))[None]),
    )  # fmt: skip
    assert hooks._run_batch(lambda *given: given, scheduler, batch, 3) == (scheduler, batch, 3)
    assert offered == ([] if but else [
        ("whole", [5, 2, 9], 0, True), ("chunk", [5], 0, False), ("rest", [2, 9], 4, True), ("known", [9], 8, True)
    ])  # fmt: skip

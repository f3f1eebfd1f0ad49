"""What the scheduler's side orders, step by step, with stand-ins for vLLM's requests and steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Refuse, Rows
from pdtransfer.adapters.vllm.params import Reachable, ReceiveFrom, parse
from pdtransfer.adapters.vllm.scheduler import BlockTable, SchedulerSide

SENDS: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
RECEIVES: dict[str, Any] = {
    "do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "x", "remote_host": "127.0.0.1",
    "remote_port": 7801, "tp_size": 1,
}  # fmt: skip
ADDRESS = ("tcp://127.0.0.1:7801",)
STOPPED, ABORTED = "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Any


@dataclass
class New:
    req_id: str
    block_ids: BlockTable
    num_computed_tokens: int = 0


@dataclass
class Cached:
    req_ids: Sequence[str] = ()
    resumed_req_ids: Collection[str] = ()
    new_block_ids: Sequence[BlockTable | None] = ()
    num_computed_tokens: Sequence[int] = ()


@dataclass
class Step:
    scheduled_new_reqs: Sequence[New] = ()
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    preempted_req_ids: Collection[str] | None = None


def new(name: str, blocks: BlockTable, count: int, computed: int = 0) -> Step:
    return Step([New(name, blocks, computed)], num_scheduled_tokens={name: count})


def more(name: str, blocks: BlockTable | None, count: int, computed: int, **others: Any) -> Step:
    return Step((), Cached([name], (), [blocks], [computed]), {name: count}, **others)


def side(*groups: KVGroup, **roles: bool) -> SchedulerSide:
    made = SchedulerSide(groups or (KVGroup(0, 16),), engine_id="p0", **{"sends": True, "receives": True} | roles)
    made.endpoints = ADDRESS
    return made


def begun(made: SchedulerSide, tokens: int, params: Any = None, name: str = "a") -> Request:
    request = Request(name, tokens, SENDS if params is None else params)
    made.on_new_request(request)
    return request


def rows(orders: Orders) -> list[tuple[int, int, int]]:
    return [(each.group, each.first, each.end) for chunk in orders.chunks for each in chunk.rows]


# Prefill


def test_a_prompt_in_one_step_is_opened_pushed_and_finished() -> None:
    made = side()
    request = begun(made, 40)
    orders = made.orders(new("a", [[7, 3, 5]], 40))
    assert orders == Orders(opens=[Open("a", "p0/a", 40)], chunks=[Chunk("a", (Rows(0, 0, 3, (7, 3, 5)),), last=True)])
    keeps, params = made.on_finished(request, STOPPED)
    assert keeps
    assert parse(params, Reachable()) == ReceiveFrom("p0/a", ADDRESS)
    assert made.orders(Step()) == Orders()


def test_chunks_push_whole_blocks_and_the_last_one_what_is_left() -> None:
    made = side()
    begun(made, 40, SENDS | {"transfer_id": "xfer-1"})
    first = made.orders(new("a", [[7, 3]], 24))
    assert first.opens == [Open("a", "xfer-1", 40)]
    assert first.chunks == [Chunk("a", (Rows(0, 0, 1, (7,)),), last=False)]
    assert made.orders(more("a", None, 6, 24)).chunks == [], "no block is complete"
    last = made.orders(more("a", [[5]], 10, 30))
    assert last.chunks == [Chunk("a", (Rows(0, 1, 3, (7, 3, 5)),), last=True)]
    assert made.orders(more("a", None, 1, 40)).chunks == []


def test_what_prefills_own_cache_has_leaves_with_the_first_chunk() -> None:
    made = side()
    begun(made, 40)
    assert rows(made.orders(new("a", [[7, 3, 5]], 8, computed=32))) == [(0, 0, 3)]


def test_of_a_window_only_the_blocks_that_stay_are_pushed() -> None:
    made = side(KVGroup(0, 16), KVGroup(1, 16, window=20))
    begun(made, 100)
    table = [list(range(1, 8)), [0, 0, 3, 4, 5, 6, 7]]
    assert rows(made.orders(new("a", [table[0][:4], table[1][:4]], 64))) == [(0, 0, 4)]
    assert rows(made.orders(more("a", [table[0][4:], table[1][4:]], 36, 64))) == [(0, 4, 7), (1, 5, 7)]


def test_a_request_that_generates_on_gives_its_window_up_before_its_blocks_are_reused() -> None:
    made = side(KVGroup(0, 16, window=20))
    request = begun(made, 40)
    made.orders(new("a", [[1, 2, 3]], 40))
    assert made.orders(more("a", None, 1, 40)).quiesce == []
    assert made.orders(more("a", None, 1, 51)).quiesce == ["a"]
    assert made.on_finished(request, STOPPED) == (False, None)


def test_a_preempted_request_is_quiesced_and_begins_again_in_another_room() -> None:
    made = side()
    request = begun(made, 40)
    made.orders(new("a", [[7, 3]], 24))
    assert made.orders(Step(preempted_req_ids={"a"})) == Orders(quiesce=["a"])
    again = Step((), Cached(["a"], {"a"}, [[[9, 8, 6]]], [0]), {"a": 40})
    orders = made.orders(again)
    assert orders.opens == [Open("a", "p0/a#1", 40)]
    assert orders.chunks == [Chunk("a", (Rows(0, 0, 3, (9, 8, 6)),), last=True)]
    keeps, params = made.on_finished(request, STOPPED)
    assert keeps
    assert parse(params, Reachable()) == ReceiveFrom("p0/a#1", ADDRESS)


def test_a_preempted_room_that_decode_may_know_fails_for_good() -> None:
    made = side()
    request = begun(made, 40, SENDS | {"transfer_id": "xfer-1"})
    made.orders(new("a", [[7, 3]], 24))
    assert made.orders(Step(preempted_req_ids={"a"})).quiesce == ["a"]
    again = made.orders(Step((), Cached(["a"], {"a"}, [[[9, 8, 6]]], [0]), {"a": 40}))
    assert (again.opens, again.chunks) == ([], [])
    assert made.on_finished(request, STOPPED) == (False, None)


def test_preempted_before_its_first_step_it_has_nothing_to_give_up() -> None:
    made = side()
    begun(made, 40)
    assert made.orders(Step(preempted_req_ids={"a", "unknown"})) == Orders()


@pytest.mark.parametrize(("steps", "keeps"), [(0, False), (1, True), (2, True)])
def test_prefill_that_is_given_up_fails_its_room(steps: int, keeps: bool) -> None:
    made = side()
    request = begun(made, 40)
    for step in (new("a", [[7, 3]], 24), more("a", [[5]], 16, 24))[:steps]:
        made.orders(step)
    assert made.on_finished(request, ABORTED) == (keeps, None)
    assert made.orders(Step()).aborts == ["a"] * keeps


@pytest.mark.parametrize("params", [SENDS | {"transfer_id": 3}, {"do_remote_decode": "yes"}])
def test_wrong_parameters_of_prefill_hand_nothing_over(params: Any) -> None:
    made = side()
    request = begun(made, 40, params)
    assert made.matched_tokens(request, 0) == 0
    assert made.orders(new("a", [[7, 3, 5]], 40)) == Orders()
    assert made.on_finished(request, STOPPED) == (False, None)


# Decode


def test_a_request_waits_for_what_its_own_cache_lacks() -> None:
    made = side()
    request = begun(made, 40, RECEIVES)
    assert [made.matched_tokens(request, 16) for _ in range(2)] == [24, 24]
    made.on_blocks(request, [[7, 3, 5]], 24)
    assert made.matched_tokens(request, 0) == 0, "it is asked for once"
    made.on_blocks(request, [[7, 3, 5]], 0)
    assert made.orders(Step()).receives == [Receive("a", "p0/x", ADDRESS, 40, 16, ((7, 3, 5),))]
    assert made.on_finished(request, STOPPED) == (False, None)
    assert made.orders(Step()) == Orders(aborts=["a"])


def test_a_windows_lost_blocks_and_blocks_behind_the_prompt_are_no_slots() -> None:
    made = side(KVGroup(0, 16), KVGroup(2, 16, window=20))
    request = begun(made, 40, RECEIVES)
    made.on_blocks(request, [[7, 3, 5, 9], [1, 1, 1], [0, 4, 6]], 40)
    assert made.orders(Step()).receives[0].slots == ((7, 3, 5), (-1, 4, 6))


@pytest.mark.parametrize("ends", [True, False])
def test_what_decode_does_not_need_prefill_need_not_keep(ends: bool) -> None:
    """The request ended before it had blocks, or its blocks were all here."""
    made = side()
    request = begun(made, 40, RECEIVES)
    if ends:
        assert made.on_finished(request, ABORTED) == (False, None)
    else:
        made.on_blocks(request, [[7, 3, 5]], 0)
    assert made.has_word_for_peers
    assert made.orders(Step()) == Orders(
        receives=[Receive("a", "p0/x", ADDRESS, 40, 40, ((-1, -1, -1),), awaited=False)]
    )


def test_wrong_parameters_of_decode_fail_its_load_alone() -> None:
    made = side()
    request = begun(made, 40, RECEIVES | {"remote_port": 0})
    assert made.matched_tokens(request, 0) == 40
    made.on_blocks(request, [[7, 3, 5]], 40)
    assert made.orders(Step()) == Orders(refusals=[Refuse("a", (7, 3, 5))])


def test_wrong_parameters_of_a_request_without_blocks_need_nothing() -> None:
    made = side()
    request = begun(made, 40, RECEIVES | {"remote_port": 0})
    made.on_finished(request, ABORTED)
    assert not made.has_word_for_peers
    assert made.orders(Step()) == Orders()


def test_a_role_that_an_engine_has_not_is_no_hand_off() -> None:
    prefill, decode = side(receives=False), side(sends=False)
    request = begun(prefill, 40, RECEIVES)
    assert prefill.matched_tokens(request, 0) == 0
    request = begun(decode, 40, SENDS)
    assert decode.matched_tokens(request, 0) == 0
    assert decode.orders(new("a", [[7, 3, 5]], 40)) == Orders()


def test_a_request_without_a_hand_off_is_left_alone() -> None:
    made = side()
    request = begun(made, 40, {})
    assert made.matched_tokens(request, 0) == 0
    made.on_blocks(request, [[7, 3, 5]], 0)
    assert made.orders(new("a", [[7, 3, 5]], 40)) == Orders()
    assert made.on_finished(request, STOPPED) == (False, None)

"""What the scheduler's side orders, step by step, with stand-ins for vLLM's requests and steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdtransfer import room_id
from pdtransfer.adapters.kit.peers import Reachable
from pdtransfer.adapters.vllm import scheduler as scheduler_module
from pdtransfer.adapters.vllm.kinds import PAGED, STATE
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Refuse, Rows, Withdraw
from pdtransfer.adapters.vllm.params import ReceiveFrom, parse
from pdtransfer.adapters.vllm.scheduler import BlockTable, SchedulerSide
from pdtransfer.errors import ConfigError

SENDS: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
RECEIVES: dict[str, Any] = {
    "do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "x", "remote_host": "127.0.0.1",
    "remote_port": 7801, "tp_size": 1,
}  # fmt: skip
ADDRESS = ("tcp://127.0.0.1:7801",)
STOPPED, ABORTED = "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"
PAGE, WINDOW, CHUNKS = PAGED.of(16), PAGED.of(16, window=20), PAGED.of(16, chunk=32)


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Any
    prompt_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool = False
    max_tokens: int = 16
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    _all_token_ids: list[int] = field(default_factory=list[int])


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


class Pool:
    """vLLM's: how often each block is counted."""

    def __init__(self) -> None:
        self.blocks = [f"block {number}" for number in range(64)]
        self.counts: dict[int, int] = {}

    def touch(self, blocks: Sequence[str]) -> None:
        self._count(blocks, 1)

    def free_blocks(self, ordered_blocks: Iterable[str]) -> None:
        self._count(ordered_blocks, -1)

    def _count(self, blocks: Iterable[str], by: int) -> None:
        for block in blocks:
            number = self.blocks.index(block)
            self.counts[number] = self.counts.get(number, 0) + by

    @property
    def kept(self) -> set[int]:
        assert set(self.counts.values()) <= {0, 1}
        return {number for number, count in self.counts.items() if count}


@dataclass
class Rank:
    endpoint: str
    identity: dict[str, Any] = field(default_factory=lambda: {"facts": {}})
    block_bytes: tuple[int, ...] = (1_000,)


def side(*groups: KVGroup, **roles: bool) -> SchedulerSide:
    found = groups or (KVGroup(0, PAGE),)
    made = SchedulerSide(found, engine_id="p0", **{"sends": True, "receives": True} | roles)
    made.on_ranks({(0, 0): Rank(*ADDRESS, block_bytes=(1_000,) * len(found))})
    made.block_pool = Pool()
    return made


def begun(made: SchedulerSide, tokens: int, params: Any = None, name: str = "a") -> Request:
    request = Request(name, tokens, SENDS if params is None else params)
    made.on_new_request(request)
    return request


def rows(orders: Orders) -> list[tuple[int, int, int]]:
    return [(each.group, each.first, each.end) for chunk in orders.chunks for each in chunk.rows]


# Prefill


@pytest.fixture
def scheduler() -> SchedulerSide:
    return side()


def test_a_prompt_in_one_step_is_opened_pushed_and_finished(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40)
    orders = scheduler.orders(new("a", [[7, 3, 5]], 40))
    assert orders == Orders(opens=[Open("a", "p0/a", 40)], chunks=[Chunk("a", (Rows(0, 0, 3, (7, 3, 5)),), last=True)])
    keeps, params = scheduler.on_finished(request, STOPPED)
    assert keeps
    assert parse(params, Reachable()) == ReceiveFrom("p0/a", ADDRESS)
    assert scheduler.orders(Step()) == Orders()


def test_chunks_push_whole_blocks_and_the_last_one_what_is_left(scheduler: SchedulerSide) -> None:
    begun(scheduler, 40, SENDS | {"transfer_id": "xfer-1"})
    first = scheduler.orders(new("a", [[7, 3]], 24))
    assert first.opens == [Open("a", "xfer-1", 40)]
    assert first.chunks == [Chunk("a", (Rows(0, 0, 1, (7,)),), last=False)]
    assert scheduler.orders(more("a", None, 6, 24)).chunks == [], "no block is complete"
    last = scheduler.orders(more("a", [[5]], 10, 30))
    assert last.chunks == [Chunk("a", (Rows(0, 1, 3, (7, 3, 5)),), last=True)]
    assert scheduler.orders(more("a", None, 1, 40)).chunks == []


def test_what_prefills_own_cache_has_leaves_with_the_first_chunk(scheduler: SchedulerSide) -> None:
    begun(scheduler, 40)
    assert rows(scheduler.orders(new("a", [[7, 3, 5]], 8, computed=32))) == [(0, 0, 3)]


def test_of_a_window_only_the_blocks_that_stay_are_pushed() -> None:
    made = side(KVGroup(0, PAGE), KVGroup(1, WINDOW))
    begun(made, 100)
    table = [list(range(1, 8)), [0, 0, 3, 4, 5, 6, 7]]
    assert rows(made.orders(new("a", [table[0][:4], table[1][:4]], 64))) == [(0, 0, 4)]
    assert rows(made.orders(more("a", [table[0][4:], table[1][4:]], 36, 64))) == [(0, 4, 7), (1, 5, 7)]


@pytest.mark.parametrize(
    ("group", "tokens", "first"),
    [(KVGroup(0, WINDOW), 35, 0), (KVGroup(0, WINDOW), 36, 1), (KVGroup(0, CHUNKS), 64, 2)],
)
def test_what_the_prompts_last_token_sees_is_sent(group: KVGroup, tokens: int, first: int) -> None:
    """Decode computes that token anew, so its window begins one token before that of the next."""
    made = side(group)
    begun(made, tokens)
    end = group.kind.rows(tokens)
    orders = made.orders(new("a", [list(range(1, 1 + end))], tokens))
    assert [(each.rows[0].first, each.rows[0].end, each.last) for each in orders.chunks] == [(first, end, True)]
    assert group.kind.needed_from(made.matched_tokens(begun(made, tokens, RECEIVES, "b"), 0) or 0) == first
    gives_up = made.orders(more("a", None, 1, tokens)).quiesce
    assert gives_up == ["a"] * (group.kind.needed_from(tokens) > first), "vLLM frees these with the first one generated"


def test_a_request_that_generates_on_gives_its_window_up_before_its_blocks_are_reused() -> None:
    made = side(KVGroup(0, WINDOW))
    request = begun(made, 40)
    made.orders(new("a", [[1, 2, 3]], 40))
    assert made.orders(more("a", None, 1, 40)).quiesce == []
    assert made.orders(more("a", None, 1, 51)).quiesce == ["a"]
    assert made.orders(more("a", None, 1, 52)) == Orders(), "its blocks are others' by now"
    assert made.on_finished(request, STOPPED) == (False, None)


def test_a_preempted_request_is_quiesced_and_begins_again_in_another_room(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40)
    scheduler.orders(new("a", [[7, 3]], 24))
    assert scheduler.orders(Step(preempted_req_ids={"a"})) == Orders(quiesce=["a"])
    again = Step((), Cached(["a"], {"a"}, [[[9, 8, 6]]], [0]), {"a": 40})
    orders = scheduler.orders(again)
    assert orders.opens == [Open("a", "p0/a#1", 40)]
    assert orders.chunks == [Chunk("a", (Rows(0, 0, 3, (9, 8, 6)),), last=True)]
    keeps, params = scheduler.on_finished(request, STOPPED)
    assert keeps
    assert parse(params, Reachable()) == ReceiveFrom("p0/a#1", ADDRESS)


def test_a_preempted_room_that_decode_may_know_fails_for_good(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, SENDS | {"transfer_id": "xfer-1"})
    scheduler.orders(new("a", [[7, 3]], 24))
    assert scheduler.orders(Step(preempted_req_ids={"a"})).quiesce == ["a"]
    again = scheduler.orders(Step((), Cached(["a"], {"a"}, [[[9, 8, 6]]], [0]), {"a": 40}))
    assert (again.opens, again.chunks) == ([], [])
    assert scheduler.on_finished(request, STOPPED) == (False, None)


def test_of_several_prompts_with_one_transfer_id_the_first_is_handed_over(scheduler: SchedulerSide) -> None:
    one, two = (begun(scheduler, 40, SENDS | {"transfer_id": "xfer-1"}, name) for name in "ab")
    orders = scheduler.orders(Step([New("b", [[1]]), New("a", [[7, 3, 5]])], num_scheduled_tokens={"b": 16, "a": 40}))
    assert [each.request_id for each in (*orders.opens, *orders.chunks)] == ["a", "a"]
    assert [scheduler.on_finished(each, STOPPED)[0] for each in (two, one)] == [False, True]
    begun(scheduler, 40, SENDS | {"transfer_id": "xfer-1"}, "late")
    assert scheduler.orders(new("late", [[7, 3, 5]], 40)) == Orders()


def test_a_request_has_the_id_that_decode_knows_before_prefill_answers() -> None:
    """Unless an earlier one had it: a room is used once."""
    made, uuid = side(), "0f8fad5bd9cb469fa16570867728950e"
    names = [f"cmpl-{uuid}-0-{own}" for own in ("deadbeef", "0badcafe")]
    for name, known in zip(names, (f"cmpl-{uuid}-0", names[1]), strict=True):
        request = begun(made, 40, name=name)
        [opened] = made.orders(new(name, [[7, 3, 5]], 40)).opens
        assert opened.label == f"p0/{known}"
        _, returned = made.on_finished(request, STOPPED)
        assert returned is not None
        assert returned["remote_request_id"] == known


def test_decode_that_is_asked_again_computes_the_prompt(scheduler: SchedulerSide) -> None:
    """As llm-d's sidecar asks where prefill has another identity than it knew: with the same transfer_id."""
    request = begun(scheduler, 40, RECEIVES | {"transfer_id": "xfer-1"})
    assert scheduler.matched_tokens(request, 0) == 39
    scheduler.on_blocks(request, [[7, 3, 5]], 39)
    scheduler.on_finished(request, ABORTED)
    again = begun(scheduler, 40, RECEIVES | {"transfer_id": "xfer-1", "remote_port": 7802}, "b")
    assert scheduler.matched_tokens(again, 0) == 0
    assert [each.request_id for each in scheduler.orders(Step()).receives] == ["a"]


def test_a_bounded_number_of_labels_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "LABELS_MAX", 2)
    made, names = side(), [f"{at}" for at in (0, 1, 2, 0, 2)]
    for at, name in enumerate(names):
        begun(made, 40, SENDS | {"transfer_id": name}, f"p{at}")
        made.on_finished(begun(made, 40, RECEIVES | {"transfer_id": name}, f"d{at}"), ABORTED)
    steps = [made.orders(new(f"p{at}", [[7, 3, 5]], 40)) for at in range(len(names))]
    assert [len(each.opens) for each in steps] == [1, 1, 1, 1, 0]
    assert len(steps[0].withdrawals) == 4


def test_a_request_that_ends_before_its_prompt_is_computed_fails_its_room(scheduler: SchedulerSide) -> None:
    """Whatever vLLM calls its end."""
    request = begun(scheduler, 40)
    scheduler.orders(new("a", [[7, 3]], 24))
    assert scheduler.on_finished(request, STOPPED) == (True, None)
    assert scheduler.orders(Step()).aborts == ["a"]


def test_blocks_of_requests_without_a_hand_off_are_their_own(scheduler: SchedulerSide) -> None:
    begun(scheduler, 40)
    scheduler.orders(new("a", [[7, 3]], 24))
    both = Cached(["other", "a"], (), [[[9]], [[5]]], [60, 24])
    orders = scheduler.orders(Step((), both, {"other": 1, "a": 16}))
    assert orders.chunks == [Chunk("a", (Rows(0, 1, 3, (7, 3, 5)),), last=True)]


def test_preempted_before_its_first_step_it_has_nothing_to_give_up(scheduler: SchedulerSide) -> None:
    begun(scheduler, 40)
    assert scheduler.orders(Step(preempted_req_ids={"a", "unknown"})) == Orders()


@pytest.mark.parametrize(("steps", "keeps"), [(0, False), (1, True), (2, True)])
def test_prefill_that_is_given_up_fails_its_room(scheduler: SchedulerSide, steps: int, keeps: bool) -> None:
    request = begun(scheduler, 40)
    for step in (new("a", [[7, 3]], 24), more("a", [[5]], 16, 24))[:steps]:
        scheduler.orders(step)
    assert scheduler.on_finished(request, ABORTED) == (keeps, None)
    assert scheduler.has_word_for_peers, "decode is told now, whether a request here needs a step or not"
    expected = Orders(aborts=["a"]) if keeps else Orders(withdrawals=[Withdraw("a", room_id("p0/a"))])
    assert scheduler.orders(Step()) == expected


def test_a_hand_off_that_its_proxy_gives_up_fails_also_if_its_request_has_ended_or_comes_later() -> None:
    scheduler = side()
    named = {"transfer_id": "xfer"}
    given_up = {"abort_transfer_id": "xfer"}
    withdrawn = [Withdraw("a", room_id("xfer"))]
    request = begun(scheduler, 40, SENDS | named)
    scheduler.orders(new("a", [[7, 3, 5]], 40))
    assert scheduler.on_finished(request, STOPPED)[0]
    begun(scheduler, 1, given_up, "b")
    assert scheduler.has_word_for_peers
    assert scheduler.orders(new("b", [[1]], 1)) == Orders(withdrawals=withdrawn)

    scheduler = side()
    request = begun(scheduler, 40, SENDS | named)
    scheduler.orders(new("a", [[7, 3]], 24))
    begun(scheduler, 1, given_up, "b")
    assert scheduler.orders(more("a", [[5]], 16, 24)) == Orders(withdrawals=withdrawn), "nothing more leaves"
    assert scheduler.on_finished(request, ABORTED) == (True, None)
    assert scheduler.orders(Step()).aborts == ["a"]

    scheduler = side()
    begun(scheduler, 1, given_up, "b")
    assert scheduler.orders(Step()) == Orders(withdrawals=[Withdraw("b", room_id("xfer"))])
    request = begun(scheduler, 40, SENDS | named)
    assert scheduler.orders(new("a", [[7, 3, 5]], 40)) == Orders()
    assert scheduler.on_finished(request, STOPPED) == (False, None)


@pytest.mark.parametrize("params", [SENDS | {"transfer_id": 3}, {"do_remote_decode": "yes"}])
def test_wrong_parameters_of_prefill_hand_nothing_over(scheduler: SchedulerSide, params: Any) -> None:
    request = begun(scheduler, 40, params)
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.orders(new("a", [[7, 3, 5]], 40)) == Orders()
    assert scheduler.on_finished(request, STOPPED) == (False, None)


# Decode


def test_a_request_waits_for_what_its_own_cache_lacks(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, RECEIVES)
    assert [scheduler.matched_tokens(request, 16) for _ in range(2)] == [23, 23]
    scheduler.on_blocks(request, [[7, 3, 5]], 23)
    assert scheduler.matched_tokens(request, 0) == 0, "it is asked for once"
    scheduler.on_blocks(request, [[7, 3, 5]], 0)
    assert scheduler.orders(Step()).receives == [Receive("a", room_id("p0/x"), ADDRESS, 40, 16, ((-1, 3, 5),))]
    assert scheduler.on_finished(request, STOPPED) == (False, {"kv_bytes": 2_000, "kv_lost": False})
    assert scheduler.orders(Step()) == Orders()


@pytest.mark.parametrize(("requests", "blocks"), [({"a"}, ()), ((), {5})], ids=["by request", "by block"])
def test_an_answer_reports_that_its_kv_was_not_received(requests: Collection[str], blocks: Collection[int]) -> None:
    scheduler = side()
    lost, fine = begun(scheduler, 40, RECEIVES), begun(scheduler, 40, RECEIVES | {"remote_request_id": "y"}, "b")
    for request, table in ((lost, [[7, 3, 5]]), (fine, [[8, 2, 1]])):
        scheduler.on_blocks(request, table, 39)
    scheduler.orders(Step())
    scheduler.on_failed_loads((), ())
    scheduler.on_failed_loads(requests, blocks)
    for request in (lost, fine):
        scheduler.on_blocks(request, [[7, 3, 5]], 0)
    assert scheduler.on_finished(lost, STOPPED) == (False, {"kv_bytes": 0, "kv_lost": True})
    assert scheduler.on_finished(fine, STOPPED) == (False, {"kv_bytes": 3_000, "kv_lost": False})


def test_a_load_that_is_given_up_is_aborted(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, RECEIVES)
    scheduler.on_blocks(request, [[7, 3, 5]], 39)
    scheduler.orders(Step())
    assert not scheduler.on_finished(request, ABORTED)[0]
    assert scheduler.orders(Step()) == Orders(aborts=["a"])


def choices(made: SchedulerSide, *prompts: Sequence[int] | None) -> list[Request]:
    """Requests that vLLM makes of one, all with its parameters."""
    found = [Request(f"{at}", 40, RECEIVES, prompt) for at, prompt in enumerate(prompts)]
    for each in found:
        made.on_new_request(each)
    return found


@pytest.mark.parametrize("ends", [True, False])
def test_choices_of_one_prompt_wait_for_the_one_that_is_received(scheduler: SchedulerSide, ends: bool) -> None:
    first, *others = choices(scheduler, [1, 2], [1, 2], [1, 2])
    for _ in range(2):
        assert [scheduler.matched_tokens(each, 0) for each in others] == [None, None]
        if scheduler.matched_tokens(first, 0):
            scheduler.on_blocks(first, [[7, 3, 5]], 39)
    assert len(scheduler.orders(Step()).receives) == 1
    if ends:
        scheduler.on_finished(first, ABORTED)
    else:
        scheduler.on_blocks(first, [[7, 3, 5]], 0)
    assert [scheduler.matched_tokens(each, 32) for each in others] == [0, 0], "its blocks are in the prefix cache"
    for each in others:
        scheduler.on_blocks(each, [[7, 3, 6]], 0)
        assert scheduler.on_finished(each, STOPPED) == (False, None)
    assert scheduler.orders(Step()) == Orders(aborts=["0"] * ends)


@pytest.mark.parametrize("other", [[3, 4], None])
def test_of_several_prompts_the_first_is_received_and_the_others_are_computed(other: Sequence[int] | None) -> None:
    """Prompts of equal length look alike to it: none may get another one's KV."""
    scheduler = side()
    one, two = choices(scheduler, None if other is None else [1, 2], other)
    assert [scheduler.matched_tokens(each, 0) for each in (two, one)] == [0, 39]
    scheduler.on_blocks(two, [[1, 2, 4]], 0)
    scheduler.on_blocks(one, [[7, 3, 5]], 39)
    scheduler.on_finished(two, STOPPED)
    scheduler.on_finished(one, STOPPED)
    assert scheduler.matched_tokens(begun(scheduler, 40, RECEIVES, "late"), 0) == 0
    assert [each.slots for each in scheduler.orders(Step()).receives] == [((7, 3, 5),)]


@pytest.mark.parametrize(("tokens", "received"), [(1, 1), (16, 15), (17, 17), (18, 17), (33, 33)])
def test_every_row_of_a_room_has_a_block(scheduler: SchedulerSide, tokens: int, received: int) -> None:
    """vLLM allocates blocks for what is received, and only later that of the token it computes itself."""
    request = begun(scheduler, tokens, RECEIVES)
    assert scheduler.matched_tokens(request, 0) == received
    blocks = [*range(1, 1 + -(-received // 16))]
    scheduler.on_blocks(request, [blocks], received)
    [order] = scheduler.orders(Step()).receives
    assert (order.tokens, order.prefix, len(order.slots[0])) == (tokens, 0, PAGE.rows(tokens))


def test_a_windows_lost_blocks_and_blocks_behind_the_prompt_are_no_slots() -> None:
    made = side(KVGroup(0, PAGE), KVGroup(2, WINDOW))
    request = begun(made, 40, RECEIVES)
    made.on_blocks(request, [[7, 3, 5, 9], [1, 1, 1], [0, 4, 6]], 39)
    assert made.orders(Step()).receives[0].slots == ((7, 3, 5), (-1, 4, 6))


@pytest.mark.parametrize("status", [STOPPED, ABORTED])
def test_what_decode_does_not_need_prefill_need_not_keep(scheduler: SchedulerSide, status: str) -> None:
    """If the request is given up meanwhile, prefill may never begin."""
    request = begun(scheduler, 40, RECEIVES)
    scheduler.on_blocks(request, [[7, 3, 5]], 0)
    assert scheduler.has_word_for_peers
    assert scheduler.orders(Step()) == Orders(
        receives=[Receive("a", room_id("p0/x"), ADDRESS, 40, 40, ((-1, -1, -1),), awaited=False)]
    )
    assert scheduler.on_finished(request, status) == (False, {"kv_bytes": 0, "kv_lost": False})
    assert scheduler.orders(Step()) == Orders(aborts=["a"] * (status == ABORTED))


@pytest.mark.parametrize(("name", "shown"), [("cmpl-x-0", "cmpl-x-0"), ("f00d", "x (f00d)")])
def test_a_request_that_ends_before_it_has_blocks_is_withdrawn_at_prefill(name: str, shown: str) -> None:
    """Its client has left, or vLLM's server has refused it: then it is another request, of one token, under an id of
    its own. Prefill took the Grant of that one token for a breach."""
    scheduler = side()
    request = begun(scheduler, 1, RECEIVES, name)
    assert scheduler.on_finished(request, ABORTED) == (False, None)
    assert scheduler.has_word_for_peers
    assert scheduler.orders(Step()) == Orders(withdrawals=[Withdraw(shown, room_id("p0/x"), ADDRESS)])


def test_wrong_parameters_of_decode_fail_its_load_alone(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, RECEIVES | {"remote_port": 0})
    assert scheduler.matched_tokens(request, 0) == 39
    scheduler.on_blocks(request, [[7, 3, 5]], 39)
    assert scheduler.orders(Step()) == Orders(refusals=[Refuse("a", (7, 3, 5))])


def test_blocks_that_decode_has_and_null_blocks_do_not_fail_with_a_load(scheduler: SchedulerSide) -> None:
    """Other requests may have them as well, and vLLM gives up each request whose blocks are named."""
    request = begun(scheduler, 70, RECEIVES | {"remote_port": 0})
    assert scheduler.matched_tokens(request, 16) == 53
    scheduler.on_blocks(request, [[7, 0, 3, 5, 9]], 53)
    assert scheduler.orders(Step()) == Orders(refusals=[Refuse("a", (3, 5, 9))])


@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"], 7])
def test_parameters_that_are_no_object_fail_their_load_alone(scheduler: SchedulerSide, params: Any) -> None:
    request = begun(scheduler, 40, params)
    assert scheduler.matched_tokens(request, 0) > 0
    scheduler.on_blocks(request, [[7, 3, 5]], 39)
    assert scheduler.orders(Step()) == Orders(refusals=[Refuse("a", (7, 3, 5))])


def test_wrong_parameters_of_a_request_without_blocks_need_nothing(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, RECEIVES | {"remote_port": 0})
    scheduler.on_finished(request, ABORTED)
    assert not scheduler.has_word_for_peers
    assert scheduler.orders(Step()) == Orders()


def test_a_role_that_an_engine_has_not_is_no_hand_off() -> None:
    prefill, decode = side(receives=False), side(sends=False)
    request = begun(prefill, 40, RECEIVES)
    assert prefill.matched_tokens(request, 0) == 0
    request = begun(decode, 40, SENDS)
    assert decode.matched_tokens(request, 0) == 0
    assert decode.orders(new("a", [[7, 3, 5]], 40)) == Orders()


def test_an_engine_of_one_role_takes_its_own_requests_and_those_without_a_hand_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = side(receives=False), side(sends=False)
    for made in (prefill, decode):
        assert made.matched_tokens(begun(made, 40, {}, "plain"), 0) == 0
    begun(prefill, 40, SENDS)
    assert prefill.orders(new("a", [[7, 3, 5]], 40)).opens
    assert decode.matched_tokens(begun(decode, 40, RECEIVES), 0) > 0
    assert not caplog.records


@pytest.mark.parametrize("roles", [{"sends": False}, {"receives": False}, {}])
def test_an_engine_of_any_role_reports_its_identity_and_hands_nothing_over(roles: dict[str, bool]) -> None:
    made = side(**roles)
    made.identity = {"role": "decode", "model": "m", "weights": "00", "facts": {"block_size": "16"}}
    request = begun(made, 1, {"identify": True})
    assert made.matched_tokens(request, 0) == 0
    assert made.orders(new("a", [[7]], 1)) == Orders()
    assert made.on_finished(request, STOPPED) == (False, {"identity": made.identity})
    assert made.on_finished(begun(made, 1, {}), STOPPED) == (False, None), "another request of the same name"


def test_ranks_that_would_hand_over_unequal_rows_end_the_start_by_name() -> None:
    """Each rank has chosen by its own part of the cache."""
    engine = side()
    rows = ("blocks+tokens", "blocks+tokens", "blocks")
    ranks = {
        (stage, 0): Rank(f"tcp://127.0.0.1:{7801 + stage}", {"facts": {"rows": name}})
        for stage, name in enumerate(rows)
    }
    text = r"rows: 'blocks\+tokens' of stage 0 rank 0, 'blocks' of stage 2 rank 0: all ranks .* need the same"
    with pytest.raises(ConfigError, match=text):
        engine.on_ranks(ranks)
    assert engine.endpoints == ADDRESS, "as it was"
    identity = ranks[0, 0].identity
    engine.on_ranks({(1, 0): ranks[1, 0], (0, 0): ranks[0, 0]})
    assert engine.endpoints == ("tcp://127.0.0.1:7801", "tcp://127.0.0.1:7802")
    assert engine.identity is identity
    engine.on_ranks({})
    assert (engine.endpoints, engine.identity) == ((), {})


def test_bytes_of_an_answer_are_those_that_the_ranks_have_of_its_blocks() -> None:
    """Ranks have other layers of two groups each; a block of the second is in one of its stripes alone."""
    engine = side(KVGroup(0, PAGE), KVGroup(1, PAGE, dcp_size=2, stripes=4))
    sizes = {(0, 0): (10, 200), (0, 1): (10, 200), (1, 0): (7, 600), (1, 1): (7, 600)}
    engine.on_ranks({rank: Rank(*ADDRESS, block_bytes=of_rank) for rank, of_rank in sizes.items()})
    request = begun(engine, 40, RECEIVES)
    assert engine.matched_tokens(request, 16) == 23
    engine.on_blocks(request, [[7, 3, 5], [4, 9]], 23)
    assert engine.on_finished(request, STOPPED) == (False, {"kv_bytes": 2 * 34 + 2 * 1600 // 4, "kv_lost": False})


def test_a_request_without_a_hand_off_is_left_alone(scheduler: SchedulerSide) -> None:
    request = begun(scheduler, 40, {})
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.on_blocks(request, [[7, 3, 5]], 0)
    assert scheduler.orders(new("a", [[7, 3, 5]], 40)) == Orders()
    assert scheduler.on_finished(request, STOPPED) == (False, None)


# Blocks that vLLM frees as a request ends, while decode's last token still sees them

AT_THE_EDGE = [
    ((KVGroup(0, PAGE), KVGroup(1, WINDOW)), 51, {5}),  # token 50 sees from 31 on, the next one from 32 on
    ((KVGroup(0, PAGE), KVGroup(1, CHUNKS)), 64, {3, 9}),  # token 63 ends a chunk
]


def kept_by(made: SchedulerSide) -> set[int]:
    assert isinstance(made.block_pool, Pool)
    return made.block_pool.kept


@pytest.mark.parametrize(("groups", "tokens", "kept"), AT_THE_EDGE)
def test_what_only_the_prompts_last_token_sees_is_kept_until_it_is_sent(
    groups: tuple[KVGroup, ...], tokens: int, kept: set[int]
) -> None:
    made = side(*groups)
    request = begun(made, tokens)
    last = made.orders(new("a", [[11, 12, 13, 14], [7, 5, 3, 9]], tokens))
    assert last.chunks[0].last
    assert kept_by(made) == kept
    assert made.on_finished(request, STOPPED)[0]
    made.on_sent(["another"])
    assert kept_by(made) == kept
    made.on_sent(["a"])
    assert kept_by(made) == set()


@pytest.mark.parametrize("tokens", [50, 52, 63])
def test_no_other_block_is_kept(tokens: int) -> None:
    made = side(KVGroup(0, PAGE), KVGroup(1, WINDOW), KVGroup(2, PAGED.of(16, chunk=64)))
    begun(made, tokens)
    made.orders(new("a", [[11, 12, 13, 14], [7, 5, 3, 9], [1, 2, 4, 6]], tokens))
    assert kept_by(made) == set()


def test_blocks_of_a_preempted_request_are_kept_no_longer_and_again_when_it_resumes() -> None:
    groups, tokens, kept = AT_THE_EDGE[1]
    made, table = side(*groups), [[11, 12, 13, 14], [7, 5, 3, 9]]
    request = begun(made, tokens)
    made.orders(new("a", table, tokens))
    assert made.orders(Step(preempted_req_ids=["a"])).quiesce == ["a"]
    assert kept_by(made) == set()
    resumed = Step((), Cached(["a"], ["a"], [table], [0]), {"a": tokens})
    assert made.orders(resumed).opens[0].label == "p0/a#1"
    assert kept_by(made) == kept
    assert made.on_finished(request, ABORTED)[0]
    made.on_sent(["a"])
    assert kept_by(made) == set()


def test_without_vllms_pool_such_a_hand_off_fails(caplog: pytest.LogCaptureFixture) -> None:
    groups, tokens, _ = AT_THE_EDGE[1]
    made = side(*groups)
    made.block_pool = None
    request = begun(made, tokens, SENDS | {"transfer_id": "xfer-1"})
    assert made.has_word_for_peers
    orders = made.orders(new("a", [[11, 12, 13, 14], [7, 5, 3, 9]], tokens))
    assert orders == Orders(withdrawals=[Withdraw("a", room_id("xfer-1"))])
    assert "vLLM frees blocks of it before they are sent" in caplog.text
    assert made.on_finished(request, STOPPED) == (False, None)
    begun(made, tokens - 1, name="b")
    assert made.orders(new("b", [[11, 12, 13, 14], [7, 5, 3, 9]], tokens - 1)).chunks, "others are"


# States of layers that keep no KV

STATES = KVGroup(0, STATE.of(1024)), KVGroup(1, PAGE)
CACHED_STATES = KVGroup(0, STATE.of(16)), KVGroup(1, PAGE)


def prompt_of(tokens: int, params: Any, **more: Any) -> Request:
    known = list(range(tokens))
    return Request("a", tokens, params, known, **{"_all_token_ids": known.copy()} | more)


def test_prefill_stops_before_a_prompts_last_token_and_sends_the_state_with_the_last_rows() -> None:
    made = side(*STATES)
    request = prompt_of(41, SENDS)
    view = request._all_token_ids
    made.on_new_request(request)
    assert (request.num_prompt_tokens, request.prompt_token_ids, request.max_tokens) == (40, [*range(40)], 1)
    assert view == [*range(40)]
    first = made.orders(new("a", [[9], [7, 3]], 32))
    assert first.opens == [Open("a", "p0/a", 40)]
    assert rows(first) == [(1, 0, 2)]
    last = made.orders(more("a", [[], [5]], 8, 32))
    assert last.chunks == [Chunk("a", (Rows(0, 0, 1, (9,)), Rows(1, 2, 3, (7, 3, 5))), last=True)]
    stays, params = made.on_finished(request, STOPPED)
    assert stays
    assert params is not None
    assert params["first_token"] is False, "what it generated is the prompt's last token"


def test_with_prefix_caching_the_state_is_in_the_last_tokens_block() -> None:
    made = side(*CACHED_STATES)
    made.on_new_request(prompt_of(41, SENDS))
    made.orders(new("a", [[9, 8], [7, 3]], 32))
    last = made.orders(more("a", [[4], [5]], 8, 32))
    assert last.chunks[0].rows[0] == Rows(0, 0, 1, (4,))


@pytest.mark.parametrize(
    ("groups", "table", "slots"),
    [(STATES, [[9], [7, 3, 5]], ((9,), (-1, 3, 5))), (CACHED_STATES, [[0, 0, 4], [7, 3, 5]], ((4,), (-1, 3, 5)))],
)
def test_decode_receives_the_state_before_the_last_token(
    groups: tuple[KVGroup, ...], table: BlockTable, slots: Any
) -> None:
    made = side(*groups)
    request = prompt_of(41, RECEIVES)
    made.on_new_request(request)
    assert made.matched_tokens(request, 16) == 24
    made.on_blocks(request, table, 24)
    assert made.orders(Step()).receives == [Receive("a", room_id("p0/x"), ADDRESS, 40, 16, slots)]
    assert made.on_finished(request, STOPPED) == (False, {"kv_bytes": 3_000, "kv_lost": False})


@pytest.mark.parametrize(("tokens", "skips"), [(1, False), (2, False), (40, True)])
def test_a_prompt_that_decode_computes_whole_needs_no_state(tokens: int, skips: bool) -> None:
    """Of one or two tokens, or because its logprobs are wanted: prefill's room has as many, and lands empty."""
    sends, receives = side(*STATES), side(*STATES)
    sent, received = (prompt_of(tokens, params, skip_reading_prefix_cache=skips) for params in (SENDS, RECEIVES))
    sends.on_new_request(sent)
    assert sends.orders(new("a", [[9], [7, 3, 5]], tokens)).opens == [Open("a", "p0/a", tokens)]
    receives.on_new_request(received)
    assert receives.matched_tokens(received, 0) == 0
    receives.on_blocks(received, [[9], [7, 3, 5]], 0)
    [order] = receives.orders(Step()).receives
    assert (order.tokens, order.prefix, order.awaited) == (tokens, tokens, False)


def test_a_state_that_the_next_token_changes_is_given_up_before() -> None:
    made = side(*STATES)
    made.on_new_request(prompt_of(41, SENDS))
    made.orders(new("a", [[9], [7, 3, 5]], 40))
    assert made.orders(more("a", None, 1, 40)).quiesce == ["a"]

"""A worker's side with real clients on either end, and numpy arrays in place of vLLM's KV caches."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import permutations
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import ArenaMemory, Cause, RoomDrained, RoomFailed, RoomReady, room_id
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm import figures, worker
from pdtransfer.adapters.vllm.kinds import PAGED, STATE, StatePart
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Refuse, Rows, Withdraw
from pdtransfer.adapters.vllm.pools import Pools
from pdtransfer.adapters.vllm.worker import Results, WorkerSide
from pdtransfer.layout import cell_sizes
from pdtransfer.memory.hbm import Hbm
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import World, chunk, pools_of, world
from tests.library.adapters.warnings_in_a_row import in_a_row
from tests.support.client_pair import Late
from tests.support.polled_client import PolledClient
from tests.support.waiting import wait_for

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 16, 2, 16, 8
SHAPE = LAYERS, BLOCKS, HEADS, TOKENS, WIDTH
PAGE = [StatePart("x", HEADS, TOKENS * WIDTH * 4)]
SOURCE, TARGET = [7, 3, 5], [4, 9, 2]  # blocks of a prompt
NAMES = [f"model.layers.{at}.attn" for at in range(LAYERS)]


Groups = list[tuple[KVGroup, list[str]]]
ONE: Groups = [(KVGroup(0, PAGED.of(TOKENS)), NAMES)]
TWO: Groups = [(KVGroup(0, PAGED.of(TOKENS)), NAMES[:2]), (KVGroup(1, PAGED.of(TOKENS)), NAMES[2:])]


def described(cache: np.ndarray, base: int, groups: Groups, rows: str, memory: Any = "dram") -> Pools:
    """The components of the cache, float32 (layers, blocks, heads, tokens, width), whose rows are blocks or tokens."""
    states = {name for group, names in groups if group.state for name in names}
    views = {
        name: view.view(BLOCKS, 1, 1, -1) if name in states else view
        for name, view in zip(NAMES, torch.from_numpy(cache), strict=True)
    }
    by_token = {name: view.transpose(1, 2) for name, view in views.items() if name not in states}
    kinds = {name: {"k": view[..., : WIDTH // 2], "v": view[..., WIDTH // 2 :]} for name, view in by_token.items()}
    given = {"kinds": kinds if rows == "tokens" else None, "states": dict.fromkeys(NAMES, PAGE)}
    return pools_of(views, groups, blocks=BLOCKS, heads=Heads(HEADS, Ranks()), base=base, memory=memory, **given)


class Site(World):
    """One rank of each engine."""

    @property
    def source(self) -> np.ndarray:
        return self.prefill[0].cache

    @property
    def target(self) -> np.ndarray:
        return self.decode[0].cache

    @property
    def sent(self) -> set[str]:
        return self.prefill[0].seen.sent

    @property
    def received(self) -> Results:
        return self.decode[0].seen

    def step(self, orders: Orders, after: Any = lambda: None, layers: Sequence[str] = NAMES, **more: Any) -> None:
        super().step(orders, after, layers, **more)

    def compute(self, name: str, label: str, after: Any = lambda: None) -> None:
        """One step that computes a whole prompt, and reports all layers but the last."""
        self.send(name, label, 40, SOURCE, after=after, layers=NAMES[:-1])

    def landed(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether these blocks are the same on both sides."""
        return np.array_equal(self.target[:, target], self.source[:, source])


class LateEvents:
    """Makes events, which fire when the test lets them."""

    def __init__(self) -> None:
        self.made: list[Late] = []

    def make(self) -> Late:
        self.made.append(Late())
        return self.made[-1]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", worker.__name__)


@pytest.fixture
def site(marked: Callable[..., AbstractContextManager[Site]]) -> Iterator[Site]:
    with marked(made_site) as made:
        yield made


@contextmanager
def made_site(groups: Groups = ONE, rows: str = "blocks", *, copied_up: bool = False, **side: Any) -> Iterator[Site]:
    """With `copied_up` the cache is memory that prefill does not reach."""
    source = np.random.default_rng(1).random(SHAPE, np.float32)
    arena = ArenaMemory.create(0 if copied_up else source.nbytes, staging_bytes=source.nbytes if copied_up else 0)
    view, address, memory = arena.mapping.view, arena.mapping.address, "dram"
    if copied_up:
        arena.hbm = Hbm.of_process(base=0, byte_count=source.nbytes)
        address, memory = arena.hbm.address, "hbm"
        view = memoryview((ctypes.c_uint8 * source.nbytes).from_address(address))
    target = np.frombuffer(view, np.float32, source.size).reshape(SHAPE)
    made = Site()
    with made.clients:
        base = source.ctypes.data
        made.add_prefill(source, described(source, base, groups, rows), base, **{"time_left_s": 20.0} | side)
        landing = described(target, address, groups, rows, memory)
        made.add_decode(target, landing, arena, **{"time_left_s": 20.0} | side)
        yield made


def test_blocks_land_where_decode_wants_them(site: Site) -> None:
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room")
    site.until(lambda: site.received.received)
    assert (site.received.received, site.received.failed) == ({"d"}, set())
    assert np.array_equal(site.target[:, TARGET], site.source[:, SOURCE])
    assert not site.target[:, [block for block in range(BLOCKS) if block not in (4, 9, 2)]].any()
    site.poll(("p", "another"))
    site.until(lambda: site.sent == {"p"})
    byte_count = site.source[:, :3].nbytes
    assert site.figures["rooms"] == {"sent": 1, "received": 1}
    assert site.figures["bytes"] == {"sent": byte_count, "received": byte_count}
    assert len(site.figures["seconds"]) == 1
    assert figures.summary(site.figures)["rooms received"] == 1
    assert not site.prefill[0].side._sent_rooms, "what has ended is forgotten"
    assert not site.decode[0].side._received_rooms


def test_a_request_is_not_reported_before_it_has_ended(site: Site) -> None:
    """vLLM asserts that a request whose sending is finished has finished itself."""
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room")
    site.until(lambda: site.received.received)
    time.sleep(0.1)
    site.poll()
    assert site.sent == set()
    site.poll(("p",))
    assert site.sent == {"p"}
    site.poll(("p",))


def test_every_layer_of_a_large_chunk_waits_for_its_own_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(worker, "CELL_BYTES_MIN", 1)
    events = LateEvents()
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room", events.make)
    assert len(events.made) == LAYERS, "two by their names, and what was not reported with the end of the step"
    for event in events.made[:-1]:
        event.fired = True
    wait_for(lambda: np.array_equal(site.target[:2, TARGET], site.source[:2, SOURCE]))
    site.poll()
    assert not site.received.received
    events.made[-1].fired = True
    site.until(lambda: site.received.received)
    assert np.array_equal(site.target[:, TARGET], site.source[:, SOURCE])


def test_layers_of_a_small_chunk_leave_together(site: Site) -> None:
    events = LateEvents()
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room", events.make)
    assert len(events.made) == 1, "an event of the last layer alone"
    time.sleep(0.05)
    assert not site.target.any()
    events.made[0].fired = True
    site.until(lambda: site.received.received)
    assert np.array_equal(site.target[:, TARGET], site.source[:, SOURCE])


def test_a_layer_that_was_left_out_leaves_by_itself(site: Site) -> None:
    """What is reported in another order, or late, is pushed once all the same."""
    site.receive("d", "room", 40, TARGET)
    orders = Orders(opens=[Open("p", "room", 40)], chunks=[chunk("p", SOURCE)])
    site.step(orders, layers=[NAMES[at] for at in (2, 0, 2)])
    site.until(lambda: site.received.received)
    assert site.landed(SOURCE, TARGET)


@pytest.mark.parametrize("order", list(permutations(range(LAYERS))))
def test_no_layer_leaves_before_it_is_computed_and_each_leaves_once(site: Site, order: tuple[int, ...]) -> None:
    pushed: list[int] = []
    push = site.prefill[0].client.push

    def noted(*args: Any, layers: tuple[int, int], after: Late, **more: Any) -> None:
        assert set(range(*layers)) <= set(computed)
        assert after in events.made
        after.fired = True
        pushed.extend(range(*layers))
        push(*args, layers=layers, after=after, **more)

    site.prefill[0].client.push = noted
    computed: list[int] = []
    events = LateEvents()
    site.receive("d", "room", 40, TARGET)
    site.prefill[0].begin(opens=[Open("p", "room", 40)], chunks=[chunk("p", SOURCE)])
    for at in order:
        computed.append(at)
        site.prefill[0].side.save(NAMES[at], events.make)
    site.prefill[0].side.end(events.make)
    assert sorted(pushed) == [0, 1, 2]
    site.until(lambda: site.received.received)
    assert site.landed(SOURCE, TARGET)


def test_layers_of_a_large_chunk_leave_in_cells_that_are_large_enough(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows are more than leave at once. The first layer is less than what is left, the second as much."""
    row_bytes = LAYERS * HEADS * TOKENS * WIDTH * 4
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 2 * row_bytes)
    events = LateEvents()
    site.compute("p", "room", events.make)
    assert len(events.made) == 2


@pytest.mark.parametrize("gpu", [False, True])
def test_cells_of_a_gpu_leave_when_the_step_has_been_launched(
    site: Site, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """On a CPU what is reported is computed, and leaves at once."""
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(worker, "CELL_BYTES_MIN", 1)
    pushed, make = list[tuple[int, int]](), LateEvents().make if gpu else lambda: None
    site.prefill[0].client.push = lambda *_, layers, **__: pushed.append(layers)
    site.prefill[0].begin(opens=[Open("p", "room", 40)], chunks=[chunk("p", SOURCE)])
    site.prefill[0].side.save(NAMES[0], make)
    assert pushed == ([] if gpu else [(0, 1)])
    site.prefill[0].side.end(make)
    assert pushed == [(0, 1), (1, 2), (2, 3)]


def test_a_layer_leaves_with_no_other_group_that_has_a_part_of_it() -> None:
    names = ["model.layers.0.attn", "model.layers.0.indexer"]
    cache = np.zeros((2, *SHAPE[1:]), np.float32)
    groups = [(KVGroup(group, PAGED.of(TOKENS)), [name]) for group, name in enumerate(names)]
    views = dict(zip(names, torch.from_numpy(cache), strict=True))
    base = cache.ctypes.data
    with world() as made:
        rank = made.add_prefill(cache, pools_of(views, groups, blocks=BLOCKS, base=base), base)
        events, pushed = LateEvents(), list[tuple[str, int]]()
        rank.client.push = lambda *_, component, after, **__: pushed.append((component, events.made.index(after)))
        rows = tuple(Rows(group, 0, 3, tuple(SOURCE)) for group in (0, 1))
        made.step(Orders(opens=[Open("p", "room", 40)], chunks=[Chunk("p", rows, True)]), events.make, names[::-1])
    assert pushed == [("group1-2", 0), ("group0-2", 1)]


@pytest.mark.parametrize("layers", [NAMES, NAMES[:-1]])
def test_cells_that_leave_together_wait_for_one_event(site: Site, layers: list[str]) -> None:
    events = LateEvents()
    opens = [Open("p", "room", 40), Open("q", "another", 20)]
    site.step(Orders(opens=opens, chunks=[chunk("p", SOURCE), chunk("q", [1, 6])]), events.make, layers)
    assert len(events.made) == 1
    receives = [site.wanted("d", "room", 40, TARGET), site.wanted("e", "another", 20, [8, 10])]
    site.decode[0].begin(receives=receives)
    events.made[0].fired = True
    site.until(lambda: site.received.received == {"d", "e"})
    assert site.landed([7, 3, 5, 1, 6], [4, 9, 2, 8, 10])


def test_a_prompt_of_two_steps_lands_after_the_second(site: Site) -> None:
    site.receive("d", "room", 40, TARGET)
    site.step(Orders(opens=[Open("p", "room", 40)], chunks=[chunk("p", [7], last=False)]))
    wait_for(lambda: site.landed([7], [4]))
    time.sleep(0.1)
    site.poll()
    assert site.received == Results()
    site.step(Orders(chunks=[chunk("p", SOURCE, first=1)]))
    site.until(lambda: site.received.received)
    assert site.landed(SOURCE, TARGET)


@pytest.mark.given(TWO)
def test_groups_leave_from_blocks_of_their_own(site: Site) -> None:
    site.receive("d", "room", 40, (4, 9, 2), (-1, 8, 10))
    rows = (Rows(0, 0, 3, (7, 3, 5)), Rows(1, 1, 3, (0, 6, 1)))
    site.step(Orders(opens=[Open("p", "room", 40)], chunks=[Chunk("p", rows, last=True)]))
    site.until(lambda: site.received.received)
    assert site.received == Results(received={"d"})
    assert np.array_equal(site.target[:2, TARGET], site.source[:2, SOURCE])
    assert np.array_equal(site.target[2, [8, 10]], site.source[2, [6, 1]])
    assert not site.target[2, TARGET].any()


@pytest.mark.parametrize("rows", ["blocks", "tokens"])
def test_a_state_lands_beside_the_kv(rows: str) -> None:
    """Of a layer whose name vLLM never reports, also where decode has the beginning of the prompt."""
    groups: Groups = [(KVGroup(0, STATE.of(1024)), NAMES[2:]), (KVGroup(1, PAGED.of(TOKENS)), NAMES[:2])]
    with made_site(groups, rows) as site:
        site.receive("d", "room", 40, (11,), (4, 9, 2), prefix=16)
        sent = (Rows(0, 0, 1, (6,)), Rows(1, 0, 3, (7, 3, 5)))
        opens = [Open("p", "room", 40)]
        site.step(Orders(opens=opens, chunks=[Chunk("p", sent, last=True)]), layers=NAMES[:2])
        site.until(lambda: site.received.received)
        assert site.received == Results(received={"d"})
        assert np.array_equal(site.target[2, 11], site.source[2, 6])
        assert np.array_equal(site.target[:2, 9], site.source[:2, 3])
        assert not site.target[:2, 4].any()


@pytest.mark.parametrize("copied_up", [False, True])
def test_stripes_of_a_prompt_may_have_unequal_rows(copied_up: bool) -> None:
    """Three blocks of 16 tokens, the last of which is part of a row of 32 tokens."""
    with made_site([(KVGroup(0, PAGED.of(TOKENS), stripes=2), NAMES)], copied_up=copied_up) as made:
        made.receive("d", "room", 40, TARGET)
        made.compute("p", "room")
        made.until(lambda: made.received.received)
        assert not made.received.failed
        assert made.landed(SOURCE, TARGET)
        assert not made.target[:, [block for block in range(BLOCKS) if block not in (4, 9, 2)]].any()
        assert made.figures["bytes"]["received"] == made.source[:, :3].nbytes


def test_a_prompt_whose_last_block_is_missing_is_refused() -> None:
    """Of a group that is not striped, beside one that is."""
    groups: Groups = [(KVGroup(0, PAGED.of(TOKENS), stripes=2), NAMES[:2]), (KVGroup(1, PAGED.of(TOKENS)), NAMES[2:])]
    with made_site(groups) as site:
        site.receive("d", "room", 40, (4, 9, 2), (-1, 8, -1))
        site.poll()
        assert (site.received.received, site.received.failed) == ({"d"}, {"d"})


@pytest.mark.given(rows="tokens")
def test_rows_that_are_tokens_end_with_the_prompt(site: Site) -> None:
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room")
    site.until(lambda: site.received.received)
    assert site.received == Results(received={"d"})
    assert site.landed([7, 3], [4, 9])
    assert np.array_equal(site.target[:, 2, :, :8], site.source[:, 5, :, :8])
    assert not site.target[:, 2, :, 8:].any()


def test_an_engine_that_sends_and_receives_does_both_in_one_step(site: Site) -> None:
    (sends,), (receives,) = site.prefill, site.decode
    made = described(site.source, site.source.ctypes.data, ONE, "blocks")
    both = WorkerSide(pools=made, prefill=sends.client, decode=receives.client, time_left_s=20.0)
    wanted = site.wanted("d", "room", 40, TARGET)
    both.begin(Orders(opens=[Open("p", "room", 40)], receives=[wanted], chunks=[chunk("p", SOURCE)]))
    both.end(lambda: None)
    found = [both.results(["p"])]
    wait_for(lambda: found.append(both.results(())) or any(each.sent for each in found))
    wait_for(lambda: found.append(both.results(())) or any(each.received for each in found))
    assert site.landed(SOURCE, TARGET)
    both.close()
    for client in (sends.client, receives.client):
        assert client.fileno() < 0, "it is closed"


def test_rows_that_decode_has_are_not_sent(site: Site) -> None:
    site.receive("d", "room", 40, TARGET, prefix=16)
    site.compute("p", "room")
    site.until(lambda: site.received.received)
    assert not site.target[:, 4].any()
    assert np.array_equal(site.target[:, [9, 2]], site.source[:, [3, 5]])


def test_a_request_that_needs_nothing_frees_prefill_and_is_never_reported(site: Site) -> None:
    site.compute("p", "room")
    site.poll(("p",))
    time.sleep(0.1)
    site.poll()
    assert not site.sent
    site.receive("d", "room", 40, [-1, -1, -1], prefix=40, awaited=False)
    site.until(lambda: site.sent == {"p"})
    site.until(lambda: site.figures["rooms"].get("received") == 1)
    assert site.received == Results()


@pytest.mark.parametrize("rows", ["blocks", "tokens"])
def test_requests_that_share_decodes_blocks_land_together_and_fail_alone(rows: str) -> None:
    """vLLM gives up every request whose blocks are named, also those that have them from its prefix cache."""
    with made_site(rows=rows) as site:
        site.prefill[0].begin(opens=[Open("p", "lost", 40)])
        receives = [site.wanted(name, label, 40, [-1, *own], prefix=16)
                    for name, label, own in (("d", "lost", [9, 2]), ("e", "room", [8, 10]))]  # fmt: skip
        site.decode[0].begin(receives=receives)
        site.compute("q", "room")
        site.prefill[0].begin(aborts=["p"])
        site.until(lambda: site.received.received == {"d", "e"})
        assert (site.received.failed, site.received.failed_blocks) == ({"d"}, {9, 2})
        assert site.landed([3], [8])
        assert np.array_equal(site.target[:, 10, :, :8], site.source[:, 5, :, :8])  # the prompt's last tokens


def test_decode_that_gives_up_is_reported_once_and_has_not_failed(site: Site) -> None:
    site.receive("d", "room", 40, TARGET)
    site.decode[0].begin(aborts=["d", "unknown"])
    site.until(lambda: site.received.received == {"d"})
    assert not site.received.failed
    site.decode[0].begin(aborts=["d"])
    site.poll()


def test_a_request_may_end_in_the_step_that_gave_it_blocks(site: Site) -> None:
    site.decode[0].begin(receives=[site.wanted("d", "room", 40, TARGET)], aborts=["d"])
    site.until(lambda: site.received.received == {"d"})
    assert site.figures["causes"] == {"aborted": 1}
    assert site.figures["rooms"] == {"failed": 1}


def test_a_notice_whose_request_is_given_up_does_not_wait_for_prefill(site: Site) -> None:
    """Which may have refused the request, and never begins."""
    site.receive("d", "room", 40, [-1, -1, -1], prefix=40, awaited=False)
    site.decode[0].begin(aborts=["d"])
    site.until(lambda: site.figures["causes"] == {"aborted": 1})
    site.compute("p", "room")
    site.poll(("p",))
    site.until(lambda: site.sent == {"p"})
    assert site.figures["causes"] == {"aborted": 2}


@pytest.mark.parametrize("order", ["prefill first", "decode first"])
def test_a_room_that_decode_withdraws_frees_prefills_blocks(
    order: str, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    withdrawal = Withdraw("x (f00d)", room_id("room"), (*site.sources,))
    if order == "decode first":
        site.decode[0].begin(withdrawals=[withdrawal])
    site.compute("p", "room")
    site.poll(("p",))
    if order == "prefill first":
        site.decode[0].begin(withdrawals=[withdrawal])
    site.until(lambda: site.sent == {"p"})
    assert site.figures["causes"] == {"aborted": 1}
    assert "request p: its KV was not handed over: aborted: node:d0 gave it up: request x (f00d) was given up" in [
        each.getMessage() for each in caplog.records
    ]


def test_a_room_that_prefill_withdraws_fails_decodes_load(site: Site) -> None:
    """Of a request that had not begun, and of one that has ended and waits for decode."""
    site.prefill[0].begin(withdrawals=[Withdraw("p", room_id("never"))])
    site.receive("d", "never", 40, TARGET)
    site.until(lambda: site.received.failed == site.received.received == {"d"})
    site.compute("q", "waits")
    site.poll(("q",))
    site.prefill[0].begin(withdrawals=[Withdraw("q", room_id("waits"))])
    site.until(lambda: site.sent == {"q"})


def test_a_failed_load_is_received_only_once_nobody_can_write_its_blocks() -> None:
    """vLLM gives the blocks of a request that is received to others. A writer that is only slow would write them."""
    client = PolledClient()
    cache = np.zeros(SHAPE, np.float32)
    side = WorkerSide(
        pools=described(cache, cache.ctypes.data, ONE, "blocks"), prefill=None, decode=cast("Any", client),
        time_left_s=20.0,
    )  # fmt: skip
    side.begin(Orders(receives=[Receive("d", 7, ("tcp://127.0.0.1:1",), 40, 0, ((4, 9, 2),))]))
    client.events = [RoomFailed(7, Cause.DEADLINE, "not ready in time")]
    failed = side.results(())
    assert (failed.failed, failed.failed_blocks, failed.received) == ({"d"}, {4, 9, 2}, set())
    assert side.results(()) == Results()
    client.events = [RoomDrained(7)]
    assert side.results(()) == Results(received={"d"})


def test_a_notice_that_fails_fails_no_load(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.prefill[0].begin(opens=[Open("p", "room", 40)])
    site.receive("d", "room", 40, [-1, -1, -1], prefix=40, awaited=False)
    site.prefill[0].begin(aborts=["p"])
    site.until(lambda: site.figures["causes"].get("aborted") == 2)
    time.sleep(0.1)
    site.poll()
    assert site.received == Results()
    assert notices(caplog) == {("INFO", "request p"), ("INFO", "request d")}


def test_a_notice_of_a_label_that_was_asked_for_is_no_failure(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves has vLLM abort its request, and then notify the connector of it once more."""
    site.receive("d", "room", 40, TARGET)
    notice = site.wanted("another", "room", 1, [-1], prefix=1, awaited=False)
    site.decode[0].begin(aborts=["d"], receives=[notice])
    site.until(lambda: site.received.received)
    assert site.received == Results(received={"d"})
    assert site.figures["causes"] == {"aborted": 1}
    assert notices(caplog) == {("INFO", "request d")}


def notices(caplog: pytest.LogCaptureFixture) -> set[tuple[str, str]]:
    """What was logged about requests: the level, and which request."""
    of_worker = [each for each in caplog.records if each.name == worker.__name__]
    return {(each.levelname, each.getMessage().partition(":")[0]) for each in of_worker}


def test_prefill_that_gives_up_fails_decodes_load(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.receive("d", "room", 40, [-1, 4, 2])
    site.prefill[0].begin(opens=[Open("p", "room", 40)])
    site.prefill[0].side.end(lambda: None)
    site.prefill[0].begin(aborts=["p"])
    site.poll(("p",))
    site.until(lambda: site.received.received == {"d"} and site.sent == {"p"})
    assert (site.received.failed, site.received.failed_blocks) == ({"d"}, {4, 2})
    assert site.figures["causes"] == {"aborted": 2}
    assert notices(caplog) == {("INFO", "request p"), ("WARNING", "request d")}


@pytest.mark.given(time_left_s=0.3)
def test_rooms_whose_peer_never_comes_fail_in_time(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.compute("p", "one")
    site.poll(("p",))
    site.receive("d", "other", 40, TARGET)
    site.until(lambda: site.sent == {"p"} and site.received.received == {"d"})
    assert site.received.failed == {"d"}
    assert site.figures["causes"] == {"deadline": 2}
    assert notices(caplog) == {("WARNING", "request p"), ("WARNING", "request d")}


@pytest.mark.given(time_left_s=0.3)
def test_hand_offs_that_fail_one_after_the_other_are_a_warning_on_either_side(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(6):
        site.compute(f"p{at}", f"sent {at}")
        site.receive(f"d{at}", f"other {at}", 40, TARGET)
        site.poll((f"p{at}",))
        site.until(lambda at=at: f"p{at}" in site.sent and f"d{at}" in site.received.received)
        assert len(in_a_row(caplog)) == (2 if at >= 4 else 0)
    assert all("What to do: check that the router sends" in text for text in in_a_row(caplog))


def test_requests_with_wrong_parameters_one_after_the_other_are_a_warning(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """One that lands ends the row."""
    for at in range(9):
        assert in_a_row(caplog) == []
        site.decode[0].begin(refusals=[Refuse(f"d{at}", (1, 2))])
        if at == 3:
            site.receive("e", "room", 40, TARGET)
            site.compute("p", "room")
            site.until(lambda: "e" in site.received.received)
    [text] = in_a_row(caplog)
    assert "refused: its parameters are wrong" in text


def test_a_refused_load_fails_at_once(site: Site) -> None:
    wrong = site.wanted("twice", "room", 40, [4, 4, 2])
    site.decode[0].begin(refusals=[Refuse("d", (1, 2))], receives=[wrong])
    site.poll()
    assert site.received.received == site.received.failed == {"d", "twice"}
    assert site.received.failed_blocks == {1, 2, 4}
    assert site.figures["causes"] == {"refused": 2}


def test_a_label_that_was_used_hands_nothing_over_and_keeps_no_block(site: Site) -> None:
    site.compute("p", "room")
    site.send("q", "room", 40, [1, 2, 4])
    site.poll(("q",))
    assert site.sent == {"q"}


def test_a_label_that_is_in_use_stays_with_its_first_request(site: Site) -> None:
    """Nothing that becomes of the second request touches the room of the first."""
    site.receive("d", "room", 40, TARGET)
    site.prefill[0].begin(opens=[Open("p", "room", 40), Open("q", "room", 40)])
    site.prefill[0].side.end(lambda: None)
    site.poll()
    assert site.figures["causes"] == {"refused": 1}
    site.step(Orders(chunks=[chunk("q", [1, 6, 8])]))
    site.step(Orders(aborts=["q"]))
    site.step(Orders(quiesce=["q"]))
    time.sleep(0.1)
    site.poll()
    assert site.received == Results()
    assert not site.target.any()
    site.step(Orders(chunks=[chunk("p", SOURCE)]))
    site.poll(("p",))
    site.until(lambda: site.received.received and site.sent == {"p"})
    assert site.landed(SOURCE, TARGET)
    assert site.figures["rooms"] == {"failed": 1, "sent": 1, "received": 1}


def test_a_preempted_request_that_does_not_come_back_is_not_reported(site: Site) -> None:
    """Its blocks are vLLM's again, and vLLM ends with a request that it does not know."""
    site.compute("p", "room")
    site.step(Orders(quiesce=["p"], chunks=[chunk("p", SOURCE)]))  # rows without a room stay where they are
    site.poll(("p",))
    site.until(lambda: site.figures["causes"] == {"aborted": 1})
    site.poll(("p",))
    assert not site.sent


def test_quiesce_returns_once_nothing_reads_the_blocks(site: Site) -> None:
    late, later = Late(), Late()
    site.receive("d", "room", 40, TARGET)
    site.compute("p", "room", lambda: late)
    site.prefill[0].side.quiesce(Orders(quiesce=["p", "unknown"]))
    site.compute("p", "another", lambda: later)  # the request comes back, in a room of its own
    site.poll(("p",))
    site.until(lambda: site.received.failed == {"d"})
    assert not site.sent, "of the first room vLLM has the blocks, of the second it has not"
    assert "deadline" not in site.figures["causes"]
    site.receive("e", "another", 40, [1, 3, 6])
    later.fired = True
    site.until(lambda: "e" in site.received.received and site.sent == {"p"})
    assert site.received.failed == {"d"}


def test_figures_of_an_interval_are_bounded_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SECONDS_MAX", 1)
    now = [10.0]
    with made_site(copied_up=True, clock=lambda: now[0]) as site:
        site.receive("d", "one", 16, [4])
        now[0] = 20.0
        site.receive("e", "other", 16, [9])
        now[0] = 30.5
        site.send("p", "one", 16, [7])
        site.send("q", "other", 16, [3])
        found: set[str] = set()
        wait_for(lambda: found.update(site.decode[0].side.results(()).received) or found == {"d", "e"})
        data = site.decode[0].side.take_figures()
        assert data is not None
        assert (data["rooms"], data["copied_up_bytes"]) == ({"received": 2}, site.source[:, :2].nbytes)
        assert np.array_equal(site.target[:, [4, 9]], site.source[:, [7, 3]])
        assert data["seconds"] in ([20.5], [10.5])
        assert site.decode[0].side.take_figures() is None


def test_figures_of_ranks_and_intervals_add_up() -> None:
    one, two = figures.empty(), figures.empty()
    figures.count(one, "rooms", "sent")
    figures.count(two, "rooms", "sent", 2)
    figures.count(two, "causes", "deadline")
    two["seconds"] = [0.25] * figures.SECONDS_MAX
    one["seconds"] = [0.5]
    figures.add(one, two)
    assert (one["rooms"], one["causes"]) == ({"sent": 3}, {"deadline": 1})
    assert len(one["seconds"]) == figures.SECONDS_MAX
    assert figures.summary(one) == {"rooms sent": 3, "p50 transfer ms": 250.0, "max transfer ms": 500.0}
    assert figures.is_empty(figures.empty())
    assert not figures.is_empty(one)


def test_prompts_that_decode_computes_itself_are_counted_and_a_tenth_of_them_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, now = PolledClient(), [0.0]
    cache = np.zeros(SHAPE, np.float32)
    side = WorkerSide(
        pools=described(cache, cache.ctypes.data, ONE, "blocks"), prefill=None, decode=cast("Any", client),
        time_left_s=20.0, recomputes=True, clock=lambda: now[0],
        facts={"block_size": "32", "dtype": "float32"},
    )  # fmt: skip

    def ends(room: int, event: Any) -> None:
        side.begin(Orders(receives=[Receive(f"d{room}", room, ("tcp://127.0.0.1:1",), 40, 0, ((4, 9, 2),))]))
        client.events = [event, RoomDrained(room)]
        side.results(())

    def warnings() -> list[str]:
        texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        return [text for text in texts if "were computed here" in text]

    for room in range(18):
        ends(room, RoomReady(room, {}, b"", 960))
    for room in (18, 19):
        ends(room, RoomFailed(room, Cause.REFUSED, "block_size: d has '32', p '16'"))
    assert warnings() == [], "2 of 20 are a tenth"
    ends(20, RoomFailed(20, Cause.REFUSED, "block_size: d has '32', p '16'"))
    text = "3 of the last 21 requests were computed here, since their KV was not received: "
    assert warnings() == [text + "refused: block_size: d has '32', p '16'"]
    ends(21, RoomFailed(21, Cause.DEADLINE, "late"))
    assert len(warnings()) == 1, "once a minute"
    now[0] = 60.0
    ends(22, RoomFailed(22, Cause.DEADLINE, "late"))
    assert len(warnings()) == 2
    data = side.take_figures()
    assert data is not None
    assert (data["computed"], data["refusals"]) == (5, {"block_size=32": 3}), "a peer's words are not label"


def test_a_fact_that_is_a_label_is_no_longer_than_a_label() -> None:
    facts = {"layers": "x" * 500, "dtype": "y"}
    assert worker.differing("layers: d has 'x', p 'z'", facts) == ["layers=" + "x" * (worker.FACT_LENGTH_MAX - 7)]

"""The clients as an engine's scheduler drives them: from one thread that never waits, every byte accounted for.

Real clients over shared memory in one process. DESIGN 8's contract: total count at open, prefix length at expect, abort
that says when memory is safe.
"""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pdtransfer.bus import bus as bus_module
from pdtransfer.bus.keys import AllowList
from pdtransfer.client import clients as client_module
from pdtransfer.client import decode_node, prefill_node, thread_queues
from pdtransfer.client.aio import AsyncPrefill
from pdtransfer.client.clients import DecodeClient, KVPoll, PrefillClient
from pdtransfer.errors import Cause, LocalProtocolError, RoomFailedError, WorldError
from pdtransfer.handoff.effects import RoomAsked, RoomDrained, RoomFailed, RoomLanded, RoomLeased, RoomReady
from pdtransfer.limits import AUX_BYTES_MAX, TOKENS_MAX
from pdtransfer.transports.options import WriterOptions
from tests.library.client.async_pair import AsyncPair, started
from tests.library.client.copy_gate import Gate
from tests.support.bus_peers import pair as keys
from tests.support.client_pair import Expected, Late, Pair, client_pair, component, settings, slots_of_pages
from tests.support.fake_gpu import FakeGpu
from tests.support.internals import core_of, lines_of, node_of
from tests.support.layout_tensors import Pool, mha, mla
from tests.support.processes import open_files
from tests.support.waiting import PATIENCE_S, wait_for


def landed(pair: Pair, expected: Expected, room: int, pages: np.ndarray, tokens: int) -> None:
    """Waits for READY and notes where the room's bytes have to be."""
    slots = pair.ready(room).slots["kv"][:tokens]
    expected.land(slots_of_pages(pages, pair.source.page_size, tokens), slots)


# The scheduler's loop


@dataclass
class Request:
    """What a scheduler knows of one request; `states` are those that its polls have seen, each once."""

    room: int
    tokens: int
    chunk: int
    sent: int = 0
    pages: list[int] = field(default_factory=list)
    states: list[KVPoll] = field(default_factory=list)

    def see(self, state: KVPoll) -> None:
        if not self.states or self.states[-1] is not state:
            self.states.append(state)


class PrefillScheduler:
    """Bootstrap queue, chunked batches, inflight queue: pages are taken as chunks need them, freed once drained."""

    def __init__(self, pair: Pair, requests: list[Request]) -> None:
        self.client, self.page_size = pair.prefill, pair.source.page_size
        self.bootstrapping, self.running, self.inflight = list(requests), [], []
        self.free_pages = list(np.random.default_rng(5).permutation(pair.source.slots // self.page_size))
        self.pages_at_most = 0
        for request in requests:
            self.client.open(request.room, tokens=request.tokens)

    def step(self) -> None:
        drained = {event.room for event in self.client.poll() if isinstance(event, RoomDrained)}
        for request in list(self.bootstrapping):
            request.see(self.client.state(request.room))
            if self.client.state(request.room) is KVPoll.WAITING_FOR_INPUT:
                self.bootstrapping.remove(request)
                self.running.append(request)
        for request in list(self.running):
            end = min(request.sent + request.chunk, request.tokens)
            while len(request.pages) * self.page_size < end:
                request.pages.append(self.free_pages.pop())
            self.client.push(request.room, request.pages, rows=(request.sent, end))
            request.sent = end
            if end == request.tokens:
                self.client.finish(request.room, aux=b"aux of %d" % request.room)
                request.see(self.client.state(request.room))
                self.running.remove(request)
                self.inflight.append(request)
        for request in list(self.inflight):
            request.see(self.client.state(request.room))
            if request.room in drained:
                self.inflight.remove(request)
                self.free_pages += request.pages

    @property
    def idle(self) -> bool:
        return not (self.bootstrapping or self.running or self.inflight)


class DecodeScheduler:
    """Prealloc and transfer queue in one; a room that has landed is read, and released some batches later."""

    def __init__(self, pair: Pair, requests: list[Request], read: Callable[[Request, RoomReady], None]) -> None:
        self.client, self._read = pair.decode, read
        self.waiting = {request.room: request for request in requests}
        self.running: list[tuple[int, int]] = []
        self.steps = 0
        for request in requests:
            self.client.expect(request.room, tokens=request.tokens, sources=[pair.prefill.endpoint])

    def step(self) -> None:
        self.steps += 1
        ready = {event.room: event for event in self.client.poll() if isinstance(event, RoomReady)}
        for room, request in list(self.waiting.items()):
            request.see(self.client.state(room))
            if self.client.state(room) is KVPoll.SUCCESS:
                self._read(self.waiting.pop(room), ready[room])
                self.running.append((self.steps + 3, room))
        while self.running and self.running[0][0] <= self.steps:
            self.client.release(self.running.pop(0)[1])

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)


@pytest.mark.given(source=("layer_first", 16, 640), target=("page_first", 1, 256))
def test_two_schedulers_that_never_wait_move_rooms_chunk_by_chunk(pair: Pair) -> None:
    """Twelve rooms through an arena that holds four or so of them at a time, and a pool that holds all but one."""
    sizes = [1, 15, 16, 17, 60, 63, 64, 65, 33, 90, 128, 48]
    senders = [Request(100 + index, tokens, chunk=24) for index, tokens in enumerate(sizes)]
    receivers = [Request(sender.room, sender.tokens, chunk=0) for sender in senders]
    source = {sender.room: sender for sender in senders}

    def read(request: Request, ready: RoomReady) -> None:
        assert ready.aux == b"aux of %d" % request.room
        assert ready.kv_bytes == request.tokens * pair.source.layout.row_bytes
        pages = np.array(source[request.room].pages)
        of, slot = slots_of_pages(pages, 16, request.tokens), ready.slots["kv"]
        for kind, layer, head in pair.source.model.rows():
            rows = pair.source.read(kind, layer, head, of), pair.target.read(kind, layer, head, slot)
            assert (rows[0] == rows[1]).all()

    prefill, decode = PrefillScheduler(pair, senders), DecodeScheduler(pair, receivers, read)
    deadline = time.monotonic() + 120
    while not (prefill.idle and decode.idle):
        assert time.monotonic() < deadline
        prefill.step()
        decode.step()
        time.sleep(0.0005)  # the batch that a scheduler runs between two polls
    stations = [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS]
    for request in senders:
        assert request.states[-1] is KVPoll.SUCCESS
        assert request.states == [state for state in stations if state in request.states]  # never back
        assert KVPoll.TRANSFERRING in request.states
    assert all(request.states[-1] is KVPoll.SUCCESS for request in receivers)
    assert all(set(request.states) <= {KVPoll.BOOTSTRAPPING, KVPoll.SUCCESS} for request in receivers)
    assert len(prefill.free_pages) == 640 // 16
    pair.whole_arena_is_free(1)


def test_min_over_ranks_is_the_rooms_state() -> None:
    order = [KVPoll.FAILED, KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS]
    assert sorted(KVPoll) == order


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("layer_first", 64, 512), ("page_first", 1, 512)),
        (("layer_first", 16, 512), ("page_first", 1, 512)),
        (("layer_first", 16, 512), ("layer_first", 64, 512)),
        (("layer_first", 64, 512), ("page_first", 16, 512)),
        (("layer_first", 16, 512), ("page_first_direct", 64, 512)),
        (("layer_first", 64, 512), ("page_head", 16, 512)),
        (("page_head", 16, 512), ("layer_first", 1, 512)),
        (("page_first_direct", 32, 512), ("page_head", 64, 512)),
    ],
)
@pytest.mark.parametrize("model", [mla(layers=range(2)), mha(layers=range(2), heads=range(4))], ids=["mla", "mha"])
def test_every_pair_of_pools_lands_token_for_token_and_no_other_byte_changes(
    model: object, source: tuple[str, int, int], target: tuple[str, int, int]
) -> None:
    with client_pair(model=model, source=source, target=target) as pair:
        expected = Expected(pair.target)
        for room, tokens in ((1, 1), (2, 63), (3, 65), (4, 40)):
            pages = pair.begin(room, tokens)
            landed(pair, expected, room, pages, tokens)
        assert expected.holds(pair.arena)


@pytest.mark.parametrize(
    ("cells", "skip"),
    [
        ([(rows, layers) for rows in ((32, 50), (0, 32)) for layers in ((2, 3), (0, 2), (3, 4))], 0),
        ([((0, 10), None), ((10, 33), None), ((33, 50), None)], 0),
        ([((0, 3), None), ((3, 30), None), ((30, 50), None)], 12),
    ],
    ids=["layers in any order", "rows that end within a page", "rows that begin within a page"],
)
@pytest.mark.given(model=mla(layers=range(4)))
def test_cells_of_a_page_list_that_is_longer_land(
    pair: Pair, cells: list[tuple[tuple[int, int], tuple[int, int] | None]], skip: int
) -> None:
    expected, pages = Expected(pair.target), pair.pages(1, 50 + skip)
    pair.expect(1, 50)
    pair.prefill.open(1, tokens=50)
    for rows, layers in cells:
        pair.prefill.push(1, pages.tolist(), rows=rows, layers=layers, skip=skip)
    pair.prefill.finish(1)
    expected.land(slots_of_pages(pages, 16, 50 + skip)[skip:], pair.ready(1).slots["kv"])
    assert expected.holds(pair.arena)


# Giving up


def is_leasable(pair: Pair, room: int) -> bool:
    """Whether the whole arena can be leased at this moment: the loop has had its say about a room of that size."""
    leased = threading.Event()
    pair.decode._port.to_loop(leased.set)
    assert leased.wait(60)
    return core_of(pair.decode).arena.free[0].free_slots == pair.target.slots


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_gives_up_gets_the_failure_at_once_and_memory_is_safe_when_the_write_has_ended(
    pair: Pair, gate: Gate, side: str
) -> None:
    pair.begin(1, 40)
    assert gate.entered.wait(60)
    getattr(pair, side).abort(1)
    pair.until(lambda: pair.prefill_event(1, RoomFailed) and pair.decode_event(1, RoomFailed))
    assert pair.prefill.state(1) is pair.decode.state(1) is KVPoll.FAILED
    assert pair.prefill_event(1, RoomFailed).cause is Cause.ABORTED
    assert pair.decode_event(1, RoomFailed).cause is Cause.ABORTED
    # Several repetitions later the write is still under way: pages and slots are still its own.
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pair.poll()
        assert pair.prefill_event(1, RoomDrained) is None
        assert not is_leasable(pair, 1)
        time.sleep(0.01)
    gate.opened.set()
    pair.drained(1)
    pair.until(lambda: is_leasable(pair, 1))
    pair.whole_arena_is_free(2)


@pytest.mark.parametrize("how", ["deadline", "abort", "refused"])
def test_pages_of_a_room_that_decode_gives_up_before_its_grant_are_free_long_before_prefills_deadline(
    pair: Pair, how: str
) -> None:
    """The last of them is the first room that these two have: a session is made to report that."""
    if how != "refused":
        pair.expect(1, pair.target.slots)
        pair.send(1, pair.target.slots, pages=pair.all_pages())
        pair.ready(1)
    pair.prefill.open(2, tokens=10, time_left_s=100 * PATIENCE_S)
    tokens = 2 * pair.target.slots if how == "refused" else 10
    pair.expect(2, tokens, time_left_s=0.1 if how == "deadline" else PATIENCE_S)
    if how == "abort":
        pair.decode.abort(2)
    assert pair.failed(2).cause.value == {"abort": "aborted"}.get(how, how)
    pair.drained(2)
    assert pair.prefill_event(2, RoomFailed).cause.value == "aborted"


def test_an_abort_that_crosses_ready_leaves_the_room_to_be_released(pair: Pair) -> None:
    pair.begin(1, 40)
    while not select.select([pair.decode], [], [], 10)[0]:
        pass
    pair.decode.abort(1)  # Ready is said, and not polled yet.
    pair.ready(1)
    assert pair.decode.state(1) is KVPoll.SUCCESS
    assert pair.decode_event(1, RoomFailed) is None
    assert not is_leasable(pair, 1)
    pair.decode.release(1)
    pair.decode.release(1)
    pair.whole_arena_is_free(2)


def test_a_room_that_prefill_never_opens_fails_at_its_deadline(pair: Pair) -> None:
    pair.expect(1, 40, time_left_s=0.3)
    assert pair.failed(1).cause is Cause.DEADLINE
    pair.until(lambda: is_leasable(pair, 1))


def test_a_room_that_nobody_grants_fails_at_its_deadline_and_its_pages_are_safe(pair: Pair) -> None:
    pair.prefill.open(1, tokens=40, time_left_s=0.3)
    pair.prefill.push(1, pair.pages(1, 40), rows=(0, 40))
    pair.prefill.finish(1)
    pair.drained(1)
    assert pair.prefill_event(1, RoomFailed).cause is Cause.DEADLINE
    assert pair.prefill.state(1) is KVPoll.FAILED


# Events


def test_nothing_is_read_before_its_event_fires(pair: Pair) -> None:
    """The pages hold garbage until the event fires, and what follows may not overtake it."""
    pages, first, second = pair.pages(1, 50), Late(), Late()
    pair.source.memory[:] = 0x11
    pair.expect(1, 50)
    pair.prefill.open(1, tokens=50)
    pair.until(lambda: pair.prefill.state(1) is KVPoll.WAITING_FOR_INPUT)
    pair.prefill.push(1, pages, rows=(0, 20), after=first)
    pair.prefill.push(1, pages, rows=(20, 50), after=second)
    pair.prefill.finish(1, after=second)
    pair.until(lambda: first.asked > 20)
    assert Expected(pair.target).holds(pair.arena)
    pair.source.fill(np.arange(pair.source.slots))
    first.fired = True
    expected, slots = Expected(pair.target), slots_of_pages(pages, 16, 50)
    arena_slots = core_of(pair.decode).rooms[1].holding.extents[0]
    assert len(arena_slots) == 1
    start = int(arena_slots[0, 0])
    expected.land(slots[:20], np.arange(start, start + 20))
    pair.until(lambda: expected.holds(pair.arena))
    assert pair.decode_event(1, RoomReady) is None
    second.fired = True
    landed(pair, expected, 1, pages, 50)
    assert expected.holds(pair.arena)


def test_slots_are_the_engines_until_the_release_event_fires(pair: Pair) -> None:
    pair.moved(1, 256)
    swap_in = Late()
    pair.decode.release(1, after=swap_in)
    pair.begin(2, 10)
    pair.until(lambda: swap_in.asked > 20)
    assert pair.decode_event(2, RoomReady) is None
    swap_in.fired = True
    pair.ready(2)


def test_an_event_that_breaks_fails_its_room(pair: Pair) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    pair.expect(1, 40)
    pair.prefill.open(1, tokens=40)
    pair.prefill.push(1, pair.pages(1, 40), rows=(0, 40), after=Broken())
    assert "illegal memory access" in pair.failed(1).detail
    assert pair.failed(1).cause is Cause.ENGINE
    pair.drained(1)


# Never blocking


def test_no_call_of_a_scheduler_waits_for_the_loop(pair: Pair) -> None:
    """Both loops stand still while every call of the interface is made."""
    event = threading.Event()
    for each in (pair.prefill, pair.decode):
        each._port.to_loop(lambda: event.wait(60))
    over = threading.Event()

    def calls() -> None:
        pair.begin(1, 40)
        pair.expect(2, 40)
        pair.prefill.open(2, tokens=40)
        pair.poll()
        assert pair.prefill.state(1) is KVPoll.TRANSFERRING
        assert pair.decode.state(1) is KVPoll.BOOTSTRAPPING
        pair.prefill.abort(2)
        pair.decode.abort(2)
        pair.decode.dial("tcp://127.0.0.1:1")
        over.set()

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        assert over.wait(60)
    finally:
        event.set()
        thread.join()
    pair.ready(1)
    pair.failed(2)
    pair.drained(2)


def test_fileno_is_readable_from_news_until_poll(pair: Pair) -> None:
    def readable(client: PrefillClient | DecodeClient, seconds: float) -> bool:
        polling = select.epoll()
        polling.register(client, select.EPOLLIN)
        return bool(polling.poll(seconds))

    assert not readable(pair.prefill, 0.05)
    pair.expect(1, 10)
    assert not readable(pair.decode, 0.05)
    assert readable(pair.prefill, 60)
    event = [type(each) for each in pair.prefill.poll()]
    pair.send(1, 10)
    assert readable(pair.decode, 60)
    assert [type(event) for event in pair.decode.poll()] == [RoomReady]
    assert not readable(pair.decode, 0)
    assert pair.decode.poll() == []
    while len(event) < 4:
        assert readable(pair.prefill, 60)
        event += [type(each) for each in pair.prefill.poll()]
    assert event == [RoomAsked, RoomLeased, RoomLanded, RoomDrained]


def test_an_engine_that_does_not_poll_gets_a_bounded_number_of_rooms_that_decode_asks_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine does not poll, and a decode node may ask and give up as often as it likes."""
    monkeypatch.setattr(client_module, "ASKED_MAX", 3)
    for room in range(1, 12):
        pair.expect(room, 10)
    pair.send(11, 10)
    wait_for(pair.decode.poll)
    events: list[Any] = []
    while not events or not isinstance(events[-1], RoomDrained):
        events += pair.prefill.poll()
    assert [event.room for event in events if isinstance(event, RoomAsked)] == [1, 2, 3]
    assert [type(event) for event in events[3:]] == [RoomLeased, RoomLanded, RoomDrained], (
        "what follows from its own calls"
    )
    pair.expect(12, 10)
    pair.until(lambda: pair.prefill_event(12, RoomAsked))


def test_calls_of_many_threads_all_arrive(pair: Pair) -> None:
    def some(first: int) -> None:
        for room in range(first, first + 10):
            pair.begin(room, 5)

    threads = [threading.Thread(target=some, args=(100 * index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for room in (100 * index + more for index in range(1, 5) for more in range(10)):
        pair.ready(room)
        pair.decode.release(room)
        pair.drained(room)
    pair.whole_arena_is_free(1)


# Misuse


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda pair: pair.prefill.push(1, [0, 1], rows=(0, 33)), ["33", "2 pages of 16"]),
        (lambda pair: pair.prefill.push(1, [0, 1, 2], rows=(20, 20)), ["[20, 20)"]),
        (lambda pair: pair.prefill.push(1, [0], rows=(-1, 5)), ["[-1, 5)"]),
        (lambda pair: pair.prefill.push(1, [-1], rows=(0, 5)), ["pages[0]", "-1"]),
        (lambda pair: pair.prefill.push(1, [0.5], rows=(0, 5)), ["float64"]),
        (lambda pair: pair.prefill.push(1, [0], rows=(0, 5), component="index"), ["index", "kv"]),
        (lambda pair: pair.prefill.open(1, tokens=40), ["0000000000000001", "used already"]),
        (
            lambda pair: pair.decode.expect(1, tokens=40, sources=["tcp://127.0.0.1:1"]),
            ["0000000000000001", "used already"],
        ),
        (lambda pair: pair.prefill.open(2, tokens=0), ["tokens", "0"]),
        (lambda pair: pair.decode.expect(2, tokens=TOKENS_MAX + 1, sources=["x"]), ["tokens", str(TOKENS_MAX + 1)]),
    ],
)
def test_misuse_that_shows_at_once_raises_and_harms_no_room(
    pair: Pair, misuse: Callable[[Pair], None], words: list[str]
) -> None:
    pair.expect(1, 40)
    pair.prefill.open(1, tokens=40)
    with pytest.raises(LocalProtocolError) as caught:
        misuse(pair)
    assert all(word in str(caught.value) for word in words), caught.value
    pair.prefill.push(1, pair.pages(1, 40), rows=(0, 40))
    pair.prefill.finish(1)
    pair.ready(1)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda prefill, pages: prefill.push(1, pages, rows=(10, 40)), ["[10, 40)", "offered already"]),
        (lambda prefill, pages: prefill.push(1, [*pages, 9], rows=(16, 49)), ["[16, 49)", "40"]),
        (lambda prefill, pages: prefill.push(1, [32, 33, 34], rows=(16, 40)), ["slots", "511"]),
        (lambda prefill, pages: prefill.push(1, pages, rows=(16, 40), layers=(1, 3)), ["layers", "[1, 3]"]),
        (lambda prefill, pages: prefill.finish(1, aux=bytes(AUX_BYTES_MAX + 1)), ["aux", str(AUX_BYTES_MAX + 1)]),
        (lambda prefill, pages: (prefill.finish(1), prefill.finish(1)), ["finished already"]),
        (lambda prefill, pages: (prefill.finish(1), prefill.push(1, pages, rows=(16, 40))), ["no cell may follow"]),
        (
            lambda prefill, pages: prefill.finish(1, after=None) or prefill.push(1, pages, rows=(16, 40)),
            ["no cell may follow"],
        ),
    ],
)
def test_misuse_that_only_the_node_sees_fails_its_room_with_the_reason_on_both_sides(
    pair: Pair, misuse: Callable[[PrefillClient, np.ndarray], None], words: list[str]
) -> None:
    pages = pair.pages(1, 40)
    for room in (1, 2):
        pair.expect(room, 40)
    pair.prefill.open(1, tokens=40)
    pair.prefill.push(1, pages, rows=(0, 16))
    misuse(pair.prefill, pages)
    pair.drained(1)
    for failed in (pair.prefill_event(1, RoomFailed), pair.failed(1)):
        assert failed.cause is Cause.REFUSED
        assert all(word in failed.detail for word in words), failed
    pair.send(2, 40)
    pair.ready(2)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"growth": -1}, ["growth -1"]),
        ({"prefix": 41}, ["prefix 41", "40"]),
        ({"sources": []}, ["sources"]),
        ({"sources": ["tcp://127.0.0.1:1"] * 2}, ["each once"]),
        ({"sources": ["127.0.0.1:1"]}, ["127.0.0.1:1", "tcp://"]),
        ({"growth": 300}, ["340", "256"]),
    ],
)
def test_a_room_that_makes_no_sense_to_decode_fails_with_the_numbers(
    pair: Pair, numbers: dict[str, object], words: list[str]
) -> None:
    pair.decode.expect(1, **{"tokens": 40, "sources": [pair.prefill.endpoint], **numbers})
    failed = pair.failed(1)
    assert failed.cause is Cause.REFUSED
    assert all(word in failed.detail for word in words), failed
    pair.whole_arena_is_free(2)


def test_a_room_that_makes_no_sense_to_prefill_fails_with_the_numbers(pair: Pair) -> None:
    pair.prefill.open(1, tokens=40, grants=0)
    pair.drained(1)
    assert "0 grants" in pair.prefill_event(1, RoomFailed).detail


def test_releasing_a_room_that_is_not_ready_fails_it(pair: Pair) -> None:
    pair.expect(1, 40)
    pair.decode.release(1)
    assert "not ready" in pair.failed(1).detail


def test_a_label_names_one_room_only(pair: Pair) -> None:
    for early in (lambda: pair.prefill.push(1, [0], rows=(0, 5)), lambda: pair.prefill.finish(1)):
        with pytest.raises(LocalProtocolError, match="room: 0000000000000001 is not open"):
            early()
    pair.begin(1, 40)
    for again in (lambda: pair.expect(1, 40), lambda: pair.prefill.open(1, tokens=40)):
        with pytest.raises(LocalProtocolError, match="0000000000000001 was used already"):
            again()
    pair.ready(1)
    pair.decode.release(1)
    pair.drained(1)
    for again in (lambda: pair.expect(1, 40), lambda: pair.prefill.open(1, tokens=40)):
        with pytest.raises(LocalProtocolError, match="it is SUCCESS; a retry takes a new label"):
            again()


def test_states_of_ended_rooms_are_kept_up_to_a_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STATES_MAX", 3)
    pair.expect(9, 5)
    pair.prefill.open(9, tokens=5)  # under way all the time, and never forgotten
    for room in (1, 2, 3, 4, 5):
        pair.moved(room, 5)
        pair.decode.release(room)
        pair.decode.release(room)
        pair.drained(room)
    for each in (pair.prefill, pair.decode):
        assert [each.state(room) for room in (3, 4, 5)] == [KVPoll.SUCCESS] * 3
        assert each.state(9) in (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT)
        for room in (1, 2):
            with pytest.raises(KeyError):
                each.state(room)


def test_another_layout_of_the_model_is_refused_with_both_values() -> None:
    narrow = Pool(name="page_first", model=mla(layers=range(2), head_bytes=1_024), page_size=1, slots=256)
    with client_pair(components=lambda _: [component(narrow)]) as pair:
        pair.expect(1, 40)
        failed = pair.failed(1)
        assert failed.cause is Cause.REFUSED
        assert all(word in failed.detail for word in ("1152", "1024")), failed


# The end


def test_close_ends_rooms_under_way_on_both_sides_and_gives_everything_back() -> None:
    threads = set(threading.enumerate())
    with client_pair():
        pass  # what is opened once in a process's life
    gc.collect()
    before = open_files()
    with client_pair() as pair:
        pair.expect(1, 40)
        pair.prefill.open(1, tokens=40)
        pair.moved(2, 40)
        pair.until(lambda: pair.prefill.state(1) is KVPoll.WAITING_FOR_INPUT)
        pair.decode.close()
        pair.poll()
        pair.drained(1)
        assert pair.prefill_event(1, RoomFailed).cause in (Cause.ABORTED, Cause.SHUTDOWN, Cause.PEER_LOST)
        failed = pair.failed(1)
        assert (failed.cause, failed.detail) == (Cause.SHUTDOWN, "this node is closed")
        assert pair.decode.state(2) is KVPoll.SUCCESS  # still the engine's
        pair.decode.close()
        pair.decode.release(2)
        assert pair.decode.poll() == []
        with pytest.raises(LocalProtocolError, match="closed"):
            pair.expect(3, 40)
    gc.collect()
    assert open_files() == before
    assert {thread for thread in threading.enumerate() if thread.name.startswith("pdtransfer")} <= threads


class Held:
    """An event that holds up whoever asks it."""

    def __init__(self, until: threading.Event) -> None:
        self._until = until

    def query(self) -> bool:
        return self._until.wait(PATIENCE_S)


def test_rooms_that_have_landed_are_ready_although_prefill_leaves_before_decode_has_read_it(pair: Pair) -> None:
    """Landed goes by the session's line, and Goodbye by ZMQ: more than a turn of decode's loop reads of a line."""
    pair.moved(1, 10)
    rooms, event = range(2, 42), threading.Event()
    for room in rooms:
        pair.expect(room, 4)
        pair.prefill.open(room, tokens=4)
    pair.until(lambda: all(pair.prefill_event(room, RoomLeased) for room in rooms))
    assert lines_of(node_of(pair.prefill).bus), "the session has a line"
    pair.decode.release(1, after=Held(event))  # its loop asks the event, and stands still
    try:
        for room in rooms:
            pair.prefill.push(room, pair.pages(room, 4), rows=(0, 4))
            pair.prefill.finish(room, aux=b"")
        pair.until(lambda: all(pair.prefill_event(room, RoomDrained) for room in rooms))
        assert not any(pair.prefill_event(room, RoomFailed) for room in rooms)
        pair.prefill.close()
    finally:
        event.set()
    for room in rooms:
        pair.ready(room)


def test_prefills_close_waits_for_writes_and_decode_learns_of_it(pair: Pair, gate: Gate) -> None:
    pair.begin(1, 40)
    assert gate.entered.wait(60)
    closing = threading.Thread(target=pair.prefill.close)
    closing.start()
    assert pair.failed(1).cause is Cause.SHUTDOWN
    closing.join(0.2)
    assert closing.is_alive()  # a page is being read
    gate.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    pair.poll()
    assert [type(event) for event in pair.prefill_events] == [RoomLeased, RoomFailed, RoomDrained]
    pair.until(lambda: is_leasable(pair, 1))


def test_a_client_that_cannot_start_reports_why_and_gives_everything_back() -> None:
    with client_pair():
        pass
    gc.collect()
    before, threads = open_files(), set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pool = Pool(name="layer_first", model=mla(), page_size=16, slots=64)
        client = PrefillClient(settings("p"), [component(pool)], bind=f"tcp://127.0.0.1:{port}")
        with pytest.raises(WorldError, match="in use"):
            client.start()
        with pytest.raises(LocalProtocolError, match="make another one"):
            client.start()
    wait_for(lambda: open_files() <= before, "every descriptor is closed")
    assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended meanwhile


@pytest.mark.parametrize(
    ("side", "where", "step"),
    [
        ("prefill", bus_module, "open_socket"),
        ("prefill", prefill_node, "PrefillSessions"),
        ("prefill", prefill_node, "EventQueue"),
        ("decode", decode_node, "DecodeSessions"),
        ("decode", decode_node, "EventQueue"),
        ("decode", threading.Thread, "start"),
    ],
)
def test_whatever_step_of_a_start_fails_nothing_is_left(
    side: str, where: object, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> Any:
        raise RuntimeError("no more of these")

    with client_pair(decode_options={"verify": True}):
        pass  # what the first one loads stays
    before, threads = open_files(), set(threading.enumerate())
    with client_pair(start=False, decode_options={"verify": True}) as pair, monkeypatch.context() as patch:
        patch.setattr(where, step, breaks)
        with pytest.raises((RuntimeError, WorldError), match="no more of these"), getattr(pair, side):
            pytest.fail("it has started")
        (pair.decode if side == "prefill" else pair.prefill).close()  # which was not started
    del pair  # and with it the error, whose frames have what was opened
    wait_for(lambda: open_files() <= before, "every descriptor is closed", seconds=10)
    assert set(threading.enumerate()) <= threads


async def test_a_context_left_while_it_is_entered_leaves_no_client_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, bind = threading.Event(), threading.Event(), client_module.PrefillNode.prepare

    async def slowly(node: Any) -> None:
        begun.set()
        await asyncio.to_thread(go_on.wait)
        await bind(node)

    monkeypatch.setattr(client_module.PrefillNode, "prepare", slowly)
    with client_pair(start=False) as pair:
        entering = asyncio.ensure_future(AsyncPrefill(pair.prefill).__aenter__())
        await asyncio.to_thread(begun.wait)
        entering.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert pair.prefill.fileno() == -1
        with pytest.raises(LocalProtocolError, match="closed"):
            pair.prefill.open(1, tokens=1)


async def test_a_client_that_runs_already_is_left_alone_by_a_second_context() -> None:
    with client_pair() as pair:
        with pytest.raises(LocalProtocolError, match="started"):
            await AsyncPrefill(pair.prefill).__aenter__()
        pair.prefill.open(1, tokens=1)


@pytest.mark.given(start=False)
def test_what_was_not_begun_may_be_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalProtocolError, match="start"):
        pair.prefill.open(1, tokens=1)
    with pair.prefill:
        monkeypatch.setattr(thread_queues, "CALLS_MAX", 0)
        with pytest.raises(WorldError, match="wait for the loop"):
            pair.prefill.open(1, tokens=1)
        monkeypatch.undo()
        pair.prefill.open(1, tokens=1)


def test_a_client_that_was_never_started_closes() -> None:
    gc.collect()
    before = open_files()
    client = PrefillClient(settings("p"), [component(Pool(name="layer_first", model=mla(), page_size=16, slots=64))])
    client.close()
    client.close()
    gc.collect()
    assert open_files() == before


def test_what_the_loop_does_not_expect_is_raised_by_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(client_module, "PrefillNode", breaks)
    client = PrefillClient(settings("p"), [component(Pool(name="layer_first", model=mla(), page_size=16, slots=64))])
    with ThreadPoolExecutor(1) as apart, pytest.raises(RuntimeError, match="no such thing"):
        apart.submit(client.start).result(60)
    client.close()


def test_a_prefill_that_comes_back_under_its_endpoint_is_served_again(pair: Pair) -> None:
    pair.moved(1, 40)
    pair.decode.release(1)
    pair.drained(1)
    pair.expect(2, 40)
    pair.until(lambda: not is_leasable(pair, 2))
    endpoint = pair.prefill.endpoint
    pair.prefill.close()
    assert pair.failed(2).cause in (Cause.PEER_LOST, Cause.SHUTDOWN)
    with PrefillClient(
        settings("p"),
        [component(pair.source)],
        bind=endpoint,
        writer=WriterOptions(pool_address=pair.source.memory.ctypes.data),
    ) as again:
        pair.prefill = again
        pair.prefill_events.clear()
        pair.whole_arena_is_free(3)


# asyncio


async def test_hands_are_ready_landed_and_drained(it: AsyncPair) -> None:
    pair, expected = it.pair, Expected(it.pair.target)

    async def move(room: int, tokens: int) -> None:
        hand = it.decode.expect(room, tokens=tokens, sources=[it.prefill.client.endpoint], prefix=2)
        opened, pages = it.prefill.open(room, tokens=tokens), pair.pages(room, tokens)
        opened.push(pages, rows=(0, tokens))
        event = await opened.finish(aux=b"first")
        assert event.kv_bytes == (tokens - 2) * pair.source.layout.row_bytes
        ready = await hand.ready()
        assert ready is await hand.ready()
        assert ready.aux == b"first"
        expected.land(slots_of_pages(pages, 16, tokens)[2:], ready.slots["kv"][2:])
        hand.release()

    for room in range(1, 4):
        await move(room, 10 * room)
    assert expected.holds(pair.arena)
    await asyncio.gather(*(move(room, 20) for room in range(10, 40)))


async def test_a_failed_room_raises_its_root_cause_on_both_sides(it: AsyncPair) -> None:
    hand = it.decode.expect(7, tokens=40, sources=[it.prefill.client.endpoint])
    opened = it.prefill.open(7, tokens=40)
    opened.push([0, 1, 2], rows=(0, 40))
    opened.push([0, 1, 2], rows=(0, 40))
    with pytest.raises(RoomFailedError, match="offered already") as caught:
        await opened.finish()
    assert (caught.value.room, caught.value.cause) == (7, Cause.REFUSED)
    with pytest.raises(RoomFailedError, match="offered already") as caught:
        await hand.ready()
    assert (caught.value.room, caught.value.cause) == (7, Cause.REFUSED)


async def test_abort_returns_when_the_pages_are_safe(gate: Gate, it: AsyncPair) -> None:
    hand = it.decode.expect(7, tokens=40, sources=[it.prefill.client.endpoint])
    opened = it.prefill.open(7, tokens=40)
    opened.push([0, 1, 2], rows=(0, 40))
    assert await asyncio.to_thread(gate.entered.wait, 60)
    aborted = asyncio.ensure_future(opened.abort())
    with pytest.raises(RoomFailedError):
        await hand.ready()
    await asyncio.sleep(0.1)
    assert not aborted.done()
    gate.opened.set()
    await aborted


async def test_who_stops_waiting_harms_nobody_else(it: AsyncPair) -> None:
    hands = [it.decode.expect(room, tokens=40, sources=[it.prefill.client.endpoint]) for room in (1, 2)]
    rooms = [it.prefill.open(room, tokens=40) for room in (1, 2)]
    for waits in (hands[0].ready(), rooms[0].landed(), rooms[0].drained()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waits, 0.05)
    for opened in rooms:
        opened.push([0, 1, 2], rows=(0, 40))
        opened.client.finish(opened.room)
    assert [(await hand.ready()).room for hand in hands] == [1, 2]
    await rooms[0].landed()
    await rooms[0].drained()
    await rooms[1].drained()


async def test_leaving_the_context_ends_every_wait() -> None:
    with client_pair(start=False) as pair:
        async with started(pair) as it:
            hand = it.decode.expect(1, tokens=40, sources=[it.prefill.client.endpoint])
            opened = it.prefill.open(2, tokens=40)
            finish = asyncio.ensure_future(opened.finish())
            await asyncio.sleep(0)
        for waits in (hand.ready(), finish):
            with pytest.raises(RoomFailedError) as caught:
                await waits
            assert caught.value.cause is Cause.SHUTDOWN
        with pytest.raises(LocalProtocolError, match="closed"):
            it.decode.expect(3, tokens=40, sources=["tcp://127.0.0.1:1"])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_is_taken_off_a_clients_allow_list_loses_its_rooms_and_is_met_again_when_it_is_back(side: str) -> None:
    p, d = keys(), keys()
    known = {"prefill": AllowList({d.public: "d"}), "decode": AllowList({p.public: "p"})}
    with client_pair(
        prefill_settings={"keys": p, "allowed": known["prefill"]},
        decode_settings={"keys": d, "allowed": known["decode"]},
    ) as pair:
        source, client = [f"{p.public}@{pair.prefill.endpoint}"], getattr(pair, side)
        pair.decode.expect(1, tokens=16, sources=source)
        pair.prefill.open(1, tokens=16)
        pair.until(lambda: pair.prefill_event(1, RoomLeased))
        client.allow(AllowList({}))
        pair.until(lambda: (pair.prefill_event if side == "prefill" else pair.decode_event)(1, RoomFailed))
        client.allow(known[side])
        pair.prefill.abort(1)
        pair.serves_again(source)


def test_a_client_without_keys_has_no_allow_list_to_change(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="without keys"):
        pair.decode.allow(AllowList({}))


def test_what_copies_rows_is_compiled_and_loaded_before_a_prefill_client_has_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first session it would hold up the engine. A GPU that cannot copy is named."""

    class Broken(FakeGpu):
        def prepare(self) -> None:
            super().prepare()
            raise WorldError("no compiler")

    for gpu in (FakeGpu(), Broken()):
        monkeypatch.setattr("pdtransfer.transports.select.WriterGpu", lambda *_, gpu=gpu: gpu)
        pool = Pool(name="layer_first", model=mla(layers=range(1)), page_size=16, slots=64)
        with PrefillClient(settings("p"), [component(pool)], writer=WriterOptions(device=0)):
            assert gpu.prepared == 1
    assert "the GPU cannot copy rows: no compiler" in caplog.text

"""The engine's thread: orders in, steps, outcomes out, whatever the engine refuses, breaks or gets wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from pdtransfer import wire
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.limits import AUX_BYTES_MAX
from pdtransfer.serve.engine_api import Broken, Computed, EngineDescription, Finished, Prefilled, Request, Token
from pdtransfer.serve.worker import engine_thread
from pdtransfer.serve.worker.engine_thread import (
    Compute,
    DecodeThread,
    Drop,
    Dropped,
    Free,
    Generate,
    Offered,
    Order,
    PrefillThread,
    Quit,
    Refused,
    Stepped,
    follower_steps,
    leader_steps,
)
from pdtransfer.wire import Sampling, StepOrder, StepOrders

PAGE = 16
LAYOUT = host_layout(
    "layer_first", kinds=("latent",), layers=2, heads=1, head_bytes=64, dtype="float32", slots=64 * PAGE, page_size=PAGE
)
COMPONENT = Component("kv", "dram", 1, Span(), LAYOUT)
CARD = EngineDescription(model="m", weights=b"w", components=(COMPONENT,), memory_bytes=1)


def request(room: int, tokens: int = 20) -> Request:
    return Request(room=room, prompt=np.arange(tokens), sampling=Sampling(max_tokens=3))


@dataclass
class Engine:
    """Does a room a step, oldest first. What it is asked is written down, with the thread that asks."""

    pages_free: int = 4
    rooms: dict[int, Request] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    steps: int = 0
    made: Callable[[Request], list] = lambda request: []
    description = CARD

    def _note(self, what: str, room: int) -> None:
        self.calls.append((what, room))
        self.threads.add(threading.get_ident())

    @property
    def idle(self) -> bool:
        self.threads.add(threading.get_ident())
        return not self.rooms

    def step(self) -> list:
        self.steps += 1
        self.threads.add(threading.get_ident())
        return self.made(self.rooms.pop(next(iter(self.rooms)))) if self.rooms else []

    def cancel(self, room: int) -> None:
        self._note("cancel", room)
        self.rooms.pop(room, None)

    def free(self, room: int) -> None:
        self._note("free", room)
        self.pages_free += self.held.pop(room, 0)


class Prefill(Engine):
    def admit(self, request: Request) -> bool:
        self._note("admit", request.room)
        pages = -(-len(request.prompt) // PAGE)
        if pages > 8:
            raise ValueError(f"{len(request.prompt)} tokens never fit")
        if pages > self.pages_free:
            return False
        self.pages_free -= pages
        self.held[request.room] = pages
        self.rooms[request.room] = request
        return True


class EarlyPrefill(Prefill):
    """A step that goes on after it has reported its cells, until the gate opens."""

    report: Callable[[list], None] | None = None
    gate: threading.Event

    def step(self) -> list:
        made = super().step()
        if made and self.report is not None:
            self.report(made[:1])
            self.gate.wait(60)
        return made[1:]


class Decode(Engine):
    def admit(self, request: Request, slots: dict, aux: bytes) -> None:
        self._note("admit", request.room)
        if aux != b"aux":
            raise ValueError(f"aux: {aux!r}")
        self.rooms[request.room] = request


def computed(request: Request) -> list:
    tokens = len(request.prompt)
    pages = np.arange(-(-tokens // PAGE)) + 7
    cell = Computed(room=request.room, component="kv", rows=(4, tokens), layers=(0, 2), pages=pages)
    return [cell, Prefilled(room=request.room, aux=b"aux")]


def generated(request: Request) -> list:
    ids = [Token(room=request.room, index=index, id=index) for index in range(3)]
    return [*ids, Finished(room=request.room, reason="length")]


class Site:
    """A thread with its engine; the test is the loop, and takes the calls that were submitted to it."""

    def __init__(self, engine: Engine, kind: Callable[..., PrefillThread | DecodeThread]) -> None:
        self.engine, self.port, self.outcomes = engine, ThreadQueues[Order](), []
        self.died: list[BaseException] = []
        self.bursts: list[int] = []
        self.stepped: list[Stepped] = []
        self.work = kind(engine, self.port, self._receive, leader_steps(engine, self.port, None))
        self.thread = engine_thread.start(self.work, self.died.append)

    def _receive(self, outcomes: list) -> None:
        self.stepped += [outcome for outcome in outcomes if isinstance(outcome, Stepped)]
        outcomes = [outcome for outcome in outcomes if not isinstance(outcome, Stepped)]
        self.bursts.append(len(outcomes))
        self.outcomes += outcomes

    def send(self, *orders: Order) -> None:
        for order in orders:
            self.port.to_engine(order)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (self.outcomes, self.engine)
            self.port._calls._run()
            time.sleep(0.001)

    def of(self, room: int) -> list:
        return [outcome for outcome in self.outcomes if outcome.room == room]


@pytest.fixture
def prefill() -> Iterator[Site]:
    yield from site(Site(Prefill(made=computed), PrefillThread))


@pytest.fixture
def decode() -> Iterator[Site]:
    yield from site(Site(Decode(made=generated), DecodeThread))


def site(made: Site) -> Iterator[Site]:
    yield made
    if made.thread.is_alive():
        made.send(Quit())
    made.thread.join(60)
    assert not made.thread.is_alive()
    made.port.close()


def test_a_prompts_cells_come_as_slots_of_its_pages_and_then_its_aux(prefill: Site) -> None:
    def apart(request: Request) -> list:
        cell, prefilled = computed(request)
        return [replace(cell, layers=(0, 1)), replace(cell, layers=(1, 2)), prefilled]

    prefill.engine.made = apart
    prefill.send(Compute(request(1, tokens=20)))
    prefill.until(lambda: len(prefill.of(1)) == 2)
    assert [each.room for each in prefill.stepped] == [1, 1], "the room's first and last step"
    offered, prefilled = prefill.of(1)
    assert isinstance(offered, Offered)
    assert (offered.cell.component, offered.cell.first_row, offered.cell.layers) == ("kv", 4, (0, 2))
    assert offered.cell.source_slots.tolist() == list(range(7 * PAGE + 4, 7 * PAGE + 20))
    assert prefilled == Prefilled(room=1, aux=b"aux")
    assert prefill.bursts == [2]  # one call to the loop for all that one step made


@pytest.fixture
def early() -> Iterator[Site]:
    engine = EarlyPrefill(made=computed)
    engine.gate = threading.Event()
    yield from site(Site(engine, PrefillThread))


def test_cells_that_an_engine_reports_early_are_offered_before_its_step_returns(early: Site) -> None:
    early.send(Compute(request(1)))
    try:
        early.until(lambda: early.of(1))
        assert [type(each) for each in early.of(1)] == [Offered]
    finally:
        early.engine.gate.set()
    early.until(lambda: len(early.of(1)) == 2)
    assert early.of(1)[1] == Prefilled(room=1, aux=b"aux")
    assert [each.room for each in early.stepped] == [1, 1]


def test_rows_of_a_window_may_begin_within_their_first_page(prefill: Site) -> None:
    def window(request: Request) -> list:
        pages = np.array([9, 2, 5])
        return [Computed(room=request.room, component="kv", rows=(3, 20), layers=(0, 2), pages=pages, skip=11)]

    prefill.engine.made = window
    prefill.send(Compute(request(1, tokens=20)))
    prefill.until(lambda: prefill.of(1))
    (offered,) = prefill.of(1)
    assert offered.cell.first_row == 3
    assert offered.cell.source_slots.tolist() == [9 * PAGE + 14, 9 * PAGE + 15, *range(2 * PAGE, 2 * PAGE + 15)]


def test_prompts_wait_in_order_for_pages_without_turns_are_counted_and_go_on_when_some_are_free(prefill: Site) -> None:
    prefill.send(Compute(request(1, 60)), Compute(request(2, 40)), Compute(request(3, 5)))
    prefill.until(lambda: len(prefill.of(1)) == 2)
    assert prefill.of(3) == []  # it would fit, and it is not its turn
    prefill.until(lambda: prefill.work.waiting == 2)
    steps = prefill.engine.steps
    time.sleep(0.1)
    assert prefill.engine.steps <= steps + 1
    prefill.send(Free(1))
    prefill.until(lambda: len(prefill.of(2)) == 2 and len(prefill.of(3)) == 2)
    assert [outcome.room for outcome in prefill.outcomes] == [1, 1, 2, 2, 3, 3]
    prefill.until(lambda: prefill.work.waiting == 0)


def test_a_prompt_that_never_fits_is_refused_and_those_behind_it_go_on(prefill: Site) -> None:
    prefill.send(Compute(request(1, 500)), Compute(request(2, 20)))
    prefill.until(lambda: len(prefill.of(2)) == 2)
    assert prefill.of(1) == [Refused(1, "500 tokens never fit")]


def test_a_cancelled_prompt_that_waits_is_never_computed_and_all_calls_are_of_the_engines_thread(prefill: Site) -> None:
    prefill.send(Compute(request(1, 60)))
    prefill.until(lambda: len(prefill.of(1)) == 2)
    prefill.send(Compute(request(2, 40)), Compute(request(3, 5)), Drop(2))
    prefill.until(lambda: ("cancel", 2) in prefill.engine.calls)
    prefill.send(Free(1))
    prefill.until(lambda: len(prefill.of(3)) == 2)
    assert prefill.of(2) == []
    order = [("cancel", 2), ("free", 1)]
    assert [call for call in prefill.engine.calls if call in order] == order
    assert prefill.engine.threads == {prefill.thread.ident}


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        ({"pages": np.arange(1)}, "the engine's pages: tokens: 20 do not end in the last of 1 pages of 16"),
        ({"component": "kw"}, "the engine's cell: component 'kw' must be one of kv"),
    ],
)
def test_an_engine_whose_cell_is_wrong_breaks_that_room_alone(prefill: Site, wrong: Any, detail: str) -> None:
    def made(request: Request) -> list:
        cell, prefilled = computed(request)
        return [replace(cell, **(wrong if request.room == 1 else {})), prefilled]

    prefill.engine.made = made
    prefill.send(Compute(request(1, 20)), Compute(request(2, 20)))
    prefill.until(lambda: len(prefill.of(2)) == 2)
    assert prefill.of(1)[0] == Broken(room=1, detail=detail)
    assert isinstance(prefill.of(2)[0], Offered)
    assert not prefill.died


def test_a_room_that_the_engine_refuses_is_broken_and_others_are_generated_from(decode: Site) -> None:
    decode.send(Generate(request(1), {}, b"another"), Generate(request(2), {}, b"aux"))
    decode.until(lambda: len(decode.of(2)) == 4)
    assert decode.of(1) == [Broken(room=1, detail="aux: b'another'")]
    assert [each.id for each in decode.of(2)[:3]] == [0, 1, 2]
    assert decode.of(2)[3] == Finished(room=2, reason="length")
    assert decode.engine.threads == {decode.thread.ident}


def test_cancel_is_answered_once_the_engine_has_dropped_the_room(decode: Site) -> None:
    seen, cancel = list[bool](), decode.engine.cancel
    decode.engine.cancel = lambda room: cancel(room) or seen.append(Dropped(room) in decode.outcomes)
    decode.engine.made = lambda each: []
    decode.send(Generate(request(1), {}, b"aux"), Drop(1), Drop(9))
    decode.until(lambda: Dropped(9) in decode.outcomes)
    assert decode.outcomes == [Dropped(1), Dropped(9)]
    assert seen == [False, False]


async def test_the_orders_of_no_step_are_longer_than_one_frame() -> None:
    announced, port = list[list[Order]](), ThreadQueues[Order]()
    orders = [Generate(request(room), {}, bytes(AUX_BYTES_MAX)) for room in range(100)]
    for order in orders:
        port.to_engine(order)
    steps, done = leader_steps(Engine(), port, announced.append), list[Order]()
    while len(done) < len(orders):
        done += next(steps)
    port.attach(asyncio.get_running_loop())
    await asyncio.sleep(0)
    port.close()
    assert done == orders
    assert [order for step in announced for order in step] == orders
    for step in announced:
        generated = [order for order in step if isinstance(order, Generate)]
        step_orders = tuple(StepOrder("generate", order.request.room, order.aux) for order in generated)
        assert wire.decode(wire.encode(StepOrders(1, step_orders))) == StepOrders(1, step_orders)


async def test_a_call_among_the_orders_of_a_follower_comes_back_behind_what_the_steps_before_it_made() -> None:
    engine, port, seen = Decode(made=generated), ThreadQueues[Any](), list[str]()
    work = DecodeThread(
        engine, port, lambda outcomes: seen.extend(type(outcome).__name__ for outcome in outcomes), follower_steps(port)
    )
    port.to_engine([Generate(request(1), {}, b"aux")])
    port.to_engine(lambda: seen.append("call"))
    port.to_engine([Drop(1)])
    port.to_engine([Quit()])
    engine_thread.start(work, lambda _: None).join(60)
    port.attach(asyncio.get_running_loop())
    await asyncio.sleep(0)
    port.close()
    assert (seen.index("Token") < seen.index("call") < seen.index("Dropped"), seen.count("call")) == (True, 1)
    assert engine.calls == [("admit", 1), ("cancel", 1)]


def test_an_engine_that_has_something_to_warm_up_does_so_on_its_thread_before_anything_else() -> None:
    engine, port, calls_before = Decode(made=generated), ThreadQueues[Order](), list[int]()
    engine.warm_up = lambda: engine._note("warm up", 0)  # type: ignore[attr-defined]
    port.to_engine(Generate(request(1), {}, b"aux"))
    port.to_engine(Quit())
    work = DecodeThread(engine, port, lambda _: None, leader_steps(engine, port, None))
    thread = engine_thread.start(work, lambda _: None, lambda: calls_before.append(len(engine.calls)))
    thread.join(60)
    assert engine.calls == [("warm up", 0), ("admit", 1)]
    assert engine.threads == {thread.ident}
    assert calls_before == [1], "whoever says that it is ready hears between the two"
    port.close()


def test_quit_ends_the_thread_with_work_left(decode: Site) -> None:
    decode.engine.made = lambda each: decode.engine.rooms.setdefault(each.room, each) and []
    decode.send(Generate(request(1), {}, b"aux"))
    decode.until(lambda: decode.engine.steps > 3)
    decode.send(Quit())
    decode.thread.join(60)
    assert not decode.thread.is_alive()
    assert decode.died == []


@pytest.mark.parametrize(
    ("kind", "order"), [("prefill", Generate(request(1), {}, b"aux")), ("decode", Compute(request(1)))]
)
def test_an_order_of_the_other_role_is_our_own_bug(
    kind: str, order: Order, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    site = request.getfixturevalue(kind)
    site.send(order)
    site.until(lambda: site.died)
    assert isinstance(site.died[0], AssertionError)

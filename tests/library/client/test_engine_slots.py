"""Rooms whose slots the engine's own allocator chose: where they land, and when the engine may reuse them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdtransfer.client import labels
from pdtransfer.client.clients import KVPoll
from pdtransfer.client.labels import room_id, weights_digest
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.errors import Cause, ConfigError, LocalProtocolError, RoomFailedError
from pdtransfer.handoff.decode.room_request import chosen_rows
from pdtransfer.handoff.effects import RoomAsked, RoomDrained, RoomFailed, RoomLeased, RoomReady
from pdtransfer.handoff.slot_allocator import SlotAllocator, aliases, extents_of, slots_of
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from tests.library.client.async_pair import AsyncPair
from tests.library.client.copy_gate import Gate
from tests.support.client_pair import Expected, Late, Pair, client_pair, slots_of_pages

TOKENS = 40


pytestmark = pytest.mark.given(decode_options={"engine_slots": True})


def chosen(seed: int, count: int = TOKENS, of: int = 256) -> np.ndarray:
    """Slots in no order, as an allocator that has run for a while gives them."""
    return np.random.default_rng(seed).permutation(of)[:count]


def drained(pair: Pair, room: int) -> None:
    pair.until(lambda: pair.decode_event(room, RoomDrained))


def test_a_room_lands_where_the_engine_wants_it_and_drains_at_once(pair: Pair) -> None:
    expected, slots = Expected(pair.target), chosen(1)
    pages = pair.begin(1, TOKENS, slots={"kv": slots})
    ready = pair.ready(1)
    drained(pair, 1)
    assert [type(event) for event in pair.decode_events] == [RoomReady, RoomDrained]
    assert ready.slots["kv"].tolist() == slots.tolist()
    expected.land(slots_of_pages(pages, 16, TOKENS), slots)
    assert expected.holds(pair.arena)
    assert pair.decode.state(1) is KVPoll.SUCCESS
    pair.decode.release(1)  # there is nothing to release
    pair.begin(2, TOKENS, slots={"kv": slots})
    pair.ready(2)


def test_slots_are_not_given_back_while_a_write_of_their_room_is_under_way(gate: Gate, pair: Pair) -> None:
    slots = chosen(7)
    pair.begin(1, TOKENS, slots={"kv": slots})
    assert gate.entered.wait(60)
    pair.decode.abort(1)
    assert pair.failed(1).cause is Cause.ABORTED
    pair.until(lambda: pair.prefill_event(1, RoomFailed))  # so prefill has answered what it could
    pair.expect(2, TOKENS, slots={"kv": slots})
    assert "that has not drained" in pair.failed(2).detail
    assert pair.decode_event(1, RoomDrained) is None
    gate.opened.set()
    drained(pair, 1)
    pair.begin(3, TOKENS, slots={"kv": slots})
    pair.ready(3)


def test_slots_of_a_room_that_has_not_drained_are_refused_and_that_room_lands(pair: Pair) -> None:
    slots = chosen(3)
    pair.expect(1, TOKENS, slots={"kv": slots})
    pair.expect(2, 3, slots={"kv": [int(slots[7]), 250, 251] if 250 not in slots else [int(slots[7]), 0, 1]})
    failed = pair.failed(2)
    drained(pair, 2)
    assert failed.cause is Cause.REFUSED
    assert failed.detail == "slots: some of 'kv' belong to a room that has not drained"
    pair.send(1, TOKENS)
    pair.ready(1)


def test_rows_that_the_engine_has_do_not_cross_and_prefill_learns_it(pair: Pair) -> None:
    expected, slots = Expected(pair.target), chosen(4)
    shared = slots.copy()
    shared[:16] = 5  # of the prefix, whatever they are: other requests may have them
    pages = pair.begin(1, TOKENS, slots={"kv": shared}, prefix=16)
    ready = pair.ready(1)
    assert ready.prefix == 16
    assert ready.slots["kv"].tolist() == slots[16:].tolist()
    pair.until(lambda: pair.prefill_event(1, RoomLeased))
    assert pair.prefill_event(1, RoomLeased) == RoomLeased(1, TOKENS, 16)
    expected.land(slots_of_pages(pages, 16, TOKENS)[16:], slots[16:])
    assert expected.holds(pair.arena)


@pytest.mark.parametrize(
    "end",
    [TOKENS, pytest.param(37, marks=pytest.mark.given(decode_options={"engine_slots": True, "open_ended": ["kv"]}))],
    ids=["the first rows", "the last rows of an open-ended component"],
)
def test_rows_stay_away_where_the_engine_has_no_slots_for_them(pair: Pair, end: int) -> None:
    """As in a sliding window whose first blocks are gone, or where another rank has the end of the prompt. Nor has
    prefill such rows."""
    expected, slots = Expected(pair.target), chosen(5)
    slots[:9] = slots[end:] = -1
    pair.expect(1, TOKENS, slots={"kv": slots})
    pages = pair.pages(1, TOKENS)
    pair.prefill.open(1, tokens=TOKENS)
    pair.prefill.push(1, pages, rows=(9 if end == TOKENS else 0, end))
    pair.prefill.finish(1)
    assert pair.ready(1).slots["kv"].tolist() == slots[9:end].tolist()
    expected.land(slots_of_pages(pages, 16, TOKENS)[9:end], slots[9:end])
    assert expected.holds(pair.arena)


def test_only_components_that_are_named_may_be_open_ended() -> None:
    components = [group("striped", (0,), (0,)), group("whole", (1,), (512,))]
    slots = {"striped": [-1, 3, -1], "whole": [-1, 5, 6]}
    striped, whole = chosen_rows(components, slots, tokens=48, open_ended=["striped"])
    assert (striped.first_row, slots_of(striped.extents).tolist()) == (1, [3])
    assert (whole.first_row, slots_of(whole.extents).tolist()) == (1, [5, 6])
    with pytest.raises(LocalProtocolError, match="slots of 'striped': slot -1 is outside"):
        chosen_rows(components, slots, tokens=48)
    with pytest.raises(LocalProtocolError, match="slots of 'whole': slot -1 is outside"):
        chosen_rows(components, slots | {"whole": [-1, 5, -1]}, tokens=48, open_ended=["striped"])


def test_a_component_of_which_no_row_crosses_needs_no_slots() -> None:
    [rows] = chosen_rows([group("kv", (0,), (0,))], {"kv": [-1, -1, -1]}, tokens=48)
    assert len(rows.extents) == 0


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"slots": None}, "slots: a client made with engine_slots=True needs slots"),
        ({"slots": {}}, "slots: missing for 'kv', which has 40 rows"),
        ({"slots": {"kv": np.arange(39)}}, "slots of 'kv': int64 of shape (39,), not integers (40,)"),
        ({"slots": {"kv": np.arange(40.0)}}, "slots of 'kv': float64 of shape (40,), not integers (40,)"),
        ({"slots": {"kv": np.arange(40), "k": []}}, "slots: ['k'] are not among the components ['kv']"),
        ({"slots": {"kv": np.arange(217, 257)}}, "slots of 'kv': slot 256 is outside 0..255"),
        ({"slots": {"kv": [0, -1, *range(2, 40)]}}, "slots of 'kv': slot -1 is outside 0..255"),
        ({"slots": {"kv": [*range(39), -1]}}, "slots of 'kv': slot -1 is outside 0..255"),
        ({"slots": {"kv": [*range(39), -1]}, "prefix": 38}, "slots of 'kv': slot -1 is outside 0..255"),
        ({"slots": {"kv": [*range(39), 3]}}, "slots of 'kv': slot 3 is there twice"),
        (
            {"slots": {"kv": np.arange(40)}, "growth": 1},
            "slots: with slots of the engine's choice neither a prompt nor growth is possible",
        ),
    ],
)
def test_wrong_slots_are_refused_by_name_and_no_room_begins(pair: Pair, more: dict[str, Any], text: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        pair.expect(1, TOKENS, **more)
    assert str(caught.value) == text
    with pytest.raises(KeyError):
        pair.decode.state(1)


@pytest.mark.given(decode_options=None)
def test_a_client_that_leases_takes_no_slots(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="engine_slots=False takes no slots"):
        pair.expect(1, TOKENS, slots={"kv": chosen(1)})
    with pytest.raises(LocalProtocolError, match="leases the slots itself"):
        pair.decode.quiesce(1, 1.0)


def test_prefill_learns_of_a_room_and_its_length_before_it_is_open(pair: Pair) -> None:
    pair.expect(1, TOKENS, slots={"kv": chosen(6)}, prefix=3)
    pair.until(lambda: pair.prefill_event(1, RoomAsked))
    assert pair.prefill_event(1, RoomAsked) == RoomAsked(1, TOKENS, 3)
    pair.prefill.open(1, tokens=None, grants=None)
    pair.until(lambda: pair.prefill_event(1, RoomLeased))
    assert pair.prefill_event(1, RoomLeased) == RoomLeased(1, TOKENS, 3)
    pair.prefill.push(1, pair.pages(1, TOKENS), rows=(0, TOKENS))
    pair.prefill.finish(1)
    pair.ready(1)


def test_quiesce_waits_until_the_pages_are_not_read_any_more(pair: Pair) -> None:
    pair.expect(1, TOKENS, slots={"kv": chosen(8)})
    pair.prefill.open(1, tokens=TOKENS)
    pair.prefill.push(1, pair.pages(1, TOKENS), rows=(0, TOKENS), after=Late())
    assert pair.prefill.quiesce(1, 10.0)
    event = pair.prefill.poll()
    assert [type(each) for each in event if each.room == 1][-2:] == [RoomFailed, RoomDrained]
    assert pair.prefill.quiesce(1, 0.0), "it has drained already"
    assert pair.decode.quiesce(1, 10.0)


class Blocking:
    """An event that keeps the thread that asks for it, until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.go_on.wait(60.0)


def test_quiesce_of_a_room_that_has_failed_waits_until_it_has_drained(pair: Pair) -> None:
    """Its writer does not answer: RoomFailed is not proof, and the slots may still be written."""
    pair.expect(1, TOKENS, slots={"kv": chosen(8)})
    pair.prefill.open(1, tokens=TOKENS)
    pair.until(lambda: pair.prefill_event(1, RoomLeased))
    pair.prefill.push(1, pair.pages(1, TOKENS), rows=(0, TOKENS), after=(event := Blocking()))
    assert event.asked.wait(30.0)
    pair.decode.abort(1)
    pair.failed(1)
    try:
        assert not pair.decode.quiesce(1, 0.05)
    finally:
        event.go_on.set()
    assert pair.decode.quiesce(1, 30.0)


def test_quiesce_gives_up_after_its_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.prefill.open(1, tokens=TOKENS)
    monkeypatch.setattr(pair.prefill._node, "abort", lambda room: None)
    assert not pair.prefill.quiesce(1, 0.05)


def test_an_event_polled_before_its_signal_leaves_no_descriptor_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a level-triggered loop would spin until the next event."""
    queues, write = ThreadQueues[int](), os.eventfd_write
    queues.to_engine(1)
    polled: list[int] = []

    def late(fd: int, value: int) -> None:
        polled.extend(queues.poll())
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    queues.to_engine(2)
    assert polled == [1, 2]
    assert queues.wait(0)
    assert queues.poll() == []
    assert not queues.wait(0)
    queues.close()


def test_a_poll_without_events_makes_no_system_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "eventfd_read", None)
    assert pair.decode.poll() == []


def asked(room: int, pair: Pair) -> dict[str, Any]:
    slots = chosen(9, 3 * TOKENS)[room * TOKENS : (room + 1) * TOKENS]
    return {"tokens": TOKENS, "sources": [pair.prefill.endpoint], "slots": {"kv": slots}}


async def test_asyncio_waits_for_ready_and_for_drained(it: AsyncPair) -> None:
    lands, fails = it.decode.expect(1, **asked(1, it.pair)), it.decode.expect(2, **asked(2, it.pair))
    room = it.prefill.open(1, tokens=TOKENS)
    room.push(it.pair.pages(1, TOKENS), rows=(0, TOKENS))
    await room.finish()
    assert (await lands.ready()).room == 1
    await lands.drained()
    fails.abort()
    with pytest.raises(RoomFailedError):
        await fails.ready()
    await fails.drained()


CLOSES_LATE = """
import atexit
from tests.support.client_pair import client_pair
made = client_pair()
pair = made.__enter__()
pair.begin(1, 10)
pair.ready(1)
def last():
    pair.prefill.close()
    pair.decode.close()
    print("closed")
atexit.register(last)
"""


def test_clients_may_be_closed_while_the_interpreter_exits() -> None:
    """When no thread can be started any more, and prefill still has decode's arena mapped."""
    ran = subprocess.run([sys.executable, "-c", CLOSES_LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "closed\n", "")


UNREACHABLE = """
from dataclasses import replace
from tests.support.client_pair import LIMITS, client_pair
with client_pair(limits=replace(LIMITS, slow_ms=300, silence_ms=300)) as pair:
    pair.decode.expect(1, tokens=10, sources=["tcp://127.0.0.1:1"], time_left_s=600)
    print(__debug__, pair.failed(1).cause.value)
"""


def test_an_engine_may_run_without_assertions() -> None:
    """Nothing is done within an assertion: a peer that is not there is found to be silent all the same."""
    command = [sys.executable, "-O", "-c", UNREACHABLE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, "False peer_lost\n"), ran.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda pair: pair.decode.expect(1, tokens=3, prompt=[1, 2, 3], sources=["tcp://127.0.0.1:1"]),
        lambda pair: pair.decode.dial("tcp://127.0.0.1:1"),
        lambda pair: pair.decode.release(1),
        lambda pair: pair.prefill.open(1, tokens=3),
        lambda pair: pair.prefill.abort(1),
    ],
)
@pytest.mark.given(start=False, decode_options=None)
def test_a_call_is_refused_before_the_start_and_begins_nothing(pair: Pair, call: Callable[[Pair], None]) -> None:
    with pytest.raises(LocalProtocolError, match="start"):
        call(pair)
    for client in (pair.prefill, pair.decode):
        with pytest.raises(KeyError):
            client.state(1)


def test_an_engines_switch_interval_is_left_alone() -> None:
    before = sys.getswitchinterval()
    with client_pair():
        assert sys.getswitchinterval() == before


def test_a_label_names_the_same_room_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room_id("xfer-1") == 0x8E31274B0FA24738  # the first 8 bytes of its SHA-256, little-endian
    assert room_id("xfer-1") != room_id("xfer-2")
    monkeypatch.setattr(labels, "sha256", lambda _: SimpleNamespace(digest=lambda: bytes(32)))
    assert room_id("xfer-1") == 1, "0 names none on the wire"


def test_weights_are_the_same_whatever_the_order_of_their_facts() -> None:
    one = weights_digest({"config": {"layers": 2, "heads": [1, 2]}, "dtype": "bfloat16"})
    assert one == weights_digest({"dtype": "bfloat16", "config": {"heads": (1, 2), "layers": 2}})
    assert one != weights_digest({"dtype": "float32", "config": {"layers": 2, "heads": [1, 2]}})
    assert len(one) == 32
    with pytest.raises(ConfigError, match="facts: "):
        weights_digest({"dtype": object()})


# The ledger


def group(name: str, layers: tuple[int, ...], bases: tuple[int, ...], slots: int = 8, stride: int = 64) -> Component:
    planes = tuple(
        Plane(layer, "kv", "uint8", 0, 1, base, stride, stride, 64) for layer, base in zip(layers, bases, strict=True)
    )
    return Component(name, "dram", 16, Span(), Layout(planes, 1, slots))


def test_components_in_the_same_memory_share_their_slots() -> None:
    full, window, other = group("full", (0, 1), (0, 512)), group("window", (2,), (512,)), group("state", (3,), (1024,))
    assert aliases([full, window, other]) == [0, 0, 2]
    arena = SlotAllocator([full, window, other], engine_slots=True)
    none = extents_of(np.empty(0, np.int64))
    first = arena.take(1, (extents_of(np.array([3, 4, 7])), none, extents_of(np.array([3]))))
    with pytest.raises(LocalProtocolError, match="some of 'window' belong to a room"):
        arena.take(2, (none, extents_of(np.array([4])), none))
    assert arena.drop(first)
    assert arena.drained == [1]
    arena.take(2, (none, extents_of(np.array([4])), none))


def test_a_component_that_lies_in_two_memories_joins_them() -> None:
    one, two, both = group("one", (0,), (0,)), group("two", (1,), (512,)), group("both", (2, 3), (0, 512))
    assert aliases([one, two, both]) == [0, 0, 0]
    wide = Layout((Plane(1, "kv", "uint8", 0, 1, 0, 128, 64, 64),), 1, 8)
    for layout in (group("other", (1,), (0,), slots=4).layout, wide):
        with pytest.raises(LocalProtocolError, match="'one' and 'other' share memory, but not slots"):
            aliases([one, Component("other", "dram", 16, Span(), layout)])

"""Layers leave while the next ones are computed, and no byte leaves before the event that it was to wait for."""

from __future__ import annotations

import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import RoomDrained, RoomFailed
from tests.support.client_pair import Expected, Late, Pair, slots_of_pages
from tests.support.late_producer import STALE, landed, layer_bytes
from tests.support.layout_tensors import CANARY, mla


@pytest.mark.given(model=mla(layers=range(4)))
def test_each_layer_leaves_with_its_event_and_none_of_its_bytes_before(pair: Pair) -> None:
    right, pool = pair.source.memory.copy(), pair.source.memory
    pool[:] = STALE
    events = [Late() for _ in range(4)]
    pages = pair.pages(1, 200)
    pair.expect(1, 200)
    pair.prefill.open(1, tokens=200)
    for layer, event in enumerate(events):
        pair.prefill.push(1, pages, rows=(0, 200), layers=(layer, layer + 1), after=event)
    pair.prefill.finish(1, after=events[-1])
    everywhere = np.arange(pair.target.slots)
    for layer, event in enumerate(events):
        asked = event.asked
        pair.until(lambda event=event, asked=asked: event.asked > asked + 20)  # it is waited for, and long enough
        assert (landed(pair, everywhere, layer) == CANARY).all()
        own = layer_bytes(pair, layer)
        pool[own] = right[own]
        event.fired = True
        pair.until(lambda layer=layer: (landed(pair, everywhere, layer) != CANARY).any() or pair.decode_events)
    ready = pair.ready(1)
    expected = Expected(pair.target)
    expected.land(slots_of_pages(pages, 16, 200), ready.slots["kv"])
    assert expected.holds(pair.arena)


class Breaks(Late):
    def query(self) -> bool:
        if super().query():
            raise RuntimeError("no such stream")
        return False


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("abort", Cause.ABORTED), ("decode gives it up", Cause.ABORTED), ("close", Cause.SHUTDOWN),
        ("event breaks", Cause.ENGINE),
    ],
)  # fmt: skip
def test_two_held_writes_of_a_grant_end_with_their_room_and_write_nothing(pair: Pair, way: str, cause: Cause) -> None:
    first, second = Breaks() if way == "event breaks" else Late(), Late()
    pages = pair.pages(1, 50)
    pair.expect(1, 50)
    pair.prefill.open(1, tokens=50)
    pair.prefill.push(1, pages, rows=(0, 20), after=first)
    pair.prefill.push(1, pages, rows=(20, 50), after=second)
    pair.prefill.finish(1)
    pair.until(lambda: first.asked > 20)
    assert second.asked == 0, "a grant's writes go in order"
    {
        "abort": lambda: pair.prefill.abort(1), "decode gives it up": lambda: pair.decode.abort(1),
        "close": pair.prefill.close, "event breaks": lambda: setattr(first, "fired", True),
    }[way]()  # fmt: skip
    pair.drained(1)
    assert [type(event) for event in pair.prefill_events[-2:]] == [RoomFailed, RoomDrained]
    assert pair.prefill_event(1, RoomFailed).cause is cause
    asked = first.asked
    first.fired = second.fired = True
    pair.failed(1)
    if way != "close":
        pair.whole_arena_is_free(2)
        assert (first.asked, second.asked) == (asked, 0), "an event of an ended room is asked no more"
    else:
        assert (pair.arena == CANARY).all()

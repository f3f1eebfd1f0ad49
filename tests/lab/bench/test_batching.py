"""The whole of a prompt as one cell, after its last layer, and each layer by itself."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from pdtransfer_lab.bench.batching import AtEnd, ByLayer

from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.serve.engine_api import Broken, Computed, Prefilled
from tests.support.client_pair import Late

LAYERS = 61
KV, OTHER = (
    Component(
        name, "dram", 1, Span(),
        host_layout(
            "layer_first", kinds=("latent",), layers=LAYERS, heads=1, head_bytes=1_152, dtype="bfloat16", slots=65_536,
            page_size=64,
        ),
    )
    for name in ("kv", "other")
)  # fmt: skip
END = Prefilled(room=1, aux=b"")


def cell(rows=(0, 128), layers=(0, 1), after=None, component="kv"):
    pages = np.arange(-(-rows[1] // 64))
    return Computed(room=1, component=component, rows=rows, layers=layers, pages=pages, after=after)


def chunk(rows, component="kv"):
    return [cell(rows, (layer, layer + 1), component=component) for layer in range(LAYERS)]


@pytest.mark.parametrize("end", [END, Broken(room=1, detail="it broke")])
def test_chunks_and_layers_leave_as_one_cell_once_the_room_is_computed(end):
    batching = AtEnd([KV, OTHER])
    for first, stop in ((0, 512), (512, 600), (600, 700)):
        both = zip(chunk((first, stop)), chunk((first, stop), "other"), strict=True)
        assert not batching.take([each for pair in both for each in pair])
    kv, other, last = batching.take([end])
    assert (kv.component, kv.rows, kv.layers, len(kv.pages)) == ("kv", (0, 700), (0, LAYERS), 11)
    assert (other.component, other.rows, other.layers) == ("other", (0, 700), (0, LAYERS))
    assert last == end
    assert batching.take([end]) == [end]


def test_cells_that_do_not_follow_one_another_stay_apart():
    cells = [cell(layers=(5, 6)), cell(layers=(3, 4)), cell(rows=(200, 210), layers=(3, 4))]
    assert AtEnd([KV]).take([*cells, END]) == [*cells, END]


def test_a_room_that_was_given_up_is_forgotten():
    batching = AtEnd([KV])
    batching.take(chunk((0, 100)))
    batching.drop(1)
    batching.drop(99)
    assert batching.take([END]) == [END]


def test_the_whole_waits_for_more_events_than_calls_may_nest():
    events = [Late() for _ in range(2 * sys.getrecursionlimit())]
    batching = AtEnd([KV])
    for index, event in enumerate(events):
        assert not batching.take([cell((index, index + 1), (0, LAYERS), event)])
    whole, _ = batching.take([END])
    assert list(whole.after.events) == events
    for event in events[:-1]:
        event.fired = True
    assert not whole.after.query()
    events[-1].fired = True
    assert whole.after.query()


def test_layers_leave_as_they_come():
    steps = [*chunk((0, 512)), *chunk((512, 700)), END]
    assert ByLayer().take(steps) == steps

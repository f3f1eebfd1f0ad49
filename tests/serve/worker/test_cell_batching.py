"""What leaves at a time: cells in order, each row and layer once, put together by size, and none before its events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdtransfer.handoff.ready_gate import AllEvents
from pdtransfer.layout.cell_sizes import CELL_BYTES_MIN
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import DSA_INDEX_PARTS, host_layout, item_layout
from pdtransfer.serve.engine_api import Broken, Computed, Prefilled
from pdtransfer.serve.worker.cell_batching import CellBatcher
from tests.support.client_pair import Late

LAYERS, ROW = 61, 1_152
KV = Component(
    "kv", "dram", 1, Span(),
    host_layout(
        "layer_first", kinds=("latent",), layers=LAYERS, heads=1, head_bytes=ROW, dtype="bfloat16", slots=65_536,
        page_size=64,
    ),
)  # fmt: skip
INDEX = Component(
    "index", "hbm", 1, Span(),
    item_layout("layer_first", parts=DSA_INDEX_PARTS, layers=range(0, LAYERS, 2), slots=65_536, page_size=64),
)  # fmt: skip


def cell(room=1, component="kv", rows=(0, 128), layers=(0, 1), after=None):
    return Computed(
        room=room, component=component, rows=rows, layers=layers, pages=np.arange(-(-rows[1] // 64)), after=after
    )


def chunk(rows, *, room=1, index=False):
    """What a step a layer says."""
    for layer in range(LAYERS):
        cells_of_layer = [cell(room, rows=rows, layers=(layer, layer + 1))]
        if index and layer % 2 == 0:
            cells_of_layer.append(cell(room, "index", rows, (layer, layer + 1)))
        yield cells_of_layer


def cells_of(made, steps):
    return [each for step in steps for each in made.take(step)]


def covered(cells, component="kv"):
    """How often each (row, layer) leaves."""
    count = np.zeros((max(cell.rows[1] for cell in cells), LAYERS), int)
    for each in cells:
        if each.component == component:
            count[slice(*each.rows), slice(*each.layers)] += 1
    return count


@pytest.mark.parametrize("tokens", [1, 128, 238])
def test_a_small_chunk_leaves_as_one_with_its_last_layer(tokens):
    cell_batcher = CellBatcher([KV])
    steps = list(chunk((0, tokens)))
    assert cells_of(cell_batcher, steps[:-1]) == []
    (one,) = cell_batcher.take(steps[-1])
    assert (one.rows, one.layers) == ((0, tokens), (0, LAYERS))


@pytest.mark.parametrize("tokens", [239, 1_024, 8_192])
def test_a_large_chunk_leaves_in_cells_that_are_worth_it_and_get_smaller_in_the_end(tokens):
    cells = cells_of(CellBatcher([KV]), chunk((0, tokens)))
    assert (covered(cells) == 1).all()
    assert [cell.layers[0] for cell in cells] == sorted(cell.layers[0] for cell in cells)
    layer, sizes = (
        tokens * ROW,
        [(cell.rows[1] - cell.rows[0]) * (cell.layers[1] - cell.layers[0]) * ROW for cell in cells],
    )
    left = tokens * LAYERS * ROW
    for size in sizes:
        left -= size
        assert size >= min(CELL_BYTES_MIN, left)
        assert size < max(CELL_BYTES_MIN + layer, 2 * layer)
    assert sizes[-1] == layer, "what decode waits for is one layer's"


def test_chunks_stay_apart():
    steps = [*chunk((0, 512)), *chunk((512, 700)), [Prefilled(room=1, aux=b"")]]
    cells = cells_of(CellBatcher([KV]), steps)[:-1]
    assert {cell.rows for cell in cells} == {(0, 512), (512, 700)}
    assert (covered(cells) == 1).all()


def test_rooms_and_components_are_put_together_apart():
    cell_batcher = CellBatcher([KV, INDEX])
    both = zip(chunk((0, 1_000), index=True), chunk((0, 500), room=2, index=True), strict=True)
    cells = cells_of(cell_batcher, [cells_of_layer for pair in both for cells_of_layer in pair])
    for room, tokens in ((1, 1_000), (2, 500)):
        own = [cell for cell in cells if cell.room == room]
        assert (covered([each for each in own if each.component == "kv"]) == 1).all()
        (index,) = [each for each in own if each.component == "index"]
        assert (index.rows, index.layers) == ((0, tokens), (0, LAYERS)), "31 layers that have an index, as one"


@pytest.mark.parametrize("end", [Prefilled(room=1, aux=b"x"), Broken(room=1, detail="it broke")])
def test_nothing_overtakes_a_rooms_cells(end):
    """An engine that ends a room, or is about to, without its last layers: what there is goes first."""
    cell_batcher = CellBatcher([KV])
    assert cells_of(cell_batcher, list(chunk((0, 100)))[:7]) == []
    one, last = cell_batcher.take([end])
    assert (one.layers, last) == ((0, 7), end)
    assert cell_batcher.take([end]) == [end]


def test_cells_that_do_not_follow_one_another_stay_as_they_are():
    cell_batcher = CellBatcher([KV])
    steps = [[cell(layers=(5, 6))], [cell(layers=(3, 4))], [cell(rows=(128, 140), layers=(4, 5))]]
    steps += [[replace(cell(rows=(128, 140), layers=(5, 6)), skip=1)], [Prefilled(room=1, aux=b"")]]
    cells = cells_of(cell_batcher, steps)[:-1]
    assert [cell.layers for cell in cells] == [(5, 6), (3, 4), (4, 5), (5, 6)]


def test_a_room_that_was_given_up_is_forgotten():
    cell_batcher = CellBatcher([KV])
    cells_of(cell_batcher, list(chunk((0, 100)))[:7])
    cell_batcher.drop(1)
    cell_batcher.drop(99)
    assert cell_batcher.take([Prefilled(room=1, aux=b"")]) == [Prefilled(room=1, aux=b"")]


def test_what_was_put_together_waits_forevery_event_of_it():
    events = [Late() for _ in range(1, LAYERS)]
    cell_batcher = CellBatcher([KV])
    steps = [[cell(layers=(layer, layer + 1), after=event)] for layer, event in enumerate([None, *events])]
    (one,) = cells_of(cell_batcher, steps)
    for event in (events[-1], *events[:-1]):  # an engine may have several streams
        assert not one.after.query()
        event.fired = True
    assert one.after.query()


def test_an_event_that_has_fired_is_asked_no_more():
    first, second = Late(), Late()
    every = AllEvents((first, second))
    first.fired = True
    assert not every.query()
    assert not every.query()
    assert (first.asked, second.asked) == (1, 2)

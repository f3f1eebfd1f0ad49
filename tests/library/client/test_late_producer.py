"""Layers leave while the next ones are computed, and no byte leaves before the event that it was to wait for."""

from __future__ import annotations

import numpy as np

from pdtransfer.handoff.effects import RoomReady
from tests.support.client_pair import Expected, Late, client_pair, slots_of_pages
from tests.support.late_producer import STALE, landed, layer_bytes
from tests.support.layout_tensors import CANARY, mla


def test_each_layer_leaves_with_its_event_and_none_of_its_bytes_before() -> None:
    with client_pair(model=mla(layers=range(4))) as pair:
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


def test_chunks_and_layers_together_wait_each_for_its_own_event() -> None:
    """Two chunks of two layers, all of it stale until its event: the order is the engine's."""
    with client_pair(model=mla(layers=range(2))) as pair:
        right, pool = pair.source.memory.copy(), pair.source.memory
        pool[:] = STALE
        pages = pair.pages(2, 150)
        slots = slots_of_pages(pages, 16, 150)
        cells = [(rows, layer) for rows in ((0, 64), (64, 150)) for layer in range(2)]
        events = [Late() for _ in cells]
        pair.expect(2, 150)
        pair.prefill.open(2, tokens=150)
        for (rows, layer), event in zip(cells, events, strict=True):
            pair.prefill.push(2, pages, rows=rows, layers=(layer, layer + 1), after=event)
        pair.prefill.finish(2)
        for (rows, layer), event in zip(cells, events, strict=True):
            layout = pair.source.layout
            places = layout.address(layer, slots[slice(*rows)])[:, None] + np.arange(1_152)
            assert layout.planes[layer].layer == layer
            pool[places] = right[places]
            event.fired = True
            asked = event.asked
            pair.until(lambda event=event, asked=asked: event.asked > asked)
        ready = pair.ready(2)
        assert isinstance(ready, RoomReady)
        expected = Expected(pair.target)
        expected.land(slots, ready.slots["kv"])
        assert expected.holds(pair.arena)

"""Decode's arena as a pool at token granularity: the slots of a room that has landed are what a device copies from,
and backs its newest tokens up to, whatever the layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, ITEM_LAYOUTS
from tests.support.client_pair import Expected, client_pair, slots_of_pages
from tests.support.layout_tensors import Model, c4, dsa_index, mha, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.slot_copies import pool_of

CASES = [
    *((model, name) for model in (mla(layers=range(2)), mha(layers=range(2), heads=range(2))) for name in HOST_LAYOUTS),
    *((model, name) for model in (c4(layers=range(2)), dsa_index(layers=range(2))) for name in ITEM_LAYOUTS),
]
PROMPT, GROWTH, HOT = 50, 6, 24  # the device has fewer places than the prompt tokens


@pytest.mark.parametrize(
    ("model", "name"), [pytest.param(*case, id=f"{case[0].parts[0][0]}-{case[1]}") for case in CASES]
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_device_reads_any_tokens_of_a_landed_room_and_backs_up_new_ones(
    model: Model, name: str, page_size: int
) -> None:
    device: Any = Tensors(name="layer_first", model=model, page_size=1, slots=HOT)
    rng = np.random.default_rng(0)
    with client_pair(model=model, source=("layer_first", 16, 512), target=(name, page_size, 256)) as pair:
        pages = pair.begin(1, PROMPT, growth=GROWTH)
        slots = pair.ready(1).slots["kv"]
        expected, source_slots = Expected(pair.target), slots_of_pages(pages, 16, PROMPT)
        expected.land(source_slots, slots[:PROMPT])
        host = pool_of(pair.target)
        for _ in range(3):  # picks of one step after another, to places anywhere
            positions, places = rng.permutation(PROMPT)[:20], rng.permutation(HOT)[:20]
            kv_copy(pool_of(device), host, places, slots[positions], len(positions))
            for kind, layer, head in model.rows():
                right = pair.source.read(kind, layer, head, source_slots[positions])
                assert np.array_equal(device.read(kind, layer, head, places), right)
        newest = rng.permutation(512)[:GROWTH]  # of the source's rows: bytes that nobody else has
        kv_copy(pool_of(device), pool_of(pair.source), range(GROWTH), newest, GROWTH)
        for step in range(GROWTH):
            kv_copy(host, pool_of(device), slots[PROMPT + step : PROMPT + step + 1], np.array([step]), 1)
        expected.land(newest, slots[PROMPT:])
        assert expected.holds(pair.arena)

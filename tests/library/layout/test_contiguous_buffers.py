"""What a transport is to register of a pool, for every layout there is, held against its tensors' own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.layout.layout import Buffer, Layout
from pdtransfer.layout.layout_builders import HOST_LAYOUTS, ITEM_LAYOUTS
from tests.support.effort import some
from tests.support.layout_tensors import Model, Pool, c4, dsa_index, mha, mla, models, plane, pools, touched

bounded = settings(max_examples=some(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(layout: Layout) -> None:
    buffers, occupied = layout.contiguous_buffers(), touched(layout)
    starts = np.array([buffer.start for buffer in buffers])
    ends = starts + [buffer.byte_count for buffer in buffers]
    assert (ends > starts).all()
    assert (starts[1:] >= ends[:-1]).all(), "ascending and disjoint"
    holder = np.searchsorted(starts, occupied, side="right") - 1
    assert (holder >= 0).all()
    assert (occupied < ends[holder]).all(), "every row is in one"
    assert np.isin(starts, occupied).all()
    assert np.isin(ends - 1, occupied).all(), "no byte more than rows need"
    for index, chosen in enumerate(layout.planes):
        (held,) = np.flatnonzero((starts <= chosen.base) & (chosen.base < ends))
        pages = layout.address(index, np.arange(0, layout.slots, layout.page_size)) - chosen.base
        assert (pages == np.arange(len(pages)) * buffers[held].item_bytes).all()
        assert layout.ends[index] <= ends[held], "a plane is in one, whole"


@bounded
@given(st.data())
def test_every_row_of_any_layout_lies_in_one_buffer_and_no_buffer_is_longer_than_its_rows_need(data: Any) -> None:
    layout = data.draw(models().flatmap(pools)).layout
    check(layout)
    first, end = layout.layer_range
    a, b = sorted(data.draw(st.lists(st.integers(first, end), min_size=2, max_size=2, unique=True)))
    check(layout.layers(a, b))
    head = layout.planes[0].head_start
    check(layout.heads(head, head + 1))


@bounded
@given(st.data())
def test_buffers_are_the_tensors_that_engines_allocate(data: Any) -> None:
    pool = data.draw(models().flatmap(pools).filter(lambda pool: pool.slots > pool.page_size))
    memory, expected = pool.memory.ctypes.data, []
    model = pool.model
    rows = pool.page_size * sum(size for _, _, size in model.parts)
    padding = 0 if model.page_align is None else model.item_bytes(pool.page_size) - rows
    for tensor in pool.tensors():
        assert tensor.flags.c_contiguous
        pages = pool.slots // pool.page_size
        expected.append(Buffer(tensor.ctypes.data - memory, tensor.nbytes - padding, tensor.nbytes // pages))
    assert list(pool.layout.contiguous_buffers()) == expected
    moved = [buffer._replace(start=buffer.start + memory) for buffer in expected]
    assert list(pool.layout.rebase(memory).contiguous_buffers()) == moved


@pytest.mark.parametrize(
    ("model", "counts"),
    [(mha(layers=range(5)), [10, 2, 2, 2]), (mla(layers=range(5)), [5, 1, 1, 1]), (dsa_index(), [3, 1, 1])],
    ids=["mha", "mla", "dsa"],
)
def test_page_first_pools_are_registered_once_and_layer_first_ones_layer_by_layer(
    model: Model, counts: list[int]
) -> None:
    names = HOST_LAYOUTS if model.page_align is None else ITEM_LAYOUTS
    layouts = [Pool(name=name, model=model, page_size=64, slots=128).layout for name in names]
    assert [len(layout.contiguous_buffers()) for layout in layouts] == counts


def test_padding_behind_the_last_page_is_not_registered_and_items_have_theirs() -> None:
    layout = Pool(name="page_first", model=c4(layers=range(2)), page_size=64, slots=3 * 64, base=128).layout
    assert layout.contiguous_buffers() == (Buffer(128, 3 * 2 * 37_440 - 64, 2 * 37_440),)


def test_a_single_page_is_an_item_as_long_as_it_is() -> None:
    lone = Layout((plane(page_stride=0), plane(layer=1, base=4096, page_stride=0)), 16, 16)
    assert lone.contiguous_buffers() == (Buffer(0, 1024, 1024), Buffer(4096, 1024, 1024))


def test_planes_in_any_order_come_out_ascending() -> None:
    layout = Pool(name="layer_first", model=mla(), page_size=16, slots=64).layout
    turned = Layout(layout.planes[::-1], layout.page_size, layout.slots)
    assert turned.contiguous_buffers() == layout.contiguous_buffers()

"""The staging buffer's layouts: valid, apart from each other, within the buffer, and as large as it allows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.staging import packed, staged
from tests.support.effort import some
from tests.support.layout_tensors import Pool, c4, dsa_index, mha, mla, models, pools, touched

bounded = settings(max_examples=some(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
BASE = 4_096
ALIGNMENT = 256


def kv(pool: Pool, name: str = "kv", *, span: Span | None = None, tokens_per_row: int = 1) -> Component:
    return Component(name, "hbm", tokens_per_row, span or Span(), pool.layout)


def check_apart(components: tuple[Component, ...], base: int, end: int) -> None:
    """No byte is two rows', and none is outside [base, end)."""
    occupied = np.sort(np.concatenate([touched(component.layout) for component in components]))
    assert (occupied[1:] > occupied[:-1]).all()
    assert base <= occupied[0]
    assert occupied[-1] < end


@bounded
@given(st.data())
def test_fewer_pages_of_any_layout_are_packed_one_buffer_behind_the_other(data: Any) -> None:
    pool = data.draw(models().flatmap(pools))
    layout, pages = pool.layout, pool.slots // pool.page_size
    few, base = data.draw(st.integers(1, pages)), data.draw(st.integers(0, 10_000))
    small, end = packed(layout, slots=few * pool.page_size, base=base)
    assert (small.page_size, small.slots) == (layout.page_size, few * layout.page_size)
    without_base = [msgspec.structs.replace(plane, base=0) for plane in layout.planes]
    assert [msgspec.structs.replace(plane, base=0) for plane in small.planes] == without_base
    assert small.end == end
    buffers = layout.contiguous_buffers()
    assert min(plane.base for plane in small.planes) % ALIGNMENT == 0
    cut = (pages - few) * sum(buffer.item_bytes for buffer in buffers)
    assert end - base <= sum(buffer.byte_count for buffer in buffers) - cut + ALIGNMENT * len(buffers)
    check_apart((kv(pool), Component("small", "hbm", 1, Span(), small))[1:], base, end)


def cache() -> tuple[Component, ...]:
    """Components of every span, 8 pages each, and one in DRAM."""
    sized = {"page_size": 16, "slots": 128}
    return (
        kv(Pool(name="layer_first", model=mla(), **sized)),
        msgspec.structs.replace(kv(Pool(name="page_first", model=mla(), **sized), "host"), memory="dram"),
        kv(Pool(name="page_first", model=c4(), page_size=4, slots=32), "c4", tokens_per_row=4),
        kv(Pool(name="layer_first", model=mha(), page_size=4, slots=64), "window", span=Span("last", 8)),
        kv(Pool(name="layer_first", model=dsa_index(), page_size=1, slots=32), "state", span=Span("once")),
    )


def test_a_buffer_has_as_many_tokens_of_each_component_as_it_holds() -> None:
    components = cache()
    whole = sum(component.bytes_of(component.layout.slots) for component in components if component.memory == "hbm")
    rows_before, least = None, whole // 4
    for byte_count in range(least, 2 * whole, whole // 16):
        landing = staged(components, base=BASE, byte_count=byte_count)
        assert landing[1] is components[1], "DRAM components stay where they are"
        in_hbm = tuple(component for component in landing if component.memory == "hbm")
        check_apart(in_hbm, BASE, BASE + byte_count)
        rows = [component.layout.slots for component in in_hbm]
        assert rows_before is None or all(now >= before for now, before in zip(rows, rows_before, strict=True))
        by_name = {component.name: component.layout.slots for component in landing}
        assert by_name["kv"] in (4 * by_name["c4"], 128), "the same tokens of each"
        assert by_name["window"] >= 8, "the window of one request at least"
        rows_before = rows
    assert rows_before == [128, 32, 32, 4], "all rows, windows and states of four requests"


def test_what_one_more_page_would_take_is_not_there() -> None:
    components = cache()[:1]
    page_bytes = 16 * components[0].layout.row_bytes
    for pages in (1, 3, 8):
        (landed,) = staged(components, base=BASE, byte_count=pages * page_bytes + page_bytes // 2)
        assert landed.layout.slots == 16 * pages


def test_windows_and_states_of_several_requests_take_half_of_the_buffer_at_most() -> None:
    window = kv(Pool(name="layer_first", model=mha(), page_size=1, slots=512), "window", span=Span("last", 64))
    rows = cache()[:1]
    room = window.bytes_of(64)
    counts = []
    for rooms in (1, 2, 4, 8, 16, 20):
        landing = staged((*rows, window), base=BASE, byte_count=rooms * room + (64 << 10))
        counts.append(landing[1].layout.slots // 64)
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 4}


def test_a_buffer_that_holds_no_page_is_refused_with_both_numbers() -> None:
    least = sum(component.bytes_of(component.layout.page_size) for component in cache()[:1])
    assert staged(cache()[:1], base=BASE, byte_count=least)
    with pytest.raises(LocalProtocolError, match=f"{least - 1} bytes, rows of kv take {least} at least"):
        staged(cache()[:1], base=BASE, byte_count=least - 1)


def test_components_in_dram_need_no_buffer() -> None:
    assert staged(cache()[1:2], base=BASE, byte_count=0) == cache()[1:2]

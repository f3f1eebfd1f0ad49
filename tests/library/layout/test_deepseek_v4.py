"""A hybrid model's components in every host layout, held against the shapes that engines give their tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pdtransfer.errors import LocalProtocolError
from pdtransfer.layout.deepseek_v4 import deepseek_v4
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from tests.support.hybrid_pools import RATIOS, layers_of, pools_of
from tests.support.layout_tensors import CANARY, content


def named(components: tuple[Component, ...]) -> dict[str, Component]:
    return {component.name: component for component in components}


@pytest.mark.parametrize("granular", [False, True], ids=["pages", "rows"])
@pytest.mark.parametrize("name", ITEM_LAYOUTS)
def test_each_component_is_the_tensor_of_its_shape(name: str, granular: bool) -> None:
    pools = pools_of(name, tokens=1_000, requests=3, granular=granular)
    for component in pools.components:
        pool = pools.by_name[component.name]
        assert component.layout == pool.layout, component.name
        assert sorted({plane.layer for plane in component.layout.planes}) == layers_of(component.name)
    # No two tensors share a byte, the padding of their last pages included.
    seen = np.zeros(pools.byte_count, dtype=np.uint8)
    for pool in pools.by_name.values():
        seen[pool.base : pool.base + pool.tensor.nbytes] += 1
    assert seen.max() == 1
    assert max(component.layout.end for component in pools.components) <= pools.byte_count - 64


@pytest.mark.parametrize("granular", [False, True], ids=["pages", "rows"])
@pytest.mark.parametrize("name", ITEM_LAYOUTS)
def test_what_is_written_through_the_tables_is_what_the_tensors_read_and_padding_stays(
    name: str, granular: bool
) -> None:
    pools = pools_of(name, tokens=300, requests=2, granular=granular)
    pools.fill()
    through_tensors = pools.memory.copy()
    pools.memory[:] = CANARY
    for component in pools.components:
        layout, pool = component.layout, pools.by_name[component.name]
        slots = np.arange(layout.slots)
        for index, plane in enumerate(layout.planes):
            rows = layout.address(index, slots)[:, None] + np.arange(plane.row_bytes)
            pools.memory[rows] = through_tensors[rows]
            tokens = pools.salted(component.name, slots)
            assert (
                pool.read(plane.kind, plane.layer, 0, slots)
                == content(plane.kind, plane.layer, 0, tokens, plane.row_bytes)
            ).all()
    assert (pools.memory == through_tensors).all()


def test_pages_are_as_long_as_kernels_of_the_field_expect_them() -> None:
    v4 = named(deepseek_v4("layer_first", ratios=RATIOS, tokens=4_096, requests=4))
    pages = {name: (each.layout.page_size, each.layout.planes[0].page_stride) for name, each in v4.items()}
    assert pages == {
        "c4": (64, 37_440),
        "c128": (2, 1_728),
        "window": (64, 37_440),
        "c4_state": (1, 65_536),
        "index_state": (1, 16_384),
        "c128_state": (1, 524_288),
        "index": (64, 8_448),
    }
    assert {name: each.layout.slots for name, each in v4.items()} == {
        "c4": 1_024, "c128": 32, "window": 512, "c4_state": 4, "index_state": 4, "c128_state": 4, "index": 1_024,
    }  # fmt: skip


def test_no_component_begins_in_the_padding_of_another() -> None:
    v4 = deepseek_v4("page_first", ratios=RATIOS, tokens=4_096, requests=4, page_align=65_536)
    item = {each.name: each.layout.planes[0].page_stride // len(layers_of(each.name)) for each in v4}
    assert [item[name] for name in ("c4", "c128", "window")] == [65_536] * 3
    tensors = [
        (buffer.start, buffer.start + each.layout.slots // each.layout.page_size * buffer.item_bytes)
        for each in v4
        for buffer in each.layout.contiguous_buffers()
    ]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(tensors))


def test_each_component_has_the_rows_of_its_span() -> None:
    v4 = deepseek_v4("page_first", ratios=RATIOS, tokens=4_096, requests=4)
    assert {each.name: each.rows(1_001) for each in v4} == {
        "c4": 251, "c128": 8, "window": 128, "c4_state": 1, "index_state": 1, "c128_state": 1, "index": 251,
    }  # fmt: skip
    assert {each.name: each.span for each in v4 if each.span.kind != "all"} == {
        "window": Span("last", 128), "c4_state": Span("once"), "index_state": Span("once"), "c128_state": Span("once"),
    }  # fmt: skip


def test_components_that_no_layer_has_are_left_out_and_layers_are_the_models_own() -> None:
    assert [each.name for each in deepseek_v4("page_first", ratios=(0, 0), tokens=8, requests=1)] == ["window"]
    stage = named(deepseek_v4("page_first", ratios=(128, 0), first_layer=30, tokens=256, requests=1))
    assert list(stage) == ["c128", "window", "c128_state"]
    assert stage["c128"].layout.layer_range == (30, 31)
    assert stage["window"].layout.layer_range == (30, 32)


def test_the_index_may_be_in_hbm_a_memory_of_its_own() -> None:
    plain, v4 = (
        deepseek_v4("page_first", ratios=RATIOS, tokens=256, requests=1, index_memory=memory)
        for memory in ("dram", "hbm")
    )
    assert [each.name for each in v4 if each.memory == "hbm"] == ["index"]
    assert v4[:-1] == plain[:-1]
    (start, *_), (behind, *_) = v4[-1].layout.contiguous_buffers()[0], plain[-1].layout.contiguous_buffers()[0]
    assert (start, v4[-1].layout.rebase(behind)) == (0, plain[-1].layout)
    assert all(each.layout.end <= behind for each in plain[:-1])


def test_a_layout_that_a_component_cannot_have_is_refused_with_both_names() -> None:
    with pytest.raises(
        LocalProtocolError, match=r"component 'c4': .*'page_head' must be one of layer_first, page_first, "
    ):
        deepseek_v4("page_head", ratios=RATIOS, tokens=256, requests=1)
    with pytest.raises(LocalProtocolError, match=r"component 'window': .*'sideways'"):
        deepseek_v4("sideways", ratios=(0,), tokens=256, requests=1)


def test_a_ratio_that_nobody_knows_is_refused_with_its_layer() -> None:
    with pytest.raises(LocalProtocolError, match="ratios: 8 of layer 12 must be one of 0, 4, 128"):
        deepseek_v4("page_first", ratios=(0, 4, 8), first_layer=10, tokens=256, requests=1)

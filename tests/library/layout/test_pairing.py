"""Two layouts of one model, paired plane by plane: each pair's bytes, and what is said where they do not match."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LayoutMismatchError
from pdtransfer.layout.layout import Layout
from pdtransfer.layout.pairing import pair
from pdtransfer.limits import FIELDS_MAX, PLANES_MAX
from tests.support.effort import some
from tests.support.layout_tensors import Model, Pool, mha, mla, models, plane, pools

bounded = settings(max_examples=some(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pool_of(name: str, model: Model, page_size: int = 16, slots: int = 64) -> Layout:
    return Pool(name=name, model=model, page_size=page_size, slots=slots).layout


@bounded
@given(st.data())
def test_every_layout_pairs_with_every_other_of_its_model(data: Any) -> None:
    model = data.draw(models())
    source, target = data.draw(pools(model)), data.draw(pools(model))
    pairing = pair(source.layout, target.layout)
    source.fill(np.arange(source.slots))
    target.fill(np.arange(target.slots))
    # Slot s of either side holds token s: so each pair of rows, found by the pairing's own formula, holds equal bytes.
    for slot in range(min(source.slots, target.slots)):
        for row in pairing.table:
            s = row[0] + slot // pairing.source_page_size * row[1] + slot % pairing.source_page_size * row[2]
            t = row[3] + slot // pairing.target_page_size * row[4] + slot % pairing.target_page_size * row[5]
            np.testing.assert_array_equal(source.memory[s : s + row[6]], target.memory[t : t + row[6]])
    assert pairing.row_bytes == source.layout.row_bytes == target.layout.row_bytes
    assert (np.diff(pairing.table[:, 3]) > 0).all()
    assert (pairing.source_slots, pairing.target_slots) == (source.slots, target.slots)
    sides = (source.layout, pairing.source_page_size, 1), (target.layout, pairing.target_page_size, 4)
    for layout, page_size, strides in sides:
        slots = np.arange(layout.slots)
        steps = [set(np.diff(layout.address(index, slots)).tolist()) for index in range(len(layout.planes))]
        one_stride = all(len(of_plane) <= 1 for of_plane in steps)
        assert page_size == (1 if one_stride else layout.page_size), "a side without gaps has no pages to cross"
        assert not one_stride or (pairing.table[:, strides] == pairing.table[:, strides + 1]).all()
    cuts = {
        (plane.kind, plane.layer, head)
        for layout, *_ in sides
        for plane in layout.planes
        for head in (plane.head_start, plane.head_start + plane.head_count)
    }
    assert len(pairing.table) == len(cuts) - len({cut[:2] for cut in cuts}), "split where either side splits alone"


def test_within_layers_keeps_exactly_those_layers() -> None:
    source, target = pool_of("page_first", mha(layers=range(8))), pool_of("page_head", mha(layers=range(8)))
    pairing = pair(source, target)
    some = pairing.within_layers(2, 5)
    expected = pair(source.layers(2, 5), target.layers(2, 5))
    np.testing.assert_array_equal(some.table, expected.table)
    np.testing.assert_array_equal(some.layers, expected.layers)
    assert sorted(set(some.layers.tolist())) == [2, 3, 4]
    assert some.row_bytes * 8 == pairing.row_bytes * 3
    assert pairing.within_layers(8, 9).row_bytes == 0


def test_fused_makes_neighbours_on_both_sides_one_plane() -> None:
    model = mha(layers=range(4))
    page_first = pool_of("page_first", model, page_size=1)
    fused = pair(page_first, pool_of("page_first", model)).fused()
    assert fused.table[:, 6].tolist() == [4 * 64, 4 * 64]  # one row a token for all layers of k, one for v
    assert fused.layers.tolist() == [0, 0]
    assert fused.row_bytes == page_first.row_bytes
    for other in ("layer_first", "page_first_direct", "page_head"):
        pairing = pair(page_first, pool_of(other, model))
        assert pairing.fused() is pairing


def differences(source: Layout, target: Layout) -> list[str]:
    with pytest.raises(LayoutMismatchError) as caught:
        pair(source, target)
    assert all(line in str(caught.value) for line in caught.value.differences)
    return caught.value.differences


def changed(layout: Layout, where: Any, **fields: Any) -> Layout:
    planes = tuple(msgspec.structs.replace(p, **fields) if where(p) else p for p in layout.planes)
    return Layout(planes, layout.page_size, layout.slots)


def test_mismatch_names_each_field_with_both_values() -> None:
    k61 = mha(layers=range(61), head_bytes=32)
    base = pool_of("page_first", k61)
    padded = mla(layers=range(1), head_bytes=1_156)
    half = changed(base, lambda p: p.kind == "k" and p.layer == 3, dtype="float16")
    cases = {
        "layers: source 0..60, target 0..59": (base, base.layers(0, 60)),
        "kind k layer 3 dtype: source bfloat16, target float16": (base, half),
        "kind latent layer 0 row_bytes: source 1152, target 1156": (
            pool_of("layer_first", mla(layers=range(1))),
            pool_of("page_first", padded),
        ),
        "kinds: source k, v, target latent": (base, pool_of("page_first", mla(layers=range(61)))),
    }
    for line, (source, target) in cases.items():
        assert differences(source, target) == [line]


def test_a_difference_of_all_layers_is_one_line_a_kind() -> None:
    model = mha(layers=range(61), head_bytes=32)
    base = pool_of("page_first", model)
    assert differences(base, pool_of("page_head", mha(layers=range(61), head_bytes=32, dtype="float16"))) == [
        "kind k layers 0..60 dtype: source bfloat16, target float16",
        "kind v layers 0..60 dtype: source bfloat16, target float16",
    ]
    assert differences(pool_of("page_head", mha(layers=range(61), head_bytes=48)), base) == [
        "kind k layers 0..60 head_bytes: source 48, target 32",
        "kind v layers 0..60 head_bytes: source 48, target 32",
    ]
    assert differences(base, base.heads(1, 3)) == [
        "kind k layers 0..60 heads: source 0..3, target 1..2",
        "kind v layers 0..60 heads: source 0..3, target 1..2",
    ]


def test_several_differences_are_all_named() -> None:
    base = pool_of("page_first", mha(layers=range(6), head_bytes=32))
    other = pool_of("page_head", mha(layers=range(1, 7), heads=range(2), head_bytes=64, dtype="float32"))
    only_k = Layout(tuple(p for p in other.planes if p.kind == "k"), other.page_size, other.slots)
    assert differences(base, only_k) == [
        "kinds: source k, v, target k",
        "layers: source 0..5, target 1..6",
        "kind k layers 1..5 heads: source 0..3, target 0..1",
        "kind k layers 1..5 dtype: source bfloat16, target float32",
        "kind k layers 1..5 head_bytes: source 32, target 64",
    ]
    holes = Layout(tuple(p for p in base.planes if (p.kind, p.layer) != ("k", 2)), base.page_size, base.slots)
    assert differences(base, holes) == ["kind k layers: source 0..5, target 0..1, 3..5"]


def test_mismatch_lines_are_bounded() -> None:
    source = tuple(plane(layer=index, kind=f"a{index}" + "x" * 10, base=index * 2048) for index in range(2000))
    target = tuple(
        msgspec.structs.replace(p, dtype="uint8", head_count=1 + p.layer % 64, row_bytes=64)
        for p in source
        if p.layer % 3
    )
    target = tuple(msgspec.structs.replace(p, row_bytes=p.head_count) for p in target)
    lines = differences(Layout(source, 16, 32), Layout(target, 16, 32))
    assert len(lines) == FIELDS_MAX
    assert max(map(len, lines)) <= 500
    assert lines[-1].endswith("more differences")


def test_a_line_of_many_ranges_is_cut() -> None:
    # Every other layer holds every other head: each value of the line alone would be longer than the line may be.
    planes = [
        plane(layer=layer, head_start=head, head_count=1, base=(layer * 100 + head) * 2048)
        for layer in range(0, 200, 2)
        for head in range(100)
    ]
    even = Layout(tuple(p for p in planes if p.head_start % 2 == 0), 16, 32)
    odd = Layout(tuple(p for p in planes if p.head_start % 2), 16, 32)
    (line,) = differences(even, odd)
    assert line.startswith("kind k layers 0, 2, 4, ")
    assert "heads: source 0, 2, 4, " in line
    assert len(line) == 500


def test_a_difference_in_one_head_of_a_wide_row_is_found() -> None:
    wide, split = pool_of("page_first", mha()), pool_of("page_head", mha())
    odd = changed(split, lambda p: (p.kind, p.layer, p.head_start) == ("k", 1, 2), dtype="float16")
    assert differences(wide, odd) == ["kind k layer 1 dtype: source bfloat16, target float16"]
    assert differences(odd, wide) == ["kind k layer 1 dtype: source float16, target bfloat16"]


@pytest.mark.parametrize("name", ["layer_first", "page_head"])
def test_the_largest_layouts_pair(name: str) -> None:
    model = mha(layers=range(128), heads=range(128), head_bytes=2)
    source, target = pool_of("page_head", model), pool_of(name, model)
    assert len(source.planes) == PLANES_MAX
    pairing = pair(source, target)
    assert len(pairing.table) == PLANES_MAX
    assert pairing.row_bytes == target.row_bytes


FIRST = """
import sys
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.layout.pairing import pair
from pdtransfer.handoff.sharing import uncovered

def made(name):
    return host_layout(name, kinds=("k", "v"), layers=4, heads=2, head_bytes=64, dtype="uint8", slots=64, page_size=16)

source, target = made("layer_first"), made("page_head")
parts = [Component("kv", "dram", 1, Span(), part) for part in (target.layers(0, 2), target.layers(2, 4))]
known = set(sys.modules)
pair(source, target)
assert not uncovered([Component("kv", "dram", 1, Span(), target)], {"p": [parts[0]], "q": [parts[1]]})
print(sorted(set(sys.modules) - known))
"""


def test_the_first_pairing_of_a_process_imports_nothing() -> None:
    """The loop does it, and everybody else's rooms would wait for the import."""
    assert subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout == "[]\n"

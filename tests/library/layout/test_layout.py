"""Layouts against tensors, the algebra, components, and what no layout may be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError
from pdtransfer.layout import layout_builders
from pdtransfer.layout.layout import Component, Layout, Plane, Span, check_slots, expand_pages, slots_of_rows
from pdtransfer.layout.layout_builders import C4_PARTS, item_layout
from pdtransfer.limits import PLANES_MAX
from tests.support.effort import some
from tests.support.layout_tensors import CANARY, Pool, c4, content, mha, mla, models, plane, planes_of, pools

bounded = settings(max_examples=some(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rows_at(layout: Layout, at: int, slots: np.ndarray) -> np.ndarray:
    """Indices into memory of each slot's row, int64 (n, row_bytes), by the table."""
    return layout.address(at, slots)[:, None] + np.arange(layout.planes[at].row_bytes)


def write_through_table(layout: Layout, memory: np.ndarray, slots: np.ndarray, tokens: np.ndarray) -> None:
    for at, kind, layer, heads in planes_of(layout):
        head_bytes = layout.planes[at].head_bytes
        rows = np.concatenate([content(kind, layer, head, tokens, head_bytes) for head in heads], axis=1)
        memory[rows_at(layout, at, slots)] = rows


def check_against_tensor(pool: Pool) -> None:
    slots = np.arange(pool.slots)
    memory = pool.memory
    write_through_table(pool.layout, memory, slots, slots + 1000)
    for kind, layer, head in pool.model.rows():
        expected = content(kind, layer, head, slots + 1000, pool.model.head_bytes(kind))
        np.testing.assert_array_equal(pool.read(kind, layer, head, slots), expected)
    # What the tensor calls no element stayed as it was: the bytes around the pool, and a page's padding.
    written = np.zeros(len(memory), dtype=bool)
    for index in range(len(pool.layout.planes)):
        written[rows_at(pool.layout, index, slots)] = True
    assert (memory[~written] == CANARY).all()
    assert written.sum() == pool.slots * sum(pool.model.head_bytes(kind) for kind, _, _ in pool.model.rows())
    # And the other way round: what the tensor writes, the table reads.
    pool.fill(slots + 7)
    through_tensor = memory.copy()
    write_through_table(pool.layout, memory, slots, slots + 7)
    np.testing.assert_array_equal(memory, through_tensor)


@bounded
@given(st.data())
def test_any_pool_of_any_model_reads_alike_through_table_and_tensor(data: Any) -> None:
    check_against_tensor(data.draw(models().flatmap(pools)))


# The algebra


@bounded
@given(st.data())
def test_layers_of_layers_is_their_intersection(data: Any) -> None:
    layout = data.draw(models().flatmap(pools)).layout
    first, end = layout.layer_range
    a, b = sorted(data.draw(st.lists(st.integers(first, end), min_size=2, max_size=2, unique=True)))
    c, d = sorted(data.draw(st.lists(st.integers(first, end), min_size=2, max_size=2, unique=True)))
    low, high = max(a, c), min(b, d)
    if low < high:
        sliced = layout.layers(a, b).layers(c, d)
        assert sliced == layout.layers(low, high)
        assert sliced.planes == tuple(plane for plane in layout.planes if low <= plane.layer < high)
        assert layout.row_bytes_of(low, high) == sliced.row_bytes
        assert sliced.layer_range == (low, high)
    else:
        assert layout.row_bytes_of(low, high) == 0
        with pytest.raises(LocalProtocolError, match=f"layers {c}..{d - 1}: not among"):
            layout.layers(a, b).layers(c, d)


@bounded
@given(st.data())
def test_bytes_of_any_layers_are_those_of_the_planes_between(data: Any) -> None:
    """In whatever order the planes are, whether every layer has one, and beyond the layers that there are."""
    pool = data.draw(models().flatmap(pools)).layout
    kept = data.draw(st.permutations(pool.planes))[: data.draw(st.integers(1, len(pool.planes)))]
    layout = Layout(tuple(kept), pool.page_size, pool.slots)
    low, high = data.draw(st.tuples(*[st.integers(-1, pool.layer_range[1] + 1)] * 2))
    assert layout.row_bytes_of(low, high) == sum(each.row_bytes for each in kept if low <= each.layer < high)


@bounded
@given(st.data())
def test_a_slice_of_heads_reads_those_heads_of_the_tensor(data: Any) -> None:
    model = data.draw(st.sampled_from([mha(heads=range(4)), mha(heads=range(6, 10), dtype="float32")]))
    pool = data.draw(pools(model))
    pool.fill(np.arange(pool.slots))
    a, b = sorted(
        data.draw(st.lists(st.integers(model.heads[0], model.heads[-1] + 1), min_size=2, max_size=2, unique=True))
    )
    sliced = pool.layout.heads(a, b)
    slots = np.arange(pool.slots)
    for at, kind, layer, heads in planes_of(sliced):
        rows = np.concatenate([pool.read(kind, layer, head, slots) for head in heads], axis=1)
        np.testing.assert_array_equal(pool.memory[rows_at(sliced, at, slots)], rows)
    assert sorted({head for _, _, _, heads in planes_of(sliced) for head in heads}) == list(range(a, b))
    assert sliced.row_bytes * len(model.heads) == pool.layout.row_bytes * (b - a)
    # Heads of heads, and heads of layers whichever comes first.
    assert pool.layout.heads(a, model.heads[-1] + 1).heads(0, b) == sliced
    assert sliced.layers(1, 2) == pool.layout.layers(1, 2).heads(a, b)


@bounded
@given(st.data())
def test_rebase_moves_every_address_and_commutes_with_slices(data: Any) -> None:
    layout, delta = data.draw(models().flatmap(pools)).layout, data.draw(st.integers(0, 1 << 47))
    moved, slots = layout.rebase(delta), np.arange(layout.slots)
    for index in range(len(layout.planes)):
        np.testing.assert_array_equal(moved.address(index, slots), layout.address(index, slots) + delta)
        assert moved.address(index, int(slots[-1])) == int(layout.address(index, slots)[-1]) + delta
    first = layout.layer_range[0]
    assert moved.layers(first, first + 1) == layout.layers(first, first + 1).rebase(delta)
    assert moved.heads(0, 99) == layout.heads(0, 99).rebase(delta) == moved
    assert moved.rebase(-delta) == layout
    assert moved.end == layout.end + delta
    with pytest.raises(ValueError, match=r"planes\[\d+\].base: -1 is not an integer"):
        layout.rebase(-1 - min(plane.base for plane in layout.planes))


def test_equal_layouts_hash_alike_and_survive_the_wire() -> None:
    layout = Pool(name="page_head", model=mha(), page_size=16, slots=64).layout
    assert layout.row_bytes == 3 * 2 * 4 * 16  # so that something is cached
    again = msgspec.convert(msgspec.to_builtins(layout), Layout)
    assert again == layout
    assert hash(again) == hash(layout)
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(layout)


def test_check_within_names_place_plane_and_both_values() -> None:
    layout = Pool(name="layer_first", model=mla(), page_size=16, slots=64, base=100).layout
    end = 100 + 3 * 64 * 1152
    assert layout.end == end
    layout.check_within(end, "arena")
    with pytest.raises(
        ValueError, match=rf"arena: planes\[2\] \(kind latent, layer 2\) ends at byte {end}, of {end - 1}"
    ):
        layout.check_within(end - 1, "arena")


# Components


def component(**changed: Any) -> Component:
    fields: dict[str, Any] = {
        "name": "kv",
        "memory": "dram",
        "tokens_per_row": 1,
        "span": Span(),
        "layout": Pool(name="layer_first", model=mla(), page_size=16, slots=64).layout,
    }
    return Component(**(fields | changed))


@pytest.mark.parametrize(
    ("span", "tokens_per_row", "tokens", "rows"),
    [
        (Span(), 1, 0, 0),
        (Span(), 1, 7, 7),
        (Span(), 4, 7, 2),
        (Span(), 4, 8, 2),
        (Span(), 128, 129, 2),
        (Span("last", 5), 1, 3, 3),
        (Span("last", 5), 1, 900, 5),
        (Span("last", 5), 4, 900, 2),
        (Span("last", 5), 1, 0, 0),
        (Span("once"), 1, 0, 0),
        (Span("once"), 1, 1, 1),
        (Span("once"), 1, 900, 1),
    ],
)
def test_component_owns_the_rows_of_its_span(span: Span, tokens_per_row: int, tokens: int, rows: int) -> None:
    kv = component(span=span, tokens_per_row=tokens_per_row)
    assert kv.rows(tokens) == rows
    assert kv.bytes_of(rows) == rows * 3 * 1152


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Span("last", 0), r"tokens: 0 for kind last is not in 1\.\."),
        (lambda: Span("all", 3), r"tokens: 3 for kind all is not in 0\.\.0"),
        (lambda: Span("once", 1), r"tokens: 1 for kind once is not in 0\.\.0"),
        (lambda: Span("some"), "kind: 'some' must be one of all, last, once"),  # pyright: ignore
        (lambda: component(name=""), "name: 0 characters"),
        (lambda: component(memory="disk"), "memory: 'disk'"),
        (lambda: component(tokens_per_row=0), r"tokens_per_row: 0 is not in 1\.\.65535"),
    ],
)
def test_a_component_that_makes_no_sense_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# What no layout may be


HUGE = 1 << 62


def bad(name: str, text: str, *planes: Plane, page_size: int = 16, slots: int = 32) -> Any:
    return pytest.param(planes, page_size, slots, text, id=name)


BAD = [
    bad("page_size is not a power of two", r"page_size: 12 is not a power of two", plane(), page_size=12, slots=48),
    bad("page_size 0", r"page_size: 0 is not a power of two", plane(), page_size=0, slots=48),
    bad("slots are not whole pages", r"slots: 40 is not a multiple of page_size 16", plane(), slots=40),
    bad("slots 0", r"slots: 0 is not a multiple", plane(), slots=0),
    bad("no planes", r"planes: 0, must be 1 to"),
    bad("unknown dtype", r"planes\[1\]\.dtype: 'fp4' must be one of", plane(), plane(dtype="fp4", layer=1, base=4096)),
    bad("kind empty", r"planes\[0\]\.kind: '' is not", plane(kind="")),
    bad("kind that breaks a line", r"planes\[0\]\.kind: 'k\\n' is not", plane(kind="k\n")),
    bad("kind too long", r"planes\[0\]\.kind: 'k{17}' is not", plane(kind="k" * 17)),
    bad("no heads", r"planes\[0\]\.head_count: 0 is not an integer of 1\.\.", plane(head_count=0)),
    bad("layer beyond u16", r"planes\[0\]\.layer: 65536 is not an integer of 0\.\.65535", plane(layer=1 << 16)),
    bad("negative base", r"planes\[0\]\.base: -8 is not an integer of 0\.\.", plane(base=-8)),
    bad("base beyond int64", r"planes\[0\]\.base: 1180591620717411303424 is not an integer", plane(base=1 << 70)),
    bad("base that is not an integer", r"planes\[0\]\.base: 0\.5 is not an integer", plane(base=0.5)),
    bad("base that is text", r"planes\[0\]\.base: '8' is not an integer", plane(base="8")),
    bad("row of part elements", r"row_bytes: 63 is not a multiple of head_count 2 x bfloat16", plane(row_bytes=63)),
    bad("row of part heads", r"row_bytes: 62 is not a multiple of head_count 2 x bfloat16, 4 by", plane(row_bytes=62)),
    bad("rows overlap", r"planes\[0\]\.row_stride: 60 is below row_bytes 64", plane(row_stride=60)),
    bad("row stride 0", r"planes\[0\]\.row_stride: 0 is below row_bytes 64", plane(row_stride=0)),
    bad("pages overlap", r"planes\[0\]\.page_stride: 1023 is below the 1024 bytes", plane(page_stride=1023)),
    bad(
        "pages of one slot overlap",
        r"page_stride: 63 is below the 64 bytes",
        plane(page_stride=63),
        page_size=1,
        slots=2,
    ),
    bad("ends beyond 2**62", r"planes\[0\]: base \d+, .* end beyond byte \d+", plane(base=HUGE)),
    bad("just beyond 2**62", r"planes\[0\]: base \d+, .* end beyond byte \d+", plane(base=HUGE - 2047)),
    bad("wraps int64", r"planes\[0\]: .*page_stride \d+, .* end beyond byte", plane(page_stride=HUGE), slots=1 << 40),
    bad("wraps int64 to a small end", r"planes\[0\]: .* end beyond byte", plane(page_stride=HUGE), slots=5 * 16),
    bad(
        "wraps int64 by rows",
        r"planes\[0\]: .*row_stride \d+ .* end beyond",
        plane(row_stride=HUGE),
        page_size=1 << 20,
        slots=1 << 20,
    ),
    bad("a head twice", r"kind k layer 0 heads 0\.\.1 and 1\.\.2 overlap", plane(), plane(base=1 << 20, head_start=1)),
    bad("a plane twice", r"planes\[0\] and planes\[1\]: kind k layer 0", plane(), plane(base=1 << 20)),
    bad("planes at one place", r"planes\[0\]\.base 0 and planes\[1\]\.base 0: their rows", plane(), plane(layer=1)),
    bad(
        "planes overlap by a byte",
        r"planes\[0\]\.base 0 and planes\[1\]\.base 2047",
        plane(),
        plane(layer=1, base=2047),
    ),
    bad("page inside page", "their rows overlap", plane(page_stride=4096), plane(layer=1, base=5100, page_stride=4096)),
    bad(
        "rows inside rows",
        "their rows overlap",
        plane(row_stride=128, page_stride=2048),
        plane(layer=1, base=127, row_stride=128, page_stride=2048),
    ),
    bad(
        "unequal strides that cross",
        "their rows overlap, or interleave at unequal strides",
        plane(row_stride=192, page_stride=4096),
        plane(layer=1, base=64, row_stride=128, page_stride=4096),
    ),
]


@pytest.mark.parametrize(("planes", "page_size", "slots", "text"), BAD)
def test_a_layout_that_cannot_be_is_refused(planes: tuple[Plane, ...], page_size: int, slots: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Layout(planes, page_size, slots)


@pytest.mark.parametrize(
    ("planes", "page_size", "slots"),
    [
        pytest.param([plane(base=HUGE - 2048)], 16, 32, id="ends at 2**62"),
        pytest.param([plane(), plane(layer=1, base=2048)], 16, 32, id="back to back"),
        pytest.param([plane(page_stride=0)], 16, 16, id="one page needs no page stride"),
        pytest.param([plane(row_stride=0)], 1, 16, id="page size 1 needs no row stride"),
        pytest.param([plane(), plane(base=1 << 20, head_start=2)], 16, 32, id="heads side by side"),
        pytest.param(
            [plane(row_stride=128, page_stride=2112), plane(layer=1, base=64, row_stride=128, page_stride=2112)],
            16,
            32,
            id="interleaved rows in padded pages",
        ),
    ],
)
def test_a_layout_at_the_edge_of_what_may_be_is_taken(planes: list[Plane], page_size: int, slots: int) -> None:
    layout = Layout(tuple(planes), page_size, slots)
    assert layout.end == max(layout.address(index, slots - 1) + 64 for index in range(len(planes)))


@settings(max_examples=some(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_taken_never_overlaps(data: Any) -> None:
    # Small numbers, so that all bytes can be counted: soundness of the cheap test, whatever it refuses.
    page_size, pages = 1 << data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    strides = st.sampled_from([0, 4, 8, 12, 16, 24, 32, 48, 64])
    shared = data.draw(strides), data.draw(strides)
    planes = [
        plane(
            layer=layer, dtype="uint8", head_count=1, base=data.draw(st.integers(0, 32)) * 4,
            page_stride=data.draw(st.sampled_from([shared[0], data.draw(strides)])),
            row_stride=data.draw(st.sampled_from([shared[1], data.draw(strides)])),
            row_bytes=data.draw(st.sampled_from([1, 4, 8])),
        )
        for layer in range(data.draw(st.integers(1, 4)))
    ]  # fmt: skip
    try:
        layout = Layout(tuple(planes), page_size, page_size * pages)
    except ValueError:
        return
    slots = np.arange(layout.slots)
    touched = np.concatenate([rows_at(layout, index, slots).ravel() for index in range(len(planes))])
    assert len(np.unique(touched)) == len(touched)
    assert touched.max() + 1 == layout.end


@settings(max_examples=some(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_array_of_plausible_types_converts_or_is_a_validation_error(data: Any) -> None:
    numbers = st.one_of(st.integers(-1, 70), st.sampled_from([1 << 16, 1 << 30, HUGE, (1 << 63) - 1, (1 << 64) - 1]))
    kinds, dtypes = st.sampled_from(["k", "v", "\x00", ""]), st.sampled_from(["uint8", "bfloat16", "x"])
    rows = st.tuples(numbers, kinds, dtypes, *[numbers] * 6)
    raw = data.draw(st.tuples(st.lists(rows, max_size=4), numbers, numbers))
    try:
        layout = msgspec.convert(raw, Layout)
    except msgspec.ValidationError:
        return
    assert 0 < layout.end <= HUGE


def test_more_planes_than_the_limit_are_refused() -> None:
    planes = tuple(
        plane(layer=index % 65536, kind=f"k{index // 65536}", base=index * 2048) for index in range(PLANES_MAX + 1)
    )
    with pytest.raises(ValueError, match=r"planes: 32769, must be 1 to 32768"):
        Layout(planes, 16, 32)


# Pages and slots


def test_expand_pages_gives_each_token_its_slot() -> None:
    slots = expand_pages([3, 0, 7], 4, 10)
    assert slots.dtype == np.int64
    assert slots.tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 28, 29]
    assert expand_pages(np.array([9, 2], dtype=np.int32), 1, 2).tolist() == [9, 2]
    assert expand_pages([], 16, 0).tolist() == []


@bounded
@given(st.integers(0, 6), st.integers(0, 4), st.integers(-2, 100))
@example(0, 1, -1)
def test_expand_pages_raises_unless_the_last_token_is_in_the_last_page(count: int, log2: int, tokens: int) -> None:
    page_size = 1 << log2
    if max(0, (count - 1) * page_size + 1) <= tokens <= count * page_size:
        assert len(expand_pages(np.arange(count), page_size, tokens)) == tokens
    else:
        with pytest.raises(
            LocalProtocolError, match=f"tokens: {tokens} do not end in the last of {count} pages of {page_size}"
        ):
            expand_pages(np.arange(count), page_size, tokens)


@pytest.mark.parametrize(
    ("pages", "page_size", "tokens", "text"),
    [
        ([0, -1], 4, 8, r"pages\[1\]: -1"),
        ([1 << 59], 16, 16, r"pages\[0\]: 576460752303423488 is not in 0\.\."),
        (np.array([(1 << 64) - 1], dtype=np.uint64), 1, 1, r"pages\[0\]: 18446744073709551615"),
        ([0.5], 4, 4, "pages: float64"),
        ([[0, 1]], 4, 8, r"pages: int64 of shape \(1, 2\)"),
        ([0], 3, 3, "page_size: 3"),
        ([0], 0, 0, "page_size: 0"),
    ],
)
def test_expand_pages_names_what_is_wrong(pages: Any, page_size: int, tokens: int, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        expand_pages(pages, page_size, tokens)


def test_rows_have_the_slots_of_their_pages_from_wherever_the_first_begins() -> None:
    assert slots_of_rows([3, 0, 7, 9], 4, (2, 6)).tolist() == [14, 15, 0, 1]
    assert slots_of_rows([3, 0, 7, 9], 4, (0, 5), skip=3).tolist() == [15, 0, 1, 2, 3]
    assert slots_of_rows([3, 0, 7], 4, (8, 9), skip=3).tolist() == [31]
    for text, changed in {
        r"rows: \[3, 3\) is empty": {"rows": (3, 3)},
        r"rows: \[-1, 3\)": {"rows": (-1, 3)},
        "skip: 4 is not within a page of 4": {"skip": 4},
        "skip: -1": {"skip": -1},
        "tokens: 13 do not end in the last of 3 pages": {"rows": (0, 10), "skip": 3},
    }.items():
        with pytest.raises(LocalProtocolError, match=text):
            slots_of_rows([3, 0, 7], 4, **{"rows": (0, 1), **changed})


def test_check_slots_names_field_and_slot() -> None:
    check_slots(np.array([5, 0, 7]), 8, "slots")
    check_slots(np.array([], dtype=np.int64), 8, "slots")
    for slots, text in [
        ([5, 8], "slots: slot 8 is outside 0..7"),
        ([-1], "slots: slot -1"),
        ([3, 1, 3], "slot 3 is there twice"),
    ]:
        with pytest.raises(ValueError, match=text):
            check_slots(np.array(slots), 8, "slots")


# Builders


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Pool(name="sideways", model=mla(), page_size=1, slots=4).layout,
            LocalProtocolError,
            "'sideways' must be one of",
        ),
        (
            lambda: Pool(name="page_head", model=c4(), page_size=64, slots=64).layout,
            LocalProtocolError,
            "'page_head' must be one of",
        ),
        (
            lambda: item_layout("page_first", parts=C4_PARTS, layers=2, slots=64, page_size=64, item_bytes=37_375),
            LocalProtocolError,
            "item_bytes: 37375 is below the 37376 bytes",
        ),
        (lambda: Pool(name="page_first", model=mla(), page_size=0, slots=4).layout, ValueError, "page_size: 0"),
        (lambda: Pool(name="page_first", model=mla(), page_size=16, slots=40).layout, ValueError, "slots: 40"),
        (
            lambda: Pool(name="page_first", model=mla(layers=range(0)), page_size=16, slots=64).layout,
            ValueError,
            "planes: 0",
        ),
    ],
)
def test_builders_refuse_what_is_no_pool(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_layout_of_items_without_strides_of_its_own_has_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name was added to the list alone."""
    monkeypatch.setattr(layout_builders, "ITEM_LAYOUTS", (*layout_builders.ITEM_LAYOUTS, "page_head"))
    with pytest.raises(LocalProtocolError, match="host layout of values, scale: 'page_head' must be one of"):
        item_layout("page_head", parts=C4_PARTS, layers=2, slots=64, page_size=64)

"""Plans against tensors: what lands where, what is left alone, and how few runs it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError
from pdtransfer.layout import plan as plan_module
from pdtransfer.layout.layout import expand_pages
from pdtransfer.layout.layout_builders import HOST_LAYOUTS
from pdtransfer.layout.pairing import Pairing, pair
from pdtransfer.layout.plan import Plan, plan
from tests.support.effort import some
from tests.support.layout_tensors import CANARY, Model, Pool, content, mha, mla, models, pools

bounded = settings(max_examples=some(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def copy_byte_runs(plan: Plan, source: np.ndarray, target: np.ndarray) -> None:
    for at, to, length in plan.byte_runs().tolist():
        target[to : to + length] = source[at : at + length]


def copy_runs(plan: Plan, source: np.ndarray, target: np.ndarray) -> None:
    """As a kernel does: an address at the start of each run and plane, then row after row at the plane's strides."""
    pairing = plan.pairing
    for source_start, target_start, count in plan.runs.tolist():
        for row in pairing.table.tolist():
            at = (
                row[0]
                + source_start // pairing.source_page_size * row[1]
                + source_start % pairing.source_page_size * row[2]
            )
            to = (
                row[3]
                + target_start // pairing.target_page_size * row[4]
                + target_start % pairing.target_page_size * row[5]
            )
            for _ in range(count):
                target[to : to + row[6]] = source[at : at + row[6]]
                at, to = at + row[2], to + row[5]


def copy_strided(plan: Plan, source: np.ndarray, target: np.ndarray) -> None:
    """As a copy engine does, which takes no stride below a row's bytes."""
    for (read, written, length), (source_stride, target_stride, rows) in zip(
        *map(np.ndarray.tolist, plan.strided()), strict=True
    ):
        assert rows > 1 or source_stride == target_stride == length
        for row in range(rows):
            first, second = read + row * source_stride, written + row * target_stride
            target[second : second + length] = source[first : first + length]


def slots_of(data: Any, pool: Pool, count: int) -> np.ndarray:
    """`count` slots, each once: anywhere, or runs as pages give them."""
    if data.draw(st.booleans()):
        pages = data.draw(st.permutations(range(pool.slots // pool.page_size)))
        return expand_pages(pages, pool.page_size, pool.slots)[:count]
    return np.array(data.draw(st.permutations(range(pool.slots))), dtype=np.int64)[:count]


def drawn(data: Any) -> tuple[Pool, Pool, np.ndarray, np.ndarray]:
    model = data.draw(models())
    source, target = data.draw(pools(model)), data.draw(pools(model))
    count = data.draw(st.integers(0, min(source.slots, target.slots)))
    return source, target, slots_of(data, source, count), slots_of(data, target, count)


def check_landed(source: Pool, target: Pool, source_slots: np.ndarray, target_slots: np.ndarray) -> None:
    """Named slots hold their source's token, by the tensor's indexing; every other byte is as it was."""
    named = np.zeros(target.slots, dtype=bool)
    named[target_slots] = True
    others = np.flatnonzero(~named)
    for kind, layer, head in target.model.rows():
        expected = content(kind, layer, head, 5000 + source_slots, target.model.head_bytes(kind))
        np.testing.assert_array_equal(target.read(kind, layer, head, target_slots), expected)
        assert (target.read(kind, layer, head, others) == CANARY).all()
    untouched = len(target.memory) - target.layout.row_bytes * len(target_slots)
    assert (target.memory == CANARY).sum() >= untouched


@bounded
@given(st.data())
@pytest.mark.parametrize("copy", [copy_byte_runs, copy_runs, copy_strided])
def test_every_layout_copies_into_every_other(copy: Any, data: Any) -> None:
    source, target, source_slots, target_slots = drawn(data)
    source.fill(5000 + np.arange(source.slots))
    copy(plan(pair(source.layout, target.layout), source_slots, target_slots), source.memory, target.memory)
    check_landed(source, target, source_slots, target_slots)


# The pairs that users have, at their real row bytes: prefill's pages into decode's token-granular arena.
@pytest.mark.parametrize("target_name", HOST_LAYOUTS)
@pytest.mark.parametrize("source_name", HOST_LAYOUTS)
@pytest.mark.parametrize("model", [mha(head_bytes=256), mla()], ids=["mha", "mla"])
def test_pages_of_64_land_in_single_tokens(model: Model, source_name: str, target_name: str) -> None:
    source = Pool(name=source_name, model=model, page_size=64, slots=256, base=64)
    wide = len(model.heads) * model.parts[0][2]  # a layer's row: bytes and offsets must not be mistaken for another
    target = Pool(name=target_name, model=model, page_size=1, slots=200, base=wide)
    source.fill(5000 + np.arange(source.slots))
    source_slots, target_slots = expand_pages([3, 1], 64, 100), np.arange(90, 190)
    planned = plan(pair(source.layout, target.layout), source_slots, target_slots)
    assert planned.runs.tolist() == [[192, 90, 64], [64, 154, 36]]
    assert (planned.rows, planned.bytes) == (100, 100 * source.layout.row_bytes)
    copy_byte_runs(planned, source.memory, target.memory)
    check_landed(source, target, source_slots, target_slots)


# Runs

FEW = (-1, 1 << 20)  # plan() has one way for few slots and one for many: either has to serve all


def runs_one_by_one(pairing: Pairing, source_slots: np.ndarray, target_slots: np.ndarray) -> list[list[int]]:
    """What plan() does, said slowly."""
    runs: list[list[int]] = []
    for s, t in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        goes_on = runs and s == sum(runs[-1][::2]) and t == sum(runs[-1][1:])
        sides = (s, pairing.source_page_size), (t, pairing.target_page_size)
        if goes_on and not any(page_size > 1 and slot % page_size == 0 for slot, page_size in sides):
            runs[-1][2] += 1
        else:
            runs.append([s, t, 1])
    return runs


@bounded
@given(st.data())
def test_runs_are_maximal(data: Any) -> None:
    source, target, source_slots, target_slots = drawn(data)
    pairing = pair(source.layout, target.layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "FEW", data.draw(st.sampled_from(FEW)))
        planned = plan(pairing, source_slots, target_slots)
    assert planned.runs.tolist() == runs_one_by_one(pairing, source_slots, target_slots)
    assert planned.rows == len(source_slots)
    assert planned.bytes == len(source_slots) * source.layout.row_bytes


def test_runs_are_maximal_beyond_one_block() -> None:
    # What plan() looks at together is 16,384 slots: runs go on across that seam, and end at it only by chance.
    model = mla(layers=range(1), head_bytes=2)
    source = Pool(name="layer_first", model=model, page_size=64, slots=1 << 16).layout
    pairing = pair(source, source)
    slots = np.arange(40_000)
    assert plan(pairing, slots, slots + 9).runs.tolist() == [[0, 9, 40_000]]
    random = np.random.default_rng(3)
    source_slots = expand_pages(random.permutation(1024)[:625], 64, 40_000)
    target_slots = expand_pages(random.permutation(2048)[:1250], 32, 40_000)
    assert plan(pairing, source_slots, target_slots).runs.tolist() == runs_one_by_one(
        pairing, source_slots, target_slots
    )
    backwards = slots[::-1]
    assert plan(pairing, backwards, slots).runs.tolist() == [[39_999 - slot, slot, 1] for slot in range(40_000)]


@pytest.mark.parametrize(
    ("source_name", "target_name", "runs"),
    [
        ("layer_first", "page_first", [[4, 1, 20]]),  # both at one stride throughout: a page is not a seam
        ("page_first_direct", "page_first", [[4, 1, 4], [8, 5, 8], [16, 13, 8]]),
        ("page_first", "page_head", [[4, 1, 7], [11, 8, 8], [19, 16, 5]]),
        ("page_first_direct", "page_head", [[4, 1, 4], [8, 5, 3], [11, 8, 5], [16, 13, 3], [19, 16, 5]]),
    ],
)
def test_pages_split_runs_only_where_pages_leave_gaps(
    source_name: str, target_name: str, runs: list[list[int]]
) -> None:
    source, target = (Pool(name=name, model=mha(), page_size=8, slots=32) for name in (source_name, target_name))
    planned = plan(pair(source.layout, target.layout), np.arange(4, 24), np.arange(1, 21))
    assert planned.runs.tolist() == runs


def test_an_empty_plan_has_nothing() -> None:
    layout = Pool(name="layer_first", model=mla(), page_size=8, slots=32).layout
    none = np.array([], dtype=np.int64)
    planned = plan(pair(layout, layout), none, none)
    assert (planned.rows, planned.bytes) == (0, 0)
    assert planned.byte_runs().shape == (0, 3)
    assert list(planned.pieces(100)) == []
    no_layers = plan(pair(layout, layout).within_layers(9, 10), np.arange(4), np.arange(4))
    assert (no_layers.rows, no_layers.bytes) == (4, 0)
    assert no_layers.byte_runs().shape == (0, 3)
    assert list(no_layers.pieces(100)) == []


@pytest.mark.parametrize(
    ("source_slots", "target_slots", "text"),
    [
        ([31, 32], [0, 1], r"source_slots: 32 and 0 more are outside 0\.\.31"),
        ([0, 1], [15, 16], r"target_slots: 16 and 0 more are outside 0\.\.15"),
        ([-1, 0], [0, 1], r"source_slots: -1 and 0 more are outside"),
        ([0, 1, 2], [-3, 99, 1 << 60], r"target_slots: -3 and 2 more are outside"),
    ],
)
@pytest.mark.parametrize("few", FEW)
def test_slots_outside_a_pool_make_no_plan(
    few: int, source_slots: list[int], target_slots: list[int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "FEW", few)
    source, target = (Pool(name="page_head", model=mha(), page_size=8, slots=slots).layout for slots in (32, 16))
    with pytest.raises(LocalProtocolError, match=text):
        plan(pair(source, target), np.array(source_slots), np.array(target_slots))


@pytest.mark.parametrize(("sources", "targets"), [([0, 1], [0]), ([[0]], [[0]])])
def test_lists_of_slots_that_do_not_pair_make_no_plan(sources: Any, targets: Any) -> None:
    layout = Pool(name="page_head", model=mha(), page_size=8, slots=16).layout
    with pytest.raises(LocalProtocolError, match=r"source_slots \(.*\), target_slots \(.*\)"):
        plan(pair(layout, layout), np.array(sources), np.array(targets))


# Pieces and bytes


@bounded
@given(st.data(), st.integers(0, 60_000))
def test_pieces_are_the_plan_in_order_and_bounded(data: Any, bytes_max: int) -> None:
    source, target, source_slots, target_slots = drawn(data)
    planned = plan(pair(source.layout, target.layout), source_slots, target_slots)
    pieces = list(planned.pieces(bytes_max))
    row_bytes = source.layout.row_bytes
    assert all(0 < piece.bytes <= max(bytes_max, row_bytes) for piece in pieces)
    assert len(pieces) == -(-planned.rows // max(1, bytes_max // row_bytes))
    assert (np.concatenate([np.empty((0, 3)), *(piece.runs for piece in pieces)])[:, 2] > 0).all()
    rows = [(s + i, t + i) for piece in pieces for s, t, count in piece.runs.tolist() for i in range(count)]
    assert rows == list(zip(source_slots.tolist(), target_slots.tolist(), strict=True))
    for piece in pieces:
        assert piece.runs.tolist() == runs_one_by_one(piece.pairing, *np.array(rows[: piece.rows]).T)
        del rows[: piece.rows]


@bounded
@given(st.data())
def test_byte_runs_ascend_by_target_and_none_goes_on_where_another_ends(data: Any) -> None:
    source, target, source_slots, target_slots = drawn(data)
    planned = plan(pair(source.layout, target.layout), source_slots, target_slots)
    runs = planned.byte_runs()
    assert (runs[:, 2] > 0).all()
    assert runs[:, 2].sum() == planned.bytes
    ends = runs[:-1, :2] + runs[:-1, 2:]
    assert (runs[1:, 1] >= ends[:, 1]).all()
    assert not (runs[1:, :2] == ends).all(axis=1).any()


@pytest.mark.parametrize(
    ("source_name", "target_name", "pages", "count"),
    [
        ("page_first", "page_first", [0, 1, 2], 2),  # all tokens and layers of k in one, of v in another
        ("page_first", "page_first", [2, 0, 1], 4),  # where pages 0 and 1 follow 2, a seam
        ("layer_first", "layer_first", [0, 1, 2], 2 * 5),
        ("layer_first", "page_first", [0, 1, 2], 2 * 5 * 48),
        ("page_first_direct", "page_first_direct", [0, 1, 2], 2),  # whole pages: one plane ends where the next begins
        ("page_first_direct", "page_first_direct", [2, 0, 1], 4),
        ("page_first_direct", "layer_first", [2, 0, 1], 2 * 5 * 3),
        ("page_head", "page_head", [0, 1, 2], 2),
        ("page_head", "page_first", [0, 1, 2], 2 * (5 * 4 * 48 - 2)),  # heads one by one, but where pages meet
    ],
)
def test_byte_runs_join_tokens_layers_and_pages(
    source_name: str, target_name: str, pages: list[int], count: int
) -> None:
    names = source_name, target_name
    source, target = (Pool(name=name, model=mha(layers=range(5)), page_size=16, slots=64).layout for name in names)
    planned = plan(pair(source, target), expand_pages(pages, 16, 48), np.arange(48))
    assert len(planned.byte_runs()) == count


def test_a_plan_cannot_be_changed() -> None:
    layout = Pool(name="layer_first", model=mla(), page_size=8, slots=32).layout
    planned = plan(pair(layout, layout), np.arange(4), np.arange(4))
    for array in (planned.runs, planned.pairing.table, planned.pairing.layers, layout.table):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0

"""swap_plan without a GPU: the kernel's phases as host code, its CPU path, and a model that knows neither."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError
from pdtransfer.hisparse.hot_tables import HotRowArgument, HotTables, NewestArgument, newest_argument_of, newest_slots
from pdtransfer.hisparse.swap import HotBuffers, SwapArgument, SwapCounts, SwapPlan, argument_of, shape_of, swap_plan
from pdtransfer.kernels.kv_copy import Side, kv_copy, launch_of
from pdtransfer.kernels.pools import Pool
from pdtransfer.layout.layout import Layout, Plane
from tests.library.kernels.swap_plans import plan_for
from tests.support.effort import some
from tests.support.layout_tensors import Pool as Tensors
from tests.support.layout_tensors import mla

PROPERTY = settings(max_examples=some(80), deadline=None, suppress_health_check=list(HealthCheck))
LENGTH = 200


def buffers(rows: int, hot: int, rng: np.random.Generator) -> HotBuffers:
    """Empty ones; each place's and each position's slot is anywhere."""
    return HotBuffers(
        held=np.full((rows, hot), -1, np.int32),
        order=np.tile(np.arange(hot, dtype=np.int32), (rows, 1)),
        hot_slots=rng.permutation(rows * hot).astype(np.int32).reshape(rows, hot),
        host_slots=rng.permutation(rows * LENGTH).astype(np.int32).reshape(rows, LENGTH),
    )


def on_host(
    lib: ctypes.CDLL, hot: HotBuffers, given: tuple[Any, ...], plan: SwapPlan, real: Any, *, wide: bool = False,
    totals: SwapCounts | None = None, bring: tuple[Pool, Pool] | None = None,
) -> None:  # fmt: skip
    argument = argument_of(hot, *given, plan, real, totals)
    if bring is not None:
        limits = (each.layout.slots for each in bring)
        brought = launch_of(
            *bring, *(Side(None, 0, 1, False, 1, 1, limit, True) for limit in limits), 1, count_known=False
        )
        argument.bring = brought.argument
        argument.bring.pairs = brought.pairs.ctypes.data
    function, threads, shared_bytes = shape_of(argument)
    memory = np.full(shared_bytes // 4, -9, np.int32)
    top_each = 4 if wide else int(function[len("swap_plan_")])
    lib.swap_plan_on_host(ctypes.byref(argument), top_each, threads, ctypes.c_void_p(memory.ctypes.data))


class Request:
    """One request's hot buffer as a list of positions, the one used longest ago first."""

    def __init__(self, hot: int) -> None:
        self.recent: list[int | None] = [None] * hot

    def step(self, top: list[int]) -> list[int]:
        """The positions that are missing, by first mention."""
        asked = list(dict.fromkeys(position for position in top if position >= 0))
        missing = [position for position in asked if position not in self.recent]
        unused = [position for position in self.recent if position not in asked]
        hit = [position for position in self.recent if position in asked]
        assert len(missing) <= len(unused), "hot >= distinct(top-k)"
        self.recent = unused[len(missing) :] + hit + missing
        return missing


@st.composite
def steps(draw: Any) -> tuple[int, int, int, list[Any]]:
    """Hot places, rows, K, and steps of (positions, lengths, rows, real)."""
    top, requests = draw(st.integers(1, 90)), draw(st.integers(1, 4))
    hot = draw(st.integers(top, 160))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    listed = []
    for _ in range(draw(st.integers(1, 6))):
        positions = rng.integers(-1, rng.integers(1, LENGTH), (requests, top)).astype(np.int32)
        listed.append(
            (positions, rng.permutation(requests + 1)[:requests].astype(np.int32), rng.integers(0, requests + 1))
        )
    return hot, requests, top, listed


@PROPERTY
@given(steps(), st.booleans(), st.booleans())
def test_every_step_is_exact_lru(
    lib: ctypes.CDLL, case: tuple[int, int, int, list[Any]], wide: bool, native: bool
) -> None:
    hot_count, requests, top, listed = case
    hot = buffers(requests + 1, hot_count, np.random.default_rng(1))
    models = [Request(hot_count) for _ in range(requests + 1)]
    plan, lengths = plan_for(requests, top), np.full(requests, LENGTH, np.int32)
    totals, tally = SwapCounts(refused=np.zeros(requests + 1, np.int32), tally=np.zeros(2, np.int64)), [0, 0]
    for positions, rows, real in listed:
        padded = np.array([real], np.int32)
        if native:
            on_host(lib, hot, (positions, lengths, rows), plan, padded, wide=wide, totals=totals)
        else:
            swap_plan(hot, positions, lengths, rows, plan, real=padded, totals=totals)
        copies: list[tuple[int, int]] = []
        for request, row in enumerate(rows[:real].tolist()):
            missing = models[row].step(positions[request].tolist())
            tally[0] += len(set(positions[request].tolist()) - {-1}) - len(missing)
            tally[1] += len(missing)
            places = {position: place for place, position in enumerate(hot.held[row].tolist())}
            copies += [(hot.host_slots[row, p], hot.hot_slots[row, places[p]]) for p in missing]
            recent = [None if hot.held[row, place] < 0 else int(hot.held[row, place]) for place in hot.order[row]]
            assert recent == models[row].recent
            found = [hot.hot_slots[row, places[p]] if p >= 0 else -1 for p in positions[request].tolist()]
            assert plan.slots[request].tolist() == found
        assert (plan.slots[real:] == -1).all()
        assert plan.counts.tolist() == [len(copies), 0, 0, 0, 0]
        given_copies = list(zip(plan.sources[: len(copies)], plan.targets[: len(copies)], strict=True))
        assert given_copies == copies
        assert totals.tally.tolist() == tally
        assert not totals.refused.any()


def pool(slots: int, planes: int, content: np.ndarray[Any, Any]) -> Pool:
    """Rows of 24 bytes, the planes of a slot side by side."""
    rows = tuple(
        Plane(index, "latent", "uint8", 0, 1, 24 * index, 24 * planes, 24 * planes, 24) for index in range(planes)
    )
    return Pool(layout=Layout(rows, 1, slots), address=content.ctypes.data)


@PROPERTY
@given(steps(), st.integers(1, 3), st.booleans())
def test_what_is_brought_and_what_is_listed_is_all_that_is_missing(
    lib: ctypes.CDLL, case: tuple[int, int, int, list[Any]], planes: int, wide: bool
) -> None:
    hot_count, requests, top, listed = case
    hot, plain = (buffers(requests + 1, hot_count, np.random.default_rng(1)) for _ in range(2))
    arena = np.random.default_rng(2).integers(0, 256, ((requests + 1) * LENGTH, 24 * planes), np.uint8)
    device = np.zeros(((requests + 1) * hot_count, 24 * planes), np.uint8)
    pools = pool(len(device), planes, device), pool(len(arena), planes, arena)
    plan, expected, lengths = plan_for(requests, top), plan_for(requests, top), np.full(requests, LENGTH, np.int32)
    for positions, rows, real in listed:
        given, padded = (positions, lengths, rows), np.array([real], np.int32)
        on_host(lib, hot, given, plan, padded, wide=wide, bring=pools)
        on_host(lib, plain, given, expected, padded, wide=wide)
        assert np.array_equal(plan.slots, expected.slots)
        assert np.array_equal(hot.held, plain.held)
        assert np.array_equal(hot.order, plain.order)
        left, missing = int(plan.counts[0]), int(expected.counts[0])
        copies = set(zip(expected.sources[:missing].tolist(), expected.targets[:missing].tolist(), strict=True))
        brought = copies - set(zip(plan.sources[:left].tolist(), plan.targets[:left].tolist(), strict=True))
        assert len(brought) == missing - left
        for source, target in brought:
            assert np.array_equal(device[target], arena[source])
            device[target] = 0
        assert plan.counts.tolist() == [left, 0, 0, 0, 0]
        kv_copy(pools[0], pools[1], plan.targets[:left], plan.sources[:left], left)
        for source, target in brought:
            assert not device[target].any(), "it was left out of the list"
            device[target] = arena[source]
        rows_of = np.repeat(np.arange(requests + 1), hot_count)
        held = hot.held.reshape(-1) >= 0
        wanted = arena[hot.host_slots[rows_of[held], hot.held.reshape(-1)[held]]]
        assert np.array_equal(device[hot.hot_slots.reshape(-1)[held]], wanted)


def test_a_request_that_lacks_little_is_left_nothing_to_list(lib: ctypes.CDLL) -> None:
    hot, rng = buffers(2, 64, np.random.default_rng(0)), np.random.default_rng(3)
    arena, device = rng.integers(0, 256, (2 * LENGTH, 24), np.uint8), np.zeros((128, 24), np.uint8)
    pools, rows = (pool(128, 1, device), pool(2 * LENGTH, 1, arena)), np.array([1, 0], np.int32)
    positions = np.full((2, 64), -1, np.int32)
    positions[0, 5], positions[1, :40] = 77, np.arange(40)
    plan = plan_for(2, 64)
    on_host(lib, hot, (positions, np.full(2, LENGTH, np.int32), rows), plan, None, bring=pools)
    assert np.array_equal(device[plan.slots[0, 5]], arena[hot.host_slots[1, 77]])
    assert plan.counts.tolist() == [40, 0, 0, 0, 0], "of the request that lacks more than it has warps"
    assert plan.sources[:40].tolist() == hot.host_slots[0, :40].tolist()


@pytest.mark.parametrize("wrong", ["source", "target"])
def test_a_brought_row_outside_its_pool_is_left_out(lib: ctypes.CDLL, wrong: str) -> None:
    hot = buffers(1, 64, np.random.default_rng(0))
    arena, device = np.full((LENGTH, 24), 7, np.uint8), np.zeros((64, 24), np.uint8)
    pools = pool(64, 1, device), pool(LENGTH, 1, arena)
    if wrong == "source":
        hot.host_slots[0, 9] = LENGTH
    else:
        hot.hot_slots[0, 0] = -1
    positions, row = np.array([[9]], np.int32), np.zeros(1, np.int32)
    plan = plan_for(1, 1)
    on_host(lib, hot, (positions, np.array([LENGTH], np.int32), row), plan, None, bring=pools)
    assert plan.counts.tolist() == [0, 0, 0, 0, 0]
    assert not device.any()


@pytest.mark.parametrize("native", [False, True])
def test_a_short_request_has_every_position_in_its_own_place(lib: ctypes.CDLL, native: bool) -> None:
    hot = buffers(1, 16, np.random.default_rng(0))
    positions, lengths = np.array([[5, -1, 15, 5, 16]], np.int32), np.array([16], np.int32)
    plan, row = plan_for(1, 5), np.zeros(1, np.int32)
    before = hot.order.copy()
    if native:
        on_host(lib, hot, (positions, lengths, row), plan, None)
    else:
        swap_plan(hot, positions, lengths, row, plan)
    places = hot.hot_slots[0]
    assert plan.slots.tolist() == [[places[5], -1, places[15], places[5], -1]]
    assert plan.counts.tolist() == [0, 1, 0, 0, 0], "a position outside the request is refused"
    assert np.array_equal(hot.order, before)


@pytest.mark.parametrize("native", [False, True])
def test_more_positions_than_places_are_refused_not_written_elsewhere(lib: ctypes.CDLL, native: bool) -> None:
    hot = buffers(1, 4, np.random.default_rng(0))
    positions, lengths, row = np.arange(6, dtype=np.int32)[None], np.array([LENGTH], np.int32), np.zeros(1, np.int32)
    plan = plan_for(1, 6)
    if native:
        on_host(lib, hot, (positions, lengths, row), plan, None)
    else:
        swap_plan(hot, positions, lengths, row, plan)
    assert plan.slots[0].tolist() == [*hot.hot_slots[0], -1, -1]
    assert plan.counts[:2].tolist() == [4, 2]


@pytest.mark.parametrize("native", [False, True])
def test_what_is_refused_is_totals_of_the_row_it_belongs_to(lib: ctypes.CDLL, native: bool) -> None:
    hot = buffers(4, 8, np.random.default_rng(0))
    hot.host_slots[1, 30:] = -1
    hot.hot_slots[2, 3:] = -1
    refused = np.zeros(5, np.int32)
    totals = SwapCounts(refused=refused[:4], tally=np.zeros(2, np.int64))
    #               outside twice     no arena slot     no place         nobody's row     a row that is none
    rows, lengths = [0, 1, 2, 4, -1], [20, LENGTH, 6, 20, 20]
    positions = [[20, 1, 1 << 30], [29, 30, -1], [2, 3, 4], [1, 2, 3], [1, 2, 3]]
    given = tuple(np.array(each, np.int32) for each in (positions, lengths, rows))
    before = [hot.held[3].copy(), hot.order[3].copy()]
    plan = plan_for(5, 3)
    if native:
        on_host(lib, hot, given, plan, None, totals=totals)
    else:
        swap_plan(hot, *given, plan, totals=totals)
    assert refused.tolist() == [2, 1, 2, 0, 0]
    assert (plan.slots < 0).tolist() == [[1, 0, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert plan.counts[:2].tolist() == [3, 4]
    assert sorted(plan.sources[:3].tolist()) == sorted([-1, hot.host_slots[0, 1], hot.host_slots[1, 29]])
    assert np.array_equal(hot.held[3], before[0])
    assert np.array_equal(hot.order[3], before[1])


@pytest.mark.parametrize("native", [False, True])
def test_no_request_is_longer_than_the_table_of_its_slots(lib: ctypes.CDLL, native: bool) -> None:
    hot = buffers(2, 8, np.random.default_rng(0))
    given = tuple(np.array(each, np.int32) for each in ([[LENGTH, LENGTH - 1]], [1 << 30], [1]))
    totals = SwapCounts(refused=np.zeros(2, np.int32), tally=np.zeros(2, np.int64))
    plan = plan_for(1, 2)
    if native:
        on_host(lib, hot, given, plan, None, totals=totals)
    else:
        swap_plan(hot, *given, plan, totals=totals)
    assert totals.refused.tolist() == [0, 1]
    assert plan.counts[:2].tolist() == [1, 1]
    assert plan.sources[0] == hot.host_slots[1, LENGTH - 1]


@pytest.mark.parametrize("native", [False, True])
def test_the_newest_token_goes_to_its_place_or_to_the_slot_of_its_request(lib: ctypes.CDLL, native: bool) -> None:
    hot, own = buffers(4, 8, np.random.default_rng(0)), np.array([100, 101, -1, 103], np.int32)
    hot.hot_slots[3, 5:] = -1
    hot.host_slots[1, 30:] = -1
    #                 place         own slots    none left in the arena, on the device, in the table; nobody's; padding
    rows, positions = [0, 0, 1, 1, 2, 3, 0, 0, 4, -1, 1], [0, 7, 8, 30, 9, 5, LENGTH, -1, 2, 2, 3]
    given = np.array(positions, np.int32), np.array(rows, np.int32)
    device, host, refused = np.full(11, -7, np.int32), np.full(11, -7, np.int32), np.zeros(5, np.int32)
    out, real = {"device": device, "host": host, "refused": refused[:4], "spare": 55}, np.array([10], np.int32)
    if native:
        argument = newest_argument_of(hot, own, *given, *out.values(), real)
        lib.newest_on_host(ctypes.byref(argument), 32)
    else:
        newest_slots(hot, own, *given, **out, real=real)
    assert device.tolist() == [*hot.hot_slots[0, [0, 7]], 101, *[55] * 8]
    assert host.tolist() == [*hot.host_slots[0, [0, 7]], hot.host_slots[1, 8], *[-1] * 8]
    assert refused.tolist() == [2, 1, 1, 1, 0]


@pytest.mark.parametrize("native", [False, True])
def test_a_row_becomes_a_request_s_and_nobody_s_again(lib: ctypes.CDLL, native: bool) -> None:
    names = "host_slots", "hot_slots", "own_slots", "held", "order"
    tables = HotTables(None, groups=2, rows=3, hot=6, tokens_max=9)
    tables.refused[:] = 7
    for name in names:
        getattr(tables, name)[:] = -5

    def become(sent: list[int], host_count: int, own: int, direct: bool) -> None:
        slots, places = np.array(sent, np.int32), len(sent) - host_count
        if native:
            asked = tables.argument
            asked.row, asked.sent, asked.host_count, asked.places = 1, slots.ctypes.data, host_count, places
            asked.own, asked.direct = own, direct
            lib.hot_row_on_host(ctypes.byref(asked), 5)
        else:
            tables.assign(1, slots, host_count=host_count, places=places, own_slot=own, direct=direct)

    become([11, 12, 13, 14, 15, 41, 42, 43, 44], 5, 99, True)
    assert tables.host_slots[1].tolist() == [11, 12, 13, 14, 15, -1, -1, -1, -1]
    assert tables.hot_slots[1].tolist() == [41, 42, 43, 44, -1, -1]
    assert tables.held[:, 1].tolist() == [[0, 1, 2, 3, -1, -1]] * 2
    assert tables.order[:, 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert (tables.own_slots[1], tables.refused[1]) == (99, 0)
    become([*range(20, 27), *range(40, 46)], 7, 98, False)
    assert tables.host_slots[1].tolist() == [*range(20, 27), -1, -1]
    assert tables.hot_slots[1].tolist() == [*range(40, 46)]
    assert (tables.held[:, 1] == -1).all()
    tables.refused[1] = 3
    become([], 0, -1, False)
    for name in ("host_slots", "hot_slots", "own_slots"):
        assert (getattr(tables, name)[1] == -1).all()
    assert tables.refused.tolist() == [7, 3, 7], "what was refused can still be read"
    for name in names:
        others = getattr(tables, name)[:, [0, 2]] if name in ("held", "order") else getattr(tables, name)[[0, 2]]
        assert (others == -5).all(), name


def test_the_copies_of_a_plan_bring_what_was_asked_for() -> None:
    rng = np.random.default_rng(5)
    hot = buffers(2, 24, rng)
    pools = [
        Tensors(name=name, model=mla(), page_size=1, slots=slots)
        for name, slots in (("page_first", 2 * LENGTH), ("layer_first", 48))
    ]
    pools[0].fill(np.arange(2 * LENGTH))
    arena, device = (Pool(layout=pool.layout, address=pool.memory.ctypes.data) for pool in pools)
    plan, rows, lengths = plan_for(2, 16), np.array([1, 0], np.int32), np.full(2, LENGTH, np.int32)
    for _ in range(12):
        positions = rng.integers(0, 40, (2, 16)).astype(np.int32)
        swap_plan(hot, positions, lengths, rows, plan)
        count = int(plan.counts[0])
        kv_copy(device, arena, plan.targets[:count], plan.sources[:count], count)
        for request, row in enumerate(rows):
            wanted = pools[0].read("latent", 1, 0, hot.host_slots[row, positions[request]].astype(np.int64))
            assert np.array_equal(pools[1].read("latent", 1, 0, plan.slots[request].astype(np.int64)), wanted)


@pytest.mark.parametrize(
    ("top", "places"), [(2_048, 4_096), (2_048, 8_190), (4_000, 6_000), (4_096, 5_000), (1, 16_000)]
)
def test_wide_steps_fit_a_block_and_its_shared_memory(lib: ctypes.CDLL, top: int, places: int) -> None:
    rng, length = np.random.default_rng(top), 20_000
    hot = buffers(1, places, rng)
    object.__setattr__(hot, "host_slots", np.arange(length, dtype=np.int32)[None])
    mine = HotBuffers(**{name: getattr(hot, name).copy() for name in HotBuffers.__dataclass_fields__})
    plans, row = [plan_for(1, top) for _ in range(2)], np.zeros(1, np.int32)
    for _ in range(3):
        positions = rng.permutation(length)[None, :top].astype(np.int32)
        given = positions, np.array([length], np.int32), row
        assert shape_of(argument_of(mine, *given, plans[0], None)).shared_bytes <= 227 << 10
        on_host(lib, mine, given, plans[0], None)
        swap_plan(hot, *given, plans[1])
        assert np.array_equal(mine.order, hot.order)
        assert np.array_equal(plans[0].slots, plans[1].slots)


def test_arguments_are_as_long_as_the_kernels_own(lib: ctypes.CDLL) -> None:
    assert lib.sizes_of(4) == ctypes.sizeof(SwapArgument)
    assert lib.sizes_of(5) == ctypes.sizeof(NewestArgument)
    assert lib.sizes_of(6) == ctypes.sizeof(HotRowArgument)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hot, plan = buffers(1, 16, np.random.default_rng(0)), plan_for(1, 4)
    positions, one = np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
    with pytest.raises(LocalProtocolError, match=r"plan: for \(1, 4\), not for 1 requests of 5"):
        swap_plan(hot, np.zeros((1, 5), np.int32), one, one, plan)
    with pytest.raises(LocalProtocolError, match="hot: 0 is not"):
        swap_plan(buffers(1, 0, np.random.default_rng(0)), positions, one, one, plan)
    with pytest.raises(LocalProtocolError, match="hot: 16384 and top 4096 take"):
        swap_plan(buffers(1, 16_384, np.random.default_rng(0)), np.zeros((1, 4_096), np.int32), one, one, plan)
    with pytest.raises(LocalProtocolError, match="lengths: <i8, not contiguous int32"):
        argument_of(hot, positions, one.astype(np.int64), one, plan, None)

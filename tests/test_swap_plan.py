"""swap_plan without a card: the kernel's phases as host code, its CPU path, and a model that knows neither."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.swap import HotBuffers, SwapArgument, SwapPlan, argument_of, shape_of, swap_plan

from . import kernels_host
from .layout_tensors import Pool as Tensors
from .layout_tensors import mla

PROPERTY = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
LENGTH = 200


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernels_host.library(tmp_path_factory.mktemp("kernels"))


def buffers(rows: int, hot: int, rng: np.random.Generator) -> HotBuffers:
    """Empty ones; each place's and each position's slot is anywhere."""
    return HotBuffers(
        held=np.full((rows, hot), -1, np.int32),
        order=np.tile(np.arange(hot, dtype=np.int32), (rows, 1)),
        hot_slots=rng.permutation(rows * hot).astype(np.int32).reshape(rows, hot),
        host_slots=rng.permutation(rows * LENGTH).astype(np.int32).reshape(rows, LENGTH),
    )


def plan_for(requests: int, top: int) -> SwapPlan:
    lists = [np.full(requests * top, -7, np.int32) for _ in range(2)]
    slots, counts = np.full((requests, top), -7, np.int32), np.zeros(5, np.int32)
    return SwapPlan(slots=slots, sources=lists[0], targets=lists[1], counts=counts)


def on_host(
    lib: ctypes.CDLL, hot: HotBuffers, given: tuple[Any, ...], plan: SwapPlan, real: Any, *, wide: bool = False
) -> None:
    argument = argument_of(hot, *given, plan, real)
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
    for positions, rows, real in listed:
        padded = np.array([real], np.int32)
        if native:
            on_host(lib, hot, (positions, lengths, rows), plan, padded, wide=wide)
        else:
            swap_plan(hot, positions, lengths, rows, plan, real=padded)
        copies: list[tuple[int, int]] = []
        for request, row in enumerate(rows[:real].tolist()):
            missing = models[row].step(positions[request].tolist())
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


def test_the_copies_of_a_plan_bring_what_was_asked_for() -> None:
    rng = np.random.default_rng(5)
    hot = buffers(2, 24, rng)
    pools = [
        Tensors(name=name, model=mla(), page_size=1, slots=slots)
        for name, slots in (("page_first", 2 * LENGTH), ("layer_first", 48))
    ]
    pools[0].fill(np.arange(2 * LENGTH))
    arena, device = (Pool(layout=each.layout, address=each.memory.ctypes.data) for each in pools)
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

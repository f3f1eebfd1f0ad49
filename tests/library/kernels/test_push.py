"""push without a GPU, by every backend: against the tensors' own indexing, with everything around the rows watched.

GPUs are played by this process: their launches are the kernels' own headers, and their streams run in any order that
events allow.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LocalProtocolError, WorldError
from pdtransfer.kernels import kv_copy
from pdtransfer.kernels import push as pushing
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.kernels.pools import Progress, State
from pdtransfer.kernels.push import PushLoad, choose, push
from pdtransfer.kernels.ring import blocks, lanes
from tests.support.effort import some
from tests.support.gpu_on_host import GpuOnHost
from tests.support.layout_tensors import CANARY, Bytes, c4, dsa_index, mha, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.slot_copies import copies, filled, pool_of, slots_of, wanted

PROPERTY = settings(
    max_examples=some(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SLOT_BYTES = 6_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ring and runs to suit small pools; shapes and lanes are kept, so nobody else's."""
    for module in (lanes, pushing):
        monkeypatch.setattr(module, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 1)
    yield
    lanes._idle.clear()


@pytest.fixture(params=["c", "python"])
def here(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> GpuOnHost:
    """GPU 0, whose work C queues, or Python."""
    if request.param == "python":
        monkeypatch.setattr(lanes, "native", lambda: lanes.NativeLanes("none", None))
    elif lanes.native().queue is None:
        pytest.skip("no C compiler")
    return carded(lib, monkeypatch, 0)


def carded(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int) -> GpuOnHost:
    gpu = GpuOnHost(lib, seed)
    for module in (kv_copy, pushing):
        monkeypatch.setattr(module, "gpu_at", lambda _: gpu)
    monkeypatch.setattr("pdtransfer.kernels.gpu.gpu_at", lambda _: gpu)
    return gpu


def sides() -> tuple[Tensors, Tensors]:
    return filled("layer_first", mla(), 4, 64, content=True), filled("page_first", mla(), 4, 64, content=False)


def landed(here: GpuOnHost, target: Tensors) -> Bytes:
    """The target's bytes, once all that was asked for has ended."""
    here.finish()
    return target.memory


def pushed(
    source: Tensors, target: Tensors, target_slots: Any, source_slots: Any, rows: int, *, fetch: bool,
    device: int | None, **how: Any,
) -> None:  # fmt: skip
    pools = pool_of(target, device=device, host=not fetch), pool_of(source, device=device, host=fetch)
    push(*pools, target_slots, source_slots, rows, **how)


@PROPERTY
@given(
    copies(),
    st.sampled_from(["ring", "ring", "ring", "direct", "strided", "strided", "kernel"]),
    st.booleans(),
    st.sampled_from([None, 1, 2, 3, 4]),
    st.booleans(),
)
def test_every_backend_carries_every_layout_into_every_other_and_touches_nothing_else(
    lib: ctypes.CDLL, copy: tuple[Tensors, Tensors, Any, Any, int], backend: str, fetch: bool, seed: int | None,
    by_python: bool,
) -> None:  # fmt: skip
    source, target, source_slots, target_slots, rows = copy
    source.fill(np.arange(source.slots))
    right = wanted(source, target, slots_of(source_slots, source, rows), slots_of(target_slots, target, rows))
    lanes._idle.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if by_python:
            monkeypatch.setattr(lanes, "native", lambda: lanes.NativeLanes("none", None))
        made = carded(lib, monkeypatch, seed) if seed is not None else None
        progress = Progress(None if made is None else 0)
        how = {"progress": progress, "backend": backend, "fetch": fetch, "device": None if made is None else 0}
        refused = ""
        try:
            pushed(source, target, target_slots, source_slots, rows, **how)
        except LocalProtocolError as error:
            refused = str(error)
        if refused:
            assert (backend, "long enough" in refused) == ("ring", True)
            assert (target.memory == CANARY).all()
            return
        if made is not None:
            while progress.state is State.RUNNING:
                assert made.step(), "nothing will end it"
            assert not any(table.users for table in made.tables._tables.values()), (
                "a table that nobody uses is taken for used"
            )
    assert progress.state is State.COMPLETE
    assert np.array_equal(target.memory, right)


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.grid
@pytest.mark.parametrize("fetch", [False, True])
@pytest.mark.parametrize(("near", "far"), [(a, b) for a in LAYOUTS[:3] for b in LAYOUTS])
@pytest.mark.parametrize("model", [mha(), mla(), dsa_index(), c4()], ids=["mha", "mla", "dsa", "c4"])
def test_long_runs_of_every_layout_go_through_the_ring(
    here: GpuOnHost, model: Any, near: str, far: str, fetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.page_align is not None and far == "page_head":
        pytest.skip("pages that keep their parts apart have no heads")
    for module in (lanes, pushing):
        monkeypatch.setattr(module, "SLOT_BYTES", 80_000)
    page_size = 64 if model == c4() else 8
    theirs = filled(near, model, page_size, 12, content=not fetch)
    ours = filled(far, model, page_size, 12, content=fetch)
    runs = np.concatenate([np.arange(5, 5 + 6 * page_size), np.arange(8 * page_size, 9 * page_size)])
    anywhere = np.random.default_rng(0).permutation(theirs.slots)[: len(runs)]
    source, target = (ours, theirs) if fetch else (theirs, ours)
    slots = (runs, anywhere) if fetch else (anywhere, runs)
    right = wanted(source, target, *slots)
    progress = Progress(0)
    pushed(source, target, slots[1], slots[0], len(runs), fetch=fetch, device=0, backend="ring", progress=progress)
    assert np.array_equal(landed(here, target), right)
    assert progress.state is State.COMPLETE
    carried = sum(count for _, _, count in here.copies)
    pairing = kv_copy.pairing_of(source.layout, target.layout)
    by_row = (pairing.source_page_size if fetch else pairing.target_page_size) == 1
    whole = len(runs) if by_row else 6 * page_size
    assert carried == whole * pairing.row_bytes, "the copy engine has all but what lies in parts of pages"


def test_a_run_is_one_transfer_a_chunk(here: GpuOnHost) -> None:
    source, target = sides()
    pushed(source, target, range(256), np.arange(256)[::-1].copy(), 256, fetch=False, device=0, backend="ring")
    here.finish()
    rows = [count // (3 * 1_152) for _, _, count in here.copies]
    assert rows == [1] * 256, "a slot holds one row of 3,456 bytes"


@pytest.mark.parametrize("backend", ["direct", "strided", "ring"])
def test_no_transfer_crosses_two_registrations(here: GpuOnHost, backend: str) -> None:
    source, target = sides()
    starts = source.memory.ctypes.data, target.memory.ctypes.data
    here.borders = np.sort([start + at for start in starts for at in (0, 5_000, 5_001, 123_456, 10_000_000)])
    right = wanted(source, target, np.arange(256), np.arange(256))
    pushed(source, target, range(256), range(256), 256, fetch=False, device=0, backend=backend)
    assert np.array_equal(landed(here, target), right)
    for copied in here.copies:
        for start in copied[:2]:
            inside = (here.borders > start) & (here.borders < start + copied[2])
            assert not inside.any()
    for start, byte_count in here.extents:
        assert not ((here.borders > start) & (here.borders < start + byte_count)).any()
    assert bool(here.extents) == (backend == "strided")


@pytest.mark.parametrize("borders", [[], [1_000], [1_004], [1_010], [1_013], [1_000, 1_020, 1_021, 1_100], [64, 72]])
def test_rows_are_cut_at_borders_and_one_with_a_border_in_it_goes_in_pieces(borders: list[int]) -> None:
    runs, strides = np.array([(50, 1_000, 8), (0, 3_000, 5)]), np.array([(9, 12, 7), (5, 5, 1)])
    parts, spacing, origins = lanes.cut(runs, strides, np.array(borders, np.int64))
    moved = [
        [
            (source + row * theirs + index, target + row * ours + index)
            for (source, target, width), (theirs, ours, rows), of in zip(
                table.tolist(), steps.tolist(), numbers, strict=True
            )
            for row in range(rows)
            for index in range(width)
            if of == number
        ]
        for table, steps, numbers in ((runs, strides, [0, 1]), (parts, spacing, origins.tolist()))
        for number in range(2)
    ]
    assert sorted(moved[0]) == sorted(moved[2])
    assert moved[1] == moved[3]
    assert (np.diff(origins) >= 0).all()
    for (source, target, width), (theirs, ours, rows) in zip(parts.tolist(), spacing.tolist(), strict=True):
        for start, step in ((source, theirs), (target, ours)):
            assert not any(start < border < start + step * (rows - 1) + width for border in borders)
    assert len(parts) <= 2 + 3 * len(borders)


def test_rows_are_cut_at_thousands_of_borders() -> None:
    rows, row, stride = 5_000, 8, 64
    runs, strides = np.array([(0, 1 << 20, row)]), np.array([(row, stride, rows)])
    parts, _, _ = lanes.cut(runs, strides, (1 << 20) + stride * np.arange(rows, dtype=np.int64))
    assert parts.tolist() == [[row * n, (1 << 20) + stride * n, row] for n in range(rows)]


def test_runs_are_cut_at_borders_of_either_side_and_nowhere_else() -> None:
    runs = np.array([(0, 1_000, 100), (500, 2_000, 50), (900, 50, 10)])
    parts, _, origins = lanes.cut(runs, None, np.array([0, 40, 500, 1_010, 1_050, 2_050]))
    expected = [(0, 1_000, 10), (10, 1_010, 30), (40, 1_040, 10), (50, 1_050, 50), (500, 2_000, 50), (900, 50, 10)]
    assert list(map(tuple, parts.tolist())) == expected
    assert origins.tolist() == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("backend", ["direct", "ring"])
@pytest.mark.parametrize("device", [None, 0])
def test_what_is_cancelled_before_it_starts_writes_nothing_and_reports_it(
    here: GpuOnHost, backend: str, device: int | None
) -> None:
    source, target = sides()
    progress, cancel = Progress(device), CancelWord()
    cancel.set()
    how = {"fetch": False, "device": device, "backend": backend, "progress": progress, "cancel": cancel}
    pushed(source, target, range(256), range(256), 256, **how)
    here.finish()
    assert progress.state is State.CANCELLED
    assert (target.memory == CANARY).all()


@pytest.mark.parametrize("backend", ["direct", "ring"])
def test_cancel_stops_what_the_lanes_have_not_begun_and_the_end_comes_after_what_they_have(
    here: GpuOnHost, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    source, target = sides()
    progress, cancel, queued = Progress(0), CancelWord(), 0
    copy = here.copy

    def counting(*run: int) -> None:
        nonlocal queued
        queued += 1
        if queued == 40:
            cancel.set()
        copy(*run)

    monkeypatch.setattr(here, "copy", counting)
    how = {"fetch": False, "device": 0, "backend": backend, "progress": progress, "cancel": cancel}
    pushed(source, target, range(256), range(256), 256, **how)
    while progress.state is State.RUNNING:
        assert here.step()
    assert progress.state is State.CANCELLED
    assert len(here.copies) == queued < 256
    after = target.memory.copy()
    assert np.array_equal(landed(here, target), after)


def test_no_more_works_are_pending_than_may_be(here: GpuOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = sides()
    ahead, launch = [], here.launch

    def counting(*launched: Any, **how: Any) -> None:
        ahead.append(here.launches - len(here.copies))
        launch(*launched, **how)

    monkeypatch.setattr(here, "launch", counting)
    pushed(source, target, range(256), range(256), 256, fetch=False, device=0, backend="ring")
    assert 0 < max(ahead) < lanes.EVENTS + 1


@pytest.mark.parametrize("seed", range(6))
def test_pushes_of_several_streams_share_a_ring_and_none_reads_what_another_put_there(
    here: GpuOnHost, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(here, "_random", random.Random(seed))
    source, target = sides()
    back = filled("layer_first", mla(), 4, 64, content=False)
    right = wanted(source, target, np.arange(200), np.arange(200))
    _, written = sides()
    written.memory[:] = right
    right_back = wanted(written, back, np.arange(3), np.arange(3))
    streams = [here.stream() for _ in range(3)]
    for turn, first in enumerate(range(0, 200, 20)):
        rows, backend = range(first, first + 20), ("ring", "ring", "direct")[turn % 3]
        pushed(source, target, rows, rows, 20, fetch=False, device=0, backend=backend, stream=streams[turn % 3])
        if turn == 0:
            here.synchronise(streams[0])
            pushed(target, back, range(3), range(3), 3, fetch=True, device=0, backend="ring", stream=streams[1])
    assert np.array_equal(landed(here, target), right)
    assert np.array_equal(back.memory, right_back)


def test_uploads_are_not_overwritten_before_the_card_has_them(here: GpuOnHost) -> None:
    source, target = sides()
    order = np.random.default_rng(0).permutation(256)
    right = wanted(source, target, order, np.arange(256))
    stream = here.stream()
    for first in range(0, 256, 8):
        rows = range(first, first + 8)
        pushed(source, target, rows, order[first : first + 8], 8, fetch=False, device=0, backend="ring", stream=stream)
    assert np.array_equal(landed(here, target), right)


@pytest.mark.parametrize("backend", ["kernel", "ring"])
def test_tables_of_copies_that_are_under_way_make_no_place_for_others(here: GpuOnHost, backend: str) -> None:
    """There is place for two; nobody waits for the GPU before the last copy is queued."""
    kinds = [
        tuple(filled(name, mha(), 4, 64, content=not index) for index, name in enumerate(("layer_first", far)))
        for far in LAYOUTS
    ]
    rows = np.arange(32), np.arange(64, 96)
    streams = [0, here.stream()]
    for index, (source, target) in enumerate(kinds):
        pushed(source, target, *rows, 32, fetch=False, device=0, backend=backend, stream=streams[index % 2])
    held = here.tables._tables
    assert len(held) > 2
    here.finish()
    for source, target in kinds:
        assert np.array_equal(target.memory, wanted(source, target, rows[1], rows[0]))
    source, target = kinds[0]
    pushed(source, target, *rows, 32, fetch=False, device=0, backend=backend)
    here.tables.acquire("new", np.zeros(1, np.int64))
    assert len(held) == 2
    assert np.array_equal(landed(here, target), wanted(source, target, rows[1], rows[0]))


@pytest.mark.parametrize("what", ["launch", "copy"])
def test_where_the_card_refuses_nothing_is_pending_once_the_caller_gets_the_error(
    here: GpuOnHost, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source, target = sides()
    progress, calls, refuse = Progress(0), 0, here._refuse

    def later(name: str) -> None:
        nonlocal calls
        calls += 1
        here.refuses = what if calls > 20 else None
        refuse(name)

    monkeypatch.setattr(here, "_refuse", later)
    with pytest.raises(WorldError, match="refused"):
        pushed(source, target, range(256), range(256), 256, fetch=False, device=0, backend="ring", progress=progress)
    assert progress.state is State.CANCELLED
    after = target.memory.copy()
    assert np.array_equal(landed(here, target), after)
    here.refuses, calls = None, -1_000
    pushed(source, target, range(256), range(256), 256, fetch=False, device=0, backend="ring", progress=progress)
    here.finish()
    assert progress.state is State.COMPLETE


class Known:
    """Slots in a GPU's memory."""

    def __init__(self, slots: Any) -> None:
        self._slots = np.asarray(slots)
        self.__cuda_array_interface__ = self._slots.__array_interface__


@pytest.mark.parametrize("backend", ["direct", "ring"])
def test_rows_that_only_the_card_knows_are_the_kernels_alone(here: GpuOnHost, backend: str) -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    with pytest.raises(LocalProtocolError, match="which only the backend kernel can read"):
        pushed(source, target, Known([3, 4]), range(2), 2, fetch=False, device=0, backend=backend)
    right = wanted(source, target, [0, 1], [3, 4])
    pushed(source, target, Known([3, 4]), range(2), 2, fetch=False, device=0)
    assert np.array_equal(landed(here, target), right)
    assert here.launches == 1


def test_a_ring_reports_why_it_cannot(here: GpuOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 5_000)
    source, target = (filled("page_first", mla(), 4, 8, content=content) for content in (True, False))
    with pytest.raises(LocalProtocolError, match="no rows of the target lie in runs that are long enough"):
        pushed(source, target, np.arange(0, 16, 2), range(8), 8, fetch=False, device=0, backend="ring")
    pools = (pool_of(each, device=0) for each in (target, source))
    with pytest.raises(LocalProtocolError, match="both pools are in the same memory"):
        push(next(pools), next(pools), range(8), range(8), 8, backend="ring")
    assert not here.launches


def test_progress_of_this_process_is_refused_for_a_card(here: GpuOnHost) -> None:
    source, target = (filled("page_first", mla(), 4, 8, content=content) for content in (True, False))
    with pytest.raises(LocalProtocolError, match="a GPU can't see these words"):
        pushed(source, target, range(8), range(8), 8, fetch=False, device=0, backend="direct", progress=Progress())
    assert not here.copies


def test_rows_of_the_host_may_be_fetched_more_than_once(here: GpuOnHost) -> None:
    source, target = filled("page_first", mla(), 4, 8, content=True), filled("layer_first", mla(), 4, 8, content=False)
    slots = np.array([5, 5, 7, 8, 0, 0, 1, 1, 8])
    right = wanted(source, target, slots, np.arange(9) + 3)
    pushed(source, target, range(3, 12), slots, 9, fetch=True, device=0, backend="ring")
    assert np.array_equal(landed(here, target), right)


@pytest.mark.parametrize("slots", [[0, 0, 2, 3], [4, 5, 6, 6]])
def test_a_row_that_is_fetched_twice_is_not_taken_for_the_next(here: GpuOnHost, slots: list[int]) -> None:
    source, target = filled("page_first", mla(), 4, 8, content=True), filled("layer_first", mla(), 4, 8, content=False)
    right = wanted(source, target, slots, np.arange(4))
    pushed(source, target, range(4), np.array(slots), 4, fetch=True, device=0, backend="ring")
    assert np.array_equal(landed(here, target), right)


# Narrow rows


@pytest.mark.parametrize("fetch", [False, True])
@pytest.mark.parametrize(("first", "rows", "launches"), [(0, 64, 1), (0, 70, 2), (5, 60, 2), (5, 11, 2)])
def test_whole_pages_with_narrow_rows_go_by_pages_and_the_rows_beside_them_one_by_one(
    here: GpuOnHost, fetch: bool, first: int, rows: int, launches: int
) -> None:
    """Scales are rows of 8 bytes: of the pages that lie anywhere, each is a piece of each kind."""
    source, target = filled("layer_first", c4(), 8, 16, content=True), filled("page_first", c4(), 8, 16, content=False)
    pages = np.random.default_rng(3).permutation(16)
    scattered = (pages[:, None] * 8 + np.arange(8)).reshape(-1)[first : first + rows]
    slots = (scattered, np.arange(first, first + rows))[:: -1 if fetch else 1]
    right = wanted(source, target, slots[1], slots[0])
    counted = [kv_copy.by_pages(kv_copy.check_copy(*_sides(source, target, fetch), *slots, rows))]
    assert counted[0] is not None
    assert [each and each.rows for each in counted[0]] == [
        rows // 8 * 8 if not first else (rows - 3) // 8 * 8,
        None if launches == 1 else rows - counted[0][0].rows,
    ]
    pushed(source, target, *slots, rows, fetch=fetch, device=0, backend="kernel")
    assert np.array_equal(landed(here, target), right)
    assert here.launches == launches


def _sides(source: Tensors, target: Tensors, fetch: bool) -> Any:
    return pool_of(target, device=0, host=not fetch), pool_of(source, device=0, host=fetch)


@pytest.mark.parametrize(
    ("model", "target_page", "slots"),
    [
        (c4(), 8, np.arange(1, 65)),  # their borders differ from the other side's
        (c4(), 4, np.arange(64)),  # pages of another size
        (c4(), 8, np.r_[0:8, 9:17, 24:72]),  # a page that is not whole
        (mla(), 8, np.arange(64)),  # rows that are wide enough
    ],
)
def test_other_rows_go_one_by_one(here: GpuOnHost, model: Any, target_page: int, slots: Any) -> None:
    source = filled("layer_first", model, 8, 16, content=True)
    target = filled("page_first", model, target_page, 128 // target_page, content=False)
    assert kv_copy.by_pages(kv_copy.check_copy(*_sides(source, target, False), slots, np.arange(64), 64)) is None
    right = wanted(source, target, np.arange(64), slots)
    pushed(source, target, slots, np.arange(64), 64, fetch=False, device=0, backend="kernel")
    assert np.array_equal(landed(here, target), right)
    assert here.launches == 1


# The choice

MIB = 1 << 20


@pytest.mark.parametrize(
    ("load", "backend"),
    [
        (PushLoad(7 * MIB, 1 * MIB, 7 * MIB), "kernel"),
        (PushLoad(8 * MIB, 1 * MIB, 8 * MIB), "direct"),
        (PushLoad(64 * MIB, 1_152, 64 * MIB), "ring"),
        (PushLoad(64 * MIB, 1_152, 32 * MIB), "kernel"),
        (PushLoad(11 * MIB, 1_152, 11 * MIB), "kernel"),
        (PushLoad(64 * MIB, 73_728, 0), "kernel"),
    ],
)
def test_the_choice_goes_by_bytes_and_runs(load: PushLoad, backend: str) -> None:
    assert choose(load) == backend


@pytest.mark.parametrize(
    ("source_name", "slots", "chosen"),
    [
        ("page_first", range(256), "direct"),
        ("layer_first", range(256), "ring"),
        ("layer_first", np.random.default_rng(0).permutation(512)[:256], "kernel"),
    ],
)
def test_auto_carries_by_what_was_chosen(
    here: GpuOnHost, monkeypatch: pytest.MonkeyPatch, source_name: str, slots: Any, chosen: str
) -> None:
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 30_000)
    for name, value in (("PLANNED_BYTES_MIN", 0), ("RING_BYTES_MIN", 0), ("DIRECT_RUN_BYTES_MIN", 200_000)):
        monkeypatch.setattr(pushing, name, value)
    source = filled(source_name, mla(), 4, 128, content=True)
    target = filled("page_first", mla(), 4, 128, content=False)
    right = wanted(source, target, np.arange(256), np.asarray(slots))
    pushed(source, target, slots, range(256), 256, fetch=False, device=0)
    assert np.array_equal(landed(here, target), right)
    assert {(False, True): "direct", (True, True): "ring", (True, False): "kernel"}[
        here.launches > 0, bool(here.copies)
    ] == chosen


def test_whoever_waits_for_several_events_gets_the_first_that_fires_or_is_called(here: GpuOnHost) -> None:
    called = ctypes.c_uint32()
    events, streams = [here.event() for _ in range(3)], [here.stream() for _ in range(3)]
    for event, stream in zip(events, streams, strict=True):
        here.record(event, stream)
    called.value = 1
    asked = here.passed
    here.passed = Mock(return_value=False)
    here._random.random = lambda: 0.0  # C's asking says that it is not ready
    assert lanes.wait_any(here, events, called) == (-1, "")
    called.value = 0
    here.passed, here._random.random = asked, lambda: 1.0
    here.synchronise(streams[1])
    at, failed = lanes.wait_any(here, [events[1]], called)
    assert (at, failed) == (0, "")
    here.passed, here._random.random = Mock(return_value=False), lambda: 0.0
    assert lanes.wait_any(here, events, called, time.monotonic_ns() + 1_000) == (-1, ""), "its time is over"


def test_whoever_has_waited_long_asks_less_often(here: GpuOnHost) -> None:
    """A nap never ends early, so under any load these pauses are at least as long."""
    asked: list[int] = []
    event = here.event()
    here.record(event, here.stream())

    def not_ready(*_: object) -> float:
        asked.append(time.monotonic_ns())
        return 0.0

    here.passed = here._random.random = not_ready  # asked by Python, and by C
    until_ns = time.monotonic_ns() + 200_000_000
    assert lanes.wait_any(here, [event], ctypes.c_uint32(), until_ns) == (-1, "")
    late = [ns for ns in asked if ns > until_ns - 100_000_000]
    assert len(late) > 1
    assert all(after - before > 100_000 for before, after in pairwise(late))

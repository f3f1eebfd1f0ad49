"""The kernels on a GPU, against the tensors' own indexing on the CPU: `make test-gpu`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.gpu import DeviceTables
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import PageSlots, PinnedCancel, Pool, Progress, State
from pdtransfer.layout.layout import Layout, Plane
from tests.support.layout_tensors import CANARY, Model, c4, dsa_index, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.on_card import GRID, LAYOUTS, OnCard, ended, two_memories
from tests.support.slot_copies import filled, wanted

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.fixture(params=["push", "fetch", "within"])
def places(request: pytest.FixtureRequest) -> Iterator[tuple[OnCard, OnCard]]:
    """Source and target: the GPU's memory to the host's, back, and within the GPU's."""
    yield from two_memories(request.param)


def copied(
    places: tuple[OnCard, OnCard], source: Tensors, target: Tensors, source_slots: Any, target_slots: Any, rows: int,
    count: Any = None, **how: Any,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """The target's whole memory after a launch."""
    pools = [
        Pool(layout=each.layout, address=place.put(each.memory), device=0, host=place.host)
        for each, place in zip((source, target), places, strict=True)
    ]
    kv_copy(pools[1], pools[0], target_slots, source_slots, rows if count is None else count, **how)
    return places[1].get(len(target.memory))


@pytest.mark.parametrize("pages", [1, 7, 129])
@pytest.mark.parametrize(("source_name", "target_name"), [(a, b) for a in LAYOUTS for b in LAYOUTS])
@pytest.mark.parametrize("model", [model for model, _ in GRID], ids=[name for _, name in GRID])
def test_rows_land_where_indexing_puts_them(
    places: tuple[OnCard, OnCard], model: Model, source_name: str, target_name: str, pages: int
) -> None:
    rng = np.random.default_rng(pages)
    source, target = (
        filled(source_name, model, 16, pages, content=True),
        filled(target_name, model, 16, pages, content=False),
    )
    rows = 16 * pages - (pages > 1) * 5
    ours, theirs = rng.permutation(source.slots)[:rows], rng.permutation(target.slots)[:rows].astype(np.int32)
    after = copied(places, source, target, torch.from_numpy(ours).cuda(), theirs, rows)
    assert np.array_equal(after, wanted(source, target, ours, theirs))


@pytest.mark.parametrize("name", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize(("model", "page_size"), [(dsa_index(), 64), (c4(), 64)], ids=["dsa", "c4"])
@pytest.mark.parametrize("by_pages", [False, True])
def test_pages_that_keep_their_parts_apart_land(
    places: tuple[OnCard, OnCard], model: Model, page_size: int, name: str, by_pages: bool
) -> None:
    source, target = (
        filled("layer_first", model, page_size, 9, content=True),
        filled(name, model, page_size, 9, content=False),
    )
    rng = np.random.default_rng(3)
    pages = [rng.permutation(9)[:7] for _ in range(2)]
    slots = [(page[:, None] * page_size + np.arange(page_size)).reshape(-1) for page in pages]
    given = [PageSlots(page) for page in pages] if by_pages else slots
    after = copied(places, source, target, *given, 7 * page_size)
    assert np.array_equal(after, wanted(source, target, *slots))


@pytest.mark.parametrize("bytes_", [*range(1, 131), 255, 256, 257, 575, 576, 577, 655, 656, 1151, 1152, 1153, 5001])
def test_any_row_size_at_any_alignment_stays_within_its_row(bytes_: int) -> None:
    places = OnCard(host=False), OnCard(host=bytes_ % 2 == 0)
    try:
        layouts: list[Layout] = []
        for stride in (bytes_, bytes_ + 3):
            bases = (64 + index * 40 * stride + index for index in range(17))
            planes = (
                Plane(index, "k", "uint8", 0, 1, base, stride, stride, bytes_) for index, base in enumerate(bases)
            )
            layouts.append(Layout(tuple(planes), 1, 40))
        content = np.random.default_rng(bytes_).integers(0, 256, layouts[0].end + 64, dtype=np.uint8)
        poison = np.full(layouts[1].end + 64, CANARY, np.uint8)
        pools = [
            Pool(layout=layout, address=place.put(memory), device=0, host=place.host)
            for layout, place, memory in zip(layouts, places, (content, poison), strict=True)
        ]
        ours, theirs = np.random.default_rng(1).permutation(40)[:33], np.random.default_rng(2).permutation(40)[:33]
        kv_copy(pools[1], pools[0], theirs, ours, 33)
        right = poison.copy()
        for plane in range(17):
            for here, there in zip(ours.tolist(), theirs.tolist(), strict=True):
                a, b = layouts[0].address(plane, here), layouts[1].address(plane, there)
                right[b : b + bytes_] = content[a : a + bytes_]
        assert np.array_equal(places[1].get(len(poison)), right)
    finally:
        for place in places:
            place.close()


def test_progress_shows_that_every_row_is_there(places: tuple[OnCard, OnCard]) -> None:
    model, progress = mla(layers=range(61)), Progress(0)
    source, target = (
        filled("layer_first", model, 16, 40, content=True),
        filled("page_first", model, 16, 40, content=False),
    )
    for turn in range(3):
        slots = [np.random.default_rng(seed + turn).permutation(640) for seed in (0, 9)]
        after = copied(places, source, target, *slots, 640, progress=progress)
        assert ended(progress) is State.COMPLETE
        assert np.array_equal(after, wanted(source, target, *slots))
        assert progress.refused == 0
        for place in places:
            place.close()


def test_slots_that_only_the_card_knows_are_skipped_and_counted(places: tuple[OnCard, OnCard]) -> None:
    source, target = (filled("layer_first", mla(), 16, 4, content=content) for content in (True, False))
    known = np.array([5, -1, 9, 1 << 40, 64, 63])
    progress = Progress(0)
    after = copied(places, source, target, range(6), torch.from_numpy(known).cuda(), 6, progress=progress)
    assert ended(progress) is State.COMPLETE
    assert progress.refused == 3
    assert np.array_equal(after, wanted(source, target, [0, 2, 5], known[[0, 2, 5]]))


@pytest.mark.parametrize("count", [0, 3, 100])
def test_a_count_that_only_the_card_knows_is_read_there(places: tuple[OnCard, OnCard], count: int) -> None:
    source, target = (filled("layer_first", mla(), 16, 4, content=content) for content in (True, False))
    known = torch.tensor([count], dtype=torch.int32, device="cuda")
    slots = random.Random(1).sample(range(64), 6)
    after = copied(places, source, target, range(6), torch.tensor(slots).cuda(), 6, count=known)
    used = min(count, 6)
    right = wanted(source, target, list(range(used)), slots[:used]) if used else target.memory
    assert np.array_equal(after, right)


def test_cancel_ends_a_launch_early_and_nothing_is_written_after_that() -> None:
    source, target = OnCard(host=False), OnCard(host=True)
    progress, cancel = Progress(0), PinnedCancel(0)
    rows, row = 1 << 16, 4_096
    layout = Layout((Plane(0, "k", "uint8", 0, 1, 0, row, row, row),), 1, rows)
    content = np.random.default_rng(0).integers(1, 256, rows * row, dtype=np.uint8)
    pools = [
        Pool(layout=layout, address=place.put(memory), device=0, host=place.host)
        for place, memory in ((source, content), (target, np.zeros(rows * row, np.uint8)))
    ]
    try:
        kv_copy(pools[1], pools[0], range(rows), range(rows), rows, progress=progress, cancel=cancel)
        cancel.set()
        assert ended(progress) is State.CANCELLED
        first = target.get(rows * row)
        assert (first == 0).any()
        time.sleep(0.2)
        assert np.array_equal(target.get(rows * row), first)
    finally:
        target.close()


def test_kinds_of_copies_come_and_go_while_the_models_stream_and_another_are_held() -> None:
    gpu = gpus.gpu_at(0)
    (gate, there), other, ours = gpu.pinned(4), gpu.stream(), gpu.stream()
    tables, memory = DeviceTables(gpu, most=4), gpu.allocate(64)
    tables.acquire("held", np.arange(8))  # what is made at the first use is there

    def served() -> None:
        tables.release("held", other)
        for key in range(12):
            tables.acquire(key, np.arange(8))
            gpu.write(memory, key, ours)
            tables.release(key, ours)
            gpu.synchronise(ours)
        gpu.clear(memory, 64)
        gpu.free(gpu.allocate(1 << 20, other), other)

    for stream in (0, other):
        gpu.call("cuStreamWaitValue32", stream, there, 1, 0)  # until it is 1, or more
    thread = threading.Thread(target=served)
    thread.start()
    thread.join(30)
    waits = thread.is_alive()
    gpus.words(gate, 1)[0] = 1
    thread.join()
    for stream in (0, other):
        gpu.synchronise(stream)
    gpu.free(memory)
    assert not waits
    assert "held" in tables._tables
    assert len(tables._tables) == 4

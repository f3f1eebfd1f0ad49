"""push on a GPU, by every backend, against the tensors' own indexing on the CPU: `make test-gpu`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.errors import LocalProtocolError
from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.pools import PinnedCancel, Pool, Progress, State
from pdtransfer.kernels.push import Backend, push
from pdtransfer.kernels.ring import blocks
from pdtransfer.layout.layout import Layout, Plane
from tests.support.layout_tensors import CANARY, Model, c4, dsa_index, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.on_card import GRID, LAYOUTS, OnCard, ended, two_memories
from tests.support.slot_copies import filled, wanted

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

BACKENDS: tuple[Backend, ...] = ("kernel", "direct", "strided", "ring", "auto")
CASES = [
    *((model, 16, a, b, f"{name}-{a}-{b}") for model, name in GRID for a in LAYOUTS for b in LAYOUTS),
    *((dsa_index(), 64, "layer_first", name, f"dsa-{name}") for name in LAYOUTS[:3]),
    *((c4(), 64, "layer_first", name, f"c4-{name}") for name in LAYOUTS[:3]),
]


@pytest.fixture(params=["push", "fetch"])
def places(request: pytest.FixtureRequest) -> Iterator[tuple[OnCard, OnCard]]:
    """Source and target: the GPU's memory to the host's, or back."""
    yield from two_memories(request.param)


def pools_of(places: tuple[OnCard, OnCard], source: Tensors, target: Tensors) -> tuple[Pool, Pool]:
    pools = [
        Pool(layout=each.layout, address=place.put(each.memory), device=0, host=place.host)
        for each, place in zip((source, target), places, strict=True)
    ]
    return pools[0], pools[1]


def extents(slots: int, count: int, seed: int) -> Any:
    """Most of them in two runs, as an arena hands them out, that start in the midst of pages."""
    first = count * 2 // 3
    runs = [np.arange(3, 3 + first), np.arange(first + 7, first + 7 + count - first)]
    listed = np.concatenate(runs if seed % 2 else runs[::-1])
    assert listed.max() < slots
    return listed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pages", [17])
@pytest.mark.parametrize(
    ("model", "page_size", "source_name", "target_name"), [case[:4] for case in CASES], ids=[case[4] for case in CASES]
)
def test_every_backend_carries_every_layout_into_every_other(
    places: tuple[OnCard, OnCard], model: Model, page_size: int, source_name: str, target_name: str, pages: int,
    backend: Backend, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 1)  # whatever lies together goes through the ring
    rng, count = np.random.default_rng(pages), page_size * (pages - 2) + 5
    source = filled(source_name, model, page_size, pages, content=True)
    target = filled(target_name, model, page_size, pages, content=False)
    anywhere = rng.permutation(source.slots)[:count].astype(np.int32)
    ours, theirs = (extents(source.slots, count, 1), anywhere) if places[0].host else (anywhere, None)
    theirs = extents(target.slots, count, 0) if theirs is None else theirs
    sides, progress = pools_of(places, source, target), Progress(0)
    push(sides[1], sides[0], theirs, ours, count, backend=backend, progress=progress)
    assert ended(progress) is State.COMPLETE
    assert np.array_equal(places[1].get(len(target.memory)), wanted(source, target, ours, theirs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_transfers_are_cut_where_registrations_meet(backend: Backend) -> None:
    row, rows = 70_272, 4_200  # 295 MB: the rows around 256 MiB lie across two registrations
    plane = Plane(0, "latent", "uint8", 0, 1, 0, row, row, row)
    content = np.random.default_rng(0).integers(0, 256, 600 * row, dtype=np.uint8)
    source, target = OnCard(host=False), OnCard(host=True)
    try:
        pools = [
            Pool(layout=Layout((plane,), 1, len(memory) // row), address=place.put(memory), device=0, host=place.host)
            for place, memory in ((source, content), (target, np.full(rows * row, CANARY, np.uint8)))
        ]
        progress, first = Progress(0), (256 << 20) // row - 300
        push(pools[1], pools[0], range(first, first + 600), range(600), 600, backend=backend, progress=progress)
        assert ended(progress) is State.COMPLETE
        after = target.get(rows * row).reshape(rows, row)
        assert np.array_equal(after[first : first + 600], content.reshape(600, row))
        assert (after[:first] == CANARY).all()
        assert (after[first + 600 :] == CANARY).all()
    finally:
        target.close()


def big(rows: int) -> tuple[Tensors, Tensors]:
    model = mla(layers=range(61))
    return (
        filled("layer_first", model, 16, rows // 16, content=True),
        filled("page_first", model, 16, rows // 16, content=False),
    )


def test_threads_push_at_once_each_to_its_own_rows(places: tuple[OnCard, OnCard]) -> None:
    source, target = big(1_024)
    sides = pools_of(places, source, target)
    anywhere = np.random.default_rng(0).permutation(1_024)

    def some(thread: int) -> None:
        progress, stream = Progress(0), gpus.gpu_at(0).stream()
        for turn in range(4):
            rows = np.arange(256 * thread + 64 * turn, 256 * thread + 64 * turn + 64)
            slots = (anywhere[rows], rows) if places[0].host else (rows, anywhere[rows])
            backend: Backend = ("ring", "direct")[turn % 2]
            push(sides[1], sides[0], *slots, 64, backend=backend, progress=progress, stream=stream)
            assert ended(progress) is State.COMPLETE

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(some, range(4)))
    slots = (anywhere, np.arange(1_024)) if places[0].host else (np.arange(1_024), anywhere)
    assert np.array_equal(places[1].get(len(target.memory)), wanted(source, target, slots[1], slots[0]))


@pytest.mark.parametrize("backend", ["direct", "ring"])
def test_cancel_stops_what_was_not_begun_and_nothing_is_written_after_the_end(backend: Backend) -> None:
    rows, row = 1 << 10, 1 << 20
    layout = Layout((Plane(0, "k", "uint8", 0, 1, 0, row, row, row),), 1, rows)
    content = np.full(rows * row, 1, np.uint8)
    source, target = OnCard(host=False), OnCard(host=True)
    progress, cancel = Progress(0), PinnedCancel(0)
    pools = [
        Pool(layout=layout, address=place.put(memory), device=0, host=place.host)
        for place, memory in ((source, content), (target, np.zeros(rows * row, np.uint8)))
    ]
    stream = gpus.gpu_at(0).stream()
    how: dict[str, Any] = {"backend": backend, "progress": progress, "cancel": cancel, "stream": stream}
    pushing = threading.Thread(target=lambda: push(pools[1], pools[0], range(rows), range(rows), rows, **how))
    try:
        pushing.start()
        view = target._arena.mapping.array
        deadline = time.monotonic() + 30
        while not view[0]:  # something has landed
            assert time.monotonic() < deadline
        cancel.set()
        pushing.join()
        assert ended(progress) is State.CANCELLED
        first = view[: rows * row].copy()
        landed = int((first.reshape(rows, row)[:, 0] != 0).sum())
        assert 0 < landed < rows
        time.sleep(0.2)
        assert np.array_equal(view[: rows * row], first)
        del view
    finally:
        target.close()


def test_a_push_waits_for_what_its_stream_has_and_what_comes_later_waits_for_it(places: tuple[OnCard, OnCard]) -> None:
    source, target = big(512)
    sides, stream = pools_of(places, source, target), torch.cuda.Stream()
    slots = np.arange(512)
    with torch.cuda.stream(stream):
        for backend in ("ring", "direct", "kernel"):
            torch.cuda._sleep(20_000_000)
            if not places[0].host:
                places[0]._tensor.add_(1)  # the rows that are pushed
            push(sides[1], sides[0], slots, slots, 512, backend=backend, stream=stream.cuda_stream)
            if not places[0].host:
                places[0]._tensor.add_(7)
    stream.synchronize()
    sent = source.memory.copy()
    if not places[0].host:
        sent += 1 + 2 * 8
    source.memory[:] = sent
    assert np.array_equal(places[1].get(len(target.memory)), wanted(source, target, slots, slots))


def test_what_a_ring_cannot_carry_it_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 1 << 20)
    place = OnCard(host=False), OnCard(host=True)
    try:
        source, target = (
            filled("layer_first", mla(), 16, 9, content=True),
            filled("page_first", mla(), 16, 9, content=False),
        )
        sides = pools_of(place, source, target)
        with pytest.raises(LocalProtocolError, match="long enough"):
            push(sides[1], sides[0], np.arange(0, 64, 2), np.arange(32), 32, backend="ring")
    finally:
        for each in place:
            each.close()

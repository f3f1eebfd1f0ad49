"""Graphs of a short prompt's layers, on a GPU of which only streams, events and captures are played."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pdtransfer_lab.models import deep_graphs
from pdtransfer_lab.models.attention import EveryKey, RowBatch, Tiles
from pdtransfer_lab.models.deep_graphs import Graphs
from torch import Tensor

from pdtransfer.hisparse.capture import Captures, Replayed, captured


class Played:
    """torch.cuda; its streams have no way to be waited for."""

    def __init__(self) -> None:
        self.capturing, self.fired, self.breaks = 0, True, False
        self.graphs: list[weakref.ref[Any]] = []
        self.replays = 0
        cuda = self

        class Graph:
            def __init__(self) -> None:
                cuda.graphs.append(weakref.ref(self))

            def capture_begin(self, **_: object) -> None:
                assert not cuda.capturing
                cuda.capturing += 1

            def capture_end(self) -> None:
                cuda.capturing -= 1
                if cuda.breaks:
                    raise RuntimeError("the capture is invalid")

            def replay(self) -> None:
                cuda.replays += 1

        class Event:
            def record(self) -> None:
                pass

            def query(self) -> bool:
                return cuda.fired

        self.CUDAGraph, self.Event = Graph, Event

    def Stream(self, _: object = None) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing > 0

    current_stream = Stream

    def stream(self, _: object) -> Any:
        return nullcontext()

    def graph_pool_handle(self) -> Any:
        return 0, 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def prompt(rows: int) -> RowBatch:
    zeros = torch.zeros(rows, dtype=torch.int64)
    tiles = Tiles(first=0, depths=[0], bias=torch.zeros(1, rows, rows), sources=[zeros], ends=[rows])
    keys: Any = EveryKey(None, zeros, [tiles])  # type: ignore[arg-type]
    return RowBatch(ids=zeros, positions=zeros, own=slice(0, rows), tile_rows=rows, tile_count=1, keys=keys)


def twice(graphs: Graphs, rows: int) -> Tensor | None:
    """The second prompt of this many rows is captured."""
    assert graphs.layers(torch.zeros(rows, 4), prompt(rows), 0, 2) is None
    return graphs.layers(torch.zeros(rows, 4), prompt(rows), 0, 2)


def test_what_makes_place_for_another_row_count_stays_until_the_card_has_passed_it(
    cuda: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for that."""
    monkeypatch.setattr(deep_graphs, "SIZES_MAX", 2)
    graphs = Graphs(lambda x, batch, number: None, 2)

    def alive() -> list[bool]:
        gc.collect()
        return [graph() is not None for graph in cuda.graphs]

    for rows in (2, 3):
        assert twice(graphs, rows) is not None
    cuda.fired = False
    for rows in (4, 5):
        assert twice(graphs, rows) is not None
    assert alive() == [True] * 8
    cuda.fired = True
    assert twice(graphs, 6) is not None
    assert alive() == [False] * 4 + [True] * 6


def test_a_shape_is_captured_when_it_has_come_often_enough_and_no_sooner_once_it_has_left(cuda: Played) -> None:
    """More shapes in turn than are kept: each would be captured at each turn, which takes longer than to queue it."""
    captures: Captures[int] = Captures(2, worth=3)
    made = []
    for turn in range(12):
        for shape in "abc":
            if captures.get(shape) is None and captures.due(shape):
                captures.keep(shape, turn)
                made.append((turn, shape))
    assert made == [(2, "a"), (2, "b"), (2, "c"), (5, "a"), (7, "b"), (9, "c")]
    assert [captures.get(shape) for shape in "abc"] == [None, 7, 9]


def test_work_is_replayed_on_a_gpu_and_done_again_elsewhere(cuda: Played) -> None:
    done: list[bool] = []

    def work() -> int:
        done.append(cuda.capturing > 0)
        return len(done)

    on_cpu = Replayed(work, torch.device("cpu"))
    assert [on_cpu(), on_cpu(), cuda.replays] == [1, 2, 0]
    done.clear()
    on_gpu = Replayed(work, torch.device("cuda", 0))
    assert done == [False, True], "what it uses is loaded before the capture"
    assert [on_gpu(), on_gpu(), cuda.replays] == [2, 2, 2]
    with captured():
        assert on_gpu() == 3
    assert cuda.replays == 2


def test_a_shape_that_others_have_pushed_out_is_counted_anew() -> None:
    captures: Captures[int] = Captures(2, worth=3)
    for others, due in ((15, True), (16, False)):  # 16 are remembered
        captures.due("rare")
        for shape in range(others - 1):
            captures.due(shape)
        captures.due("rare")
        for shape in range(others):
            captures.due((others, shape))
        assert captures.due("rare") == due


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_in_which_something_is_raised_ends_and_reports_what(cuda: Played, *, breaks: bool) -> None:
    def run(_: object, __: object, number: int) -> None:
        if cuda.capturing and number == 1:
            cuda.breaks = breaks
            raise MemoryError("of the GPU")

    with pytest.raises(MemoryError, match="of the GPU"):
        twice(Graphs(run, 2), 2)
    assert not cuda.capturing


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_within_a_capture(cuda: Played, *, enabled: bool) -> None:
    """A graph that went with it would break the capture."""
    if not enabled:
        gc.disable()
    try:
        with captured():
            assert cuda.capturing
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="no"), captured():
            raise ValueError("no")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_capture_that_the_gpu_has_given_up_reports_it(cuda: Played) -> None:
    cuda.breaks = True
    with pytest.raises(RuntimeError, match="invalid"), captured():
        pass

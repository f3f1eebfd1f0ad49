"""SGLang's kernels beside ours: what stands in for them here has to leave the same bytes, and is found out if not."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch
from pdtransfer_lab.bench import sglang_kernels, side_by_side
from pdtransfer_lab.bench.replays import Replays, Seconds
from pdtransfer_lab.bench.sglang_kernels import (  # fmt: skip
    Copies,
    CopyCase,
    CopySize,
    Opponents,
    SwapCase,
    SwapSize,
    scatter_comparison,
    swap_comparison,
)
from pdtransfer_lab.bench.side_by_side import Comparison, Contender, compare

from pdtransfer.serve.commands.cli import main
from tests.support.bench_output import printed

CPU = torch.device("cpu")
COPY = CopySize(slots=256, layers=3)
SWAP = SwapSize(top=8, hot=16, length=64)


class StandIn:
    """What SGLang's functions do, on the CPU. `layers`, `order` and `gap` are mistakes."""

    def __init__(self, *, layers: int = 0, order: int = 1, gap: int = 0) -> None:
        self.layers, self.order, self.gap = layers, order, gap
        self.calls: list[tuple[int, int | None]] = []

    def opponents(self) -> Opponents:
        return Opponents("0", self.copy_layers, self.copy_layer, lambda **_: True, self.swap_in, self.scatter)

    def copy_layers(
        self, to: Any, to_slots: Any, of: Any, of_slots: Any, *, cache_src_stride_bytes: int,
        cache_dst_stride_bytes: int, element_size: int, block_quota: int, page_size: int,
    ) -> None:  # fmt: skip
        self.calls.append((block_quota, page_size))
        for index, target in enumerate(to.tolist()):
            source = of.tolist()[(index + self.layers) % len(of)]
            for a, b in zip(to_slots.tolist(), of_slots.tolist(), strict=True):
                ctypes.memmove(target + a * cache_dst_stride_bytes, source + b * cache_src_stride_bytes, element_size)

    def copy_layer(self, to: Any, to_slots: Any, of: Any, of_slots: Any, *, block_quota: int, page_size: int) -> None:
        self.calls.append((block_quota, page_size))
        to[to_slots] = of[of_slots]
        to[to_slots[: self.layers]] = 0

    def swap_in(
        self, *, top_k_tokens: Any, device_buffer_tokens: Any, host_cache_locs: Any, device_buffer_locs: Any,
        host_cache: Any, device_buffer: Any, top_k_device_locs: Any, req_pool_indices: Any, seq_lens: Any,
        lru_slots: Any, item_size_bytes: int, num_top_k: int, hot_buffer_size: int, block_size: int,
        num_real_reqs: Any,
    ) -> None:  # fmt: skip
        assert tuple(top_k_tokens.shape) == (int(num_real_reqs[0]), num_top_k)
        assert item_size_bytes == host_cache.element_size() * host_cache.shape[1]
        for request in req_pool_indices.tolist():
            held, locs = device_buffer_tokens[request], device_buffer_locs[request]
            asked, order = top_k_tokens[request].tolist(), lru_slots[request].tolist()
            hits = [place for place in order if int(held[place]) in asked]
            others = [place for place in order if place not in hits]
            missing = [token for token in asked if token not in [int(held[place]) for place in hits]]
            for token, place in zip(missing, others, strict=False):
                held[place] = token
                device_buffer[locs[place]] = host_cache[host_cache_locs[request, token]]
            lru_slots[request] = torch.tensor([*others[len(missing) :], *others[: len(missing)], *hits])
            places = {int(token): place for place, token in enumerate(held[:hot_buffer_size])}
            top_k_device_locs[request] = torch.tensor([int(locs[places[token]]) for token in asked[:: self.order]])

    def scatter(self, buffer: Any, loc: Any, nope: Any, rope: Any, *, reserved_skip_index: int) -> None:
        kept = loc != reserved_skip_index
        buffer[loc[kept] + self.gap] = torch.cat((nope, rope), 1)[kept]


def copying(case: CopyCase, stand_in: StandIn) -> Comparison:
    arena = torch.zeros(COPY.slots * COPY.layers * 1_152 + 8, dtype=torch.uint8)[:-8]
    return Copies(stand_in.opponents(), COPY, arena, CPU).comparison(case)


def problems(comparison: Comparison) -> set[str]:
    return {each.problem() for each in comparison.theirs}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("push", [False, True])
def test_copies_of_both_leave_the_right_bytes(push: bool, layout: str, whole: bool, paged: bool) -> None:
    stand_in = StandIn()
    comparison = copying(CopyCase(push, layout, whole, 64, paged), stand_in)
    assert comparison.ours.problem() == ""
    assert problems(comparison) == {""}
    assert stand_in.calls[0] == ((4, 64) if paged else (2, 1))  # its engine's own choice comes first
    assert len(set(stand_in.calls)) == len(comparison.theirs) == 8
    assert comparison.byte_count == 64 * (3 if whole else 1) * 1_152


@pytest.mark.parametrize("whole", [False, True])
def test_every_turn_of_a_copy_can_be_launched(whole: bool) -> None:
    comparison = copying(CopyCase(False, "page_first", whole, 64, False), StandIn())
    for turn in range(comparison.turns):
        comparison.ours.launch(turn, 0)
        comparison.theirs[0].launch(turn, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_a_copy_with_other_bytes_is_found(whole: bool) -> None:
    assert problems(copying(CopyCase(True, "layer_first", whole, 64, False), StandIn(layers=1))) == {"other bytes"}


def swapping(stand_in: StandIn, steps: int = 8) -> Comparison:
    arena = torch.zeros(SWAP.length * 2 * 16, dtype=torch.uint8)
    return swap_comparison(stand_in.opponents(), SwapCase(16, 2, 2, steps), SWAP, arena, CPU)


def test_swaps_of_both_bring_the_right_rows_and_no_more_than_are_missing() -> None:
    comparison = swapping(StandIn())
    assert comparison.ours.problem() == ""
    assert problems(comparison) == {""}
    assert comparison.byte_count == 2 * 2 * 16


def test_a_swap_that_answers_with_other_rows_is_found() -> None:
    assert problems(swapping(StandIn(order=-1))) == {"other bytes"}


def test_steps_that_find_everything_are_no_swap() -> None:
    comparison = swapping(StandIn(), steps=2)
    assert problems(comparison) == {comparison.ours.problem()} == {"0 misses"}


def test_rows_of_both_land_in_their_slots_and_others_are_found() -> None:
    right, wrong = (scatter_comparison(StandIn(gap=gap).opponents(), 8, CPU, slots=64) for gap in (0, -1))
    assert right.ours.problem() == ""
    assert problems(right) == {""}
    assert problems(wrong) == {"other bytes"}


class Clock:
    """Each work takes as long as its contender is said to; calls it, to find out whose it is."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[list[str], int, int]] = []
        self.seen: list[tuple[str, int]] = []

    def contender(self, name: str, problem: Callable[[], str] = str) -> Contender:
        return Contender(name, lambda turn, _: self.seen.append((name, turn)), problem)

    def in_turn(self, works: list[Callable[[int], object]], *, nodes: int, runs: int) -> list[Seconds]:
        for work in works:
            work(0)
        names = [name for name, _ in self.seen[-len(works) :]]
        self.asked.append((names, nodes, runs))
        return [Seconds(self.seconds[name], 0.0, 1.0) for name in names]


def comparison_of(clock: Clock, ours: Contender, *theirs: Contender, roof: bool = False) -> Comparison:
    return Comparison(
        name="row", what="a row", ours=ours, theirs=theirs, turns=5, byte_count=6_000,
        roof=(lambda _: clock.seen.append(("roof", 0))) if roof else None,
    )  # fmt: skip


def test_the_opponents_best_way_is_timed_with_ours_its_default_and_a_plain_copy() -> None:
    clock = Clock({"ours": 2e-6, "two": 5e-6, "four": 3e-6, "eight": 4e-6, "roof": 1e-6})
    theirs = [clock.contender(name) for name in ("two", "four", "eight")]
    figures = compare(clock, comparison_of(clock, clock.contender("ours"), *theirs, roof=True), runs=7)
    assert clock.asked == [(["two", "four", "eight"], 5, 3), (["four", "ours", "two", "roof"], 5, 7)]
    assert set(clock.seen) - {("roof", 0)} == {(name, 4) for name in ("ours", "two", "four", "eight")}
    assert figures["row_best"] == "four"
    assert figures["row_ways"] == "two: 5.00, four: 3.00, eight: 4.00"
    assert figures["row_note"] == ""
    ours = {name: figures[f"row_{name}"] for name in ("ratio", "share", "default_us", "gb_s")}
    assert ours == pytest.approx({"ratio": 1.5, "share": 0.5, "default_us": 5, "gb_s": 3})
    assert [column.format(**figures) for column in side_by_side.line("row", "a row", figures)] == [
        "a row", "1.500", "3.00 us by four, 5.00 by default; ours 2.00 us, 0.500 of a plain copy, 3.0 GB/s",
    ]  # fmt: skip


def test_a_way_with_other_bytes_or_an_error_is_named_and_not_timed() -> None:
    def broken() -> str:
        raise RuntimeError("no such kernel\nand more")

    clock = Clock({"ours": 2e-6, "four": 3e-6})
    theirs = clock.contender("two", lambda: "other bytes"), clock.contender("four"), clock.contender("eight", broken)
    figures = compare(clock, comparison_of(clock, clock.contender("ours"), *theirs), runs=7)
    assert [names for names, _, _ in clock.asked] == [["four"], ["four", "ours"]]
    assert figures["row_note"] == "two: other bytes; eight: RuntimeError: no such kernel"
    assert "row_default_us" not in figures
    row = side_by_side.line("row", "a row", figures)
    assert row.beside.format(**figures).endswith("; two: other bytes; eight: RuntimeError: no such kernel")


@pytest.mark.parametrize("wrong", ["ours", "two"])
def test_a_row_whose_bytes_differ_is_not_timed(wrong: str) -> None:
    clock = Clock({})
    ours, theirs = (
        clock.contender(name, lambda name=name: "other bytes" if name == wrong else "") for name in ("ours", "two")
    )
    figures = compare(clock, comparison_of(clock, ours, theirs), runs=7)
    assert figures == {"row_note": f"{wrong}: other bytes"}
    assert clock.asked == []
    row = side_by_side.line("row", "a row", figures)
    assert (row.figure, row.beside.format(**figures)) == ("-", f"not timed: {wrong}: other bytes")


class GpuOfOneClock:
    """A driver whose graphs are the lists of what was queued while it captured."""

    def __init__(self) -> None:
        self.driver = self
        self.queued: list[str] = []
        self.replayed: list[str] = []
        self.captured: list[list[str]] = []
        self.CUstreamCaptureMode = type("Mode", (), {"CU_STREAM_CAPTURE_MODE_RELAXED": 0})
        self.ended = 0

    def enter(self) -> None:
        pass

    def cuStreamEndCapture(self, _: int) -> tuple[int]:
        self.ended += 1
        return (0,)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuStreamBeginCapture":
            self.queued = []
        if name == "cuStreamEndCapture":
            return list(self.queued)
        if name == "cuGraphInstantiate":
            return arguments[0]
        if name == "cuGraphLaunch":
            self.replayed.append(arguments[0][0])
            self.captured.append(arguments[0])
        return 8.0 if name == "cuEventElapsedTime" else 1


def test_replays_take_turns_and_each_leads_as_often_as_it_follows() -> None:
    here: Any = GpuOfOneClock()
    works = [lambda _, name=name: here.queued.append(name) for name in "abc"]
    times = Replays(here).in_turn(works, nodes=4, runs=2)
    assert "".join(here.replayed) == "abc" + "abc" + "cba"  # the first are not counted
    assert [len(graph) for graph in here.captured] == [4] * 9
    assert times == [Seconds(2e-3, 2e-3, 2e-3)] * 3


def test_a_launch_that_fails_in_a_capture_ends_the_capture() -> None:
    here: Any = GpuOfOneClock()
    calls: list[int] = []

    def work(_: int) -> None:
        calls.append(0)
        if len(calls) > 1:
            raise ValueError("not here")

    with pytest.raises(ValueError, match="not here"):
        Replays(here).seconds(work, nodes=2, runs=1)
    assert here.ended == 1


def test_without_sglang_one_line_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert main(["bench", "kernels", "--beside", "sglang"]) != 0
    (text,) = capsys.readouterr().err.splitlines()
    assert "--beside sglang" in text
    assert f"pip install {sglang_kernels.PACKAGE}" in text


def test_the_table_has_a_row_for_each_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    names = [line_of.what for line_of in sglang_kernels.lines({"card": "sm_90", "sglang": "0.5.23"})]
    assert len(set(names)) == len(names) == 1 + 22 + 14 + 12 + 6
    figures: dict[str, Any] = {"card": "sm_90", "sglang": "0.5.23"}
    for case in (*sglang_kernels.PUSHES, *sglang_kernels.LOADS, *sglang_kernels.SWAPS):
        figures[f"{case.name}_note"] = "ours: other bytes"
    figures |= {f"set_mla_{rows}_note": "ours: other bytes" for rows in sglang_kernels.SCATTERS}
    assert printed(sglang_kernels.lines(figures), figures, sglang_kernels.measure, capsys).count("not timed") == 54

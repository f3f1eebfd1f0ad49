"""Benchmarks of the package run, with counts so small that their figures mean nothing, and print what they measure."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pdtransfer_lab.bench import copy, handoff, hisparse, models, report, transfer
from pdtransfer_lab.bench.hisparse import Size
from pdtransfer_lab.bench.processes import PipeProcess, Processes, answer
from pdtransfer_lab.bench.ranks import RankPair

import pdtransfer
from pdtransfer.errors import WorldError
from pdtransfer.transports.mooncake.host import why_not
from tests.support.bench_output import printed, sizes

ROW_BYTES = 4 * 576 * 4  # of a token in the reference model's MLA: layers, elements, float32


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPair]:
    source, target = models.components("mla", source_slots=256, target_slots=64)
    with RankPair(source, target) as ranks:
        yield ranks


def test_rooms_are_expected_then_written_then_ready(ranks: RankPair) -> None:
    stamps = ranks.hand_off(5, tokens=16)
    assert (stamps.expected < stamps.written).all()
    assert (stamps.written < stamps.ready).all()
    assert (stamps.ready[:-1] <= stamps.expected[1:]).all()  # one at a time
    assert stamps.seconds == (stamps.ready[-1] - stamps.expected[0]) / 1e9
    assert min(stamps.prefill_cpu_ns, stamps.decode_cpu_ns) > 0


def test_as_many_rooms_are_under_way_as_were_asked_for(ranks: RankPair) -> None:
    stamps = ranks.hand_off(40, tokens=7, at_once=8)
    # A room that is READY makes place for the next one, which is expected after that.
    steps = sorted([(at, 1) for at in stamps.expected.tolist()] + [(at, -1) for at in stamps.ready.tolist()])
    under_way = np.cumsum([step for _, step in steps])
    assert under_way.max() == 8


class Sender(PipeProcess):
    """Answers as many bytes as it is asked for."""

    def send(self, byte_count: int) -> None:
        self._pipe.send(bytes(byte_count))


class OneSender(Processes):
    def __init__(self) -> None:
        super().__init__()
        self.pipe = self._start(Sender)


def test_an_answer_may_be_larger_than_the_pipe() -> None:
    with OneSender() as one:
        one.pipe.send(("send", 8 << 20))
        assert len(answer(one.pipe, who="it", within_s=60)) == 8 << 20


def test_a_room_that_fails_ends_the_bench_with_its_cause() -> None:
    source, target = models.components("mla", source_slots=128, target_slots=64)
    with RankPair(source, target) as ranks, pytest.raises(WorldError, match=r"room 1 failed at decode: .*64"):
        ranks.hand_off(1, tokens=65)


def test_a_fragmented_arena_has_single_slots() -> None:
    source, target = models.components("mla", source_slots=64, target_slots=64)
    with RankPair(source, target) as ranks:
        assert ranks.fragment() == 1
        assert (ranks.hand_off(3, tokens=32).ready > 0).all()


def test_a_memcpy_is_timed(ranks: RankPair) -> None:
    assert ranks.memcpy(1 << 20) > 0


@pytest.mark.parametrize("blocking", [False, True])
def test_echoes_are_timed_one_by_one(ranks: RankPair, blocking: bool) -> None:
    for trips in (1, 5):
        trips_ns = ranks.echo(trips, blocking=blocking)
        assert trips_ns.shape == (trips,)
        assert (trips_ns > 0).all()
    assert (ranks.hand_off(1, tokens=1).ready > 0).all()  # the nodes have their loops again


def test_rooms_go_to_all_nodes_of_either_side() -> None:
    source, target = models.components("mla", source_slots=64, target_slots=64)
    with RankPair(source, target, prefill_nodes=3, keys=True) as ranks:
        assert len(set(ranks.endpoints)) == 3
        assert (ranks.hand_off(6, tokens=4, at_once=6).ready > 0).all()
    with RankPair(source, target, decode_nodes=3) as ranks:
        # As many as all arenas together hold: one alone could not have them.
        assert (ranks.hand_off(6, tokens=32, at_once=6).ready > 0).all()


def test_aborted_rooms_give_their_slots_back_and_those_that_were_ready_are_not_timed(ranks: RankPair) -> None:
    taken = ranks.abort([0.0, 0.0, 600.0], tokens=16)
    assert len(taken) == 2
    assert (taken > 0).all()
    assert (ranks.hand_off(4, tokens=16).ready > 0).all()


@pytest.mark.parametrize(("model", "row_bytes"), [("deepseek", 61 * 1_152), ("gqa", 4 * 2 * 4 * 64 * 4)])
def test_transfer_sets_rooms_beside_a_memcpy(
    model: models.BenchModel, row_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = transfer.measure(tokens=100, rooms=1, model=model)
    assert figures["room_mib"] == 100 * row_bytes / (1 << 20)
    names = {f"{arena}_{threads}" for arena in ("fresh", "fragmented") for threads in (1, 2)}
    for name in names:
        assert float(figures[f"{name}_gb_s"]) > 0
        assert float(figures[f"{name}_to_memcpy"]) > 0
    assert "fragmented arena, 2 copy threads" in printed(transfer.LINES, figures, transfer.measure, capsys)


def test_copy_is_set_beside_a_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    figures = copy.measure(tokens=100)
    assert figures["bytes"] == 128 * 61 * 1_152  # whole pages
    assert len(sizes(figures, "_1")) == len(sizes(figures, "_2")) == len(sizes(figures, "_numpy")) == 6
    assert min(sizes(figures, "_1") + sizes(figures, "_2") + sizes(figures, "_numpy")) > 0
    assert "rows anywhere" in printed(copy.LINES, figures, transfer.measure, capsys)


def test_table_has_a_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [report.Line("speed", "{gb_s:.1f} GB/s", "aim {aim}"), report.Line("name", "{name}")]
    report.show({"gb_s": 1.25, "aim": 2, "name": "x"}, lines, copy.measure, json=False)
    first, second, load = capsys.readouterr().out.splitlines()
    assert first.split() == ["speed", "1.2", "GB/s", "aim", "2"]
    assert second.split() == ["name", "x"]
    assert load.startswith("load ")


def test_steps_out_of_host_memory_miss_as_much_as_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    size = Size(requests=3, tokens=1_000, layers=5, top=40, hot=80, share=2, steps=3)
    figures = hisparse.measure(size)
    for name, misses in (("miss_1", 1), ("miss_50", 2), ("miss_200", 8)):
        assert figures[f"{name}_misses"] == misses * 3 * 3  # of each request and plan
        assert figures[f"{name}_bytes"] == misses * 3 * 5 * 656
        assert figures[f"{name}_hit_rate"] == pytest.approx(1 - misses / 40)
        assert min(sizes(figures, f"{name}_step_us")) > 0
    assert figures["plans"] == 3
    held, tables = 3 * 81 * 5 * 656, float(figures["table_mib"]) * (1 << 20)
    assert figures["carried"] == pytest.approx(3 * 1_000 * 5 * 656 / (held + tables))
    assert "3 x 1,000 tokens" in printed(hisparse.LINES, figures, transfer.measure, capsys)


@pytest.mark.parametrize("beside_zmq", [False, True])
def test_handoff_has_latency_and_rate(beside_zmq: bool, capsys: pytest.CaptureFixture[str]) -> None:
    figures = handoff.measure(tokens=16, rooms=20, concurrency=4, rounds=2, beside_zmq=beside_zmq)
    assert figures["room_bytes"] == 16 * ROW_BYTES
    assert figures["rate_room_bytes"] == 7 * ROW_BYTES <= 64 << 10
    assert 0 < float(figures["handoff_us_p50"]) < float(figures["ready_us_p50"])
    assert float(figures["handoff_us_p50"]) <= float(figures["handoff_us_p99"])
    assert float(figures["handoffs_s_min"]) <= float(figures["handoffs_s"]) <= float(figures["handoffs_s_max"])
    beside = ("_to_raw_p50", "_to_blocking_p50") if beside_zmq else ()
    for ending in ("_us_p50", "_cpu_us", *beside):
        assert min(sizes(figures, ending)) > 0
    lines, text = (handoff.BESIDE_ZMQ, "ZMQ's round trip") if beside_zmq else (handoff.LINES, "hand-offs a second")
    assert text in printed(lines, figures, transfer.measure, capsys)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_transfer_over_a_network_has_each_arena(capsys: pytest.CaptureFixture[str]) -> None:
    figures = transfer.measure_network(transport="mooncake", tokens=100, rooms=1)
    assert len(sizes(figures, "_gb_s")) == 5
    assert min(sizes(figures, "_gb_s")) > 0
    assert "no two free slots together" in printed(transfer.NETWORK_LINES, figures, transfer.measure, capsys)


def test_json_shows_where_when_and_how_its_figures_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [report.Line("speed", "{gb_s:.1f} GB/s", "{what}")]
    assert report.show({"gb_s": 1.23456, "what": "x"}, lines, copy.measure, transfer.measure, json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["gb_s"], figures["part"]) == (1.2346, "copy")
    assert figures["tables"] == [[["", "", ""], ["speed", "1.2 GB/s", "x"]]]
    assert figures["method"].startswith("Shares of one memcpy's rate")
    assert "Rooms of `tokens` tokens" in figures["method"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", figures["date"])
    assert re.search(r"\d+ cores, \d+ GiB, .*Linux \d.*, Python 3", figures["host"])


def test_the_commit_is_the_checkouts_or_else_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(report.__file__).parents[3]
    asked = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        assert report.commit().removesuffix("-dirty") == ran.stdout.strip()
    monkeypatch.setattr(report, "__file__", str(tmp_path / "lab" / "pdtransfer_lab" / "bench" / "report.py"))
    assert report.commit() == f"version {pdtransfer.__version__}"

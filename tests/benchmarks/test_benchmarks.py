"""Benches run, with counts so small that their figures mean nothing, and tell what they say they measure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import attacks, bus, crossing, faults, idle, load, pages, plan, prefix, siege, stall, verify
from pdtransfer.bench import copy, handoff, hisparse, models, report, run_plan, transfer
from pdtransfer.bench.hot_batch import Size
from pdtransfer.bench.ranks import Ranks
from pdtransfer.errors import WorldError
from pdtransfer.transports.mooncake import why_not

ROW_BYTES = 4 * 576 * 4  # of a token in the reference model's MLA: layers, elements, float32


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    source, target = models.components("mla", source_slots=256, target_slots=64)
    with Ranks(source, target) as ranks:
        yield ranks


def told(lines: tuple[report.Line, ...], figures: report.Figures, capsys: pytest.CaptureFixture[str]) -> str:
    """What a person gets to read; KeyError where a line names a figure that is not there."""
    assert report.show(figures, lines, json=False) == 0
    return capsys.readouterr().out


def sizes(figures: report.Figures, suffix: str) -> list[float]:
    return [float(value) for name, value in figures.items() if name.endswith(suffix)]


# Two ranks


def test_rooms_are_expected_then_written_then_ready(ranks: Ranks) -> None:
    stamps = ranks.hand_off(5, tokens=16)
    assert (stamps.expected < stamps.written).all()
    assert (stamps.written < stamps.ready).all()
    assert (stamps.ready[:-1] <= stamps.expected[1:]).all()  # one at a time
    assert stamps.seconds == (stamps.ready[-1] - stamps.expected[0]) / 1e9
    assert min(stamps.prefill_cpu_ns, stamps.decode_cpu_ns) > 0


def test_as_many_rooms_are_under_way_as_were_asked_for(ranks: Ranks) -> None:
    stamps = ranks.hand_off(40, tokens=7, at_once=8)
    # A room that is READY makes place for the next one, which is expected after that.
    steps = sorted([(at, 1) for at in stamps.expected.tolist()] + [(at, -1) for at in stamps.ready.tolist()])
    under_way = np.cumsum([step for _, step in steps])
    assert under_way.max() == 8


def test_a_room_that_fails_ends_the_bench_with_its_cause() -> None:
    source, target = models.components("mla", source_slots=128, target_slots=64)
    with Ranks(source, target) as ranks, pytest.raises(WorldError, match=r"room 1 failed at decode: .*64"):
        ranks.hand_off(1, tokens=65)


def test_a_fragmented_arena_has_single_slots() -> None:
    source, target = models.components("mla", source_slots=64, target_slots=64)
    with Ranks(source, target) as ranks:
        assert ranks.fragment() == 1
        assert (ranks.hand_off(3, tokens=32).ready > 0).all()


@pytest.mark.parametrize("blocking", [False, True])
def test_echoes_are_timed_one_by_one(ranks: Ranks, blocking: bool) -> None:
    for trips in (1, 5):
        trips_ns = ranks.echo(trips, blocking=blocking)
        assert trips_ns.shape == (trips,)
        assert (trips_ns > 0).all()
    assert (ranks.hand_off(1, tokens=1).ready > 0).all()  # the nodes have their loops again


def test_a_memcpy_is_timed(ranks: Ranks) -> None:
    assert ranks.memcpy(1 << 20) > 0


# The benches


def test_prefix_sets_rooms_with_the_cache_beside_rooms_without(capsys: pytest.CaptureFixture[str]) -> None:
    figures = prefix.measure(tokens=130, rooms=8, rounds=2)
    assert (figures["rest_tokens"], figures["saved_share"]) == (2, 128 / 130)
    for name in ("off", "own", "shared"):
        assert 0 < float(figures[f"{name}_handoff_us"]) < float(figures[f"{name}_ready_us"])
        assert float(figures[f"{name}_cpu_us"]) > 0
    assert "98% of" in told(prefix.LINES, figures, capsys)


def test_handoff_sets_latency_beside_a_bare_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    figures = handoff.measure(tokens=16, rooms=20, concurrency=4, rounds=2)
    assert figures["room_bytes"] == 16 * ROW_BYTES
    assert figures["rate_room_bytes"] == 7 * ROW_BYTES <= 64 << 10
    assert 0 < float(figures["handoff_us_p50"]) < float(figures["ready_us_p50"])
    assert float(figures["handoff_us_p50"]) <= float(figures["handoff_us_p99"])
    assert float(figures["handoffs_s_min"]) <= float(figures["handoffs_s"]) <= float(figures["handoffs_s_max"])
    assert (
        min(
            sizes(figures, "_us_p50")
            + sizes(figures, "_cpu_us")
            + sizes(figures, "_to_raw_p50")
            + sizes(figures, "_to_blocking_p50")
        )
        > 0
    )
    assert "ZMQ's round trip" in told(handoff.LINES, figures, capsys)


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
    assert "fragmented arena, 2 copy threads" in told(transfer.LINES, figures, capsys)


def test_plan_says_what_it_planned(capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan.measure(tokens=1_000, layers=3, page_size=16, repeats=1)
    assert figures["bytes"] == 1_000 * 3 * 1_152
    assert 1 < int(figures["runs_contiguous"]) <= 63
    assert min(sizes(figures, "_ms")) > 0
    assert "1000 tokens x 3 planes" in told(plan.LINES, figures, capsys)


def test_copy_is_set_beside_a_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    figures = copy.measure(tokens=100)
    assert figures["bytes"] == 128 * 61 * 1_152  # whole pages
    assert len(sizes(figures, "_1")) == len(sizes(figures, "_2")) == len(sizes(figures, "_numpy")) == 6
    assert min(sizes(figures, "_1") + sizes(figures, "_2") + sizes(figures, "_numpy")) > 0
    assert "rows anywhere" in told(copy.LINES, figures, capsys)


def test_bus_is_set_beside_bare_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    figures = bus.measure(rounds=1, messages=20)
    assert min(sizes(figures, "_us_p50") + sizes(figures, "_echoes_s")) > 0
    assert figures["bus_to_raw_p50"] == float(figures["bus_us_p50"]) / float(figures["raw_us_p50"])
    assert "bus with keys" in told(bus.LINES, figures, capsys)


@pytest.mark.slow
def test_idle_watches_both_daemons_alone_and_with_a_session(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "_SETTLE_SECONDS", 0.0)
    figures = idle.measure(seconds=1)
    for name in ("prefill_alone", "decode_alone", "prefill_session", "decode_session", "torch"):
        private, pss, rss = (float(figures[f"{name}_{size}_mib"]) for size in ("private", "pss", "rss"))
        assert 0 < private <= pss <= rss
    assert all(0 <= percent < 100 for percent in sizes(figures, "_cpu_percent"))
    assert len(sizes(figures, "_cpu_percent")) == 4
    assert "decode, with a session" in told(idle.LINES, figures, capsys)


@pytest.mark.slow
def test_load_meets_crowds_on_either_side_and_watches_idle_ones_and_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_SETTLE_SECONDS", 0.0)
    figures = load.measure(rooms=30, memory_rooms=80, idle_seconds=1, concurrency=4)
    assert len(sizes(figures, "_handoffs_s")) == 2 * len(load.CROWD)
    assert min(sizes(figures, "_handoffs_s") + sizes(figures, "_cpu_us")) > 0
    for side in ("prefill", "decode"):
        assert 0 <= float(figures[f"{side}_idle_percent"]) < 100
        points = [float(figures[f"{side}_memory_mib_{number}"]) for number in range(1, 9)]
        assert figures[f"{side}_memory_growth_mib"] == points[-1] - points[0]
    assert figures["memory_rooms"] == 80
    assert "1 decode, 100 prefill" in told(load.LINES, figures, capsys)


def test_rooms_go_to_all_nodes_of_either_side() -> None:
    source, target = models.components("mla", source_slots=64, target_slots=64)
    with Ranks(source, target, prefill_nodes=3, keys=True) as ranks:
        assert len(set(ranks.endpoints)) == 3
        assert (ranks.hand_off(6, tokens=4, at_once=6).ready > 0).all()
    with Ranks(source, target, decode_nodes=3) as ranks:
        # As many as all arenas together hold: one alone could not have them.
        assert (ranks.hand_off(6, tokens=32, at_once=6).ready > 0).all()


@pytest.mark.slow
def test_verify_sets_checksums_beside_memcpy_and_rooms_beside_rooms(capsys: pytest.CaptureFixture[str]) -> None:
    figures = verify.measure(tokens=64, rooms=4, repeats=1)
    assert figures["bytes"] == figures["room_bytes"] == 64 * 61 * 1_152
    for name in ("handoff_us", "handoff_verified_us", "room_gb_s", "room_verified_gb_s", "page_first_pages_2"):
        assert float(figures[name]) > 0, name
    assert "verified" in told(verify.LINES, figures, capsys)


@pytest.mark.slow
def test_siege_sets_each_attack_beside_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    figures = siege.measure(rooms=20, rounds=1, connections=30)
    for name in attacks.ATTACKS:
        assert figures[f"{name}_count"] > 0, name
        assert figures[f"{name}_p99_ratio"] == figures[f"{name}_us_p99"] / figures[f"{name}_quiet_us_p99"]
    assert "junk connections" in told(siege.LINES, figures, capsys)


def test_faults_time_aborts_and_a_healthy_peer_beside_a_frozen_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_FROZEN_SECONDS", 0.1)
    figures = faults.measure(rooms=20, aborts=10, rounds=1)
    assert 0 < int(figures["aborts"]) <= 10
    assert 0 < float(figures["abort_us_p50"]) <= float(figures["abort_us_p99"])
    assert figures["frozen_p99_ratio"] == float(figures["frozen_us_p99"]) / float(figures["quiet_us_p99"])
    assert "beside a frozen peer" in told(faults.LINES, figures, capsys)


def test_aborted_rooms_give_their_slots_back_and_those_that_were_ready_are_not_timed(ranks: Ranks) -> None:
    taken = ranks.abort([0.0, 0.0, 600.0], tokens=16)
    assert len(taken) == 2
    assert (taken > 0).all()
    assert (ranks.hand_off(4, tokens=16).ready > 0).all()


def test_memory_is_what_the_kernel_says_of_the_process() -> None:
    before = idle.memory_of(os.getpid())
    held = np.ones(64 << 20, np.uint8)
    after = idle.memory_of(os.getpid())
    assert after.rss >= after.pss >= after.private >= len(held)
    assert after.private - before.private > len(held) // 2


# How they are told


def test_json_is_one_object_with_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(tokens=1_000, planes=2, json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["bytes"] == 1_000 * 2 * 1_152
    assert set(plan.measure(tokens=64, layers=1, repeats=1)) | {"load_1min"} == set(figures)


def test_table_has_a_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [report.Line("speed", "{gb_s:.1f} GB/s", "aim {aim}"), report.Line("name", "{name}")]
    report.show({"gb_s": 1.25, "aim": 2, "name": "x"}, lines, json=False)
    first, second, load = capsys.readouterr().out.splitlines()
    assert first.split() == ["speed", "1.2", "GB/s", "aim", "2"]
    assert second.split() == ["name", "x"]
    assert load.startswith("load ")


# HiSparse


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
    assert "3 x 1,000 tokens" in told(hisparse.LINES, figures, capsys)


def test_a_scheduler_beside_moving_rooms_is_told_what_its_client_took(capsys: pytest.CaptureFixture[str]) -> None:
    figures = stall.measure(tokens=700, rooms=6, at_once=2)  # two chunks each
    for side in ("prefill", "decode"):
        p50, p99, most = (float(figures[f"{side}_turn_{which}_us"]) for which in ("p50", "p99", "max"))
        assert 0 <= p50 <= p99 <= most
        assert figures[f"{side}_turns"]
        assert all(figures[f"{side}_{which}_p50_us"] for which in ("work", "quiet"))
    assert figures["room_mib"] == 700 * 61 * 1_152 / (1 << 20)
    assert "6 x 47 MiB" in told(stall.LINES, figures, capsys)


def test_pages_of_both_sizes_are_measured_alike(capsys: pytest.CaptureFixture[str]) -> None:
    figures = pages.measure(gib=1 / 16, repeats=1)
    for name in ("small", "auto"):
        assert str(figures[f"{name}_pages"]).startswith(("4 KiB", "2 MiB"))
        for what in ("back_ms", "enter_ms", "memcpy_gb_s", "scatter_gb_s", "collect_gb_s"):
            assert min(sizes(figures, f"{name}_{what}")) > 0
    assert figures["small_pages"] == "4 KiB"
    assert "of 0.0625 GiB each" in " ".join(told(pages.lines(figures), figures, capsys).split())


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_crossing_sets_rooms_beside_a_synchronous_write_and_a_socket(capsys: pytest.CaptureFixture[str]) -> None:
    figures = crossing.measure(tokens=100, rooms=1, large_bytes=32 << 20)
    assert all(figures[f"{arena}_gb_s"] > 0 for arena in ("fresh", "half", "scattered"))
    assert figures["alone_ms"] > 0
    assert "straight from the pool" in told(crossing.LINES, figures, capsys)

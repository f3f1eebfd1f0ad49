"""Benchmarks of our own parts run, with counts so small that their figures mean nothing, and print their figures."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from pdtransfer_lab.bench.fleets import attacks, faults, load, siege
from pdtransfer_lab.commands.comparisons import bench as app

from pdtransfer.serve.commands.cli import main
from tests.support.bench_output import printed, sizes


@pytest.mark.full
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
    assert "1 decode, 100 prefill" in printed(load.LINES, figures, load.measure, capsys)


@pytest.mark.full
def test_siege_sets_each_attack_beside_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    figures = siege.measure(rooms=20, rounds=1, connections=30)
    for name in attacks.ATTACKS:
        assert figures[f"{name}_count"] > 0, name
        assert figures[f"{name}_p99_ratio"] == figures[f"{name}_us_p99"] / figures[f"{name}_quiet_us_p99"]
    assert "junk connections" in printed(siege.LINES, figures, load.measure, capsys)


def test_faults_time_aborts_and_a_healthy_peer_beside_a_frozen_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_FROZEN_SECONDS", 0.1)
    figures = faults.measure(rooms=20, aborts=10, rounds=1)
    assert 0 < int(figures["aborts"]) <= 10
    assert 0 < float(figures["abort_us_p50"]) <= float(figures["abort_us_p99"])
    assert figures["frozen_p99_ratio"] == float(figures["frozen_us_p99"]) / float(figures["quiet_us_p99"])
    assert "beside a frozen peer" in printed(faults.LINES, figures, load.measure, capsys)


def test_memory_is_what_the_kernel_reports_of_the_process() -> None:
    before = load.private_bytes(os.getpid())
    held = np.ones(64 << 20, np.uint8)
    after = load.private_bytes(os.getpid())
    assert after >= len(held)
    assert after - before > len(held) // 2


# Pages of figures


def test_a_page_of_figures_has_its_table_host_date_method_and_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["copy", "--tokens=64", "--json"]) == 0
    results = tmp_path / "results"
    results.write_text(capsys.readouterr().out)
    figures = json.loads(results.read_text())
    assert figures["bytes"] == 64 * 61 * 1_152
    assert app(["figures", str(results), f"--directory={tmp_path / 'made'}"]) == 0
    written = tmp_path / "made" / "copy.md"
    assert capsys.readouterr().out == f"{written}\n"
    page = written.read_text()
    for name in ("host", "date", "commit", "method", "title"):
        assert figures[name] in page, name
    beside = "4,497,408 bytes; what follows are shares of it"
    assert f"| one memcpy | {figures['memcpy_gb_s']:.1f} GB/s | {beside} |" in page


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '{"part": "copy"}'])
def test_what_no_benchmark_has_printed_makes_no_page(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.write_text(text)
    assert main(["bench", "figures", str(results), f"--directory={tmp_path / 'made'}"]) != 0
    assert str(results) in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# Commands

PARTS = {  # what each is called with by default
    "handoff": {"tokens": 16, "rooms": 2_000, "concurrency": 64, "beside_zmq": False},
    "handoff --beside=zmq": {"tokens": 16, "rooms": 2_000, "concurrency": 64, "beside_zmq": True},
    "load": {"rooms": 6_000, "memory_rooms": 200_000, "idle_seconds": 20, "concurrency": 64},
    "siege": {"rooms": 500, "rounds": 5, "connections": 10_000},
    "faults": {"rooms": 1_000, "aborts": 1_000, "rounds": 5},
}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_has_a_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, object]] = []
    folder = "fleets." if name in ("load", "siege", "faults") else ""
    part = importlib.import_module(f"pdtransfer_lab.bench.{folder}{name.split(maxsplit=1)[0]}")
    monkeypatch.setattr(part, "measure", lambda **given: seen.append(given) or {})
    for lines in ("LINES", "BESIDE_ZMQ"):
        monkeypatch.setattr(part, lines, (), raising=False)
    assert app([*name.split(), "--json"]) == 0
    assert seen == [PARTS[name]]
    assert {"host", "date", "method", "commit", "tables"} <= set(json.loads(capsys.readouterr().out))

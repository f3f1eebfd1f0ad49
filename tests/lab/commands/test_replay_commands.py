"""The commands `replay` and `plan` from their flags to what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdtransfer.serve.commands.cli import FAILED, MISUSED, main

RATES = ["--prefill-tokens-per-s", "10000", "--decode-step-ms", "1=10", "--decode-step-ms", "20=20"]
SHAPE = ["--bytes-per-token", "1000"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": index * 40, "input_length": 1_000, "output_length": 20, "hash_ids": [0, index + 1]}
        for index in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_replay_against_the_model_prints_its_figures(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart.svg"
    flags = ["--simulate", "--prefill", "4", "--slo-ttft-ms", "500", "--plot", str(chart), *RATES, *SHAPE]
    assert main(["replay", str(trace), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["answered"], report["trace"]["requests"], report["fleet"]["prefill"]) == (60, 60, 4)
    assert report["good"] == 60
    assert chart.stat().st_size > 1_000
    assert main(["replay", str(trace), *flags, "--limit", "7", "--speed", "2", "--scale-tokens", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "7 of 7" in text
    assert "at 2 times its speed, lengths times 0.5" in text


def test_a_plan_prints_the_smallest_fleet(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}))
    flags = ["--slo-ttft-ms", "300", "--slo-itl-ms", "15", "--model", str(tmp_path), "--jobs", "1", *RATES]
    assert main(["plan", str(trace), *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["expected"]["good_share"] >= 0.95
    assert plan["prefill"] > 1
    assert plan["a_worker"]["decode_slots"] > 0
    smaller = [
        "--simulate", "--prefill", str(plan["prefill"] - 1), "--decode", str(plan["decode"]), "--slo-ttft-ms", "300",
        "--slo-itl-ms", "15",
    ]  # fmt: skip
    assert main(["replay", str(trace), *smaller, "--model", str(tmp_path), *RATES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["good_share"] < 0.95, "a smaller one does not do"


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (["replay"], MISUSED, "router, simulate: a replay needs one"),
        (["replay", "--simulate", "--router", "http://x"], MISUSED, "router, simulate"),
        (["replay", "--router", "x"], MISUSED, "router = 'x': must be an http"),
        (["replay", "--router", "http://127.0.0.1:1"], FAILED, "http://127.0.0.1:1/v1/models"),
        (["replay", "--router", "http://127.0.0.1:1", "--users", "2"], MISUSED, "users: only for a modelled"),
        (["replay", "--simulate", *RATES], MISUSED, "bytes_per_token: not given"),
        (["replay", "--simulate", *SHAPE], MISUSED, "prefill_s: no rate is given; --prefill-tokens-per-s"),
        (["replay", "--simulate", *RATES, *SHAPE, "--decode-step-ms", "x"], MISUSED, "decode_step_ms = 'x'"),
        (["replay", "--simulate", *RATES, *SHAPE, "--rates", "/nowhere"], MISUSED, "rates = '/nowhere'"),
        (["replay", "--simulate", *RATES, *SHAPE, "--model", "/nowhere", "--speed", "0"], MISUSED, "speed = 0"),
        (["replay", "--simulate", *RATES, *SHAPE, "--plot", "a.txt"], MISUSED, "plot = 'a.txt'"),
        (["replay", "--simulate", *RATES, *SHAPE, "--from", "99"], FAILED, "no request from 99 s"),
        (["plan", *RATES, *SHAPE], MISUSED, "slo_ttft_ms, slo_itl_ms"),
        (["plan", *RATES, *SHAPE, "--slo-ttft-ms", "1"], FAILED, "slo: no fleet keeps it"),
        (
            ["plan", *RATES, *SHAPE, "--slo-ttft-ms", "1", "--arena-gib", "1", "--decode-slots", "5"],
            MISUSED,
            "arena_gib",
        ),
    ],
)
def test_a_misuse_is_named(
    trace: Path, flags: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flags[0], str(trace), *flags[1:]]) == status
    assert named in capsys.readouterr().err


def test_a_bad_trace_is_named_with_its_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + "\n{}")
    assert main(["replay", str(trace), "--simulate", *RATES, *SHAPE]) == FAILED
    assert "trace, line 61" in capsys.readouterr().err
    trace.write_bytes(b"\xff\xfe")
    assert main(["replay", str(trace), "--simulate", *RATES, *SHAPE]) == MISUSED
    assert "not UTF-8" in capsys.readouterr().err

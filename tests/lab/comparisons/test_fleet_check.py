"""The fleet model beside real daemons whose engine only takes its time: the same requests, the same prefix hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pdtransfer_lab.bench.fleets import fleet_check
from pdtransfer_lab.plan.rates import Curve, Rates
from pdtransfer_lab.replay import metrics_watch


@pytest.mark.full
def test_fleet_and_model_answer_the_same_requests_with_the_same_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_watch, "EVERY_S", 0.02)  # many times while requests are under way
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * index, "input_length": 1_536, "output_length": 40, "hash_ids": [0, index // 4, 100 + index]}
        for index in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workers = fleet_check.CheckedFleet(decode=1, options=("token_us=5", "step_ms=20", "request_ms=0.1"))
    result = fleet_check.measure(path, workers=workers, requests=12, scale=0.125)
    assert result["errors"] == {}
    assert (result["real"]["answered"], result["model"]["answered"]) == (12, 12)
    assert result["real"]["output_tokens"] == result["model"]["output_tokens"] == 12 * 5
    hits = result["compared"]["cached prompt tokens"]
    assert hits["real"] > 0
    assert hits["ratio"] == 1.0
    assert result["real"]["arena_high_water_share"] > 0


def test_rates_before_and_after_are_averaged() -> None:
    one, two = (
        Rates(prefill=Curve.of({10: size}), decode=Curve.of({1: size, 2: 2 * size}), overhead_s=size)
        for size in (1.0, 3.0)
    )
    mean = fleet_check.mean_rates(one, two)
    assert (mean.prefill(10), mean.decode(2), mean.overhead_s) == (2.0, 4.0, 2.0)

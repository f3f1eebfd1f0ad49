"""The project's goals for bench pd, of made-up results, and what is set beside published figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pdtransfer_lab.bench import pd
from pdtransfer_lab.bench import pd_goals as own
from pdtransfer_lab.bench.pd_rank import Way

from pdtransfer.serve.tracing.ttft import Split

BOTH = (50.0, 52.0), (49.0, 48.0)


def _split(**given: float) -> Split:
    """Of 8,192 tokens that take 400 ms, 577 MB of them at 50 GB/s."""
    split = Split(
        ask_s=1e-4, compute_s=0.4, exposed_s=5e-4, admission_s=1e-4, step_s=0.03, tail_s=6e-4, push_s=0.39, writes=61,
        last_bytes=8_192 * 1_152, byte_count=8_192 * 61 * 1_152,
    )  # fmt: skip
    return replace(split, **given)


def _result(*, tokens: int = 8_192, auto: Split | None = None) -> pd.Result:
    splits: dict[Way, Split] = {
        "auto": auto or _split(), "end": _split(exposed_s=0.0125), "none": _split(compute_s=0.396),
    }  # fmt: skip
    byte_count = splits["end"].byte_count
    point = pd.Point(tokens=tokens, byte_count=byte_count, roof_s=byte_count / 55e9, splits=splits, shown={})
    result = pd.Result(devices=("cuda:0", "cuda:1"), chunk_tokens=8_192, rounds=3)
    result.series.append(pd.Series(attention="mla", points=[point]))
    return result


def test_goals_report_what_was_reached_of_what_was_aimed_at() -> None:
    goals = {goal.name.removeprefix("mla, 8,192 tokens: "): goal for goal in own.goals(_result(), BOTH)}
    assert [goal.met for goal in goals.values()] == [True, True, True, True, True, False]
    assert goals["exposed transfer, of the serial transfer"].value == pytest.approx(0.04)
    assert goals["exposed transfer, of prefill's compute"].value == pytest.approx(0.00125)
    assert goals["last layer computed to READY"].aim == pytest.approx(0.5 + 8_192 * 1_152 / 55e6 / 0.95)
    assert goals["prefill slowed by the push"].value == pytest.approx(0.4 / 0.396 - 1)
    assert goals["GPU 1 while both push, of it alone"].value == pytest.approx(48 / 52)


def test_goals_that_are_missed_or_cannot_be_measured_are_reported() -> None:
    late = _split(exposed_s=0.005, tail_s=0.005, compute_s=0.42)
    assert [goal.met for goal in own.goals(_result(auto=late), None)] == [False, False, False, False, None, None]
    names = [goal.name for goal in own.goals(_result(tokens=128), BOTH)]
    assert len(names) == 4  # what is exposed of a short prompt is nobody's aim
    assert not any("exposed" in name for name in names)


def test_json_shows_whether_each_goal_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert own.show(_result(), None, json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"name", "value", "aim", "at_least", "unit", "met"} == set(shown["goals"][0])
    assert shown["goals"][0]["met"] is True
    assert shown["goals"][-1]["met"] is None
    assert shown["both_cards_gb_s"] is None
    assert shown["prompts"]["mla"]["8192"]["auto"]["writes"] == 61
    assert own.show(_result(auto=_split(exposed_s=0.005)), BOTH, json=False) == 0
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "met" in out


def test_own_shares_stand_beside_published_ones() -> None:
    result = _result(auto=_split(exposed_s=0.0044))
    result.series[0].pushed[64] = pd.Pushed(4_500_000, 2e-3, 3e-3, 1e-3)
    shares, saved, rates = own.beside(result.series[0])
    assert "2.4 % (SGLang, Mooncake)" in shares[2]
    assert shares[3] == "8,192 tokens: 1.01 % (all at the end 2.82 %)"
    assert saved[3] == "8,192 tokens: -1.83 %"
    assert rates[3] == "4.5 MB (64): 50 %"

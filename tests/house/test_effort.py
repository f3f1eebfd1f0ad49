"""Continuous integration runs every case; without --full a part of grids and examples runs, and never nothing."""

from __future__ import annotations

import pytest

from tests.support.effort import VARIABLE, Effort, is_picked, some
from tests.support.paths import REPO


def test_continuous_integration_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = (REPO / ".ci" / "run").read_text()
    assert "make test ARGS=--full" in run
    assert "for engine in vllm sglang; do" in run
    assert "make test-$engine" in run
    assert run.index("tools/venv ray") < run.index("tests_of $engine") < run.index("tests_of vllm")
    assert '"--full -m full"' in run
    monkeypatch.setenv(VARIABLE, Effort.FULL)
    assert some(100) == 100
    assert all(is_picked(f"test[{number}]") for number in range(100))


def test_without_it_a_part_of_grids_and_examples_runs_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (some(100), some(3)) == (25, 1)
    assert 150 < sum(is_picked(f"test[{number}]") for number in range(1_000)) < 350

"""Continuous integration runs every case; without --full a part of grids and examples runs, and never nothing."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.effort import VARIABLE, Effort, dealt, is_picked, some
from tests.support.paths import REPO


def test_continuous_integration_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = (REPO / ".ci" / "run").read_text()
    assert "make test ARGS=--full" in run
    assert "for engine in vllm sglang; do" in run
    assert "make test-$engine" in run
    assert run.index("tests_of $engine") < run.index("tests_of vllm")
    assert '"--full -m full"' in run
    monkeypatch.setenv(VARIABLE, Effort.FULL)
    assert some(100) == 100
    assert all(is_picked(f"test[{number}]") for number in range(100))


def test_without_it_a_part_of_grids_and_examples_runs_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (some(100), some(3)) == (25, 1)
    assert 150 < sum(is_picked(f"test[{number}]") for number in range(1_000)) < 350


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_workers_share_all_tests_and_begin_with_whole_modules_of_fleets(workers: int) -> None:
    folders = [REPO / "tests" / name for name in ("library/wire", "serve/integration", "library/sim")]
    paths = [folder / str(module) for folder in folders for module in range(9) for _ in range(module)]
    items: list[Any] = [SimpleNamespace(path=path) for path in paths]
    order = dealt(items, workers)
    assert sorted(map(id, order)) == sorted(map(id, items))
    modules = [path for path, _ in groupby(each.path for each in order)]
    assert sum(path.parent != folders[0] for path in modules) == 2 * 8, "each in one piece"
    assert modules[0].parent != folders[0]
    assert modules[-1].parent == folders[0], "short tests are left"


def test_every_module_of_tests_can_be_imported_without_the_packages_of_the_torch_engine() -> None:
    """As in the environments of other Pythons, for which there may be no torch: what needs it skips."""
    collect = """
import sys
sys.modules |= {"torch": None, "transformers": None}
import pytest
sys.exit(pytest.main(["--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider", "--fast", "tests"]))
"""
    command = [sys.executable, "-c", collect]
    collected = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert collected.returncode == 0, collected.stdout
    assert "tests/library/wire/" in collected.stdout

"""The workflow of the code host runs what .ci/run does, by targets that make all environments that their tests need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.paths import REPO

ENGINES = "vllm", "sglang"


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs make in a folder, whatever make runs this test."""
    environment = {name: text for name, text in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_its_jobs_are_the_targets_of_ci_run() -> None:
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    [job] = workflow["jobs"].values()
    targets = job["strategy"]["matrix"]["target"]
    phony = re.search(r"^\.PHONY: (.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {target.partition(" ")[0] for target in targets} <= set(phony[1].split())
    assert job["steps"][-1] == {"run": "make ${{ matrix.target }}"}
    ran = (REPO / ".ci" / "run").read_text()
    expected = re.findall(r"^make (.*) </dev/null$", ran, re.MULTILINE)
    for words in re.findall(r"^for target in (.*); do$", ran, re.MULTILINE):
        expected += words.split()
    for words in re.findall(r"^for engine in (.*); do$", ran, re.MULTILINE):
        expected += [f"test-{engine}" for engine in words.split()]
    for engine, words in re.findall(r'tests_of (\w+) .* "(.*)"$', ran, re.MULTILINE):
        expected.append(f"test-{engine} ARGS='{words}'")
    assert len(expected) >= 8
    assert sorted(targets) == sorted(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_target_makes_each_environment_that_its_tests_need(engine: str) -> None:
    needed = {engine}
    for path in (REPO / "tests" / "engines").glob(f"test_{engine}*.py"):
        needed |= set(re.findall(r"make venv-(\w+)", path.read_text()))
        needed |= {other for other in ENGINES if other in path.stem}
    assert len(needed) > 1
    # As if none was there yet.
    ran = make(REPO, "--dry-run", "--always-make", f"test-{engine}")
    assert ran.returncode == 0, ran.stderr
    assert needed - set(re.findall(r"tools/venv (\w+)", ran.stdout)) == set()


@pytest.mark.parametrize(("status", "ends", "output"), [(0, 0, ""), (1, 2, ""), (3, 0, "make venv-aiperf: its ")])
def test_only_an_environment_that_can_be_had_fails_the_target(
    tmp_path: Path, status: int, ends: int, output: str
) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(REPO / "Makefile", tmp_path)
    (tmp_path / "tools" / "venv").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "tools" / "venv").chmod(0o755)
    ran = make(tmp_path, "beside-aiperf")
    assert (ran.returncode, ran.stdout[: len(output or "x")]) == (ends, output), ran.stderr

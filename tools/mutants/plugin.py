"""What pytest does for a mutant: the nearest test files come first, hypothesis draws the same each time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REPORT, NEAREST, ALONE, LEFT_OUT = "MUTANTS_REPORT", "MUTANTS_NEAREST", "MUTANTS_ALONE", "MUTANTS_LEFT_OUT"


def pytest_configure() -> None:
    """Behind conftest's own profile, and before the tests are imported."""
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that name the mutant's module come first, or alone, and whole files stay together."""
    nearest, left_out = os.environ.get(NEAREST, ""), json.loads(os.environ.get(LEFT_OUT, "[]"))
    near = {path: nearest in path.read_text() for path in {item.path for item in items}}
    alone = bool(nearest and os.environ.get(ALONE) and any(near.values()))
    wanted = [item for item in items if item.nodeid not in left_out and (near[item.path] or not alone)]
    items[:] = sorted(wanted, key=lambda item: not near[item.path])


def pytest_runtest_logstart(nodeid: str) -> None:
    _keep("started", nodeid, "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash: Any = getattr(report.longrepr, "reprcrash", None)
        _keep("failed", report.nodeid, f"{crash.path}: {crash.message[:200]}" if crash else "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _keep("import", report.nodeid, "")


def _keep(*line: str) -> None:
    if REPORT in os.environ:
        with Path(os.environ[REPORT]).open("a") as report:
            report.write(json.dumps(line) + "\n")

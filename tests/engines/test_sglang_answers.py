"""Whatever SGLang's bootstrap server answers, nothing is raised in decode's scheduler: SGLang's own code is called, and
the plugin, without an engine."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.paths import REPO
from tests.support.sglang_engine import ENVIRONMENT, PYTHON, why_not

TIMEOUT_S = 600.0


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_any_value_of_any_field_of_a_bootstrap_servers_answers_fails_its_requests_alone() -> None:
    ran = subprocess.run(
        [PYTHON, "-m", "tests.engines.sglang_answers"], cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len({line["edge"] for line in lines}) == 3
    assert [line for line in lines if "raised" in line] == []
    right = [line for line in lines if line["case"] == "right"]
    assert [line["refused"] for line in right] == ["", "", ""]
    unnamed = [line for line in lines if line["refused"] and not _names(line["case"], line["refused"])]
    assert unnamed == []


def _names(case: str, refusal: str) -> bool:
    """Whether a refusal names the field that was wrong. Without any answer there is none to name, and SGLang's
    own comparisons have their own words."""
    field = case.partition(" ")[0]
    return field in refusal or field in ("answer", "7", "unknown") or "layout mismatch" in refusal

"""The pools of pipeline stages by SGLang's own classes, on a CPU: without a server, whose linear attention needs a
GPU."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.paths import REPO
from tests.support.sglang_engine import ENVIRONMENT, PYTHON

STAGES = [{"full": [0, 3], "linear": [1, 2]}, {"full": [4], "linear": []}, {"full": [], "linear": [5]}]


@pytest.mark.timeout(900)
def test_a_stage_has_components_of_what_its_layers_have() -> None:
    """Where they have no state SGLang lists it without buffers. It is not asked for its indices then."""
    asked = [PYTHON, "-m", "tests.engines.sglang_stage_pools", json.dumps(STAGES)]
    ended = subprocess.run(
        asked, cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    assert [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")] == [
        {"listed": ["mamba"], "asked": ["mamba"], "layers": {"kv": [0, 3], "mamba": [1, 2]}},
        {"listed": ["mamba"], "asked": [], "layers": {"kv": [4]}},
        {"listed": ["mamba"], "asked": ["mamba"], "layers": {"mamba": [5]}},
    ]

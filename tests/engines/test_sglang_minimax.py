"""MiniMax's sparse KV between SGLang's own pools, on a CPU: without a server, whose attention needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.paths import REPO
from tests.support.sglang_engine import ENVIRONMENT, PYTHON


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 16, "dense": [0, 3], "nvfp4": False},
        {"page_size": 128, "dense": [], "nvfp4": False},
        {"page_size": 128, "dense": [], "nvfp4": True},
    ],
)
def test_decode_reads_the_rows_that_prefill_has_computed(given: dict[str, object]) -> None:
    """K, V and the index's keys, behind a prefix and in chunks. Nothing but the request's pages changes."""
    asked = [PYTHON, "-m", "tests.engines.sglang_minimax_pools", json.dumps(given)]
    ended = subprocess.run(
        asked, cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    assert "of 13 requests" in ended.stdout

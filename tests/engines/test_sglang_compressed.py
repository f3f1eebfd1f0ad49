"""DeepSeek V4's compressed KV between SGLang's own pools, on a CPU: without a server, whose attention needs a GPU."""

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
        {"page_size": 256, "fp4_indexer": False, "draft": True},
        {"page_size": 256, "fp4_indexer": True, "draft": False},
        # SGLang's servers have pages of 256 alone; its classes have others too.
        {"page_size": 128, "fp4_indexer": False, "draft": False},
    ],
)
def test_decode_reads_the_rows_that_prefill_has_computed(given: dict[str, object]) -> None:
    """Of lengths on both sides of 4, 128 and 256, behind a prefix and in chunks, with other pages at decode. Nothing
    but the request's pages changes."""
    asked = [PYTHON, "-m", "tests.engines.sglang_compressed_pools", json.dumps(given)]
    ended = subprocess.run(
        asked, cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    assert "of 17 requests" in ended.stdout

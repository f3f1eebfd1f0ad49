"""SGLang's host pool as a landing place: its own pools and hooks, without a server, which would need CUDA."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.paths import REPO
from tests.support.sglang_engine import ENVIRONMENT, PYTHON, is_since


@pytest.mark.skipif(not is_since("0.5.21"), reason="this SGLang receives no request on the host")
@pytest.mark.timeout(900)
def test_a_request_lands_in_sglangs_host_pool_and_is_loaded_by_sglang() -> None:
    asked = [PYTHON, "-m", "tests.engines.sglang_host_pool"]
    ended = subprocess.run(
        asked, cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    assert "loaded what prefill has computed" in ended.stdout

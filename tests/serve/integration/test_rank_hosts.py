"""Ranks of one worker on different hosts, each beside its own of the other side: answered as by one process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.integration.rank_hosts import served
from tests.support.networks import APART, VETH, why_not_apart
from tests.support.paths import REPO


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_at_another_address_find_their_leaders_and_write_to_their_own_decode_rank(tmp_path: Path) -> None:
    mapped = asyncio.run(served(tmp_path, "127.0.0.2", "127.0.0.3", [], {}))
    assert mapped == [{"decode-0"}, {"decode-0-tp1"}]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_in_another_network_namespace_serve_with_keys_of_their_own(tmp_path: Path) -> None:
    if why := why_not_apart(VETH, "nsenter"):
        pytest.skip(why)
    command = [*APART, sys.executable, "-m", "tests.serve.integration.rank_hosts", str(tmp_path)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False,
        cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    logs = "".join(log.read_text()[-2_000:] for log in tmp_path.glob("*.log"))
    assert ran.returncode == 0, ran.stderr + logs
    assert ran.stdout == "True\n", "each prefill rank has mapped the arena of its own host, and no other"

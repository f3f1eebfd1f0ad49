"""A host that vanishes: its link loses everything in silence, and no reset and no end ever comes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.errors import Cause

_APART = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
_TRIAL = "ip link set lo up && ip link add near type veth peer name far"


def _why_not() -> str:
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    trial = subprocess.run([*_APART, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False)
    return "" if trial.returncode == 0 else f"no network namespaces here: {trial.stderr.strip()}"


@pytest.mark.timeout(240)
def test_a_host_that_vanishes_fails_its_rooms_and_ends_its_connection_and_a_healed_link_works_again(
    tmp_path: Path,
) -> None:
    """Without TCP_MAXRT both ends would keep the connection for a quarter of an hour."""
    if why := _why_not():
        pytest.skip(why)
    sockets = tmp_path / "s"
    command = [*_APART, sys.executable, "-m", "tests.support.two_hosts", str(sockets)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["cause"] == Cause.PEER_LOST, outcome["detail"]

"""A host that vanishes: its link loses everything in silence, and no reset and no end ever comes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.bus.gone import UNACKNOWLEDGED
from pdtransfer.errors import Cause
from tests.support.networks import APART, VETH, why_not_apart


@pytest.mark.timeout(240)
def test_a_host_that_vanishes_fails_its_rooms_and_ends_its_connection_and_a_healed_link_works_again(
    tmp_path: Path,
) -> None:
    """Without TCP_MAXRT both ends would keep the connection for a quarter of an hour."""
    if why := why_not_apart(VETH):
        pytest.skip(why)
    sockets = tmp_path / "s"
    command = [*APART, sys.executable, "-m", "tests.support.two_hosts", str(sockets)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["cause"] == Cause.PEER_LOST, outcome["detail"]
    assert UNACKNOWLEDGED.text in outcome["detail"], "silence alone takes much longer"

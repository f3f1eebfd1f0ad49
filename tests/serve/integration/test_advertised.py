"""What is advertised is where peers reach a daemon, whatever it is bound to; and what a firewall lets through there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pdtransfer.transports.mooncake.host import why_not
from tests.support.advertised import NAT, firewall
from tests.support.networks import APART, why_not_apart
from tests.support.paths import REPO

NATED = "ip link add near type veth peer name far && nft -f -"


@pytest.mark.timeout(300)
def test_decodes_bound_to_every_interface_are_reached_at_what_they_advertise_through_nat_and_firewall() -> None:
    if why := why_not() or why_not_apart(NATED, "nft", "nsenter", text=NAT + firewall()):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="pdt-") as files:  # short, for the sockets in it
        command = [*APART, sys.executable, "-m", "tests.support.advertised", files]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=REPO)
        logs = "".join(f"{log.name}:\n{log.read_text()[-2_000:]}" for log in sorted(Path(files).glob("*.log")))
    assert ran.returncode == 0, ran.stderr + logs
    outcome = json.loads(ran.stdout)
    assert outcome["alike"], "no answer at all"
    assert all(outcome["alike"]), logs
    assert outcome["transports"] == [[0, True], [0, True]], "KV went to both by Mooncake"
    assert outcome["engines"] >= 4, "two ports a session, and all in the range that the firewall knows"
    assert all(outcome["peer"]), "the firewall lets a worker's host in"
    assert not any(outcome["stranger"]), "and nobody else"

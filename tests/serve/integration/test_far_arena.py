"""Faults between two hosts over real TCP: every room ends once, and no byte lands in slots that are another room's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.transports.registry import TRANSPORTS
from tests.support.networks import APART, MOUNT_SYS, OWN_SYS, VETH, why_not_apart


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "over"), [("auto", "mooncake"), pytest.param("nixl", "nixl", marks=pytest.mark.full)]
)
def test_engines_that_die_and_links_that_are_cut_fail_their_room_alone_and_the_next_ones_land(
    transport: str, over: str, tmp_path: Path
) -> None:
    """Takes half a minute: engines and peers are silent for seconds before anybody gives them up."""
    if why := TRANSPORTS[over].why_not() or why_not_apart(f"{VETH} && {MOUNT_SYS}"):
        pytest.skip(why)
    command = [
        *APART,
        *OWN_SYS,
        sys.executable,
        "-m",
        "tests.serve.integration.far_arena",
        str(tmp_path / "s"),
        transport,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["over"] == {over: 1}, "two network namespaces are two hosts"
    assert len(outcome["faults"]) == 6
    crossed = [name for name, fault in outcome["faults"].items() if fault["ready"]]
    assert not crossed, "their rooms are ready, of which nothing can have crossed"
    assert outcome["ended once"]
    assert outcome["free"] == 128

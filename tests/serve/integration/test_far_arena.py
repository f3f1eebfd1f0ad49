"""Faults between two hosts over real TCP: every room ends once, and no byte lands in slots that are another room's."""

from __future__ import annotations

import pytest

from pdtransfer.bus.gone import UNACKNOWLEDGED
from pdtransfer.errors import Cause
from pdtransfer.transports.registry import TRANSPORTS
from tests.support.networks import MOUNT_SYS, VETH, apart, why_not_apart


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "over"), [("auto", "mooncake"), pytest.param("nixl", "nixl", marks=pytest.mark.full)]
)
def test_engines_that_die_and_links_that_are_cut_fail_their_room_alone_and_the_next_ones_land(
    transport: str, over: str
) -> None:
    """Takes half a minute: engines and peers are silent for seconds before anybody gives them up."""
    if why := TRANSPORTS[over].why_not() or why_not_apart(f"{VETH} && {MOUNT_SYS}"):
        pytest.skip(why)
    outcome = apart("tests.serve.integration.far_arena", transport, seconds=220, own_sys=True)
    assert outcome["over"] == {over: 1}, "two network namespaces are two hosts"
    assert len(outcome["faults"]) == 6
    crossed = [name for name, fault in outcome["faults"].items() if fault["ready"]]
    assert not crossed, "their rooms are ready, of which nothing can have crossed"
    vanished = outcome["faults"]["cut in both directions"]
    assert vanished["cause"] == Cause.PEER_LOST, vanished["detail"]
    assert UNACKNOWLEDGED.text in vanished["detail"], "silence alone takes much longer"
    assert outcome["ended once"]
    assert outcome["free"] == 128

"""What is advertised is where peers reach a daemon, whatever it is bound to; and what a firewall lets through there."""

from __future__ import annotations

import pytest

from pdtransfer.transports.mooncake.host import why_not
from tests.serve.integration.advertised import NAT, firewall
from tests.support.networks import apart, why_not_apart

NATED = "ip link add near type veth peer name far && nft -f -"


@pytest.mark.timeout(300)
def test_decodes_bound_to_every_interface_are_reached_at_what_they_advertise_through_nat_and_firewall() -> None:
    if why := why_not() or why_not_apart(NATED, "nft", "nsenter", text=NAT + firewall()):
        pytest.skip(why)
    outcome = apart("tests.serve.integration.advertised", seconds=280)
    assert outcome["alike"], "no answer at all"
    assert all(outcome["alike"])
    assert outcome["transports"] == [[0, True], [0, True]], "KV went to both by Mooncake"
    assert outcome["engines"] >= 4, "two ports a session, and all in the range that the firewall knows"
    assert all(outcome["peer"]), "the firewall lets a worker's host in"
    assert not any(outcome["stranger"]), "and nobody else"

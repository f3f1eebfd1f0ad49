"""Decode's own firewall before its engines' ports, between two hosts: a peer with a session gets in, nobody else."""

from __future__ import annotations

import pytest

from pdtransfer.transports.registry import TRANSPORTS
from tests.support.networks import MOUNT_SYS, VETH, apart, why_not_apart

OWNED = "table inet trial { flags owner\n chain input { type filter hook input priority filter; }\n }\n"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_only_the_host_of_a_session_reaches_its_engines_and_only_while_the_session_lives(transport: str) -> None:
    if why := TRANSPORTS[transport].why_not() or why_not_apart(
        f"{VETH} && {MOUNT_SYS} && nft -f -", "nft", "nsenter", text=OWNED
    ):
        pytest.skip(why)
    seen = apart("tests.serve.integration.guarded_decode", transport, seconds=140, own_sys=True)
    assert seen["alike"], "the answer is a single process's: KV went through the rules"
    assert seen["ports"] >= 2
    assert all(seen["peer"]), "prefill's host is let in"
    assert not any(seen["stranger"]), "another address of the same network is not"
    assert not any(seen["stranger of IPv6"])
    assert not seen["local user"]
    assert seen["bus"], "the bus has keys, and is not the rules' business"
    assert seen["health"]["state"] == "on"
    assert seen["health"]["admits"] == ["10.213.84.1"]
    assert seen["names"], "the rules name prefill's address with each port"
    assert not any(seen["peer after its session"])

"""A prefill that requests name in several ways, as proxies do that spell a host differently: all rooms succeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdtransfer.bus.keys import AllowList
from tests.support.bus_peers import pair as key_pair
from tests.support.client_pair import Pair, client_pair
from tests.support.internals import core_of, dialled_by, node_of


@contextmanager
def named_in_two_ways(*, keyed: bool, **more: Any) -> Iterator[tuple[Pair, tuple[str, str]]]:
    """A pair, and two endpoints of its prefill."""
    key = ""
    if keyed:
        p, d = key_pair(), key_pair()
        allowed = AllowList({p.public: "p", d.public: "d"})
        more["prefill_settings"] = {"keys": p, "allowed": allowed}
        key = f"{p.public}@"
        more["decode_settings"] = {"keys": d, "allowed": allowed}
    with client_pair(**more) as it:
        endpoint = key + it.prefill.endpoint
        yield it, (endpoint, endpoint.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
def test_rooms_of_either_name_land_whichever_comes_first(keyed: bool) -> None:
    with named_in_two_ways(keyed=keyed) as (it, names):
        for room in range(1, 41):
            it.decode.expect(room, tokens=16, sources=[names[room % 2]])
            it.send(room, 16)
            if room % 4 == 0:
                for landed in range(room - 3, room + 1):
                    it.ready(landed)
                    it.decode.release(landed)
        for room in range(1, 41):
            it.drained(room)
        assert len(core_of(it.prefill).sessions) == len(core_of(it.decode).prefill_peers.sessions) == 1
        assert len(dialled_by(node_of(it.decode).bus)) == 1

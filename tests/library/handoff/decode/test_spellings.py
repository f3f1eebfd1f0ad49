"""Several endpoints of one prefill process: one session, whatever a room calls it."""

from __future__ import annotations

from typing import Any

import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.effects import HangUp, Offer
from pdtransfer.limits import Limits
from pdtransfer.wire import Grant, Hello, Reject
from tests.support.session_ends import LIMITS, P2, DecodeEnd, P, failure, of, sent

ALIAS, ALIAS_2 = "tcp://localhost", "tcp://p0.example"


def end_of(limits: Limits = LIMITS, **options: Any) -> DecodeEnd:
    """A decode rank whose shell vouches for what processes say."""
    return DecodeEnd(limits, **{"may_be_one": lambda _, __: True} | options)


def known(end: DecodeEnd, name: str = ALIAS) -> list[Any]:
    """The endpoint is dialled, and answers as the process of another."""
    end.core.dial(name, end.now)
    return end.receive(end.welcome(), peer=name)


def test_equal_nodes_of_different_keys_or_incarnations_are_different_peers() -> None:
    key, other = ("a" * 40 + "@tcp://p0", "b" * 40 + "@tcp://p0")
    end = end_of()
    end.up(key)
    assert of(known(end, other), Offer)
    end = end_of()
    end.up()
    end.core.dial(ALIAS, end.now)
    assert of(end.receive(end.welcome(2), peer=ALIAS), Offer)


def test_equal_keys_are_one_peer_whatever_its_node_is_called() -> None:
    first, second = ("a" * 40 + "@tcp://" + host for host in ("p0", "p0.example"))
    end = end_of()
    end.up(first)
    assert of(known(end, second), HangUp) == [HangUp(second)]


@pytest.mark.parametrize("reason", ["superseded", "taken", "full"])
def test_where_the_peer_is_refused_its_other_names_are_tried_and_no_client_is_blamed(reason: str) -> None:
    end = end_of()
    end.up()
    known(end)
    end.expect(1)
    assert failure(end.receive(Reject(0, reason, ("why",)))) == (1, Cause.PEER_LOST)
    assert [name for name, _ in end.core.prefill_peers.unusable(end.now, lambda _: "")] == [P]
    assert of(end.expect(2, 8, ALIAS), fx.RoomFailed) == []
    assert of(end.receive(end.welcome(), peer=ALIAS), Offer)


def test_other_names_are_bounded_and_the_oldest_goes_first() -> None:
    end = end_of(Limits(sessions_max=2))
    end.up()
    for name in (ALIAS, ALIAS_2, P2):
        known(end, name)
    assert [end.core.prefill_peers.resolve(name, end.now) for name in (ALIAS, ALIAS_2, P2)] == [ALIAS, P, P]
    assert len(end.core.prefill_peers.peers) == 1
    effects = end.expect(1, 8, ALIAS)
    assert sent(effects, Hello), "it is dialled anew"
    assert [grant.room for grant in sent(end.receive(end.welcome(), peer=ALIAS), Grant)] == [1]


def test_other_names_take_no_places_of_peers() -> None:
    end = end_of(Limits(sessions_max=2))
    end.up()
    for number in range(50):
        known(end, f"tcp://alias{number}")
    assert of(end.core.dial(P2, end.now), fx.PeerRefused) == []

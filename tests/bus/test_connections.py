"""Which connection of a listener owns a name, and when the name changes its owner."""

from __future__ import annotations

import pytest

from pdtransfer.bus.connections import Connections, TurnedAwayError
from pdtransfer.bus.limits import BusLimits

STALE_S = 10.0
OLD, NEW = b"\0old.", b"\0new."


def superseded(now: float = 0.0) -> Connections:
    """`d` sent a Hello on OLD, then on NEW at `now`."""
    connections = Connections(BusLimits(stale_ms=int(STALE_S * 1e3)))
    for route in (OLD, NEW):
        connections.introduce(connections.find(route, "", now), "d", now)
    return connections


def test_a_superseded_connection_is_refused_while_the_newer_one_is_active() -> None:
    connections = superseded()
    for now in (1.0, STALE_S - 0.1, 2 * STALE_S - 0.2):
        with pytest.raises(TurnedAwayError, match="has a newer connection"):
            connections.introduce(connections.find(OLD, "", now), "d", now)
        with pytest.raises(TurnedAwayError, match="has a newer connection"):
            connections.check(connections.find(OLD, "", now))
        connections.find(NEW, "", now).last_message_at = now
    assert connections.route_of("d") == NEW


def test_a_superseded_connection_regains_its_name_by_hello_once_the_newer_one_is_silent() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        connections.check(connections.find(OLD, "", STALE_S))  # silence alone is not enough
    connections.introduce(connections.find(OLD, "", STALE_S), "d", STALE_S)
    connections.check(connections.find(OLD, "", STALE_S))
    assert connections.route_of("d") == OLD
    with pytest.raises(TurnedAwayError, match="has a newer connection"):
        connections.check(connections.find(NEW, "", STALE_S))
    assert len(connections) == 2


def test_a_superseded_connection_regains_its_name_at_once_when_the_newer_one_is_closed() -> None:
    connections = superseded()
    connections.forget(NEW)
    connections.introduce(connections.find(OLD, "", 0.1), "d", 0.1)
    assert connections.route_of("d") == OLD


def test_a_superseded_connection_cannot_take_another_name() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        connections.introduce(connections.find(OLD, "", STALE_S), "e", STALE_S)
    assert connections.route_of("e") is None


def test_late_messages_of_a_closed_connection_belong_to_no_peer() -> None:
    connections = superseded()
    connections.depart(NEW)
    assert connections.route_of("d") is None
    late = connections.find(NEW, "", 0.1)
    assert (late.departed, late.name) == (True, "")
    assert not connections.find(NEW, "another key", 0.1).departed
    assert not connections.find(OLD, "", 0.1).departed
    connections.depart(b"\0none")
    assert len(connections) == 2

"""Whose a name is among the connections of a listener, and when it changes hands."""

from __future__ import annotations

import pytest

from pdtransfer.bus.connections import Connections, TurnedAwayError
from pdtransfer.bus.limits import BusLimits

STALE_S = 10.0
OLD, NEW = b"\0old.", b"\0new."


def superseded(now: float = 0.0) -> Connections:
    """`d` said Hello on OLD, then on NEW at `now`."""
    connections = Connections(BusLimits(stale_ms=int(STALE_S * 1e3)))
    for route in (OLD, NEW):
        connections.introduce(connections.find(route, "", now), "d", now)
    return connections


def test_a_superseded_connection_is_refused_while_the_newer_one_speaks() -> None:
    connections = superseded()
    for now in (1.0, STALE_S - 0.1, 2 * STALE_S - 0.2):
        with pytest.raises(TurnedAwayError, match="speaks over a newer one"):
            connections.introduce(connections.find(OLD, "", now), "d", now)
        with pytest.raises(TurnedAwayError, match="speaks over a newer one"):
            connections.check(connections.find(OLD, "", now))
        connections.find(NEW, "", now).heard = now
    assert connections.route_of("d") == NEW


def test_a_superseded_connection_gets_its_name_back_by_hello_once_the_newer_one_is_silent() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        connections.check(connections.find(OLD, "", STALE_S))  # its word alone is not enough
    connections.introduce(connections.find(OLD, "", STALE_S), "d", STALE_S)
    connections.check(connections.find(OLD, "", STALE_S))
    assert connections.route_of("d") == OLD
    with pytest.raises(TurnedAwayError, match="speaks over a newer one"):
        connections.check(connections.find(NEW, "", STALE_S))
    assert len(connections) == 2


def test_a_superseded_connection_gets_its_name_back_at_once_where_the_newer_one_is_known_to_be_gone() -> None:
    connections = superseded()
    connections.forget(NEW)
    connections.introduce(connections.find(OLD, "", 0.1), "d", 0.1)
    assert connections.route_of("d") == OLD


def test_a_superseded_connection_cannot_take_another_name() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        connections.introduce(connections.find(OLD, "", STALE_S), "e", STALE_S)
    assert connections.route_of("e") is None


def test_what_a_connection_that_ended_has_left_behind_is_nobodys() -> None:
    connections = superseded()
    connections.depart(NEW)
    assert connections.route_of("d") is None
    late = connections.find(NEW, "", 0.1)
    assert (late.departed, late.name) == (True, "")
    assert not connections.find(NEW, "another key", 0.1).departed
    assert not connections.find(OLD, "", 0.1).departed
    connections.depart(b"\0none")
    assert len(connections) == 2

"""Which connection of a listener owns a name, and when the name changes its owner."""

from __future__ import annotations

import pytest

from pdtransfer.bus.connections import Connections, TurnedAwayError
from pdtransfer.bus.limits import BusLimits
from tests.support.internals import routes_of

STALE_S = 10.0
OLD, NEW = b"\0old.", b"\0new."


def superseded(now: float = 0.0) -> Connections:
    """A process of `d` sent a Hello on OLD, another on NEW at `now`."""
    connections = Connections(BusLimits(stale_ms=int(STALE_S * 1e3)))
    for route in (OLD, NEW):
        greet(connections, route, now)
    return connections


def greet(connections: Connections, route: bytes, now: float, name: str = "d", incarnation: int | None = None) -> None:
    """A Hello on this route; by default each route is a process of its own."""
    connections.introduce(connections.find(route, "", now), name, incarnation or int.from_bytes(route), now)


def joined(count: int = 2, *, same_max: int = 8) -> Connections:
    """One process of `d` sent a Hello on this many routes, one a second."""
    connections = Connections(BusLimits(stale_ms=int(STALE_S * 1e3), same_max=same_max))
    for number in range(count):
        greet(connections, route(number), float(number), incarnation=7)
    return connections


def route(number: int) -> bytes:
    return b"\0" + number.to_bytes(4)


def test_a_superseded_connection_is_refused_while_the_newer_one_is_active() -> None:
    connections = superseded()
    for now in (1.0, STALE_S - 0.1, 2 * STALE_S - 0.2):
        with pytest.raises(TurnedAwayError, match="has a newer connection"):
            greet(connections, OLD, now)
        with pytest.raises(TurnedAwayError, match="has a newer connection"):
            connections.check(connections.find(OLD, "", now))
        connections.find(NEW, "", now).last_message_at = now
    assert routes_of(connections, "d")[-1] == NEW


def test_a_superseded_connection_regains_its_name_by_hello_once_the_newer_one_is_silent() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        connections.check(connections.find(OLD, "", STALE_S))  # silence alone is not enough
    greet(connections, OLD, STALE_S)
    connections.check(connections.find(OLD, "", STALE_S))
    assert routes_of(connections, "d")[-1] == OLD
    with pytest.raises(TurnedAwayError, match="has a newer connection"):
        connections.check(connections.find(NEW, "", STALE_S))
    assert len(connections) == 2


def test_a_superseded_connection_regains_its_name_at_once_when_the_newer_one_is_closed() -> None:
    connections = superseded()
    connections.forget(NEW)
    greet(connections, OLD, 0.1)
    assert routes_of(connections, "d")[-1] == OLD


def test_a_superseded_connection_cannot_take_another_name() -> None:
    connections = superseded()
    with pytest.raises(TurnedAwayError):
        greet(connections, OLD, STALE_S, name="e")
    assert connections.named("e") is None


def test_late_messages_of_a_closed_connection_belong_to_no_peer() -> None:
    connections = superseded()
    connections.depart(NEW)
    assert connections.named("d") is None
    late = connections.find(NEW, "", 0.1)
    assert (late.departed, late.name) == (True, "")
    assert not connections.find(NEW, "another key", 0.1).departed
    assert not connections.find(OLD, "", 0.1).departed
    connections.depart(b"\0none")
    assert len(connections) == 2


def test_a_second_connection_of_one_process_supersedes_none() -> None:
    connections = joined()
    for number in (0, 1):
        assert connections.find(route(number), "", 1.0).name == "d"
        connections.check(connections.find(route(number), "", 1.0))


def test_messages_go_where_their_peer_last_sent_something_else_than_hello() -> None:
    connections = joined()
    assert routes_of(connections, "d")[-1] == route(0)
    assert connections.check(connections.find(route(1), "", 2.0))
    assert routes_of(connections, "d")[-1] == route(1)
    greet(connections, route(0), 2.1, incarnation=7)
    assert routes_of(connections, "d")[-1] == route(1)
    assert connections.check(connections.find(route(0), "", 3.0))
    assert not connections.check(connections.find(route(0), "", 3.1))
    assert routes_of(connections, "d")[-1] == route(0)


def test_a_peer_that_loses_one_of_its_connections_is_reached_by_another() -> None:
    connections = joined()
    connections.depart(route(0))
    assert routes_of(connections, "d")[-1] == route(1)
    connections.depart(route(1))
    assert connections.named("d") is None


def test_a_new_process_supersedes_all_connections_of_the_one_before() -> None:
    connections = joined(3)
    greet(connections, NEW, 3.0)
    assert routes_of(connections, "d") == [NEW]
    for number in range(3):
        with pytest.raises(TurnedAwayError, match="has a newer connection"):
            connections.check(connections.find(route(number), "", 3.0))


def test_a_connection_whose_process_is_another_now_supersedes_what_the_one_before_had_besides() -> None:
    connections = joined()
    greet(connections, route(1), 2.0, incarnation=8)
    assert routes_of(connections, "d") == [route(1)]


def test_connections_of_one_process_are_bounded_and_the_one_silent_longest_goes() -> None:
    connections = joined(3, same_max=3)
    connections.find(route(0), "", 5.0).last_message_at = 5.0
    greet(connections, route(3), 6.0, incarnation=7)
    assert sorted(routes_of(connections, "d")) == [route(0), route(2), route(3)]


def test_where_the_table_is_full_no_second_connection_costs_another_peer_its_own() -> None:
    connections = Connections(BusLimits(named_max=2))
    greet(connections, route(0), 0.0, "d", 7)
    greet(connections, route(1), 0.0, "e", 8)
    with pytest.raises(TurnedAwayError, match="the limit is 2"):
        greet(connections, route(2), 1.0, "d", 7)
    assert routes_of(connections, "d") + routes_of(connections, "e") == [route(0), route(1)]


def test_who_gets_no_place_back_has_no_name_either() -> None:
    connections = Connections(BusLimits(named_max=1, stale_ms=int(STALE_S * 1e3)))
    greet(connections, OLD, 0.0)
    greet(connections, NEW, 0.0)
    connections.forget(NEW)
    greet(connections, route(1), 0.1, "e", 8)
    for _ in range(2):
        with pytest.raises(TurnedAwayError, match="the limit is 1"):
            greet(connections, OLD, 0.2)
    assert connections.named("d") is None


def test_unnamed_connections_evict_each_other_and_never_a_named_one() -> None:
    connections = Connections(BusLimits(named_max=4, unnamed_max=8))
    greet(connections, route(0), 0.0)
    assert len(connections) == 1
    for number in range(1, 1_000):
        connections.find(route(number), "", 0.0)
    assert len(connections) == 1 + 8
    assert routes_of(connections, "d") == [route(0)]
    assert connections.find(route(0), "", 0.0).name == "d"


def test_a_full_table_refuses_new_names_until_one_is_stale() -> None:
    connections = Connections(BusLimits(named_max=2, stale_ms=10_000))
    greet(connections, route(1), 0.0, "1")
    greet(connections, route(2), 5.0, "2")
    with pytest.raises(TurnedAwayError) as refusal:
        greet(connections, route(3), 9.9, "3")
    assert refusal.value.reason == "full"
    greet(connections, route(3), 10.1, "3")
    assert [routes_of(connections, str(n)) for n in (1, 2, 3)] == [[], [route(2)], [route(3)]]


def test_superseded_connections_are_bounded_too() -> None:
    connections = Connections(BusLimits(named_max=4, unnamed_max=8))
    for number in range(100):
        greet(connections, route(number), 0.0)
    assert len(connections) <= 1 + 8
    assert routes_of(connections, "d") == [route(99)]

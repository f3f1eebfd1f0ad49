"""Which HTTP servers a request gets, and what is known of them."""

from __future__ import annotations

import pytest

from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.servers.server_pool import ServerPool
from pdtransfer.serve.router.fleet.roles import Departure
from pdtransfer.serve.router.policy.placement import NoPair, Pair

KEYS = tuple(bytes([each]) * 16 for each in range(8))


def pool(prefill: int = 2, decode: int = 2, *, healthy: bool = True, **limits: int) -> ServerPool:
    made = ServerPool([f"p{i}" for i in range(prefill)], [f"d{i}" for i in range(decode)], Limits(**limits))
    for each in made.all if healthy else ():
        made.report(each, "", 0.0)
    return made


def chosen(of: ServerPool, keys=(), avoid=()) -> tuple[str, str]:
    pair = of.choose(keys, avoid, 0.0)
    assert isinstance(pair, Pair)
    return pair.prefill.url, pair.decode.url


def test_nobody_is_chosen_before_it_is_healthy_and_the_reason_names_each() -> None:
    of = pool(healthy=False)
    none = of.choose((), (), 0.0)
    assert none == NoPair("no prefill server is healthy: p0: has not answered yet; p1: has not answered yet", None)
    assert not of.usable
    of.report(of.prefill[1], "", 0.0)
    assert not of.usable
    of.report(of.decode[0], "", 0.0)
    assert of.usable
    assert chosen(of) == ("p1", "d0")
    assert pool(prefill=0).choose((), (), 0.0) == NoPair("no prefill server is healthy: none is named", None)


def test_the_reason_names_what_an_operator_has_decided() -> None:
    of = pool(prefill=1)
    of.depart("p0", Departure.DRAINS)
    assert of.choose((), (), 0.0) == NoPair("no prefill server is healthy: p0: drained by an operator", None)


def test_the_fewest_open_requests_decide_then_the_fewest_sent() -> None:
    of = pool()
    assert [chosen(of) for _ in range(3)] == [("p0", "d0"), ("p1", "d1"), ("p0", "d0")]
    of.prefill[1].unfinished = 1
    assert [chosen(of)[0] for _ in range(3)] == ["p0"] * 3


def test_a_known_prompt_outweighs_some_open_requests_and_a_half_known_one_half_of_them() -> None:
    of = pool(prefix_weight=4)
    assert chosen(of, KEYS) == ("p0", "d0")
    for open_requests, keys, expected in ((3, KEYS, "p0"), (5, KEYS, "p1")):
        of.prefill[1].known.clear()
        of.prefill[0].unfinished = open_requests
        assert chosen(of, keys)[0] == expected
    half = KEYS[:4] + tuple(bytes([99, each]) * 8 for each in range(4))
    for open_requests, expected in ((1, "p0"), (3, "p1")):
        of.prefill[1].known.clear()
        of.prefill[0].unfinished = open_requests
        assert chosen(of, half[:4] + tuple(bytes([98, open_requests, each]) * 4 for each in range(4)))[0] == expected


def test_without_weight_or_choice_prefixes_do_not_matter() -> None:
    assert pool().places
    assert not pool(prefix_weight=0).places
    assert not pool(prefill=1, decode=1).places
    of = pool(prefix_weight=0)
    assert [chosen(of, KEYS)[0] for _ in range(2)] == ["p0", "p1"]


def test_avoided_servers_come_last() -> None:
    of = pool()
    of.prefill[1].unfinished = 50
    assert chosen(of, avoid={of.prefill[0]})[0] == "p1"
    assert chosen(of, avoid=set(of.all))[0] == "p0"


def test_a_server_that_was_down_is_met_as_a_new_one() -> None:
    of = pool()
    one = of.prefill[0]
    one.identity = {"remote_engine_id": "e"}
    one.known.learn(KEYS)
    assert of.report(one, "refused", 7.0)
    assert not of.report(one, "refused", 8.0)
    assert (one.identity, one.known.count(KEYS), one.down_since) == (None, 0, 7.0)
    assert of.report(one, "silent", 9.0)  # for another reason
    assert one.down_since == 7.0
    assert of.report(one, "", 10.0)
    assert one.usable


@pytest.mark.parametrize(("now", "overdue"), [(7.9, False), (8.0, True)])
def test_requests_of_a_server_are_lost_when_it_was_down_for_the_deadline(now: float, overdue: bool) -> None:
    of = pool(room_deadline_ms=1_000)
    of.report(of.decode[0], "refused", 7.0)
    assert of.overdue(of.decode[0], now) == overdue
    assert not of.overdue(of.decode[1], now)

"""Which HTTP servers a request gets, and what is known of them."""

from __future__ import annotations

import pytest

from pdtransfer.limits import PREFIX_PLACED_BLOCKS_MAX, Limits
from pdtransfer.serve.router.backends.servers.server_pool import NO_LISTENER, Server, ServerPool
from pdtransfer.serve.router.fleet.roles import Departure, NoPair, Pair

KEYS = tuple(bytes([each]) * 16 for each in range(8))


def pool(
    prefill: int = 2, decode: int = 2, *, healthy: bool = True, decode_computes: bool = False, **limits: int
) -> ServerPool:
    prefills, decodes = ([f"{role}{i}" for i in range(count)] for role, count in (("p", prefill), ("d", decode)))
    made = ServerPool(prefills, decodes, Limits(**limits), decode_computes=decode_computes)
    for each in made.all if healthy else ():
        made.report(each, "", 0.0)
    return made


def chosen(of: ServerPool, keys=(), avoid=()) -> tuple[str, str]:
    pair = of.choose(keys, avoid)
    assert isinstance(pair, Pair)
    return pair.prefill.url, pair.decode.url


def test_nobody_is_chosen_before_it_is_healthy_and_the_reason_names_each() -> None:
    of = pool(healthy=False)
    none = of.choose((), ())
    assert none == NoPair("no prefill server is healthy: p0: has not answered yet; p1: has not answered yet", None)
    assert not of.usable
    of.report(of.prefill[1], "", 0.0)
    assert not of.usable
    of.report(of.decode[0], "", 0.0)
    assert of.usable
    assert chosen(of) == ("p1", "d0")
    assert pool(prefill=0).choose((), ()) == NoPair("no prefill server is healthy: none is named", None)


def test_the_reason_names_what_an_operator_has_decided() -> None:
    of = pool(prefill=1)
    of.depart("p0", Departure.DRAINS)
    assert of.choose((), ()) == NoPair("no prefill server is healthy: p0: drained by an operator", None)


def test_what_is_known_of_a_server_goes_with_it() -> None:
    of = pool(prefill=2, decode=1)
    prefill, second, decode = of.all
    for server, engine in ((prefill, "e0"), (second, "e1")):
        server.identity = {"remote_engine_id": engine}
        decode.begins_alike[engine, b"kind"] = True
    of.choose(KEYS, (second,))
    of.depart(prefill.url, Departure.LEAVES)
    assert of.left(prefill)
    assert prefill.known.count(KEYS) == 0
    assert list(decode.begins_alike) == [("e1", b"kind")]
    of.report(second, "down", 1.0)
    assert not decode.begins_alike


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


@pytest.mark.parametrize(("now", "overdue"), [(10.9, False), (11.0, True)])
def test_they_are_lost_sooner_when_it_listens_no_more(now: float, overdue: bool) -> None:
    of = pool(room_deadline_ms=60_000, silence_ms=2_000)
    of.report(of.decode[0], "/health answers 503", 7.0)
    of.report(of.decode[0], NO_LISTENER, 9.0)
    of.report(of.decode[0], NO_LISTENER, 10.0)
    assert of.overdue(of.decode[0], now) == overdue


def test_they_are_lost_by_the_deadline_whatever_reasons_take_turns() -> None:
    of = pool(room_deadline_ms=60_000, silence_ms=10_000)
    for number in range(10):
        of.report(of.decode[0], (NO_LISTENER, "/health answers 503")[number % 2], 7.0 + 8.0 * number)
        assert of.overdue(of.decode[0], 7.0 + 8.0 * number) == (8.0 * number >= 60.0)


# Prompts that decode computes itself


def answered(of: ServerPool, keys: tuple[bytes, ...]) -> None:
    """A request was answered by the first decode server."""
    of.decode[0].known.learn(keys)
    of.decode[0].known.answered(keys)


def kept(of: ServerPool, keys: tuple[bytes, ...], avoid: tuple[Server, ...] = ()) -> int | None:
    """Tokens that decode is to compute; None where prefill is."""
    pair = of.choose(keys, avoid)
    assert isinstance(pair, Pair)
    assert (pair.prefill is None) is (pair.computed is not None)
    return pair.computed


def test_the_next_turn_is_decodes_and_a_prompt_that_only_begins_alike_is_not() -> None:
    of = pool(decode=1, decode_computes=True)
    assert of.places
    assert kept(of, KEYS[:4]) is None
    answered(of, KEYS[:4])
    assert kept(of, KEYS) == 4 * 64
    assert kept(of, (*KEYS[:3], b"another turn")) is None, "it begins alike, as with one system prompt"


def test_a_prompt_that_was_sent_but_not_answered_is_prefills() -> None:
    of = pool(decode=1, decode_computes=True)
    assert [kept(of, KEYS) for _ in range(2)] == [None, None]
    answered(of, KEYS[:4])
    assert kept(of, KEYS) == 4 * 64, "the rest of it may never have come"
    answered(of, KEYS)
    assert kept(of, KEYS) == 0


def test_decode_computes_so_many_tokens_at_a_time() -> None:
    of = pool(decode=1, decode_computes=True, turn_tokens_max=300)
    answered(of, KEYS[:4])
    of.decode[0].computing = 300 - 4 * 64
    assert kept(of, KEYS) == 4 * 64
    of.decode[0].known.clear()
    answered(of, KEYS[:4])
    of.decode[0].computing += 1
    assert kept(of, KEYS) is None


@pytest.mark.parametrize("how", ["another engine", "no tokens", "another server", "failed"])
def test_a_turn_is_prefills_where_decode_cannot_or_should_not_compute_it(how: str) -> None:
    limits = {"turn_tokens_max": 0} if how == "no tokens" else {}
    of = pool(decode=2, decode_computes=how != "another engine", **limits)
    answered(of, KEYS[:4])
    of.decode[0].unfinished = 50 if how == "another server" else 0
    of.decode[1].unfinished = 20
    avoid = tuple(of.decode) if how == "failed" else ()
    assert kept(of, KEYS, avoid) is None


def test_a_prompt_longer_than_what_is_looked_at_is_prefills() -> None:
    of = pool(decode=1, decode_computes=True, turn_tokens_max=1 << 20)
    keys = tuple(at.to_bytes(16) for at in range(PREFIX_PLACED_BLOCKS_MAX))
    answered(of, keys[:4])
    assert kept(of, keys) is None
    assert kept(of, keys[:-1]) is not None


def test_a_server_in_both_roles_computes_what_it_is_chosen_for_twice() -> None:
    of = ServerPool(("a", "b"), ("a", "b"), Limits())
    for each in of.all:
        of.report(each, "", 0.0)
    assert kept(of, ()) == 0
    of.decode[0].unfinished, of.prefill[1].unfinished = 3, 2
    pair = of.choose((), ())
    assert isinstance(pair, Pair)
    assert (pair.prefill, pair.decode) == (None, of.decode[1]), "open answers of both roles count"
    of.depart("b", Departure.DRAINS)
    assert not of.prefill[1].usable
    assert not of.decode[1].usable
    assert of.add("b", "decode") is None
    assert of.prefill[1].usable
    of.depart("b", Departure.LEAVES)
    assert [of.left(each) for each in (of.decode[1], of.prefill[1])] == [True, False]

"""A key is met in the roles that the allow-list gives it, whoever dials: else no session, no line and no arena."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import RoomFailed, RoomLeased
from tests.support.bus_peers import pair as keys
from tests.support.client_pair import Pair, client_pair
from tests.support.internals import core_of, lines_of, node_of

ROLES = ("prefill", "decode", "router")
RIGHT = {"prefill": "decode", "decode": "prefill"}  # the role of the other side


def listed(peer: KeyPair, name: str, *roles: str) -> AllowList:
    return AllowList({peer.public: name}, {peer.public: frozenset(roles)} if roles else {})


@contextmanager
def keyed_pair(
    prefill_lists: tuple[str, ...], decode_lists: tuple[str, ...]
) -> Iterator[tuple[Pair, KeyPair, KeyPair]]:
    """Clients with keys, and the roles that each side's list gives the other."""
    p, d = keys(), keys()
    with client_pair(
        prefill_settings={"keys": p, "allowed": listed(d, "d", *prefill_lists)},
        decode_settings={"keys": d, "allowed": listed(p, "p", *decode_lists)},
    ) as pair:
        yield pair, p, d


def source_of(pair: Pair, p: KeyPair) -> list[str]:
    return [f"{p.public}@{pair.prefill.endpoint}"]


def holds_arena(pair: Pair) -> bool:
    """Whether prefill has mapped the arena, or is about to."""
    return bool(core_of(pair.prefill).sessions or any(node_of(pair.prefill).transport.counts.values()))


@pytest.mark.parametrize("role", ["router", "decode"])
def test_a_key_of_another_role_that_is_dialled_as_prefill_never_receives_the_arena(role: str) -> None:
    with keyed_pair((), (role,)) as (pair, p, _):
        pair.decode.dial(source_of(pair, p)[0])
        pair.decode.expect(1, tokens=16, sources=source_of(pair, p))
        pair.prefill.open(1, tokens=16)
        pair.until(lambda: pair.decode_event(1, RoomFailed) or pair.prefill_event(1, RoomLeased))
        failed = pair.decode_event(1, RoomFailed)
        assert failed is not None, "the arena was handed over"
        assert failed.cause is Cause.REFUSED
        assert f"the allow-list lets p be {role}, not prefill" in failed.detail
        assert not holds_arena(pair)
        assert not core_of(pair.decode).prefill_peers.sessions
        assert not node_of(pair.prefill).bus.received, "decode has sent Hello"


@pytest.mark.parametrize(("side", "role"), [(side, role) for side in RIGHT for role in ROLES if role != RIGHT[side]])
def test_a_reload_that_takes_the_role_away_ends_sessions_and_lines_until_it_is_back(side: str, role: str) -> None:
    with keyed_pair(("decode",), ("prefill",)) as (pair, p, d):
        source, client, peer = source_of(pair, p), getattr(pair, side), (d, "d") if side == "prefill" else (p, "p")
        pair.decode.expect(1, tokens=16, sources=source)
        pair.prefill.open(1, tokens=16)
        pair.until(lambda: pair.prefill_event(1, RoomLeased))
        assert lines_of(node_of(client).bus)
        client.allow(listed(*peer, role))
        pair.until(lambda: (pair.prefill_event if side == "prefill" else pair.decode_event)(1, RoomFailed))
        if side == "prefill":
            pair.until(lambda: not holds_arena(pair))  # decode's words reach it no more: it lets go after a silence
        assert not lines_of(node_of(client).bus)
        pair.until(lambda: not core_of(pair.decode).prefill_peers.sessions)
        pair.prefill.abort(1)
        client.allow(listed(*peer, RIGHT[side]))
        pair.serves_again(source)


@pytest.mark.parametrize("lost", [*itertools.product(ROLES, ROLES)])
def test_a_session_needs_the_right_role_in_both_lists(lost: tuple[str, str]) -> None:
    """Every pair of the role that prefill lists for decode, and the one that decode lists for prefill."""
    with keyed_pair((lost[0],), (lost[1],)) as (pair, p, _):
        pair.decode.expect(1, tokens=16, sources=source_of(pair, p))
        pair.prefill.open(1, tokens=16)
        pair.until(lambda: pair.decode_event(1, RoomFailed) or pair.prefill_event(1, RoomLeased))
        assert (pair.decode_event(1, RoomFailed) is None) == (lost == ("decode", "prefill"))

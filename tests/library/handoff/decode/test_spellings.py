"""Several endpoints of one prefill process: one session, whatever a room calls it."""

from __future__ import annotations

from typing import Any

import pytest

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.effects import HangUp, Offer
from pdtransfer.limits import Limits
from pdtransfer.wire import Abort, Goodbye, Grant, Hello, Member, Registered, Reject, Welcome
from tests.support.session_ends import (
    ARENA_BYTES,
    C4,
    KV,
    LIMITS,
    P2,
    P3,
    REACH,
    DecodeEnd,
    P,
    failure,
    identity,
    of,
    sent,
)

ALIAS, ALIAS_2 = "tcp://localhost", "tcp://p0.example"


def end_of(limits: Limits = LIMITS, **options: Any) -> DecodeEnd:
    """A decode rank whose shell vouches for what processes say."""
    return DecodeEnd(limits, **{"may_be_one": lambda _, __: True} | options)


def known(end: DecodeEnd, name: str = ALIAS) -> list[Any]:
    """The endpoint is dialled, and answers as the process of another."""
    end.core.dial(name, end.now)
    return end.receive(end.welcome(), peer=name)


SECOND_RANK = Welcome(1, identity("p1", "prefill", 77, holds=C4))


def second_rank(end: DecodeEnd, name: str) -> int:
    """A session with the rank that holds the other component."""
    end.core.dial(name, end.now)
    (offer,) = of(end.receive(SECOND_RANK, peer=name), Offer)
    end.core.offered(offer.session, REACH, end.now)
    end.receive(Registered(offer.session, ARENA_BYTES), peer=name)
    return offer.session


def sent_to(effects: list[Any]) -> list[str]:
    return [effect.peer for effect in effects if isinstance(effect, fx.Send)]


@pytest.fixture
def end() -> DecodeEnd:
    return end_of()


def test_a_second_endpoint_of_a_process_opens_no_session_and_is_hung_up(end: DecodeEnd) -> None:
    session = end.up()
    effects = known(end)
    assert of(effects, Offer) == []
    assert of(effects, HangUp) == [HangUp(ALIAS)]
    assert list(end.core.prefill_peers.sessions) == [session]
    assert sent_to(end.live(30.0, P)).count(ALIAS) == 0


def test_rooms_that_name_the_second_endpoint_are_granted_on_the_session_of_the_first(end: DecodeEnd) -> None:
    session = end.up()
    known(end)
    effects = end.expect(1, 8, ALIAS)
    (grant,) = sent(effects, Grant)
    assert (grant.session, sent_to(effects)) == (session, [P])
    assert of(end.land(grant), fx.RoomReady)
    assert sent(end.expect(2), Grant)[0].session == session


def test_rooms_that_waited_at_the_second_endpoint_are_granted_when_it_answers(end: DecodeEnd) -> None:
    session = end.up()
    assert sent(end.expect(1, 8, ALIAS), Grant) == []
    (grant,) = sent(end.receive(end.welcome(), peer=ALIAS), Grant)
    assert (grant.session, grant.room) == (session, 1)


def test_the_endpoint_that_answers_first_stands_for_the_others(end: DecodeEnd) -> None:
    """Whichever was dialled first: rooms of both wait while neither has answered."""
    end.expect(1)
    end.expect(2, 8, ALIAS)
    (offer,) = of(end.receive(end.welcome(), peer=ALIAS), Offer)
    effects = end.receive(end.welcome())
    assert (of(effects, Offer), of(effects, HangUp)) == ([], [HangUp(P)])
    end.core.offered(offer.session, REACH, end.now)
    effects = end.receive(Registered(offer.session, ARENA_BYTES), peer=ALIAS)
    assert [(grant.session, grant.room) for grant in sent(effects, Grant)] == [(offer.session, 1), (offer.session, 2)]


def test_rooms_of_both_endpoints_keep_their_turns() -> None:
    end = end_of(LIMITS)
    end.up()
    grants = [end.granted(room) for room in range(1, LIMITS.window + 1)]
    end.expect(11)
    end.expect(12, 8, ALIAS)
    end.expect(13)
    end.expect(14, 8, ALIAS)
    end.receive(end.welcome(), peer=ALIAS)
    rooms = [grant.room for each in grants for grant in sent(end.land(each), Grant)]
    assert rooms == [11, 12, 13, 14]


def test_a_second_welcome_is_no_answer_to_anything(end: DecodeEnd) -> None:
    end.up()
    known(end)
    assert end.receive(end.welcome(), end.welcome(2), peer=ALIAS) == []


def test_a_new_process_is_met_by_each_endpoint_anew(end: DecodeEnd) -> None:
    end.up()
    known(end)
    end.live(1.0, P)
    end.receive(Reject(0, "hello_required", ()))
    assert of(end.receive(end.welcome(2)), Offer)
    effects = end.expect(1, 8, ALIAS)
    assert ALIAS in sent_to(effects), "it may lead elsewhere now"
    assert of(end.receive(end.welcome(), peer=ALIAS), HangUp) == [HangUp(ALIAS)]


def test_where_the_first_endpoint_is_silent_the_second_takes_over_for_both(end: DecodeEnd) -> None:
    old = end.up()
    known(end)
    lease = end.granted(1)
    end.live(3.0)
    assert end.core.prefill_peers.resolve(ALIAS, end.now) == ALIAS
    end.expect(2, 8, ALIAS)
    effects = end.receive(end.welcome(), peer=ALIAS)
    (offer,) = of(effects, Offer)
    assert of(effects, HangUp) == [HangUp(P)]
    end.core.offered(offer.session, REACH, end.now)
    assert [grant.room for grant in sent(end.receive(Registered(offer.session, ARENA_BYTES), peer=ALIAS), Grant)] == [2]
    (grant,) = sent(end.expect(3), Grant)
    assert grant.session == offer.session, "rooms that name the first endpoint go by the second"
    (peer,) = end.core.prefill_peers.peers.values()
    assert (peer.name, peer.quarantined_bytes > 0) == (ALIAS, True)
    assert sent_to(end.tick(1.0)).count(P) == 0
    end.core.fenced(old, end.now)
    assert peer.quarantined_bytes == 0
    assert lease.session == old


def test_a_process_that_sends_goodbye_stands_for_none(end: DecodeEnd) -> None:
    end.up()
    known(end)
    end.core.dial(ALIAS_2, end.now)
    end.receive(Goodbye(end.incarnation, "shutdown"))
    assert of(end.receive(end.welcome(), peer=ALIAS_2), HangUp) == []


def test_what_a_process_claims_alone_makes_it_no_other() -> None:
    """Without keys, on loopback, any user may claim a node and an incarnation that it has seen."""
    end = end_of(may_be_one=lambda _, __: False)
    session = end.up()
    assert of(known(end), Offer)
    assert sent(end.expect(1), Grant)[0].session == session


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


def test_a_room_that_names_one_rank_twice_fails(end: DecodeEnd) -> None:
    end.up(holds=KV)
    end.expect(1, 8, P, ALIAS)
    assert failure(end.receive(end.welcome(holds=KV), peer=ALIAS)) == (1, Cause.PEER_LOST)
    assert not end.core.window_slots.rooms
    with pytest.raises(LocalProtocolError, match="must name at least one rank, each once"):
        end.expect(2, 8, P, ALIAS)


def test_a_leader_and_its_ranks_may_be_named_otherwise_than_they_were_met() -> None:
    """The leader names p1 as the second rank; decode knows that as P3."""
    group = (Member("p0", ""), Member("p1", P2))
    end = end_of()
    second = second_rank(end, P3)
    end.core.dial(P2, end.now)
    assert of(end.receive(SECOND_RANK, peer=P2), HangUp) == [HangUp(P2)]
    leader = end.registered(holds=KV, group=group).session
    end.expect(1, 8, ALIAS, whole_group=True)
    grants = sent(end.receive(end.welcome(holds=KV, group=group), peer=ALIAS), Grant)
    assert {grant.session for grant in grants} == {leader, second}


def test_a_room_that_was_given_up_is_reported_to_the_peer_that_its_source_leads_to(end: DecodeEnd) -> None:
    session = end.up()
    end.expect(1, 8, ALIAS)
    end.core.abort(1, end.now)
    (abort,) = sent(end.receive(end.welcome(), peer=ALIAS), Abort)
    assert (abort.session, abort.room) == (session, 1)
    assert not end.core.withdrawals.rooms


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


def test_rooms_of_two_ranks_do_not_wait_for_each_other_when_two_lines_become_one() -> None:
    """Simulated seed 296 of "spelled": the older room held the one rank, the younger the other."""
    end = end_of(Limits(window=1))
    second_rank(end, P2)
    end.up(holds=KV)
    end.expect(1, 8, ALIAS, P2)
    end.expect(2, 8, P, P2)
    grants = sent(end.receive(end.welcome(holds=KV), peer=ALIAS), Grant)
    assert [grant.room for grant in grants] == [1, 1]
    assert end.core.prefill_peers.peers[P].session.reserved == 0

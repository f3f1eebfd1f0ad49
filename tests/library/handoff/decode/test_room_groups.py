"""Rooms that name the leader of a prefill worker alone: its Welcome names the other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.wire import Grant, Hello, Member, Pong, Registered
from tests.support.session_ends import ARENA_BYTES, C4, KV, LIMITS, P2, P3, REACH, DecodeEnd, P, failure, of, sent

GROUP = (Member("p0", ""), Member("p1", P2))  # the leader holds kv, the other rank c4


@pytest.fixture
def end() -> DecodeEnd:
    return DecodeEnd()


def greeted(effects: list[Any]) -> list[str]:
    return [effect.peer for effect in effects if isinstance(effect, fx.Send) and isinstance(effect.message, Hello)]


def test_a_leader_is_greeted_alone_and_its_welcome_has_the_others_dialled(end: DecodeEnd) -> None:
    assert greeted(end.expect(1, whole_group=True)) == [P]
    effects = end.receive(end.welcome(holds=KV, group=GROUP))
    assert of(effects, fx.Dial) == [fx.Dial(P), fx.Dial(P2)]
    assert greeted(effects) == [P2]
    assert effects.index(fx.Dial(P2)) < next(
        index for index, effect in enumerate(effects) if isinstance(effect, fx.Send) and effect.peer == P2
    )


def test_the_room_is_granted_to_every_rank_of_the_group_and_its_leader_sends_the_aux(end: DecodeEnd) -> None:
    end.up(P, holds=KV, group=GROUP)
    assert sent(end.expect(1, whole_group=True), Grant) == []
    end.core.dial(P2, end.now)
    first, second = _registered(end, _session(end.receive(end.welcome(holds=C4), peer=P2)))
    assert (first.room, first.send_aux, second.room, second.send_aux) == (1, True, 1, False)


def _registered(end: DecodeEnd, session: int) -> list[Grant]:
    end.core.offered(session, REACH, end.now)
    return sent(end.receive(Registered(session, ARENA_BYTES), peer=P2), Grant)


def test_a_leader_that_is_known_names_the_sources_at_once(end: DecodeEnd) -> None:
    end.up(P, holds=KV, group=GROUP)
    end.up(P2, holds=C4)
    assert len(sent(end.expect(1, whole_group=True), Grant)) == 2


def test_a_rank_without_others_leads_itself(end: DecodeEnd) -> None:
    end.up()
    assert len(sent(end.expect(1, whole_group=True), Grant)) == 1


def test_a_room_of_two_leaders_waits_for_both(end: DecodeEnd) -> None:
    end.up(P, holds=KV)
    assert of(end.expect(1, 8, P, P2, whole_group=True), fx.Dial) == []
    assert of(end.receive(end.welcome(holds=C4), peer=P2), fx.Dial) == [fx.Dial(P), fx.Dial(P2)]


def test_a_room_whose_ranks_become_known_queues_behind_those_that_wait_already() -> None:
    """Before them at one rank and behind them at another, both would wait for each other permanently."""
    end = DecodeEnd(replace(LIMITS, window=1))
    end.expect(1, whole_group=True)
    end.expect(2, 8, P2, P)
    end.up(P2, holds=C4)
    session = _session(end.receive(end.welcome(holds=KV, group=GROUP)))
    end.core.offered(session, REACH, end.now)
    grants = sent(end.receive(Registered(session, ARENA_BYTES)), Grant)
    assert [grant.room for grant in grants] == [2, 2]


def _session(effects: list[Any]) -> int:
    (offer,) = of(effects, fx.Offer)
    return offer.session


def test_an_unknown_leader_fails_the_room_when_it_has_been_silent(end: DecodeEnd) -> None:
    end.expect(1, whole_group=True)
    assert failure(end.tick(2.6)) == (1, Cause.PEER_LOST)
    assert not end.core.unnamed


def test_a_room_gives_a_silent_leader_no_more_time_while_others_wait_for_it() -> None:
    end = DecodeEnd(replace(LIMITS, ping_ms=700))
    end.expect(1, whole_group=True)
    end.tick(2.05)  # it has been silent since 2.0, which is noticed at 2.1
    assert failure(end.expect(2, whole_group=True)) == (2, Cause.PEER_LOST)
    assert failure(end.tick(0.1)) == (1, Cause.PEER_LOST)


def test_a_leader_that_is_refused_fails_the_room(end: DecodeEnd) -> None:
    end.expect(1, whole_group=True)
    assert failure(end.receive(end.welcome(model="another"))) == (1, Cause.REFUSED)


def test_a_silent_member_fails_the_room(end: DecodeEnd) -> None:
    end.up(P, holds=KV, group=GROUP)
    end.expect(1, whole_group=True)
    effects = end.live(2.6, P)
    (failed,) = of(effects, fx.RoomFailed)
    assert (failed.cause, failed.detail[: len(P2)]) == (Cause.PEER_LOST, P2)


def test_a_member_that_cannot_be_dialled_fails_the_room_and_is_tried_again(end: DecodeEnd) -> None:
    end.up(P, holds=KV, group=GROUP)
    end.expect(1, whole_group=True)
    effects = end.core.undialled(P2, Cause.REFUSED, "no endpoint", end.now)
    assert of(effects, fx.RoomFailed) == [fx.RoomFailed(1, Cause.REFUSED, "no endpoint")]
    assert P2 not in end.core.prefill_peers.peers
    effects = end.expect(2, whole_group=True)
    assert fx.Dial(P2) in effects
    assert greeted(effects) == [P2]


def test_a_deadline_and_an_abort_end_a_room_that_waits_for_its_leader(end: DecodeEnd) -> None:
    end.expect(1, deadline=0.5, whole_group=True)
    end.expect(2, whole_group=True)
    assert failure(end.core.abort(2, end.now)) == (2, Cause.ABORTED)
    (failed,) = of(end.tick(0.6), fx.RoomFailed)
    text = f"not ready in time, still connecting: no session with prefill is up yet ({P})"
    assert (failed.cause, failed.detail) == (Cause.DEADLINE, text)
    assert not end.core.unnamed
    assert of(end.receive(end.welcome(group=GROUP)), fx.Dial) == []


@pytest.mark.parametrize("second", [P2, P3], ids=["same", "changed"])
def test_a_room_that_waits_at_a_restarted_leader_goes_on_unless_its_group_has_changed(
    end: DecodeEnd, second: str
) -> None:
    end.up(P, holds=KV, group=GROUP)
    end.up(P2, holds=C4)
    for room in range(1, 6):
        end.expect(room, whole_group=True)
    assert [room.id for room in end.core.window_slots.rooms.at(P)] == [5]
    restarted = of(end.receive(Pong(2)), fx.RoomFailed)
    assert {(each.room, each.cause) for each in restarted} == {(room, Cause.PEER_RESTARTED) for room in range(1, 5)}
    end.tick(0.1)  # until Hello
    effects = end.receive(end.welcome(2, holds=KV, group=(GROUP[0], Member("p1", second))))
    text = f"{P} leads another group of ranks now"
    assert of(effects, fx.RoomFailed) == ([] if second == P2 else [fx.RoomFailed(5, Cause.PEER_RESTARTED, text)])
    assert list(end.core.rooms) == ([5] if second == P2 else [])

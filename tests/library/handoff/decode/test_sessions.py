"""Decode's side of a hand-off, where a scenario in text does not do: counts, loops, and what is inside."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode import waiting_rooms
from pdtransfer.handoff.effects import Offer, PeerRefused, SessionLost
from pdtransfer.limits import AHEAD_MAX
from pdtransfer.wire import Goodbye, Grant, Hello, Pong, Registered, Reject, Withdrawn
from tests.library.sim.pools import LAYERS, ROW
from tests.support.session_ends import LIMITS, P2, REACH, DecodeEnd, P, failure, kv_bytes, of, sent


@pytest.fixture
def end() -> DecodeEnd:
    return DecodeEnd()


def test_whether_sessions_cover_a_room_is_reckoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reckoned: list[object] = []
    monkeypatch.setattr(waiting_rooms, "uncovered", lambda components, shares: reckoned.append(shares) or "")
    end = DecodeEnd()
    for peer in (P, P2):
        end.up(peer)
    for room in range(1, 4):
        end.land(end.granted(room, 1, P))
    assert len(sent(end.expect(4, 1, P, P2), Grant)) == 2
    assert len(reckoned) == 2, "once for P alone, once for both"


def test_a_grant_that_no_frame_could_carry_fails_its_room_and_nobody_elses() -> None:
    end = DecodeEnd(replace(LIMITS, window=9_000), slots=32_768)
    end.core.dial(P, 0.0)
    (offer,) = of(end.receive(end.welcome(frame_bytes_max=1 << 16, window=0xFFFF)), Offer)
    reach = msgspec.structs.replace(REACH, arena_bytes=2 * 32_768 * LAYERS * ROW)
    end.core.offered(offer.session, reach, 0.0)
    end.receive(Registered(offer.session, reach.arena_bytes))
    ones = end.core.arena.free[0]
    held = [ones.allocate(1) for _ in range(32_768)]
    ones.free(np.concatenate(held[::2]))  # every other slot: 16,384 extents of one
    assert failure(end.expect(1, tokens=9_000)) == (1, Cause.FULL)
    assert ones.free_slots == 16_384
    assert end.granted(2, tokens=8_000).room == 2


def test_a_reject_that_wants_a_hello_gets_one_in_resend_ms_however_often_it_comes(end: DecodeEnd) -> None:
    end.up()
    end.tick(0.3)
    want = Reject(0, "hello_required", ())
    assert len(sent(end.receive(*[want] * 50), Hello)) == 1
    for _ in range(20):
        assert sent(end.receive(end.welcome(), want, want), Hello) == []
    assert sent(end.tick(0.1), Hello) == []
    assert len(sent(end.receive(*[want] * 50), Hello)) == 1


def test_rooms_of_a_peer_that_refuses_this_node_are_named_to_it_in_three_hellos_of_at_most_64(end: DecodeEnd) -> None:
    """Without a session no Abort can name them."""
    no = Reject(0, "refused", ("block_size: d0 has '32', p0 '16'",))
    for room in range(1, 101):
        end.expect(room)
    end.receive(no)
    named = list[tuple[Withdrawn, ...]]()
    for _ in range(100):
        for hello in sent(end.tick(0.1), Hello):
            named.append(hello.withdrawn)
            end.receive(no)
    assert [len(each) for each in named[:2]] == [64, 64]
    assert {each.room for each in named[0] + named[1]} == set(range(1, 101)), "each within two Hellos"
    assert Counter(room.room for rooms in named for room in rooms) == dict.fromkeys(range(1, 101), 3)
    assert named[0][0].detail == f"refused: {P} refuses (refused): block_size: d0 has '32', p0 '16'"
    assert named[-1] == ()
    assert not end.core.withdrawals.rooms


def test_an_arena_that_cannot_be_offered_is_reported_once_until_a_session_is_up(end: DecodeEnd) -> None:
    end.expect(1)
    reported = []
    for _ in range(3):
        (offer,) = of(end.receive(end.welcome()), Offer)
        effects = end.core.unoffered(offer.session, "p0 takes shm", end.now)
        reported += [*of(effects, PeerRefused), *of(effects, SessionLost)]
        assert end.core.prefill_peers.unusable(end.now, lambda _: "") == [(P, "p0 takes shm")]
        end.core.fenced(offer.session, end.now)
        end.tick(3.0)
    assert [type(each) for each in reported] == [PeerRefused]


def test_a_silent_peer_without_a_session_is_unusable_while_it_cannot_be_reached(end: DecodeEnd) -> None:
    end.expect(1)
    peers = end.core.prefill_peers
    assert peers.unusable(end.now, lambda _: "no way there") == [], "it has its time to answer"
    end.tick(4.0)
    assert peers.unusable(end.now, lambda _: "no way there") == [(P, "no way there")]
    assert peers.unusable(end.now, lambda _: "") == [], "it is connected: it may answer any moment"


def test_one_peer_cannot_use_up_all_sessions(end: DecodeEnd) -> None:
    end.core.dial(P, 0.0)
    opened = []
    for life in range(1, 9):
        effects = end.receive(end.welcome(incarnation=life))
        opened += of(effects, Offer)
        end.receive(Pong(life + 100))
        end.tick(1.0)
    assert len(opened) == LIMITS.peer_sessions_max
    assert failure(end.expect(1) + end.live(1.0, P)) == (1, Cause.FULL)
    assert end.up(P2)
    end.core.fenced(opened[0].session, end.now)
    assert of(end.live(1.0, P), Offer)


def test_bytes_in_flight_are_those_that_cross() -> None:
    end = DecodeEnd(replace(LIMITS, prefix_block_tokens=8))
    end.up()
    keys = end.core.cache.keys(np.arange(20, dtype="<u4").tobytes(), b"")
    end.land(end.granted(1, 20, keys=keys))
    end.core.release(1, end.now)
    first, _ = (end.granted(room, 20, keys=keys) for room in (2, 3))
    assert end.core.admission.inflight_bytes == 2 * (kv_bytes(20) - kv_bytes(16))
    end.land(first)
    end.core.abort(3, end.now)
    assert end.core.admission.inflight_bytes == 0


@pytest.mark.parametrize(("sessions_max", "ahead"), [(1, 0), (2, 1), (5, 2), (1_024, AHEAD_MAX)])
def test_half_of_the_places_are_kept_for_peers_that_rooms_name(sessions_max: int, ahead: int) -> None:
    end = DecodeEnd(replace(LIMITS, sessions_max=sessions_max))
    names = [f"tcp://p{number}" for number in range(AHEAD_MAX + 1)]
    for name in names:
        if end.core.may_dial_ahead(name, end.now):
            end.core.dial(name, 0.0)
    assert list(end.core.prefill_peers.peers) == names[:ahead]
    assert all(end.core.may_dial_ahead(name, end.now) for name in names[:ahead]), "whoever has a place takes no other"
    end.expect(1, 8, "tcp://named")
    assert list(end.core.prefill_peers.peers) == [*names[:ahead], "tcp://named"]
    end.core.drain()
    assert not end.core.may_dial_ahead("tcp://named", end.now)


def test_every_peer_without_a_session_is_being_greeted(end: DecodeEnd) -> None:
    """What keeps a peer from being lost for good: checked after whatever the other tests of this file do to one."""
    for message in (
        end.welcome(), Pong(5), end.welcome(incarnation=5), Reject(0, "full", ()), end.welcome(incarnation=5),
        Goodbye(5, "shutdown"), end.welcome(incarnation=6), Reject(0, "hello_required", ()), Pong(7),
        end.welcome(incarnation=7, model="x"), end.welcome(incarnation=8),
    ):  # fmt: skip
        end.core.dial(P, end.now)
        end.receive(message)
        peer = end.core.prefill_peers.peers[P]
        assert peer.session is not None or ("hello", P, 0) in end.core.prefill_peers.timers
        end.tick(0.3)
        peer = end.core.prefill_peers.peers[P]
        assert peer.session is not None or ("hello", P, 0) in end.core.prefill_peers.timers

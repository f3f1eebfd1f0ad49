"""A peer that is connected and does not answer is slow; only evidence, or much longer silence, makes it a lost one."""

from __future__ import annotations

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import Fence, RoomFailed, RoomReady, SessionLost
from pdtransfer.handoff.states import SessionState
from pdtransfer.limits import Limits
from pdtransfer.wire import Grant, Granted, Pong
from tests.support.session_ends import P2, DecodeEnd, P, failure, of, sent

LIMITS = Limits()  # as daemons and adapters have them
REFUSED = "nothing listens there"


def state(end: DecodeEnd) -> SessionState:
    session = end.core.prefill_peers.peers[P].session
    assert session is not None
    return session.state


def test_a_peer_that_answers_after_seconds_loses_no_room() -> None:
    """As on two cores beside two busy engines: "has been silent for 2299 ms", and every process was alive."""
    end = DecodeEnd(LIMITS)
    end.up()
    grant = end.granted(1)
    assert of(end.tick(LIMITS.silence_ms / 1e3 - 0.1), RoomFailed) == []
    assert of(end.land(grant), RoomReady)


def test_a_frozen_peer_is_found_all_the_same() -> None:
    end = DecodeEnd(LIMITS)
    end.up()
    end.granted(1)
    effects = end.tick(LIMITS.silence_ms / 1e3 + LIMITS.ping_ms / 1e3)
    assert failure(effects) == (1, Cause.PEER_LOST)
    assert of(effects, Fence)
    assert state(end) is SessionState.SILENT


def test_a_slow_peer_is_granted_nothing_until_it_is_seen_again() -> None:
    end = DecodeEnd(LIMITS)
    end.up()
    end.up(P2)
    first = end.granted(1)
    end.receive(Granted(first.session, first.grant))
    end.live(LIMITS.slow_ms / 1e3 + LIMITS.ping_ms / 1e3, P2)
    assert state(end) is SessionState.SLOW
    free = end.free
    assert sent(end.expect(2), Grant) == []
    assert end.free == free, "it holds no slot that other peers' rooms could have"
    assert of(end.land(end.granted(3, 8, P2), P2), RoomReady)
    assert [each.room for each in sent(end.receive(Pong(1)), Grant)] == [2]
    assert state(end) is SessionState.UP


def test_a_peer_that_is_gone_is_lost_as_soon_as_it_is_slow() -> None:
    end = DecodeEnd(LIMITS)
    end.up()
    end.granted(1)
    assert end.core.gone(P, REFUSED, end.now) == []
    assert of(end.tick(LIMITS.slow_ms / 1e3 - 0.1), RoomFailed) == []
    effects = end.tick(0.1 + LIMITS.ping_ms / 1e3)
    assert failure(effects) == (1, Cause.PEER_LOST)
    (lost,) = of(effects, SessionLost)
    assert REFUSED in lost.detail
    assert end.core.leases.quarantined_bytes, "no evidence frees what its writer may still write"


def test_evidence_about_a_slow_peer_counts_once_it_has_stood_for_a_while() -> None:
    end = DecodeEnd(LIMITS)
    end.up()
    end.granted(1)
    assert of(end.tick(LIMITS.slow_ms / 1e3 + 1.0), RoomFailed) == []
    assert of(end.core.gone(P, REFUSED, end.now), RoomFailed) == [], "it may only be a connection that broke"
    end.now += LIMITS.slow_ms / 2e3
    assert failure(end.core.gone(P, REFUSED, end.now)) == (1, Cause.PEER_LOST)


def test_a_mere_reconnect_costs_no_room() -> None:
    end = DecodeEnd(LIMITS)
    end.up()
    end.granted(1)
    end.core.gone(P, REFUSED, end.now)
    end.tick(1.0)
    end.core.gone(P, "", end.now)  # it is connected again
    assert of(end.tick(5.0), RoomFailed) == []


def test_evidence_about_a_peer_that_nobody_knows_is_nothing() -> None:
    assert DecodeEnd(LIMITS).core.gone(P, REFUSED, 0.0) == []

"""Liveness: late messages of dead processes are told from those of the current one, and silence has one threshold."""

from __future__ import annotations

import pytest

from pdtransfer.handoff.liveness import Liveness
from pdtransfer.handoff.timers import backoff_ms
from pdtransfer.limits import EARLIER_INCARNATIONS_MAX, Limits

LIMITS = Limits(silence_ms=2_000, session_silence_ms=30_000, resend_ms=200, resend_ms_max=1_000)


def test_an_earlier_process_is_late_until_silence_ms_have_passed() -> None:
    peer = Liveness(LIMITS, now=0.0, incarnation=1)
    assert not peer.restarted(1, now=1.0)
    assert peer.restarted(2, now=2.0)
    assert peer.late(1, now=3.9)
    assert not peer.late(2, now=3.9)
    assert not peer.late(1, now=4.1), "incarnations have no order: the one that still sends is the current one"
    assert peer.restarted(1, now=4.1)
    assert peer.late(2, now=4.2)
    assert not peer.late(1, now=4.2)


def test_the_first_incarnation_replaces_none() -> None:
    peer = Liveness(LIMITS, now=0.0)
    assert not peer.restarted(7, now=0.0)
    assert peer.incarnation == 7


def test_few_earlier_incarnations_are_kept() -> None:
    peer = Liveness(LIMITS, now=0.0, incarnation=0)
    for incarnation in range(1, EARLIER_INCARNATIONS_MAX + 2):
        peer.restarted(incarnation, now=0.0)
    assert [peer.late(each, now=0.0) for each in range(3)] == [False, True, True]


@pytest.mark.parametrize("silence_ms", [None, 30_000])
def test_a_peer_is_silent_from_silent_at_on(silence_ms: int | None) -> None:
    seconds = 2.0 if silence_ms is None else 30.0
    peer = Liveness(LIMITS, now=0.1, silence_ms=silence_ms)
    assert peer.silent_at == pytest.approx(0.1 + seconds)
    assert peer.silent(peer.silent_at)
    assert not peer.silent(peer.silent_at - 1e-6)
    assert peer.silent_ms(1.1) == pytest.approx(1_000.0)
    peer.last_seen = 50.0
    peer.leave(50.0)
    assert peer.silent(50.0)


def test_hello_repeats_ever_later_up_to_a_bound() -> None:
    peer = Liveness(LIMITS, now=0.0)
    assert [peer.next_hello_ms() for _ in range(5)] == [200, 400, 800, 1_000, 1_000]
    peer.hello_ms = 0
    assert peer.next_hello_ms() == 200
    assert backoff_ms(5, 50, 500) == 50

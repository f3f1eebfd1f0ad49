"""Liveness: late messages of dead processes are not the current one's, and silence has one threshold."""

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
    assert [peer.late(index, now=0.0) for index in range(3)] == [False, True, True]


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


def test_evidence_makes_a_slow_peer_lost_and_without_it_the_peer_has_until_silence_ms() -> None:
    peer = Liveness(Limits(slow_ms=500, silence_ms=2_000), now=0.0)
    assert not peer.slow(0.4)
    assert peer.slow(0.5)
    assert not peer.silent(1.9)
    assert peer.silent(2.0)
    peer.report("nothing listens there", 0.1)
    assert not peer.silent(0.4), "it has this long to come back"
    assert peer.silent(0.5)
    assert peer.why("k@%@tcp://p:1", 0.5) == "tcp://p:1 has been silent for 500 ms: nothing listens there"
    peer.seen(0.5)
    assert not peer.gone
    assert not peer.silent(2.4)
    peer.report("nothing listens there", 1.5)
    peer.report("nothing listens there", 1.7)
    assert not peer.silent(1.74)
    assert peer.silent(1.75), "it was slow by then, and has half of slow_ms to come back"
    peer.report("nothing listens there", 2.45)
    assert peer.silent(2.5), "in no case longer than without evidence"


def test_a_limit_of_silence_below_slow_ms_counts_alone() -> None:
    peer = Liveness(Limits(slow_ms=2_000, silence_ms=300), now=0.0)
    peer.report("nothing listens there", 0.0)
    assert peer.slow(0.3)
    assert peer.silent(0.3)


def test_hello_repeats_ever_later_up_to_a_bound() -> None:
    peer = Liveness(LIMITS, now=0.0)
    assert [peer.next_hello_ms() for _ in range(5)] == [200, 400, 800, 1_000, 1_000]
    peer.hello_ms = 0
    assert peer.next_hello_ms() == 200
    assert backoff_ms(5, 50, 500) == 50

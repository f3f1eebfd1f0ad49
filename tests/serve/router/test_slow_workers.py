"""A worker that does not answer is slow: it comes last, and is lost by evidence or after much longer silence."""

from __future__ import annotations

from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.daemons.router_effects import WorkerChanged
from pdtransfer.wire import Begin, Pong
from tests.serve.router.routing_bench import P2, Bench, D, P

LIMITS = Limits()
SLOW_S = LIMITS.slow_ms / 1e3 + LIMITS.ping_ms / 1e3


def prefill_of(bench: Bench) -> str:
    assert isinstance(bench.submit(), int)
    return next(effect.peer for effect in bench.effects if isinstance(effect.message, Begin) and effect.peer != D)


def test_a_slow_worker_gets_rooms_only_where_no_other_can() -> None:
    bench = Bench(prefill=(P, P2), limits=LIMITS)
    bench.wait(SLOW_S, silent=P)
    assert {prefill_of(bench) for _ in range(4)} == {P2}
    bench.receive(P, Pong(1))
    assert P in {prefill_of(bench) for _ in range(4)}
    alone = Bench(limits=LIMITS)
    alone.wait(SLOW_S, silent=P)
    assert prefill_of(alone) == P


def test_a_worker_that_answers_late_keeps_its_rooms() -> None:
    bench = Bench(limits=LIMITS)
    assert prefill_of(bench) == P
    bench.silence(LIMITS.silence_ms / 1e3 - 0.1)
    assert not bench.of(WorkerChanged)
    bench.silence(LIMITS.ping_ms / 1e3)
    assert {each.peer for each in bench.of(WorkerChanged)} == {P, D}


def test_a_worker_whose_messages_wait_to_be_read_is_slow_and_not_silent() -> None:
    bench, workers = Bench(prefill=(P, P2), limits=LIMITS), set[str]()
    for _ in range(3 * LIMITS.silence_ms // LIMITS.ping_ms):
        bench.routing.workers.look_unread(lambda peer: peer in (P, D), bench.now)
        bench.silence(LIMITS.ping_ms / 1e3)
        workers |= {change.peer for change in bench.of(WorkerChanged)}
    assert workers == {P2}
    assert prefill_of(bench) == P
    bench.silence(LIMITS.silence_ms / 1e3)
    assert {change.peer for change in bench.of(WorkerChanged)} == {P, D}, "all was read, and no answer was among it"


def test_a_worker_that_is_gone_is_lost_as_soon_as_it_is_slow() -> None:
    bench = Bench(prefill=(P, P2), limits=LIMITS)
    assert bench.routing.gone(P, "nothing listens there", bench.now) == []
    bench.wait(SLOW_S, silent=P)
    (lost,) = bench.of(WorkerChanged)
    assert lost.peer == P
    assert "nothing listens there" in lost.why
    assert bench.routing.gone("tcp://unknown:1", "nothing listens there", bench.now) == []
    assert bench.routing.workers.why_not(lambda _: "nothing listens there")[P] == lost.why, "stated once"


def test_evidence_that_is_withdrawn_counts_no_more() -> None:
    bench = Bench(limits=LIMITS)
    bench.routing.gone(P, "nothing listens there", bench.now)
    bench.silence(1.0)
    bench.routing.gone(P, "", bench.now)
    bench.silence(3.0)
    assert not bench.of(WorkerChanged)

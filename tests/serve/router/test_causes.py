"""Why a router serves nothing: workers that cannot work together, two of one name, and one that has said Goodbye."""

from __future__ import annotations

from collections import Counter
from string import ascii_letters

import msgspec
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.liveness import NAME_TAKEN, Liveness
from pdtransfer.handoff.peers import Send
from pdtransfer.serve.router.backends.daemons import worker_pool
from pdtransfer.serve.router.backends.daemons.router_effects import Fail, WorkerChanged
from pdtransfer.serve.router.backends.daemons.workers import Worker, obstacle
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.wire import Begin, Goodbye, Hello, Reject, Unusable, Welcome
from tests.serve.router.routing_bench import D2, LOAD, P2, Bench, D, P
from tests.support.routing_world import LIMITS, identity

FOUND_S = (LIMITS.silence_ms + 2 * LIMITS.resend_ms_max) / 1e3 + 1.0  # decode should have found a prefill by then
REFUSED = msgspec.structs.replace(LOAD, unusable=(Unusable(P, "it refused the key of this node"),))


def whys(bench: Bench) -> dict[str, str]:
    return bench.routing.workers.why_not(lambda _: "")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_pair_that_decode_reports_as_unusable_gets_no_request_and_is_not_ready() -> None:
    bench = Bench(loads={D: REFUSED})
    bench.wait(FOUND_S)
    assert not bench.routing.workers.models()
    assert whys(bench) == dict.fromkeys((P, D), "d0 cannot use p0: it refused the key of this node")
    assert "can work together; the router's /health has the reason" in str(bench.submit())
    bench.receive(D, LOAD)
    assert list(bench.routing.workers.models()) == ["m"]
    assert whys(bench) == {P: "", D: ""}
    assert isinstance(bench.submit(), int)


def test_a_prefill_that_has_come_back_has_its_time_to_be_found_by_decode(bench: Bench) -> None:
    bench.wait(FOUND_S)
    bench.welcome(P, incarnation=2)
    bench.receive(D, REFUSED)
    bench.receive(P, LOAD)  # ready at last
    assert isinstance(bench.submit(), int), "its room waits for the session"
    bench.wait(FOUND_S)
    assert isinstance(bench.submit(), AnswerFailedError)


def test_requests_go_to_the_pairs_that_are_left() -> None:
    bench = Bench(
        prefill=(P, P2), decode=(D, D2), loads={D: REFUSED, D2: msgspec.structs.replace(REFUSED, slots_free=1)}
    )
    bench.wait(FOUND_S)
    for _ in range(4):
        assert isinstance(bench.submit(), int)
        begun = {e.peer for e in bench.effects if isinstance(e, Send) and isinstance(e.message, Begin)}
        assert P not in begun
        assert P2 in begun
    assert whys(bench)[P].startswith("d0 cannot use p0: ")
    assert whys(bench) | {P: ""} == dict.fromkeys((P, P2, D, D2), "")


def test_a_full_prefill_that_alone_can_be_used_is_waited_for() -> None:
    bench = Bench(prefill=(P, P2), loads={D: REFUSED, P2: msgspec.structs.replace(LOAD, rooms_queued=LIMITS.queue_max)})
    bench.wait(FOUND_S)
    assert bench.submit().cause is Cause.FULL


def test_workers_without_a_common_transport_are_not_ready(bench: Bench) -> None:
    far = msgspec.structs.replace(identity("p0", "prefill", 2), transports=("mooncake",))
    bench.receive(P, Welcome(1, far))
    bench.receive(P, LOAD)
    assert not bench.routing.workers.models()
    assert whys(bench)[P] == "d0 cannot use p0: transport: mooncake there, shm here"


def test_another_models_weights_are_named_on_both(bench: Bench) -> None:
    bench.welcome(P, 2, weights=b"\x12\x34\x56\x78\x9a")
    bench.receive(P, LOAD)
    there = whys(bench)
    assert there[P].startswith("it has m/12345678, and no ready worker of the other role has: m/")
    assert there[D].endswith(": m/12345678")


def test_the_second_worker_of_a_name_is_refused_both_are_notified_and_the_first_goes_on() -> None:
    bench = Bench(prefill=(P,), decode=(D, D2))
    bench.receive(D2, Goodbye(1, "shutdown"))
    bench.receive(D2, Welcome(1, identity("d0", "decode", 2)))
    rejects = [e for e in bench.effects if isinstance(e, Send) and isinstance(e.message, Reject)]
    text = f"node: 'd0' is the name of {D2} and of {D}: give each its own --node"
    assert [(e.peer, e.message.reason, e.message.fields) for e in rejects] == [
        (D2, NAME_TAKEN, (text,)),
        (D, NAME_TAKEN, (text,)),
    ]
    assert [e for e in bench.effects if isinstance(e, WorkerChanged)] == [WorkerChanged(D2, text)]
    assert whys(bench) == {P: "", D: "", D2: text}
    assert not bench.routing.workers.by_peer[D2].usable
    assert isinstance(bench.submit(), int)
    bench.receive(D2, Welcome(1, identity("d0", "decode", 2)))
    assert [e for e in bench.effects if isinstance(e, Send) and isinstance(e.message, Reject)] == [], "told once"
    bench.receive(D, Goodbye(1, "shutdown"))
    bench.receive(D2, Welcome(1, identity("d0", "decode", 2)))
    assert bench.routing.workers.by_peer[D2].identity is not None
    assert whys(bench)[D2] == "it is not ready yet"


def test_a_second_name_of_a_worker_gets_no_rooms_costs_the_first_nothing_and_takes_over() -> None:
    bench = Bench(prefill=(P, P2))
    bench.receive(P2, Goodbye(1, "shutdown"))
    same = Welcome(1, identity("p0", "prefill"))
    text = f"the same worker as {P}: its rooms go there"
    bench.receive(P2, Welcome(1, identity("p0", "prefill", 2)))
    assert whys(bench)[P2].startswith("node: 'p0' is the name of"), "another process of this name"
    bench.routing.workers.by_peer[P2].liveness = Liveness(LIMITS, bench.now)
    bench.receive(P2, same)
    assert [e for e in bench.effects if isinstance(e, Send) and isinstance(e.message, Reject)] == []
    assert [e for e in bench.effects if isinstance(e, WorkerChanged)] == [WorkerChanged(P2, text, orderly=True)]
    assert whys(bench) == {P: "", P2: text, D: ""}
    assert isinstance(bench.submit(), int)
    assert {e.peer for e in bench.effects if isinstance(e, Send) and isinstance(e.message, Begin)} == {P, D}
    bench.receive(P, Goodbye(1, "shutdown"))
    bench.receive(P2, same)
    assert bench.routing.workers.by_peer[P2].identity is not None
    assert bench.routing.workers.by_peer[P2].why == ""


@pytest.mark.parametrize("reason", ["superseded", "taken", "full", "refused"])
def test_what_a_worker_refuses_its_router_is_no_fault_of_the_request(bench: Bench, reason: str) -> None:
    assert isinstance(bench.submit(), int)
    bench.receive(D, Reject(0, reason, ("why",)))
    (failed,) = [e for e in bench.effects if isinstance(e, Fail)]
    assert failed.cause is Cause.PEER_LOST
    refused = bench.submit()
    assert (refused.cause, refused.retry_ms) == (Cause.PEER_LOST, LIMITS.resend_ms_max)
    assert reason in whys(bench)[D]


def test_a_worker_that_sent_goodbye_is_not_back_before_another_process_is_there(bench: Bench) -> None:
    bench.receive(D, Goodbye(1, "shutdown"))
    hellos = [e for e in bench.wait(LIMITS.resend_ms / 1e3) if isinstance(e, Send) and isinstance(e.message, Hello)]
    assert [hello.peer for hello in hellos] == [D]
    bench.welcome(D)  # the answer to a Hello that crossed its Goodbye
    assert bench.effects == []
    assert whys(bench)[D] == f"{D} sent Goodbye (shutdown)"
    bench.welcome(D, 2)
    assert WorkerChanged(D, "") in bench.effects


def test_a_load_that_comes_after_goodbye_means_nothing_for_the_next_process(bench: Bench) -> None:
    load = bench.routing.workers.by_peer[D].load
    bench.receive(D, Goodbye(1, "shutdown"))
    bench.receive(D, load)
    bench.receive(D, Welcome(1, identity("d0", "decode", 2)))
    assert whys(bench)[D] == "it is not ready yet"
    bench.receive(D, load)
    assert whys(bench)[D] == ""


def test_what_keeps_a_worker_from_being_reached_is_its_reason() -> None:
    pool = Bench().routing.workers
    worker = pool.by_peer[D]
    pool.receive(worker, Goodbye(1, "shutdown"), 0.0)
    reasons = pool.why_not(lambda peer: f"nothing listens at {peer}")
    assert reasons[D] == f"{D} sent Goodbye (shutdown); nothing listens at {D}"


def test_the_reasons_of_a_large_fleet_take_no_look_at_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = (tuple(f"tcp://{role}{letter}:1" for letter in ascii_letters) for role in "pd")
    bench, looks = Bench(prefill=prefill, decode=decode), Counter[str]()
    usable = Worker.usable.fget
    assert usable is not None
    monkeypatch.setattr(Worker, "usable", property(lambda each: looks.update(["usable"]) or usable(each)))
    monkeypatch.setattr(worker_pool, "obstacle", lambda *pair: looks.update(["obstacle"]) or obstacle(*pair))
    assert whys(bench) == dict.fromkeys((*prefill, *decode), "")
    assert looks["usable"] <= 3 * 104
    assert looks["obstacle"] == 104

"""The router's core against the daemons' services, over a bad network in virtual time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.handoff.peers import Send
from pdtransfer.limits import AHEAD_PING, TOKENS_MAX, Limits
from pdtransfer.serve.router.backends.daemons.router_effects import (
    Emit,
    Fail,
    Finish,
    RoomReport,
    WorkerChanged,
)
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.wire import (
    Begin,
    Begun,
    Cancel,
    End,
    Ended,
    Goodbye,
    Hello,
    Load,
    Logprobs,
    Member,
    Message,
    Ping,
    Pong,
    Reject,
    Sampling,
    Tokens,
    TokensAcked,
    Unusable,
    Welcome,
    pack_ids,
)
from tests.serve.router.routing_bench import D2, LOAD, P2, Bench, D, P
from tests.support.routing_world import LIMITS, Faults, Net, World, identity, request

GENTLE = Limits(resend_ms=50, resend_ms_max=400, ping_ms=200, silence_ms=30_000, room_deadline_ms=60_000)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.slow
def test_every_request_finishes_on_a_network_that_only_loses_repeats_and_reorders() -> None:
    for seed in range(40):
        world = World(seed, net=Net(0.25, 0.25, (0.001, 0.3)), limits=GENTLE)
        world.run(3)
        labels = [world.submit(request(seed + i, max_tokens=1 + i * 5, early=i % 2 == 0)) for i in range(6)]
        world.run(40)
        assert all(isinstance(world.ends.get(label), Finish) for label in labels), f"seed {seed}"
        world.heal()
        world.run(10)
        world.check_quiet()


def storm(seed: int, *, resume: bool = False) -> World:
    """All faults at once, then a repaired network."""
    net = Net(drop=0.15, duplicate=0.15, delay_s=(0.001, 0.25))
    world = World(seed, net=net, faults=Faults(fail=0.1, full=0.05))
    world.run(2)
    for step in range(12):
        for i in range(2):
            sampling = Sampling(world.random.choice((1, 3, 20)), temperature=1.0)
            label = world.submit(request(step * 10 + i, sampling=sampling, enable_resume=resume, early=i == 0))
            if isinstance(label, int) and world.random.random() < 0.15:
                wait = world.random.uniform(0, 1.5)
                world.at(world.now + wait, lambda each=label: world.perform(world.routing.cancel(each, world.now)))
        victim = world.random.choice(world.daemons)
        match world.random.randrange(12):
            case 0:
                victim.start()
            case 1:
                world.cut.add(victim.node)
                world.at(world.now + world.random.uniform(0.1, 3), lambda each=victim.node: world.cut.discard(each))
            case 2:
                world.restart_router()
            case 3:
                victim.perform(victim.service.goodbye("shutdown"))
        world.run(world.random.uniform(0.05, 0.6))
    world.heal()
    world.run(40)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_every_request_ends_once_and_nothing_is_left_after_a_storm(first: int) -> None:
    finished = failed = 0
    for seed in range(first, first + 30):
        try:
            world = storm(seed)
            world.check_quiet()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finished += sum(isinstance(end, Finish) for end in world.ends.values())
        failed += sum(isinstance(end, Fail) for end in world.ends.values())
    assert finished > failed, "most requests survive"


@pytest.mark.slow
def test_answers_are_resumed_in_a_storm_and_none_has_a_token_twice_or_lacks_one() -> None:
    ends, resumptions = list[Finish | Fail](), 0
    for seed in range(20):
        try:
            world = storm(seed, resume=True)
            world.check_quiet()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ends += world.ends.values()
        resumptions += world.routing.resumptions
    assert resumptions
    assert any(isinstance(end, Finish) and end.room.resumptions for end in ends)


# Placement


def test_room_goes_to_prefill_with_least_prompt_tokens_and_decode_with_most_free_slots() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2), loads={D2: replace_load(slots_free=900)})
    bench.submit(length=100)
    first = {each.peer for each in bench.of(Send)}
    bench.submit(length=10)
    second = {each.peer for each in bench.of(Send)}
    bench.submit(length=10)
    third = {each.peer for each in bench.of(Send)}
    assert first == {P, D}
    assert second == {P2, D2}, "100 tokens wait on P, and 112 of D's slots are promised"
    assert third == {P2, D}, "20 tokens are fewer than 100"


def decoded_by(bench: Bench, *, first: int = 7, length: int = 200, **more: object) -> str:
    """The decode worker of a new request, which then has hardly any load."""
    bench.submit(first=first, length=length, **more)
    peer = next(each.peer for each in bench.of(Send) if each.peer in (D, D2))
    bench.receive(peer, bench.routing.workers.by_peer[peer].load)
    return peer


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    bench = Bench(decode=(D, D2), loads={D2: replace_load(slots_free=900)})
    assert decoded_by(bench) == D
    assert decoded_by(bench, first=1_000) == D, "the freer one, for a prompt that nobody knows"
    bench.receive(D, replace_load(slots_free=800))
    assert decoded_by(bench) == D, "192 tokens are known there: they count as 768 free slots"
    assert decoded_by(bench, first=2_000) == D2
    assert decoded_by(bench, first=2_000, length=130) == D2
    assert bench.routing.prefix_tokens == 192 + 128


def test_a_much_freer_decode_is_chosen_before_one_with_the_prefix() -> None:
    bench = Bench(decode=(D, D2), loads={D: replace_load(slots_free=2_000), D2: replace_load(slots_free=1_000)})
    assert decoded_by(bench) == D
    bench.receive(D, replace_load(slots_free=400))
    bench.receive(D2, replace_load(slots_free=400 + 4 * 192 + 1))
    assert decoded_by(bench) == D2
    bench.receive(D2, replace_load(slots_free=400 + 4 * 192 + 1))
    assert decoded_by(bench) == D2, "and both know it now"


def test_a_prompt_does_not_queue_for_its_prefix_while_another_has_slots() -> None:
    bench = Bench(decode=(D, D2), loads={D2: replace_load(slots_free=300)})
    assert decoded_by(bench, max_tokens=1) == D
    bench.receive(D, replace_load(slots_free=8))
    assert decoded_by(bench, max_tokens=1) == D2, "9 slots would be needed, the prefix less"


@pytest.mark.parametrize("differs", ["salt", "weight", "restart"])
def test_a_prefix_that_is_not_cached_counts_nothing(differs: str) -> None:
    limits = replace(LIMITS, prefix_weight=0) if differs == "weight" else LIMITS
    bench = Bench(decode=(D, D2), limits=limits, loads={D2: replace_load(slots_free=900)})
    assert decoded_by(bench) == D
    if differs == "restart":
        bench.welcome(D, 7)
    bench.receive(D, replace_load(slots_free=800))
    assert decoded_by(bench, **({"salt": b"s"} if differs == "salt" else {})) == D2


def test_the_prefixes_remembered_of_a_decode_are_bounded() -> None:
    bench = Bench(decode=(D, D2), limits=replace(LIMITS, prefix_keys_max=4))
    for first in range(0, 10_000, 1_000):
        decoded_by(bench, first=first)
    for worker in bench.routing.workers.by_peer.values():
        assert len(worker.known._keys) <= 4


def replace_load(**fields) -> Load:
    return msgspec.structs.replace(LOAD, **fields)


def test_begin_names_the_other_worker_as_its_reader_knows_it(bench: Bench) -> None:
    bench.submit(length=3, max_tokens=9, enable_hisparse=False)
    (prefill,), (decode,) = bench.sent(Begin, P), bench.sent(Begin, D)
    assert prefill.peers == ("d0",)
    assert decode.peers == (P,)
    assert prefill.room == decode.room
    assert decode.time_left_ms == LIMITS.room_deadline_ms


def introduced(bench: Bench, peer: str, pings: int = 1) -> list[tuple[str, ...]]:
    """The endpoints that each of its next Pings names."""
    while len(found := bench.sent(Ping, peer)) < pings:
        before = bench.effects
        bench.effects = before + bench.wait(LIMITS.ping_ms / 1e3)
    return [ping.peers for ping in found[:pings]]


def test_a_ping_names_prefill_ranks_to_decode_and_none_to_prefill() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    bench.welcome(D2, 2, model="other")
    bench.effects = []
    assert introduced(bench, D) == [(P, P2)]
    assert introduced(bench, P) == introduced(bench, D2) == [()]


def test_each_connection_change_is_reported_and_each_reason_for_refusal_once() -> None:
    bench, changes = Bench(decode=(D, D2)), list[WorkerChanged]()

    def receive(peer: str, *messages: Message) -> None:
        bench.receive(peer, *messages)
        changes.extend(bench.of(WorkerChanged))

    no = f"{P} refuses (refused): model"
    receive(P, Pong(1), Reject(0, "refused", ("model",)), Reject(0, "refused", ("model",)), Reject(0, "full", ()))
    assert changes == [WorkerChanged(P, no), WorkerChanged(P, f"{P} refuses (full): ")]
    changes.clear()
    welcome = Welcome(1, identity("p0", "prefill", 2))
    receive(P, welcome, welcome)
    assert changes == [WorkerChanged(P, "")]
    receive(D, Goodbye(1, "shutdown"))
    assert changes[1:] == [WorkerChanged(D, f"{D} sent Goodbye (shutdown)", orderly=True)]
    bench.silence(LIMITS.silence_ms / 1e3 + 1)
    assert {each.peer for each in bench.of(WorkerChanged)} == {P, D2}
    assert all("has been silent for" in each.why for each in bench.of(WorkerChanged))


def test_a_ping_names_every_rank_of_a_prefill_group() -> None:
    bench, ranks = Bench(), (Member("p0", ""), Member("p0-1", "tcp://p0:2"))
    bench.receive(P, Welcome(1, msgspec.structs.replace(identity("p0", "prefill"), group=ranks)))
    bench.effects = []
    assert introduced(bench, D) == [(P, "tcp://p0:2")]


def test_a_group_without_an_endpoint_for_each_rank_is_not_used() -> None:
    """A Begin or a Ping with an empty endpoint would be our breach, and cost all rooms of that decode worker."""
    bench, ranks = Bench(prefill=(P, P2)), (Member("p0", ""), Member("p0-1", "tcp://p0:2"), Member("p0-2", ""))
    bench.receive(P, Welcome(1, msgspec.structs.replace(identity("p0", "prefill"), group=ranks)))
    worker = bench.routing.workers.by_peer[P]
    assert not worker.usable
    assert worker.why == f"group: {P} gives no endpoint for p0-2"
    assert introduced(bench, D) == [(P2,)]
    for first in range(3):
        bench.submit(first)
        assert bench.sent(Begin, P) == []


@pytest.mark.parametrize("leaves", [Goodbye(1, "shutdown"), replace_load(draining=True), Reject(0, "refused", ())])
def test_a_ping_names_only_connected_prefills(leaves: Message) -> None:
    bench = Bench(prefill=(P, P2))
    bench.receive(P, leaves)
    assert introduced(bench, D) == [(P2,)]
    bench.welcome(P, 2)
    bench.receive(P, LOAD)
    assert introduced(bench, D) == [(P, P2)]


def test_a_ping_names_few_ranks_and_all_of_them_in_turn() -> None:
    prefills = tuple(f"tcp://p{number}:1" for number in range(2 * AHEAD_PING + 1))
    bench = Bench(prefill=prefills)
    turns = introduced(bench, D, 5)
    assert {len(turn) for turn in turns} == {AHEAD_PING}
    named = [peer for turn in turns for peer in turn]
    start = prefills.index(named[0])
    assert named == [prefills[(start + place) % len(prefills)] for place in range(len(named))]


def test_no_ready_worker_is_503_and_all_full_is_429() -> None:
    bench = Bench(prefill=(P,), decode=(D,))
    bench.receive(D, replace_load(ready=False))
    refused = bench.submit()
    assert (refused.cause, refused.retry_ms > 0) == (Cause.PEER_LOST, True)
    assert "no decode worker is ready" in str(refused)
    bench.receive(D, replace_load(slots_free=0, rooms_queued=LIMITS.queue_max))
    refused = bench.submit()
    assert (refused.cause, refused.retry_ms > 0) == (Cause.FULL, True)
    bench.receive(D, LOAD)
    assert isinstance(bench.submit(), int)


def test_rooms_wait_for_slots_while_the_queue_is_short() -> None:
    bench = Bench(loads={D: replace_load(slots_free=0, rooms_queued=3)})
    assert isinstance(bench.submit(), int)


def test_too_many_rooms_is_429() -> None:
    bench = Bench(limits=replace(LIMITS, rooms_max=2))
    assert isinstance(bench.submit(), int)
    assert isinstance(bench.submit(), int)
    assert bench.submit().cause is Cause.FULL


def test_draining_workers_get_no_rooms() -> None:
    bench = Bench(prefill=(P, P2), loads={P: replace_load(draining=True)})
    for _ in range(3):
        bench.submit()
        assert not bench.sent(Begin, P)
        assert bench.sent(Begin, P2)


def test_no_room_is_0_which_names_none_on_the_wire(bench: Bench) -> None:
    bench.routing._mint = iter((0, 7)).__next__
    assert bench.submit() == 7


def test_a_pair_has_one_model_and_equal_weights(bench: Bench) -> None:
    bench.welcome(D, 2, weights=b"other")
    bench.receive(D, LOAD)
    refused = bench.submit()
    assert refused.cause is Cause.PEER_LOST
    assert "prefill has m/77, decode has m/6f746865" in str(refused), "the beginnings of what differs"
    assert bench.routing.workers.models() == {}
    bench.welcome(D, 3, weights=b"w")
    bench.receive(D, LOAD)
    assert bench.submit(model="another").cause is Cause.PEER_LOST
    assert isinstance(bench.submit(model="m"), int)


def test_a_model_is_as_long_as_the_longest_pair_that_serves_it() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    assert bench.routing.workers.models() == {"m": TOKENS_MAX}, "nobody says"
    for incarnation, (peer, tokens) in enumerate({P: 900, P2: 500, D: 700, D2: 0}.items(), 2):
        bench.welcome(peer, incarnation, context_tokens=tokens)
        bench.receive(peer, LOAD)
    assert bench.routing.workers.models() == {"m": 900}, "D2 does not say"
    bench.welcome(D2, 9, context_tokens=300)
    bench.receive(D2, LOAD)
    assert bench.routing.workers.models() == {"m": 700}
    for peer in (P2, D2):
        bench.welcome(peer, 11, weights=b"other", context_tokens=800)
        bench.receive(peer, LOAD)
    assert bench.routing.workers.models() == {"m": 800}, "of other weights under that name"


def test_a_model_is_no_longer_than_what_two_that_can_work_together_take() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    for peer, tokens in {P: 900, P2: 500, D: 400, D2: 600}.items():
        bench.welcome(peer, 1, context_tokens=tokens)
        bench.receive(peer, LOAD)
    assert bench.routing.workers.models() == {"m": 600}
    bench.wait(60)  # P has been there for long enough that D2 should have met it
    bench.receive(D2, replace_load(unusable=(Unusable(P, "facts"),)))
    assert bench.routing.workers.models() == {"m": 500}, "of P2 and D2"


def test_a_request_goes_to_the_pair_that_takes_it_whatever_others_have_free() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    for incarnation, (peer, tokens) in enumerate({P: 100, P2: 500, D: 100, D2: 500}.items(), 2):
        bench.welcome(peer, incarnation, context_tokens=tokens)
        bench.receive(peer, replace_load(slots_free=500 if tokens == 500 else 10_000))
    for _ in range(3):
        bench.submit(length=400)
        assert (len(bench.sent(Begin, P2)), len(bench.sent(Begin, D2))) == (1, 1)
    refused = bench.submit(length=600)
    assert (refused.cause, "only 500" in str(refused)) == (Cause.PEER_LOST, True)
    bench.receive(D2, replace_load(rooms_queued=10_000))
    refused = bench.submit(length=400)
    assert (refused.cause, str(refused)) == (Cause.FULL, "every worker is full"), "the one that takes it is"


def test_hisparse_goes_to_a_decode_that_supports_it() -> None:
    bench = Bench(decode=(D, D2), loads={D2: replace_load(slots_free=10)})
    bench.receive(D2, replace_load(slots_free=10, enable_hisparse=True))
    bench.submit(enable_hisparse=True)
    assert bench.sent(Begin, D2)[0].enable_hisparse
    assert bench.sent(Begin, P)[0].enable_hisparse
    assert not bench.sent(Begin, D)
    bench.submit()
    (begin,) = bench.sent(Begin, D)
    assert not begin.enable_hisparse


def test_hisparse_without_a_capable_decode_is_decoded_densely() -> None:
    bench = Bench(decode=(D, D2), loads={D2: replace_load(slots_free=10)})
    assert isinstance(bench.submit(enable_hisparse=True), int)
    (begin,) = bench.sent(Begin, D)
    assert not begin.enable_hisparse
    assert [each.enable_hisparse for each in bench.sent(Begin, P)] == [False], "both legs are of one kind"


def test_hisparse_waits_for_capable_decodes_while_they_are_full() -> None:
    bench = Bench(decode=(D, D2))
    bench.receive(D2, replace_load(enable_hisparse=True, rooms_queued=bench.routing._limits.queue_max))
    assert bench.submit(enable_hisparse=True).cause is Cause.FULL
    assert isinstance(bench.submit(), int)


def test_a_decode_that_is_full_for_hisparse_accepts_dense_rooms(bench: Bench) -> None:
    bench.receive(D, replace_load(enable_hisparse=True))
    bench.submit(enable_hisparse=True)
    (begin,) = bench.sent(Begin, D)
    bench.receive(D, End(begin.room, "full", "hisparse_queue_max", 0, retry_ms=60_000))
    assert bench.submit(enable_hisparse=True).cause is Cause.FULL
    assert isinstance(bench.submit(), int)


def test_hisparse_refused_by_the_only_capable_decode_is_retried_densely() -> None:
    bench = Bench(decode=(D, D2))
    bench.receive(D2, replace_load(enable_hisparse=True))
    bench.submit(enable_hisparse=True)
    (begin,) = bench.sent(Begin, D2)
    bench.receive(D2, End(begin.room, "refused", "enable_hisparse: this node is without it", 0))
    again = bench.sent(Begin, D) or bench.sent(Begin, D2)[1:]
    assert [each.enable_hisparse for each in again[:1]] == [False]


def test_a_worker_is_chosen_by_the_slots_for_the_requests_kind() -> None:
    loads = {
        D: replace_load(slots_free=100, enable_hisparse=True, sparse_slots_free=1_000, sparse_slots_total=2_000),
        D2: replace_load(slots_free=500, enable_hisparse=True, sparse_slots_free=200, sparse_slots_total=2_000),
    }
    for sparse, chosen in ((True, D), (False, D2)):
        bench = Bench(decode=(D, D2), loads=loads)
        bench.submit(enable_hisparse=sparse)
        assert [peer for peer in (D, D2) if bench.sent(Begin, peer)] == [chosen]


# One room


def finish(bench: Bench, room: int, *, tokens: int = 1) -> list:
    bench.receive(P, End(room, "done", "", 0))
    return bench.receive(D, Tokens(room, 0, pack_ids(list(range(tokens)))), End(room, "length", "", tokens))


def test_begin_repeats_until_begun(bench: Bench) -> None:
    room = bench.submit()
    bench.receive(P, Begun(room))
    bench.wait(0.6)
    assert len(bench.sent(Begin, D)) >= 3
    assert not bench.sent(Begin, P)
    bench.receive(D, Begun(room))
    assert not [each for each in bench.wait(1) if isinstance(each.message, Begin)]


def test_repeated_overlapping_and_late_tokens_are_emitted_once_in_order(bench: Bench) -> None:
    room = bench.submit(max_tokens=9)
    assert bench.receive(D, Tokens(room, 2, pack_ids([2, 3]))) == [Send(D, TokensAcked(room, 0))]
    assert bench.receive(D, Tokens(room, 0, pack_ids([0, 1]))) == [Emit(room, [0, 1]), Send(D, TokensAcked(room, 2))]
    assert bench.receive(D, Tokens(room, 0, pack_ids([0, 1]))) == [Send(D, TokensAcked(room, 2))]
    assert bench.receive(D, Tokens(room, 1, pack_ids([1, 2, 3]))) == [Emit(room, [2, 3]), Send(D, TokensAcked(room, 4))]


def test_end_that_overtakes_its_tokens_waits_for_them(bench: Bench) -> None:
    room = bench.submit(max_tokens=3)
    bench.receive(P, End(room, "done", "", 0, kv_bytes=11))
    assert bench.sent(Ended) == [Ended(room)]
    last = End(room, "length", "", 3, tokens_digest=b"t")
    assert bench.receive(D, last) == [], "unanswered, so that it repeats with what is missing"
    bench.receive(D, Tokens(room, 0, pack_ids([5, 6, 7])))
    done = Finish(room, RoomReport(room, "p0", "d0", End(room, "done", "", 0, kv_bytes=11), last, 5))
    assert bench.effects == [Emit(room, [5, 6, 7]), Send(D, TokensAcked(room, 3)), Send(D, Ended(room)), done]
    assert bench.routing.room_count == 0


def test_an_end_that_repeats_while_the_other_worker_goes_on_is_answered_again(bench: Bench) -> None:
    room = bench.submit()
    for _ in range(2):
        assert bench.receive(P, End(room, "done", "", 0)) == [Send(P, Ended(room))]


def test_messages_about_unknown_rooms_are_answered_so_that_the_worker_stops(bench: Bench) -> None:
    assert bench.receive(D, Begun(77)) == [Send(D, Cancel(77, "aborted"))]
    assert bench.receive(D, Tokens(77, 0, b"")) == [Send(D, Cancel(77, "aborted"))]
    assert bench.receive(D, End(77, "stop", "", 0)) == [Send(D, Ended(77))]


def test_another_workers_room_and_another_kind_are_breaches() -> None:
    bench = Bench(decode=(D, D2))
    room = bench.submit()
    with pytest.raises(RemoteProtocolError, match=r"room: .* is not on"):
        bench.receive(D2, End(room, "stop", "", 0))
    with pytest.raises(RemoteProtocolError, match=r"Tokens\.room"):
        bench.receive(P, Tokens(room, 0, pack_ids([1])))
    with pytest.raises(RemoteProtocolError, match=r"kind: .*Cancel"):
        bench.receive(D, Cancel(room, "aborted"))
    with pytest.raises(RemoteProtocolError, match=r"Tokens\.ids"):
        bench.receive(D, Tokens(room, 0, b"123"))
    finish(bench, room)
    assert bench.of(Finish), "the room goes on"


def test_more_tokens_than_requested_fail_the_room(bench: Bench) -> None:
    room = bench.submit(max_tokens=2)
    bench.receive(D, Tokens(room, 0, pack_ids([1])), Tokens(room, 1, pack_ids([2, 3])))
    (failed,) = bench.of(Fail)
    assert failed.cause is Cause.BREACH
    assert bench.of(Emit) == [Emit(room, [1])]


def test_an_end_with_another_token_count_fails_the_room(bench: Bench) -> None:
    room = bench.submit(max_tokens=5)
    bench.receive(D, Tokens(room, 0, pack_ids([1, 2])), End(room, "stop", "", 1))
    assert bench.of(Fail)[0].cause is Cause.BREACH


@pytest.mark.parametrize(("failing", "other"), [(P, D), (D, P)])
def test_a_failing_end_cancels_the_other_side_until_it_ends(bench: Bench, failing: str, other: str) -> None:
    bench.submit()
    # The retry, so it is final.
    bench.receive(failing, End(1, "engine", "broken", 0))
    bench.receive(other, End(1, "aborted", "", 0))
    bench.receive(other, Begun(2))
    bench.receive(failing, End(2, "engine", "broken", 0))
    assert bench.sent(Cancel, other) == [Cancel(2, "engine")]
    (failed,) = bench.of(Fail)
    assert (failed.request, failed.cause) == (1, Cause.ENGINE)
    assert "broken" in failed.detail
    bench.wait(1)
    assert len(bench.sent(Cancel, other)) >= 3
    assert not bench.sent(Cancel, failing)
    assert bench.receive(other, End(2, "aborted", "", 0)) == [Send(other, Ended(2))]
    assert bench.routing.room_count == 0


def test_a_prefill_that_decode_made_abort_leaves_the_cause_to_decode() -> None:
    bench = Bench(decode=(D, D2))
    bench.submit()
    assert bench.receive(P, End(1, "aborted", "D aborted it", 0)) == [Send(P, Ended(1))]
    assert not bench.of(Fail)
    bench.receive(D, End(1, "full", "", 0, retry_ms=700))
    assert [each.room for each in bench.sent(Begin, D2)] == [2], "retried as a worker that is full is"


def test_a_prefill_that_fails_after_the_first_token_changes_nothing(bench: Bench) -> None:
    room = bench.submit(max_tokens=2)
    bench.receive(D, Tokens(room, 0, pack_ids([1])))
    assert bench.receive(P, Goodbye(1, "shutdown"))
    assert not bench.of(Fail)
    bench.receive(D, Tokens(room, 1, pack_ids([2])), End(room, "length", "", 2))
    (done,) = bench.of(Finish)
    assert done.room.prefill is None


def test_what_a_worker_reported_before_a_stop_is_no_part_of_the_answer(bench: Bench) -> None:
    room = bench.submit()
    bench.receive(P, End(room, "done", "", 0, kv_bytes=11))
    bench.receive(D, Tokens(room, 0, pack_ids([1])))
    (finish,) = [effect for effect in bench.routing.stop(room, bench.now) if isinstance(effect, Finish)]
    assert (finish.room.prefill, finish.room.decode) == (None, None)


def test_a_stopped_request_is_finished_once_and_its_room_is_cancelled_on_both_workers(bench: Bench) -> None:
    room = bench.submit()
    bench.receive(D, Tokens(room, 0, pack_ids([1, 2])))
    stopped = bench.routing.stop(room, bench.now)
    assert [each for each in stopped if isinstance(each, Finish)] == [
        Finish(room, RoomReport(room, "p0", "d0", prompt_tokens=5))
    ]
    cancels = [(each.peer, each.message) for each in stopped if isinstance(each, Send)]
    assert cancels == [(P, Cancel(room, "aborted")), (D, Cancel(room, "aborted"))]
    assert bench.routing.stop(room, bench.now) == bench.routing.cancel(room, bench.now) == []
    assert (bench.routing.request_count, bench.routing.room_count) == (0, 1)
    bench.wait(1)
    assert bench.sent(Cancel, D), "it repeats until the room has ended"
    bench.receive(D, Tokens(room, 2, pack_ids([3])), End(room, "aborted", "", 3))
    bench.receive(P, End(room, "done", "", 0))
    assert not [effect for effect in bench.effects if isinstance(effect, Emit | Finish | Fail)]
    assert bench.routing.room_count == 0


def test_a_room_that_ended_as_it_was_stopped_counts_once(bench: Bench) -> None:
    room = bench.submit(max_tokens=2)
    bench.receive(D, End(room, "length", "", 2))  # overtakes its tokens
    bench.receive(D, Tokens(room, 0, pack_ids([1])))
    assert [type(each) for each in bench.routing.stop(room, bench.now)].count(Finish) == 1
    bench.receive(D, End(room, "length", "", 2))
    assert bench.effects == [Send(D, Ended(room))]
    bench.receive(P, End(room, "done", "", 0))
    assert bench.effects == [Send(P, Ended(room))]
    assert bench.routing.room_count == 0


def scored_request() -> CompletionRequest:
    return replace(request(), sampling=Sampling(12, logprobs=True, top_logprobs=1))


def test_logprobs_are_emitted_with_the_ids_that_are_new() -> None:
    bench, rows = Bench(), [Logprobs(-float(index), ((index, -0.5),)).pack() for index in range(4)]
    room, _ = bench.routing.submit(scored_request(), bench.now)
    bench.receive(D, Tokens(room, 0, pack_ids([5, 6]), rows[0] + rows[1]))
    assert bench.of(Emit) == [Emit(room, [5, 6], rows[0] + rows[1])]
    bench.receive(D, Tokens(room, 1, pack_ids([6, 7, 8]), b"".join(rows[1:])))
    assert bench.of(Emit) == [Emit(room, [7, 8], rows[2] + rows[3])]


@pytest.mark.parametrize("logprobs", [b"", b"123", Logprobs(0.5, ((1, -1.0),)).pack(), Logprobs(-0.5).pack()])
def test_wrong_logprobs_fail_their_room_alone(bench: Bench, logprobs: bytes) -> None:
    room, _ = bench.routing.submit(scored_request(), bench.now)
    other = bench.submit()
    bench.receive(D, Tokens(room, 0, pack_ids([5]), logprobs))
    # It is tried once more, and fails then.
    (again,) = {each.room for each in bench.sent(Begin)}
    bench.receive(D, Tokens(again, 0, pack_ids([5]), logprobs))
    (failed,) = bench.of(Fail)
    assert failed.cause is Cause.BREACH
    assert "logprobs" in failed.detail
    bench.receive(D, Tokens(other, 0, pack_ids([5])))
    assert bench.of(Emit) == [Emit(other, [5])]
    assert bench.routing.workers.by_peer[D].usable


# Retries


def test_a_room_that_failed_before_its_first_token_is_retried_once_elsewhere() -> None:
    bench = Bench(prefill=(P, P2))
    bench.submit()
    bench.receive(P, End(1, "transfer", "", 0))
    assert bench.sent(Cancel, D) == [Cancel(1, "transfer")]
    assert [each.room for each in bench.sent(Begin, P2)] == [2]
    assert [each.room for each in bench.sent(Begin, D)] == [2]
    assert not bench.of(Fail)
    bench.receive(D, Tokens(2, 0, pack_ids([9])))
    assert bench.of(Emit) == [Emit(1, [9])], "under the label that the client's request is known by"


@pytest.mark.parametrize("cause", ["peer_lost", "peer_restarted", "transfer", "breach", "refused"])
@pytest.mark.parametrize("reporter", [P, D])
def test_a_failure_between_two_workers_is_retried_with_another_pair(reporter: str, cause: str) -> None:
    """A decode that lost its prefill is not to blame alone: the same prefill is the last choice for the retry."""
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    bench.submit()
    assert bench.sent(Begin, P)
    assert bench.sent(Begin, D)
    bench.receive(reporter, End(1, cause, "", 0))
    assert [each.room for each in bench.sent(Begin, P2) + bench.sent(Begin, D2)] == [2, 2]


def test_a_decode_refused_by_its_prefill_is_tried_with_another() -> None:
    bench = Bench(prefill=(P, P2))
    bench.submit()
    bench.receive(D, End(1, "refused", "components differ", 0))
    assert [each.room for each in bench.sent(Begin, P2) + bench.sent(Begin, D)] == [2, 2]


def test_a_second_failure_is_final() -> None:
    bench = Bench(prefill=(P, P2))
    bench.submit()
    bench.receive(P, End(1, "transfer", "", 0))
    bench.receive(P2, End(2, "transfer", "", 0))
    assert not bench.sent(Begin)
    assert bench.of(Fail)[0].request == 1


def test_a_streamed_room_is_not_retried() -> None:
    bench = Bench(decode=(D, D2))
    room = bench.submit()
    bench.receive(D, Tokens(room, 0, pack_ids([1])), End(room, "engine", "", 1))
    assert not bench.sent(Begin)
    assert bench.of(Fail)[0].cause is Cause.ENGINE


def test_a_full_worker_is_avoided_for_its_retry_time() -> None:
    bench = Bench(decode=(D, D2), loads={D2: replace_load(slots_free=500)})
    bench.submit()
    bench.receive(D, End(1, "full", "queue", 0, retry_ms=1_500))
    assert bench.sent(Begin, D2)
    bench.receive(D2, End(2, "full", "queue", 0, retry_ms=900))
    (failed,) = bench.of(Fail)
    assert (failed.cause, failed.retry_ms) == (Cause.FULL, 900)
    refused = bench.submit()
    assert (refused.cause, 800 < refused.retry_ms <= 901) == (Cause.FULL, True), "the first to have room again"
    bench.wait(1.0)
    assert isinstance(bench.submit(), int)
    assert not bench.sent(Begin, D)


def test_a_request_refused_by_its_only_worker_is_not_retried(bench: Bench) -> None:
    bench.submit()
    bench.receive(D, End(1, "refused", "too long", 0))
    assert not bench.sent(Begin)
    assert bench.of(Fail)[0].cause is Cause.REFUSED


def test_cancel_ends_the_request_without_a_retry(bench: Bench) -> None:
    room = bench.submit()
    bench.effects = bench.routing.cancel(room, bench.now)
    assert {each.peer for each in bench.of(Send)} == {P, D}
    assert bench.sent(Cancel) == [Cancel(room, "aborted")] * 2
    assert bench.of(Fail)[0].cause is Cause.ABORTED
    assert bench.routing.cancel(room, bench.now) == []
    assert bench.routing.request_count == 0


def test_a_room_without_progress_ends_at_its_deadline_and_is_forgotten_at_the_next(bench: Bench) -> None:
    room = bench.submit()
    bench.receive(P, Begun(room))
    bench.wait(5)
    bench.receive(D, Tokens(room, 0, pack_ids([1])))
    bench.wait(5)
    assert not bench.of(Fail), "a token is progress"
    bench.wait(4)
    assert bench.of(Fail)[0].cause is Cause.DEADLINE
    assert bench.sent(Cancel, P)
    bench.wait(LIMITS.room_deadline_ms / 1e3 + 1)
    assert bench.routing.room_count == 0, "its workers never ended it"


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        ((), (), "prefill p0 has not answered, decode d0 has not answered"),
        ((Begun(1),), (Begun(1),), "prefill p0 has not sent all of the KV, decode d0 has sent 0 tokens"),
        ((End(1, "done", "", 0),), (Begun(1),), "prefill p0 has sent the KV, decode d0 has sent 0 tokens"),
        (
            (Begun(1),),
            (Begun(1), replace_load(rooms_queued=3)),
            "prefill p0 has not sent all of the KV, decode d0 has sent 0 tokens (3 rooms are queued there)",
        ),
        (
            (End(1, "done", "", 0),),
            (Tokens(1, 0, pack_ids([1])), replace_load(rooms_queued=3)),
            "prefill p0 has sent the KV, decode d0 has sent 1 tokens",
        ),
    ],
)
def test_a_request_without_progress_names_what_each_worker_has_reported(
    bench: Bench, prefill: tuple[Message, ...], decode: tuple[Message, ...], text: str
) -> None:
    bench.submit()
    bench.receive(P, *prefill)
    bench.receive(D, *decode)
    bench.wait(LIMITS.room_deadline_ms / 1e3 + 1)
    assert bench.of(Fail)[0].detail == f"no progress in {LIMITS.room_deadline_ms} ms: {text}"


# Workers that connect and disconnect


def test_hello_repeats_until_welcome() -> None:
    routing = Routing(identity("router", "router"), prefill=(P,), decode=(), limits=LIMITS, mint=lambda: 1)
    assert isinstance(routing.start(0.0)[0].message, Hello)
    assert [type(each.message) for each in routing.tick(routing.next_tick())] == [Hello]
    routing.receive(P, Welcome(1, identity("p0", "prefill")), 0.1)
    assert [type(each.message) for each in routing.tick(routing.next_tick())] == [Ping]


def test_a_silent_worker_is_lost_with_its_rooms_and_sent_hello_again(bench: Bench) -> None:
    room = bench.submit()
    bench.receive(D, Tokens(room, 0, pack_ids([1])))
    bench.silence(LIMITS.silence_ms / 1e3 + 0.3)
    (failed,) = bench.of(Fail)
    assert failed.cause is Cause.PEER_LOST
    assert bench.sent(Hello, D)
    assert bench.submit().cause is Cause.PEER_LOST
    for peer in (P, D):
        bench.welcome(peer)
        bench.receive(peer, LOAD)
    assert isinstance(bench.submit(), int)


def test_a_restarted_worker_is_detected_by_its_pong() -> None:
    bench = Bench(decode=(D, D2))
    bench.submit()
    bench.receive(D, Pong(2))
    assert [each.room for each in bench.sent(Begin, D2)] == [2], "tried again where a worker is"
    bench.wait(LIMITS.resend_ms / 1e3)
    assert bench.sent(Hello, D)
    bench.welcome(D, 2)
    bench.receive(D, Pong(1))
    assert not bench.sent(Hello), "a late word of the old process"
    assert bench.welcome(D, 1) == []


def test_a_worker_of_another_role_or_one_that_refuses_is_not_used(bench: Bench) -> None:
    bench.receive(D, Welcome(1, identity("d0", "prefill", 2)))
    assert "role" in bench.routing.workers.by_peer[D].why
    assert bench.submit().cause is Cause.PEER_LOST
    bench.receive(P, Reject(0, "refused", ("version: 2..3 against 1",)))
    assert "version: 2..3 against 1" in bench.routing.workers.by_peer[P].why
    bench.silence(LIMITS.resend_ms_max / 1e3)
    assert len(bench.sent(Hello, P)) == 1, "asked again, slowly"


def test_a_worker_that_breaks_the_protocol_is_lost_with_its_rooms() -> None:
    bench = Bench(decode=(D, D2))
    bench.submit()
    bench.effects = bench.routing.breach(D, RemoteProtocolError("Tokens.ids", "3 bytes"), bench.now)
    assert bench.sent(Reject, D)[0].fields == ("Tokens.ids: 3 bytes",)
    assert bench.sent(Begin, D2)
    assert not bench.sent(Hello, D)
    bench.silence(LIMITS.resend_ms_max / 1e3)
    assert bench.sent(Hello, D)


def test_a_worker_that_requires_hello_gets_one_and_is_kept(bench: Bench) -> None:
    bench.submit()
    assert bench.receive(D, Reject(0, "hello_required", ())) == [], (
        "so soon after a Welcome it answers an earlier message"
    )
    bench.wait(LIMITS.resend_ms / 1e3)
    assert [type(each.message) for each in bench.receive(D, Reject(0, "hello_required", ()))] == [Hello]
    assert bench.routing.room_count == 1


def test_close_fails_open_requests_and_sends_goodbye(bench: Bench) -> None:
    bench.submit()
    bench.effects = bench.routing.close(bench.now)
    assert bench.of(Fail)[0].cause is Cause.SHUTDOWN
    assert {e.peer for e in bench.of(Send) if isinstance(e.message, Goodbye)} == {P, D}


def test_a_late_message_of_an_earlier_process_does_not_lose_a_worker_forever(bench: Bench) -> None:
    """Simulated, seed 251: a late message of a dead process made the router lose the live one forever."""
    bench.welcome(P, 2)
    bench.silence(3 * LIMITS.silence_ms / 1e3)
    assert not bench.routing.workers.by_peer[P].usable
    bench.welcome(P, 1)
    bench.receive(P, LOAD)
    assert bench.routing.workers.by_peer[P].usable

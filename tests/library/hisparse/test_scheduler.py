"""The scheduler: order, whom it retracts and when, what full means, and that nobody starves."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from pdtransfer.errors import CapacityError, LocalProtocolError
from pdtransfer.hisparse.coordinator import Capacity, Coordinator
from pdtransfer.hisparse.scheduler import POLICIES, Policy, Scheduler, SparseTurn
from pdtransfer.hisparse.states import SparseRequest
from pdtransfer.limits import Limits
from tests.library.hisparse.hisparse_events import host

LIMITS = Limits(hisparse_queue_max=4, hisparse_wait_steps=2, hisparse_quantum_steps=3)
CAPACITY = Capacity(rows=2, logical_tokens=1_000, device_slots=100, hot=8)


def scheduler(capacity: Capacity = CAPACITY, limits: Limits = LIMITS, policy: Policy = "longest") -> Scheduler:
    return Scheduler(Coordinator(capacity), limits, policy=policy)


def offer(queue: Scheduler, request: int, tokens: int = 10, growth: int = 50) -> None:
    queue.offer(request, host(tokens + growth), tokens=tokens, growth=growth)


def placed(turn: SparseTurn) -> list[int]:
    return [placement.request for placement in turn.place]


def step(queue: Scheduler) -> SparseTurn:
    """As an engine: what next() asks for, then a step of all that run. Says what it asked for at last."""
    turn = queue.next(0.0)
    for request in turn.retract:
        queue.retract(request)
    queue.stepped(queue.coordinator.running)
    return turn


@pytest.fixture
def queue() -> Scheduler:
    return scheduler()


def test_nobody_is_retracted_while_rows_may_come_free_by_themselves() -> None:
    queue = scheduler(limits=Limits(hisparse_wait_steps=7, hisparse_quantum_steps=1))
    for request in (1, 2, 3):
        offer(queue, request)
    assert [len(step(queue).retract) for _ in range(8)] == [0] * 7 + [1]


@pytest.mark.parametrize(("policy", "victim"), [("longest", 2), ("shortest", 1), ("newest", 3)])
def test_the_policy_chooses_who_is_retracted_first(policy: Policy, victim: int) -> None:
    queue = scheduler(Capacity(rows=3, logical_tokens=1_000, device_slots=100, hot=8), policy=policy)
    for request, growth in ((1, 20), (2, 60), (3, 40), (4, 10)):
        offer(queue, request, growth=growth)
    retracted = [request for _ in range(4) for request in step(queue).retract]
    assert retracted == [victim]


def test_a_policy_is_configured_by_name() -> None:
    assert get_args(Policy) == POLICIES
    with pytest.raises(LocalProtocolError, match="policy: 'fair' must be one of longest, shortest, newest"):
        Scheduler(Coordinator(CAPACITY), LIMITS, policy="fair")  # pyright: ignore[reportArgumentType]


def test_as_many_are_retracted_as_the_head_needs_and_no_more() -> None:
    queue = scheduler(Capacity(rows=4, logical_tokens=1_000, device_slots=16, hot=8), policy="newest")
    for request in (1, 2, 3, 4):
        offer(queue, request, tokens=1, growth=2 if request > 2 else 1)
    assert placed(queue.next(0.0)) == [1, 2, 3, 4]
    for _ in range(5):
        queue.stepped([])
    offer(queue, 5)  # 9 slots: two are free, 4 and 3 have four each, which is less than it takes
    for _ in range(2):
        queue.stepped([])
    assert queue.next(0.0).retract == [4, 3]
    queue.coordinator.retract(3)
    assert queue.next(0.0).retract == [4], "what is on its way back counts"


def test_who_gives_enough_alone_spares_those_chosen_before() -> None:
    queue = scheduler(Capacity(rows=3, logical_tokens=1_000, device_slots=14, hot=8), policy="newest")
    for request, growth in ((1, 20), (2, 1), (3, 0)):
        offer(queue, request, tokens=1, growth=growth)
    assert placed(queue.next(0.0)) == [1, 2, 3]
    offer(queue, 4)
    for _ in range(5):
        queue.stepped([])
    assert queue.next(0.0).retract == [1]


def test_nobody_is_retracted_in_vain() -> None:
    queue = scheduler(Capacity(rows=3, logical_tokens=1_000, device_slots=12, hot=8))
    for request in (1, 2):
        queue.stepped([])
        queue.stepped([])
        offer(queue, request, tokens=1, growth=3)
        queue.next(0.0)
    offer(queue, 3)
    asked: list[list[int]] = []
    for _ in range(4):
        asked.append(queue.next(0.0).retract)
        queue.stepped([])
    assert asked == [[], [], [], [2, 1]], "in the third turn, 2 had not had its quantum, and 1 alone is not enough"


def test_a_full_queue_is_reported_before_anybody_is_refused(queue: Scheduler) -> None:
    for request in range(1, 4):
        assert not queue.full
        offer(queue, request)
    queue.next(0.0)
    for request in range(4, 7):
        assert not queue.full
        offer(queue, request)
    assert (queue.waiting, queue.full) == (4, True)
    with pytest.raises(CapacityError, match="queue entries: 5 wanted, 4 available") as refused:
        offer(queue, 9)
    assert refused.value.retry_ms is not None
    assert refused.value.retry_ms >= 100
    queue.ended(6)
    assert not queue.full
    offer(queue, 9)


def test_requests_that_are_still_on_their_way_count_and_are_taken_when_they_land(queue: Scheduler) -> None:
    for request in range(1, 5):
        assert queue.coordinator.alloc_logical_only(request, tokens=10, growth=50)
    assert queue.full
    offer(queue, 2)
    assert (queue.full, placed(queue.next(0.0)), queue.waiting) == (True, [2], 3)


def test_the_hint_grows_with_the_time_between_placements_of_those_who_waited() -> None:
    queue = scheduler(Capacity(rows=1, logical_tokens=10_000, device_slots=100, hot=8), Limits())
    for request in range(60):
        offer(queue, request)
    for turn in range(50):
        queue.next(turn * 3.0)
        queue.ended(turn)
    assert 2_000 < queue.retry_ms < 10_000


@pytest.mark.parametrize(
    ("tokens", "growth", "slots", "words"),
    [
        (960, 41, 1_001, "logical tokens: 1001 wanted, 1000 available"),
        (10, 5, 14, "host slots of this request: 15 wanted, 14 available"),
    ],
)
def test_what_could_never_run_is_refused_and_leaves_nothing(tokens: int, growth: int, slots: int, words: str) -> None:
    queue = scheduler()
    with pytest.raises(CapacityError, match=words) as refused:
        queue.offer(1, host(slots), tokens=tokens, growth=growth)
    assert refused.value.retry_ms is None
    assert (queue.is_idle, queue.waiting) == (True, 0)


def test_a_request_is_offered_once() -> None:
    queue = scheduler(Capacity(rows=2, logical_tokens=100, device_slots=100, hot=8))
    offer(queue, 1)
    offer(queue, 2)
    for request in (1, 2):
        with pytest.raises(LocalProtocolError, match=f"request {request} is here already"):
            offer(queue, request)


def test_who_waits_for_logical_tokens_does_not_hold_up_who_was_retracted() -> None:
    """1 is retracted for 2, and holds logical tokens that 3 waits for, which came before that."""
    queue = scheduler(Capacity(rows=1, logical_tokens=120, device_slots=9, hot=8))
    for request in (1, 2, 3, 4):
        offer(queue, request)
    assert queue.coordinator.state(3) is None
    while not step(queue).retract:
        pass
    assert placed(queue.next(0.0)) == [2]
    queue.ended(2)
    turn = queue.next(0.0)
    assert placed(turn) == [1]
    assert queue.coordinator.state(3) is SparseRequest.WAITING
    queue.ended(4, drop=True)
    assert queue.next(0.0).released == [4], "it held nothing but host slots"


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_gets_on_under_any_policy(policy: Policy) -> None:
    """Twelve share two rows; each row changes hands at least every quantum and a step, so a round takes six of them."""
    queue = scheduler(limits=Limits(hisparse_wait_steps=2, hisparse_quantum_steps=3), policy=policy)
    for request in range(12):
        offer(queue, request, growth=10 + request)
    since, longest = dict.fromkeys(range(12), 0), 0
    ran = Counter[int]()
    for now in range(1, 10_000):
        turn = queue.next(0.0)
        for request in turn.retract:
            queue.retract(request)
        batch = queue.coordinator.running
        queue.stepped(batch)
        for request in batch:
            longest = max(longest, now - since[request])
            since[request] = now
            ran[request] += 1
            if queue.coordinator.remaining(request) == 0:
                queue.ended(request)
                del since[request]
        if not since:
            break
    queue.next(0.0)
    assert queue.is_idle
    assert ran == {request: 10 + request for request in range(12)}
    assert longest <= 12 * (3 + 1)

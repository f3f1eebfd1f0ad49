"""A group's schedulers: what the leader decides happens on every rank, with rows, slots and late events of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdtransfer.errors import WorldError
from pdtransfer.hisparse.coordinator import Capacity, Coordinator, Placement
from pdtransfer.hisparse.scheduler import Scheduler, SparseTurn
from pdtransfer.limits import Limits
from tests.library.hisparse.hisparse_events import Switch, host
from tests.support.effort import some

CAPACITY = Capacity(rows=3, logical_tokens=60, device_slots=20, hot=6, top_k=4)
LIMITS = Limits(hisparse_queue_max=64, hisparse_wait_steps=2, hisparse_quantum_steps=3)
RANKS = 3
picks = st.integers(0, 1 << 16)


@dataclass
class Seat:
    """A place that a request has, or had until its events have fired."""

    placement: Placement
    events: list[Switch] = field(default_factory=list[Switch])

    @property
    def used(self) -> bool:
        return not all(event.fired for event in self.events)


class Rank:
    """One rank of a group, its device beside it: what was queued there happens when a test lets it."""

    def __init__(self, number: int) -> None:
        self.number, self.scheduler = number, Scheduler(Coordinator(CAPACITY), LIMITS)
        self.seats: dict[int, Seat] = {}  # of those that run
        self.left: list[tuple[int, Seat]] = []  # of those that did
        self.queued: list[Switch] = []

    def event(self) -> Switch:
        self.queued.append(Switch())
        return self.queued[-1]

    def fire(self, count: int) -> None:
        for event in self.queued[:count]:
            event.fired = True
        del self.queued[:count]

    def offer(self, request: int, tokens: int, growth: int) -> None:
        self.scheduler.offer(request, host(tokens + growth, 100 * self.number), tokens=tokens, growth=growth)

    def leave(self, request: int) -> Switch:
        event = self.event()
        if (seat := self.seats.pop(request, None)) is not None:
            seat.events.append(event)
            self.left.append((request, seat))
        return event

    def end(self, request: int, *, drop: bool) -> None:
        self.scheduler.ended(request, drop=drop, after=self.leave(request))

    def do(self, turn: SparseTurn) -> None:
        for request in turn.retract:
            self.scheduler.retract(request, after=self.leave(request))
        for placement in turn.place:
            slots = set(placement.device_slots.tolist())
            others = [(None, seat) for seat in self.seats.values()] + [each for each in self.left if each[1].used]
            for request, seat in others:
                assert placement.row != seat.placement.row, "a row that is still used"
                assert not slots & set(seat.placement.device_slots.tolist()), "device slots that are still used"
                assert request != placement.request, "its newest rows are still on their way to its host slots"
            self.seats[placement.request] = Seat(placement)

    def lead(self) -> list[int]:
        while (turn := self.scheduler.next(0.0)).retract:
            self.do(turn)
        self.do(turn)
        return list(self.seats)

    def follow(self, running: list[int]) -> None:
        """Waits as little as it may: for one event at a time."""
        while True:
            self.do(turn := self.scheduler.follow(running))
            if self.seats.keys() == set(running):
                return
            if not (turn.retract or turn.place):
                assert self.queued, "it waits for nothing"
                self.fire(1)

    def stepped(self) -> None:
        event = self.event()
        self.scheduler.stepped(list(self.seats), after=event)
        for seat in self.seats.values():
            seat.events.append(event)


class GroupMachine(RuleBasedStateMachine):
    """All ranks get the same; their devices do what is queued in order, each at its own pace."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [Rank(number) for number in range(RANKS)]
        self.grows: dict[int, int] = {}  # by request that has not ended: tokens that it may still make
        self.serial = 0

    @rule(tokens=st.integers(1, 14), growth=st.integers(1, 10))
    def offer(self, tokens: int, growth: int) -> None:
        self.serial += 1
        self.grows[self.serial] = growth
        for rank in self.ranks:
            rank.offer(self.serial, tokens, growth)

    @precondition(lambda self: self.grows)
    @rule(at=picks, drop=st.booleans())
    def end(self, at: int, drop: bool) -> None:
        request = sorted(self.grows)[at % len(self.grows)]
        del self.grows[request]
        for rank in self.ranks:
            rank.end(request, drop=drop)

    @rule(rank=st.integers(0, RANKS - 1), count=st.integers(1, 8))
    def fire(self, rank: int, count: int) -> None:
        self.ranks[rank].fire(count)

    @rule()
    def step(self) -> None:
        leader, *others = self.ranks
        running = leader.lead()
        for rank in others:
            rank.follow(running)
            assert rank.scheduler.waiting == leader.scheduler.waiting
        for rank in self.ranks:
            rank.stepped()
        for request in running:
            self.grows[request] -= 1
            if not self.grows[request]:
                del self.grows[request]
                for rank in self.ranks:
                    rank.end(request, drop=False)

    @invariant()
    def all_ranks_run_the_same(self) -> None:
        assert len({frozenset(rank.seats) for rank in self.ranks}) == 1

    def teardown(self) -> None:
        for request in self.grows:
            for rank in self.ranks:
                rank.end(request, drop=True)
        for rank in self.ranks:
            rank.fire(len(rank.queued))
            rank.scheduler.next(0.0)
            assert rank.scheduler.is_idle


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(max_examples=some(150), stateful_step_count=40, derandomize=True)


def test_a_rank_that_follows_retracts_and_places_nobody_of_its_own_accord() -> None:
    leader, follower = Rank(0), Rank(1)
    for request in range(1, 5):
        leader.offer(request, 8, 20)
        follower.offer(request, 8, 20)
    for _ in range(20):
        follower.follow([2])
        follower.stepped()
        assert follower.seats.keys() == {2}


def test_a_rank_takes_nobody_in_before_its_own_events_have_fired_whatever_the_leaders_have() -> None:
    follower = Rank(1)
    for request in (1, 2, 3):
        follower.offer(request, 8, 6)
    follower.follow([1, 2])
    follower.stepped()
    turn = follower.scheduler.follow([3, 2])
    assert (turn.retract, turn.place) == ([1], [])
    follower.do(turn)
    for _ in range(2):
        assert follower.scheduler.follow([3, 2]).place == []
        follower.fire(1)
    assert [each.request for each in follower.scheduler.follow([3, 2]).place] == [3]


@pytest.mark.parametrize("running", [[7], [1, 2, 3]])
def test_a_leader_that_runs_what_has_no_place_here_and_never_will_is_another_worker(running: list[int]) -> None:
    """One that nobody has offered, or more than this rank's device holds."""
    follower = Rank(1)
    for request in (1, 2, 3):
        follower.offer(request, 8, 6)
    with pytest.raises(WorldError, match=f"request {running[-1]} runs on the leader of this group, and cannot here"):
        follower.follow(running)

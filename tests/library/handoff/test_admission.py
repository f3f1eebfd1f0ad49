"""One rule for who may have slots: order, growth, bytes in flight, and what is refused with which hint."""

from __future__ import annotations

import pytest

from pdtransfer.errors import ArenaFullError
from pdtransfer.handoff.admission import Admission, Demand
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.slot_allocator import SlotAllocator
from pdtransfer.limits import Limits
from tests.library.sim.pools import components

KV, C4 = 64, 64  # slots
LIMITS = Limits(queue_max=3, rooms_max=5, inflight_bytes_max=1 << 20)


def admission(limits: Limits = LIMITS) -> tuple[Admission, SlotAllocator]:
    arena = SlotAllocator(components(KV, 1, page_first=True))
    return Admission(PrefixCache(arena, limits, model="m", weights=b"w"), limits), arena


def demand(rows: int, inflight_bytes: int = 0) -> Demand:
    return Demand((rows, rows // 4), inflight_bytes)


def test_rooms_are_admitted_in_the_order_in_which_they_came() -> None:
    queue, _ = admission()
    for room in (3, 1, 2):
        queue.enqueue(room, demand(10))
    order = []
    while (head := queue.head()) is not None:
        order.append(head)
        assert queue.admit(0.0) is not None
    assert order == [3, 1, 2]


def test_a_large_head_is_not_overtaken_by_a_small_room_that_would_fit() -> None:
    queue, arena = admission()
    queue.enqueue(1, demand(40))
    holding = queue.admit(0.0)
    assert holding is not None
    queue.enqueue(2, demand(40))
    queue.enqueue(3, demand(4))
    assert queue.admit(0.0) is None
    assert queue.head() == 2
    assert len(queue) == 2
    arena.drop(holding)
    assert queue.admit(0.0) is not None
    assert queue.head() == 3


def test_a_room_that_is_withdrawn_lets_the_next_one_pass() -> None:
    queue, _ = admission()
    queue.enqueue(1, demand(100))
    queue.enqueue(2, demand(4))
    assert queue.admit(0.0) is None
    queue.withdraw(1)
    queue.withdraw(77)
    assert queue.admit(0.0) is not None
    assert queue.head() is None


def test_what_an_empty_arena_could_not_hold_is_refused_forever() -> None:
    queue, _ = admission()
    with pytest.raises(ArenaFullError, match=r"'kv': 65.*'kv': 64") as refused:
        queue.check((KV + 1, 1), rooms=0)
    assert refused.value.retry_ms is None
    queue.check((KV, C4), rooms=0)


@pytest.mark.parametrize(("queued", "rooms", "field"), [(3, 3, "queue_max 3"), (0, 5, "rooms_max 5")])
def test_what_is_full_now_is_refused_with_a_hint_when_to_ask_again(queued: int, rooms: int, field: str) -> None:
    queue, _ = admission()
    for room in range(queued):
        queue.enqueue(room, demand(60))
    with pytest.raises(ArenaFullError, match=field) as refused:
        queue.check((1, 1), rooms=rooms)
    assert refused.value.retry_ms is not None
    assert 100 <= refused.value.retry_ms <= 60_000


def test_the_hint_grows_with_the_time_between_admissions_of_those_who_waited() -> None:
    queue, arena = admission(Limits(queue_max=100))
    for room in range(100):
        queue.enqueue(room, demand(64))
    for turn in range(50):
        holding = queue.admit(turn * 3.0)
        assert holding is not None
        arena.drop(holding)
    assert 3_000 < queue.retry_ms < 3_000 * 5


def test_an_idle_hour_does_not_count_as_a_slow_queue() -> None:
    queue, arena = admission()
    for hour in range(3):
        queue.enqueue(hour, demand(1))
        holding = queue.admit(hour * 3600.0)
        assert holding is not None
        arena.drop(holding)
    assert queue.retry_ms == 100
    queue.enqueue(7, demand(1))
    queue.enqueue(8, demand(100))
    assert queue.admit(9 * 3600.0) is not None
    queue.withdraw(8)
    queue.enqueue(9, demand(1))
    assert queue.admit(10 * 3600.0) is not None
    assert queue.retry_ms == 100


def test_bytes_in_flight_hold_the_next_room_back_until_they_have_landed() -> None:
    queue, _ = admission(Limits(inflight_bytes_max=1000))
    first = demand(1, 600)
    queue.enqueue(1, first)
    queue.enqueue(2, demand(1, 401))
    holding = queue.admit(0.0)
    assert holding is not None
    assert queue.inflight_bytes == 600
    assert queue.admit(0.0) is None
    queue.landed(first, holding)
    assert queue.admit(0.0) is not None
    assert queue.inflight_bytes == 401


def test_a_room_larger_than_the_bound_on_bytes_in_flight_goes_alone() -> None:
    queue, _ = admission(Limits(inflight_bytes_max=1000))
    small, large = demand(1, 10), demand(1, 5000)
    queue.enqueue(1, small)
    queue.enqueue(2, large)
    holding = queue.admit(0.0)
    assert holding is not None
    assert queue.admit(0.0) is None
    queue.landed(small, holding)
    assert queue.admit(0.0) is not None


def test_bytes_cannot_land_twice() -> None:
    queue, _ = admission()
    once = demand(1, 10)
    queue.enqueue(1, once)
    holding = queue.admit(0.0)
    assert holding is not None
    queue.landed(once, holding)
    with pytest.raises(AssertionError):
        queue.landed(once, holding)


def test_a_head_that_waits_is_looked_up_again_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = SlotAllocator(components(KV, 1, page_first=True))
    cache = PrefixCache(arena, LIMITS, model="m", weights=b"w")
    queue, looked = Admission(cache, LIMITS), list[int]()
    monkeypatch.setattr(cache, "longest", lambda keys: looked.append(len(keys)) or [])
    held = cache.allocate((40, 10), [])
    assert held is not None
    queue.enqueue(1, demand(40))
    assert [queue.admit(0.0) for _ in range(3)] == [None, None, None]
    assert len(looked) == 1
    queue.withdraw(1)
    queue.enqueue(1, demand(8))
    assert queue.admit(0.0) is not None, "another demand under the same label"
    queue.enqueue(2, demand(40))
    assert queue.admit(0.0) is None
    cache.drop(held)
    assert queue.admit(0.0) is not None
    assert len(looked) == 4

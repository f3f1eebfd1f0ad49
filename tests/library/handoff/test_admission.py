"""One rule for who may have slots: order, growth, bytes in flight, and what is refused with which hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.errors import ArenaFullError
from pdtransfer.handoff.admission import Admission, Demand
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.slot_allocator import Holding, SlotAllocator
from pdtransfer.limits import Limits
from tests.library.sim.pools import components

KV, C4 = 64, 64  # slots
LIMITS = Limits(queue_max=3, rooms_max=5, inflight_bytes_max=1 << 20)


def admission(limits: Limits = LIMITS) -> tuple[Admission, SlotAllocator]:
    arena = SlotAllocator(components(KV, 1, page_first=True))
    return Admission(PrefixCache(arena, limits, model="m", weights=b"w"), limits), arena


def demand(rows: int, inflight_bytes: int = 0) -> Demand:
    return Demand((rows, rows // 4), inflight_bytes)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(1, 40), st.sampled_from([0, 400, 600, 1_001, 5_000])),
        st.tuples(st.sampled_from(["admit", "admit", "withdraw", "land", "drop"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=30,
)


@given(STEPS)
def test_the_head_of_the_queue_alone_is_admitted_and_only_if_its_rows_and_bytes_fit(
    steps: list[tuple[str, int, int]],
) -> None:
    queue, arena = admission(Limits(inflight_bytes_max=1_000))
    waiting, flying, held = dict[int, Demand](), list[tuple[Demand, Holding]](), list[tuple[Demand, Holding]]()
    for room, (what, number, inflight_bytes) in enumerate(steps):
        if what == "enqueue":
            waiting[room] = demand(number, inflight_bytes)
            queue.enqueue(room, waiting[room])
        elif what == "withdraw":  # of a room that may not be there
            waiting.pop(number, None)
            queue.withdraw(number)
        elif what == "admit" and waiting:
            first = waiting[next(iter(waiting))]
            in_flight = sum(each.inflight_bytes for each, _ in flying)
            rows_fit = first.rows[0] <= KV - sum(each.rows[0] for each, _ in held)
            holding = queue.admit(0.0)
            assert (holding is not None) == (rows_fit and (not in_flight or in_flight + first.inflight_bytes <= 1_000))
            if holding is not None:
                del waiting[next(iter(waiting))]
                flying.append((first, holding))
                held.append((first, holding))
        elif what == "land" and flying:
            queue.landed(*flying.pop(number % len(flying)))
        elif what == "drop" and held:
            arena.drop(held.pop(number % len(held))[1])
        assert (queue.queued, queue.head(), len(queue)) == ([*waiting], next(iter(waiting), None), len(waiting))
        assert queue.inflight_bytes == sum(each.inflight_bytes for each, _ in flying)


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

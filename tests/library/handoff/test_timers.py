"""Timers against the obvious model, a dict of times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.handoff.timers import Timers

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 9)),
        st.tuples(st.just("clear"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("pop"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_each_key_is_due_once_at_the_last_time_that_was_set(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for what, key, when in steps:
        match what:
            case "set":
                timers.set(key, when)
                model[key] = when
            case "clear":
                timers.clear(key)
                model.pop(key, None)
            case _:
                now, due = key, []
                while (popped := timers.pop(now)) is not None:
                    due.append((model.pop(popped), popped))
                assert [at for at, _ in due] == sorted(at for at, _ in due)
                assert all(at <= now for at, _ in due)
                assert all(at > now for at in model.values())
        assert timers.next() == min(model.values(), default=None)
        assert len(timers) == len(model)
        assert all((key in timers) == (key in model) for key in range(6))


def test_equal_times_come_in_the_order_in_which_they_were_set() -> None:
    timers: Timers[str] = Timers()
    for key in "cab":
        timers.set(key, 1.0)
    assert [timers.pop(1.0) for _ in range(4)] == ["c", "a", "b", None]


def test_nothing_is_due_before_its_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 2.0)
    assert timers.pop(1.999) is None
    assert timers.pop(2.0) == "a"


def test_keys_of_several_types_are_never_compared() -> None:
    timers: Timers[tuple[str, str | int, int]] = Timers()
    timers.set(("alive", "tcp://p", 0), 1.0)
    timers.set(("alive", 7, 0), 1.0)
    assert timers.pop(1.0) == ("alive", "tcp://p", 0)


def test_moving_a_key_over_and_over_keeps_the_heap_small() -> None:
    timers: Timers[str] = Timers()
    for number in range(10_000):
        timers.set("always", 5.0)
        timers.set("to and fro", float(number % 2))
    assert len(timers._heap) < 200


def test_moving_a_key_over_and_over_loses_no_other() -> None:
    """The heap is made anew without its stale entries, again and again."""
    timers: Timers[int] = Timers()
    for key in range(50):
        timers.set(key, 100.0 + key)
    for number in range(2_000):
        timers.set(50, float(number))
    assert [timers.pop(1_000.0) for _ in range(51)] == [*range(50), None]

"""Timers against the obvious model, a dict of times in the order of setting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.handoff.timers import TimerKey, Timers

KEYS: list[TimerKey] = [("alive", "tcp://p", 0), ("alive", 7, 0), ("hello", "tcp://p", 1)]  # are never compared
WHAT = st.sampled_from(["set", "clear", "pop"])


@given(st.lists(st.tuples(WHAT, st.sampled_from(KEYS), st.integers(0, 4)), max_size=40))
def test_each_key_is_due_once_at_its_last_time_and_equal_times_in_the_order_of_setting(
    steps: list[tuple[str, TimerKey, int]],
) -> None:
    timers, model = Timers[TimerKey](), dict[TimerKey, int]()
    for what, key, when in steps:
        if what == "set":
            model.pop(key, None)
            model[key] = when
            timers.set(key, when)
        elif what == "clear":
            model.pop(key, None)
            timers.clear(key)
        else:
            first = min(model, key=model.__getitem__, default=None)  # of equal ones the first that was set
            due = first if first is not None and model[first] <= when else None
            assert timers.pop(when) == due
            if due is not None:
                del model[due]
        assert timers.next() == min(model.values(), default=None)
        assert (len(timers), {each for each in KEYS if each in timers}) == (len(model), set(model))


def test_moving_a_key_over_and_over_keeps_the_heap_small_and_loses_no_other() -> None:
    """The heap is made anew without its stale entries, again and again."""
    timers, times = Timers[int](), {key: 100.0 + key * 37 % 50 for key in range(50)}
    for key, when in times.items():
        timers.set(key, when)
    for number in range(10_000):
        timers.set(50, 100.0 + number % 50)
        assert len(timers._heap) < 64 + 5 * 51
    assert [timers.pop(1_000.0) for _ in range(52)] == [*sorted(times, key=times.__getitem__), 50, None]

"""Tables on a GPU: what a launch is being made from, or may still read, is nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.kernels.gpu import DeviceTables

STREAM, OTHER, SIDE = 3, 4, 9


class Memory:
    """A GPU's, that knows what lies where. Streams are busy, or refuse to say."""

    side_stream = SIDE

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}
        self.busy: set[int] = set()
        self.silent: set[int] = set()
        self._last = 0
        self._events: dict[int, int] = {}

    def _next(self) -> int:
        self._last += 1
        return self._last

    def allocate(self, byte_count: int, stream: int | None = None) -> int:
        del byte_count
        assert stream == SIDE
        return self._next()

    def free(self, address: int, stream: int | None = None) -> None:
        assert stream == SIDE, "it would wait for all launches"
        del self.content[address]

    def upload(self, address: int, content: Any, stream: int) -> None:
        assert stream == SIDE
        self.content[address] = content.tobytes()

    def synchronise(self, stream: int) -> None:
        assert stream == SIDE, "it would wait for what others have queued"

    def event(self) -> int:
        return self._next()

    def record(self, event: int, stream: int) -> None:
        if stream in self.silent:
            raise WorldError("cuEventRecord: refused")
        self._events[event] = stream

    def passed(self, event: int) -> bool:
        if self._events[event] in self.silent:
            raise WorldError("cuEventQuery: CUDA_ERROR_CAPTURED_EVENT")
        return self._events[event] not in self.busy


def table(number: int) -> Any:
    return np.full(4, number, np.int64)


def used(tables: DeviceTables, *keys: object, stream: int = STREAM) -> None:
    for key in keys:
        tables.acquire(key, table(1))
        tables.release(key, stream)


def test_a_table_stays_until_whoever_makes_a_launch_from_it_lets_it_go() -> None:
    """Another thread may use any number of others meanwhile."""
    memory = Memory()
    tables = DeviceTables(memory, most=4)
    ours = tables.acquire("ours", table(7))
    assert tables.acquire("ours", table(7)) == ours
    tables.release("ours", STREAM)  # one of two launches is queued
    used(tables, *range(20))
    assert memory.content[ours] == table(7).tobytes()
    assert len(memory.content) == 4
    tables.release("ours", STREAM)
    used(tables, *range(20, 24))
    assert ours not in memory.content


def test_a_table_stays_until_its_launches_have_ended_on_every_stream() -> None:
    memory = Memory()
    tables = DeviceTables(memory, most=2)
    ours = tables.acquire("ours", table(7))
    tables.acquire("ours", table(7))
    for stream in (STREAM, OTHER):
        tables.release("ours", stream)
    for memory.busy in ({STREAM, OTHER}, {STREAM}, {OTHER}):
        used(tables, *range(9), stream=1)
        assert memory.content[ours] == table(7).tobytes()
        assert len(memory.content) == 2
    memory.busy = set()
    used(tables, *range(9), stream=1)
    assert ours not in memory.content


@pytest.mark.parametrize("when", ["recorded", "asked"])
def test_a_table_stays_for_good_where_nobody_reports_when_its_launches_end(when: str) -> None:
    """A graph has captured them, or the GPU refuses."""
    memory = Memory()
    tables = DeviceTables(memory, most=2)
    ours = tables.acquire("ours", table(7))
    if when == "asked":
        tables.release("ours", STREAM)
    memory.silent = {STREAM}
    if when == "recorded":
        with pytest.raises(WorldError, match="refused"):
            tables.release("ours", STREAM)
    used(tables, *range(9), stream=OTHER)
    assert memory.content[ours] == table(7).tobytes()
    assert len(memory.content) == 2


def test_the_table_that_was_used_last_is_forgotten_last() -> None:
    memory = Memory()
    tables = DeviceTables(memory, most=2)
    used(tables, "a", "b", "a", "c")
    assert set(tables._tables) == {"a", "c"}


def test_tables_in_use_may_be_more_than_are_kept_and_go_once_they_are_not() -> None:
    memory = Memory()
    tables = DeviceTables(memory, most=2)
    for key in range(5):
        tables.acquire(key, table(key))
    assert len(memory.content) == 5
    for key in range(5):
        tables.release(key)
    tables.acquire("new", table(9))
    assert len(memory.content) == 2

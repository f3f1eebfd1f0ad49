"""Tables on a card: what a launch is being made from is nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdtransfer.kernels.tables import Tables


class Memory:
    """A card's, that knows what lies where."""

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}
        self._next = 1

    def allocate(self, byte_count: int, stream: int | None = None) -> int:
        del byte_count, stream
        self._next += 1
        return self._next

    def free(self, address: int, stream: int | None = None) -> None:
        assert stream is None, "it has to wait for all launches"
        del self.content[address]

    def upload(self, address: int, content: Any, stream: int) -> None:
        del stream
        self.content[address] = content.tobytes()

    def synchronise(self, stream: int) -> None:
        pass


def table(number: int) -> Any:
    return np.full(4, number, np.int64)


def test_a_table_stays_until_whoever_makes_a_launch_from_it_lets_it_go() -> None:
    """Another thread may use any number of others meanwhile."""
    memory = Memory()
    tables = Tables(memory, most=4)
    ours = tables.kept("ours", table(7))
    assert tables.kept("ours", table(7)) == ours
    tables.let("ours")  # one of two launches is queued
    for number in range(20):
        tables.kept(number, table(number))
        tables.let(number)
    assert memory.content[ours] == table(7).tobytes()
    assert len(memory.content) == 4
    tables.let("ours")
    for number in range(20, 24):
        tables.kept(number, table(number))
        tables.let(number)
    assert ours not in memory.content


def test_the_table_that_was_used_last_is_forgotten_last() -> None:
    memory = Memory()
    tables = Tables(memory, most=2)
    for key in ("a", "b", "a", "c"):
        tables.kept(key, table(1))
        tables.let(key)
    assert set(tables._held) == {"a", "c"}


def test_tables_in_use_may_be_more_than_are_kept_and_go_once_they_are_not() -> None:
    memory = Memory()
    tables = Tables(memory, most=2)
    for key in range(5):
        tables.kept(key, table(key))
    assert len(memory.content) == 5
    for key in range(5):
        tables.let(key)
    tables.kept("new", table(9))
    assert len(memory.content) == 2

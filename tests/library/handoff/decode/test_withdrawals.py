"""Rooms that were given up before their Grant: the bound counts those that wait, and none that was announced."""

from __future__ import annotations

from typing import Any

from pdtransfer.handoff.decode.waiting_rooms import Withdrawals


class Room:
    """What a withdrawal knows of a room."""

    leases: tuple[Any, ...] = ()
    leaders: tuple[str, ...] = ()
    deadline = 1_000.0

    def __init__(self, room_id: int, *sources: str) -> None:
        self.id, self.sources = room_id, sources


def kept(withdrawals: Withdrawals, source: str) -> list[int]:
    """Takes every room of this source."""
    rooms: list[int] = []
    while (taken := withdrawals.take(source, 0.0)) is not None:
        rooms.append(taken.room)
    return rooms


def test_rooms_that_were_announced_make_room_for_others() -> None:
    withdrawals = Withdrawals(4, 60.0)
    for first in range(0, 40, 4):
        rooms = list(range(first, first + 4))
        for room in rooms:
            withdrawals.put("p", room, "why", 0.0)
        assert kept(withdrawals, "p") == rooms


def test_rooms_that_are_expected_again_make_place_for_others() -> None:
    withdrawals = Withdrawals(4, 60.0)
    for number in range(40):
        room: Any = Room(number, "p", "q")
        withdrawals.add(room, "why", 0.0)
        withdrawals.drop(room)
        withdrawals.drop(room)
    assert not withdrawals.rooms
    for room_id in range(100, 104):
        withdrawals.put("p", room_id, "why", 0.0)
    assert kept(withdrawals, "p") == [100, 101, 102, 103]


def test_rooms_whose_time_is_over_make_place_for_others() -> None:
    withdrawals = Withdrawals(4, 60.0)
    for room in range(4):
        withdrawals.put("p", room, "why", 0.0)
    assert withdrawals.take("p", 60.0) is None
    for room in range(10, 14):
        withdrawals.put("p", room, "why", 100.0)
    assert kept(withdrawals, "p") == [10, 11, 12, 13]


def test_beyond_the_bound_the_oldest_of_the_same_source_gives_way() -> None:
    withdrawals = Withdrawals(4, 60.0)
    for room in range(3):
        withdrawals.put("p", room, "why", 0.0)
    for room in (7, 7, 8):
        withdrawals.put("q", room, "why", 0.0)
    assert kept(withdrawals, "p") == [0, 1, 2]
    assert kept(withdrawals, "q") == [8], "the same room counts once"

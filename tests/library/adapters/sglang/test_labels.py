"""The same room on both sides, for requests that SGLang numbers."""

from __future__ import annotations

import random

from pdtransfer.adapters.sglang.rooms import Meetings, Uses


def nobody(_: int) -> None:
    raise AssertionError("refused")


def meetings_of(opened: list[tuple[int, int]]) -> Meetings:
    return Meetings(lambda *pair: opened.append(pair), nobody, kept_s=60.0)


def test_each_use_of_a_number_has_a_room_of_its_own() -> None:
    uses = Uses(first=1_048_575)  # the counter's last value
    numbers = [0, 1, 2**63 - 1, 7, 7, 7]
    rooms = [uses.room(number) for number in numbers]
    assert len(set(rooms)) == len(rooms)
    assert all(0 <= room < 2**64 for room in rooms)
    assert rooms == [Uses(1_048_575).room(number) for number in numbers[:4]] + rooms[4:]  # as on another rank


def test_engines_that_start_again_begin_with_other_rooms() -> None:
    assert Uses(5).room(7) != Uses(6).room(7)


def test_a_request_and_its_room_meet_in_either_order() -> None:
    opened: list[tuple[int, int]] = []
    meetings, uses = meetings_of(opened), Uses(3)
    numbers = [random.Random(index).getrandbits(63) for index in range(200)]
    rooms = {number: uses.room(number) for number in numbers}
    for number in numbers[:100]:
        meetings.wait(number)
    for number in reversed(numbers):
        meetings.ask(rooms[number])
    for number in numbers[100:]:
        meetings.wait(number)
    assert sorted(opened) == sorted(rooms.items())


def test_a_room_is_asked_for_again_until_they_have_met() -> None:
    opened: list[tuple[int, int]] = []
    meetings, uses = meetings_of(opened), Uses(3)
    first, second, third = (uses.room(7) for _ in range(3))
    meetings.ask(first)
    meetings.wait(7)
    meetings.ask(second)
    assert opened == [(7, first), (7, second)]
    meetings.met(7)
    meetings.ask(third)  # of the next request
    assert opened == [(7, first), (7, second)]
    meetings.wait(7)
    assert opened[2:] == [(7, third)]


def test_what_nobody_comes_for_is_forgotten() -> None:
    opened: list[tuple[int, int]] = []
    meetings, uses = meetings_of(opened), Uses(3)
    for number in range(65_537):
        meetings.ask(uses.room(number))
    meetings.wait(0)
    assert opened == []
    meetings.wait(1)
    assert [number for number, _ in opened] == [1]


def test_a_room_whose_request_was_given_up_is_refused_once_and_for_a_while() -> None:
    opened: list[tuple[int, int]] = []
    refused: list[int] = []
    now = [100.0]
    meetings = Meetings(lambda *pair: opened.append(pair), refused.append, kept_s=60.0, clock=lambda: now[0])
    uses = Uses(3)
    first, second, third, fourth = (uses.room(7) for _ in range(4))
    meetings.wait(7)
    meetings.give_up(7)
    meetings.ask(first)
    assert (opened, refused) == ([], [first])
    meetings.ask(second)  # of the next request with this number, which is on its way
    meetings.wait(7)
    assert (opened, refused) == ([(7, second)], [first])
    meetings.give_up(7)
    meetings.wait(7)  # it is back before decode has asked
    meetings.ask(third)
    assert opened[1:] == [(7, third)]
    meetings.give_up(7)
    now[0] += 60.0
    meetings.ask(fourth)
    assert refused == [first]

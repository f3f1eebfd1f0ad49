"""What prefill keeps of rooms that cross in several grants; what it does is in pieces.txt and first_pieces.txt."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pdtransfer.handoff.effects import Write
from pdtransfer.handoff.prefill.records import Numbers
from pdtransfer.wire import Grant, Part, pack_extents
from tests.support.session_ends import PrefillEnd, grant, of

S, TOKENS = 0xA0, 16


def piece(number: int, prefix: int, stop: int, *, room: int = 1, at: int = 0, **changes: Any) -> Grant:
    """The rows of kv and c4 whose last tokens are in [prefix, stop)."""
    firsts, ends = (prefix, prefix // 4), (stop, stop // 4)
    parts = tuple(
        Part(index, first, end - first, pack_extents(np.array([[at, end - first]])))
        for index, (first, end) in enumerate(zip(firsts, ends, strict=True))
        if end > first
    )
    fields = {"parts": parts, "prefix": prefix, "stop": stop, "send_aux": stop >= TOKENS} | changes
    return grant(number, room, TOKENS, **fields)


def computed(end: PrefillEnd, first: int, stop: int, room: int = 1) -> list[Any]:
    """The engine has the rows of these tokens."""
    rows = {"kv": (first, stop), "c4": (first // 4, stop // 4)}
    return [
        effect
        for name, (low, high) in rows.items()
        for effect in end.push(room, TOKENS, component=name, first_row=low, source_slots=np.arange(low, high))
    ]


def landed(end: PrefillEnd, effects: list[Any]) -> list[Any]:
    """The same effects, and those of the end of each write among them."""
    for write in of(effects, Write):
        effects = [*effects, *end.wrote(write)]
    return effects


def test_landed_pieces_of_a_room_take_no_memory() -> None:
    end = PrefillEnd()
    end.up()
    end.open(tokens=TOKENS)
    computed(end, 0, TOKENS)
    for number in range(1, 9):
        landed(end, end.receive(piece(number, number - 1, number)))
        end.released(number)
    (kept,) = end.core.rooms[1].grants.values()
    assert kept.number == 8
    assert not end.core.sessions[S].grants
    assert end.core.sessions[S].acked.runs == 1


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_kept_as_runs(seed: int) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(1, 60), 59)
    numbers, added = Numbers(), set[int]()
    for number in order:
        numbers.add(number)
        added.add(number)
        assert {index for index in range(70) if index in numbers} == added
        assert len(numbers) == len(added)
        starts = {number for number in added if number - 1 not in added}
        assert numbers.runs == len(starts | {1}), "the first run, of those before any gap, may be empty"
    assert numbers.runs == 1

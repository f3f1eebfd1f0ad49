"""Rooms that cross in several grants on prefill's side, also of a decode that errs or lies about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLanded, RoomLeased, Unmap, Write
from pdtransfer.handoff.prefill.records import Numbers
from pdtransfer.wire import Abort, Failed, Goodbye, Grant, Granted, Landed, Part, pack_extents
from tests.library.sim.pools import LAYERS
from tests.support.session_ends import D2, D, PrefillEnd, failure, grant, of, refusal, sent

S, TOKENS = 0xA0, 16
OTHER = 0xB0  # the session of another decode, which is honest


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


def begun(deadline: float = 60.0) -> PrefillEnd:
    """Decode has granted a piece of no tokens, then the first 8 of 16, and these have landed. Its engine has all."""
    end = PrefillEnd()
    end.up()
    end.up(OTHER, D2)
    end.open(tokens=TOKENS, peers=[D], deadline=deadline)
    assert of(end.receive(piece(1, 0, 0)), RoomLeased) == [RoomLeased(1, TOKENS)]
    assert [message.grant for message in sent(computed(end, 0, TOKENS), Landed)] == [1]
    assert [message.grant for message in sent(landed(end, end.receive(piece(2, 0, 8))), Landed)] == [2]
    return end


def test_a_room_lands_with_its_last_piece_and_is_leased_once() -> None:
    end = begun()
    effects = landed(end, end.receive(piece(3, 8, TOKENS)))
    assert of(effects, RoomLeased) == of(effects, RoomLanded) == [], "the engine has not finished it"
    effects = end.finish()
    (message,) = sent(effects, Landed)
    assert (message.grant, message.aux) == (3, b"aux")
    (whole,) = of(effects, RoomLanded)
    assert whole.kv_bytes == sum(end.components[index].bytes_of(rows) for index, rows in enumerate((TOKENS, 4)))
    assert of(effects, RoomDrained)


def test_a_room_past_its_deadline_names_the_piece_that_was_not_granted() -> None:
    (failed,) = of(begun(deadline=1.0).tick(1.0), RoomFailed)
    assert failed.detail == "not landed in time, still open: decode has granted no memory yet for the rest"


def test_a_piece_lands_when_the_engine_has_a_row_behind_it() -> None:
    """Else decode would hold slots of its buffer for what nobody computes."""
    end = PrefillEnd()
    end.up()
    end.open(tokens=TOKENS)
    end.receive(piece(1, 0, 0))
    assert [message.grant for message in sent(computed(end, 0, 8), Landed)] == [1]
    assert sent(landed(end, end.receive(piece(2, 0, 8))), Landed) == []
    assert [message.grant for message in sent(landed(end, computed(end, 8, 12)), Landed)] == [2]
    assert sent(landed(end, end.receive(piece(3, 8, 12))), Landed) == []
    end.push(1, TOKENS, component="kv", first_row=12, source_slots=np.arange(12, 13))
    assert len(end.core.sessions[S].grants) == 3


def test_the_prefix_that_an_engine_gets_is_that_of_first_pieces() -> None:
    end = PrefillEnd()
    end.up()
    end.up(OTHER, D2)
    end.open(tokens=TOKENS, grants=2)
    end.receive(piece(1, 4, 4))
    computed(end, 0, TOKENS)
    landed(end, end.receive(piece(2, 4, 8)))
    effects = end.receive(piece(1, 8, 8, session=OTHER), peer=D2)
    assert of(effects, RoomLeased) == [RoomLeased(1, TOKENS, 4)]


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


# A hostile decode, with an honest one beside it


BREACHES: dict[str, tuple[Grant, str]] = {
    "stop below the prefix": (piece(3, 8, 4, parts=()), "Grant.stop: 4, the prefix is 8"),
    "the aux before the last piece": (
        piece(3, 8, 12, send_aux=True),
        "Grant.send_aux: true, of tokens up to 12 of 16",
    ),
    "rows behind the stop": (
        piece(3, 8, 12, parts=piece(3, 8, 13).parts),
        "Grant.parts[0].rows: rows 8+5, kv has 12 for 12 tokens",
    ),
    "a row whose last token is behind the stop": (
        piece(3, 8, 11, parts=piece(3, 8, 12).parts[1:]),
        "Grant.parts[0].rows: rows 2+1, c4 has 2 for 11 tokens",
    ),
    "rows before the prefix": (
        piece(3, 8, 12, parts=piece(3, 7, 12).parts),
        "Grant.parts[0].first_row: 7, decode holds 8 rows of kv for a prefix of 8",
    ),
    "another stop under the same number": (
        piece(2, 0, 12, parts=piece(2, 0, 8).parts),
        "Grant.stop: 12, grant 2 began with 8",
    ),
}


@pytest.mark.parametrize(("message", "named"), BREACHES.values(), ids=BREACHES)
def test_a_piece_that_is_wrong_in_itself_ends_its_session_and_names_the_field(message: Grant, named: str) -> None:
    end = begun()
    effects = end.receive(message)
    assert refusal(effects) == named
    assert of(effects, Unmap) == [Unmap(S)]
    assert of(effects, Write) == []
    assert failure(effects) == (1, Cause.BREACH), "the rest of the room will not come"
    check_others_land(end)


MISPLACED: dict[str, tuple[Callable[[PrefillEnd], list[Any]], str]] = {
    "a gap": (
        lambda end: end.receive(piece(3, 12, TOKENS)),
        "Grant.prefix: 12, grant 2 of this room ends at 8",
    ),
    "tokens that have landed": (
        lambda end: end.receive(piece(3, 0, 12, at=40)),
        "Grant.prefix: 0, grant 2 of this room ends at 8",
    ),
    "a stop that moves backwards": (
        lambda end: end.receive(piece(3, 4, 4)),
        "Grant.prefix: 4, grant 2 of this room ends at 8",
    ),
    "a piece of no tokens": (
        lambda end: end.receive(piece(3, 8, 8)),
        "Grant.stop: 8, only the first piece of a room may have no tokens",
    ),
    "the whole room again": (
        lambda end: end.receive(grant(3, 1, TOKENS, at=40)),
        "Grant.prefix: 0, grant 2 of this room ends at 8",
    ),
    "before the one before it has landed": (
        lambda end: [*end.receive(piece(3, 8, 12)), *end.receive(piece(4, 12, TOKENS, at=40))],
        "grants: grant 3 of room 0000000000000001 has not landed, it is active",
    ),
    "after the last": (
        lambda end: [
            *landed(end, end.receive(piece(3, 8, TOKENS))),
            *end.receive(piece(4, TOKENS, TOKENS, at=40, parts=())),
        ],
        f"grants: session {S:#x} has two for room 0000000000000001",
    ),
}


@pytest.mark.parametrize(("sends", "named"), MISPLACED.values(), ids=MISPLACED)
def test_a_piece_that_is_not_the_next_fails_alone(sends: Callable[[PrefillEnd], list[Any]], named: str) -> None:
    end = begun()
    effects = sends(end)
    (failed,) = sent(effects, Failed)
    assert (failed.reason, failed.detail, failed.quiescent) == (Cause.BREACH.value, named, True)
    assert {write.grant for write in of(effects, Write)} <= {3}
    assert failed.grant not in {write.grant for write in of(effects, Write)}
    assert of(effects, RoomFailed) == []
    assert end.core.sessions[S].open
    check_others_land(end)


def test_pieces_that_came_in_another_order_before_the_room_was_open_are_each_taken_once_at_most() -> None:
    end = PrefillEnd()
    end.up()
    end.receive(piece(2, 0, 8), piece(1, 0, 0), piece(3, 8, TOKENS, at=30))
    effects = end.open(tokens=TOKENS)
    assert {message.grant for message in sent(effects, Failed)} == {1, 3}
    assert {write.grant for write in of(computed(end, 0, TOKENS), Write)} == {2}


def test_a_repeated_piece_is_answered_by_what_became_of_it() -> None:
    end = begun()
    assert [message.grant for message in sent(end.receive(piece(2, 0, 8)), Landed)] == [2]
    end.receive(piece(3, 8, 12))
    assert sent(end.receive(piece(3, 8, 12)), Granted) == [Granted(S, 3)]
    end.released(2)
    assert end.receive(piece(2, 0, 8)) == []


def check_others_land(end: PrefillEnd) -> None:
    """A room of the other decode lands: nothing here was about it."""
    end.open(2, TOKENS, peers=[D2])
    end.receive(grant(1, 2, TOKENS, session=OTHER), peer=D2)
    writes = of(end.push(2, TOKENS), Write)
    effects = [effect for write in writes for effect in end.wrote(write)]
    assert of([*effects, *end.finish(2)], RoomLanded)


# What ends a room between two pieces


@pytest.mark.parametrize(
    "ends",
    [
        lambda end: end.receive(Goodbye(1, "shutdown")),
        lambda end: end.receive(end.hello(incarnation=2)),
        lambda end: end.tick(60.0),
    ],
    ids=["goodbye", "another process", "silence"],
)
def test_a_room_fails_with_its_session_between_two_pieces(ends: Callable[[PrefillEnd], list[Any]]) -> None:
    end = begun()
    for number in (1, 2):
        end.released(number)
    effects = ends(end)
    assert failure(effects)[0] == 1
    assert of(effects, RoomDrained) == [RoomDrained(1)]


def test_a_room_whose_last_piece_has_landed_outlives_its_session() -> None:
    end = PrefillEnd()
    end.up()
    end.up(OTHER, D2)
    end.open(tokens=TOKENS, grants=2)
    computed(end, 0, TOKENS)
    end.finish()
    landed(end, end.receive(piece(1, 0, TOKENS)))
    assert of(end.receive(Goodbye(1, "shutdown")), RoomFailed) == []
    effects = landed(end, end.receive(piece(1, 0, TOKENS, session=OTHER), peer=D2))
    assert of(effects, RoomLanded)


def test_a_room_that_is_given_up_between_two_pieces_fails_by_the_number_of_its_own() -> None:
    end = begun()
    effects = end.receive(Abort(S, 3, 1, "the client left"))
    (failed,) = of(effects, RoomFailed)
    assert (failed.cause, failed.detail) == (Cause.ABORTED, f"{D} gave it up: the client left")
    assert of(effects, RoomDrained)


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


def test_a_piece_is_written_layer_by_layer_as_its_engine_computes_it() -> None:
    end = PrefillEnd()
    end.up()
    end.open(tokens=TOKENS)
    end.receive(piece(1, 0, 0))
    effects = end.push(1, TOKENS, component="kv", layers=(0, 1))
    assert [message.grant for message in sent(effects, Landed)] == [1]
    effects = landed(end, end.receive(piece(2, 0, 4, parts=piece(2, 0, 4).parts[:1])))
    assert {write.layers for write in of(effects, Write)} == {(0, 1)}
    assert sent(effects, Landed) == []
    effects = landed(end, end.push(1, TOKENS, component="kv", layers=(1, LAYERS)))
    assert {write.layers for write in of(effects, Write)} == {(1, LAYERS)}
    assert [message.grant for message in sent(effects, Landed)] == [2]

"""The next turn of a chat: when the router sends it to decode alone, and what follows where that fails."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdtransfer.errors import Cause
from pdtransfer.serve.router.backends.daemons.router_effects import Fail, Finish, Retry
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.wire import Begin, Cancel, Ended, Load, Sampling, Tokens, pack_ids
from pdtransfer.wire import End as RoomEnd
from tests.serve.router.routing_bench import D2, LOAD, Bench, D, P
from tests.support.routing_world import LIMITS

BLOCK, MOST = 4, 12
TURNS = replace(LIMITS, prefix_block_tokens=BLOCK, turn_tokens_max=MOST)
ABLE = msgspec.structs.replace(LOAD, rest_max=100)
PROMPT, ANSWER = list(range(10)), [50, 51, 52]  # their last id's row is not written: three blocks
REST = [60, 61]


def bench(load: Load = ABLE, *, decode: tuple[str, ...] = (D,)) -> Bench:
    return Bench(decode=decode, limits=TURNS, loads=dict.fromkeys(decode, load))


def ask(on: Bench, ids: list[int], **more: object) -> dict[str, Begin]:
    """The Begins of a request, by worker."""
    wanted = CompletionRequest(prompt=pack_ids(ids), sampling=Sampling(8), **more)
    _, on.effects = on.routing.submit(wanted, on.now)
    return begins(on)


def begins(on: Bench) -> dict[str, Begin]:
    return {peer: begin for peer in (P, D, D2) for begin in on.sent(Begin, peer)}


def generate(on: Bench, begin: Begin, ids: list[int], *, prefill: bool = True, decode: str = D) -> None:
    """A room that generates these ids, in two pieces of which one is repeated, and ends."""
    first, rest = pack_ids(ids[:1]), pack_ids(ids[1:])
    on.receive(decode, Tokens(begin.room, 0, first), Tokens(begin.room, 0, first), Tokens(begin.room, 1, rest))
    if prefill:
        on.receive(P, RoomEnd(begin.room, "done", "", 0))
    on.receive(decode, RoomEnd(begin.room, "length", "", len(ids)))
    assert len(on.of(Finish)) == 1


def answered(load: Load = ABLE, *, decode: tuple[str, ...] = (D,), **more: object) -> Bench:
    """A router whose decode has answered PROMPT."""
    on = bench(load, decode=decode)
    first = ask(on, PROMPT, **more)
    assert set(first) == {P, D}
    generate(on, first[D], ANSWER)
    return on


def test_a_turn_goes_to_the_decode_alone_that_has_answered_the_one_before() -> None:
    on = answered(decode=(D, D2))
    turn = ask(on, PROMPT + ANSWER + REST)
    assert set(turn) == {D}
    assert (turn[D].rest_max, turn[D].peers) == (MOST, (D,))
    generate(on, turn[D], [70, 71], prefill=False)
    assert (on.routing.stayed, on.routing.room_count) == (1, 0)
    (finish,) = on.of(Finish)
    assert (finish.room.prefill_node, finish.room.prefill) == ("", None)
    assert on.sent(Ended, D) == [Ended(turn[D].room)]
    third = ask(on, [*PROMPT, *ANSWER, *REST, 70, 71, 80])
    assert set(third) == {D}


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        (PROMPT[:8] + [99] * 4, {}),  # a common beginning alone, such as a system prompt
        (PROMPT + ANSWER[:1] + [99] * 4, {}),  # the answer was changed
        ([*PROMPT, *ANSWER, *range(100, 112)], {}),  # 13 tokens to compute
        (PROMPT + ANSWER + REST, {"salt": b"another"}),
    ],
)
def test_what_goes_on_from_no_answer_or_is_long_is_handed_over(prompt: list[int], more: dict[str, object]) -> None:
    on = answered()
    turn = ask(on, prompt, **more)
    assert set(turn) == {P, D}
    assert (turn[D].rest_max, turn[D].peers) == (0, (P,))


@pytest.mark.parametrize("rest_max", [0, 2])
def test_a_decode_that_computes_no_prompts_or_shorter_ones_is_not_asked_to(rest_max: int) -> None:
    on = answered(msgspec.structs.replace(ABLE, rest_max=rest_max))
    assert set(ask(on, PROMPT + ANSWER + REST)) == {P, D}


def test_of_turns_at_once_only_as_many_tokens_stay_as_decode_may_compute() -> None:
    on = answered()
    one, two = (ask(on, [*PROMPT, *ANSWER, *[first] * 5]) for first in (60, 70))  # six tokens each
    assert set(one) == set(two) == {D}
    assert set(ask(on, PROMPT + ANSWER + REST)) == {P, D}
    on.receive(D, Tokens(one[D].room, 0, pack_ids([1])))  # its prompt is computed
    assert set(ask(on, PROMPT + ANSWER + REST)) == {D}


def test_a_turn_that_decode_refuses_is_handed_over_and_still_has_its_retry() -> None:
    on = answered()
    turn = ask(on, PROMPT + ANSWER + REST)
    on.receive(D, RoomEnd(turn[D].room, "refused", "prefix: 0 of 15 tokens are cached", 0))
    (retry,) = on.of(Retry)
    assert retry.cause is Cause.REFUSED
    again = begins(on)
    assert set(again) == {P, D}
    on.receive(P, RoomEnd(again[P].room, "engine", "as told", 0))
    third = begins(on)
    assert set(third) == {P, D}
    on.receive(P, RoomEnd(third[P].room, "engine", "as told", 0))
    assert len(on.of(Fail)) == 1


def test_a_turn_whose_decode_is_lost_is_handed_over_and_nothing_is_known_of_it() -> None:
    on = answered(decode=(D, D2))
    turn = ask(on, PROMPT + ANSWER + REST)
    on.welcome(D, incarnation=2)
    assert set(begins(on)) == {P, D2}
    assert turn[D].room not in [room.id for room in on.routing.rooms]
    on.receive(D, ABLE)
    assert set(ask(on, PROMPT + ANSWER + [99])) != {D}


def test_what_a_process_has_answered_is_not_known_of_the_next_one_at_its_address() -> None:
    """Also where prefill ends its part later than that."""
    on = bench()
    first = ask(on, PROMPT)
    on.receive(D, Tokens(first[D].room, 0, pack_ids(ANSWER)), RoomEnd(first[D].room, "length", "", len(ANSWER)))
    on.welcome(D, incarnation=2)
    on.receive(D, ABLE)
    on.receive(P, RoomEnd(first[D].room, "done", "", 0))
    assert set(ask(on, PROMPT + ANSWER + REST)) == {P, D}


def test_a_turn_that_its_client_leaves_is_cancelled_at_decode_alone() -> None:
    on = answered()
    turn = ask(on, PROMPT + ANSWER + REST)
    on.effects = on.routing.cancel(turn[D].room, on.now)
    assert on.sent(Cancel, D) == [Cancel(turn[D].room, "aborted")]
    assert on.sent(Cancel, P) == []
    on.receive(D, RoomEnd(turn[D].room, "aborted", "", 0))
    assert on.routing.room_count == 0
    assert not any(worker.computing for worker in on.routing.workers.by_peer.values())

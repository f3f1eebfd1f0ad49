"""Decode's rooms with a prefix cache: what does not cross, what others may read, and when; the test plays prefill."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.wire import Abort, Drained, Grant, Released, unpack_extents
from tests.support.session_ends import LIMITS, SLOTS, DecodeEnd, P, kv_bytes, of, sent

SHARED = replace(LIMITS, prefix_block_tokens=8)
PROMPT = list(range(100, 120))  # two blocks, and four tokens more


def end() -> DecodeEnd:
    decode_end = DecodeEnd(SHARED)
    decode_end.up()
    return decode_end


def keys(decode_end: DecodeEnd, prompt: list[int], salt: bytes = b"") -> tuple[bytes, ...]:
    return decode_end.core.cache.keys(np.array(prompt, "<u4").tobytes(), salt)


def granted(decode_end: DecodeEnd, room: int, prompt: list[int], *, salt: bytes = b"", growth: int = 2) -> Grant:
    return decode_end.granted(room, len(prompt), keys=keys(decode_end, prompt, salt), growth=growth)


def ready(decode_end: DecodeEnd, grant: Grant) -> RoomReady:
    (effect,) = of(decode_end.land(grant), RoomReady)
    return effect


def parts(grant: Grant) -> list[tuple[int, int]]:
    return [(part.first_row, part.rows) for part in grant.parts]


def written(grant: Grant) -> list[set[int]]:
    return [
        {slot for start, count in unpack_extents("x", part.extents).tolist() for slot in range(start, start + count)}
        for part in grant.parts
    ]


@pytest.fixture
def decode_end() -> DecodeEnd:
    return end()


def test_a_prompt_that_has_landed_crosses_only_from_where_the_next_one_differs(decode_end: DecodeEnd) -> None:
    first = ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.tick(0.0)
    grant = granted(decode_end, 2, [*PROMPT[:16], 7, 8, 9])
    assert grant.prefix == 16
    assert parts(grant) == [(16, 3), (4, 1)]
    second = ready(decode_end, grant)
    assert (second.prefix, second.kv_bytes) == (16, kv_bytes(19) - kv_bytes(16))
    for name, rows in (("kv", 16), ("c4", 4)):
        assert second.slots[name][:rows].tolist() == first.slots[name][:rows].tolist(), "the same rows, in order"
        assert not set(second.slots[name][rows:]) & set(first.slots[name])
    assert [len(second.slots[name]) for name in ("kv", "c4")] == [21, 6]


def test_a_room_shares_with_one_that_was_ready_the_moment_before(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    assert granted(decode_end, 2, PROMPT).prefix == 16
    assert decode_end.core.next_tick() is not None
    decode_end.tick(0.0)
    assert granted(decode_end, 3, PROMPT).prefix == 16


def test_a_prompt_that_is_all_there_is_granted_without_parts(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT[:16]))
    decode_end.tick(0.0)
    grant = granted(decode_end, 2, PROMPT[:16])
    assert (grant.prefix, grant.parts) == (16, ())
    assert ready(decode_end, grant).kv_bytes == 0


def test_slots_that_are_shared_are_in_no_grant(decode_end: DecodeEnd) -> None:
    first = ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.tick(0.0)
    for room in (2, 3, 4):
        grant = granted(decode_end, room, [*PROMPT[:16], room])
        for slots, name, rows in zip(written(grant), ("kv", "c4"), (16, 4), strict=True):
            assert not slots & set(first.slots[name][:rows].tolist())
        ready(decode_end, grant)


def test_what_has_not_landed_is_not_shared(decode_end: DecodeEnd) -> None:
    first = granted(decode_end, 1, PROMPT)
    assert granted(decode_end, 2, PROMPT).prefix == 0
    decode_end.core.abort(1, decode_end.now)
    decode_end.receive(Drained(first.session, first.grant))
    assert granted(decode_end, 3, PROMPT).prefix == 0, "and what fails never is"


def test_a_prompt_that_comes_twice_at_once_is_kept_once(decode_end: DecodeEnd) -> None:
    grants = [granted(decode_end, room, PROMPT) for room in (1, 2)]
    slots = [ready(decode_end, grant).slots["kv"] for grant in grants]
    decode_end.tick(0.0)
    assert len(decode_end.core.cache) == 2
    assert not set(slots[0]) & set(slots[1])
    decode_end.core.release(1, decode_end.now)
    decode_end.core.release(2, decode_end.now)
    assert decode_end.free == [SLOTS - 16, SLOTS - 4]
    third = ready(decode_end, granted(decode_end, 3, PROMPT))
    assert third.slots["kv"][:16].tolist() == slots[0][:16].tolist()


def test_a_room_that_is_released_at_once_leaves_its_prompt(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.core.release(1, decode_end.now)
    assert decode_end.core.idle
    assert decode_end.core.cache.free_slots == [SLOTS, SLOTS]
    assert granted(decode_end, 2, PROMPT).prefix == 16


def test_growth_and_the_last_tokens_are_free_when_the_room_is_released(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT, growth=10))
    decode_end.core.release(1, decode_end.now)
    assert decode_end.free == [SLOTS - 16, SLOTS - 4]
    decode_end.core.cache.clear()
    assert decode_end.free == [SLOTS, SLOTS]


def test_an_aborted_sharer_takes_nothing_from_the_others(decode_end: DecodeEnd) -> None:
    first = ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.tick(0.0)
    second = granted(decode_end, 2, PROMPT)
    assert sent(decode_end.core.abort(2, decode_end.now), Abort) == [Abort(second.session, second.grant, 2)]
    assert decode_end.core.cache.claimed == 2
    decode_end.receive(Drained(second.session, second.grant))
    decode_end.core.cache.clear()
    assert len(decode_end.core.cache) == 2, "the first room reads them"
    third = ready(decode_end, granted(decode_end, 3, PROMPT))
    assert third.slots["kv"][:16].tolist() == first.slots["kv"][:16].tolist()


def test_a_lease_whose_writer_is_not_proven_quiet_keeps_what_its_room_shared(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.core.release(1, decode_end.now)
    second = granted(decode_end, 2, PROMPT)
    decode_end.core.abort(2, decode_end.now)
    decode_end.core.cache.clear()
    assert len(decode_end.core.cache) == 2
    decode_end.receive(Drained(second.session, second.grant))
    decode_end.core.cache.clear()
    assert len(decode_end.core.cache) == 0
    assert decode_end.free == [SLOTS, SLOTS]


def test_prompts_nobody_reads_make_room_for_a_waiting_one(decode_end: DecodeEnd) -> None:
    for room in range(1, 5):
        ready(decode_end, granted(decode_end, room, [room] * 16, growth=0))
        decode_end.core.release(room, decode_end.now)
    assert decode_end.free[0] == 0
    grant = granted(decode_end, 9, [9] * 20, growth=0)
    assert (grant.prefix, parts(grant)) == (0, [(0, 20), (0, 5)])
    assert decode_end.core.cache.evicted_blocks == 3
    assert granted(decode_end, 10, [4] * 16, growth=0).prefix == 16, "the latest stays"


def test_a_room_that_waits_finds_what_has_landed_meanwhile(decode_end: DecodeEnd) -> None:
    first = granted(decode_end, 1, PROMPT, growth=30)
    assert sent(decode_end.expect(2, 20, keys=keys(decode_end, PROMPT), growth=20), Grant) == []
    ready(decode_end, first)
    (grant,) = sent(decode_end.core.release(1, decode_end.now), Grant)
    assert (grant.room, grant.prefix) == (2, 16)


def test_bytes_in_flight_are_those_that_cross(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.core.release(1, decode_end.now)
    grants = [granted(decode_end, room, PROMPT) for room in (2, 3)]
    assert decode_end.core.admission.inflight_bytes == 2 * (kv_bytes(20) - kv_bytes(16))
    ready(decode_end, grants[0])
    decode_end.core.abort(3, decode_end.now)
    assert decode_end.core.admission.inflight_bytes == 0


def test_another_salt_shares_nothing(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT, salt=b"a"))
    decode_end.core.release(1, decode_end.now)
    assert granted(decode_end, 2, PROMPT, salt=b"b").prefix == 0
    assert granted(decode_end, 3, PROMPT, salt=b"a").prefix == 16


def test_without_keys_nothing_is_kept(decode_end: DecodeEnd) -> None:
    ready(decode_end, decode_end.granted(1, 20))
    decode_end.core.release(1, decode_end.now)
    assert decode_end.free == [SLOTS, SLOTS]


def test_a_repeated_landed_does_not_share_a_second_time(decode_end: DecodeEnd) -> None:
    grant = granted(decode_end, 1, PROMPT)
    ready(decode_end, grant)
    decode_end.tick(0.0)
    again = decode_end.land(grant)
    assert sent(again, Released) == [Released(grant.session, grant.grant)]
    decode_end.tick(0.0)
    assert len(decode_end.core.cache) == 2


@pytest.mark.parametrize("wrong", [{"prefix": 8}, {"tokens": 15}], ids=str)
def test_keys_that_do_not_fit_the_room_are_refused_at_once(decode_end: DecodeEnd, wrong: dict[str, int]) -> None:
    request = RoomRequest(
        room=1, **{"tokens": 20, "sources": (P,), "time_left_s": 9.0} | wrong, keys=keys(decode_end, PROMPT)
    )
    with pytest.raises(LocalProtocolError, match="keys"):
        decode_end.core.expect(request, now=0.0)


def test_a_shared_room_whose_writer_is_lost_fails_alone(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    decode_end.tick(0.0)
    granted(decode_end, 2, PROMPT)
    (failed,) = of(decode_end.tick(5.0), RoomFailed)
    assert (failed.room, failed.cause) == (2, Cause.PEER_LOST)
    decode_end.core.release(1, decode_end.now)
    decode_end.core.cache.clear()
    assert len(decode_end.core.cache) == 2, "the lost writer's lease is in quarantine, and its claims with it"


# Rooms without a prefill rank: the engine computes what is not cached


def answered(decode_end: DecodeEnd, room: int, prompt: list[int], answer: list[int]) -> RoomReady:
    """A room that prefill wrote, and whose answer decode has computed."""
    landed = ready(decode_end, granted(decode_end, room, prompt, growth=len(answer)))
    decode_end.tick(0.0)
    decode_end.core.release(room, decode_end.now, keys(decode_end, prompt + answer))
    return landed


def expected(decode_end: DecodeEnd, room: int, prompt: list[int], *, rest_max: int, growth: int = 2) -> list:
    return decode_end.expect(room, len(prompt), rest_max=rest_max, keys=keys(decode_end, prompt), growth=growth)


def test_the_next_turn_has_the_answer_s_blocks_and_no_grant(decode_end: DecodeEnd) -> None:
    first = answered(decode_end, 1, PROMPT, list(range(200, 212)))  # 32 tokens: four blocks
    turn = [*PROMPT, *range(200, 212), 5, 6, 7]
    effects = expected(decode_end, 2, turn, rest_max=3)
    (landed,) = of(effects, RoomReady)
    assert (landed.prefix, landed.kv_bytes, landed.aux) == (32, 0, b"")
    assert landed.slots["kv"][:32].tolist() == first.slots["kv"].tolist()
    assert not sent(effects, Grant)


def test_the_rows_of_a_rest_are_not_shared_before_its_room_is_released(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    turn = [*PROMPT, *range(200, 212), *range(9)]
    expected(decode_end, 2, turn, rest_max=9)
    decode_end.tick(1.0)
    assert len(decode_end.core.cache.longest(keys(decode_end, turn))) == 4, "the engine may not have written the fifth"
    decode_end.core.release(2, decode_end.now, keys(decode_end, turn))
    assert len(decode_end.core.cache.longest(keys(decode_end, turn))) == 5


def test_a_room_that_ends_without_its_rows_shares_none_of_them(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    free = decode_end.core.cache.free_slots
    turn = [*PROMPT, *range(200, 212), *range(9)]
    expected(decode_end, 2, turn, rest_max=9)
    decode_end.core.release(2, decode_end.now)
    assert len(decode_end.core.cache.longest(keys(decode_end, turn))) == 4
    assert decode_end.core.cache.free_slots == free


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed(decode_end: DecodeEnd) -> None:
    """Its last token leads to the first of the answer, and no row is written into a block that others read."""
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    (landed,) = of(expected(decode_end, 2, [*PROMPT, *range(200, 212)], rest_max=8), RoomReady)
    assert landed.prefix == 24


def test_a_rest_that_is_too_long_fails_and_leaves_nothing(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    free = decode_end.core.cache.free_slots
    (failed,) = of(expected(decode_end, 2, [*PROMPT, *range(200, 212), 5, 6, 7], rest_max=2), RoomFailed)
    assert (failed.cause, failed.detail) == (
        Cause.REFUSED, "prefix: 32 of 35 tokens are cached, 3 are left, at most 2 are computed here",
    )  # fmt: skip
    assert decode_end.core.cache.free_slots == free
    assert decode_end.core.idle


def test_a_rest_waits_for_slots_and_may_be_aborted(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    turn = [*PROMPT, *range(200, 212), 5]
    granted(decode_end, 7, [9] * 8, growth=SLOTS - 48)
    assert of(expected(decode_end, 2, turn, rest_max=8, growth=12), RoomReady | RoomFailed) == []
    assert of(decode_end.core.abort(2, decode_end.now), RoomFailed)
    assert decode_end.core.cache.claimed == 0


def test_a_rest_that_is_too_long_is_refused_at_once_where_the_arena_is_full(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    granted(decode_end, 7, [9] * 8, growth=SLOTS - 48)
    turn = [*PROMPT, *range(200, 212), *range(9)]
    (failed,) = of(expected(decode_end, 2, turn, rest_max=8), RoomFailed)
    assert (failed.cause, failed.detail) == (
        Cause.REFUSED, "prefix: 32 of 41 tokens are cached, 9 are left, at most 8 are computed here",
    )  # fmt: skip
    assert of(expected(decode_end, 3, turn, rest_max=9), RoomReady | RoomFailed) == [], "it waits"


def test_a_prompt_that_has_just_landed_counts_as_cached_for_a_rest(decode_end: DecodeEnd) -> None:
    ready(decode_end, granted(decode_end, 1, PROMPT))
    (landed,) = of(expected(decode_end, 2, [*PROMPT, 5], rest_max=5), RoomReady)
    assert landed.prefix == 16


def test_a_rest_whose_blocks_are_given_up_for_a_room_before_it_is_refused_then(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    first = granted(decode_end, 7, [9] * 8, growth=SLOTS - 48)
    decode_end.expect(8, 8, growth=SLOTS - 16)
    assert of(expected(decode_end, 2, [*PROMPT, *range(200, 212), 5], rest_max=8), RoomFailed) == []
    assert of(expected(decode_end, 3, [*PROMPT, *range(200, 212), 5], rest_max=33), RoomFailed) == []
    ready(decode_end, first)
    effects = decode_end.core.release(7, decode_end.now)
    assert [grant.room for grant in sent(effects, Grant)] == [8]
    (failed,) = of(effects, RoomReady | RoomFailed)
    assert (failed.room, failed.cause) == (2, Cause.REFUSED)
    assert failed.detail == "prefix: 0 of 33 tokens are cached, 33 are left, at most 8 are computed here"


def test_what_the_engine_has_elsewhere_is_not_left_of_a_rest(decode_end: DecodeEnd) -> None:
    (landed,) = of(decode_end.expect(1, 33, prefix=30, rest_max=3), RoomReady)
    assert (landed.prefix, len(landed.slots["kv"])) == (30, 33)
    (failed,) = of(decode_end.expect(2, 33, prefix=30, rest_max=2), RoomFailed)
    assert failed.detail == "prefix: 30 of 33 tokens are cached, 3 are left, at most 2 are computed here"


def test_a_rest_behind_what_the_engine_has_elsewhere_waits_whatever_the_cache_gives_up(decode_end: DecodeEnd) -> None:
    answered(decode_end, 1, PROMPT, list(range(200, 212)))
    first = granted(decode_end, 7, [9] * 8, growth=SLOTS - 48)
    assert of(decode_end.expect(2, 41, prefix=33, rest_max=8), RoomReady | RoomFailed) == []
    decode_end.core.cache.clear()
    assert of(decode_end.tick(0.0), RoomReady | RoomFailed) == []
    ready(decode_end, first)
    (landed,) = of(decode_end.core.release(7, decode_end.now), RoomReady | RoomFailed)
    assert landed.prefix == 33

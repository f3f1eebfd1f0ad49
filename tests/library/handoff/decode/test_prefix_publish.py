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


def keys(one: DecodeEnd, prompt: list[int], salt: bytes = b"") -> tuple[bytes, ...]:
    return one.core.cache.keys(np.array(prompt, "<u4").tobytes(), salt)


def granted(one: DecodeEnd, room: int, prompt: list[int], *, salt: bytes = b"", growth: int = 2) -> Grant:
    return one.granted(room, len(prompt), keys=keys(one, prompt, salt), growth=growth)


def ready(one: DecodeEnd, grant: Grant) -> RoomReady:
    (effect,) = of(one.land(grant), RoomReady)
    return effect


def parts(grant: Grant) -> list[tuple[int, int]]:
    return [(part.first_row, part.rows) for part in grant.parts]


def written(grant: Grant) -> list[set[int]]:
    return [
        {slot for start, count in unpack_extents("x", part.extents).tolist() for slot in range(start, start + count)}
        for part in grant.parts
    ]


def test_a_prompt_that_has_landed_crosses_only_from_where_the_next_one_differs() -> None:
    one = end()
    first = ready(one, granted(one, 1, PROMPT))
    one.tick(0.0)
    grant = granted(one, 2, [*PROMPT[:16], 7, 8, 9])
    assert grant.prefix == 16
    assert parts(grant) == [(16, 3), (4, 1)]
    second = ready(one, grant)
    assert (second.prefix, second.kv_bytes) == (16, kv_bytes(19) - kv_bytes(16))
    for name, rows in (("kv", 16), ("c4", 4)):
        assert second.slots[name][:rows].tolist() == first.slots[name][:rows].tolist(), "the same rows, in order"
        assert not set(second.slots[name][rows:]) & set(first.slots[name])
    assert [len(second.slots[name]) for name in ("kv", "c4")] == [21, 6]


def test_a_room_shares_with_one_that_was_ready_the_moment_before() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT))
    assert granted(one, 2, PROMPT).prefix == 16
    assert one.core.next_tick() is not None
    one.tick(0.0)
    assert granted(one, 3, PROMPT).prefix == 16


def test_a_prompt_that_is_all_there_is_granted_without_parts() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT[:16]))
    one.tick(0.0)
    grant = granted(one, 2, PROMPT[:16])
    assert (grant.prefix, grant.parts) == (16, ())
    assert ready(one, grant).kv_bytes == 0


def test_slots_that_are_shared_are_in_no_grant() -> None:
    one = end()
    first = ready(one, granted(one, 1, PROMPT))
    one.tick(0.0)
    for room in (2, 3, 4):
        grant = granted(one, room, [*PROMPT[:16], room])
        for slots, name, rows in zip(written(grant), ("kv", "c4"), (16, 4), strict=True):
            assert not slots & set(first.slots[name][:rows].tolist())
        ready(one, grant)


def test_what_has_not_landed_is_not_shared() -> None:
    one = end()
    first = granted(one, 1, PROMPT)
    assert granted(one, 2, PROMPT).prefix == 0
    one.core.abort(1, one.now)
    one.receive(Drained(first.session, first.grant))
    assert granted(one, 3, PROMPT).prefix == 0, "and what fails never is"


def test_a_prompt_that_comes_twice_at_once_is_kept_once() -> None:
    one = end()
    grants = [granted(one, room, PROMPT) for room in (1, 2)]
    slots = [ready(one, grant).slots["kv"] for grant in grants]
    one.tick(0.0)
    assert len(one.core.cache) == 2
    assert not set(slots[0]) & set(slots[1])
    one.core.release(1, one.now)
    one.core.release(2, one.now)
    assert one.free == [SLOTS - 16, SLOTS - 4]
    third = ready(one, granted(one, 3, PROMPT))
    assert third.slots["kv"][:16].tolist() == slots[0][:16].tolist()


def test_a_room_that_is_released_at_once_leaves_its_prompt() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT))
    one.core.release(1, one.now)
    assert one.core.idle
    assert one.core.cache.free_slots == [SLOTS, SLOTS]
    assert granted(one, 2, PROMPT).prefix == 16


def test_growth_and_the_last_tokens_are_free_when_the_room_is_released() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT, growth=10))
    one.core.release(1, one.now)
    assert one.free == [SLOTS - 16, SLOTS - 4]
    one.core.cache.clear()
    assert one.free == [SLOTS, SLOTS]


def test_an_aborted_sharer_takes_nothing_from_the_others() -> None:
    one = end()
    first = ready(one, granted(one, 1, PROMPT))
    one.tick(0.0)
    second = granted(one, 2, PROMPT)
    assert sent(one.core.abort(2, one.now), Abort) == [Abort(second.session, second.grant, 2)]
    assert one.core.cache.claimed == 2
    one.receive(Drained(second.session, second.grant))
    one.core.cache.clear()
    assert len(one.core.cache) == 2, "the first room reads them"
    third = ready(one, granted(one, 3, PROMPT))
    assert third.slots["kv"][:16].tolist() == first.slots["kv"][:16].tolist()


def test_a_lease_whose_writer_is_not_proven_quiet_keeps_what_its_room_shared() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT))
    one.core.release(1, one.now)
    second = granted(one, 2, PROMPT)
    one.core.abort(2, one.now)
    one.core.cache.clear()
    assert len(one.core.cache) == 2
    one.receive(Drained(second.session, second.grant))
    one.core.cache.clear()
    assert len(one.core.cache) == 0
    assert one.free == [SLOTS, SLOTS]


def test_prompts_nobody_reads_make_room_for_a_waiting_one() -> None:
    one = end()
    for room in range(1, 5):
        ready(one, granted(one, room, [room] * 16, growth=0))
        one.core.release(room, one.now)
    assert one.free[0] == 0
    grant = granted(one, 9, [9] * 20, growth=0)
    assert (grant.prefix, parts(grant)) == (0, [(0, 20), (0, 5)])
    assert one.core.cache.evicted_blocks == 3
    assert granted(one, 10, [4] * 16, growth=0).prefix == 16, "the latest stays"


def test_a_room_that_waits_finds_what_has_landed_meanwhile() -> None:
    one = end()
    first = granted(one, 1, PROMPT, growth=30)
    assert sent(one.expect(2, 20, keys=keys(one, PROMPT), growth=20), Grant) == []
    ready(one, first)
    (grant,) = sent(one.core.release(1, one.now), Grant)
    assert (grant.room, grant.prefix) == (2, 16)


def test_bytes_in_flight_are_those_that_cross() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT))
    one.core.release(1, one.now)
    grants = [granted(one, room, PROMPT) for room in (2, 3)]
    assert one.core.admission.inflight_bytes == 2 * (kv_bytes(20) - kv_bytes(16))
    ready(one, grants[0])
    one.core.abort(3, one.now)
    assert one.core.admission.inflight_bytes == 0


def test_another_salt_shares_nothing() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT, salt=b"a"))
    one.core.release(1, one.now)
    assert granted(one, 2, PROMPT, salt=b"b").prefix == 0
    assert granted(one, 3, PROMPT, salt=b"a").prefix == 16


def test_without_keys_nothing_is_kept() -> None:
    one = end()
    ready(one, one.granted(1, 20))
    one.core.release(1, one.now)
    assert one.free == [SLOTS, SLOTS]


def test_a_repeated_landed_does_not_share_a_second_time() -> None:
    one = end()
    grant = granted(one, 1, PROMPT)
    ready(one, grant)
    one.tick(0.0)
    again = one.land(grant)
    assert sent(again, Released) == [Released(grant.session, grant.grant)]
    one.tick(0.0)
    assert len(one.core.cache) == 2


@pytest.mark.parametrize("wrong", [{"prefix": 8}, {"tokens": 15}], ids=str)
def test_keys_that_do_not_fit_the_room_are_refused_at_once(wrong: dict[str, int]) -> None:
    one = end()
    request = RoomRequest(room=1, **{"tokens": 20, "sources": (P,), "time_left_s": 9.0} | wrong, keys=keys(one, PROMPT))
    with pytest.raises(LocalProtocolError, match="keys"):
        one.core.expect(request, now=0.0)


def test_a_shared_room_whose_writer_is_lost_fails_alone() -> None:
    one = end()
    ready(one, granted(one, 1, PROMPT))
    one.tick(0.0)
    granted(one, 2, PROMPT)
    (failed,) = of(one.tick(5.0), RoomFailed)
    assert (failed.room, failed.cause) == (2, Cause.PEER_LOST)
    one.core.release(1, one.now)
    one.core.cache.clear()
    assert len(one.core.cache) == 2, "the lost writer's lease is in quarantine, and its claims with it"

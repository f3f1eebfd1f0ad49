"""Decode's side of a hand-off, one behaviour a test; the test plays the prefill ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.decode import waiting_rooms
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import (
    ComponentRows,
    Fence,
    Forget,
    HangUp,
    Offer,
    PeerRefused,
    RoomDrained,
    RoomFailed,
    RoomReady,
    Send,
    SessionLost,
)
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.handoff.states import Lease, SessionState
from pdtransfer.limits import AHEAD_MAX
from pdtransfer.wire import (
    Abort,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Holds,
    Landed,
    Pong,
    Ranks,
    Register,
    Registered,
    Reject,
    Released,
    Withdrawn,
    unpack_extents,
)
from tests.library.sim.pools import LAYERS, ROW
from tests.support.session_ends import (
    ARENA_BYTES,
    C4,
    C4_ROW,
    IDLE,
    KV,
    LIMITS,
    P2,
    P3,
    REACH,
    SLOTS,
    DecodeEnd,
    P,
    failure,
    kv_bytes,
    of,
    sent,
)

ALL_FREE = [SLOTS, SLOTS]


def failures(effects: list) -> list[tuple[int, Cause]]:
    return [(failed.room, failed.cause) for failed in of(effects, RoomFailed)]


# A room's way


@pytest.fixture
def end() -> DecodeEnd:
    return DecodeEnd()


def test_a_room_is_ready_when_its_grant_has_landed(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(7, tokens=8, growth=2)
    effects = end.land(grant, aux=b"first token")
    (ready,) = of(effects, RoomReady)
    assert (ready.room, ready.aux, ready.kv_bytes) == (7, b"first token", kv_bytes(8))
    assert sent(effects, Released) == [Released(grant.session, grant.grant)]
    for part, name, rows in zip(grant.parts, ("kv", "c4"), (8, 2), strict=True):
        assert (part.first_row, part.rows) == (0, rows)
        written = [s for start, n in unpack_extents("x", part.extents).tolist() for s in range(start, start + n)]
        assert ready.slots[name][:rows].tolist() == written
    assert len(ready.slots["kv"]) == 10, "growth is leased, too"
    assert len(ready.slots["c4"]) == 3


def test_slots_are_free_after_landed_and_release(end: DecodeEnd) -> None:
    end.up()
    end.land(end.granted(1, tokens=16))
    assert end.free == [SLOTS - 16, SLOTS - 4]
    end.core.release(1, end.now)
    end.core.release(1, end.now)
    assert end.free == ALL_FREE
    assert end.core.idle


def test_grant_repeats_with_what_time_is_left_until_granted(end: DecodeEnd) -> None:
    end.up()
    first = end.granted(1, deadline=10.0)
    assert first.time_left_ms == 10_000
    repeats = sent(end.tick(0.35), Grant)
    assert [repeat.time_left_ms for repeat in repeats] == [9_900, 9_700]
    assert msgspec.structs.replace(repeats[-1], time_left_ms=first.time_left_ms) == first
    end.receive(Granted(first.session, first.grant))
    assert sent(end.live(1.5, P), Grant) == []


def test_a_room_without_end_in_time_still_makes_a_grant_that_the_wire_can_carry(end: DecodeEnd) -> None:
    end.up()
    assert end.granted(1, deadline=float("inf")).time_left_ms == 0xFFFF_FFFF


def test_rows_of_the_prefix_are_in_no_part(end: DecodeEnd) -> None:
    end.up()
    kv, c4 = end.granted(1, tokens=20, prefix=10).parts
    assert (kv.first_row, kv.rows) == (10, 10)
    assert (c4.first_row, c4.rows) == (2, 3), "row 2 holds tokens 8 to 11, of which the prefix has only two"


def test_a_room_that_decode_holds_already_is_granted_without_parts(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1, tokens=8, prefix=8)
    assert grant.parts == ()
    (ready,) = of(end.land(grant, aux=b"token"), RoomReady)
    assert ready.kv_bytes == 0
    assert len(ready.slots["kv"]) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0}, {"tokens": 1 << 25}, {"prefix": 9}, {"prefix": -1}, {"growth": -1}, {"sources": ()},
        {"sources": (P, P)},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_at_once(end: DecodeEnd, wrong: dict) -> None:
    options = {"tokens": 8, "sources": (P,), "time_left_s": 1.0} | wrong
    with pytest.raises(LocalProtocolError):
        end.core.expect(RoomRequest(room=1, **options), now=0.0)
    assert end.core.idle


def test_a_label_in_use_is_refused(end: DecodeEnd) -> None:
    end.up()
    end.expect(1)
    with pytest.raises(LocalProtocolError, match="0000000000000001"):
        end.expect(1)


def test_a_ready_room_is_released_and_not_aborted(end: DecodeEnd) -> None:
    end.up()
    end.land(end.granted(1))
    assert end.core.abort(1, end.now) == []
    assert end.tick(100.0) != []
    assert end.free != ALL_FREE, "its deadline was for being ready"
    end.core.release(1, end.now)
    assert end.free == ALL_FREE


def test_a_room_that_is_not_ready_cannot_be_released(end: DecodeEnd) -> None:
    end.up()
    end.expect(1)
    with pytest.raises(LocalProtocolError, match="abort it"):
        end.core.release(1, end.now)


def test_a_draining_node_takes_no_room_and_ends_those_it_has(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    end.core.drain()
    assert failure(end.expect(2)) == (2, Cause.SHUTDOWN)
    assert of(end.land(grant), RoomReady)


def test_a_room_that_the_arena_could_never_hold_is_refused_and_a_full_queue_returns_when_to_ask_again() -> None:
    end = DecodeEnd(replace(LIMITS, queue_max=1))
    end.up()
    (failed,) = of(end.expect(1, tokens=SLOTS + 1), RoomFailed)
    assert (failed.cause, failed.retry_ms) == (Cause.REFUSED, 0)
    end.expect(2, tokens=SLOTS)
    assert end.expect(3, tokens=SLOTS) == [], "it waits for slots"
    (failed,) = of(end.expect(4, tokens=8), RoomFailed)
    assert failed.cause is Cause.FULL
    assert failed.retry_ms > 0


# Several ranks


def two_ranks(end: DecodeEnd, tokens: int = 8) -> tuple[Grant, Grant]:
    """A room of a rank that holds kv and one that holds c4."""
    end.up(P, holds=KV)
    end.up(P2, holds=C4)
    sends = [e for e in end.expect(1, tokens, P, P2) if isinstance(e, Send)]
    assert [send.peer for send in sends] == [P, P2]
    return sends[0].message, sends[1].message


def test_a_room_of_two_ranks_is_ready_when_both_have_landed(end: DecodeEnd) -> None:
    first, second = two_ranks(end)
    assert (first.send_aux, second.send_aux) == (True, False)
    assert of(end.land(second, P2), RoomReady) == []
    (ready,) = of(end.land(first, P, aux=b"aux"), RoomReady)
    assert ready.aux == b"aux"


def test_one_ranks_failure_fails_the_room_and_aborts_the_other(end: DecodeEnd) -> None:
    first, second = two_ranks(end)
    effects = end.receive(Failed(first.session, first.grant, "engine", "out of luck", quiescent=True))
    assert failure(effects) == (1, Cause.ENGINE)
    assert sent(effects, Abort) == [Abort(second.session, second.grant, 1, f"engine: {P}: out of luck")], (
        "the first has ended already"
    )


def test_slots_are_free_when_the_last_rank_has_drained(end: DecodeEnd) -> None:
    first, second = two_ranks(end)
    end.core.abort(1, end.now)
    end.receive(Drained(first.session, first.grant))
    assert end.free != ALL_FREE
    end.receive(Drained(second.session, second.grant), peer=P2)
    assert end.free == ALL_FREE


def test_each_rank_registers_its_own_planes_and_is_granted_by_their_places_in_register(end: DecodeEnd) -> None:
    registers = [end.registered(P, holds=KV), end.registered(P2, holds=C4), end.registered(P3, **IDLE)]
    assert [[component.name for component in register.components] for register in registers] == [["kv"], ["c4"], []]
    end.expect(9, 8, P, P2, P3)
    kv, c4, none = sent(end.expect(1, 8, P, P2, P3), Grant)
    parts = [[(part.component, part.rows) for part in grant.parts] for grant in (kv, c4, none)]
    assert parts == [[(0, 8)], [(0, 2)], []]
    assert unpack_extents("x", kv.parts[0].extents).tolist() == [[8, 8]]
    assert unpack_extents("x", c4.parts[0].extents).tolist() == [[2, 2]], "another component's slots are others"
    end.land(kv, P)
    end.land(none, P3)
    (ready,) = of(end.land(c4, P2), RoomReady)
    assert ready.kv_bytes == kv_bytes(8)


def test_slots_of_several_silent_ranks_are_quarantined_once_and_counted_against_each(end: DecodeEnd) -> None:
    two_ranks(end, tokens=16)
    end.tick(LIMITS.silence_ms / 1e3 + 1.0)
    held = kv_bytes(16)
    assert end.core.leases.quarantined_bytes == held
    assert [end.core.prefill_peers.peers[name].quarantined_bytes for name in (P, P2)] == [held, held]
    for session in list(end.core.prefill_peers.sessions):
        end.core.fenced(session, end.now)
        assert end.core.leases.quarantined_bytes == (held if end.core.prefill_peers.sessions else 0)
    assert end.free == ALL_FREE


def test_whether_sessions_cover_a_room_is_reckoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reckoned: list[object] = []
    monkeypatch.setattr(waiting_rooms, "uncovered", lambda components, shares: reckoned.append(shares) or "")
    end = DecodeEnd()
    for peer in (P, P2):
        end.up(peer)
    for room in range(1, 4):
        end.land(end.granted(room, 1, P))
    assert len(sent(end.expect(4, 1, P, P2), Grant)) == 2
    assert len(reckoned) == 2, "once for P alone, once for both"


def test_a_room_that_its_sources_do_not_cover_fails_as_soon_as_it_has_its_places() -> None:
    end = DecodeEnd(replace(LIMITS, window=2))
    end.up(P)
    end.up(P2)
    end.granted(1, tokens=60)
    end.core.abort(1, end.now)
    assert end.expect(2, tokens=30) == [], "it waits for slots, which nobody proves to be quiet"
    assert end.expect(3, 1, P, P2) == [], "it waits for the place that room 2 has; both would send all of it"
    failed: list[RoomFailed] = []
    while not failed:
        failed = of(end.receive(Pong(1)), RoomFailed) or of(end.receive(Pong(1), peer=P2), RoomFailed)
        failed = failed or of(end.tick(0.01), RoomFailed)
        assert end.core.window_slots.refused() is None
    assert [(each.room, each.cause) for each in failed] == [(2, Cause.PEER_LOST), (3, Cause.PEER_LOST)]


# Ends and proofs


def test_a_room_given_up_before_its_grant_is_aborted_by_a_number_of_its_own() -> None:
    end = DecodeEnd(slots=16)
    end.up()
    first = end.granted(1, tokens=16)
    assert sent(end.expect(2, 16), Grant) == [], "the arena is full"
    effects = end.core.abort(2, end.now)
    assert failure(effects) == (2, Cause.ABORTED)
    assert sent(effects, Abort) == [Abort(first.session, first.grant + 1, 2)]
    effects = end.receive(Drained(first.session, first.grant + 1))
    assert sent(effects, Released) == [Released(first.session, first.grant + 1)]
    assert not end.core.withdrawals.rooms
    end.land(first)
    end.core.release(1, end.now)
    assert end.core.idle


def test_a_room_given_up_before_its_session_is_up_is_aborted_when_it_is(end: DecodeEnd) -> None:
    end.expect(1)
    assert sent(end.core.abort(1, end.now), Abort) == []
    register = end.registered()
    (lease,) = end.core.prefill_peers.sessions[register.session].leases.values()
    assert (lease.message.grant, lease.message.room, lease.state) == (1, 1, Lease.ABORTING)
    assert end.free == ALL_FREE


def test_a_room_that_reaches_its_deadline_before_its_grant_is_aborted_as_well() -> None:
    """The deadline at prefill is another one, and may be much later."""
    end = DecodeEnd(slots=16)
    end.up()
    first = end.granted(1, tokens=16)
    end.receive(Granted(first.session, first.grant))
    end.expect(2, 16, deadline=0.1)
    effects = end.tick(0.11)
    assert failure(effects) == (2, Cause.DEADLINE)
    detail = "deadline: not ready in time, still queued: this node has granted it no memory yet (1 rooms wait for some)"
    assert sent(effects, Abort) == [Abort(first.session, first.grant + 1, 2, detail)]


def test_a_room_past_its_deadline_names_the_sources_that_it_could_not_reach_or_grant() -> None:
    end = DecodeEnd(replace(LIMITS, window=1))
    end.up(P)
    end.granted(1, 1, P)
    end.expect(2, 1, P, deadline=1.0)
    end.expect(3, 1, P, P2, deadline=1.0)
    details = {failure.room: failure.detail for failure in of(end.live(1.1, P), RoomFailed)}
    assert details == {
        2: f"not ready in time, still connecting: the window of grants to prefill is full ({P})",
        3: f"not ready in time, still connecting: no session with prefill is up yet ({P2})",
    }


def test_a_room_that_is_refused_at_once_is_aborted_on_a_session_that_is_made_for_it() -> None:
    end = DecodeEnd(slots=16)
    effects = end.expect(1, 32)
    assert failure(effects) == (1, Cause.REFUSED)
    assert len(sent(effects, Hello)) == 1
    register = end.registered()
    (lease,) = end.core.prefill_peers.sessions[register.session].leases.values()
    assert (lease.message.room, lease.state) == (1, Lease.ABORTING)


def test_a_room_whose_session_ends_before_its_abort_is_answered_is_aborted_on_the_next_one(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1, tokens=16)
    end.core.abort(1, end.now)
    effects = end.receive(Reject(grant.session, "transfer", ()))
    assert sent(effects, Abort) == [], "there is no session to send it on"
    end.tick(0.5)
    second = end.registered()
    assert second.session != grant.session
    (lease,) = end.core.prefill_peers.sessions[second.session].leases.values()
    assert (lease.message.room, lease.state) == (1, Lease.ABORTING)


def test_a_room_that_is_expected_again_is_not_aborted_for_its_earlier_end(end: DecodeEnd) -> None:
    end.expect(1)
    end.core.abort(1, end.now)
    end.expect(1)
    register = end.registered()
    (lease,) = end.core.prefill_peers.sessions[register.session].leases.values()
    assert (lease.message.room, lease.state) == (1, Lease.GRANTED)


def test_abort_keeps_slots_until_drained(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1, tokens=16)
    effects = end.core.abort(1, end.now)
    assert failure(effects) == (1, Cause.ABORTED)
    assert sent(effects, Abort) == [Abort(grant.session, grant.grant, 1)]
    assert end.free == [SLOTS - 16, SLOTS - 4]
    effects = end.receive(Drained(grant.session, grant.grant))
    assert sent(effects, Released) == [Released(grant.session, grant.grant)]
    assert end.free == ALL_FREE


def test_abort_repeats_until_a_proof_ends_it(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    end.core.abort(1, end.now)
    assert len(sent(end.tick(0.75), Abort)) == 3, "after 0.1, 0.3 and 0.7 s"
    end.receive(Drained(grant.session, grant.grant))
    assert sent(end.live(1.0, P), Abort) == []


def test_landed_crossing_abort_counts_as_drained(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    end.core.abort(1, end.now)
    effects = end.land(grant, aux=b"aux")
    assert of(effects, RoomReady) == []
    assert sent(effects, Released) == [Released(grant.session, grant.grant)]
    assert end.free == ALL_FREE


def test_a_quiescent_failure_is_a_proof(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    effects = end.receive(Failed(grant.session, grant.grant, "transfer", "no luck", quiescent=True))
    assert failure(effects) == (1, Cause.TRANSFER)
    assert sent(effects, Released)
    assert end.free == ALL_FREE


def test_a_failure_that_is_not_quiescent_fails_the_room_and_keeps_the_slots(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    effects = end.receive(Failed(grant.session, grant.grant, "transfer", "", quiescent=False))
    assert failure(effects) == (1, Cause.TRANSFER)
    assert sent(effects, Released) == []
    assert end.free != ALL_FREE
    end.receive(Drained(grant.session, grant.grant))
    assert end.free == ALL_FREE


def test_a_drained_that_nobody_asked_for_fails_the_room(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    assert failure(end.receive(Drained(grant.session, grant.grant))) == (1, Cause.TRANSFER)
    assert end.free == ALL_FREE


def test_a_deadline_fails_the_room_and_frees_nothing(end: DecodeEnd) -> None:
    end.up()
    end.granted(1, deadline=1.0)
    (failed,) = of(end.live(1.1, P), RoomFailed)
    text = f"not ready in time, still landing: prefill has not sent all of it yet ({P})"
    assert (failed.cause, failed.detail) == (Cause.DEADLINE, text)
    assert end.free != ALL_FREE
    end.live(30.0, P)
    assert end.free != ALL_FREE


def test_released_is_repeated_for_any_number_ever_minted(end: DecodeEnd) -> None:
    end.up()
    grants = [end.granted(room) for room in (1, 2)]
    end.land(grants[0])
    end.core.release(1, end.now)
    end.core.abort(2, end.now)
    end.receive(Drained(grants[1].session, grants[1].grant))
    for grant in grants:
        for late in (
            Landed(grant.session, grant.grant, kv_bytes(8), b""),
            Drained(grant.session, grant.grant),
            Failed(grant.session, grant.grant, "aborted", "", quiescent=True),
        ):
            assert end.receive(late) == [Send(P, Released(grant.session, grant.grant))]


def test_a_late_end_does_not_revive_a_room_or_end_another_of_the_same_label(end: DecodeEnd) -> None:
    end.up()
    first = end.granted(1)
    end.core.abort(1, end.now)
    again = end.granted(1)
    assert again.grant == first.grant + 1
    assert of(end.land(first), RoomReady) == []
    assert of(end.land(again), RoomReady)


def test_an_abort_that_nobody_answers_quarantines_the_slots(end: DecodeEnd) -> None:
    end.up()
    end.granted(1, tokens=40)
    end.core.abort(1, end.now)
    end.live(1.5, P)
    assert end.core.leases.quarantined_bytes == 0
    end.live(1.5, P)
    assert end.core.leases.quarantined_bytes == kv_bytes(40)


def test_a_peer_that_keeps_too_much_in_quarantine_gets_no_more_grants_and_others_do(end: DecodeEnd) -> None:
    end.up(P)
    end.up(P2)
    grant = end.granted(1, tokens=60)
    waiting = end.expect(2, tokens=40)
    assert waiting == []
    end.core.abort(1, end.now)
    assert failure(end.live(3.0, P, P2)) == (2, Cause.PEER_LOST), "it was in the queue"
    (failed,) = of(end.expect(3, tokens=4), RoomFailed)
    assert "quarantine" in failed.detail
    assert sent(end.expect(4, 4, P2), Grant)
    end.receive(Drained(grant.session, grant.grant))
    assert sent(end.expect(5, tokens=4), Grant)


# Windows and queues


def test_rooms_wait_for_a_place_in_the_window_oldest_first(end: DecodeEnd) -> None:
    end.up()
    grants = [end.granted(room, tokens=1) for room in range(1, 5)]
    assert end.expect(5, tokens=1) == []
    assert end.expect(6, tokens=1) == []
    (fifth,) = sent(end.land(grants[1]), Grant)
    (sixth,) = sent(end.land(grants[0]), Grant)
    assert [(fifth.room, fifth.grant), (sixth.room, sixth.grant)] == [(5, 5), (6, 6)]


def test_a_room_that_leaves_the_queue_gives_its_place_to_the_next() -> None:
    end = DecodeEnd(replace(LIMITS, window=2))
    end.up()
    end.granted(1, tokens=60)
    assert end.expect(2, tokens=30) == [], "it has the second place, and waits for slots"
    assert end.expect(3, tokens=4) == [], "it waits for a place"
    assert [grant.room for grant in sent(end.core.abort(2, end.now), Grant)] == [3]


def test_the_next_in_the_queue_is_admitted_when_the_head_gives_up(end: DecodeEnd) -> None:
    end.up()
    end.granted(1, tokens=40)
    assert end.expect(2, tokens=60) == []
    assert end.expect(3, tokens=8) == []
    assert [grant.room for grant in sent(end.core.abort(2, end.now), Grant)] == [3]


def test_bytes_that_will_not_land_make_way_for_the_next_room() -> None:
    end = DecodeEnd(replace(LIMITS, inflight_bytes_max=kv_bytes(16)))
    end.up()
    end.granted(1, tokens=16)
    assert end.expect(2, tokens=16) == []
    assert [grant.room for grant in sent(end.core.abort(1, end.now), Grant)] == [2]


def test_a_room_of_two_ranks_is_not_starved_by_rooms_of_one() -> None:
    end = DecodeEnd(replace(LIMITS, window=1))
    end.up(P)
    end.up(P2, **IDLE)
    end.up(P3)
    on_first = end.granted(1, 1, P)
    on_third, on_second = sent(end.expect(2, 1, P3, P2), Grant)
    assert end.expect(3, 1, P, P2) == []
    assert end.expect(4, 1, P) == []
    assert end.expect(5, 1, P3, P2) == []
    assert sent(end.land(on_first, P), Grant) == [], "room 3 has this place, and waits for the other"
    end.land(on_third, P3)
    assert [grant.room for grant in sent(end.land(on_second, P2), Grant)] == [3, 3]


def test_places_of_a_room_that_waits_come_back_when_it_gives_up() -> None:
    end = DecodeEnd(replace(LIMITS, window=1))
    end.up(P)
    end.up(P2, **IDLE)
    end.up(P3)
    assert len(sent(end.expect(1, 1, P3, P2), Grant)) == 2
    assert end.expect(2, 1, P, P2) == []
    assert end.expect(3, 1, P) == []
    assert [grant.room for grant in sent(end.core.abort(2, end.now), Grant)] == [3]


def test_a_grant_that_no_frame_could_carry_fails_its_room_and_nobody_elses() -> None:
    end = DecodeEnd(replace(LIMITS, window=9_000), slots=32_768)
    end.core.dial(P, 0.0)
    (offer,) = of(end.receive(end.welcome(frame_bytes_max=1 << 16, window=0xFFFF)), Offer)
    reach = msgspec.structs.replace(REACH, arena_bytes=2 * 32_768 * LAYERS * ROW)
    end.core.offered(offer.session, reach, 0.0)
    end.receive(Registered(offer.session, reach.arena_bytes))
    ones = end.core.arena.free[0]
    held = [ones.allocate(1) for _ in range(32_768)]
    ones.free(np.concatenate(held[::2]))  # every other slot: 16,384 extents of one
    assert failure(end.expect(1, tokens=9_000)) == (1, Cause.FULL)
    assert ones.free_slots == 16_384
    assert end.granted(2, tokens=8_000).room == 2


# Peers and sessions


def test_a_session_is_up_once_some_of_the_arena_is_ready_and_registers_until_all_of_it_is(end: DecodeEnd) -> None:
    (hello,) = end.core.dial(P, 0.0)
    assert isinstance(hello.message, Hello)
    (offer,) = of(end.receive(end.welcome()), Offer)
    (register,) = sent(end.core.offered(offer.session, REACH, 0.0), Register)
    assert register.components == end.core.arena.components
    assert end.expect(1) == []
    assert end.receive(Registered(register.session, 0)) == []
    assert len(sent(end.tick(0.35), Register)) == 2
    assert sent(end.receive(Registered(register.session, ARENA_BYTES - 1)), Grant)
    assert sent(end.live(2.0, P), Register)
    end.receive(Registered(register.session, ARENA_BYTES))
    assert sent(end.live(4.0, P), Register) == []


def test_a_grant_is_sent_once_its_writer_has_its_slots_ready(end: DecodeEnd) -> None:
    session = end.up(bytes_ready=ARENA_BYTES // 2 + 4 * C4_ROW)
    assert end.granted(1, tokens=16).grant == 1
    assert sent(end.expect(2, tokens=8), Grant) == []  # its two rows of c4 lie behind what is ready
    assert end.receive(Registered(session, ARENA_BYTES // 2 + 5 * C4_ROW)) == []
    assert {grant.room for grant in sent(end.live(1.0, P), Grant)} == {1}
    (second,) = sent(end.receive(Registered(session, ARENA_BYTES // 2 + 6 * C4_ROW)), Grant)
    assert (second.room, second.grant) == (2, 2)
    assert {grant.room for grant in sent(end.live(1.0, P), Grant)} == {1, 2}
    end.receive(Granted(session, 1), Granted(session, 2))
    assert sent(end.receive(Registered(session, ARENA_BYTES)), Grant) == []


def test_a_grant_that_was_never_sent_is_aborted_and_drained_like_any_other(end: DecodeEnd) -> None:
    session = end.up(bytes_ready=ARENA_BYTES // 2 + 4 * C4_ROW)
    end.granted(1, tokens=16)
    assert sent(end.expect(2, tokens=8), Grant) == []
    (abort,) = sent(end.core.abort(2, end.now), Abort)
    assert end.core.arena.free[1].free_slots == SLOTS - 6
    end.receive(Drained(session, abort.grant))
    assert end.core.arena.free[1].free_slots == SLOTS - 4
    assert sent(end.receive(Registered(session, ARENA_BYTES)), Grant) == []


def test_slots_that_are_not_backed_yet_are_waited_for() -> None:
    end = DecodeEnd(bytes_ready=ARENA_BYTES // 2 + 4 * C4_ROW)
    end.up()
    assert end.granted(1, tokens=16)
    assert end.expect(2, tokens=8) == []
    assert end.core.ready(ARENA_BYTES // 2 + 5 * C4_ROW, end.now) == []
    (grant,) = sent(end.core.ready(ARENA_BYTES // 2 + 6 * C4_ROW, end.now), Grant)
    assert grant.room == 2
    assert end.core.arena.free[1].free_slots == 0
    end.core.ready(ARENA_BYTES, end.now)
    assert end.core.arena.free[1].free_slots == SLOTS - 6


def test_a_silent_peer_that_is_fenced_leaves_no_register_behind(end: DecodeEnd) -> None:
    session = end.up(bytes_ready=ARENA_BYTES // 2)
    end.tick(LIMITS.silence_ms / 1e3 + 1.0)
    end.core.fenced(session, end.now)
    assert sent(end.tick(10.0), Register) == []


def test_hello_repeats_until_welcome(end: DecodeEnd) -> None:
    end.core.dial(P, 0.0)
    assert len(sent(end.tick(0.75), Hello)) == 3
    end.receive(end.welcome())
    assert sent(end.live(1.5, P), Hello) == []


def test_welcome_twice_opens_one_session(end: DecodeEnd) -> None:
    end.core.dial(P, 0.0)
    assert len(of(end.receive(end.welcome(), end.welcome()), Offer)) == 1


def test_a_welcome_that_nobody_asked_for_is_ignored(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    assert end.receive(end.welcome(incarnation=2)) == []
    assert end.receive(end.welcome(model="another")) == []
    assert end.core.prefill_peers.peers[P].up.id == session


def test_a_new_incarnation_fails_rooms_at_once_but_keeps_slots(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    end.tick(0.2)
    effects = end.receive(Pong(2))
    assert failure(effects) == (1, Cause.PEER_RESTARTED)
    assert [reject.session for reject in sent(effects, Reject)] == [session]
    assert of(effects, Fence) == [Fence(session)]
    assert sent(effects, Hello)
    assert end.free != ALL_FREE
    assert of(end.receive(end.welcome(incarnation=2)), Offer), "the new process need not wait for the old one's fence"
    end.live(60.0, P)
    assert end.free != ALL_FREE
    assert of(end.core.fenced(session, end.now), Forget) == [Forget(session)]
    assert end.free == ALL_FREE


def test_a_fence_is_asked_for_until_it_holds(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    end.receive(Pong(2))
    assert len(of(end.tick(0.5), Fence)) == 3, "after 50, 150 and 350 ms"
    end.core.fenced(session, end.now)
    assert of(end.tick(1.0), Fence) == []
    assert end.core.fenced(session, end.now) == []


def test_a_silent_peer_loses_its_rooms_and_another_keeps_its_own(end: DecodeEnd) -> None:
    end.up(P)
    end.up(P2)
    end.granted(1)
    other = end.granted(2, 8, P2)
    effects = end.live(2.6, P2)
    assert failure(effects) == (1, Cause.PEER_LOST)
    (lost,) = of(effects, SessionLost)
    assert f"{P} has been silent for" in lost.detail
    assert failure(end.expect(3)) == (3, Cause.PEER_LOST)
    assert of(end.land(other, P2), RoomReady)


def test_a_silent_peer_comes_back_and_drains(end: DecodeEnd) -> None:
    session = end.up()
    grant = end.granted(1)
    end.tick(3.0)
    assert end.core.prefill_peers.sessions[session].state is SessionState.SILENT
    assert end.core.leases.quarantined_bytes == kv_bytes(8)
    end.receive(Drained(grant.session, grant.grant))
    assert end.core.prefill_peers.peers[P].up.id == session
    assert end.core.leases.quarantined_bytes == 0
    assert end.free == ALL_FREE
    assert of(end.land(end.granted(2)), RoomReady)


def test_a_room_for_a_peer_that_was_lost_greets_it_at_once_and_waits_as_for_a_new_one(end: DecodeEnd) -> None:
    end.up()
    end.receive(Goodbye(1, "shutdown"))
    end.tick(10.0)
    effects = end.expect(1)
    assert (failures(effects), len(sent(effects, Hello))) == ([], 1)
    end.receive(end.welcome(incarnation=2))
    assert sent(end.live(0.5, P), Hello) == []
    assert 1 in end.core.rooms


def test_rooms_for_a_peer_that_stays_away_fail_together(end: DecodeEnd) -> None:
    end.up()
    end.receive(Goodbye(1, "shutdown"))
    end.tick(10.0)
    end.expect(1)
    end.tick(LIMITS.silence_ms / 2e3)
    end.expect(2)
    failed = failures(end.tick((LIMITS.silence_ms / 2 + LIMITS.ping_ms) / 1e3))
    assert failed == [(1, Cause.PEER_LOST), (2, Cause.PEER_LOST)]


def test_a_silent_peer_that_is_fenced_is_greeted_anew(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    end.tick(3.0)
    assert of(end.core.fenced(session, end.now), Forget)
    assert end.free == ALL_FREE
    assert sent(end.tick(0.5), Hello)
    assert of(end.receive(end.welcome()), Offer)


def test_goodbye_fails_rooms_at_once_and_the_next_process_is_greeted_without_haste() -> None:
    end = DecodeEnd(replace(LIMITS, window=1))
    end.up()
    end.granted(1)
    end.expect(2)
    assert end.receive(Goodbye(77, "shutdown")) == [], "another process's"
    effects = end.receive(Goodbye(1, "shutdown"))
    assert [(f.room, f.cause) for f in of(effects, RoomFailed)] == [(1, Cause.PEER_LOST), (2, Cause.PEER_LOST)]
    assert of(effects, Fence)
    assert sent(effects, Hello) == []
    assert len(sent(end.tick(0.5), Hello)) == 1


def test_a_process_that_follows_one_that_left_is_greeted_as_soon_as_it_answers(end: DecodeEnd) -> None:
    """Simulated, seed 172 of leaving: it asked for a Hello again and again, and rooms waited for it in vain."""
    end.up()
    end.receive(Goodbye(1, "shutdown"))
    assert sent(end.tick(0.1), Hello) == []
    assert len(sent(end.receive(Reject(0, "hello_required", ())), Hello)) == 1


def test_a_peer_that_had_forgotten_this_node_gets_a_new_session(end: DecodeEnd) -> None:
    """Simulated, seed 82: a frozen decode node kept a session that its prefill had dropped."""
    session = end.up()
    end.tick(0.3)
    assert sent(end.receive(Reject(0, "hello_required", ())), Hello)
    effects = end.receive(end.welcome())
    assert of(effects, Fence) == [Fence(session)]
    assert of(effects, Offer)


def test_a_reject_that_wants_a_hello_gets_one_in_resend_ms_however_often_it_comes(end: DecodeEnd) -> None:
    end.up()
    end.tick(0.3)
    want = Reject(0, "hello_required", ())
    assert len(sent(end.receive(*[want] * 50), Hello)) == 1
    for _ in range(20):
        assert sent(end.receive(end.welcome(), want, want), Hello) == []
    assert sent(end.tick(0.1), Hello) == []
    assert len(sent(end.receive(*[want] * 50), Hello)) == 1


def test_a_late_reject_that_wants_a_hello_does_not_end_the_session_that_followed_it(end: DecodeEnd) -> None:
    """Simulated, seed 6 of restarts: repeated, it came after the Welcome, and the answer to its Hello took every room
    of the new session with it."""
    end.up()
    grant = end.granted(1)
    late = Reject(0, "hello_required", ())
    assert end.receive(late) == []
    assert end.receive(end.welcome()) == []
    assert of(end.land(grant), RoomReady)


def test_a_hello_that_is_refused_is_repeated_at_the_slowest_pace(end: DecodeEnd) -> None:
    """A peer that was known and refuses now once made a loop of Hello and Reject, as fast as the network."""
    session = end.up()
    end.granted(1)
    no = Reject(0, "refused", ("model: p0 has 'x', d0 'm'",))
    effects = end.receive(no)
    assert sent(effects, Hello) == []
    assert failure(effects) == (1, Cause.REFUSED)
    assert of(effects, Fence) == [Fence(session)], "no lease may be left without a fence"
    assert of(effects, PeerRefused)[0].detail.endswith("model: p0 has 'x', d0 'm'")
    hellos = 0
    for _ in range(20):
        for effect in of(end.tick(0.1), Send):
            if isinstance(effect.message, Hello):
                hellos += 1
                assert sent(end.receive(no), Hello) == []
    assert 4 <= hellos <= 5, "one in 0.4 s"
    assert failure(end.expect(2)) == (2, Cause.REFUSED)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model": "other"}, "model: p0 has 'other', d0 'm'"),
        ({"weights": b"\x01"}, "weights: p0 has '01', d0 '77'"),
        ({"ranks": Ranks(4, 2)}, "ranks.tp_rank: p0 has 4, must be below tp_size 2"),
        ({"holds": 2 * KV}, "holds[1].component: p0 has 'kv' twice"),
        (
            {"holds": (Holds("kv", 0, 9, 0, 1),)},
            "holds[0].layer_end: p0 has layers 0..8 of 'kv', which has 0..2",
        ),
        (
            {"holds": (Holds("kv", 0, LAYERS, 0, 1, 0, 256),)},
            "holds[0].replicas: p0 has 256, must be at most tp_size 1",
        ),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_both_values_until_another_takes_its_place(
    end: DecodeEnd, wrong: dict, named: str
) -> None:
    assert sent(end.expect(1), Hello)
    effects = end.receive(end.welcome(**wrong))
    (failed,) = of(effects, RoomFailed)
    assert (failed.cause, failed.detail) == (Cause.REFUSED, f"{P} is refused: {named}")
    assert of(end.receive(end.welcome(**wrong)), PeerRefused) == [], "reported once"
    end.tick(1.0)
    assert of(end.receive(end.welcome(incarnation=2)), Offer)
    assert end.expect(2) == []


def test_rooms_of_a_peer_that_refuses_this_node_are_named_to_it_in_three_hellos_of_at_most_64(end: DecodeEnd) -> None:
    """Without a session no Abort can name them."""
    no = Reject(0, "refused", ("block_size: d0 has '32', p0 '16'",))
    for room in range(1, 101):
        end.expect(room)
    end.receive(no)
    named = list[tuple[Withdrawn, ...]]()
    for _ in range(100):
        for hello in sent(end.tick(0.1), Hello):
            named.append(hello.withdrawn)
            end.receive(no)
    assert [len(each) for each in named[:2]] == [64, 64]
    assert {each.room for each in named[0] + named[1]} == set(range(1, 101)), "each within two Hellos"
    assert Counter(room.room for rooms in named for room in rooms) == dict.fromkeys(range(1, 101), 3)
    assert named[0][0].detail == f"refused: {P} refuses (refused): block_size: d0 has '32', p0 '16'"
    assert named[-1] == ()
    assert not end.core.withdrawals.rooms


def test_a_room_of_a_peer_that_does_not_fit_is_reported_within_resend_ms(end: DecodeEnd) -> None:
    """The next Hello would be due at the slowest pace, seconds later."""
    end.expect(1)
    end.receive(Reject(0, "refused", ()))
    end.tick(5.0)
    end.receive(Reject(0, "refused", ()))
    effects = end.expect(2)
    assert failure(effects) == (2, Cause.REFUSED)
    hellos = sent([*effects, *end.tick(0.1)], Hello)
    assert 2 in [each.room for hello in hellos for each in hello.withdrawn]


@pytest.mark.parametrize(("word", "cause"), [("refused", Cause.REFUSED), ("transfer", Cause.TRANSFER)])
def test_a_session_that_is_refused_fails_the_rooms_that_wait_for_it(end: DecodeEnd, word: str, cause: Cause) -> None:
    """An arena that could not be mapped in time is no word on the request: elsewhere, or later, it may go."""
    end.expect(1)
    (offer,) = of(end.receive(end.welcome()), Offer)
    end.core.offered(offer.session, REACH, 0.0)
    effects = end.receive(Reject(offer.session, word, ("Register.components[0].name: 'kv', this prefill has []",)))
    assert failure(effects) == (1, cause)
    assert end.core.prefill_peers.peers[P].session is None
    assert failure(end.expect(2)) == (2, cause), "of the same cause as long as it stands"


def test_an_arena_that_cannot_be_offered_is_reported_once_until_a_session_is_up(end: DecodeEnd) -> None:
    end.expect(1)
    reported = []
    for _ in range(3):
        (offer,) = of(end.receive(end.welcome()), Offer)
        effects = end.core.unoffered(offer.session, "p0 takes shm", end.now)
        reported += [*of(effects, PeerRefused), *of(effects, SessionLost)]
        assert end.core.prefill_peers.unusable(end.now, lambda _: "") == [(P, "p0 takes shm")]
        end.core.fenced(offer.session, end.now)
        end.tick(3.0)
    assert [type(each) for each in reported] == [PeerRefused]


def test_a_silent_peer_without_a_session_is_unusable_while_it_cannot_be_reached(end: DecodeEnd) -> None:
    end.expect(1)
    peers = end.core.prefill_peers
    assert peers.unusable(end.now, lambda _: "no way there") == [], "it has its time to answer"
    end.tick(4.0)
    assert peers.unusable(end.now, lambda _: "no way there") == [(P, "no way there")]
    assert peers.unusable(end.now, lambda _: "") == [], "it is connected: it may answer any moment"


def test_a_peer_that_sent_goodbye_is_another_process_or_none(end: DecodeEnd) -> None:
    end.up()
    end.receive(Goodbye(1, "shutdown"))
    end.tick(3.0)
    assert of(end.receive(end.welcome()), Offer) == [], "its answer crossed its Goodbye"
    assert of(end.receive(end.welcome(incarnation=2)), Offer)


def test_an_unknown_session_while_registering_is_no_refusal(end: DecodeEnd) -> None:
    """Simulated, seed 662: a late Register of an earlier session had taken the new one's place."""
    end.expect(1)
    (offer,) = of(end.receive(end.welcome()), Offer)
    end.core.offered(offer.session, REACH, 0.0)
    effects = end.receive(Reject(offer.session, "unknown_session", ()))
    assert of(effects, PeerRefused) == of(effects, RoomFailed) == []
    end.tick(0.2)
    assert of(end.receive(end.welcome()), Offer)


def test_a_session_that_prefill_ended_fails_its_rooms_and_is_fenced(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    end.tick(0.2)
    effects = end.receive(Reject(session, "transfer", ("its writer was fenced",)))
    (failed,) = of(effects, RoomFailed)
    assert "its writer was fenced" in failed.detail
    assert of(effects, Fence)
    assert sent(effects, Hello)
    assert end.free != ALL_FREE


def test_a_word_of_an_earlier_process_changes_nothing(end: DecodeEnd) -> None:
    end.up()
    end.receive(Pong(2))
    (offer,) = of(end.receive(end.welcome(incarnation=2)), Offer)
    end.core.offered(offer.session, REACH, end.now)
    end.receive(Registered(offer.session, ARENA_BYTES))
    grant = end.granted(1)
    assert end.receive(Pong(1), Goodbye(1, "shutdown")) == []
    assert of(end.land(grant), RoomReady)


def test_a_late_welcome_of_an_earlier_process_does_not_answer_a_hello_to_the_new_one(end: DecodeEnd) -> None:
    end.up()
    end.tick(0.3)
    end.receive(Pong(2))
    (offer,) = of(end.receive(end.welcome(incarnation=2)), Offer)
    end.tick(0.3)
    assert sent(end.receive(Reject(0, "hello_required", ())), Hello)
    assert end.receive(end.welcome(incarnation=1)) == []
    assert end.core.prefill_peers.peers[P].session.id == offer.session


def test_what_an_earlier_process_left_on_its_way_does_not_mark_the_new_one_seen(end: DecodeEnd) -> None:
    end.up()
    grant = end.granted(1)
    end.receive(Pong(2))
    (offer,) = of(end.receive(end.welcome(incarnation=2)), Offer)
    end.tick(1.5)
    end.receive(Drained(grant.session, grant.grant))
    end.tick(1.5)
    assert end.core.prefill_peers.sessions[offer.session].state is SessionState.FENCING


def test_a_process_that_speaks_on_after_it_was_taken_for_gone_is_accepted(end: DecodeEnd) -> None:
    """Simulated, seed 4304, on the other side: the first word of a dead process came after the living one's."""
    end.up()
    end.tick(0.3)
    end.receive(Pong(0xDEAD), end.welcome(incarnation=0xDEAD))
    assert end.receive(Pong(1)) == []
    assert of(end.live(5.0, P), Offer) == []
    end.incarnation = 1
    assert of(end.live(5.0, P), Offer)


def test_one_peer_cannot_use_up_all_sessions(end: DecodeEnd) -> None:
    end.core.dial(P, 0.0)
    opened = []
    for life in range(1, 9):
        effects = end.receive(end.welcome(incarnation=life))
        opened += of(effects, Offer)
        end.receive(Pong(life + 100))
        end.tick(1.0)
    assert len(opened) == LIMITS.peer_sessions_max
    assert failure(end.expect(1) + end.live(1.0, P)) == (1, Cause.FULL)
    assert end.up(P2)
    end.core.fenced(opened[0].session, end.now)
    assert of(end.live(1.0, P), Offer)


def test_a_peer_that_is_long_gone_is_forgotten_and_can_be_dialled_again() -> None:
    end = DecodeEnd(replace(LIMITS, forget_ms=20_000))
    session = end.up()
    assert of(end.tick(30.0), HangUp) == [], "its session awaits its fence"
    end.core.fenced(session, end.now)
    assert of(end.tick(1.0), HangUp) == [HangUp(P)]
    assert end.core.prefill_peers.peers == {}
    assert end.core.next_tick() is None
    end.up()
    assert of(end.land(end.granted(1)), RoomReady)


def test_a_refused_peer_that_is_long_gone_is_forgotten_too() -> None:
    end = DecodeEnd(replace(LIMITS, forget_ms=20_000))
    end.core.dial(P, 0.0)
    end.receive(end.welcome(model="other"))
    assert of(end.tick(19.0), HangUp) == []
    assert of(end.tick(2.0), HangUp) == [HangUp(P)]


def test_no_more_peers_are_known_than_sessions_max() -> None:
    end = DecodeEnd(replace(LIMITS, sessions_max=2))
    for name in (P, P2):
        end.core.dial(name, 0.0)
    assert failure(end.expect(1, 8, "tcp://p2")) == (1, Cause.FULL)
    assert failure(end.expect(2, 8, P, "tcp://p2")) == (2, Cause.FULL)
    assert of(end.core.dial("tcp://p2", 0.0), PeerRefused)
    assert list(end.core.prefill_peers.peers) == [P, P2]


@pytest.mark.parametrize(("sessions_max", "ahead"), [(1, 0), (5, 2), (1_024, AHEAD_MAX)])
def test_half_of_the_places_are_kept_for_peers_that_rooms_name(sessions_max: int, ahead: int) -> None:
    end = DecodeEnd(replace(LIMITS, sessions_max=sessions_max))
    names = [f"tcp://p{number}" for number in range(AHEAD_MAX + 1)]
    for name in names:
        if end.core.may_dial_ahead(name, end.now):
            end.core.dial(name, 0.0)
    assert list(end.core.prefill_peers.peers) == names[:ahead]
    assert all(end.core.may_dial_ahead(name, end.now) for name in names[:ahead]), "whoever has a place takes no other"
    end.expect(1, 8, "tcp://named")
    assert list(end.core.prefill_peers.peers) == [*names[:ahead], "tcp://named"]
    end.core.drain()
    assert not end.core.may_dial_ahead("tcp://named", end.now)


def test_a_message_of_somebody_who_was_never_dialled_is_ignored(end: DecodeEnd) -> None:
    session = end.up()
    assert end.receive(Drained(session, 1), end.welcome(), peer="tcp://stranger") == []


def test_a_peer_that_never_answers_fails_the_rooms_that_wait_for_it(end: DecodeEnd) -> None:
    end.expect(1)
    assert failure(end.tick(2.6)) == (1, Cause.PEER_LOST)


def test_every_peer_without_a_session_is_being_greeted(end: DecodeEnd) -> None:
    """What keeps a peer from being lost for good: checked after whatever the other tests of this file do to one."""
    for message in (
        end.welcome(), Pong(5), end.welcome(incarnation=5), Reject(0, "full", ()), end.welcome(incarnation=5),
        Goodbye(5, "shutdown"), end.welcome(incarnation=6), Reject(0, "hello_required", ()), Pong(7),
        end.welcome(incarnation=7, model="x"), end.welcome(incarnation=8),
    ):  # fmt: skip
        end.core.dial(P, end.now)
        end.receive(message)
        peer = end.core.prefill_peers.peers[P]
        assert peer.session is not None or ("hello", P, 0) in end.core.prefill_peers.timers
        end.tick(0.3)
        peer = end.core.prefill_peers.peers[P]
        assert peer.session is not None or ("hello", P, 0) in end.core.prefill_peers.timers


# What is given back, and when


def first_slots(end: DecodeEnd, *counts: int) -> tuple[ComponentRows, ...]:
    """Rows from the first on of each component, in its first slots."""
    components = zip(end.core.arena.components, counts, strict=True)
    return tuple(ComponentRows(component, 0, extents_of(np.arange(count))) for component, count in components)


@pytest.mark.parametrize("way", ["abort", "deadline", "failed", "silence", "goodbye", "reject"])
def test_slots_that_an_engine_chose_are_given_back_with_their_lease_and_not_with_their_room(way: str) -> None:
    end = DecodeEnd(engine_slots=True)
    session = end.up()
    chosen = first_slots(end, 8, 2)
    grant = end.granted(1, tokens=8, chosen=chosen, deadline=end.now + 5.0)
    end.receive(Granted(session, grant.grant))
    match way:
        case "abort":
            effects = end.core.abort(1, end.now)
        case "deadline":
            effects = end.live(5.2, P)
        case "failed":
            effects = end.receive(Failed(session, grant.grant, "transfer", "", False))
        case "silence":
            effects = end.tick(LIMITS.silence_ms / 1e3 + 1.0)
        case "goodbye":
            effects = end.receive(Goodbye(end.incarnation, "shutdown"))
        case _:
            effects = end.receive(Reject(session, "transfer", ()))
    effects += end.live(1.0, P) if way in ("abort", "deadline", "failed") else end.tick(1.0)
    assert failure(effects)[0] == 1, "the room has ended at once"
    assert of(effects, RoomDrained) == [], "its writer may still write"
    assert not end.core.idle
    assert end.free == [SLOTS - 8, SLOTS - 2]
    if way in ("abort", "deadline", "failed"):
        effects = end.receive(Drained(session, grant.grant))
    else:
        effects = end.core.fenced(session, end.now)
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    assert end.free == ALL_FREE
    assert end.core.idle


def test_slots_that_an_engine_chose_are_given_back_with_the_last_of_their_leases() -> None:
    end = DecodeEnd(engine_slots=True)
    end.up(P, holds=KV)
    end.up(P2, holds=C4)
    chosen = first_slots(end, 8, 2)
    first, second = sent(end.expect(1, 8, P, P2, chosen=chosen), Grant)
    end.core.abort(1, end.now)
    assert of(end.receive(Drained(first.session, first.grant)), RoomDrained) == []
    assert of(end.receive(Drained(second.session, second.grant), peer=P2), RoomDrained) == [RoomDrained(1)]


def test_a_node_is_not_idle_while_it_has_leased_slots_to_a_silent_peer(end: DecodeEnd) -> None:
    session = end.up()
    end.granted(1)
    end.tick(LIMITS.silence_ms / 1e3 + 1.0)
    assert end.core.prefill_peers.sessions[session].state is SessionState.SILENT
    assert not end.core.rooms
    assert not end.core.idle
    end.core.fenced(session, end.now)
    assert end.core.idle

"""Prefill's side of a hand-off, one behaviour a test; the test plays the decode ranks."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.effects import (
    FenceWriter,
    Map,
    Outcome,
    PeerRefused,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    Send,
    StopWriting,
    Unmap,
    Write,
)
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.limits import AUX_BYTES_MAX
from pdtransfer.wire import (
    Abort,
    Drained,
    Failed,
    Goodbye,
    Granted,
    Hello,
    Landed,
    Member,
    Ping,
    Pong,
    Registered,
    Reject,
    Released,
    Welcome,
    Withdrawn,
)
from tests.library.sim.pools import LAYERS, ROW, components
from tests.support.session_ends import (
    ARENA_BYTES,
    D2,
    LIMITS,
    REACH,
    SLOTS,
    D,
    PrefillEnd,
    failure,
    grant,
    identity,
    kv_bytes,
    of,
    refusal,
    sent,
)

S = 0xA0


def writing(end: PrefillEnd, room: int = 1, number: int = 1, tokens: int = 8, at: int = 0) -> list[Write]:
    """A room that is open, granted, computed and finished: its two writes, kv and c4, in flight."""
    end.open(room, tokens)
    end.receive(grant(number, room, tokens, at=at))
    writes = of(end.push(room, tokens), Write)
    assert end.finish(room) == []
    return writes


def ended(end: PrefillEnd, number: int = 1, room: int = 1) -> list:
    """The same, landed; the effects of its last write."""
    first, second = writing(end, room, number, at=8 * (number - 1))
    end.wrote(first)
    return end.wrote(second)


# A room's way


@pytest.fixture
def end() -> PrefillEnd:
    return PrefillEnd()


def test_a_room_lands_when_all_its_bytes_are_written_and_drains_at_once(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    assert (kv.component, kv.layers, kv.source_slots.tolist()) == (0, (0, LAYERS), list(range(8)))
    assert (c4.component, c4.target_slots.tolist()) == (1, [0, 1])
    assert end.wrote(kv) == []
    effects = end.wrote(c4)
    assert sent(effects, Landed) == [Landed(S, 1, kv_bytes(8), b"aux")]
    assert of(effects, RoomLanded) == [RoomLanded(1, kv_bytes(8))]
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    end.released(1)
    assert end.core.idle


def test_cells_that_come_before_the_grant_are_written_when_it_comes(end: PrefillEnd) -> None:
    end.up()
    end.open()
    assert end.push() == []
    effects = end.receive(grant())
    assert sent(effects, Granted) == [Granted(S, 1)]
    assert of(effects, RoomLeased) == [RoomLeased(1, 8)]
    assert len(of(effects, Write)) == 2


def test_a_grant_that_comes_before_the_room_waits_for_it(end: PrefillEnd) -> None:
    end.up()
    assert end.receive(grant()) == [Send(D, Granted(S, 1)), RoomAsked(1, 8, 0)]
    assert of(end.open(), RoomLeased) == [RoomLeased(1, 8)]
    assert len(of(end.push(), Write)) == 2
    assert end.core._waiting == {}


def test_each_cell_is_written_where_its_rows_and_layers_belong(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(at=20))
    sources = np.array([40, 41, 42])
    (write,) = of(end.core.push(1, Cell("kv", 3, (1, 3), sources), 0.0), Write)
    assert write.layers == (1, 3)
    assert write.source_slots.tolist() == [40, 41, 42]
    assert write.target_slots.tolist() == [23, 24, 25]


def test_only_rows_behind_the_prefix_are_written(end: PrefillEnd) -> None:
    end.up()
    end.open()
    kv = grant().parts[0]
    part = msgspec.structs.replace(kv, first_row=5, rows=3, extents=np.array([[30, 3]], dtype="<u4").tobytes())
    end.receive(grant(prefix=5, parts=(part,)))
    (write,) = of(end.push(component="kv"), Write)
    assert write.source_slots.tolist() == [5, 6, 7]
    assert write.target_slots.tolist() == [30, 31, 32]
    assert end.push(component="c4") == []
    end.wrote(write)
    (landed,) = sent(end.finish(), Landed)
    assert landed.kv_bytes == 3 * LAYERS * ROW


def test_a_second_grant_of_one_session_takes_no_other_ranks_place_in_a_room(end: PrefillEnd) -> None:
    end.up()
    end.up(0xA1, D2)
    end.open(grants=2)
    end.receive(grant(1))
    (failed,) = sent(end.receive(grant(2, at=8)), Failed)
    assert (failed.grant, failed.reason, failed.quiescent) == (2, Cause.BREACH.value, True)
    assert of(end.receive(grant(session=0xA1), peer=D2), RoomLeased) == [RoomLeased(1, 8)]


def test_a_grant_without_parts_lands_once_the_room_is_finished(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(parts=(), prefix=8))
    assert end.push() == []
    assert sent(end.finish(), Landed) == [Landed(S, 1, 0, b"aux")]


def test_only_the_rank_that_was_asked_sends_the_aux(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(parts=(), send_aux=False))
    assert sent(end.finish(), Landed) == [Landed(S, 1, 0, b"")]


def test_a_room_that_lacks_bytes_when_the_engine_reports_finished_fails_with_the_engines_cause(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    (write,) = of(end.push(component="kv"), Write)
    end.wrote(write)
    effects = end.finish()
    assert failure(effects) == (1, Cause.ENGINE)
    assert [message.quiescent for message in sent(effects, Failed)] == [True]


@pytest.mark.parametrize(
    "changes",
    [
        {"component": "nope"}, {"first_row": 1}, {"first_row": -1}, {"source_slots": np.arange(9)},
        {"source_slots": np.arange(0)}, {"source_slots": np.arange(SLOTS - 2, SLOTS + 6)},
        {"source_slots": np.arange(-1, 7)}, {"layers": (0, LAYERS + 1)}, {"layers": (2, 2)}, {"layers": (-1, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_a_cell_outside_the_room_or_the_pool_is_refused(end: PrefillEnd, changes: dict) -> None:
    end.open()
    fields = {"component": "kv", "first_row": 0, "layers": (0, LAYERS), "source_slots": np.arange(8)} | changes
    with pytest.raises(LocalProtocolError):
        end.core.push(1, Cell(**fields), 0.0)
    assert end.push() == [], "nothing of it was kept"


def test_rows_are_offered_once_a_layer(end: PrefillEnd) -> None:
    end.open()
    end.core.push(1, Cell("kv", 0, (0, 2), np.arange(8)), 0.0)
    end.core.push(1, Cell("kv", 0, (2, 3), np.arange(8)), 0.0)
    end.core.push(1, Cell("c4", 0, (0, 3), np.arange(1)), 0.0)
    with pytest.raises(LocalProtocolError, match="offered already"):
        end.core.push(1, Cell("kv", 7, (1, 3), np.arange(1)), 0.0)


def test_misuse_by_the_engine_is_reported_to_the_engine(end: PrefillEnd) -> None:
    end.open()
    with pytest.raises(LocalProtocolError, match="open already"):
        end.open()
    for tokens, grants in ((0, 1), (8, 0)):
        with pytest.raises(LocalProtocolError):
            end.open(2, tokens, grants=grants)
    with pytest.raises(LocalProtocolError, match="aux"):
        end.finish(aux=bytes(AUX_BYTES_MAX + 1))
    end.finish()
    with pytest.raises(LocalProtocolError, match="finished already"):
        end.finish()
    with pytest.raises(LocalProtocolError, match="no cell may follow"):
        end.push()


def test_a_room_that_has_failed_ignores_its_engine(end: PrefillEnd) -> None:
    end.open()
    assert of(end.core.abort(1, 0.0), RoomDrained) == [RoomDrained(1)]
    assert end.push() == end.finish() == end.core.abort(1, 0.0) == []


def test_a_full_or_draining_node_opens_no_room() -> None:
    end = PrefillEnd(replace(LIMITS, rooms_max=1))
    end.open(1)
    full = end.open(2)
    assert failure(full) == (2, Cause.FULL)
    assert of(full, RoomFailed)[0].retry_ms > 0
    end.core.drain()
    effects = end.open(3)
    assert failure(effects) == (3, Cause.SHUTDOWN)
    assert of(effects, RoomDrained) == [RoomDrained(3)]
    assert not end.core.idle
    end.core.abort(1, 0.0)
    assert end.core.idle


# Grants and their ends


def test_a_repeated_grant_is_answered_by_what_became_of_it(end: PrefillEnd) -> None:
    end.up()
    granted = Send(D, Granted(S, 1))
    assert end.receive(grant(), grant(time_left_ms=5)) == [granted, RoomAsked(1, 8, 0), granted]
    end.open()
    for write in of(end.push(), Write):
        end.wrote(write)
    landed = sent(end.finish(), Landed)
    assert sent(end.receive(grant()), Landed) == landed
    end.released(1)
    assert end.receive(grant()) == [], "a number that has ended is over forever"


def test_decode_is_reminded_of_a_grant_while_a_write_of_it_is_near_and_its_end_is_open(end: PrefillEnd) -> None:
    end.up()
    first, second = writing(end)
    assert end.core.wake_hint(S, first.write) == end.core.wake_hint(S, second.write) == [Send(D, Granted(S, 1))]
    end.wrote(first)
    assert end.core.wake_hint(S, first.write) == [], "it has ended"
    assert end.core.wake_hint(S + 1, second.write) == []
    end.receive(Abort(S, 1))
    assert end.core.wake_hint(S, second.write) == [], "only its proof is waited for"
    end.wrote(second)
    (third, _) = writing(end, 2, 2, at=16)
    end.receive(Goodbye(1, "over"))
    assert end.core.wake_hint(S, third.write) == []


def test_ends_repeat_until_released(end: PrefillEnd) -> None:
    end.up()
    first = sent(ended(end), Landed)
    assert sent(end.tick(0.75), Landed) == first * 3, "after 0.1, 0.3 and 0.7 s"
    end.released(1)
    assert sent(end.tick(2.0), Landed) == []


def test_released_for_what_was_never_granted_is_ignored(end: PrefillEnd) -> None:
    end.up()
    assert end.released(3) == []
    assert of(end.receive(grant(3)), Send) == [Send(D, Granted(S, 3))]


def test_a_grant_outside_the_window_goes_unanswered_until_an_end_is_acknowledged(end: PrefillEnd) -> None:
    end.up()
    far = grant(LIMITS.window + 1, 5, at=40)
    assert end.receive(far, Abort(S, LIMITS.window + 1)) == []
    ended(end, 2, 1)
    assert end.receive(far) == []
    end.released(2)
    assert of(end.receive(far), Send) == [Send(D, Granted(S, far.grant))], "number 1 is open, and another has ended"


def test_numbers_are_over_once_their_ends_were_acknowledged_in_any_order(end: PrefillEnd) -> None:
    end.up()
    for number in (1, 2, 3):
        ended(end, number, number)
    acked = end.core.sessions[S].acked
    for number, runs in ((3, 2), (1, 2), (2, 1)):
        end.released(number)
        assert number in acked
        assert acked.runs == runs, "they take no more memory than there are gaps"
        assert end.receive(grant(number), Abort(S, number)) == []
    assert 4 not in acked


def test_abort_before_its_grant_refuses_the_number_forever(end: PrefillEnd) -> None:
    end.up()
    end.open()
    assert sent(end.receive(Abort(S, 1)), Drained) == [Drained(S, 1)]
    assert sent(end.receive(grant()), Drained) == [Drained(S, 1)]
    end.released(1)
    assert end.receive(grant(), Abort(S, 1)) == []
    assert of(end.push(), Write) == []


def test_abort_of_a_grant_that_waits_for_its_room_drains_it(end: PrefillEnd) -> None:
    end.up()
    end.receive(grant())
    assert sent(end.receive(Abort(S, 1)), Drained) == [Drained(S, 1)]
    assert end.core._waiting == {}
    effects = end.open()
    assert failure(effects) == (1, Cause.ABORTED), "opened after decode gave it up"
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    assert of(end.push(), Write) == []


def test_abort_before_its_grant_fails_the_room_that_it_names(end: PrefillEnd) -> None:
    end.up()
    end.open()
    effects = end.receive(Abort(S, 1, 1))
    assert sent(effects, Drained) == [Drained(S, 1)]
    assert failure(effects) == (1, Cause.ABORTED)
    assert of(effects, RoomDrained) == [RoomDrained(1)]


def test_a_room_opened_after_its_abort_fails_at_once_unless_it_is_another_nodes(end: PrefillEnd) -> None:
    end.up()
    end.receive(Abort(S, 1, 1), Abort(S, 2, 2))
    assert failure(end.open(1)) == (1, Cause.ABORTED)
    assert end.open(2, peers=[D2]) == []
    assert end.receive(Abort(S, 3, 2))[1:] == [], "nor does it fail a room that is open for others"


def test_a_room_that_is_opened_after_its_grant_has_failed_fails_at_once(end: PrefillEnd) -> None:
    """Decode waits for it no more, and grants no second time."""
    end.up()
    end.receive(msgspec.structs.replace(grant(1, 1), time_left_ms=100))
    assert [each.reason for each in sent(end.tick(0.11), Failed)] == ["deadline"]
    effects = end.open(1)
    assert failure(effects) == (1, Cause.ABORTED)
    assert of(effects, RoomDrained) == [RoomDrained(1)]


def test_a_node_that_does_not_fit_can_still_give_its_rooms_up(end: PrefillEnd) -> None:
    end.open(1)
    hello = end.hello(weights=b"x")
    rooms = Withdrawn(1, "refused: weights"), Withdrawn(2, "")
    effects = end.receive(msgspec.structs.replace(hello, withdrawn=rooms))
    assert refusal(effects) == "weights: d0 has '78', p0 '77'"
    assert of(effects, RoomFailed) == [RoomFailed(1, Cause.ABORTED, f"{D} gave it up: refused: weights")]
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    assert of(effects, RoomAsked) == [RoomAsked(2, 0, 0)]
    assert of(effects, PeerRefused) == [PeerRefused(D, f"{D} is refused: weights: d0 has '78', p0 '77'")]
    again = end.receive(msgspec.structs.replace(hello, withdrawn=rooms))
    assert [type(each) for each in again] == [Send], "sent once"
    assert failure(end.open(2)) == (2, Cause.ABORTED)


def test_a_room_that_is_for_others_is_not_given_up_by_a_hello(end: PrefillEnd) -> None:
    end.open(1, peers=(D2,))
    end.receive(msgspec.structs.replace(end.hello(weights=b"x"), withdrawn=(Withdrawn(1, ""),)))
    assert 1 in end.core.rooms
    router = Hello(1, 1, identity("d0", "router"), (Withdrawn(1, ""),))
    end.receive(router, peer=D2)
    assert 1 in end.core.rooms, "only a decode node expects rooms"


def test_of_peers_that_do_not_fit_those_that_fit_again_are_reported_anew(end: PrefillEnd) -> None:
    for _ in range(2):
        assert len(of(end.receive(end.hello(weights=b"x")), PeerRefused)) == 1
        assert len(of(end.receive(end.hello(weights=b"y")), PeerRefused)) == 1
    assert of(end.receive(end.hello(weights=b"y")), PeerRefused) == []
    end.up()
    assert len(of(end.receive(end.hello(weights=b"y")), PeerRefused)) == 1


def test_grants_of_a_room_that_its_engine_gave_up_before_opening_fail_at_once(end: PrefillEnd) -> None:
    end.up()
    end.receive(grant(1, 1))
    assert sent(end.core.abort(1, end.now), Failed) == [Failed(S, 1, "aborted", "", quiescent=True)]
    end.core.abort(2, end.now)
    assert sent(end.receive(grant(2, 2, at=8)), Failed) == [Failed(S, 2, "aborted", "", quiescent=True)]


def test_abort_stops_writing_and_drains_after_the_last_write(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    effects = end.receive(Abort(S, 1))
    assert failure(effects) == (1, Cause.ABORTED)
    assert of(effects, StopWriting) == [StopWriting(S, 1)]
    assert sent(effects, Drained) == of(effects, RoomDrained) == []
    assert end.receive(Abort(S, 1)) == [StopWriting(S, 1)]
    assert end.wrote(kv, Outcome.FAILED) == []
    effects = end.wrote(c4, Outcome.LANDED)
    assert sent(effects, Drained) == [Drained(S, 1)]
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    assert sent(effects, Landed) == []


def test_abort_that_comes_after_landed_is_answered_landed(end: PrefillEnd) -> None:
    end.up()
    landed = sent(ended(end), Landed)
    effects = end.receive(Abort(S, 1))
    assert sent(effects, Landed) == landed
    assert of(effects, RoomFailed) == []


def test_a_write_that_failed_is_reported_at_once_and_proven_later(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    effects = end.wrote(kv, Outcome.FAILED)
    (failed,) = sent(effects, Failed)
    assert (failed.reason, failed.quiescent) == ("transfer", False)
    assert of(effects, StopWriting) == [StopWriting(S, 1)]
    assert failure(effects) == (1, Cause.TRANSFER)
    assert of(effects, RoomDrained) == []
    assert sent(end.tick(5.0 - 0.1), Failed) == [], "it is sent once"
    effects = end.wrote(c4)
    assert sent(effects, Drained) == [Drained(S, 1)]
    assert of(effects, RoomDrained) == [RoomDrained(1)]


def test_a_last_write_that_failed_is_a_quiescent_failure(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    end.wrote(kv)
    effects = end.wrote(c4, Outcome.FAILED)
    assert [message.quiescent for message in sent(effects, Failed)] == [True]
    assert of(effects, RoomDrained) == [RoomDrained(1)]


def test_an_unknown_outcome_drains_nothing_before_the_fence(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    other = writing(end, 2, 2, at=8)
    effects = end.wrote(kv, Outcome.UNKNOWN)
    assert of(effects, FenceWriter) == [FenceWriter(S)]
    assert failure(effects) == (1, Cause.TRANSFER)
    assert [message.quiescent for message in sent(effects, Failed)] == [False]
    effects = end.wrote(c4)
    assert sent(effects, Drained) == of(effects, RoomDrained) == []
    assert of(end.core.abort(1, 0.0), RoomDrained) == []
    effects = end.core.fenced(S, 0.0)
    assert sent(effects, Drained) == sent(effects, Failed) == [], "bytes may still be on their way: that is not proof"
    assert set(of(effects, RoomDrained)) == {RoomDrained(1), RoomDrained(2)}
    assert failure(effects) == (2, Cause.TRANSFER), "its writes were cut off with the writer"
    assert refusal(effects) == "its writer was fenced", "decode need not wait for the rooms of this session"
    assert of(effects, Unmap) == [Unmap(S)]
    assert end.wrote(other[0]) == [], "what reports after the fence is ignored"
    assert end.core.fenced(S, 0.0) == []
    assert end.core.idle


def test_an_unknown_outcome_of_a_closed_session_keeps_its_mapping_and_pages_until_the_fence(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    effects = end.receive(Goodbye(1, "shutdown"))
    assert failure(effects) == (1, Cause.PEER_LOST)
    assert of(end.wrote(kv, Outcome.UNKNOWN), FenceWriter)
    effects = end.wrote(c4)
    assert of(effects, Unmap) == of(effects, RoomDrained) == []
    effects = end.core.fenced(S, 0.0)
    assert of(effects, Unmap) == [Unmap(S)]
    assert of(effects, RoomDrained) == [RoomDrained(1)]
    assert of(effects, Send) == []


def test_a_grant_whose_room_never_opens_fails_at_its_deadline(end: PrefillEnd) -> None:
    end.up()
    end.receive(grant(time_left_ms=1_000))
    assert sent(end.tick(0.95), Failed) == []
    (failed,) = sent(end.tick(0.1), Failed)
    assert (failed.reason, failed.quiescent) == ("deadline", True)
    assert end.core._waiting == {}


def test_a_room_that_meets_no_grant_fails_at_its_deadline(end: PrefillEnd) -> None:
    end.open(deadline=1.0)
    end.push()
    end.finish()
    effects = end.tick(1.0)
    (failed,) = of(effects, RoomFailed)
    text = "not landed in time, still finished: decode has granted no memory yet"
    assert (failed.cause, failed.detail) == (Cause.DEADLINE, text)
    assert of(effects, RoomDrained) == [RoomDrained(1)]


@pytest.mark.parametrize(
    ("options", "granted", "finished", "text"),
    [
        ({}, False, False, "open: decode has granted no memory yet"),
        ({"peers": [D, D2]}, False, True, f"finished: decode has granted no memory yet ({D}, {D2})"),
        ({"peers": [D, D2], "grants": 2}, True, True, f"finished: decode has granted no memory yet ({D2})"),
        ({"grants": 2}, True, True, "finished: decode has granted no memory yet (1 of 2 ranks have)"),
        ({"grants": None}, True, False, "open: this node's engine has yet to compute the rest"),
        ({}, True, True, f"finished: its bytes are on their way to {D}"),
    ],
)
def test_a_room_past_its_deadline_names_what_it_waited_for(
    end: PrefillEnd, options: dict, granted: bool, finished: bool, text: str
) -> None:
    end.up()
    end.open(deadline=1.0, **options)
    if granted:
        end.receive(grant())
    if finished:
        end.push()
        end.finish()
    (failed,) = of(end.tick(1.0), RoomFailed)
    assert (failed.cause, failed.detail) == (Cause.DEADLINE, f"not landed in time, still {text}")


def test_a_late_grant_for_a_room_that_has_ended_fails_at_once(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.core.abort(1, 0.0, Cause.ENGINE, "broken")
    (failed,) = sent(end.receive(grant()), Failed)
    assert (failed.reason, failed.detail, failed.quiescent) == ("engine", "broken", True)
    ended(end, 2, 2)
    (failed,) = sent(end.receive(grant(3, 2, at=40)), Failed)
    assert failed.detail == "the room has landed already"


def test_only_the_latest_ended_labels_are_kept() -> None:
    end = PrefillEnd(replace(LIMITS, rooms_max=3))
    for room in range(10):
        end.open(room)
        end.core.abort(room, 0.0)
    assert list(end.core._ended) == [7, 8, 9]


def test_the_pages_of_a_failed_room_are_safe_when_its_last_write_has_ended(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    effects = end.core.abort(1, 0.0)
    assert failure(effects) == (1, Cause.ABORTED)
    assert of(effects, RoomDrained) == []
    assert of(end.wrote(kv), RoomDrained) == []
    assert of(end.wrote(c4), RoomDrained) == [RoomDrained(1)]


def test_slots_may_be_granted_again_once_their_grant_has_ended(end: PrefillEnd) -> None:
    end.up()
    ended(end, 1, 1)
    assert of(end.receive(grant(2, 2, at=0)), Send) == [Send(D, Granted(S, 2))]


# Several decode ranks


def two_ranks(end: PrefillEnd) -> list[Write]:
    end.up(S, D)
    end.up(0xB0, D2)
    end.open(grants=2)
    assert of(end.receive(grant()), RoomLeased) == []
    assert of(end.receive(grant(session=0xB0), peer=D2), RoomLeased) == [RoomLeased(1, 8)]
    return of(end.push(), Write)


def test_a_room_of_two_ranks_lands_when_both_have_all_bytes(end: PrefillEnd) -> None:
    writes = two_ranks(end)
    end.finish()
    effects = [effect for write in writes[:-1] for effect in end.wrote(write)]
    assert len(sent(effects, Landed)) == 1
    assert of(effects, RoomLanded) == of(effects, RoomDrained) == []
    assert of(end.wrote(writes[-1]), RoomLanded) == [RoomLanded(1, 2 * kv_bytes(8))]


def test_a_session_without_components_is_up_at_once_maps_nothing_and_lands_when_the_engine_is_through() -> None:
    end = PrefillEnd()
    end.receive(end.hello())
    effects = end.receive(end.register(S, components=()))
    assert effects == [Send(D, Registered(S, ARENA_BYTES))]
    end.open()
    end.receive(grant(parts=(), send_aux=False))
    assert of(end.push(), Write) == []
    effects = end.finish()
    assert sent(effects, Landed) == [Landed(S, 1, 0, b"")]
    assert of(effects, RoomLanded) == [RoomLanded(1, 0)]
    end.released(1)
    assert end.receive(Goodbye(1, "shutdown")) == [Unmap(S)], "the node forgets what it keeps of it"
    assert end.core.sessions == {}


def test_a_part_of_what_no_session_registered_is_a_breach(end: PrefillEnd) -> None:
    end.receive(end.hello(), end.register(S, components=()))
    end.open()
    assert (
        refusal(end.receive(grant()))
        == "Grant.parts[0].component: 0, must be below 0, the number of components in Register"
    )
    assert end.core.sessions == {}


def test_a_session_of_some_layers_is_written_those_and_no_byte_of_others(end: PrefillEnd) -> None:
    end.receive(end.hello())
    stage = components(SLOTS, 1, page_first=True)[0]
    stage = msgspec.structs.replace(stage, layout=stage.layout.layers(1, LAYERS))
    end.receive(end.register(S, components=(stage,)))
    end.core.mapped(S, ARENA_BYTES)
    end.open()
    end.receive(grant(parts=grant().parts[:1]))
    writes = []
    for first in range(LAYERS):
        writes += of(end.push(layers=(first, first + 1)), Write)
    assert [(write.component, write.layers) for write in writes] == [
        (0, (layer, layer + 1)) for layer in range(1, LAYERS)
    ]
    end.finish()
    landed = [message for write in writes for message in sent(end.wrote(write), Landed)]
    assert [message.kv_bytes for message in landed] == [8 * (LAYERS - 1) * ROW]


def test_abort_by_one_rank_fails_the_grant_of_the_other(end: PrefillEnd) -> None:
    two_ranks(end)
    effects = end.receive(Abort(S, 1))
    assert failure(effects) == (1, Cause.ABORTED)
    assert [(e.peer, e.message.quiescent) for e in of(effects, Send) if isinstance(e.message, Failed)] == [(D2, False)]


def test_abort_by_a_rank_that_has_landed_fails_a_room_that_has_not(end: PrefillEnd) -> None:
    writes = two_ranks(end)
    end.finish()
    for write in writes:
        if write.session == S:
            end.wrote(write)
    effects = end.receive(Abort(S, 1))
    assert sent(effects, Landed), "the proof stands"
    assert failure(effects) == (1, Cause.ABORTED)


def test_a_rank_that_is_lost_fails_the_room_for_the_other(end: PrefillEnd) -> None:
    two_ranks(end)
    effects = end.receive(Goodbye(1, "shutdown"))
    assert failure(effects) == (1, Cause.PEER_LOST)
    assert [e.peer for e in of(effects, Send) if isinstance(e.message, Failed)] == [D2]


# Sessions


def test_registered_reports_what_is_mapped_and_a_repeated_register_is_answered_once_it_is(end: PrefillEnd) -> None:
    own = components(SLOTS, 1, page_first=True)
    assert sent(end.receive(end.hello()), Welcome)
    assert of(end.receive(end.register()), Map) == [Map(S, REACH, own, own)]
    assert end.receive(end.register()) == []
    assert sent(end.core.mapped(S, ARENA_BYTES), Registered) == [Registered(S, ARENA_BYTES)]
    assert sent(end.receive(end.register()), Registered) == [Registered(S, ARENA_BYTES)]


def test_more_bytes_may_become_ready_later(end: PrefillEnd) -> None:
    end.receive(end.hello(), end.register())
    assert sent(end.core.mapped(S, 100), Registered) == [Registered(S, 100)]
    assert sent(end.core.mapped(S, ARENA_BYTES), Registered) == [Registered(S, ARENA_BYTES)]
    assert sent(end.receive(grant()), Granted)


def test_what_cannot_be_mapped_is_rejected_with_the_reason(end: PrefillEnd) -> None:
    end.receive(end.hello(), end.register())
    assert refusal(end.core.unmappable(S, "no such socket", 0.0)) == "no such socket"
    assert end.core.sessions == {}


def test_the_first_word_on_another_session_of_a_peer_closes_the_one_before(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    end.up(0xA1)
    effects = end.receive(Abort(0xA1, 1))
    assert failure(effects) == (1, Cause.PEER_RESTARTED)
    assert of(effects, Unmap) == [Unmap(S)]
    assert end.core.sessions.keys() == {0xA1}


def test_a_late_register_of_a_dead_process_costs_the_next_one_nothing(end: PrefillEnd) -> None:
    """Simulated, seed 18 of restarts: it carries no incarnation, and took the next one's place. Nobody can map it."""
    end.up()
    end.open()
    end.receive(grant())
    effects = end.receive(end.register(0xDEAD))
    assert [effect.session for effect in of(effects, Map)] == [0xDEAD]
    assert of(effects, RoomFailed) == []
    effects = end.core.unmappable(0xDEAD, "the hand-over was revoked", end.now)
    assert [message.session for message in sent(effects, Reject)] == [0xDEAD]
    assert end.core.sessions.keys() == {S}
    assert 1 in end.core.rooms


def test_a_late_register_of_an_ended_session_changes_nothing(end: PrefillEnd) -> None:
    end.up(S)
    end.up(0xA1)
    end.receive(Abort(0xA1, 1))
    effects = end.receive(end.register(S))
    assert sent(effects, Reject) == [Reject(S, "unknown_session", ())]
    assert of(effects, Map) == []
    assert end.core.sessions[0xA1].open


def test_a_session_closed_while_its_arena_is_mapped_is_unmapped_when_that_is_done(end: PrefillEnd) -> None:
    end.receive(end.hello(), end.register())
    assert of(end.receive(Reject(S, "peer_lost", ())), Unmap) == []
    assert end.core.sessions.keys() == {S}
    effects = end.core.mapped(S, ARENA_BYTES)
    assert effects == [Unmap(S)]
    assert end.core.sessions == {}


def test_registers_cannot_pile_up_mappings(end: PrefillEnd) -> None:
    end.receive(end.hello())
    maps = []
    for session in range(100, 200):
        maps += of(end.receive(end.register(session)), Map)
    assert len(maps) == LIMITS.peer_sessions_max
    assert "peer_sessions_max is 4" in refusal(end.receive(end.register(777)))
    end.up(0xB0, D2)
    for order in maps:
        end.core.mapped(order.session, ARENA_BYTES)
    assert of(end.receive(end.register(778)), Map)


def test_writes_in_flight_keep_the_mapping_of_a_closed_session(end: PrefillEnd) -> None:
    end.up()
    kv, c4 = writing(end)
    assert of(end.receive(Reject(S, "peer_lost", ())), Unmap) == []
    assert not end.core.idle
    assert of(end.wrote(kv), Unmap) == []
    assert of(end.wrote(c4), Unmap) == [Unmap(S)]
    assert end.core.idle


def test_a_new_incarnation_closes_the_sessions_of_the_old_one(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    effects = end.receive(end.hello(2))
    assert failure(effects) == (1, Cause.PEER_RESTARTED)
    assert of(effects, Unmap) == [Unmap(S)]
    assert sent(effects, Welcome)


def test_a_late_hello_of_an_earlier_process_changes_nothing(end: PrefillEnd) -> None:
    end.up()
    end.up(0xA1, incarnation=2)
    assert end.receive(end.hello(1)) == []
    assert end.core.sessions[0xA1].open


def test_a_process_that_greets_on_after_it_was_taken_for_gone_gets_in(end: PrefillEnd) -> None:
    """Simulated, seed 4304: the first Hello of a dead process came after the living one's, which was then shut out."""
    end.up(incarnation=2)
    end.receive(end.hello(1))
    assert end.receive(end.hello(2)) == []
    end.tick(2.0)
    assert sent(end.receive(end.hello(2)), Welcome)


def test_goodbye_ends_the_peers_sessions_and_another_process_cannot_send_it(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    assert end.receive(Goodbye(77, "shutdown")) == []
    assert failure(end.receive(Goodbye(1, "shutdown"))) == (1, Cause.PEER_LOST)
    assert end.core.peers == {}


def test_a_peer_that_sends_goodbye_and_goes_on_is_asked_who_it_is(end: PrefillEnd) -> None:
    end.up()
    end.receive(Goodbye(1, "shutdown"))
    assert sent(end.receive(grant()), Reject) == [Reject(0, "hello_required", ())]


def test_a_stranger_is_asked_for_hello_but_never_for_a_farewell(end: PrefillEnd) -> None:
    assert sent(end.receive(Ping(1)), Reject) == [Reject(0, "hello_required", ())]
    assert end.receive(Reject(S, "peer_lost", ()), Reject(0, "hello_required", ()), Goodbye(1, "shutdown")) == []


def test_a_message_for_an_unknown_session_is_rejected_and_a_reject_is_not(end: PrefillEnd) -> None:
    end.receive(end.hello())
    for message in (grant(), Abort(S, 1), Released(S, 1)):
        assert sent(end.receive(message), Reject) == [Reject(S, "unknown_session", ())]
    assert end.receive(Reject(S, "unknown_session", ())) == []


def test_ping_is_answered_with_this_process(end: PrefillEnd) -> None:
    end.receive(end.hello(5))
    assert sent(end.receive(Ping(5)), Pong) == [Pong(9)]


def test_a_decode_node_that_falls_silent_loses_its_sessions(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    end.tick(3.0)
    end.receive(Ping(1))
    assert of(end.tick(4.9), RoomFailed) == []
    assert failure(end.tick(0.2)) == (1, Cause.PEER_LOST)
    assert end.core.peers == {}
    assert sent(end.receive(Ping(1)), Reject) == [Reject(0, "hello_required", ())]


def test_a_decode_node_whose_process_is_gone_loses_its_sessions_once_it_is_slow(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    assert end.core.gone(D, "its connection has ended", end.now) == []
    assert of(end.tick(LIMITS.slow_ms / 1e3 - 0.1), RoomFailed) == []
    assert failure(end.tick(0.1)) == (1, Cause.PEER_LOST)
    assert end.core.peers == {}
    assert end.core.gone(D, "its connection has ended", end.now) == []


def test_a_decode_node_that_is_back_in_time_keeps_its_sessions(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    end.core.gone(D, "its connection has ended", end.now)
    end.tick(1.0)
    end.receive(end.hello())
    assert of(end.tick(LIMITS.slow_ms / 1e3 + 1.0), RoomFailed) == []


def test_a_quiet_peer_is_looked_at_often_enough_to_separate_silence_from_time_that_nobody_ran(end: PrefillEnd) -> None:
    end.receive(end.hello())
    for _ in range(3):
        due = end.core.next_tick()
        assert due is not None
        assert due <= end.now + LIMITS.ping_ms / 1e3
        assert end.tick(due - end.now) == []
    assert end.core.peers


def test_silence_is_noticed_however_times_round() -> None:
    """Simulated, seed 176: now - seen rounded below the limit when seen + limit was due, so that tick never ended."""
    limit = LIMITS.session_silence_ms / 1e3
    seen = next(t for t in (0.1 * n + 4.18 for n in range(10_000)) if (t + limit - t) * 1e3 < limit * 1e3)
    end = PrefillEnd()
    end.now = seen
    end.receive(end.hello())
    end.core.tick(seen + limit)
    assert end.core.peers == {}


def test_a_wrong_model_is_refused_with_both_values(end: PrefillEnd) -> None:
    effects = end.receive(end.hello(model="other", weights=b"\x01"))
    assert sent(effects, Welcome) == []
    assert refusal(effects) == "model: d0 has 'other', p0 'm'; weights: d0 has '01', p0 '77'"


def test_the_text_of_a_reject_fits_into_its_frame(end: PrefillEnd) -> None:
    (reject,) = sent(end.receive(end.hello(model="\U0010ffff" * 128, node="n" * 128)), Reject)
    assert all(len(line) <= 512 for line in reject.fields)


def test_no_more_peers_are_known_than_sessions_max() -> None:
    end = PrefillEnd(replace(LIMITS, sessions_max=2))
    for peer in (D, D2):
        assert sent(end.receive(end.hello(), peer=peer), Welcome)
    effects = end.receive(end.hello(), peer="node:d2")
    assert refusal(effects).startswith("peers: 2")
    assert sent(end.receive(end.hello(), peer=D2), Welcome)
    end.tick(6.0)
    assert sent(end.receive(end.hello(), peer="node:d2"), Welcome)


# Checksums


def test_landed_carries_the_sum_of_its_writes_where_the_grant_asks_to_verify(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(verify=True))
    writes = of([*end.push(), *end.finish()], Write)
    assert all(write.verify and write.first_row == 0 for write in writes)
    end.wrote(writes[0], checksum=(1 << 64) - 2)
    (landed,) = sent(end.wrote(writes[1], checksum=5), Landed)
    assert landed.checksum == (3).to_bytes(8, "little"), "mod 2**64"


def test_a_write_carries_which_row_of_the_room_is_its_first(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(verify=True))
    (write,) = of(end.push(component="kv", first_row=3, source_slots=np.arange(5)), Write)
    assert write.first_row == 3


def test_landed_carries_no_checksum_that_nobody_asked_for(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant())
    writes = of([*end.push(), *end.finish()], Write)
    assert not any(write.verify for write in writes)
    end.wrote(writes[0])
    (landed,) = sent(end.wrote(writes[1], checksum=5), Landed)
    assert landed.checksum == b""


def test_a_grant_without_parts_that_is_to_be_verified_lands_with_the_sum_of_nothing(end: PrefillEnd) -> None:
    end.up()
    end.open()
    end.receive(grant(verify=True, parts=()))
    (landed,) = sent([*end.push(), *end.finish()], Landed)
    assert landed.checksum == bytes(8)


def test_no_hello_is_answered_before_the_group_is_known(end: PrefillEnd) -> None:
    end.core = PrefillSessions(identity("p0", "prefill"), end.components, LIMITS, group_is_known=False)
    assert end.receive(end.hello()) == []
    group = (Member("p0", ""), Member("p1", "tcp://p1"))
    end.core.set_group(group)
    (welcome,) = sent(end.receive(end.hello()), Welcome)
    assert welcome.identity.group == group


@pytest.mark.parametrize("granted_before", [False, True])
def test_a_leased_room_goes_on_although_another_decode_gives_it_up(end: PrefillEnd, granted_before: bool) -> None:
    """It is for whoever grants it first. The other never had a grant of it, or one that came too late."""
    end.up(S)
    other = end.up(0xB0, peer=D2)
    end.open(1)
    end.receive(grant(1))
    if granted_before:
        end.receive(grant(1, session=other), peer=D2)
    effects = end.receive(Abort(other, 1, 1), peer=D2)
    assert of(effects, RoomFailed) == []
    effects = end.push() + end.finish()
    for write in of(effects, Write):
        effects += end.wrote(write)
    assert of(effects, RoomLanded) == [RoomLanded(1, kv_bytes(8))]

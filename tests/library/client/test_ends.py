"""The end of a room that one client knows reaches the other one, also where the two have no session."""

from __future__ import annotations

import logging

import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import RoomAsked, RoomDrained, RoomFailed
from pdtransfer.limits import Limits
from tests.support.client_pair import Pair, client_pair

TOKENS = 8
# A peer that does not fit is greeted once a minute.
SLOW = Limits(resend_ms=50, resend_ms_max=60_000, ping_ms=200, silence_ms=4_000)


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def failed_at_prefill(pair: Pair, room: int) -> RoomFailed:
    pair.until(lambda: pair.prefill_event(room, RoomFailed))
    pair.drained(room)
    return pair.prefill_event(room, RoomFailed)


@pytest.mark.parametrize("order", ["prefill first", "decode first"])
def test_where_the_two_do_not_fit_both_ends_fail_at_once_and_each_names_the_fact(
    order: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {"model": "demo", "block_size": "16"}
    ours = {"weights": b"16", "facts": facts}
    theirs = {"weights": b"32", "facts": facts | {"block_size": "32"}}
    with client_pair(limits=SLOW, prefill_settings=ours, decode_settings=theirs) as pair:
        if order == "prefill first":
            pair.send(1, TOKENS)
        pair.expect(1, TOKENS)
        assert pair.failed(1).cause is Cause.REFUSED
        if order == "decode first":
            pair.until(lambda: pair.prefill_event(1, RoomAsked))
            pair.send(1, TOKENS)
        failed = failed_at_prefill(pair, 1)
        assert failed.cause is Cause.ABORTED
        both = "block_size: d has '32', p '16'"
        assert both in failed.detail
        assert both in pair.decode_event(1, RoomFailed).detail
        lines = [record.getMessage() for record in caplog.records if both in record.getMessage()]
        assert [line for line in lines if line.startswith("node:d is refused: ")], "prefill's own line"
        assert [line for line in lines if line.startswith("tcp://")], "decode's own line"
        assert not [line for line in lines if "weights" in line or "model:" in line], "they do not differ"


def test_each_further_room_of_such_a_pair_fails_as_soon() -> None:
    with client_pair(limits=SLOW, decode_settings={"weights": b"x"}) as pair:
        for room in (1, 2, 3):
            pair.send(room, TOKENS)
            pair.expect(room, TOKENS)
            assert "weights: d has '78', p '77'" in failed_at_prefill(pair, room).detail


def test_a_room_that_decode_never_expects_fails_at_prefill(pair: Pair) -> None:
    """Of a request that ended before it got memory."""
    pair.send(1, TOKENS)
    pair.decode.withdraw(1, sources=[pair.prefill.endpoint], detail="request r1: refused by its server")
    assert failed_at_prefill(pair, 1).detail == "node:d gave it up: request r1: refused by its server"
    pair.decode.withdraw(2, sources=[pair.prefill.endpoint])
    pair.until(lambda: pair.prefill_event(2, RoomAsked))
    pair.send(2, TOKENS)
    assert failed_at_prefill(pair, 2).detail == "node:d gave it up"


def test_the_reason_of_an_abort_crosses_in_both_directions(pair: Pair) -> None:
    pair.prefill.open(1, tokens=TOKENS)
    pair.expect(1, TOKENS)
    pair.prefill.abort(1, "its client has left")
    assert pair.failed(1).detail.endswith(": its client has left")
    pair.prefill.open(2, tokens=TOKENS)
    pair.expect(2, TOKENS)
    pair.decode.abort(2, "its client has left")
    assert failed_at_prefill(pair, 2).detail == "node:d gave it up: its client has left"


def test_a_room_that_prefill_never_opens_fails_at_decode(pair: Pair) -> None:
    pair.expect(1, TOKENS)
    pair.until(lambda: pair.prefill_event(1, RoomAsked))
    pair.prefill.abort(1, "its client has left")
    assert (pair.failed(1).cause, pair.prefill_event(1, RoomDrained)) == (Cause.ABORTED, None)


def test_a_request_that_decode_cannot_take_is_reported_to_prefill(pair: Pair) -> None:
    pair.send(1, TOKENS)
    pair.expect(1, 10 * pair.target.slots)
    assert "refused: " in failed_at_prefill(pair, 1).detail

"""Verification: what decode reads back before READY; every kind of damage between the write and Landed is caught."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.effects import RoomFailed, RoomReady, Settle, StopSettling
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.handoff.states import SessionState
from pdtransfer.kernels import NativeCopy, checksum_copy
from pdtransfer.transports import copier, verifier
from pdtransfer.wire import Abort, Failed, Goodbye, Grant, Landed, Released, unpack_extents
from tests.support.client_pair import Expected, Pair, client_pair, slots_of_pages
from tests.support.layout_tensors import CANARY, mha
from tests.support.session_ends import C4, KV, P2, SLOTS, DecodeEnd, P, of, sent

ALL_FREE = [SLOTS, SLOTS]
SUM = 0x1122334455667788
SENT = SUM.to_bytes(8, "little")


def end() -> DecodeEnd:
    decode_end = DecodeEnd(verify=True)
    decode_end.up()
    return decode_end


def of_two_ranks() -> DecodeEnd:
    decode_end = DecodeEnd(verify=True)
    decode_end.up(P, holds=KV)
    decode_end.up(P2, holds=C4)
    return decode_end


# The core: what is asked, and what may be reused when


@pytest.fixture
def decode() -> DecodeEnd:
    return end()


def test_a_room_is_ready_when_what_has_landed_was_read_back_and_is_what_was_sent(decode: DecodeEnd) -> None:
    grant = decode.granted(7, tokens=8)
    assert grant.verify
    effects = decode.land(grant, aux=b"first", checksum=SENT)
    assert sent(effects, Released), "Landed is the proof that writing has ended, whatever the bytes are"
    assert not of(effects, RoomReady)
    (order,) = of(effects, Settle)
    assert (order.session, order.grant, order.room) == (grant.session, grant.grant, 7)
    for asked, part in zip(order.parts, grant.parts, strict=True):
        assert asked.first_row == part.first_row
        assert asked.extents.tolist() == unpack_extents("x", part.extents).tolist()
    (ready,) = of(decode.verified(grant, SUM), RoomReady)
    assert (ready.room, ready.aux) == (7, b"first")
    assert (decode.core.post_landing.matched, decode.core.post_landing.mismatched) == (1, 0)
    decode.core.release(7, decode.now)
    assert decode.free == ALL_FREE
    assert decode.core.idle


def test_a_repeated_landed_is_read_once(decode: DecodeEnd) -> None:
    grant = decode.granted(7)
    assert of(decode.land(grant, checksum=SENT), Settle)
    again = decode.land(grant, checksum=bytes(8))
    assert sent(again, Released)
    assert not of(again, Settle)
    assert of(decode.verified(grant, SUM), RoomReady)
    assert not of(decode.land(grant, checksum=SENT), Settle)


def test_a_sum_that_differs_fails_the_room_and_names_grant_peer_and_both_values(decode: DecodeEnd) -> None:
    grant = decode.granted(7)
    decode.land(grant, checksum=SENT)
    (failed,) = of(decode.verified(grant, SUM + 1), RoomFailed)
    assert failed.cause is Cause.TRANSFER
    for what in (P, "grant 1", SENT.hex(), (SUM + 1).to_bytes(8, "little").hex()):
        assert what in failed.detail
    assert decode.free == ALL_FREE, "writing has ended, and reading has"
    assert decode.core.post_landing.mismatched == 1
    assert decode.core.idle


@pytest.mark.parametrize("checksum", [b"", SENT[:7], SENT + b"\0"])
def test_a_landed_without_a_checksum_fails_the_room_and_returns_its_slots(decode: DecodeEnd, checksum: bytes) -> None:
    effects = decode.land(decode.granted(7), checksum=checksum)
    (failed,) = of(effects, RoomFailed)
    assert failed.cause is Cause.TRANSFER
    assert P in failed.detail
    assert f"{len(checksum)} bytes" in failed.detail
    assert not of(effects, Settle)
    assert not sent(effects, Abort), "there is nothing left to abort"
    assert sent(effects, Released)
    assert decode.free == ALL_FREE
    assert decode.core.idle
    assert decode.core.post_landing.mismatched == 1


def test_rows_that_cannot_be_read_fail_the_room(decode: DecodeEnd) -> None:
    grant = decode.granted(7)
    decode.land(grant, checksum=SENT)
    assert "out of order" in of(decode.verified(grant, 0, "out of order"), RoomFailed)[0].detail
    assert decode.core.post_landing.mismatched == 0


def test_a_node_that_does_not_verify_asks_for_nothing_and_ignores_a_sum() -> None:
    decode = DecodeEnd()
    decode.up()
    grant = decode.granted(7)
    assert not grant.verify
    effects = decode.land(grant, checksum=SENT)
    assert of(effects, RoomReady)
    assert not of(effects, Settle)


@pytest.mark.parametrize("why", ["abort", "deadline"])
def test_slots_of_a_room_that_fails_while_it_is_read_are_reused_only_after_the_last_byte(why: str) -> None:
    decode = end()
    grant = decode.granted(7, tokens=SLOTS, deadline=decode.now + 5.0)
    decode.land(grant, checksum=SENT)
    if why == "abort":
        effects = decode.core.abort(7, decode.now)
    else:
        effects = decode.live(5.5, P)
    (failed,) = of(effects, RoomFailed)
    assert failed.cause is (Cause.ABORTED if why == "abort" else Cause.DEADLINE)
    assert not sent(effects, Abort)
    assert of(effects, StopSettling) == [StopSettling(grant.session, grant.grant)]
    assert decode.free[0] == 0, "it is still being read"
    assert not decode.core.idle
    assert not sent(decode.expect(8, tokens=SLOTS), Grant)
    effects = decode.verified(grant, SUM + 1)
    assert not of(effects, RoomFailed), "it had failed already"
    assert [each.room for each in sent(effects, Grant)] == [8], "its slots are granted to the next at once"


def test_a_room_of_the_same_label_is_not_touched_by_an_earlier_ones_reading(decode: DecodeEnd) -> None:
    first = decode.granted(7)
    decode.land(first, checksum=SENT)
    decode.core.abort(7, decode.now)
    second = decode.granted(7)
    decode.land(second, checksum=SENT)
    assert not of(decode.verified(first, SUM + 1), RoomFailed)
    assert of(decode.verified(second, SUM), RoomReady)


@pytest.mark.parametrize("how", ["goodbye", "silence"])
def test_a_peer_that_is_lost_after_landed_costs_its_room_nothing(decode: DecodeEnd, how: str) -> None:
    grant = decode.granted(7, deadline=decode.now + 60.0)
    decode.land(grant, checksum=SENT)
    if how == "goodbye":
        effects = decode.receive(Goodbye(decode.incarnation, "shutdown"))
        effects += decode.core.fenced(grant.session, decode.now)
        assert grant.session not in decode.core.prefill_peers.sessions
    else:
        effects = decode.tick(3.0)
        assert decode.core.prefill_peers.sessions[grant.session].state is SessionState.SILENT
    assert not of(effects, RoomFailed)
    assert of(decode.verified(grant, SUM), RoomReady)


def test_every_grant_of_a_room_is_read_as_it_lands_and_the_wrong_one_is_named() -> None:
    decode = of_two_ranks()
    grants = {each.session: each for each in sent(decode.expect(7, 8, P, P2), Grant)}
    first, second = (grants[decode.core.prefill_peers.peers[name].session.id] for name in (P, P2))
    assert of(decode.land(first, checksum=SENT), Settle)
    assert not of(decode.verified(first, SUM), RoomReady), "the other has not landed"
    assert of(decode.land(second, peer=P2, checksum=SENT), Settle)
    (failed,) = of(decode.verified(second, 0), RoomFailed)
    assert P2 in failed.detail
    assert decode.free == ALL_FREE


def test_a_room_of_two_is_ready_after_both_readings_in_whatever_order() -> None:
    decode = of_two_ranks()
    first, second = sent(decode.expect(7, 8, P, P2), Grant)
    peers = [decode.core.prefill_peers.sessions[each.session].peer for each in (first, second)]
    decode.land(first, peer=peers[0], checksum=SENT)
    decode.land(second, peer=peers[1], checksum=SENT)
    assert not of(decode.verified(second, SUM), RoomReady)
    assert of(decode.verified(first, SUM), RoomReady)


def test_a_wrong_grant_aborts_those_that_still_write() -> None:
    decode = of_two_ranks()
    first, second = sent(decode.expect(7, 8, P, P2), Grant)
    peers = [decode.core.prefill_peers.sessions[each.session].peer for each in (first, second)]
    decode.land(first, peer=peers[0], checksum=SENT)
    effects = decode.verified(first, 0)
    assert of(effects, RoomFailed)[0].room == 7
    assert [each.grant for each in sent(effects, Abort)] == [second.grant]
    assert decode.free != ALL_FREE
    decode.receive(Failed(second.session, second.grant, "aborted", "", quiescent=True), peer=peers[1])
    assert decode.free == ALL_FREE


# End to end, over shared memory


@contextmanager
def verified_pair(**options: Any) -> Iterator[Pair]:
    with client_pair(decode_options={"verify": True}, **options) as pair:
        yield pair


@pytest.fixture(params=["on the loop", "in threads"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in threads":
        monkeypatch.setattr(copier, "SMALL_BYTES_MAX", 0)
    return request.param


def before_landed(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Landed], Landed | None]) -> None:
    """What happens between the last write and the moment at which decode learns of it."""
    receive = DecodeSessions.receive

    def seen(self: DecodeSessions, name: str, message: Any, now: float) -> Any:
        if isinstance(message, Landed):
            message = damage(message) or message
        return receive(self, name, message, now)

    monkeypatch.setattr(DecodeSessions, "receive", seen)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("layer_first", 16, 512), ("page_first", 1, 256)),
        (("page_first_direct", 64, 512), ("page_head", 4, 256)),
        (("page_head", 2, 512), ("layer_first", 8, 256)),
    ],
)
def test_rooms_are_verified_whatever_the_layouts(where: str, source: Any, target: Any) -> None:
    model = mha(layers=range(2), heads=range(3), head_bytes=40)
    with verified_pair(model=model, source=source, target=target) as pair:
        expected = Expected(pair.target)
        for room, tokens in ((1, 5), (2, 100), (3, 77)):
            pair.expect(room, tokens)
            pages = pair.send(room, tokens)
            slots = pair.ready(room).slots["kv"]
            expected.land(slots_of_pages(pages, pair.source.page_size, tokens), slots)
        assert expected.holds(pair.arena)
        for room in (1, 2, 3):
            pair.decode.release(room)
        pair.whole_arena_is_free(9)


def rows_of(arena: np.ndarray) -> np.ndarray:
    """Of 256 tokens, all layers of each together; a view."""
    return arena[: 256 * 2 * 1_152].reshape(256, -1)


def landed(arena: np.ndarray) -> np.ndarray:
    """Which of the rows are not canaries."""
    return np.flatnonzero((rows_of(arena) != CANARY).any(axis=1))


def flip_a_bit(arena: np.ndarray) -> None:
    rows_of(arena)[landed(arena)[7], 1_500] ^= 0x10


def swap_two_rows(arena: np.ndarray) -> None:
    rows, used = rows_of(arena), landed(arena)[:2]
    rows[used] = rows[used[::-1]]


def put_a_row_of_another_room(arena: np.ndarray) -> None:
    rows, used = rows_of(arena), landed(arena)
    rows[used[-1]] = rows[used[0]]


def lose_a_row(arena: np.ndarray) -> None:
    rows_of(arena)[landed(arena)[0]] = CANARY


def shift_the_layers(arena: np.ndarray) -> None:
    row = rows_of(arena)[landed(arena)[3]].reshape(2, -1)
    row[:] = row[::-1].copy()


@pytest.mark.parametrize("damage", [flip_a_bit, swap_two_rows, put_a_row_of_another_room, lose_a_row, shift_the_layers])
def test_damage_in_the_arena_is_caught_before_anybody_reads_it(
    where: str, damage: Callable[[np.ndarray], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with verified_pair() as pair:
        pair.expect(1, 20)
        pair.send(1, 20)
        pair.ready(1)  # so that there is another room's row, which lies before the next room's
        if damage is not put_a_row_of_another_room:
            pair.decode.release(1)
            pair.drained(1)
            pair.arena[:] = CANARY
        strike = [True]

        def once(message: Landed) -> None:
            if strike and message.grant == 2:  # on a loaded machine the first one repeats, and comes after its end
                strike.clear()
                damage(pair.arena)

        before_landed(monkeypatch, once)
        pair.expect(2, 20)
        pair.send(2, 20)
        failed = pair.failed(2)
        assert failed.cause is Cause.TRANSFER
        assert pair.prefill.endpoint in failed.detail
        assert pair.decode_event(2, RoomReady) is None
        if damage is put_a_row_of_another_room:
            pair.decode.release(1)
        pair.whole_arena_is_free(3)


def test_a_row_of_the_pool_that_changes_between_read_and_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with verified_pair() as pair:
        copy = copier.kernels.copy

        def late(*args: Any, **kwargs: Any) -> bool:
            pair.source.memory[:] ^= 1
            return copy(*args, **kwargs)

        # Compiled, both are one call. In numpy there is a moment between them.
        monkeypatch.setattr(copier.kernels, "native", lambda: NativeCopy(path=None, text="numpy"))
        monkeypatch.setattr(copier.kernels, "copy", late)
        pair.expect(1, 20)
        pair.send(1, 20)
        assert pair.failed(1).cause is Cause.TRANSFER


def test_a_prefill_that_sends_the_sum_of_something_else_fails_its_room_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie(message: Landed) -> Landed | None:
        return msgspec.structs.replace(message, checksum=bytes(8)) if message.grant == 1 else None

    before_landed(monkeypatch, lie)
    with verified_pair() as pair:
        for room in (1, 2):
            pair.expect(room, 20)
            pair.send(room, 20)
        assert pair.failed(1).cause is Cause.TRANSFER
        pair.ready(2)
        pair.decode.release(2)
        pair.whole_arena_is_free(3)


def test_a_prefill_that_knows_no_checksums_fails_its_rooms_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = PrefillSessions.receive

    def older(self: PrefillSessions, name: str, message: Any, now: float) -> Any:
        if isinstance(message, Grant):
            message = msgspec.structs.replace(message, verify=False)
        return receive(self, name, message, now)

    monkeypatch.setattr(PrefillSessions, "receive", older)
    with verified_pair() as pair:
        pair.expect(1, 20)
        pair.send(1, 20)
        assert "0 bytes of checksum" in pair.failed(1).detail


class Held:
    """Sums that wait, in the verifier's threads, until the test lets them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.words: list[object] = []  # the cancel word of each sum
        monkeypatch.setattr(copier, "SMALL_BYTES_MAX", 0)
        real = checksum_copy.checksum

        def held(*args: Any, **kwargs: Any) -> int | None:
            if threading.current_thread().name.startswith("pdtransfer-verify"):
                self.words.append(kwargs["cancel"])
                self.begun.set()
                assert self.go.wait(20)
            return real(*args, **kwargs)

        monkeypatch.setattr(checksum_copy, "checksum", held)


def test_abort_of_a_room_that_is_being_read_keeps_its_slots_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with verified_pair() as pair:
        pair.expect(1, 256)
        pair.send(1, 256, pages=pair.all_pages())
        assert held.begun.wait(20)
        pair.decode.abort(1)
        assert pair.failed(1).cause is Cause.ABORTED
        pair.expect(2, 256)
        pair.send(2, 256, pages=pair.all_pages())
        pair.drained(1)
        assert pair.decode_event(2, RoomReady) is None
        assert not pair.prefill_event(2, type(pair.prefill_events[0])), "nothing is granted on slots that are read"
        held.go.set()
        pair.ready(2)


def test_a_reading_on_the_loop_that_breaks_fails_its_room_and_claims_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checksum_copy.checksum

    def broken(*args: Any, **kwargs: Any) -> int | None:
        if "cancel" in kwargs:
            monkeypatch.setattr(checksum_copy, "checksum", real)
            raise MemoryError("no room for a table")
        return real(*args, **kwargs)

    with verified_pair() as pair:
        pair.expect(1, 2)  # by now whatever is compiled is
        pair.send(1, 2)
        pair.ready(1)
        pair.decode.release(1)
        monkeypatch.setattr(checksum_copy, "checksum", broken)
        pair.expect(2, 2)
        pair.send(2, 2)
        assert "MemoryError: no room for a table" in pair.failed(2).detail
        pair.expect(3, 256)
        pair.send(3, 256, pages=pair.all_pages())
        pair.ready(3)


def test_a_room_that_fails_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(verifier, "PIECE_BYTES", 1)  # a row each
    with verified_pair() as pair:
        pair.expect(1, 256)
        pair.send(1, 256, pages=pair.all_pages())
        assert held.begun.wait(20)
        pair.decode.abort(1)
        pair.failed(1)
        held.go.set()
        pair.drained(1)
        pair.expect(2, 256)
        pair.send(2, 256, pages=pair.all_pages())
        pair.ready(2)
        first, last = held.words[0], held.words[-1]
        assert held.words.count(last) == 256
        assert held.words.count(first) <= 2, "what each of the two threads had begun"


def test_closing_waits_for_what_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with verified_pair() as pair:
        pair.expect(1, 20)
        pair.send(1, 20)
        assert held.begun.wait(20)
        closer = threading.Thread(target=pair.decode.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "the arena is still being read"
        held.go.set()
        closer.join(20)
        assert not closer.is_alive()

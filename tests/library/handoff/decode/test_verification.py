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
from pdtransfer.handoff.effects import RoomReady
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.kernels import NativeCopy, checksum_copy
from pdtransfer.transports import copier, verifier
from pdtransfer.wire import Grant, Landed
from tests.support.client_pair import Expected, Pair, client_pair, slots_of_pages
from tests.support.layout_tensors import CANARY, mha

SUM = 0x1122334455667788
SENT = SUM.to_bytes(8, "little")


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
            pages = pair.begin(room, tokens)
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
        pair.begin(1, 20)
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
        pair.begin(2, 20)
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
        pair.begin(1, 20)
        assert pair.failed(1).cause is Cause.TRANSFER


def test_a_prefill_that_sends_the_sum_of_something_else_fails_its_room_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie(message: Landed) -> Landed | None:
        return msgspec.structs.replace(message, checksum=bytes(8)) if message.grant == 1 else None

    before_landed(monkeypatch, lie)
    with verified_pair() as pair:
        for room in (1, 2):
            pair.begin(room, 20)
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
        pair.begin(1, 20)
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
        pair.begin(2, 2)
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
        pair.begin(1, 20)
        assert held.begun.wait(20)
        closer = threading.Thread(target=pair.decode.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "the arena is still being read"
        held.go.set()
        closer.join(20)
        assert not closer.is_alive()

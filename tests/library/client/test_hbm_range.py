"""The staging buffer for HBM components: backed once a writer comes that does not reach the GPU, and never exceeded."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.errors import Cause, LocalProtocolError, WorldError
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.options import WriterOptions
from tests.library.handoff.decode.hbm_pair import in_hbm, memory_of
from tests.support.client_pair import Expected, Pair, component, settings, slots_of_pages
from tests.support.internals import core_of
from tests.support.layout_tensors import CANARY, Pool, mla

TOKENS = 40
BUFFER_ROWS = 16  # of the staging buffer: a room of all 256 slots crosses in some 60 pieces


@contextmanager
def far_pair(arena: ArenaMemory, target: Pool, *, verify: bool = False) -> Generator[Pair]:
    """Its writer has no GPU, and decode's components are in the memory that `arena.hbm` names."""
    source = Pool(name="layer_first", model=target.model, page_size=16, slots=512)
    source.fill(np.arange(source.slots))
    writer = WriterOptions(pool_address=source.memory.ctypes.data)
    prefill = PrefillClient(settings("p"), [component(source)], writer=writer)
    decode = DecodeClient(settings("d"), [in_hbm(component(target), 0)], arena, verify=verify)
    with prefill, decode:
        yield Pair(prefill, decode, source, target)


@pytest.fixture
def target() -> Pool:
    return Pool(name="page_first", model=mla(layers=range(2)), page_size=1, slots=256)


@pytest.fixture
def arena(target: Pool) -> Iterator[ArenaMemory]:
    """HBM that writers may open, if they can: this one cannot."""
    buffer_bytes = BUFFER_ROWS * target.layout.row_bytes + 256
    arena_memory = ArenaMemory.create(0, huge_pages="never", staging_bytes=buffer_bytes)
    arena_memory.prefault()
    arena_memory.hbm = Hbm.of_process(base=0, byte_count=len(target.memory))
    arena_memory.hbm.handle = b"of a GPU"
    memory_of(arena_memory.hbm)[:] = CANARY
    yield arena_memory
    arena_memory.close()


@pytest.mark.parametrize("verify", [False, True])
def test_rows_of_a_writer_without_the_gpu_land_in_host_memory_and_are_copied_up(
    arena: ArenaMemory, target: Pool, *, verify: bool
) -> None:
    with far_pair(arena, target, verify=verify) as pair:
        pages = pair.begin(1, TOKENS)
        expected = Expected(replace(target))
        assert (expected.pool.memory == CANARY).all()
        expected.land(slots_of_pages(pages, 16, TOKENS), pair.ready(1).slots["kv"])
        assert arena.hbm is not None
        assert expected.holds(memory_of(arena.hbm))
        pair.until(lambda: arena.bytes_ready == arena.byte_count)


def test_a_decode_client_that_no_such_writer_comes_to_backs_nothing(arena: ArenaMemory, target: Pool) -> None:
    with DecodeClient(settings("d"), [in_hbm(component(target), 0)], arena):
        assert os.fstat(arena.fd).st_blocks * 512 == arena.bytes_ready


def test_rooms_of_a_writer_that_the_host_has_no_memory_for_fail_with_the_reason(
    arena: ArenaMemory, target: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise WorldError("prefault: 9 bytes are to be backed, a cgroup is 4 bytes")

    prefault = ArenaMemory.prefault
    monkeypatch.setattr(ArenaMemory, "prefault", full)
    with far_pair(arena, target) as pair:
        pair.begin(1, TOKENS)
        failed = pair.failed(1)
        assert failed.cause is Cause.TRANSFER
        assert "9 bytes are to be backed, a cgroup is 4 bytes" in failed.detail
        monkeypatch.setattr(ArenaMemory, "prefault", prefault)  # the host has memory again
        pair.serves_again([pair.prefill.endpoint])


@pytest.mark.parametrize("verify", [False, True])
def test_a_room_many_times_larger_than_the_buffer_lands_byte_for_byte(
    arena: ArenaMemory, target: Pool, *, verify: bool
) -> None:
    with far_pair(arena, target, verify=verify) as pair:
        pages = pair.begin(1, target.slots)
        ready, expected = pair.ready(1), Expected(replace(target))
        expected.land(slots_of_pages(pages, 16, target.slots), ready.slots["kv"])
        assert arena.hbm is not None
        assert expected.holds(memory_of(arena.hbm))
        assert ready.kv_bytes == target.slots * target.layout.row_bytes
        backed = os.fstat(arena.fd).st_blocks * 512
        assert backed <= arena.byte_count < len(target.memory) / 8


def test_several_clients_at_once_through_a_small_buffer(arena: ArenaMemory, target: Pool) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(far_pair(arena, target))
        others = [first]
        for number in range(2):
            source = Pool(name="layer_first", model=target.model, page_size=16, slots=512)
            source.fill(np.arange(source.slots))
            writer = WriterOptions(pool_address=source.memory.ctypes.data)
            client = stack.enter_context(PrefillClient(settings(f"p{number}"), [component(source)], writer=writer))
            others.append(Pair(client, first.decode, source, target))
        expected, sent = Expected(replace(target)), dict[int, np.ndarray]()
        for room, pair in enumerate(others, start=1):
            pair.expect(room, 80)
        for room, pair in enumerate(others, start=1):
            sent[room] = slots_of_pages(pair.send(room, 80), 16, 80)
        for room in sent:
            expected.land(sent[room], first.ready(room).slots["kv"])
        assert arena.hbm is not None
        assert expected.holds(memory_of(arena.hbm))


def test_rooms_that_are_given_up_between_their_pieces_leave_nothing_behind(arena: ArenaMemory, target: Pool) -> None:
    with far_pair(arena, target) as pair:
        core, given_up = core_of(pair.decode), 0
        for room in range(1, 9):
            pair.begin(room, target.slots)
            pair.until(lambda room=room: room in core.rooms and core.rooms[room].stop >= 4 * room)
            pair.decode.abort(room)
            pair.until(lambda room=room: pair.decode_event(room, RoomFailed) or pair.decode_event(room, RoomReady))
            if pair.decode_event(room, RoomReady) is None:
                given_up += 1
            else:  # all of it had landed before this thread's next turn
                pair.decode.release(room)
        assert given_up
        pair.until(lambda: core.idle and not core.staging.held)
        pages = pair.begin(9, target.slots)
        expected = Expected(replace(target))
        expected.land(slots_of_pages(pages, 16, target.slots), pair.ready(9).slots["kv"])
        assert arena.hbm is not None
        assert expected.holds(memory_of(arena.hbm))


def test_a_buffer_that_does_not_hold_a_row_of_each_component_is_refused_by_name(target: Pool) -> None:
    arena = ArenaMemory.create(0, huge_pages="never", staging_bytes=4096)
    arena.hbm = Hbm.of_process(base=0, byte_count=len(target.memory))
    wide = Pool(name="page_first", model=mla(layers=range(16)), page_size=1, slots=256)
    with pytest.raises(LocalProtocolError, match=r"staging buffer \(host_buffer_gib\): 4096 bytes, rows of kv take"):
        DecodeClient(settings("d"), [in_hbm(component(wide), 0)], arena).start()
    arena.close()

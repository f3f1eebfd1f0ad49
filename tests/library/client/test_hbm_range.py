"""The arena's range for HBM components: backed once a writer comes that does not reach the GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.errors import Cause, WorldError
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.options import WriterOptions
from tests.library.handoff.decode.hbm_pair import in_hbm
from tests.support.client_pair import Expected, Pair, component, settings, slots_of_pages
from tests.support.layout_tensors import CANARY, Pool, mla

TOKENS = 40


def memory_of(hbm: Hbm) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * hbm.byte_count).from_address(hbm.address))


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
    made = ArenaMemory.create(len(target.memory), huge_pages="never", needed=0)
    made.prefault()
    made.hbm = Hbm.of_process(base=0, byte_count=len(target.memory))
    made.hbm.handle = b"of a GPU"
    memory_of(made.hbm)[:] = CANARY
    yield made
    made.close()


@pytest.mark.parametrize("verify", [False, True])
def test_rows_of_a_writer_without_the_gpu_land_in_host_memory_and_are_copied_up(
    arena: ArenaMemory, target: Pool, *, verify: bool
) -> None:
    with far_pair(arena, target, verify=verify) as pair:
        pair.expect(1, TOKENS)
        pages = pair.send(1, TOKENS)
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
        pair.expect(1, TOKENS)
        pair.send(1, TOKENS)
        failed = pair.failed(1)
        assert failed.cause is Cause.TRANSFER
        assert "9 bytes are to be backed, a cgroup is 4 bytes" in failed.detail
        monkeypatch.setattr(ArenaMemory, "prefault", prefault)  # the host has memory again
        pair.serves_again([pair.prefill.endpoint])

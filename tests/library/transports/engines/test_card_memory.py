"""A GPU's memory that engines read and write themselves, at either end: with a memory file in place of the GPU's."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.errors import TransportError
from pdtransfer.handoff.effects import Map, Outcome, Write
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.cuda_ipc import Handle
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports.engines import child
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.card import CudaCard
from pdtransfer.transports.engines.card_use import remembered, why_no_card
from pdtransfer.transports.engines.settings import hbm_address, packed_address
from pdtransfer.transports.engines.writer import EngineWriter
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.mooncake.host import why_not
from pdtransfer.transports.options import ArenaOptions, Network, WriterOptions
from pdtransfer.wire import Reach
from tests.library.transports.engines.far_pair import LARGE, SESSION, FarPair, wide
from tests.support import played_card
from tests.support.client_pair import Expected, Pair, component, settings, slots_of_pages
from tests.support.fake_gpu import FakeGpu
from tests.support.internals import core_of, node_of, sessions_of
from tests.support.layout_tensors import CANARY, Pool, mla
from tests.support.processes import deliver
from tests.support.shm_pair import to_map
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]  # whole processes

SEEN = b"\7" * 16
BASE, STAGED = 1 << 16, 512  # of HBM's offsets; rows of the staging buffer
EVERY = np.arange(STAGED)
UNREACHED = (None, played_card.NO_GPU, played_card.BLIND)
WHY = ("without a handle", "not seen", "not opened")


class Played(MooncakeLibrary):
    """Mooncake, and a played GPU's memory."""

    card = played_card.__file__


class CardFile:
    """Memory of a played GPU, which its handle names to other processes."""

    def __init__(self, byte_count: int, gpu: bytes = SEEN) -> None:
        self.memory = ArenaMemory.create(byte_count, huge_pages="never")
        path = f"/proc/{os.getpid()}/fd/{self.memory.fd}".encode()
        self.handle = Handle("gpu", byte_count, 0, gpu, path.ljust(64, b"\0"))

    @property
    def array(self) -> np.ndarray:
        return self.memory.mapping.array


class CardPair(FarPair):
    """The one component is in HBM, and `card` has it; `memory` is a staging buffer."""

    card: CardFile
    gpu: FakeGpu

    async def map(self) -> None:
        theirs = in_hbm(self.wanted)
        landing = component(Pool(name="page_first", model=self.wanted.model, page_size=8, slots=STAGED))
        await self.writer.map(Map(SESSION, await self.owner.offer(SESSION), (theirs,), (landing,)))

    @property
    def in_card(self) -> bool:
        """Whether the card has exactly what it is to have."""
        wanted = self.wanted.memory[:-64]
        return np.array_equal(self.card.array[: len(wanted)], wanted)

    @property
    def untouched(self) -> bool:
        """Whether nothing has landed in the staging buffer."""
        return bool((self.memory.mapping.array == CANARY).all())


def in_hbm(pool: Pool) -> Component:
    return replace(component(pool), memory="hbm", layout=pool.layout.rebase(BASE))


@asynccontextmanager
async def card_pair(*, sends: bytes | None = SEEN, lands: bytes | None = SEEN) -> AsyncIterator[CardPair]:
    """The GPU's UUID at either end, None for one without a handle."""
    ours, wanted = (Pool(name="page_first", model=wide(), page_size=8, slots=LARGE + 64) for _ in range(2))
    ours.fill(np.arange(LARGE + 64))
    pool, card = (CardFile(len(each.memory), gpu or SEEN) for each, gpu in ((ours, sends), (wanted, lands)))
    pool.array[: len(ours.memory)], card.array[:] = ours.memory, CANARY
    memory = ArenaMemory.create(STAGED * wanted.layout.row_bytes, huge_pages="never")
    memory.mapping.array[:] = CANARY
    handle = b"" if lands is None else card.handle.packed
    address = card.memory.mapping.address
    memory.hbm = Hbm(
        base=BASE, byte_count=wanted.layout.end, address=address, device=None, handle=handle, free=lambda: None
    )
    gpu, lost, ended = FakeGpu(), list[int](), dict[int, tuple[Outcome, str]]()
    gpu.named = None if sends is None else pool.handle
    options = WriterOptions(pool_address=pool.memory.mapping.address)

    def wrote(order: Write, outcome: Outcome, text: str, _: int) -> None:
        ended[order.grant] = outcome, text

    writer = EngineWriter(Played(), (component(ours),), options, wrote, gpu=gpu, lost=lost.append)
    owner = EngineArena(Played(), memory, Network())
    pair = CardPair(ours, wanted, owner, writer, memory, ended, {}, lost)
    pair.card, pair.gpu = card, gpu
    try:
        yield pair
    finally:
        await writer.close()
        await owner.close()
        for each in (memory, pool.memory, card.memory):
            each.close()


@pytest.mark.parametrize("sends", [SEEN, None], ids=["from the card", "from the ring"])
async def test_rows_land_in_the_cards_memory_and_none_in_the_staging_buffer(sends: bytes | None) -> None:
    async with card_pair(sends=sends) as it:
        await it.map()
        assert it.writer.hbm_direct(SESSION)
        it.write(1, EVERY, EVERY[::-1] + 1_600)
        assert await it.ends(1) == (Outcome.LANDED, "")
        it.want(EVERY, EVERY[::-1] + 1_600)
        assert it.in_card
        assert it.untouched


async def test_long_runs_leave_from_the_cards_memory_and_what_is_scattered_from_the_ring() -> None:
    async with card_pair() as it:
        await it.map()
        whole, apart = np.arange(1_024), np.random.default_rng(3).permutation(512) * 2 + 1_024
        it.write(1, whole, whole)
        assert await it.ends(1) == (Outcome.LANDED, "")
        assert not it.gpu.launched, "they were gathered"
        it.write(2, apart, apart)
        assert await it.ends(2) == (Outcome.LANDED, "")
        assert it.gpu.launched
        for rows in (whole, apart):
            it.want(rows, rows)
        assert it.in_card
        assert it.untouched


async def test_a_sum_is_of_what_is_gathered() -> None:
    async with card_pair() as it:
        await it.map()
        it.write(1, EVERY, EVERY, verify=True)
        assert await it.ends(1) == (Outcome.LANDED, "")
        assert it.gpu.launched
        it.want(EVERY, EVERY)
        assert it.in_card


@pytest.mark.parametrize("sends", [SEEN, *UNREACHED], ids=["reached", *WHY])
@pytest.mark.parametrize("lands", UNREACHED, ids=WHY)
async def test_an_end_whose_engines_do_not_reach_its_card_stages_alone(
    sends: bytes | None, lands: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The other end uses its own card all the same."""
    with caplog.at_level(logging.WARNING):
        async with card_pair(sends=sends, lands=lands) as it:
            await it.map()
            assert not it.writer.hbm_direct(SESSION)
            it.write(1, EVERY, EVERY)
            assert await it.ends(1) == (Outcome.LANDED, "")
            assert bool(it.gpu.launched) == (sends != SEEN)
            row = it.wanted.layout.row_bytes
            it.want(EVERY, EVERY)
            assert it.memory.mapping.array.tobytes() == it.wanted.memory[: STAGED * row].tobytes()
            assert (it.card.array == CANARY).all()
    assert ("rows leave from a ring in host memory: engines of mooncake cannot reach" in caplog.text) == (sends != SEEN)
    assert ("rows of HBM components land in the staging buffer: engines" in caplog.text) == (lands is not None)


async def test_without_direct_rows_land_in_the_buffer_though_the_card_is_reached() -> None:
    async with card_pair() as it:
        reach = await it.owner.offer(SESSION + 1)
        assert reach.hbm_handle
        verifying = EngineArena(Played(), it.memory, Network(), hbm_direct=False)
        assert not (await verifying.offer(SESSION)).hbm_handle
        await verifying.close()


async def test_a_killed_engine_of_prefill_leaves_the_end_unknown_and_the_fence_of_decode_ends_all_writing() -> None:
    async with card_pair() as it:
        await it.map()
        every = np.arange(LARGE)
        deliver([it.engine()], signal.SIGSTOP)  # so that it cannot be through
        it.write(1, every, every)
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        os.kill(it.engine(), signal.SIGKILL)
        assert (await it.ends(1))[0] is Outcome.UNKNOWN
        assert it.lost == [SESSION]
        assert await it.writer.fence(SESSION)
        it.owner.revoke(SESSION)
        await until(lambda: it.owner.quiet(SESSION))
        it.owner.forget(SESSION)
        it.card.array[:] = CANARY
        await it.map()
        it.write(2, EVERY, EVERY)
        assert await it.ends(2) == (Outcome.LANDED, "")
        it.want(EVERY, EVERY)
        assert it.in_card


async def test_a_fence_of_decode_in_mid_transfer_leaves_the_card_as_it_is() -> None:
    """The death of its engines ends what they copy to the card's memory, whatever the writer still sends."""
    async with card_pair() as it:
        await it.map()
        every = np.arange(LARGE)
        it.write(1, every, every)
        await until(lambda: bool((it.card.array[: 1 << 20] != CANARY).any()))
        it.owner.revoke(SESSION)
        await until(lambda: it.owner.quiet(SESSION))
        frozen = it.card.array.copy()
        assert (await it.ends(1))[0] in (Outcome.UNKNOWN, Outcome.LANDED)
        await it.writer.fence(SESSION)
        assert np.array_equal(it.card.array, frozen)


async def test_a_pool_that_an_engine_reads_ends_its_write_only_with_the_engine() -> None:
    """The GPU's memory is read by another process: a write is over once its status is known, or that is dead."""
    async with card_pair() as it:
        await it.map()
        engine = sessions_of(it.writer)[SESSION].process
        deliver([it.engine()], signal.SIGSTOP)
        it.write(1, np.arange(1_024), np.arange(1_024))
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        with patch.object(engine, "kill", lambda: None):  # as if the kernel took its time
            fencing = asyncio.create_task(it.writer.fence(SESSION))
            await until(lambda: sessions_of(it.writer)[SESSION].broken)
            assert not it.ended, "its pages may be reused while the engine reads them"
        engine.kill()
        assert await fencing
        assert (await it.ends(1))[0] is Outcome.UNKNOWN


async def test_a_session_that_has_ended_while_the_card_was_tried_out_gets_no_process() -> None:
    async with card_pair() as it:
        offering = asyncio.create_task(it.owner.offer(SESSION + 1))
        reach = await it.owner.offer(SESSION)
        mapping = asyncio.create_task(it.writer.map(to_map(SESSION, reach, (in_hbm(it.wanted),))))
        await asyncio.sleep(0)
        it.writer.unmap(SESSION)
        with pytest.raises(TransportError):
            await mapping
        assert not sessions_of(it.writer)
        await offering
        late = EngineArena(Played(), it.memory, Network())
        offering = asyncio.create_task(late.offer(SESSION))
        await asyncio.sleep(0)
        late.revoke(SESSION)
        with pytest.raises(TransportError, match="has ended meanwhile"):
            await offering
        assert not sessions_of(late)
        await late.close()


def test_a_room_crosses_into_the_cards_memory_and_no_staging_buffer_is_backed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients: prefill says that it writes HBM, so decode has nothing to copy, and backs nothing for it."""
    monkeypatch.setattr(MooncakeLibrary, "card", played_card.__file__)
    model, tokens = mla(layers=range(2)), 200
    source, target = (Pool(name="page_first", model=model, page_size=1, slots=256) for _ in range(2))
    source.fill(np.arange(256))
    card, arena = CardFile(len(target.memory)), ArenaMemory.create(0, huge_pages="never", staging_bytes=64 << 10)
    card.array[:] = CANARY
    arena.hbm = Hbm(
        base=0, byte_count=len(target.memory), address=card.memory.mapping.address, device=None,
        handle=card.handle.packed, free=lambda: None,
    )  # fmt: skip
    arena.prefault()
    backed = os.fstat(arena.fd).st_blocks
    writer = WriterOptions(pool_address=source.memory.ctypes.data, transport="mooncake")
    theirs = replace(component(target), memory="hbm")
    options = ArenaOptions(transport="mooncake")
    with (
        PrefillClient(settings("p"), [component(source)], writer=writer) as prefill,
        DecodeClient(settings("d"), [theirs], arena, options=options) as decode,
    ):
        pair = Pair(prefill, decode, source, target)
        pair.expect(1, tokens)
        pages = pair.send(1, tokens)
        expected = Expected(dataclasses.replace(target))
        expected.land(slots_of_pages(pages, 1, tokens), pair.ready(1).slots["kv"])
        assert expected.holds(card.array[: len(target.memory)])
        (session,) = core_of(decode).prefill_peers.sessions.values()
        assert session.hbm_direct
        assert not node_of(decode).lifted_bytes
        assert os.fstat(arena.fd).st_blocks == backed
        decode.release(1)
    arena.close()
    card.memory.close()


def test_a_trial_shows_what_fails() -> None:
    handle = Handle("gpu", 1, 0, SEEN, bytes(64))
    assert not why_no_card(Played(), Network(), handle)
    assert "not one of the 0" in why_no_card(Played(), Network(), Handle("gpu", 1, 0, played_card.NO_GPU, bytes(64)))
    none = why_no_card(MooncakeLibrary(), Network(), handle)
    assert "CUDA" in none or "GPU" in none


def test_a_build_that_cannot_read_the_memory_is_found_by_its_trial(tmp_path: Path) -> None:
    """As a build without CUDA: the address is not one that the kernel reads for it."""
    card = tmp_path / "blind.py"
    card.write_text(
        f"import runpy\nplayed = runpy.run_path({played_card.__file__!r})['CARD']\n"
        "class CARD(played):\n"
        "    def allocate(self, byte_count): return 0x7f00_0000_0000 + byte_count\n"
        "    def upload(self, address, content): pass\n"
    )

    class Blind(MooncakeLibrary):
        pass

    Blind.card = str(card)
    assert why_no_card(Blind(), Network(), Handle("gpu", 1, 0, SEEN, bytes(64)))


def test_addresses_of_the_last_sessions_are_not_used_again() -> None:
    used = list[tuple[int, int]]()
    for number in range(6_000):
        used = remembered(used, (number << 20, (number + 1) << 20))
    assert len(used) * child.SPAN.size + child.CARD.size <= child.CARD_PACKET_BYTES_MAX
    assert used[-1] == (5_999 << 20, 6_000 << 20)
    assert used == sorted(used)
    assert remembered(used, (0, 4 << 40)) == [(0, 4 << 40)]


@pytest.mark.parametrize(
    ("handle", "base", "byte_count"),
    [(b"1234567", 0, 1), (packed_address(0), 0, 1), (packed_address(1 << 62), 0, 1), (packed_address(5), 5, 1)],
)
def test_an_address_that_a_peer_may_not_name_is_refused(handle: bytes, base: int, byte_count: int) -> None:
    reach = Reach("mooncake", "h:1", "", b"", 1, 1, handle, base, byte_count)
    with pytest.raises(TransportError, match="hbm_handle"):
        hbm_address(reach)


class PlayedDriver:
    """libcuda for one process: IPC memory lies at the next of `places`."""

    def __init__(self, places: Iterator[int]) -> None:
        self._places, self.log = places, list[str]()

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.log.append(name)
            if name == "cuIpcOpenMemHandle_v2":
                arguments[0]._obj.value = next(self._places)  # type: ignore[attr-defined]
            return 0

        return call


def test_the_memory_is_opened_anew_until_it_lies_where_no_earlier_session_had_it() -> None:
    card = CudaCard.__new__(CudaCard)
    driver = card._cuda = PlayedDriver(iter((0x1000, 0x1800, 0x9000)))
    assert card.open(bytes(64), 0x100, 0x1000, [(0x1100, 0x2100)]) == 0x9100
    assert driver.log.count("cuIpcCloseMemHandle") == driver.log.count("cuMemAddressReserve") == 2
    assert driver.log[-1] == "cuPointerSetAttribute", "a copy might be under way when it is reported"
    card._cuda = PlayedDriver(iter([0x1000] * 100))
    with pytest.raises(RuntimeError, match="earlier session"):
        card.open(bytes(64), 0, 1, [(0, 0x2000)])


def test_a_card_that_is_closed_has_no_context_left() -> None:
    card = CudaCard.__new__(CudaCard)
    card._gpu = ctypes.c_int(3)
    driver = card._cuda = PlayedDriver(iter(()))
    card.close()
    assert driver.log == ["cuDevicePrimaryCtxRelease_v2"]

"""A GPU's pool over Mooncake: launches that fill the send ring, stopped, refused, lost; with a GPU that is none."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from pdtransfer.errors import TransportError, WorldError
from pdtransfer.handoff.effects import Outcome
from pdtransfer.transports.engines import ring, writer
from pdtransfer.transports.mooncake.host import why_not
from tests.library.transports.engines.far_pair import (
    CASES,
    LARGE,
    SESSION,
    SLOTS,
    dies_while_it_sends,
    far_pair,
    lands_anew,
    lands_exactly,
    stops_in_the_middle,
)
from tests.support.fake_gpu import FakeGpu, Held
from tests.support.internals import sessions_of
from tests.support.layout_tensors import Model
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]  # whole processes

EVERY, FEW = np.arange(LARGE), np.arange(64)


@pytest.mark.parametrize(("model", "layout"), CASES)
async def test_rows_of_a_card_land_where_they_belong_and_are_summed_as_the_card_has_them(
    model: Model, layout: str
) -> None:
    async with far_pair(FakeGpu(), model=model, layout=layout, slots=SLOTS) as it:
        await lands_exactly(it)


async def test_a_slot_is_sent_once_its_launch_has_ended_while_the_next_one_is_gathered() -> None:
    gpu, seen = FakeGpu(), list[int]()
    async with far_pair(gpu) as it:
        first, later = Held(), Held()
        waits = iter((first, lambda: None, later))
        gpu.waiting = lambda: next(waits, lambda: None)()
        await it.map()
        it.write(1, EVERY, EVERY)
        await until(first.reached.is_set)
        seen.append(it.landed())
        first.open.set()
        await until(later.reached.is_set)
        await until(lambda: it.landed() > 0)
        assert 1 not in it.ended
        later.open.set()
        assert await it.ends(1) == (Outcome.LANDED, "")
        assert seen == [0], "it was sent before it was there"
        assert max(flying for flying, _ in gpu.launched) == 2
        it.want(EVERY, EVERY)
        assert it.right


async def test_a_write_that_is_cancelled_between_launches_ends_as_failed_and_others_land() -> None:
    gpu = FakeGpu()
    async with far_pair(gpu) as it:
        gate = Held()
        gpu.waiting = lambda: gate() if len(gpu.launched) > 5 else None

        def middle() -> bool:
            if not gate.reached.is_set() or not it.landed():
                return False
            threading.Timer(0.05, gate.open.set).start()
            return True

        await stops_in_the_middle(it, middle)


async def test_what_is_queued_of_a_cancelled_write_is_not_launched() -> None:
    gpu, gate = FakeGpu(), Held()
    async with far_pair(gpu) as it:
        gpu.waiting = gate
        await it.map()
        it.write(1, EVERY, EVERY)
        await until(gate.reached.is_set)
        it.writer.cancel(SESSION, 1)
        gate.open.set()
        assert await it.ends(1) == (Outcome.FAILED, "cancelled")
        assert len(gpu.launched) <= 2, "more than was in flight"
        assert it.landed() == 0


async def test_a_launch_that_is_refused_fails_its_write_alone() -> None:
    gpu = FakeGpu()
    async with far_pair(gpu) as it:
        await it.map()

        def refuse() -> None:
            if len(gpu.launched) == 4:
                raise WorldError("GPU 5: cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

        gpu.launching = refuse
        it.write(1, EVERY, EVERY)
        outcome, text = await it.ends(1)
        assert (outcome, "OUT_OF_RESOURCES" in text) == (Outcome.FAILED, True)
        it.write(2, FEW, FEW + LARGE)
        assert await it.ends(2) == (Outcome.LANDED, "")
        assert len(sessions_of(it.writer)[SESSION].ring.free) == ring.SLOTS


async def test_a_target_that_no_plan_reaches_fails_its_write_alone() -> None:
    async with far_pair(FakeGpu()) as it:
        await it.map()
        it.write(1, FEW, FEW + it.wanted.slots)
        outcome, text = await it.ends(1)
        assert (outcome, "target_slots" in text) == (Outcome.FAILED, True)
        it.write(2, FEW, FEW)
        assert await it.ends(2) == (Outcome.LANDED, "")
        assert len(sessions_of(it.writer)[SESSION].ring.free) == ring.SLOTS


async def test_a_card_that_fails_leaves_its_write_unknown_the_ring_mapped_and_the_process_condemned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "_lost", kept := list[ring.SendRing]())
    gpu = FakeGpu()
    async with far_pair(gpu) as it:
        await it.map()

        def fail() -> None:
            raise RuntimeError("GPU 5: cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")

        gpu.waiting = gpu.draining = fail
        it.write(1, EVERY, EVERY)
        outcome, text = await it.ends(1)
        assert (outcome, "ILLEGAL_ADDRESS" in text) == (Outcome.UNKNOWN, True)
        assert await it.writer.fence(SESSION) is False, "the GPU may go on reading the pool"
        assert len(kept) == 1
        assert gpu.registered
        it.write(2, FEW, FEW)
        assert (await it.ends(2))[0] is Outcome.FAILED


async def test_an_engine_that_is_killed_in_mid_transfer_leaves_nothing_registered_and_the_next_session_lands() -> None:
    gpu = FakeGpu()
    async with far_pair(gpu) as it:
        await dies_while_it_sends(it)
        assert it.lost == [SESSION]
        assert await it.writer.fence(SESSION) is True
        assert not gpu.registered
        await lands_anew(it)
    assert not gpu.registered


async def test_a_ring_that_cannot_be_registered_maps_nothing_and_leaves_no_process() -> None:
    gpu = FakeGpu()
    gpu.refused = 0
    async with far_pair(gpu) as it:
        with pytest.raises(WorldError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            await it.map()
        assert SESSION not in sessions_of(it.writer)
        await until(lambda: not it.writer._ending)
        assert not gpu.registered


async def test_a_session_that_ends_while_its_ring_is_registered_has_no_engine() -> None:
    gpu, gate = FakeGpu(), Held()
    async with far_pair(gpu) as it:
        gpu.prepare = gate
        mapping = asyncio.ensure_future(it.map())
        await until(gate.reached.is_set)
        it.writer.unmap(SESSION)
        gate.open.set()
        with pytest.raises(TransportError, match="unmapped while"):
            await mapping
        assert not sessions_of(it.writer)
    assert not gpu.registered

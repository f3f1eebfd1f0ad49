"""Writes out of a GPU's memory: in turn, stopped, failed, lost; with a GPU that is none."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdtransfer.client.clients import PrefillClient
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.errors import Cause, TransportError, WorldError
from pdtransfer.handoff.effects import FenceWriter, Outcome, Send
from pdtransfer.handoff.ready_gate import AllEvents, ReadyGate
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.kernels import checksum_copy, registered
from pdtransfer.kernels.pools import Pool, State
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.memory import mapping as mappings
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.tracing.spans import Timeline
from pdtransfer.transports import gpu_writer
from pdtransfer.transports.copier import CANCELLED
from pdtransfer.transports.gpu_writer import GpuWrite
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.wire import Granted
from tests.support import client_pair
from tests.support.client_pair import settings
from tests.support.entered_ahead import PAGE_BYTES, Ahead
from tests.support.fake_gpu import FakeGpu, FakeLauncher, Held
from tests.support.internals import sessions_of
from tests.support.shm_pair import LAYERS, PAGE, ROW, SLOTS, WRITER, Pair, component, layer_first, to_map
from tests.support.waiting import until

PIECE_ROWS = 256
EVERY = np.arange(SLOTS)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_writer, "PIECE_BYTES", PIECE_ROWS * LAYERS * ROW)
    monkeypatch.setattr(registered, "CHUNK_BYTES", 2 << 20)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


async def test_writes_of_a_card_land_where_they_belong_and_nowhere_else(
    gpu: FakeGpu, unmapped: Pair, arena: ArenaMemory
) -> None:
    both = unmapped
    assert await both.map() == arena.byte_count
    assert sum(gpu.registered.values()) == arena.byte_count
    assert gpu.prepared == 1
    rng = np.random.default_rng(3)
    source, target = rng.permutation(SLOTS)[:8_000], rng.permutation(SLOTS)[:8_000]
    cuts = np.sort(rng.choice(np.arange(1, 8_000), 20, replace=False))
    for grant, (ours, theirs) in enumerate(zip(np.split(source, cuts), np.split(target, cuts), strict=True), 1):
        for layers in ((0, 1), (1, LAYERS)):
            both.want(both.write(ours, theirs, grant=grant, layers=layers))
    both.want(both.write(EVERY[8_000:8_100], np.setdiff1d(EVERY, target)[:100], grant=1))
    assert not both.ended, "done is never called from within write"
    await until(lambda: len(both.ended) == both.writes)
    assert {outcome for _, outcome, _ in both.ended} == {Outcome.LANDED}
    assert both.right
    await both.close()
    assert gpu.registered == {}, "let go before it was unmapped"


async def test_two_launches_at_most_are_in_flight_and_grants_take_turns(gpu: FakeGpu, both: Pair) -> None:
    gate = Held()
    gpu.waiting = gate
    both.want(both.write(EVERY[: 10 * PIECE_ROWS], EVERY[: 10 * PIECE_ROWS], grant=1))
    await until(gate.reached.is_set)
    both.want(both.write(EVERY[-5:], EVERY[-5:], grant=2))
    gate.open.set()
    await until(lambda: len(both.ended) == 2)
    assert max(flying for flying, _ in gpu.launched) == 2
    assert [write for write, _, _ in both.ended] == [2, 1], "the small one waits for two launches, not for ten"
    assert both.right


@pytest.mark.parametrize(("host", "apart", "rows"), [(True, False, 4), (False, True, 32), (False, False, 256)])
def test_a_launch_to_another_gpu_is_as_long_as_one_across_the_bus(
    monkeypatch: pytest.MonkeyPatch, host: bool, apart: bool, rows: int
) -> None:
    """So it carries more: many small ones take longer to make than to run."""
    monkeypatch.undo()  # the sizes that are in use
    byte_count = 4 << 20
    layout = Layout((Plane(0, "kv", "uint8", 0, 1, 0, byte_count, byte_count, byte_count),), 1, SLOTS)
    target = Pool(layout=layout, address=0, device=0, host=host)
    order: Any = SimpleNamespace(session=1, grant=1, source_slots=EVERY)
    write = GpuWrite(order=order, source=target, target=target, report=print, apart=apart)
    assert write.piece_end == rows
    write.rows_taken = SLOTS - 1
    assert write.piece_end == SLOTS


class CudaEvent:
    """What has the handle of a CUDA event is not asked by Python."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle

    def query(self) -> bool:
        raise AssertionError("on the loop, or with the GIL")


async def waits(gpu: FakeGpu) -> None:
    """Until the writer's thread sleeps until a gate opens, with nothing else to do."""
    gpu.asleep.clear()
    await until(gpu.asleep.is_set)


async def test_nothing_is_launched_before_its_events_have_fired_and_others_pass_it(both: Pair, gpu: FakeGpu) -> None:
    gates = ReadyGate(CudaEvent(1)), ReadyGate(AllEvents([CudaEvent(2), CudaEvent(3)]))
    assert both.writer.sleeps_on_cuda
    assert all(gate.next is not None for gate in gates)
    for grant, gate in enumerate(gates, 1):
        both.want(both.write(EVERY[100 * grant :][:9], EVERY[100 * grant :][:9], grant=grant, after=gate))
    both.want(both.write(EVERY[120:130], EVERY[120:130], grant=1))  # behind the first of its grant
    both.want(both.write(EVERY[:7], EVERY[:7], grant=3))
    await until(lambda: bool(both.ended))
    gpu.fired.add(3)  # of two, and not the first
    await waits(gpu)
    assert [write for write, _, _ in both.ended] == [4]
    gpu.fired.add(2)
    await until(lambda: len(both.ended) == 2)
    await waits(gpu)
    assert [write for write, _, _ in both.ended] == [4, 2]
    gpu.fired.add(1)
    await until(lambda: len(both.ended) == 4)
    assert {outcome for _, outcome, _ in both.ended} == {Outcome.LANDED}
    assert both.right
    assert gates[0].next is None, "it is open"


async def test_a_write_whose_event_fires_has_its_turn_while_another_grant_has_much_to_launch(
    both: Pair, gpu: FakeGpu
) -> None:
    gpu.waiting = lambda: gpu.fired.add(1) if len(gpu.launched) == 3 else None
    both.want(both.write(EVERY[7_000:7_009], EVERY[7_000:7_009], grant=1, after=ReadyGate(CudaEvent(1))))
    await waits(gpu)
    both.want(both.write(EVERY[: 20 * PIECE_ROWS], EVERY[: 20 * PIECE_ROWS], grant=2))
    await until(lambda: len(both.ended) == 2)
    assert [write for write, _, _ in both.ended] == [1, 2]
    assert both.right


class AskedEvent(CudaEvent):
    """One that the loop asks as well, for another session."""

    def query(self) -> bool:
        return True


async def test_a_write_goes_whose_gate_the_loop_opens_while_its_launch_is_prepared(
    gpu: FakeGpu, both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, prepare = ReadyGate(AskedEvent(1)), FakeLauncher.prepare
    both.write(EVERY[100:109], EVERY[100:109], grant=1, after=ReadyGate(CudaEvent(2)))
    await waits(gpu)
    both.want(both.write(EVERY[:9], EVERY[:9], grant=2, after=gate))
    await waits(gpu)

    def meanwhile(*given: Any, **more: Any) -> Any:
        gate.poll(1)
        return prepare(*given, **more)

    monkeypatch.setattr(FakeLauncher, "prepare", meanwhile)
    both.writer.cancel(WRITER, 1)
    await until(lambda: len(both.ended) == 2)
    assert both.ended[1] == (2, Outcome.LANDED, "")
    assert both.right


async def test_a_launch_is_prepared_while_its_gate_is_shut_and_again_where_another_took_its_place(
    both: Pair, gpu: FakeGpu
) -> None:
    both.want(both.write(EVERY[:9], EVERY[:9], grant=1, after=ReadyGate(CudaEvent(1))))
    await waits(gpu)
    await waits(gpu)
    assert (gpu.preparations, gpu.launched) == (1, [])
    both.want(both.write(EVERY[20:29], EVERY[20:29], grant=2))
    await until(lambda: len(both.ended) == 1)
    await waits(gpu)
    assert (gpu.preparations, len(gpu.launched)) == (3, 1)
    gpu.fired.add(1)
    await until(lambda: len(both.ended) == 2)
    assert (gpu.preparations, len(gpu.launched)) == (3, 2), "nothing was left to do but to launch"
    assert both.right


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_what_is_prepared_beside_a_launch_goes_in_the_slot_that_it_was_prepared_for(
    both: Pair, gpu: FakeGpu, pieces: int
) -> None:
    both.want(both.write(EVERY[:9], EVERY[:9], grant=1, after=ReadyGate(CudaEvent(1))))
    await waits(gpu)
    rows = EVERY[100 : 100 + pieces * PIECE_ROWS]
    both.want(both.write(rows, rows, grant=2))
    await until(lambda: len(both.ended) == 1)
    await waits(gpu)
    gpu.fired.add(1)
    await until(lambda: len(both.ended) == 2)
    assert {outcome for _, outcome, _ in both.ended} == {Outcome.LANDED}
    assert gpu.slots == [number % 2 for number in range(pieces + 1)]
    assert gpu.preparations == pieces + 2, "once before the other grant came, and once beside its last launch"
    assert both.right


async def test_the_model_is_spared_by_what_is_launched_as_its_gate_opens_and_by_nothing_that_is_late(
    both: Pair, gpu: FakeGpu
) -> None:
    async def spared(*written: dict[str, Any]) -> list[bool]:
        before, ended = len(gpu.spared), len(both.ended)
        for more in written:
            rows = more.pop("source", EVERY[9 * len(both.ended) :][:9])
            both.want(both.write(rows, rows, grant=1, **more))
        if not gpu.fired:
            await waits(gpu)
            gpu.fired.add(1)
        await until(lambda: len(both.ended) == ended + len(written))
        return gpu.spared[before:]

    assert await spared({"after": ReadyGate(CudaEvent(1))}) == [True]
    gpu.fired.clear()
    whole = {"source": EVERY[1_000 : 1_000 + 2 * PIECE_ROWS], "after": ReadyGate(CudaEvent(1))}
    assert await spared(whole) == [True, True], "all pieces of a write go the same way"
    assert await spared({"after": ReadyGate(CudaEvent(1))}) == [False], "it had fired already"
    assert await spared({}) == [False]
    gpu.fired.clear()
    assert await spared({"after": ReadyGate(CudaEvent(1)), "urgent": True}) == [False]
    gpu.fired.clear()
    assert await spared({"after": ReadyGate(CudaEvent(1))}, {"after": ReadyGate(CudaEvent(1))}) == [True, False], (
        "it was late"
    )
    assert both.right


async def test_a_write_without_rows_lands_without_a_launch(both: Pair, gpu: FakeGpu) -> None:
    both.want(both.write(EVERY[:0], EVERY[:0], grant=1))
    await until(lambda: len(both.ended) == 1)
    assert both.ended[0][1] is Outcome.LANDED
    assert gpu.preparations == 0


async def test_an_urgent_write_reports_that_it_is_near_from_its_last_event_until_it_has_landed(
    gpu: FakeGpu, both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_writer, "HINT_NS", 1)
    held = Held()
    both.want(both.write(EVERY[:9], EVERY[:9], grant=1, after=ReadyGate(CudaEvent(1))))  # nobody waits for it
    both.want(both.write(EVERY[20:29], EVERY[20:29], grant=1, urgent=True))  # nor did it for its rows
    await waits(gpu)
    gpu.fired.add(1)
    await until(lambda: len(both.ended) == 2)
    gate = ReadyGate(AllEvents([CudaEvent(2), CudaEvent(3)]))
    both.want(both.write(EVERY[40:49], EVERY[40:49], grant=2, after=gate, urgent=True))
    await waits(gpu)
    assert both.hinted == []
    gpu.fired.add(2)
    await until(lambda: len(both.hinted) > 1)
    gpu.waiting = held
    gpu.fired.add(3)
    await until(held.reached.is_set)
    held.open.set()
    await until(lambda: len(both.ended) == 3)
    hinted = list(both.hinted)
    assert set(hinted) == {3}
    assert len(hinted) <= gpu_writer.HINTS_MAX
    await asyncio.sleep(0.01)
    assert both.hinted == hinted, "it has landed"
    assert both.right


async def test_a_write_whose_event_never_fires_reports_it_often_and_then_no_longer_that_it_is_near(
    gpu: FakeGpu, both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_writer, "HINT_NS", 1)
    monkeypatch.setattr(gpu_writer, "HINTS_MAX", 3)
    both.write(EVERY[:9], EVERY[:9], grant=1, after=ReadyGate(CudaEvent(1)), urgent=True)
    both.want(both.write(EVERY[:9], EVERY[:9], grant=2))
    await until(lambda: len(both.hinted) == 3)
    for _ in range(5):
        await waits(gpu)
    assert both.hinted == [1, 1, 1]
    both.writer.cancel(WRITER, 1)
    await until(lambda: len(both.ended) == 2)


async def test_a_write_that_is_cancelled_before_its_event_fires_is_never_launched(both: Pair, gpu: FakeGpu) -> None:
    both.write(EVERY, EVERY, grant=1, after=ReadyGate(CudaEvent(1)))
    both.want(both.write(EVERY[:9], EVERY[:9], grant=2, after=ReadyGate(CudaEvent(2))))
    await waits(gpu)
    both.writer.cancel(WRITER, 1)
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "cancelled")]
    gpu.fired |= {1, 2}
    await until(lambda: len(both.ended) == 2)
    assert len(gpu.launched) == 1
    assert both.right


async def test_an_event_that_fails_fails_its_write_alone_and_nothing_is_waited_for(gpu: FakeGpu, both: Pair) -> None:
    drained = list[int]()
    gpu.draining = lambda: drained.append(1)
    both.write(EVERY, EVERY, grant=1, after=ReadyGate(CudaEvent(1)))
    both.want(both.write(EVERY[:9], EVERY[:9], grant=2, after=ReadyGate(CudaEvent(2))))
    await waits(gpu)
    gpu.broken_events[1] = "GPU 5: cuEventQuery: CUDA_ERROR_INVALID_HANDLE"
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "GPU 5: cuEventQuery: CUDA_ERROR_INVALID_HANDLE")]
    gpu.fired.add(2)
    await until(lambda: len(both.ended) == 2)
    assert both.ended[1] == (2, Outcome.LANDED, "")
    assert both.right
    assert not drained


class BrokenEvent:
    """One that Python asks."""

    def query(self) -> bool:
        raise RuntimeError("GPU 5: CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.parametrize("event", [BrokenEvent(), CudaEvent(9)])
def test_an_event_that_fails_is_the_engines_fault_whoever_asks_it(monkeypatch: pytest.MonkeyPatch, event: Any) -> None:
    gpu = FakeGpu()
    gpu.broken_events[9] = "GPU 5: CUDA_ERROR_ILLEGAL_ADDRESS"
    monkeypatch.setattr("pdtransfer.transports.select.WriterGpu", lambda *_: gpu)
    monkeypatch.setattr(
        client_pair,
        "PrefillClient",
        lambda *given, **more: PrefillClient(*given, **more | {"writer": replace(more["writer"], device=5)}),
    )
    with client_pair.client_pair() as pair:
        pair.expect(1, 64)
        pair.prefill.open(1, tokens=64)
        pair.prefill.push(1, pair.pages(1, 64), rows=(0, 64), after=event)
        failed = pair.failed(1)
        pair.drained(1)
    assert failed.cause is Cause.ENGINE
    assert failed.detail.endswith("its event: GPU 5: CUDA_ERROR_ILLEGAL_ADDRESS")


async def test_each_launch_is_recorded_where_somebody_asks_from_the_end_of_the_one_before(
    arena: ArenaMemory, directory: Path
) -> None:
    gpu, gate = FakeGpu(), Held()
    gpu.spans, gpu.waiting = Timeline("prefill"), gate
    both = Pair(arena, directory, gpu=gpu)
    await both.map()
    both.want(both.write(EVERY[: 2 * PIECE_ROWS + 9], EVERY[: 2 * PIECE_ROWS + 9], grant=1, layers=(1, 3), first_row=5))
    await until(gate.reached.is_set)
    gpu.waiting = lambda: None
    gate.open.set()
    await until(lambda: len(both.ended) == 1)
    recorded = gpu.spans.take()
    rows = [PIECE_ROWS * LAYERS // 2] * 2
    rows[-1] = 2 * PIECE_ROWS + 9 - sum(rows[:-1])
    assert [span.name for span in recorded] == [
        f"rows {5 + sum(rows[:at])}-{5 + sum(rows[: at + 1])}, layers 1-3" for at in range(len(rows))
    ]
    assert {(span.lane, span.room, span.layer) for span in recorded} == {("launch", recorded[0].room, 1)}
    assert sum(span.byte_count for span in recorded) == sum(rows) * 2 * ROW
    assert all(span.begin_s <= span.end_s for span in recorded)
    assert all(after.begin_s >= before.end_s for before, after in pairwise(recorded)), (
        "what waits behind another does nothing"
    )
    await both.close()


async def test_a_stopped_write_fails_once_its_launches_have_ended(gpu: FakeGpu, both: Pair, arena: ArenaMemory) -> None:
    gate = Held()
    gpu.waiting = gate
    both.write(EVERY, EVERY, grant=1)
    await until(gate.reached.is_set)
    both.writer.cancel(WRITER, 2)  # another grant
    both.writer.cancel(WRITER, 1)
    await until(lambda: gate.reached.is_set())
    assert not both.ended, "launches are in flight"
    gate.open.set()
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "cancelled")]
    assert not arena.mapping.array.any(), "what was queued saw the word"
    gpu.waiting = lambda: None
    both.want(both.write(EVERY, EVERY, grant=3))
    await until(lambda: len(both.ended) == 2)
    assert both.ended[1] == (2, Outcome.LANDED, "")
    assert both.right, "its word is not the stopped one's"


async def test_a_launch_that_is_refused_fails_its_write_alone(gpu: FakeGpu, both: Pair) -> None:
    drained = list[int]()

    def refuse() -> None:
        gpu.launching = lambda: None
        raise WorldError("GPU 5: cuLaunchKernelEx: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    gpu.launching, gpu.draining = refuse, lambda: drained.append(1)
    both.write(EVERY[:3], EVERY[:3], grant=1)
    await until(lambda: bool(both.ended))
    assert both.ended[0][1:] == (Outcome.FAILED, "GPU 5: cuLaunchKernelEx: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    assert drained, "a copy that may have been queued has ended before anybody hears"


async def test_slots_outside_the_pool_fail_before_anything_is_launched(gpu: FakeGpu, both: Pair) -> None:
    gpu.left_out, broken = 2, list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    both.write(EVERY[:3], EVERY[:3], grant=1)
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "2 rows lie outside their pool")]
    await both.close()
    assert not broken, "its end was reported twice"


async def test_a_card_that_fails_leaves_the_outcome_unknown_and_the_arena_locked(
    gpu: FakeGpu, arena: ArenaMemory, directory: Path
) -> None:
    both = Pair(arena, directory, gpu=gpu)
    await both.map()

    def fail() -> None:
        raise RuntimeError("GPU 5: cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")

    gpu.waiting = gpu.draining = gpu.launching = fail
    both.write(EVERY, EVERY, grant=1)
    both.write(EVERY[:3], EVERY[:3], grant=2)
    await until(lambda: len(both.ended) == 2)
    outcomes = {write: outcome for write, outcome, _ in both.ended}
    assert outcomes[1] is Outcome.UNKNOWN
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in text for _, _, text in both.ended)
    both.write(EVERY[:3], EVERY[:3], grant=3)
    await until(lambda: len(both.ended) == 3)
    assert both.ended[2][1] is Outcome.FAILED, "it was never launched"
    held = len(gpu.registered)
    both.owner.revoke(WRITER)
    await both.writer.close()
    assert not both.owner.quiet(WRITER), "this process can write until it is gone"
    assert len(gpu.registered) == held > 0
    await both.owner.close()


async def test_an_arena_that_cannot_be_registered_is_not_mapped(arena: ArenaMemory, directory: Path) -> None:
    gpu = FakeGpu()
    gpu.refused = 0
    both = Pair(arena, directory, gpu=gpu)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorldError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        await both.map()
    both.owner.revoke(WRITER)
    assert both.owner.quiet(WRITER)
    assert gpu.registered == {}
    assert len(os.listdir("/proc/self/fd")) == before
    await both.close()


def growing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ArenaMemory, FakeGpu, Pair]:
    """An arena of which 3 MiB are backed so far."""
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    monkeypatch.setattr(mappings, "CHUNK_BYTES", 1 << 20)
    made, gpu = ArenaMemory.create(SLOTS * LAYERS * ROW, huge_pages="never"), FakeGpu()
    both = Pair(made, directory, gpu=gpu)
    made.prefault(None, lambda: made.bytes_ready >= 3 << 20)
    return made, gpu, both


async def test_a_growing_arena_is_ready_as_far_as_it_is_backed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gpu, both = growing(directory, monkeypatch)
    progress, reach = list[int](), await both.owner.offer(WRITER)
    assert await both.writer.map(to_map(WRITER, reach, (component(both.target),)), progress.append) == 3 << 20
    made.prefault()
    await until(lambda: bool(progress) and progress[-1] == made.byte_count)
    await until(lambda: sum(gpu.registered.values()) == made.byte_count)
    await both.close()
    made.close()


async def test_a_growing_arena_is_reported_although_the_card_has_refused_a_part_of_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gpu, both = growing(directory, monkeypatch)
    progress, reach = list[int](), await both.owner.offer(WRITER)
    await both.writer.map(to_map(WRITER, reach, (component(both.target),)), progress.append)
    gpu.refused = gpu.calls
    made.prefault()
    await until(lambda: bool(progress) and progress[-1] == made.byte_count)
    both.want(both.write(EVERY[-9:], EVERY[:9], grant=1))
    await until(lambda: both.ended)
    assert both.ended == [(1, Outcome.LANDED, "")]
    await both.close()
    made.close()


async def test_a_session_that_is_mapped_is_not_mapped_again(arena: ArenaMemory, directory: Path) -> None:
    both = Pair(arena, directory, gpu=FakeGpu())
    reach = await both.owner.offer(WRITER)
    await both.writer.map(to_map(WRITER, reach, (component(both.target),)))
    with pytest.raises(TransportError, match="is mapped already"):
        await both.writer.map(to_map(WRITER, reach, (component(both.target),)))
    both.want(both.write(EVERY[-9:], EVERY[:9], grant=1))
    await until(lambda: both.ended)
    assert both.right
    await both.close()


@pytest.fixture
def ahead(arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """All of the arena is backed."""
    arena.prefault()
    return Ahead(monkeypatch)


def pages(arena: ArenaMemory, gpu: FakeGpu) -> set[int]:
    """The pages of the arena that are registered, by the writer's own mapping of it."""
    base = min(gpu.registered)  # its first page is the first
    return {
        (address - base + offset) // PAGE_BYTES
        for address, size in list(gpu.registered.items())  # a thread may add to them
        for offset in range(0, size, PAGE_BYTES)
    }


async def test_a_write_waits_for_the_pages_of_its_own_rows_alone(
    gpu: FakeGpu, unmapped: Pair, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = unmapped
    both.target = layer_first()
    assert await both.map() == both.arena.byte_count, "all of it may be granted"
    assert pages(both.arena, gpu) == {0}
    slots = np.concatenate((np.arange(300, 310), np.arange(5_000, 5_003)))[::-1]
    both.want(both.write(EVERY[:13], slots, grant=1))
    await until(lambda: bool(both.ended))
    assert both.ended[0][1] is Outcome.LANDED
    assert both.right
    rows = [both.target.address(layer, slots) for layer in range(LAYERS)]
    needed = {int(byte) // PAGE_BYTES for row in rows for byte in (*row, *(row + ROW - 1))}
    bases = [both.target.address(layer, PAGE * page) for layer in range(LAYERS) for page in (4, 78)]
    page_spans = [range(base // PAGE_BYTES, (base + PAGE * ROW - 1) // PAGE_BYTES + 1) for base in bases]
    allowed = {0, *chain(*page_spans)}
    assert needed <= pages(both.arena, gpu) <= allowed
    ahead.finish(monkeypatch)
    await until(lambda: pages(both.arena, gpu) == set(range(both.arena.byte_count // PAGE_BYTES)))
    both.want(both.write(EVERY, EVERY[::-1].copy(), grant=2))
    await until(lambda: len(both.ended) == 2)
    assert both.right
    await both.close()
    assert gpu.registered == {}, "each part was let go once, before it was unmapped"


async def test_rows_that_are_expected_are_entered_before_they_are_written(
    gpu: FakeGpu, both: Pair, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.writer.expect_rows(WRITER, 0, np.array([[100, 50]]))
    needed = -(-50 * LAYERS * ROW // PAGE_BYTES)
    await until(lambda: len(pages(both.arena, gpu)) > needed)
    calls = gpu.calls
    both.want(both.write(EVERY[:50], EVERY[100:150], grant=1))
    await until(lambda: bool(both.ended))
    assert gpu.calls == calls
    assert both.right
    both.writer.unmap(WRITER)
    both.writer.expect_rows(WRITER, 0, np.array([[200, 50]]))  # of a session that is over: nothing happens
    ahead.finish(monkeypatch)
    await both.close()
    assert gpu.registered == {}


async def test_pages_that_the_card_refuses_fail_their_write_alone(
    gpu: FakeGpu, both: Pair, ahead: Ahead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.refused = 1
    both.write(EVERY[:50], EVERY[100:150], grant=1)
    await until(lambda: bool(both.ended))
    ((write, outcome, text),) = both.ended
    assert (write, outcome) == (1, Outcome.FAILED)
    first = int(both.target.address(0, 100)) // PAGE_BYTES * PAGE_BYTES
    assert text.startswith(
        f"host memory: bytes {first} to {first + PAGE_BYTES} of {both.arena.byte_count} cannot be regist"
    )
    assert text.endswith("CUDA_ERROR_OUT_OF_MEMORY")
    both.want(both.write(EVERY[:50], EVERY[100:150], grant=2))
    await until(lambda: len(both.ended) == 2)
    assert both.ended[1][1] is Outcome.LANDED, "it is tried again for rows that need it"
    assert both.right
    gpu.refused = gpu.calls
    ahead.finish(monkeypatch)
    await until(lambda: "entered no further ahead of its rows: host memory" in caplog.text)
    both.want(both.write(EVERY, EVERY, grant=3))
    await until(lambda: len(both.ended) == 3)
    assert both.ended[2][1] is Outcome.LANDED
    assert both.right
    await both.close()
    assert gpu.registered == {}


async def test_an_arena_stays_mapped_while_it_is_entered_and_a_cancelled_write_does_not_wait_for_that(
    gpu: FakeGpu, both: Pair, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, register = Held(), FakeGpu.host_register

    def slow(gpu: FakeGpu, address: int, byte_count: int) -> int:
        held()
        return register(gpu, address, byte_count)

    monkeypatch.setattr(FakeGpu, "host_register", slow)
    both.write(EVERY[:50], EVERY[100:150], grant=1)
    both.write(EVERY[:50], EVERY[200:250], grant=2)
    await until(held.reached.is_set)
    both.writer.cancel(WRITER, 1)
    assert both.ended == [], "never from within cancel"
    await until(lambda: both.ended == [(1, Outcome.FAILED, CANCELLED)])
    both.writer.cancel(WRITER, 2)
    await until(lambda: len(both.ended) == 2)
    both.owner.revoke(WRITER)
    both.writer.unmap(WRITER)
    await asyncio.sleep(0.05)
    assert not both.owner.quiet(WRITER), "a thread registers it"
    held.open.set()
    ahead.finish(monkeypatch)
    await until(lambda: both.owner.quiet(WRITER))
    assert gpu.registered == {}, "the fake has seen each part mapped when it was let go"
    assert gpu.launched == []


@pytest.mark.parametrize("computed", [False, True])
async def test_a_small_room_of_one_session_is_entered_in_turn_with_long_prompts_of_another(
    both: Pair, ahead: Ahead, directory: Path, monkeypatch: pytest.MonkeyPatch, computed: bool
) -> None:
    """Both when its rows are granted and when they are computed."""
    gate, register = Held(), FakeGpu.host_register
    other_arena = ArenaMemory.create(both.arena.byte_count, huge_pages="never")
    other_arena.prefault()
    other_owner, other = ShmArena(other_arena, directory=directory), WRITER + 1
    await both.writer.map(to_map(other, await other_owner.offer(other), (component(both.target),)))
    sessions = sessions_of(both.writer)
    spans = {number: session.arena.mapping for number, session in sessions.items()}
    order = list[int]()

    def recorded(gpu: FakeGpu, address: int, byte_count: int) -> int:
        gate()
        order.extend(
            number for number, span in spans.items() if span.address <= address < span.address + span.byte_count
        )
        return register(gpu, address, byte_count)

    monkeypatch.setattr(FakeGpu, "host_register", recorded)
    long, few = [EVERY[first : first + 100] for first in range(1_000, 2_000, 100)], EVERY[8:16]
    for grant, slots in enumerate(long, 1):
        if computed:
            both.write(slots, slots, grant=grant)
        else:
            both.writer.expect_rows(WRITER, 0, extents_of(slots))
    if computed:
        both.write(few, few, grant=99, session=other)
    else:
        both.writer.expect_rows(other, 0, extents_of(few))
    await until(gate.reached.is_set)
    gate.open.set()
    parts = len(long) * 100 * LAYERS * ROW // PAGE_BYTES
    await until(lambda: order.count(WRITER) >= parts)
    last = len(order) - order[::-1].index(other)
    assert last < parts // 2, "it did not wait for the long prompts"
    assert order.count(other) >= len(few) * LAYERS * ROW // PAGE_BYTES
    ahead.finish(monkeypatch)
    await both.close()
    await other_owner.close()
    other_arena.close()


@pytest.mark.parametrize("kind", [WorldError, OSError])
async def test_a_card_that_cannot_be_used_fails_writes(
    gpu: FakeGpu, arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:

    def launcher() -> None:
        raise kind("GPU 5: cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(gpu, "launcher", launcher)
    both = Pair(arena, directory, gpu=gpu)
    await both.map()
    both.write(EVERY[:3], EVERY[:3], grant=1)
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "GPU 5: cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY")]
    await both.close()


async def test_a_checksum_is_of_the_rows_in_the_cards_pool(both: Pair) -> None:
    source, target = np.random.default_rng(1).permutation(SLOTS)[:1_000], EVERY[:1_000]
    for layers in ((0, LAYERS), (1, 3)):
        both.write(source, target, grant=1, layers=layers, first_row=77, verify=True)
    await until(lambda: len(both.ended) == 2)
    lines = [lines_of("latent", both.pool.layout, layers=layers) for layers in ((0, LAYERS), (1, 3))]
    runs = runs_of(source, np.ones_like(source), 77)
    assert [both.checksums[1], both.checksums[2]] == [
        checksum_copy.checksum(each, runs, both.pool.address) for each in lines
    ]


async def test_rows_that_cannot_be_read_back_fail_their_write(gpu: FakeGpu, both: Pair) -> None:
    def fail() -> None:
        raise MemoryError("GPU 5: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")

    gpu.fetching = fail
    both.write(EVERY[:9], EVERY[:9], grant=1, verify=True)
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "GPU 5: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")]


async def test_a_launch_that_never_reported_its_end_is_unknown(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLauncher, "ended", lambda lane, place: (lane.queued.pop(place) and State.RUNNING, 0))
    both.write(EVERY[:3], EVERY[:3], grant=1)
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.UNKNOWN, "the GPU has passed a launch that never reported its end")]


async def test_a_node_does_what_its_core_wants_done_about_a_write_that_is_near(
    monkeypatch: pytest.MonkeyPatch, arena: ArenaMemory, directory: Path
) -> None:
    node, sent = PrefillNode(settings("p"), (), lambda _: None), list[object]()
    monkeypatch.setattr(node.core, "wake_hint", lambda *of: [Send("d", Granted(*of))])
    monkeypatch.setattr(node.bus, "send", lambda *given: sent.append(given))
    both = Pair(arena, directory)
    node.transport._make["shm"].args[3].wake_hint(both.write(EVERY[:9], EVERY[:9], grant=1))
    assert sent == [("d", Granted(WRITER, 1))]
    await until(lambda: bool(both.ended))
    await both.close()
    await node.close()


async def test_a_writer_of_unknown_outcome_condemns_its_process(
    arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condemned = list[int]()
    node = PrefillNode(settings("p"), (), lambda _: None, condemned=lambda: condemned.append(1))
    node._perform(FenceWriter(7))
    await until(lambda: not node._tasks)
    assert not condemned, "what was never mapped has left nothing unknown"

    both = Pair(arena, directory)
    monkeypatch.setattr(node.transport, "fence", both.writer.fence)
    node._perform(FenceWriter(7))
    await until(lambda: condemned == [1])
    await both.close()
    await node.close()

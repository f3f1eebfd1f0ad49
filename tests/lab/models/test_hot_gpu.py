"""Decode steps on a GPU: what is replayed changes no bit, be it what HiSparse queues beside the model or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from pdtransfer_lab.models import deep, deep_steps
from pdtransfer_lab.models.decode import ReferenceDecode
from pdtransfer_lab.models.factory import create

from pdtransfer.hisparse import capture
from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import GpuMemory
from pdtransfer.serve.tracing.spans import Timeline
from tests.lab.models.deep_model import OPTIONS, TOP
from tests.lab.models.hot_requests import SPARSE, hisparse, sparse_requests
from tests.support.engine_pair import Decode, Prefill, config, prompts, request

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

LENGTHS = (1, 30, 47, 100, 300)


@contextmanager
def decode_of(
    attention: str, rooms: list, source: Prefill, *, factory: Any = create, options: Any = SPARSE, **more: object
) -> Iterator[Decode]:
    """An engine on GPU 0, in whose memory these rooms have landed, and are admitted."""
    with ExitStack() as stack:
        engine = factory(config("decode", attention=attention, device="cuda", slots=2048, options=options, **more))
        arena = ArenaMemory.create(engine.description.memory_bytes)
        stack.callback(arena.close)
        arena.prefault()
        arena.mapping.register(gpus.gpu_at(0), arena.byte_count)
        memory, hbm = (
            arena.mapping.array.view(np.float32),
            np.full(engine.description.hbm_bytes // 4, np.nan, np.float32),
        )
        random = np.random.default_rng(0)
        free = [list(random.permutation(component.layout.slots)) for component in engine.description.components]
        decode = Decode(engine, memory[: engine.description.memory_bytes // 4], hbm, free)
        for room in rooms:
            decode.land(room, source)
        there = torch.from_numpy(hbm).cuda()
        on_card = GpuMemory(device=0, address=there.data_ptr(), byte_count=hbm.nbytes) if len(hbm) else None
        registered = arena.mapping.registered
        assert registered is not None
        engine.attach(
            arena.mapping.view[: engine.description.memory_bytes], device_address=registered.device_address, hbm=on_card
        )
        for room in rooms:
            engine.admit(room, decode.held(room.room), source.aux[room.room])
        yield decode
        torch.cuda.synchronize()
        if engine.model.hot is not None:
            engine.model.hot._pool.close()
        decode.memory = memory = engine = decode = None  # views of what is about to be unmapped


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_steps_that_are_replayed_are_bitwise_those_that_are_queued_one_by_one(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = sparse_requests(LENGTHS, tokens=12)
    source = Prefill.of(attention=attention, slots=4096, options=SPARSE).run(*rooms)

    def outcomes() -> list:
        # Places for three long ones: rooms are retracted, and others have their rows after them.
        with decode_of(attention, rooms, source, hisparse=hisparse(slots=150), batch_max=4) as decode:
            decode.run()
            assert decode.engine.figures.retracts > 0
            return [decode.outcome(room.room) for room in rooms]

    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    captured = outcomes()
    assert replays > 4 * 12, "newest, a swap-in a group, and the backup, in each step"
    before = replays
    monkeypatch.setattr(capture.Replayed, "__init__", lambda self, work, device: vars(self).update(_work=work))
    monkeypatch.setattr(capture.Replayed, "__call__", lambda self: self._work())
    assert outcomes() == captured
    assert replays == before


@pytest.mark.parametrize("attention", ["mla", "gqa"])
@pytest.mark.parametrize("case", ["dense", "hot", "mixed"])
def test_whole_steps_of_the_deep_model_are_one_launch_and_bitwise_those_that_are_queued(
    attention: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = {"dense": {}, "hot": TOP, "mixed": TOP}[case]
    rooms = [
        request(index, prompt, max_tokens=12, sparse=case == "hot" or (case == "mixed" and index % 2 == 0))
        for index, prompt in enumerate(prompts(0, (1, 30, 47, 100, 250, 511)))
    ]
    made = OPTIONS[attention] | sparse
    source = Prefill.of(factory=deep.create, attention=attention, slots=4096, options=made).run(*rooms)
    replays, replay = 0, torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    monkeypatch.setattr(deep_steps, "WORTH", 2)  # for more replays of fewer steps

    def outcomes(graphs: int) -> tuple[list, list, int]:
        nonlocal replays
        replays, timeline = 0, Timeline("decode")
        hot = hisparse(slots=150) if sparse else None
        more = {"factory": deep.create, "options": made | {"graphs": str(graphs)}, "hisparse": hot, "spans": timeline}
        with decode_of(attention, rooms, source, batch_max=4, **more) as decode:
            decode.run()
            found = [decode.outcome(room.room) for room in rooms]
        spans = timeline.take()
        steps = [span for span in spans if span.lane == "step"]
        for each in (span for span in spans if span.lane == "swap-in" and span.layer >= 0):
            assert any(step.begin_s - 1e-5 < each.begin_s <= each.end_s < step.end_s + 1e-5 for step in steps), each
        return found, [(span.lane, span.room, span.layer) for span in spans], replays

    queued, recorded, pieces = outcomes(0)
    captured, again, launches = outcomes(1)
    assert captured == queued
    for run in (recorded, again):
        steps = sum(lane == "step" for lane, _, _ in run)
        swapped = Counter(layer for lane, _, layer in run if lane == "swap-in" and layer >= 0)
        assert len(set(swapped.values())) == (case != "dense"), "a step brings in the picks of each layer, once"
        assert case != "hot" or set(swapped.values()) == {steps}
    # How often a room is placed, and so who is in a step, depends on the GPU: a row is taken once its events are over.
    assert {(lane, layer) for lane, _, layer in again} == {(lane, layer) for lane, _, layer in recorded}
    assert {room for _, room, layer in again if layer < 0} == {room for _, room, layer in recorded if layer < 0}
    if case == "dense":
        assert (pieces, launches > 8) == (0, True)
    else:
        assert launches < pieces


@pytest.mark.parametrize("factory", [create, deep.create])
@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_a_step_is_queued_without_a_wait_inside_the_driver(
    attention: str, factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SPARSE if factory is create else OPTIONS[attention] | TOP
    rooms = sparse_requests(LENGTHS, tokens=12)
    source = Prefill.of(factory=factory, attention=attention, slots=4096, options=options).run(*rooms)
    forward, steps = ReferenceDecode.step, 0

    def watched(self: ReferenceDecode, running: list[Any]) -> Any:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(self, running)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ReferenceDecode, "step", watched)
    hot = hisparse(slots=150)
    with decode_of(attention, rooms, source, factory=factory, options=options, hisparse=hot, batch_max=4) as decode:
        decode.run()
    assert steps > 12

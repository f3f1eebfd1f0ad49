"""HiSparse requests of a checkpoint on a card: steps are graphs, and tokens those of transformers on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.transformers import create
from pdtransfer.engine_api import CardMemory, HiSparse
from pdtransfer.kernels import card as cards
from pdtransfer.kernels import driver
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from tests.support import checkpoints
from tests.support.checkpoints import TOP_K, Handoff, generated, prompts, request

if driver.count() == 0:
    pytest.skip("no card here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

HOT = TOP_K + 8
TOKENS = 24


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_replayed_steps_out_of_the_hot_pool_have_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    directory = checkpoints.make(family, tmp_path / family)
    limits = Limits(hisparse_wait_steps=4, hisparse_quantum_steps=6)
    hot = HiSparse(device_slots=3 * (HOT + 1), hot_tokens=HOT, dense_slots=512, limits=limits)
    decode = create(checkpoints.config(directory, "decode", device="cuda", hisparse=hot))
    arena = ArenaMemory.create(decode.card.memory_bytes)
    arena.prefault()
    arena.mapping.register(cards.card(0), arena.byte_count)
    memory = arena.mapping.array[: decode.card.memory_bytes]
    memory[:] = 0xFF
    hbm = np.full(decode.card.hbm_bytes, 0xFF, np.uint8)
    made = Handoff.between(create(checkpoints.config(directory, "prefill")), decode, memory, hbm)
    rooms = [
        request(2 * at + (not sparse), prompt, TOKENS, sparse=sparse, ignore_eos=True)
        for at, prompt in enumerate(prompts(2, (9, HOT, 70, 150)))
        for sparse in (True, False)
        if sparse or at == 2
    ]
    auxes = []
    for one in rooms:
        auxes.append(made.computed(one))
        made.copy(one)
    there = torch.from_numpy(hbm).cuda()
    registered = arena.mapping.registered
    assert registered is not None
    decode.attach(
        arena.mapping.view[: decode.card.memory_bytes],
        device_address=registered.device_address,
        hbm=CardMemory(card=0, address=there.data_ptr(), byte_count=hbm.nbytes),
    )
    for one, aux in zip(rooms, auxes, strict=True):
        decode.admit(one, made.slots[one.room], aux)
    before = replays
    made.run()
    torch.cuda.synchronize()
    for one in rooms:
        expected = generated(directory, one.prompt, TOKENS, ignore_eos=True)
        assert made.tokens[one.room] == expected, one
    # Newest and backup alone are two a step where no step is a graph; swaps are two or three more.
    print("replays", replays - before, made.decode.figures)
    assert made.decode.figures.misses > TOKENS
    assert made.decode.figures.retracts > 0
    assert replays > before

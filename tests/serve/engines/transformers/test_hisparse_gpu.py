"""HiSparse requests of a checkpoint on a GPU: steps are graphs, and tokens those of requests that lie there whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import GpuMemory, HiSparse
from pdtransfer.serve.engines.transformers import create, steps
from tests.support import checkpoints
from tests.support.checkpoints import TOP_K, Handoff, prompts, request

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

HOT = TOP_K + 8
TOKENS = 24
LAYERS_DENSE = {"first_k_dense_replace": 3}  # in float32 no graph holds what chooses experts


@contextmanager
def landed(directory: Path, hot: HiSparse, rooms: list[Any], **options: str) -> Iterator[Handoff]:
    """Decode on GPU 0, in whose memory and arena these rooms have landed, and are admitted."""
    decode: Any = create(
        checkpoints.config(directory, "decode", device="cuda", hisparse=hot, batch_max=8, options=options)
    )
    arena = ArenaMemory.create(decode.description.memory_bytes)
    arena.prefault()
    arena.mapping.register(gpus.gpu_at(0), arena.byte_count)
    memory = arena.mapping.array[: decode.description.memory_bytes]
    memory[:] = 0xFF
    hbm = np.full(decode.description.hbm_bytes, 0xFF, np.uint8)
    made = Handoff.between(create(checkpoints.config(directory, "prefill", options=options)), decode, memory, hbm)
    auxes: list[bytes] = []
    for room in rooms:
        auxes.append(made.computed(room))
        made.copy(room)
    there = torch.from_numpy(hbm).cuda()
    registered = arena.mapping.registered
    assert registered is not None
    on_card = GpuMemory(device=0, address=there.data_ptr(), byte_count=hbm.nbytes)
    view = arena.mapping.view[: decode.description.memory_bytes]
    decode.attach(view, device_address=registered.device_address, hbm=on_card)
    try:
        for room, aux in zip(rooms, auxes, strict=True):
            decode.admit(room, made.slots[room.room], aux)
        yield made
    finally:
        torch.cuda.synchronize()
        registered.close()  # unmapped when its last view is gone; the next one may lie at the same address


def both_kinds(tokens: int) -> list[Any]:
    """Of each prompt a HiSparse request of an even number, and a dense one of the next."""
    return [
        request(2 * index + (not sparse), prompt, tokens, sparse=sparse, ignore_eos=True)
        for index, prompt in enumerate(prompts(2, (5, 9, HOT, 70, 150)))
        for sparse in (True, False)
    ]


def hisparse() -> HiSparse:
    """Places for three long requests: the others wait, and those that run are retracted for them."""
    limits = Limits(hisparse_wait_steps=4, hisparse_quantum_steps=6)
    return HiSparse(device_slots=3 * (HOT + 1), hot_tokens=HOT, dense_slots=1_024, limits=limits)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_replayed_steps_out_of_the_hot_pool_have_the_tokens_of_dense_requests(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures, captured = [], steps.captured
    monkeypatch.setattr(steps, "captured", lambda pool: captures.append(1) or captured(pool))
    directory = checkpoints.make(family, tmp_path / family, **LAYERS_DENSE)
    rooms = both_kinds(TOKENS)
    with landed(directory, hisparse(), rooms) as made:
        made.run()
        figures = made.decode.figures
    for sparse, dense in zip(rooms[::2], rooms[1::2], strict=True):
        assert made.tokens[sparse.room] == made.tokens[dense.room], len(sparse.prompt)
    assert figures.misses > TOKENS
    assert figures.retracts > 0
    assert figures.admission_bytes == figures.preloaded_bytes > 0
    assert len(captures) >= 2, "of HiSparse requests, and of dense ones"
    assert not caplog.records, "a step that no graph can hold"


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_with_digests_every_bit_is_that_of_dense_requests(family: str, tmp_path: Path) -> None:
    directory = checkpoints.make(family, tmp_path / family)
    rooms = both_kinds(8)
    with landed(directory, hisparse(), rooms, digests="true") as made:
        made.run()
    for sparse, dense in zip(rooms[::2], rooms[1::2], strict=True):
        hot, whole = (made.ends[one.room] for one in (sparse, dense))
        assert (hot.tokens_digest, hot.logits_digest) == (whole.tokens_digest, whole.logits_digest), len(sparse.prompt)
        assert hot.kv_digest == whole.kv_digest

"""What runs on cards: the writer's pushes into registered arenas, the reference engine, the demo: `make test-gpu`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch
from pdtransfer_lab.models.factory import generate_many

from pdtransfer.handoff.effects import Outcome
from pdtransfer.kernels import checksum_copy, driver
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.transports.gpu_launcher import WriterGpu
from pdtransfer.wire import Sampling
from tests.support.shm_pair import LAYERS, ROW, SLOTS, WRITER, Pair
from tests.support.waiting import until

if driver.count() == 0:
    pytest.skip("no card here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

EVERY = np.arange(SLOTS)


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    arena_memory = ArenaMemory.create(SLOTS * LAYERS * ROW, huge_pages="never")
    arena_memory.prefault()
    yield arena_memory
    arena_memory.close()


class CardPair(Pair):
    """A writer whose pool is in a card's memory."""

    def __init__(self, arena: ArenaMemory, tmp_path: Path) -> None:
        pool = np.random.default_rng(5).integers(0, 256, SLOTS * LAYERS * ROW, np.uint8)  # as test_shm's own
        self.tensor = torch.from_numpy(pool).cuda()
        torch.cuda.synchronize()
        super().__init__(arena, tmp_path / "s", gpu=WriterGpu(0), address=self.tensor.data_ptr())
        assert np.array_equal(pool, self.pool.bytes)


async def test_writes_of_a_card_land_where_they_belong_and_nowhere_else(arena: ArenaMemory, tmp_path: Path) -> None:
    both = CardPair(arena, tmp_path)
    assert await both.map() == arena.byte_count
    rng = np.random.default_rng(2)
    source, target = rng.permutation(SLOTS), rng.permutation(SLOTS)
    cuts = np.sort(rng.choice(np.arange(1, 8_000), 60, replace=False))
    for grant, (ours, theirs) in enumerate(
        zip(np.split(source[:8_000], cuts), np.split(target[:8_000], cuts), strict=True), 1
    ):
        for layers in ((0, 1), (1, LAYERS)):
            both.want(both.write(ours, theirs, grant=grant, layers=layers))
    both.want(both.write(EVERY[:150], np.sort(target[8_000:])[:150], grant=1))
    await until(lambda: len(both.ended) == both.writes)
    assert {outcome for _, outcome, _ in both.ended} == {Outcome.LANDED}
    assert both.right
    await both.close()


async def test_a_cancelled_write_of_a_card_is_still(arena: ArenaMemory, tmp_path: Path) -> None:
    both = CardPair(arena, tmp_path)
    await both.map()
    for grant in range(1, 41):  # more than the card can have done by then
        both.write(EVERY, EVERY, grant=grant)
    for grant in range(1, 41):
        both.writer.cancel(WRITER, grant)
    await until(lambda: len(both.ended) == 40)
    assert both.ended[-1][1:] == (Outcome.FAILED, "cancelled")
    frozen = arena.mapping.array.copy()
    await asyncio.sleep(0.2)
    assert np.array_equal(arena.mapping.array, frozen)
    both.want(both.write(EVERY, EVERY, grant=99))
    await until(lambda: len(both.ended) == 41)
    assert both.ended[-1][1] is Outcome.LANDED
    assert both.right
    await both.close()


async def test_a_checksum_is_of_the_rows_in_the_cards_pool(arena: ArenaMemory, tmp_path: Path) -> None:
    both = CardPair(arena, tmp_path)
    await both.map()
    source = np.random.default_rng(1).permutation(SLOTS)
    both.write(source, EVERY, grant=1, first_row=7, verify=True)
    await until(lambda: bool(both.ended))
    runs = runs_of(source, np.ones_like(source), 7)
    assert both.checksums[1] == checksum_copy.checksum(lines_of("latent", both.pool.layout), runs, both.pool.address)
    await both.close()


@pytest.mark.parametrize("options", [{"layers": "2"}, {"layers": "2", "top_k": "48", "index_share": "1"}])
@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_a_generation_on_a_card_has_the_same_bits_however_it_is_batched(
    attention: str, options: dict[str, str]
) -> None:
    config = EngineConfig(
        role="decode", slots=4_096, page_size=64, device="cuda", options=options | {"attention": attention}
    )
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(0, 256, size), Sampling(max_tokens=9, ignore_eos=True)) for size in (1, 63, 300, 700, 64, 5, 257)
    ]
    together = generate_many(config, requests)
    others = replace(config, chunk_tokens=96, batch_max=3, host_layout="page_first", page_size=16)
    assert generate_many(others, requests) == together
    assert [generate_many(config, [request])[0] for request in requests] == together


@pytest.mark.parametrize("how", ["--hisparse", "--verify"])
@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_the_demo_is_identical_on_a_card(attention: str, how: str) -> None:
    command = [sys.executable, "-m", "pdtransfer", "demo", how, "--device=cuda", "--json", "--model=reference"]
    command += [f"--engine-option=attention={attention}", "--requests=8", "--prompt-bytes-max=2048", "--max-tokens=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["identical"], report["slots_leaked"]) == (8, 0), report
    assert report["hot_misses"] > 0 if how == "--hisparse" else report["grants_mismatched"] == 0, report

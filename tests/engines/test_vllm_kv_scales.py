"""A checkpoint with scales of a KV cache of 8 bits: two vLLM engines of it answer as one, and others are refused."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.vllm_engine import CPU_FLAGS, Checkpoints, VllmEngine, prompts
from tests.support.vllm_pair import LENGTHS, TOKENS, VllmPair, handed_over, rooms, transfer

pytestmark = [
    pytest.mark.timeout(1_200),  # three engines start slowly on a busy host
    pytest.mark.skipif(
        not re.search(r"avx512|amx", CPU_FLAGS),
        reason="vLLM keeps a cache of 8 bits on processors with AVX-512 or AMX alone",
    ),
]

SCALES = {"first": 0.11, "same": 0.11, "other": 0.04}
TIME_LEFT_S = 20.0  # after which either side gives a hand-off up


def test_engines_of_one_checkpoint_hand_over_and_other_scales_are_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """With neither block sizes nor anything else unequal, only the fact of the scales keeps the third engine out: its
    bytes would be read as other numbers."""
    model = checkpoints.path("qwen3")
    with ExitStack() as stack:

        def start(name: str) -> VllmEngine:
            path = tmp_path / name
            checkpoints.scaled(model, path, SCALES[name])
            both = transfer("kv_both", verify=True, model="scaled", time_left_s=TIME_LEFT_S)
            return stack.enter_context(
                VllmEngine(
                    path, tmp_path / f"{name}.log", dtype="bfloat16", kv_cache_dtype="fp8", kv_transfer_config=both,
                    max_num_batched_tokens=256, enable_prefix_caching=False, disable_log_stats=False,
                )
            )  # fmt: skip

        prefill, decode, other = (start(name) for name in SCALES)
        pair = VllmPair(prefill, decode)
        pair.ready()
        asked = prompts(*LENGTHS, seed=51)
        expected = decode.generate(asked, tokens=TOKENS)
        for order in ("serial", "decode first"):
            assert [made.tokens for made in handed_over(pair, asked, order=order)] == expected
        assert rooms(decode)["received"] == 2 * len(LENGTHS) + 1
        pair.settles()

        other.ready()
        assert other.generate(asked, tokens=TOKENS) != expected, "the scales are not used"
        [prompt] = prompts(300, seed=52)
        unlike, label = VllmPair(prefill, other, identity=pair.identity), pair.label()
        prefill.generated(pair.begin_prefill(prompt, label))
        assert other.generated(unlike.begin_decode(prompt, label, tokens=1)).finish_reason == "error"
        assert re.search(r"kv_scales: d-\S+ has '[0-9a-f]{16}', p-\S+ '[0-9a-f]{16}'", other.log.read_text())

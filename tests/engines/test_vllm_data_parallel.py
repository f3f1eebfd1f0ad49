"""vLLM's servers with data parallel ranks, behind our router: each rank is an engine of its own, and any of decode's
takes what any of prefill's has computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_engine import Checkpoints, prompts
from tests.support.vllm_pair import settles, transfer
from tests.support.vllm_server import HttpProcess, router, vllm_server

RANKS = 2
REQUESTS = 12


def tokens(server: HttpProcess, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/completions", body | {"detokenize": False, "return_token_ids": True})
    return answer["choices"][0]["token_ids"]


@pytest.mark.full  # ranks without requests compute in step with the others: eight processes want a core each
@pytest.mark.timeout(900)
def test_each_data_parallel_rank_hands_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = checkpoints.path("llama")
    options = ["--skip-tokenizer-init", "--data-parallel-size", str(RANKS), "--api-server-count", "1"]
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                vllm_server(model, tmp_path / f"{role}.log", *options, transfer=transfer(role, time_left_s=60.0))
            )
            for role in ("kv_producer", "kv_consumer")
        )
        front = stack.enter_context(router(prefill.ready(), decode.ready(), tmp_path / "router.log")).ready()
        asked = prompts(*(100 + 30 * number for number in range(REQUESTS)), seed=5)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: tokens(front, prompt), asked))
        assert answers == [tokens(decode, prompt) for prompt in asked]

        def received(rank: int) -> float:
            return decode.metric("vllm:pdtransfer_rooms_total", end="received", engine=str(rank))

        settles(lambda: sum(map(received, range(RANKS))), REQUESTS)
        assert all(received(rank) > 1 for rank in range(RANKS))
        assert front.metric("pdtransfer_retries_total") == 0
        assert all(prefill.metric("vllm:request_success_total", engine=str(rank)) > 1 for rank in range(RANKS))

"""vLLM's data parallel ranks behind our router, whether one server has them all or each has its own: each rank is an
engine of its own, and any of decode's takes what any of prefill's has computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang_engine import free_port
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


@pytest.mark.timeout(900)
def test_ranks_with_a_server_each_share_out_experts_and_are_servers_to_the_router(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """vLLM's external load balancing, which it has for models with experts alone: either decode server computes half of
    the experts of both, with a stand-in for vLLM's kernel for CPUs. Prefill has all of them."""
    model, master = checkpoints.path("glm4_moe_drafted"), free_port()
    ranks = ["--data-parallel-size", str(RANKS), "--data-parallel-address", "127.0.0.1"]
    ranks += ["--data-parallel-rpc-port", str(master), "--enable-expert-parallel"]
    ranks += ["--worker-extension-cls", "tests.support.vllm_experts.OwnExperts"]
    with ExitStack() as stack:

        def start(role: str, name: str, *options: str) -> HttpProcess:
            settings = transfer(role, time_left_s=60.0, silence_s=60.0)
            log = tmp_path / f"{name}.log"
            return stack.enter_context(vllm_server(model, log, "--skip-tokenizer-init", *options, transfer=settings))

        decode = [
            start("kv_consumer", f"decode-{rank}", *ranks, "--data-parallel-rank", str(rank)) for rank in range(RANKS)
        ]
        prefill = start("kv_producer", "prefill")
        first, second = (server.ready() for server in decode)
        more = ["--decode", second.url]
        front = stack.enter_context(router(prefill.ready(), first, tmp_path / "router.log", *more)).ready()
        asked = prompts(*(100 + 30 * number for number in range(REQUESTS)), seed=5)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda prompt: tokens(front, prompt), asked))
        assert answers == [tokens(prefill, prompt) for prompt in asked]

        def received() -> list[float]:
            return [server.metric("vllm:pdtransfer_rooms_total", end="received") for server in decode]

        settles(lambda: sum(received()), REQUESTS)
        assert min(received()) > 1
        assert front.metric("pdtransfer_retries_total") == 0
        for rank, server in enumerate(decode):
            logged = server.log.read_text()
            assert f"[EP Rank {rank}/2] Expert parallelism is enabled" in logged, logged[-2000:]

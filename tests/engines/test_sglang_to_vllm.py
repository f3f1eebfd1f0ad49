"""Engines that share no block: vLLM's, of 128 or 32 tokens a block, decode what SGLang's has prefilled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang_bridge import Bridge, prefill_server
from tests.support.sglang_engine import RefusedError
from tests.support.vllm_engine import Checkpoints, VllmEngine, prompts
from tests.support.vllm_pair import settles, transfer

TOKENS = 24
LENGTHS = 5, 31, 32, 33, 127, 128, 129, 300, 700
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False, "disable_log_stats": False}
ROOMS = "vllm:pdtransfer_rooms_total"
Pair = tuple[Bridge, VllmEngine]  # and one engine that does both
BYTES = "vllm:pdtransfer_bytes_total received"


def receives(**more: Any) -> dict[str, Any]:
    """The kv_transfer_config of a decode engine that takes tokens."""
    return transfer("kv_consumer", **{"rows": "tokens", "verify": True, "policy": "recompute"} | more)


@pytest.fixture(scope="module")
def bridge(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both with prefix caches, pages of 16 tokens and blocks of 128; and one engine that does both."""
    model, folder = checkpoints.path("llama"), tmp_path_factory.mktemp("bridge")
    with ExitStack() as stack:
        prefill = stack.enter_context(prefill_server(model, folder / "prefill.log"))
        options = CHUNKS | {"enable_prefix_caching": True, "kv_transfer_config": receives()}
        decode = stack.enter_context(VllmEngine(model, folder / "decode.log", **options))
        single = stack.enter_context(VllmEngine(model, folder / "single.log", **CHUNKS))
        made = Bridge(prefill, decode)
        made.ready()
        single.ready()
        yield made, single


def test_vllm_decodes_what_sglang_prefilled(bridge: Pair) -> None:
    made, single = bridge
    for seed in (1, 2):
        asked = prompts(*LENGTHS, seed=seed)
        expected = single.generate(asked, tokens=TOKENS)
        received, sent = made.generate(asked, tokens=TOKENS)
        assert [each.tokens for each in received] == expected
        assert sent == [each[:1] for each in expected]
        made.settles()


def test_prompts_that_either_engine_has_cached_are_sent_in_part(bridge: Pair) -> None:
    """SGLang's own radix cache, and blocks of vLLM's, which end elsewhere."""
    made, single = bridge
    shared, *tails = prompts(300, 40, 41, 200, seed=7)
    sent: list[float] = []
    for tail in tails:
        before = made.decode.metrics("vllm:pdtransfer_bytes_total").get(BYTES, 0)
        received, _ = made.generate([shared + tail], tokens=TOKENS)
        assert [each.tokens for each in received] == single.generate([shared + tail], tokens=TOKENS)
        sent.append(made.decode.metrics("vllm:pdtransfer_bytes_total")[BYTES] - before)
    whole = 4 * 2 * 2 * 64 * 4  # bytes of a token
    assert sent == [340 * whole, (341 - 256) * whole, (500 - 256) * whole]
    made.settles()


def test_a_client_that_leaves_costs_no_block(bridge: Pair) -> None:
    """Decode waits for a prefill engine that was not asked yet."""
    made, single = bridge
    [prompt] = prompts(400, seed=11)
    made.decode.add(prompt, tokens=TOKENS, request="leaves", kv_transfer_params=made.receives(made.room()))
    settles(lambda: made.decode.state()["requests"], 1)
    made.decode.abort("leaves")
    made.settles()
    received, _ = made.generate([prompt], tokens=TOKENS)
    assert received[0].tokens == single.generate([prompt], tokens=TOKENS)[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float16"}, "model: "),
        ({"kv_transfer_config": receives(rows="blocks")}, "rows: d-"),
        ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 1}}, "speculation: d-"),
    ],
    ids=["dtype", "blocks", "drafter"],
)
def test_an_engine_that_does_not_fit_is_refused_and_computes_itself(
    options: dict[str, Any], field: str, bridge: Pair, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    pair, _ = bridge
    model, given = checkpoints.path("llama"), CHUNKS | {"kv_transfer_config": receives()} | options
    if drafts := given.get("speculative_config"):
        given["speculative_config"] = drafts | {"model": str(model)}
    with VllmEngine(model, tmp_path / "decode.log", **given) as decode:
        decode.ready()
        asked = prompts(100, 200)
        rooms = [pair.room() for _ in asked]
        began = time.monotonic()
        sent = pair.begin_prefill(asked, rooms)
        added = Bridge(pair.prefill, decode).begin_decode(asked, rooms, tokens=TOKENS)
        for each in sent:  # SGLang would wait for minutes
            with pytest.raises(RefusedError, match=field):
                each.result(30.0)
        assert time.monotonic() - began < 30.0
        made = [decode.generated(each).tokens for each in added]
        assert made == decode.generate(asked, tokens=TOKENS)
        assert decode.metrics(ROOMS) == {f"{ROOMS} failed": 2}
        log = decode.log.read_text()
        assert f"was not received: refused: tcp://127.0.0.1:{pair.port}" in log
        assert f" {field}" in log


def test_a_killed_prefill_engine_is_replaced_by_computing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = checkpoints.path("qwen3")
    with (
        prefill_server(model, tmp_path / "prefill.log", page_size=1, chunked_prefill_size=64) as prefill,
        VllmEngine(model, tmp_path / "decode.log", **CHUNKS, block_size=32, kv_transfer_config=receives()) as decode,
    ):
        made = Bridge(prefill, decode)
        made.ready()
        asked = prompts(5, 129, 700, 700, 700, 700)
        expected = decode.generate(asked, tokens=TOKENS)
        found, _ = made.generate(asked, tokens=TOKENS)
        assert [each.tokens for each in found] == expected
        rooms = [made.room() for _ in asked]
        made.begin_prefill(asked, rooms)
        added = made.begin_decode(asked, rooms, tokens=TOKENS)
        settles(lambda: decode.metrics(ROOMS).get(f"{ROOMS} received", 0) > len(asked), True)
        prefill.kill()
        assert [decode.generated(each).tokens for each in added] == expected
        made.settles()

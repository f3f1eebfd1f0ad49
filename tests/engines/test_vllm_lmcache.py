"""Beside LMCache in vLLM's MultiConnector: what its server has is not sent again where ours is the second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lmcache_server import lmcache_server
from tests.support.paths import REPO
from tests.support.vllm_engine import Checkpoints, VllmEngine, prompts
from tests.support.vllm_pair import (
    TOKENS,
    VllmPair,
    handed_over,
    multi_connector,
    received_bytes,
    received_tokens,
    transfer,
)

VENV = REPO / ".venv-lmcache"
PYTHON = VENV / "bin" / "python"
pytestmark = [
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(not (VENV / ".stamp").exists(), reason="no LMCache here: make venv-lmcache"),
]
BLOCK = 128  # tokens, of a block and of LMCache's chunks
BLOCK_BYTES = BLOCK * 4 * 2 * 64 * 2 * 4  # of the model llama in float32
LENGTHS = 140, 300, 520  # none of them, with its answer, fills one more block
COMMON: dict[str, Any] = {"max_num_batched_tokens": 256, "enable_prefix_caching": False, "disable_log_stats": False}
TIME_LEFT_S = 60.0


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Its connector, for the engines of both tests."""
    with lmcache_server(PYTHON, tmp_path_factory.mktemp("lmcache") / "server.log", chunk=BLOCK) as connector:
        yield connector


@pytest.fixture(scope="module")
def prefill(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    sends, log = transfer("kv_producer", time_left_s=TIME_LEFT_S), tmp_path_factory.mktemp("prefill") / "prefill.log"
    with VllmEngine(checkpoints.path("llama"), log, python=PYTHON, kv_transfer_config=sends, **COMMON) as started:
        yield started


@pytest.fixture
def pair(
    order: str, lmcache: dict[str, Any], prefill: VllmEngine, checkpoints: Checkpoints, tmp_path: Path
) -> Iterator[VllmPair]:
    """Decode has both connectors, in this order.

    A worker of vLLM's build for CPUs begins with a look into all modules that are imported, and ends at llvmlite, which
    LMCache brings with numba. In a process of its own it begins before LMCache is imported.
    """
    ours = transfer("kv_consumer", time_left_s=TIME_LEFT_S)
    config = multi_connector(*((ours, lmcache) if order == "ours first" else (lmcache, ours)))
    options = COMMON | {"kv_transfer_config": config, "distributed_executor_backend": "mp"}
    with VllmEngine(checkpoints.path("llama"), tmp_path / "decode.log", python=PYTHON, **options) as decode:
        pair = VllmPair(prefill, decode)
        pair.ready()
        yield pair


@pytest.mark.parametrize("order", ["ours first", "ours second"])
def test_what_lmcache_has_is_not_sent_again(pair: VllmPair, order: str) -> None:
    """The first of both that has a prompt loads it. LMCache keeps what decode has computed, in whole chunks, and
    nothing that came from a peer."""
    decode = pair.decode
    asked = prompts(*LENGTHS, seed=len(order))
    expected = pair.prefill.generate(asked, tokens=TOKENS)
    whole = sum(-(-length // BLOCK) for length in LENGTHS) * BLOCK_BYTES
    kept = sum(length // BLOCK for length in LENGTHS) * BLOCK
    for is_kept in (False, True):
        before = received_bytes(decode)
        answers = handed_over(pair, asked, order="serial")
        assert [answer.tokens for answer in answers] == expected
        pair.settles()  # prefill keeps nothing for a room that was declined
        is_sent = order == "ours first" or not is_kept
        assert received_bytes(decode) - before == (whole if is_sent else 0)
        # Without a peer: what LMCache has not, decode computes, and LMCache keeps it.
        before = received_tokens(decode)
        assert decode.generate(asked, tokens=TOKENS) == expected
        pair.settles()
        assert received_tokens(decode) - before == (kept if is_kept else 0)

"""KV between SGLang's own pools, and what SGLang lists of them, on a CPU: without a server, whose attention needs a
GPU, or CUDA. Each program beside this file runs in SGLang's environment."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.support.paths import REPO
from tests.support.sglang_engine import ENVIRONMENT, PYTHON, is_since

pytestmark = pytest.mark.timeout(900)


def printed(program: str, *given: Any) -> str:
    """What a program of this folder prints, which must end well."""
    asked = [PYTHON, "-m", f"tests.engines.{program}", *map(json.dumps, given)]
    ended = subprocess.run(
        asked, cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    return ended.stdout


@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 256, "fp4_indexer": False, "draft": True},
        {"page_size": 256, "fp4_indexer": True, "draft": False},
        {"page_size": 256, "fp4_indexer": False, "hisparse": True},
        # SGLang's servers have pages of 256 alone; its classes have others too.
        {"page_size": 128, "fp4_indexer": False, "draft": False},
    ],
)
def test_decode_reads_the_rows_of_deepseek_v4_that_prefill_has_computed(given: dict[str, object]) -> None:
    """Of lengths on both sides of 4, 128 and 256, behind a prefix and in chunks, with other pages at decode; or without
    a prefix into HiSparse's host pool. Nothing but the request's pages changes."""
    count = 15 if given.get("hisparse") else 17
    assert f"of {count} requests" in printed("sglang_compressed_pools", given)


@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 16, "dense": [0, 3], "nvfp4": False},
        {"page_size": 128, "dense": [], "nvfp4": False},
        {"page_size": 128, "dense": [], "nvfp4": True},
    ],
)
def test_decode_reads_the_rows_of_minimax_that_prefill_has_computed(given: dict[str, object]) -> None:
    """K, V and the index's keys, behind a prefix and in chunks. Nothing but the request's pages changes."""
    assert "of 13 requests" in printed("sglang_minimax_pools", given)


@pytest.mark.skipif(not is_since("0.5.21"), reason="this SGLang receives no request on the host")
def test_a_request_lands_in_sglangs_host_pool_and_is_loaded_by_sglang() -> None:
    assert "loaded what prefill has computed" in printed("sglang_host_pool")


def test_a_stage_has_components_of_what_its_layers_have() -> None:
    """Where they have no state SGLang lists it without buffers. It is not asked for its indices then."""
    stages = [{"full": [0, 3], "linear": [1, 2]}, {"full": [4], "linear": []}, {"full": [], "linear": [5]}]
    lines = printed("sglang_stage_pools", stages).splitlines()
    assert [json.loads(line) for line in lines if line.startswith("{")] == [
        {"listed": ["mamba"], "asked": ["mamba"], "layers": {"kv": [0, 3], "mamba": [1, 2]}},
        {"listed": ["mamba"], "asked": [], "layers": {"kv": [4]}},
        {"listed": ["mamba"], "asked": ["mamba"], "layers": {"mamba": [5]}},
    ]


def test_any_value_of_any_field_of_a_bootstrap_servers_answers_fails_its_requests_alone() -> None:
    """SGLang's own code is called, and the plugin: nothing is raised in decode's scheduler."""
    lines = [json.loads(line) for line in printed("sglang_answers").splitlines() if line.startswith("{")]
    assert len({line["edge"] for line in lines}) == 3
    assert [line for line in lines if "raised" in line] == []
    right = [line for line in lines if line["case"] == "right"]
    assert [line["refused"] for line in right] == ["", "", ""]
    unnamed = [line for line in lines if line["refused"] and not _names(line["case"], line["refused"])]
    assert unnamed == []


def _names(case: str, refusal: str) -> bool:
    """Whether a refusal names the field that was wrong. Without any answer there is none to name, and SGLang's
    own comparisons have their own words."""
    field = case.partition(" ")[0]
    return field in refusal or field in ("answer", "7", "unknown") or "layout mismatch" in refusal

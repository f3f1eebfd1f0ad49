"""docs/vllm.md on one CPU host, followed to the letter: two servers, the router, doctor, and an answer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.document_commands import FIRST_LINE, commands, run, section, shape_of, stated_lines
from tests.support.paths import REPO
from tests.support.sglang_engine import free_port
from tests.support.vllm_engine import ENVIRONMENT, VENV, Checkpoints

KEPT = "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"
SECONDS = 900.0  # of two servers that import vLLM and start, beside others on two cores


@pytest.mark.timeout(1_200)
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_commands_of_the_document_hand_a_request_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    text, cores = section("vllm.md", "### On one CPU host"), sorted(os.sched_getaffinity(0))
    ports = {port: str(free_port()) for port in ("8000", "8100", "8200", "7801")}
    replaced = {f"127.0.0.1:{port}": f"127.0.0.1:{ports[port]}" for port in ports} | {
        "--port 8100": f"--port {ports['8100']}", "--port 8200": f"--port {ports['8200']}",
        "make venv-vllm\n": f"make -C {REPO} venv-vllm\n", ". .venv-vllm/": f". {VENV}/",
        "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct": f"MODEL={checkpoints.path('llama')}",
        "PREFILL_CORES=0 DECODE_CORES=1": f"PREFILL_CORES={cores[0]} DECODE_CORES={cores[-1]}",
    }  # fmt: skip
    kept = {name: ENVIRONMENT[name] for name in KEPT}
    kept["PDTRANSFER_LISTEN"] = f"127.0.0.1:{ports['8000']}"
    printed = run(commands(text), replaced, tmp_path, kept, SECONDS)
    assert "\nThe engines fit.\n" in printed
    [answer] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(answer["choices"][0]["text"].split()) == 16
    assert answer["kv_transfer_params"]["kv_bytes"] > 0
    assert answer["kv_transfer_params"]["kv_lost"] is False
    lines = FIRST_LINE.findall(printed)
    assert [shape_of(line) for line in lines] == [shape_of(line) for line in stated_lines(text)]
    assert f"listens on tcp://127.0.0.1:{ports['7801']}; " in lines[0]
    assert len({line.rpartition("facts=")[2] for line in lines}) == 1

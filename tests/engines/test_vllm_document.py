"""The commands of README and examples/vllm_cpu.sh on a CPU: two servers of vLLM, the router, doctor, and an answer."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import document_commands as document
from tests.support.paths import REPO
from tests.support.sglang_engine import free_port
from tests.support.vllm_engine import CPU_FLAGS, ENVIRONMENT, VENV, Checkpoints

KEPT = "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"
SECONDS = 900.0  # of two servers that import vLLM and start, beside others on two cores
EXAMPLE = (REPO / "examples" / "vllm_cpu.sh").read_text(encoding="utf-8")
ASK = document.commands(document.section("vllm.md", "## Install and run"))
# As the document says: with AMX, vLLM may end by SIGILL at a first step in bfloat16 of few tokens.
DTYPE = "float32" if "amx" in CPU_FLAGS else "bfloat16"
ON_A_CPU = f"--dtype {DTYPE} --enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 268435456"
pytestmark = [pytest.mark.timeout(1_200), pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")]


def followed(script: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """What it printed, with ports and cores of this host, and the answers among that. The first was handed over."""
    ports = {number: str(free_port()) for number in ("8000", "8100", "8200")}
    script = re.sub(r"\b(8000|8100|8200)\b", lambda found: ports[found[1]], script)
    cores = sorted(os.sched_getaffinity(0))
    environment = {name: ENVIRONMENT[name] for name in KEPT} | {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "PDTRANSFER_LISTEN": f"127.0.0.1:{ports['8000']}",
        "PREFILL_CORES": str(cores[0]), "DECODE_CORES": str(cores[-1]), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "LOGS": str(folder),
    }  # fmt: skip
    printed = document.run(script, {}, folder, environment, SECONDS)
    assert "\nThe engines fit.\n" in printed
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(answers[0]["choices"][0]["text"].split()) == 16
    assert answers[0]["kv_transfer_params"]["kv_bytes"] > 0
    assert answers[0]["kv_transfer_params"]["kv_lost"] is False
    return printed, answers


def test_the_commands_of_readme_hand_a_request_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """And of the document, with the model and what servers on a CPU need."""
    served = f" {checkpoints.path('llama')} {ON_A_CPU} "
    followed(document.in_background(document.readme("vllm")).replace(" MODEL ", served) + ASK, tmp_path)


def test_the_example_hands_a_request_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    printed, answers = followed(f"set -- {checkpoints.path('llama')}\n{EXAMPLE}", tmp_path)
    handed, alone = (answer["choices"][0]["text"] for answer in answers)
    assert handed == alone
    lines = document.FIRST_LINE.findall(printed)
    assert [document.shape_of(line) for line in lines] == [
        document.shape_of(line) for line in document.stated_lines(document.section("vllm.md", "### On one CPU host"))
    ]
    assert len({line.rpartition("facts=")[2] for line in lines}) == 1

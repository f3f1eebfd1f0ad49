"""docs/sglang.md on a CPU, and then docs/bridge.md in the same shell, followed to the letter.

Two servers of SGLang, the router, doctor and an answer; then a server of vLLM decodes what SGLang's has prefilled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support import sglang_engine, vllm_engine
from tests.support.document_commands import FIRST_LINE, commands, run, section, shape_of, stated_lines
from tests.support.sglang_engine import VENV, free_port
from tests.support.vllm_engine import Checkpoints

SECONDS = 1_200.0  # of three servers that import their engines and start, beside others on two cores
OF_VLLM = "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS"


@pytest.mark.timeout(1_500)
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.skipif(vllm_engine.why_not() is not None, reason=vllm_engine.why_not() or "")
@pytest.mark.skipif(sglang_engine.VERSION != "", reason="the document's options are those of the default version")
def test_the_commands_of_both_documents_hand_requests_over(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    text, cores = section("sglang.md", "### On a CPU"), sorted(os.sched_getaffinity(0))
    bridge = section("bridge.md", "### On one CPU host")
    ports = {port: str(free_port()) for port in ("8000", "8200", "7801", "30000", "30001", "30100", "30101", "8998")}
    replaced = {f"127.0.0.1:{port}": f"127.0.0.1:{ports[port]}" for port in ("8000", "8200", "7801", "30000", "30100")}
    replaced |= {f"{field} {ports_of}": f"{field} {ports[ports_of]}" for field, ports_of in (
        ("--port", "30000"), ("--port", "30100"), ("--port", "8200"), ("--nccl-port", "30001"),
        ("--nccl-port", "30101"), ("--disaggregation-bootstrap-port", "8998"),
    )}  # fmt: skip
    replaced |= {
        '"bootstrap_port": 8998': f'"bootstrap_port": {ports["8998"]}',
        '"remote_port": 7801': f'"remote_port": {ports["7801"]}',
        "VLLM=~/vllm/bin": f"VLLM={vllm_engine.VENV / 'bin'}",
        "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct": f"MODEL={sglang_checkpoints.path('llama')}",
        "PREFILL_CORES=0 DECODE_CORES=1": f"PREFILL_CORES={cores[0]} DECODE_CORES={cores[-1]}",
    }  # fmt: skip
    kept = {name: vllm_engine.ENVIRONMENT[name] for name in OF_VLLM} | {
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": sglang_engine.ENVIRONMENT["PYTHONPATH"],
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "PDTRANSFER_LISTEN": f"127.0.0.1:{ports['8000']}",
    }  # fmt: skip
    wrong_way = "pdtransfer doctor http://127.0.0.1:30100 http://127.0.0.1:30000 || echo status $?\n"
    printed = run(commands(text) + wrong_way + commands(bridge), replaced, tmp_path, kept, SECONDS)
    assert printed.count("\nThe engines fit.\n") == 2
    assert "\nThe engines do not fit.\nstatus 1\n" in printed
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    of_sglang, of_vllm = (answer["choices"][0]["text"].split() for answer in answers)
    assert of_sglang == of_vllm
    assert len(of_vllm) == 16
    assert answers[1]["kv_transfer_params"]["kv_bytes"] > 0
    assert answers[1]["kv_transfer_params"]["kv_lost"] is False
    [megabytes] = re.findall(r"^sglang:kv_transfer_total_mb_sum\{.*\} (\S+)$", printed, re.MULTILINE)
    assert float(megabytes) > 0
    lines = FIRST_LINE.findall(printed)
    assert [shape_of(line) for line in lines] == [shape_of(line) for line in stated_lines(text)]
    assert f"listens on tcp://127.0.0.1:{ports['7801']}; " in lines[0]
    assert len({line.rpartition("facts=")[2] for line in lines}) == 1

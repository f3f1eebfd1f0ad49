"""docs/sglang.md on a CPU, behind our router and SGLang's, and then docs/bridge.md in the same shell, followed to the
letter.

Two servers of SGLang, both routers, doctor and answers; then a server of vLLM decodes what SGLang's has prefilled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import sglang_engine, vllm_engine
from tests.support.document_commands import (
    FIRST_LINE,
    commands,
    in_background,
    readme,
    run,
    section,
    shape_of,
    stated_lines,
)
from tests.support.paths import REPO
from tests.support.sglang_engine import VENV, free_port
from tests.support.vllm_engine import Checkpoints

SECONDS = 1_200.0  # of three servers that import their engines and start, beside others on two cores
OF_VLLM = "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS"
TEXT = section("sglang.md", "### On a CPU")
pytestmark = [
    pytest.mark.timeout(1_500),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here"),
    pytest.mark.skipif(sglang_engine.VERSION != "", reason="the document's options are those of the default version"),
]
needs_vllm = pytest.mark.skipif(vllm_engine.why_not() is not None, reason=vllm_engine.why_not() or "")


@dataclass(frozen=True)
class Followed:
    """What the shell printed, and the port that each port of the documents became."""

    printed: str
    ports: dict[str, str]

    @property
    def answers(self) -> list[dict[str, Any]]:
        """In their order: behind our router, behind SGLang's, and vLLM's where there is one."""
        return [json.loads(line) for line in self.printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def followed(sglang_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The bridge's commands come last, where there is a vLLM."""
    cores = sorted(os.sched_getaffinity(0))
    script = commands(TEXT) + commands(section("sglang.md", "### Behind SGLang's own router"))
    script += "pdtransfer doctor http://127.0.0.1:30100 http://127.0.0.1:30000 || echo status $?\n"  # the wrong way
    numbers = ["8000", "8001", "29000", "7801", "30000", "30001", "30100", "30101", "8998"]
    replaced = {
        "make venv-sglang\n": f"make -C {REPO} venv-sglang\n",
        ". .venv-sglang/": f". {VENV}/",
        "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct": f"MODEL={sglang_checkpoints.path('llama')}",
        "PREFILL_CORES=0 DECODE_CORES=1": f"PREFILL_CORES={cores[0]} DECODE_CORES={cores[-1]}",
    }
    kept = {"HF_HUB_OFFLINE": "1"}
    if vllm_engine.why_not() is None:
        script += commands(section("bridge.md", "### On one CPU host"))
        numbers.append("8200")
        replaced["VLLM=$PWD/.venv-vllm/bin"] = f"VLLM={vllm_engine.VENV / 'bin'}"
        kept |= {name: vllm_engine.ENVIRONMENT[name] for name in OF_VLLM}
    ports = {number: str(free_port()) for number in numbers}
    kept["PDTRANSFER_LISTEN"] = f"127.0.0.1:{ports['8000']}"
    named = re.compile(rf"\b({'|'.join(numbers)})\b")
    assert set(named.findall(script)) == set(numbers)
    script = named.sub(lambda found: ports[found[1]], script)
    return Followed(run(script, replaced, tmp_path_factory.mktemp("followed"), kept, SECONDS), ports)


def test_the_commands_of_readme_hand_a_request_over(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """And the request at the head of the document, with the model and what it gives servers on a CPU."""
    [common] = re.findall(r'^export .*?^COMMON=.*?"$', TEXT, re.DOTALL | re.MULTILINE)
    script = in_background(readme("sglang")).replace(" MODEL ", f" {sglang_checkpoints.path('llama')} $COMMON ")
    for text in ("--port 30000", "--port 30100"):
        script = script.replace(text, f"{text} --nccl-port {free_port()}")
    script = script.replace("-mode decode", "-mode decode --disaggregation-decode-retraction-backup cpu_tensor")
    ask = commands(section("sglang.md", "## Install and run").partition("\n### ")[0])
    ports = {number: str(free_port()) for number in ("8000", "30000", "30100", "8998")}
    script = (
        f"{common}\n{script}{ask}curl -s http://127.0.0.1:30000/metrics | grep '^sglang:kv_transfer_total_mb_sum'\n"
    )
    script = re.sub(rf"\b({'|'.join(ports)})\b", lambda found: ports[found[1]], script)
    path = f"{VENV / 'bin'}:{os.environ['PATH']}"
    kept = {"HF_HUB_OFFLINE": "1", "PATH": path, "PDTRANSFER_LISTEN": f"127.0.0.1:{ports['8000']}"}
    printed = run(script, {}, tmp_path, kept, SECONDS)
    assert len(json.loads(printed.splitlines()[0])["choices"][0]["text"].split()) == 16
    assert "\nThe engines fit.\n" in printed
    assert float(printed.split()[-1]) > 0


def test_the_commands_of_the_document_hand_requests_over(followed: Followed) -> None:
    """Behind SGLang's router as behind ours."""
    assert "\nThe engines fit.\n" in followed.printed
    assert "\nThe engines do not fit.\nstatus 1\n" in followed.printed
    ours, theirs = (answer["choices"][0]["text"].split() for answer in followed.answers[:2])
    assert ours == theirs
    assert len(ours) == 16
    [megabytes] = re.findall(r"^sglang:kv_transfer_total_mb_sum\{.*\} (\S+)$", followed.printed, re.MULTILINE)
    assert float(megabytes) > 0
    lines = FIRST_LINE.findall(followed.printed)
    assert [shape_of(line) for line in lines] == [shape_of(line) for line in stated_lines(TEXT)]
    assert f"listens on tcp://127.0.0.1:{followed.ports['7801']}; " in lines[0]
    assert len({line.rpartition("facts=")[2] for line in lines}) == 1


@needs_vllm
def test_the_commands_of_the_bridge_hand_a_request_over(followed: Followed) -> None:
    """In the same shell, to a server of vLLM."""
    assert followed.printed.count("\nThe engines fit.\n") == 2
    first, _, of_vllm = followed.answers
    assert of_vllm["choices"][0]["text"].split() == first["choices"][0]["text"].split()
    assert of_vllm["kv_transfer_params"]["kv_bytes"] > 0
    assert of_vllm["kv_transfer_params"]["kv_lost"] is False

"""The commands of docs/router.md that measure: vLLM's own benchmark and AIPerf, in front of vLLM and of our daemons."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.document_commands import commands, run, section
from tests.support.fleets import running
from tests.support.paths import REPO
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.vllm_engine import ENVIRONMENT, VENV
from tests.support.vllm_server import ServerPair
from tests.support.waiting import standing

AIPERF = REPO / ".venv-aiperf"
REQUESTS, TOKENS = 8, 32  # the requests that these tests send, and the tokens that each command has generated for one
SECONDS = 300.0  # of a benchmark that imports its libraries and sends these requests, beside others on two cores
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Front:
    """What a benchmark is pointed at: a router, and a tokenizer for the benchmark's own prompts."""

    url: str
    model: str
    tokenizer: Path
    servers: ServerPair | None = None  # behind the router, where they are vLLM's

    def measure(self, heading: str, folder: Path, venv: Path, environment: dict[str, str]) -> None:
        """Runs the commands below a heading."""
        replaced = {
            "http://127.0.0.1:8000": self.url, "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct": f"MODEL={self.model}",
            '--tokenizer "$MODEL"': f"--tokenizer {self.tokenizer}", " 100 ": f" {REQUESTS} ",
        }  # fmt: skip
        path = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        before = self.servers.received()[0] if self.servers else 0.0
        run(commands(section("router.md", heading)), replaced, folder, path | environment, SECONDS)
        if self.servers:
            assert self.servers.received()[0] - before >= REQUESTS, "each prompt was handed over"


@pytest.fixture(scope="module", params=["vLLM", "our daemons"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    if request.param == "vLLM":
        servers: ServerPair = request.getfixturevalue("vllm_servers")
        yield Front(servers.router.url, "m", servers.model, servers)
    else:
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        tokenizer = write_tokenizer(folder / "words", context=1_024, template=template)
        with contextmanager(standing)(running(folder)) as fleet:
            yield Front(f"http://{fleet.value.router.ready['http']}", "stamp-mla", tokenizer)


def test_vllms_benchmark_measures_a_stream_of_each_request(front: Front, tmp_path: Path) -> None:
    names = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE")
    front.measure("### vLLM's benchmark", tmp_path, VENV, {name: ENVIRONMENT[name] for name in names})
    measured: dict[str, Any] = json.loads((tmp_path / "measured.json").read_text())
    assert (measured["completed"], measured["failed"], measured["errors"]) == (REQUESTS, 0, [""] * REQUESTS)
    # The number of tokens is that of the usage at the end of each stream.
    assert measured["output_lens"] == [TOKENS] * REQUESTS
    assert all(count >= 64 for count in measured["input_lens"])
    assert all(seconds > 0 for seconds in measured["ttfts"])
    assert any(measured["itls"]), "tokens arrived in more than one event"
    assert all(measured["generated_texts"])


@pytest.mark.skipif(not (AIPERF / ".stamp").exists(), reason="no AIPerf here: make venv-aiperf")
def test_aiperf_measures_a_stream_of_each_request(front: Front, tmp_path: Path) -> None:
    front.measure("### AIPerf", tmp_path, AIPERF, {})
    measured: dict[str, Any] = json.loads((tmp_path / "measured" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == REQUESTS
    assert (measured.get("error_request_count"), measured["error_summary"]) == (None, [])
    assert measured["time_to_first_token"]["count"] == REQUESTS
    assert measured["inter_token_latency"]["count"] > 0
    # By the usage at the end of each stream.
    assert measured["output_sequence_length"]["sum"] == measured["usage_completion_tokens"]["sum"] == REQUESTS * TOKENS
    assert measured["usage_prompt_tokens"]["count"] == REQUESTS
    metrics = json.loads((tmp_path / "measured" / "server_metrics_export.json").read_text())  # the router's own
    assert metrics["summary"]["endpoints_successful"] == [f"{front.url}/metrics"]
    assert "pdtransfer_build_info" in metrics["metrics"]

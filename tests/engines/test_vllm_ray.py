"""Ray Serve LLM's prefill and decode deployments, as deploy/ray/serve.yaml and examples/ray_serve.py start them: the
answers are those of one engine, also while a decode replica is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.asked_features import TEMPLATE
from tests.support.json_process import JsonProcess
from tests.support.paths import REPO
from tests.support.sglang_engine import free_port
from tests.support.tiny_tokenizer import END, START, write_tokenizer
from tests.support.vllm_engine import Checkpoints, VllmEngine, prompts
from tests.support.vllm_server import SERVES

VENV = REPO / ".venv-ray"
pytestmark = [
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(not (VENV / ".stamp").exists(), reason="no Ray here: make venv-ray"),
]
# Ray reports to nobody, and its processes, all of this host, need no password of each other.
ENVIRONMENT = SERVES | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
START_S = 900.0  # of a dozen processes that import Ray and vLLM
ANSWER_S = 120.0  # until a request has its answer, however often it is sent
TOKENS = 64
CLIENTS = 4
BYTES = 300  # tokens of the model that has a tokenizer
ASKED = [
    [token % (BYTES - 3) + 3 for token in prompt]
    for prompt in prompts(*(5 + 11 * at % 400 for at in range(48)), seed=6)
]


@dataclass
class Application:
    """What answers, and the tokens that one engine makes of each prompt of ASKED."""

    driver: JsonProcess
    url: str
    expected: list[list[int]]
    answered: list[float] = field(default_factory=list[float])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """The answer to a prompt, which is sent again where an error comes back."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                    answer = json.loads(response.read())
                break
            except (OSError, HTTPException):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        with self.changed:
            self.answered.append(time.monotonic())
            self.changed.notify_all()
        return answer

    def decode_replicas(self) -> list[int]:
        """Their processes."""
        return self.driver.ask("replicas", ANSWER_S, deployment="Decode")


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer."""
    folder = tmp_path_factory.mktemp("ray")
    model = shutil.copytree(checkpoints.path("llama_bytes"), folder / "model")
    words = write_tokenizer(folder / "words", vocabulary=BYTES, special=(START, END), template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(words / name, model)
    return model


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens that one engine makes of each prompt of ASKED."""
    with VllmEngine(model, tmp_path_factory.mktemp("single") / "single.log") as single:
        single.ready()
        return single.generate(ASKED, tokens=TOKENS)


@contextmanager
def started(
    log: Path, expected: list[list[int]], port: int, name: str, options: dict[str, Any]
) -> Generator[Application]:
    """What the driver starts by `name`."""
    # The paths of Ray's sockets are longer than pytest's folders leave room for.
    with (
        tempfile.TemporaryDirectory(prefix="pdt-ray-", ignore_cleanup_errors=True) as temp,
        JsonProcess(VENV / "bin" / "python", "tests.engines.ray_driver", log, ENVIRONMENT) as driver,
    ):
        driver.ask(name, START_S, temp=temp, **options)
        yield Application(driver, f"http://127.0.0.1:{port}", expected)


@pytest.fixture
def application(model: Path, expected: list[list[int]], tmp_path: Path) -> Iterator[Application]:
    port = free_port()
    options = {"model": str(model), "port": port, "kv_port": free_port()}
    with started(tmp_path / "ray.log", expected, port, "start", options) as application:
        yield application


def test_answers_are_those_of_one_engine_while_a_decode_replica_is_killed(application: Application) -> None:
    before = application.decode_replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(application.ask, prompt) for prompt in ASKED]
        with application.changed:
            assert application.changed.wait_for(lambda: len(application.answered) >= len(ASKED) // 3, ANSWER_S)
        os.kill(before[0], signal.SIGKILL)
        answers = [answer.result(len(ASKED) * ANSWER_S) for answer in asked]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == application.expected
    # Each prompt was handed over, also after the kill.
    handed_over = [answer["kv_transfer_params"] for answer in answers]
    assert all(params["kv_bytes"] > 0 and not params["kv_lost"] for params in handed_over), handed_over
    assert before[0] not in application.decode_replicas()


@pytest.mark.full
def test_the_file_for_a_cluster_serves(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """`serve run` of deploy/ray/serve.yaml, but for the model, what GPUs it names, and addresses on loopback."""
    port = free_port()
    file = yaml.safe_load((REPO / "deploy" / "ray" / "serve.yaml").read_text())
    file["http_options"] = {"host": "127.0.0.1", "port": port}
    [served] = file["applications"]
    for side in (served["args"]["prefill_config"], served["args"]["decode_config"]):
        del side["accelerator_type"]
        side["accelerator_config"] = {"kind": "cpu"}
        side["model_loading_config"] = {"model_id": "m", "model_source": str(model)}
        side["deployment_config"]["num_replicas"] = 1
        side["engine_kwargs"] |= {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 128 << 20,
        }  # fmt: skip
    prefill = served["args"]["prefill_config"]["engine_kwargs"]["kv_transfer_config"]
    prefill["kv_connector_extra_config"]["bind"] = f"tcp://127.0.0.1:{free_port()}"
    served["args"]["ingress_deployment_config"] = {"autoscaling_config": None, "num_replicas": 1}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(file))
    options = {"config": str(tmp_path / "serve.yaml")}
    with started(tmp_path / "ray.log", expected, port, "deploy", options) as application:
        answers = [application.ask(prompt) for prompt in ASKED[:8]]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected[:8]
    handed_over = [answer["kv_transfer_params"] for answer in answers]
    assert all(params["kv_bytes"] > 0 and not params["kv_lost"] for params in handed_over), handed_over

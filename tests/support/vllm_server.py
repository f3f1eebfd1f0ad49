"""vLLM's HTTP servers in processes of their own, from .venv-vllm, as `vllm serve` starts them, and our router."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.error import HTTPError, URLError

from tests.support.asked_features import TEMPLATE
from tests.support.json_process import end_of
from tests.support.paths import REPO
from tests.support.sglang_engine import free_port
from tests.support.tiny_tokenizer import END, START, write_tokenizer
from tests.support.vllm_engine import ENVIRONMENT, KV_BYTES, PYTHON, START_S, Checkpoints
from tests.support.vllm_pair import settles, transfer

ANSWER_S = 240.0
END_S = 20.0
# The command `vllm` needs no module of its name on the path, and its server has the engine in a process of its own.
SERVES = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_STREAM": "ext://sys.stdout"}


class HttpProcess:
    """A server that starts in the background: `ready` waits for it. Its log is `log`; it ends where the `with` ends."""

    def __init__(self, command: list[str | Path], port: int, log: Path, environment: dict[str, str]) -> None:
        self.log, self.url = log, f"http://127.0.0.1:{port}"
        with log.open("wb") as kept:
            self.process = subprocess.Popen(
                command, cwd=REPO, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=kept, stderr=kept,
                process_group=0,  # in one session: Linux may share the cores by it, and one's threads starved another's
            )  # fmt: skip

    def ready(self) -> Self:
        """Waits until its /health is 200."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"it ended with status {self.process.returncode}; {end_of(self.log)}"
            with suppress(URLError, ConnectionError, TimeoutError, HTTPError):
                urllib.request.urlopen(f"{self.url}/health", timeout=10.0).close()
                return self
            assert time.monotonic() < deadline, f"not ready; {end_of(self.log)}"
            time.sleep(0.2)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that it answers. Raises AssertionError, with what it says, for another status than 200."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                return json.loads(response.read())
        except HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode(errors='replace')}; {end_of(self.log)}") from None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples with these labels; 0 if there is none of that name yet."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as response:
            lines = [line.rpartition(" ") for line in response.read().decode().splitlines() if not line.startswith("#")]
        return sum(
            float(value)
            for labelled, _, value in lines
            if labelled.partition("{")[0] == name and all(f'{key}="{of}"' in labelled for key, of in labels.items())
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def stream_of(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which must be whole."""
    request = urllib.request.Request(
        url + path, json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        *events, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), (done, rest)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def vllm_server(model: Path, log: Path, *options: str, transfer: dict[str, Any]) -> HttpProcess:
    """`vllm serve`, which serves the model as "m"; `transfer` is its kv_transfer_config."""
    port = free_port()
    command = [
        PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(KV_BYTES), "--no-enable-prefix-caching",
        "--kv-transfer-config", json.dumps(transfer), *options,
    ]  # fmt: skip
    return HttpProcess(command, port, log, SERVES)


class Addressed(Protocol):
    """A server with a URL."""

    url: str


def router(
    prefill: Addressed, decode: Addressed, log: Path, *more: str, engine: str = "vllm", turn_tokens: int = 0
) -> HttpProcess:
    """Our router in front of both; `more` are further flags. Without `turn_tokens` every prompt is handed over, also
    one that decode has answered before."""
    port = free_port()
    command: list[str | Path] = [
        sys.executable, "-m", "pdtransfer", "router", "--engine", engine, "--listen", f"127.0.0.1:{port}",
        "--prefill", prefill.url, "--decode", decode.url, "--limits.silence-ms", "60000",
        "--limits.turn-tokens-max", str(turn_tokens), *more,
    ]  # fmt: skip
    return HttpProcess(command, port, log, {})


@dataclass
class ServerPair:
    """A prefill and a decode server of vLLM, and our router in front of both."""

    prefill: HttpProcess
    decode: HttpProcess
    router: HttpProcess
    bootstrap_port: int  # where prefill answers proxies that ask for its name
    model: Path
    checkpoints: Checkpoints

    def received(self) -> tuple[float, float]:
        """Hand-offs that decode has received, and their bytes."""
        return (
            self.decode.metric("vllm:pdtransfer_rooms_total", end="received"),
            self.decode.metric("vllm:pdtransfer_bytes_total", direction="received"),
        )

    def handed_over(self, path: str, body: dict[str, Any], *, lands: bool = True) -> tuple[Any, float]:
        """The answer to a request of the router, and the bytes that landed for it: an engine counts them with its next
        step, which may be the next request's where no KV `lands`."""
        byte_count = self.received()[1]
        answer = self.router.post(path, body)
        if lands:
            settles(lambda: self.received()[1] > byte_count, True)
        return answer, self.received()[1] - byte_count


def model_of_bytes(
    checkpoint: Path,
    folder: Path,
    *,
    special: tuple[str, ...] = (),
    marks: tuple[str, ...] = (),
    template: str = TEMPLATE,
    **settings: str,
) -> Path:
    """Copies a checkpoint of 300 tokens to `folder`, with a tokenizer of bytes and a chat template. Beside the bytes it
    has `special` tokens, and `marks`, which are left in texts. `settings` are further ones of the tokenizer."""
    model = shutil.copytree(checkpoint, folder / "model")
    words = write_tokenizer(
        folder / "words", vocabulary=300, special=(START, END, *special, *marks), template=template, eos_token=END,
        **settings,
    )  # fmt: skip
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] not in marks
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(words / name, model)
    return model


@contextmanager
def server_pair(checkpoints: Checkpoints, folder: Path) -> Iterator[ServerPair]:
    """One of a model that has a tokenizer of bytes, a chat template and a LoRA adapter, "tuned"."""
    model = model_of_bytes(checkpoints.path("llama_bytes"), folder)
    checkpoints.adapter(model, folder / "tuned")
    options = [
        "--enable-lora", "--lora-modules", f"tuned={folder / 'tuned'}", "--max-lora-rank", "8", "--max-loras", "1",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-embeds",
    ]  # fmt: skip
    bootstrap_port = free_port()
    listens = {"bind": f"tcp://127.0.0.1:{free_port()}", "bootstrap": f"127.0.0.1:{bootstrap_port}"}
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                vllm_server(model, folder / f"{role}.log", *options, transfer=transfer(role, time_left_s=60.0, **more))
            )
            for role, more in (("kv_producer", listens), ("kv_consumer", {}))
        )
        front = stack.enter_context(router(prefill.ready(), decode.ready(), folder / "router.log"))
        yield ServerPair(prefill, decode, front.ready(), bootstrap_port, model, checkpoints)

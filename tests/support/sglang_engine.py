"""SGLang's servers in processes of their own, from .venv-sglang, and a prefill and a decode server as a pair.

On a host with a GPU, PDTRANSFER_TEST_SGLANG names another interpreter that has SGLang, and PDTRANSFER_TEST_DEVICE=cuda
has all servers share its first GPU. With PDTRANSFER_TEST_GPUS=2 some have the second one as well."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError, URLError

from tests.support.json_process import end_of
from tests.support.paths import REPO

# Another version than the default, as make test-sglang VERSION=0.5.20 sets it.
VERSION = os.environ.get("PDTRANSFER_TEST_SGLANG_VERSION", "")
VENV = REPO / f".venv-sglang{VERSION and '-'}{VERSION}"
DEVICE = os.environ.get("PDTRANSFER_TEST_DEVICE", "cpu")
GPUS = int(os.environ.get("PDTRANSFER_TEST_GPUS", "1"))
PYTHON = Path(os.environ.get("PDTRANSFER_TEST_SGLANG", VENV / "bin" / "python"))
# Of three processes that import SGLang, beside others on two cores; or of many servers on a GPU, some of which compile.
START_S = 900.0 if DEVICE == "cpu" else 240.0
ANSWER_S = 240.0 if DEVICE == "cpu" else 90.0
SETTLES_S = 60.0
END_S = 20.0
CORES_BY_STAGE = "0.5.19"  # the first version that gets the cores of each pipeline stage

ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    # SGLang's own check of all its pools, whenever a scheduler has nothing to do: a leak ends the server.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "OMP_NUM_THREADS": "1",  # several engines share the cores
    "HF_HUB_OFFLINE": "1",
}
# A cache of 4,096 tokens. The engine looks at the memory of the whole device, of which others take and give some while
# it starts: the fraction is what may be missing, not what it takes.
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "host": "127.0.0.1", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "max_total_tokens": 4096, "max_running_requests": 8, "context_length": 1024,
    "page_size": 16, "chunked_prefill_size": 256, "skip_server_warmup": True, "disable_radix_cache": True,
}  # fmt: skip
if DEVICE == "cpu":
    ENVIRONMENT.update(
        SGLANG_USE_CPU_ENGINE="1",
        # And a plugin that stands in for what only GPUs have.
        PYTHONPATH=os.pathsep.join([str(REPO), str(REPO / "tests" / "engines" / "plugins")]),
    )
    # It computes with torch alone. An idle scheduler that does not sleep takes a third of a core.
    OPTIONS.update(
        attention_backend="torch_native", disable_overlap_schedule=True, mem_fraction_static=0.6, sleep_on_idle=True
    )
else:
    ENVIRONMENT.update(
        PYTHONPATH=os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # DSA's fused choice of the top k is not repeatable, even on one server.
        SGLANG_DSA_FUSE_TOPK="false",
        # Deterministic chunks are multiples of this.
        SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE=str(OPTIONS["chunked_prefill_size"]),
    )
    # Kernels for GPUs compute no float32; with two bytes a number, the bits depend on who shares a batch.
    OPTIONS.update(
        dtype="bfloat16", enable_deterministic_inference=True, attention_backend="triton", mem_fraction_static=0.8,
        grammar_backend="none", sleep_on_idle=True,
    )  # fmt: skip


def why_not() -> str | None:
    """Why no engine can be started here; None where one can."""
    if "PDTRANSFER_TEST_SGLANG" in os.environ or (VENV / ".stamp").exists():
        return None
    return f"no SGLang here: make venv-sglang{VERSION and ' VERSION='}{VERSION}"


def is_since(version: str) -> bool:
    """Whether the tested SGLang is this version or a newer one."""
    return not VERSION or [int(part) for part in VERSION.split(".")] >= [int(part) for part in version.split(".")]


def free_port() -> int:
    """A port of loopback that nobody has, and that the kernel gives to nobody who asks for any: it must stay free until
    a server has started."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class RefusedError(Exception):
    """What a server answered instead of tokens."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class SglangServer:
    """One server. It starts in the background: `ready` waits for it. Its log is `log`.

    `options` are those of sglang.launch_server, with underscores; False leaves one out that is set here. `settings` are
    our plugin's. `like` is one that has ended, whose addresses it takes.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        settings: dict[str, Any] | None = None,
        like: SglangServer | None = None,
        **options: Any,
    ) -> None:
        self.log, self.settings, self.at_rest = log, settings or {}, 0  # tokens that it says are used by nobody
        self.port, self.bootstrap_port = (like.port, like.bootstrap_port) if like else (free_port(), free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        given = OPTIONS | {"model_path": model, "port": self.port, "nccl_port": free_port()} | options
        if "disaggregation_mode" in given:
            given |= {
                "disaggregation_transfer_backend": "pdtransfer", "disaggregation_bootstrap_port": self.bootstrap_port
            }  # fmt: skip
        flags: list[str] = []
        for name, value in given.items():
            if value is not False:
                flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        ranks = int(options.get("tp_size", 1)) * (int(options.get("pp_size", 1)) if is_since(CORES_BY_STAGE) else 1)
        if "enable_dp_attention" not in options:
            ranks *= int(options.get("dp_size", 1))
        own = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0-1"] * ranks)} if DEVICE == "cpu" else {}
        if self.settings:
            own["PDTRANSFER_SGLANG"] = json.dumps(self.settings)
        with log.open("wb") as kept:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "sglang.launch_server", *flags], cwd=REPO, env=os.environ | ENVIRONMENT | own,
                stdin=subprocess.DEVNULL, stdout=kept, stderr=kept, process_group=0,
            )  # fmt: skip
        self._threads = ThreadPoolExecutor(64)

    def ready(self) -> Self:
        """Waits until it takes requests."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"it ended with status {self.process.returncode}; {end_of(self.log)}"
            with suppress(URLError, ConnectionError, TimeoutError, HTTPError):
                self.ask("/health", seconds=10.0)
                return self
            assert time.monotonic() < deadline, f"not ready; {end_of(self.log)}"
            time.sleep(0.2)

    def ask(self, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_S) -> Any:
        """The JSON, or the text, that it answers. Raises RefusedError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                text = response.read()
        except HTTPError as error:
            if error.code == 503 and path == "/health":
                raise
            raise RefusedError(error.code, error.read().decode(errors="replace")) from None
        with suppress(ValueError):
            return json.loads(text)
        return text

    def add(self, prompt: Sequence[int], *, tokens: int, **more: Any) -> Future[list[int]]:
        """Asks for this many greedy tokens of a prompt, in the background; `more` are further fields."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling} | more
        return self._threads.submit(lambda: self.ask("/generate", body)["output_ids"])

    def generate(self, prompts: Sequence[Sequence[int]], *, tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens of each prompt, all asked at once."""
        return [each.result() for each in [self.add(prompt, tokens=tokens) for prompt in prompts]]

    def abort(self, rid: str | None = None) -> None:
        """Ends a request as a client that goes away does, if it has arrived; or all that have."""
        self.ask("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def give_up(self, asked: Future[Any], rid: str | None = None) -> None:
        """Aborts until a request has ended, since an abort may overtake its request."""
        deadline = time.monotonic() + SETTLES_S
        while not asked.done():
            assert time.monotonic() < deadline, f"{rid} does not end; {end_of(self.log)}"
            self.abort(rid)
            wait([asked], 0.1)

    def loads(self) -> list[dict[str, Any]]:
        """What each of its schedulers has to do."""
        return self.ask("/v1/loads")["loads"]

    def used_tokens(self) -> int:
        """Tokens of its caches that requests have."""
        return sum(each["num_used_tokens"] for each in self.loads())

    def metric(self, name: str) -> float:
        """The sum of a metric that it exports, over all labels; 0 if it has none of that name yet."""
        text: bytes = self.ask("/metrics")
        lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
        return sum(float(value) for labelled, _, value in lines if labelled.partition("{")[0] == name)

    def settles(self) -> None:
        """Waits until it has nothing to do; then it passes its own check for leaks, which would end it."""
        deadline = time.monotonic() + SETTLES_S
        while self.process.poll() is None:
            with suppress(RefusedError):
                self.ask("/flush_cache", {})  # refused while a request is there
                break
            assert time.monotonic() < deadline, f"{self.loads()}; {end_of(self.log)}"
            time.sleep(0.1)
        # Pages that a peer may still write are given back later, when an idle scheduler takes its next turn.
        while (used := self.used_tokens()) > self.at_rest:
            assert time.monotonic() < deadline, f"{used} tokens are still used; {end_of(self.log)}"
            time.sleep(0.1)
        assert self.process.poll() is None, end_of(self.log)

    def kill(self) -> None:
        """Ends all its processes with SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass
class SglangPair:
    """Two servers, and what a router does with both."""

    prefill: SglangServer
    decode: SglangServer

    def ready(self) -> Self:
        self.prefill.ready()
        self.decode.ready()
        return self

    def room(self, number: int | None = None) -> dict[str, Any]:
        """The fields that both sides get: where prefill's bootstrap server is, and a new room."""
        return {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(63) if number is None else number,
        }  # fmt: skip

    def begin(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, apart_s: float = 0.0
    ) -> tuple[list[Future[list[int]]], list[Future[list[int]]]]:
        """Asks both for each prompt, decode `apart_s` after prefill, or before it where that is negative."""
        rooms = [self.room() for _ in prompts]
        sides = [self.prefill, self.decode] if apart_s >= 0 else [self.decode, self.prefill]
        made: dict[int, list[Future[list[int]]]] = {}
        for side in sides:
            made[id(side)] = [
                side.add(prompt, tokens=tokens, **room) for prompt, room in zip(prompts, rooms, strict=True)
            ]
            if side is sides[0]:
                time.sleep(abs(apart_s))
        return made[id(self.prefill)], made[id(self.decode)]

    def generate(self, prompts: Sequence[Sequence[int]], *, tokens: int, apart_s: float = 0.0) -> list[list[int]]:
        """`tokens` greedy tokens of each prompt, of which prefill has sampled the first."""
        first, made = self.begin(prompts, tokens=tokens, apart_s=apart_s)
        found = [each.result() for each in made]
        assert [each.result()[0] for each in first] == [each[0] for each in found]
        return found

    def settles(self) -> None:
        """Both come to rest, and nothing is left of any request."""
        self.prefill.settles()
        self.decode.settles()

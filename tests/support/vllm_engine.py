"""vLLM engines in processes of their own, from .venv-vllm, and tiny checkpoints that they load.

On a host with a GPU, PDTRANSFER_TEST_VLLM names another interpreter that has vLLM, and PDTRANSFER_TEST_DEVICE=cuda has
all engines share its first GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from tests.support.json_process import JsonProcess
from tests.support.paths import REPO
from tests.support.sglang_engine import DEVICE

# Another version than the default, as make test-vllm VERSION=0.27.0 sets it.
VERSION = os.environ.get("PDTRANSFER_TEST_VLLM_VERSION", "")
VENV = REPO / f".venv-vllm{VERSION and '-'}{VERSION}"
PYTHON = Path(os.environ.get("PDTRANSFER_TEST_VLLM", VENV / "bin" / "python"))
CPU_FLAGS = Path("/proc/cpuinfo").read_text()  # of which "amx" and "avx512" decide what vLLM's build for CPUs runs
START_S = 300.0  # of a process that imports vLLM and starts an engine, beside others on two cores
ANSWER_S = 120.0
KV_BYTES = 128 << 20 if DEVICE == "cpu" else 1 << 30
VOCABULARY = 512  # of each tiny checkpoint

ENVIRONMENT = {
    # The engine's scheduler and worker are in the process that a test holds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Several engines share two cores, and none may claim one for itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # What vLLM learns of a model's class is kept with the environment; nothing is fetched, nothing is reported.
    "VLLM_CACHE_ROOT": str(VENV / "cache"),
    "VLLM_CONFIG_ROOT": str(VENV / "config"),
    "VLLM_NO_USAGE_STATS": "1",
    # Standard output has the driver's answers alone, also while it imports vLLM.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(REPO),
}
OPTIONS: dict[str, Any] = {
    "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8,
    "worker_extension_cls": "tests.support.vllm_worker.CacheRows",
}  # fmt: skip
if DEVICE != "cpu":
    del ENVIRONMENT["VLLM_CACHE_ROOT"], ENVIRONMENT["VLLM_CONFIG_ROOT"]
    ENVIRONMENT.update(
        PYTHONPATH=os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]),
        VLLM_USE_FLASHINFER_SAMPLER="0",
    )
    # vLLM asks for this share of the memory to be free while others start, and takes what is given in bytes.
    OPTIONS["gpu_memory_utilization"] = 0.03


def why_not() -> str | None:
    """Why no engine can be started here; None where one can."""
    if "PDTRANSFER_TEST_VLLM" not in os.environ and not (VENV / ".stamp").exists():
        return f"no vLLM here: make venv-vllm{VERSION and ' VERSION='}{VERSION}"
    return None


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine made of a prompt."""

    tokens: list[int]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None  # that its KV connector returned
    logprobs: list[dict[str, float]] | None = None  # of each token's likeliest, where they were asked for


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    """Prompts of random tokens, the same for the same seed, without those that begin and end a text."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


class VllmEngine(JsonProcess):
    """One engine. It starts in the background: `ready` waits for it.

    `options` are those of vLLM's LLM, `kv_transfer_config` among them; `environment` is added to its own, and `python`
    may be the interpreter of another environment that has vLLM. Its log is `log`.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
        python: Path = PYTHON,
        **options: Any,
    ) -> None:
        super().__init__(python, "tests.support.vllm_driver", log, ENVIRONMENT | dict(environment or {}))
        self._names, self._cold = count(), DEVICE == "cpu" and dtype == "bfloat16"
        if DEVICE == "cpu" and '"kv_lora_rank"' in (model / "config.json").read_text():
            # Where a processor has AMX, vLLM takes another one, which refuses weights of four bytes a number.
            options = {"attention_config": {"backend": "CPU_MLA"}} | options
            if drafts := options.get("speculative_config"):
                options["speculative_config"] = {"attention_backend": "CPU_MLA"} | drafts
        self._started = self.submit(
            "start", model=str(model), dtype=dtype, skip_tokenizer_init=True,
            **{"kv_cache_memory_bytes": KV_BYTES} | OPTIONS | options,
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """Once it takes requests: `blocks` and `block_size` of its KV cache, and for how many seconds our connector
        registered it, `register_s`."""
        started = self.wait(self._started, START_S)
        if self._cold:  # with AMX, vLLM 0.32 dies of SIGILL if the first step of bfloat16 has less than five tokens
            self._cold = False
            self.generate([[3] * 32], tokens=1)
        return started

    def add(
        self,
        prompt: Sequence[int],
        *,
        tokens: int,
        request: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> Future[Any]:
        """Adds a request for this many greedy tokens; `generated` has what comes of it, with the `logprobs` of this
        many likeliest tokens in the place of each."""
        return self.submit(
            "generate", request=request or f"request-{next(self._names)}", prompt=list(prompt), tokens=tokens,
            kv_transfer_params=kv_transfer_params, logprobs=logprobs,
        )  # fmt: skip

    def generated(self, added: Future[Any], seconds: float = ANSWER_S) -> Generated:
        """What came of a request that was added."""
        return Generated(**self.wait(added, seconds))

    def generate(self, prompts: Sequence[Sequence[int]], *, tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens of each prompt, all of them batched."""
        added = [self.add(prompt, tokens=tokens) for prompt in prompts]
        return [self.generated(each).tokens for each in added]

    def abort(self, request: str) -> None:
        """Ends a request as a client that goes away does."""
        self.ask("abort", ANSWER_S, request=request)

    def state(self) -> dict[str, int]:
        """`free_blocks` of its KV cache, and `requests` that its scheduler knows."""
        return self.ask("state", ANSWER_S)

    def forgets(self) -> bool:
        """Empties its prefix cache; False while a request has blocks."""
        return self.ask("forget", ANSWER_S)

    def hold(self) -> None:
        """Has it run no step, but those that `step` asks for, until `resume`."""
        self.ask("hold", ANSWER_S)

    def step(self, count: int = 1) -> None:
        """Has it run this many steps."""
        self.ask("step", ANSWER_S, count=count)

    def resume(self) -> None:
        """Ends `hold`."""
        self.ask("resume", ANSWER_S)

    def kv_digest(self, request: str, tokens: int, rank: int = 0) -> str:
        """The digest of a request's KV; see Driver."""
        return self.ask("kv_digest", ANSWER_S, request=request, tokens=tokens, rank=rank)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Its Prometheus metrics, where it was started with disable_log_stats=False."""
        return self.ask("metrics", ANSWER_S, prefix=prefix)

    def figures_of(self, connector: str, data: dict[str, Any]) -> dict[str, Any]:
        """What vLLM's MultiConnector logs of the figures of one of its connectors."""
        return self.ask("figures_of", ANSWER_S, connector=connector, data=data)


class StartEngine(Protocol):
    """What the fixture `start_engine` does."""

    def __call__(self, family: str, name: str = "engine", **options: Any) -> VllmEngine:
        """An engine that begins to start, with the tiny checkpoint of `family`; its log is named after `name`."""
        ...


class Checkpoints(JsonProcess):
    """Tiny checkpoints with random weights in `folder`, made when first asked for, and what transformers generate, both
    by the `python` of an environment that has them."""

    def __init__(self, folder: Path, python: Path = PYTHON, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        super().__init__(python, "tests.support.hf_driver", folder / "checkpoints.log", environment)
        self._folder = folder

    def path(self, family: str) -> Path:
        """One of a family of `hf_driver.FAMILIES`, in float32."""
        path = self._folder / family
        if not path.exists():
            self.ask("make", START_S, family=family, path=str(path))
        return path

    def generate(self, family: str, prompts: Sequence[Sequence[int]], *, tokens: int) -> list[list[int]]:
        """`tokens` greedy tokens of each prompt, by transformers' own `generate`."""
        return self.ask(
            "generate", START_S, path=str(self.path(family)), prompts=[list(each) for each in prompts], count=tokens
        )  # fmt: skip

    def adapter(self, model: Path, path: Path) -> None:
        """Writes a LoRA adapter for a model of the family llama."""
        self.ask("adapter", START_S, model=str(model), path=str(path))

    def eagle(self, model: Path, path: Path, architecture: str = "") -> None:
        """Writes an EAGLE head for a model of the family llama_drafted."""
        self.ask("eagle", START_S, model=str(model), path=str(path), architecture=architecture)

    def scaled(self, model: Path, path: Path, scale: float) -> None:
        """Writes a copy of a model with scales of a cache of 8 bits, of about this size."""
        self.ask("scaled", START_S, model=str(model), path=str(path), scale=scale)

    def embeddings(self, model: Path, prompt: Sequence[int]) -> str:
        """A prompt's embeddings, as vLLM's API takes them."""
        return self.ask("embeddings", START_S, model=str(model), prompt=list(prompt))

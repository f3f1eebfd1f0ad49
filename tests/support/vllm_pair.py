"""A vLLM engine for prefill and one for decode, with pdtransfer between them, and what a proxy does with both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from tests.support.vllm_engine import Generated, VllmEngine

SENDS: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
SETTLES_S = 30.0
TOKENS = 24  # that tests generate
LENGTHS = 5, 100, 127, 128, 129, 300, 700  # of their prompts, around blocks of 128
NEAR = 0.3  # of log-probabilities; hardly any of 512 random tokens is as near to the likeliest
LIKELIEST = 10  # tokens that an engine is asked for
TIES_MAX = TOKENS // 3
_IDENTITY = "remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "transfer_mode"


def transfer(role: str, *, policy: str = "fail", engine_id: str | None = None, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config with our connector; `extra` are its own settings."""
    named = {} if engine_id is None else {"engine_id": engine_id}
    return named | {
        "kv_connector": "PDTransferConnector", "kv_connector_module_path": "pdtransfer.adapters.vllm",
        "kv_role": role, "kv_load_failure_policy": policy, "kv_connector_extra_config": extra,
    }  # fmt: skip


def multi_connector(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A kv_transfer_config of decode with all of these, the first one first."""
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": connectors},
    }  # fmt: skip


@dataclass
class VllmPair:
    """Two engines. `blocks` are those that nobody has while no request is there."""

    prefill: VllmEngine
    decode: VllmEngine
    blocks: dict[str, int] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    _labels: Any = field(default_factory=count)

    def ready(self) -> None:
        """Once both run. One request tells what a proxy keeps of the prefill engine."""
        for name, engine in (("prefill", self.prefill), ("decode", self.decode)):
            self.blocks[name] = engine.ready()["blocks"] - 1
        self.learn()

    def learn(self) -> None:
        """Asks the prefill engine who it is."""
        made = self.serial([3, 4, 5], tokens=1, learns=True)
        assert made.finish_reason == "length", self.decode.log_end()

    def prefilled(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Prefill by a serial proxy: what the engine returned, which is for decode."""
        made = self.prefill.generated(self.prefill.add(prompt, tokens=1, kv_transfer_params=SENDS | more))
        assert made.kv_transfer_params is not None, self.prefill.log_end()
        return made.kv_transfer_params

    def serial(self, prompt: Sequence[int], *, tokens: int, learns: bool = False) -> Generated:
        """As vLLM's toy proxies: prefill, then decode with what prefill returned."""
        params = self.prefilled(prompt)
        if learns:
            self.identity = {name: params[name] for name in _IDENTITY}
        return self.decode.generated(self.decode.add(prompt, tokens=tokens, kv_transfer_params=params))

    def label(self) -> str:
        """A transfer_id."""
        return f"xfer-{time.time_ns()}-{next(self._labels)}"

    def sends(self, label: str) -> dict[str, Any]:
        """Parameters of prefill, as llm-d's sidecar makes them."""
        return SENDS | {"transfer_id": label}

    def receives(self, label: str) -> dict[str, Any]:
        """Parameters of decode, as llm-d's sidecar makes them from what it has kept."""
        return self.named(label) | {"transfer_id": label}

    def named(self, request: str) -> dict[str, Any]:
        """Parameters of decode, as vLLM's push proxy makes them from the request's X-Request-Id."""
        return self.identity | {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request}

    def begin_prefill(self, prompt: Sequence[int], label: str, **more: Any) -> Future[Any]:
        return self.prefill.add(prompt, tokens=1, kv_transfer_params=self.sends(label), **more)

    def begin_decode(self, prompt: Sequence[int], label: str, *, tokens: int, **more: Any) -> Future[Any]:
        return self.decode.add(prompt, tokens=tokens, kv_transfer_params=self.receives(label), **more)

    def settles(self) -> None:
        """Both engines come to rest with all blocks that they began with."""
        for name, engine in (("prefill", self.prefill), ("decode", self.decode)):
            expected = {"free_blocks": self.blocks[name], "requests": 0}
            settles(lambda engine=engine: engine.state(), expected)


def settles(state: Callable[[], Any], expected: Any, *, seconds: float = SETTLES_S) -> None:
    """Waits until the state is this one."""
    deadline = time.monotonic() + seconds
    while (found := state()) != expected:
        assert time.monotonic() < deadline, f"{found}, expected {expected}"
        time.sleep(0.05)


def rooms(engine: VllmEngine) -> dict[str, float]:
    """Hand-offs of an engine, by how they ended."""
    metrics = engine.metrics("vllm:pdtransfer_rooms_total")
    return {name.split()[1]: value for name, value in metrics.items()}


def received_bytes(engine: VllmEngine) -> float:
    """By our connector's count."""
    return engine.metrics("vllm:pdtransfer_bytes_total").get("vllm:pdtransfer_bytes_total received", 0.0)


def received_tokens(engine: VllmEngine) -> float:
    """By vLLM's own count, of all connectors."""
    return sum(engine.metrics("vllm:external_prefix_cache_hits_total").values())


def handed_over(pair: VllmPair, prompts: list[list[int]], *, order: str, tokens: int = TOKENS) -> list[Generated]:
    """The prompts, all at once, as a proxy of this kind dispatches them."""
    labels = [pair.label() for _ in prompts]
    if order == "by X-Request-Id":  # of which vLLM's server makes the requests' ids
        names = [str(uuid4()) for _ in prompts]
        for prompt, name in zip(prompts, names, strict=True):
            pair.prefill.add(prompt, tokens=1, request=f"cmpl-{name}-0", kv_transfer_params=SENDS)
        added = [
            pair.decode.add(prompt, tokens=tokens, request=f"cmpl-{name}-0", kv_transfer_params=pair.named(name))
            for prompt, name in zip(prompts, names, strict=True)
        ]
    elif order == "serial":
        done = [pair.prefill.add(prompt, tokens=1, kv_transfer_params=SENDS) for prompt in prompts]
        params = [pair.prefill.generated(each).kv_transfer_params for each in done]
        added = [
            pair.decode.add(prompt, tokens=tokens, kv_transfer_params=each)
            for prompt, each in zip(prompts, params, strict=True)
        ]
    else:
        sent = [pair.begin_prefill(*asked) for asked in zip(prompts, labels, strict=True) if order == "prefill first"]
        for each in sent:
            pair.prefill.generated(each)
        added = [pair.begin_decode(prompt, label, tokens=tokens) for prompt, label in zip(prompts, labels, strict=True)]
        if order == "decode first":
            settles(lambda: pair.decode.state()["requests"], len(prompts))
            for prompt, label in zip(prompts, labels, strict=True):
                pair.begin_prefill(prompt, label)
    answers = [pair.decode.generated(each) for each in added]
    assert all(answer.finish_reason != "error" for answer in answers), pair.decode.log_end()
    return answers


def ties(single: VllmEngine, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """How many of an answer's tokens are not those of one engine, but nearly as likely, each behind all that stands
    before it; None where one of them is not."""
    count = done = 0
    while done < len(tokens):
        added = single.add([*prompt, *tokens[:done]], tokens=len(tokens) - done, logprobs=LIKELIEST)
        alone = single.generated(added)
        differs = [index for index, token in enumerate(alone.tokens) if token != tokens[done + index]]
        if not differs:
            break
        assert alone.logprobs is not None
        likely = alone.logprobs[differs[0]]
        done += differs[0]
        if max(likely.values()) - likely.get(str(tokens[done]), -math.inf) > NEAR:
            return None
        count, done = count + 1, done + 1
    return count


def continue_as_one(single: VllmEngine, asked: Sequence[Sequence[int]], answers: Sequence[Generated]) -> None:
    """One engine would give these answers; no hand-off was lost."""
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.finish_reason == "length"
        assert answer.kv_transfer_params is not None
        assert answer.kv_transfer_params["kv_lost"] is False
        others = ties(single, prompt, answer.tokens)
        assert others is not None, f"prompt of {len(prompt)}: a token that one engine does not find likely"
        assert others <= TIES_MAX, f"prompt of {len(prompt)}: {others} other tokens"
        print(f"prompt of {len(prompt)}: {len(answer.tokens)} tokens, {others} of them others that are as likely")

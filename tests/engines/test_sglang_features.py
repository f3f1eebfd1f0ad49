"""What clients ask of SGLang's servers, through router and backend: the answers are those of one server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.asked_features import CHAT, CITY, COMPLETION, NAMED, TEMPLATE, TEXT, TOOL
from tests.support.sglang_engine import DEVICE, SglangServer, is_since
from tests.support.tiny_tokenizer import END, START, write_tokenizer
from tests.support.vllm_engine import Checkpoints
from tests.support.vllm_server import HttpProcess, router

pytestmark = [
    pytest.mark.timeout(2_000),  # servers start slowly on a busy host
    pytest.mark.skipif(DEVICE != "cpu", reason="without a grammar backend on a GPU"),
]

SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PLACE = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
SCORED = {"sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
# By the name of the feature: where it is asked, and the body.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": ("/v1/completions", COMPLETION | {"logprobs": 3}),
    "logprobs of a chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "prompt logprobs": ("/generate", {"text": TEXT} | SCORED),
    "prompt logprobs of several": ("/generate", {"text": [TEXT, TEXT[40:]]} | SCORED),
    "echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 2}),
    "JSON schema": ("/v1/chat/completions", CHAT | {"response_format": PLACE}),
    "regular expression": ("/v1/completions", COMPLETION | {"regex": "[a-f]{12}"}),
    "grammar": ("/v1/completions", COMPLETION | {"ebnf": 'root ::= "yes" | "no"'}),
    "a tool by name": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": NAMED}),
    "any tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    "penalties": ("/v1/completions", COMPLETION | {"frequency_penalty": 0.7}),
    "a text that stops it": ("/v1/completions", COMPLETION | {"stop": ["a"]}),
}  # fmt: skip
OF_ONE_ANSWER = {"id", "created", "usage", "e2e_latency", "metadata", "weight_version"}


@dataclass
class Servers:
    """Our router in front of a prefill and a decode server of SGLang, and a server that does both."""

    router: HttpProcess
    single: SglangServer


@pytest.fixture(scope="module")
def servers(sglang_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("features")
    model = shutil.copytree(sglang_checkpoints.path("llama_bytes"), folder / "model")
    words = write_tokenizer(folder / "words", vocabulary=300, special=(START, END), template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(words / name, model)
    decode: dict[str, Any] = {"disaggregation_mode": "decode"}
    if is_since("0.5.18"):  # the default backup of what is retracted is pinned by CUDA
        decode["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                SglangServer(
                    model, folder / f"{name}.log", settings={"verify": True, "time_left_s": 60.0},
                    tool_call_parser="qwen25", served_model_name="m", **options,
                )
            )
            for name, options in (("prefill", {"disaggregation_mode": "prefill"}), ("decode", decode), ("single", {}))
        }  # fmt: skip
        for server in started.values():
            server.ready()
        front = router(started["prefill"], started["decode"], folder / "router.log", engine="sglang")
        yield Servers(stack.enter_context(front).ready(), started["single"])


def what_counts(answer: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        return {name: what_counts(value) for name, value in answer.items() if name not in OF_ONE_ANSWER}
    if isinstance(answer, list):
        return [what_counts(each) for each in answer]
    return pytest.approx(answer, rel=1e-3, abs=1e-3) if isinstance(answer, float) else answer


@pytest.mark.parametrize("feature", ASKED)
def test_an_answer_is_that_of_one_server(servers: Servers, feature: str) -> None:
    path, body = ASKED[feature]
    body = body if path == "/generate" else {"model": "m"} | body
    answer, expected = servers.router.post(path, body), servers.single.ask(path, body)
    assert what_counts(answer) == what_counts(expected)

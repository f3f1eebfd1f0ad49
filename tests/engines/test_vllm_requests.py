"""What clients ask of vLLM's servers, through router and connector: the answers are those of decode's server alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_features import CHAT, CITY, COMPLETION, NAMED, OTHER, TEMPLATE, TEXT, TOOL
from tests.support.tiny_tokenizer import END, START, write_tokenizer
from tests.support.vllm_engine import Checkpoints
from tests.support.vllm_pair import settles, transfer
from tests.support.vllm_server import HttpProcess, router, vllm_server

# By the name of the feature: where it is asked, the body, and how many prompts' KV lands.
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "logprobs": ("/v1/completions", COMPLETION | {"logprobs": 3}, 1),
    "logprobs of a chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}, 1),
    "prompt logprobs": ("/v1/completions", COMPLETION | {"prompt_logprobs": 2}, 0),
    "echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}, 0),
    "n": ("/v1/completions", COMPLETION | {"n": 3, "temperature": 1.0, "top_k": 1}, 1),
    "several prompts": ("/v1/completions", COMPLETION | {"prompt": [TEXT, OTHER]}, 1),
    "JSON schema": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}}, 1,
    ),
    "regular expression": ("/v1/completions", COMPLETION | {"structured_outputs": {"regex": "[a-f]{12}"}}, 1),
    "a tool by name": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": NAMED}, 1),
    "any tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}, 1),
    "LoRA": ("/v1/completions", COMPLETION | {"model": "tuned"}, 1),
}  # fmt: skip


@dataclass
class Servers:
    """A prefill and a decode server of vLLM, and our router in front of both."""

    prefill: HttpProcess
    decode: HttpProcess
    router: HttpProcess
    model: Path
    checkpoints: Checkpoints

    def received(self) -> tuple[float, float]:
        """Hand-offs that decode has received, and their bytes."""
        return (
            self.decode.metric("vllm:pdtransfer_rooms_total", end="received"),
            self.decode.metric("vllm:pdtransfer_bytes_total", direction="received"),
        )

    def handed_over(self, path: str, body: dict[str, Any]) -> tuple[Any, float]:
        """The answer to a request of the router, and the bytes that landed for it."""
        rooms, byte_count = self.received()
        answer = self.router.post(path, body)
        settles(lambda: self.received()[0] > rooms, True)
        return answer, self.received()[1] - byte_count


@pytest.fixture(scope="module")
def servers(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("requests")
    model = shutil.copytree(checkpoints.path("llama_bytes"), folder / "model")
    words = write_tokenizer(folder / "words", vocabulary=300, special=(START, END), template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(words / name, model)
    checkpoints.adapter(model, folder / "tuned")
    options = [
        "--enable-lora", "--lora-modules", f"tuned={folder / 'tuned'}", "--max-lora-rank", "8", "--max-loras", "1",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-embeds",
    ]  # fmt: skip
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                vllm_server(model, folder / f"{role}.log", *options, transfer=transfer(role, time_left_s=60.0))
            )
            for role in ("kv_producer", "kv_consumer")
        )
        front = stack.enter_context(router(prefill.ready(), decode.ready(), folder / "router.log"))
        yield Servers(prefill, decode, front.ready(), model, checkpoints)


def what_counts(answer: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        gone = {"id", "created", "kv_transfer_params", "system_fingerprint", "usage"}
        return {name: what_counts(value) for name, value in answer.items() if name not in gone}
    return [what_counts(each) for each in answer] if isinstance(answer, list) else answer


def nearly(answer: Any) -> Any:
    """Equal to an answer whose numbers were computed in other batches."""
    if isinstance(answer, dict):
        return {name: nearly(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [nearly(each) for each in answer]
    return pytest.approx(answer, rel=1e-3, abs=1e-3) if isinstance(answer, float) else answer


@pytest.mark.parametrize("feature", ASKED)
def test_an_answer_is_that_of_one_engine(servers: Servers, feature: str) -> None:
    path, body, prompts = ASKED[feature]
    body = {"model": "m"} | body
    answer, byte_count = servers.handed_over(path, body)
    assert what_counts(answer) == nearly(what_counts(servers.decode.post(path, body)))
    assert (byte_count > 0) == (prompts > 0)
    for choice in answer["choices"]:
        if (message := choice.get("message")) is not None:
            assert message["content"] or message["tool_calls"]


def test_the_adapter_changes_the_answer(servers: Servers) -> None:
    """So that a prompt whose KV is the model's own would be seen."""
    path, body, _ = ASKED["LoRA"]
    answers = [servers.router.post(path, body | {"model": name})["choices"][0]["text"] for name in ("m", "tuned")]
    assert answers[0] != answers[1]


def test_a_prompt_of_embeddings_is_handed_over(servers: Servers) -> None:
    """They are those of a prompt's tokens, so the answer is that of the tokens."""
    tokens = [3 + 7 * at % 290 for at in range(300)]
    body = {"model": "m"} | COMPLETION | {"prompt": tokens}
    expected = servers.decode.post("/v1/completions", body)["choices"][0]["text"]
    embeddings = servers.checkpoints.embeddings(servers.model, tokens)
    body = {name: value for name, value in body.items() if name != "prompt"} | {"prompt_embeds": embeddings}
    answer, byte_count = servers.handed_over("/v1/completions", body)
    assert answer["choices"][0]["text"] == expected
    assert byte_count > 0

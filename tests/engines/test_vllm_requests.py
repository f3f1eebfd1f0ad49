"""What clients ask of vLLM's servers, through router and connector: the answers are those of decode's server alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.asked_features import CHAT, CITY, COMPLETION, NAMED, OTHER, TEXT, TOOL
from tests.support.vllm_server import ServerPair

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
def test_an_answer_is_that_of_one_engine(vllm_servers: ServerPair, feature: str) -> None:
    path, body, prompts = ASKED[feature]
    body = {"model": "m"} | body
    answer, byte_count = vllm_servers.handed_over(path, body, lands=prompts > 0)
    assert what_counts(answer) == nearly(what_counts(vllm_servers.decode.post(path, body)))
    assert (byte_count > 0) == (prompts > 0)
    for choice in answer["choices"]:
        if (message := choice.get("message")) is not None:
            assert message["content"] or message["tool_calls"]


def test_the_adapter_changes_the_answer(vllm_servers: ServerPair) -> None:
    """So that a prompt whose KV is the model's own would be seen."""
    path, body, _ = ASKED["LoRA"]
    answers = [vllm_servers.router.post(path, body | {"model": name})["choices"][0]["text"] for name in ("m", "tuned")]
    assert answers[0] != answers[1]


def test_a_prompt_of_embeddings_is_handed_over(vllm_servers: ServerPair) -> None:
    """They are those of a prompt's tokens, so the answer is that of the tokens."""
    tokens = [3 + 7 * at % 290 for at in range(300)]
    body = {"model": "m"} | COMPLETION | {"prompt": tokens}
    expected = vllm_servers.decode.post("/v1/completions", body)["choices"][0]["text"]
    embeddings = vllm_servers.checkpoints.embeddings(vllm_servers.model, tokens)
    body = {name: value for name, value in body.items() if name != "prompt"} | {"prompt_embeds": embeddings}
    answer, byte_count = vllm_servers.handed_over("/v1/completions", body)
    assert answer["choices"][0]["text"] == expected
    assert answer["kv_transfer_params"]["kv_bytes"] == byte_count > 0

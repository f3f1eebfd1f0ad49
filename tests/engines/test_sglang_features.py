"""What clients ask of SGLang's servers, through router and backend: the answers are those of one server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.asked_features import CHAT, CITY, COMPLETION, NAMED, TEXT, TOOL, texts_of
from tests.support.sglang_engine import DEVICE, SglangServer, is_since
from tests.support.vllm_engine import Checkpoints
from tests.support.vllm_server import HttpProcess, model_of_bytes, router, stream_of

pytestmark = [
    pytest.mark.timeout(2_000),  # servers start slowly on a busy host
    pytest.mark.skipif(DEVICE != "cpu", reason="without a grammar backend on a GPU"),
]

CHATS = "/v1/chat/completions"
THINKS, ANSWERS = "<think>", "</think>"  # tokens of the model: the third and the fourth
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}  # an answer without reasoning before it
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PLACE = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
SCORED = {"sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
# By the name of the feature: where it is asked, and the body.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": ("/v1/completions", COMPLETION | {"logprobs": 3}),
    "logprobs of a chat": (CHATS, CHAT | AT_ONCE | {"logprobs": True, "top_logprobs": 3}),
    "prompt logprobs": ("/generate", {"text": TEXT} | SCORED),
    "prompt logprobs of several": ("/generate", {"text": [TEXT, TEXT[40:]]} | SCORED),
    "echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 2}),
    "JSON schema": (CHATS, CHAT | AT_ONCE | {"response_format": PLACE}),
    "regular expression": ("/v1/completions", COMPLETION | {"regex": "[a-f]{12}"}),
    "grammar": ("/v1/completions", COMPLETION | {"ebnf": 'root ::= "yes" | "no"'}),
    "a tool by name": (CHATS, CHAT | AT_ONCE | {"tools": [TOOL], "tool_choice": NAMED}),
    "any tool": (CHATS, CHAT | AT_ONCE | {"tools": [TOOL], "tool_choice": "required"}),
    "n": ("/v1/completions", COMPLETION | {"n": 3}),
    "n of several prompts": ("/v1/completions", COMPLETION | {"prompt": [TEXT, TEXT[40:]], "n": 2, "logprobs": 2}),
    "n of a chat": (CHATS, CHAT | AT_ONCE | {"n": 3}),
    "n of /generate": ("/generate", {"text": TEXT, "sampling_params": SAMPLING | {"n": 3}}),
    "n with echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 2, "n": 2}),
    "penalties": ("/v1/completions", COMPLETION | {"frequency_penalty": 0.7}),
    "a text that stops it": ("/v1/completions", COMPLETION | {"stop": ["a"]}),
}  # fmt: skip
# By what comes of it: the body of a chat, and which of the reasoning and the answer there are.
REASONS: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "both": (AT_ONCE | {"regex": f"{THINKS}[bjn]{{9}}{ANSWERS}[qvx]{{9}}"}, (True, True)),
    # Prefill's token ends the reasoning; the regular expression is for what follows.
    "an answer": ({"regex": "[qvx]{9}", "logit_bias": {"3": 100}}, (False, True)),
    "reasoning": ({"max_tokens": 12, "ignore_eos": True, "logit_bias": {"3": -100}}, (True, False)),
}
OF_ONE_ANSWER = {
    "id", "created", "usage", "e2e_latency", "metadata", "weight_version", "cached_tokens", "cached_tokens_details"
}  # fmt: skip


@dataclass
class Servers:
    """Our router in front of a prefill and a decode server of SGLang, and a server that does both."""

    router: HttpProcess
    single: SglangServer
    prefill: SglangServer


@pytest.fixture(scope="module")
def servers(sglang_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("features")
    model = model_of_bytes(sglang_checkpoints.path("llama_bytes"), folder, marks=(THINKS, ANSWERS))
    # A prompt that prefill has cached is computed once for all its choices.
    prefill = {"disaggregation_mode": "prefill", "disable_radix_cache": False, "enable_metrics": True}
    decode: dict[str, Any] = {"disaggregation_mode": "decode"}
    if is_since("0.5.18"):  # the default backup of what is retracted is pinned by CUDA
        decode["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                SglangServer(
                    model, folder / f"{name}.log", settings={"verify": True, "time_left_s": 60.0},
                    tool_call_parser="qwen25", reasoning_parser="qwen3", served_model_name="m", **options,
                )
            )
            for name, options in (("prefill", prefill), ("decode", decode), ("single", {}))
        }  # fmt: skip
        for server in started.values():
            server.ready()
        front = router(started["prefill"], started["decode"], folder / "router.log", engine="sglang")
        yield Servers(stack.enter_context(front).ready(), started["single"], started["prefill"])


def what_counts(answer: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        return {name: what_counts(value) for name, value in answer.items() if name not in OF_ONE_ANSWER}
    if isinstance(answer, list):
        return [what_counts(each) for each in answer]
    return pytest.approx(answer, rel=1e-3, abs=1e-3) if isinstance(answer, float) else answer


def usage_of(event: Any) -> tuple[int, int, int]:
    """A prompt's tokens, those that were generated, and all."""
    return tuple(event["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total"))


def choice_of(events: list[Any], index: int) -> tuple[dict[str, str], str | None]:
    """The texts of one choice of a stream by field, and why it ended."""
    of_choice = [
        event | {"choices": choices}
        for event in events
        if (choices := [choice for choice in event["choices"] if choice["index"] == index])
    ]
    reasons = [choice["finish_reason"] for event in of_choice for choice in event["choices"] if choice["finish_reason"]]
    return texts_of(of_choice), *reasons


@pytest.mark.parametrize("feature", ASKED)
def test_an_answer_is_that_of_one_server(servers: Servers, feature: str) -> None:
    path, body = ASKED[feature]
    body = body if path == "/generate" else {"model": "m"} | body
    answer, expected = servers.router.post(path, body), servers.single.ask(path, body)
    assert what_counts(answer) == what_counts(expected)


@pytest.mark.parametrize("feature", ["n", "n of several prompts", "n of a chat"])
def test_a_stream_has_the_choices_of_one_server(servers: Servers, feature: str) -> None:
    path, body = ASKED[feature]
    body = {"model": "m", "stream_options": {"include_usage": True}} | body
    answer, expected = (stream_of(url, path, body) for url in (servers.router.url, servers.single.url))
    count = body["n"] * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    assert usage_of(answer[-1]) == usage_of(expected[-1])
    assert all(event["choices"] for event in answer[:-1])
    for index in range(count):
        texts, finish = choice_of(answer, index)
        assert texts
        assert (texts, finish) == choice_of(expected, index)
    assert max(choice["index"] for event in answer for choice in event["choices"]) == count - 1


def test_choices_that_are_drawn_differ_and_count_once_in_the_prompt(servers: Servers) -> None:
    before = servers.prefill.metric("sglang:cached_tokens_total")
    body = {"model": "m"} | COMPLETION | {"prompt": f"drawn: {TEXT}", "temperature": 1, "n": 6}
    answer = servers.router.post("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    expected = servers.single.ask("/v1/completions", body)
    assert usage_of(answer) == usage_of(expected)
    prompt_tokens = answer["usage"]["prompt_tokens"]
    # Each but the first computes at least the prompt's last token, or page.
    cached = servers.prefill.metric("sglang:cached_tokens_total") - before
    assert cached > 4 * prompt_tokens, "prefill has computed the prompt once"


@pytest.mark.parametrize("parts", REASONS)
def test_reasoning_is_parsed_of_the_whole_output(servers: Servers, parts: str) -> None:
    """Decode's server parses its own output from the first token on, which prefill's server has sampled."""
    asked, has = REASONS[parts]
    body = {"model": "m"} | CHAT | asked
    [answer] = servers.router.post(CHATS, body)["choices"]
    assert what_counts(answer) == what_counts(servers.single.ask(CHATS, body)["choices"][0])
    message = answer["message"]
    assert (bool(message["reasoning_content"]), bool(message["content"])) == has
    texts = texts_of(stream_of(servers.router.url, CHATS, body))
    assert texts == texts_of(stream_of(servers.single.url, CHATS, body))
    assert texts == {name: message[name] for name in ("reasoning_content", "content") if message[name]}

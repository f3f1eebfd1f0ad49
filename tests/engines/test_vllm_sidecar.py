"""Behind llm-d's routing sidecar the answers are those of decode's server alone. PDTRANSFER_TEST_SIDECAR names llm-d's
program; without it the sidecar is played as its source has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.support.asked_features import QUESTION, TEXT
from tests.support.llmd_sidecar import PREFILLER, Sidecar, sidecar
from tests.support.vllm_pair import settles
from tests.support.vllm_server import ServerPair

pytestmark = pytest.mark.timeout(1_200)
COMPLETION: dict[str, Any] = {"prompt": TEXT, "max_tokens": 16, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": QUESTION, "max_completion_tokens": 16, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "chat": ("/v1/chat/completions", CHAT),
    "stream of a completion": ("/v1/completions", COMPLETION | STREAM),
    "stream of a chat": ("/v1/chat/completions", CHAT | STREAM),
}


def pieces(chunks: list[Any]) -> tuple[str, Any]:
    """The text of an answer's events, or of an answer as the only one; and the tokens of its usage."""
    text, usage = "", None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += message.get("content") or ""
    return text, usage and (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.fixture(scope="module", params=["nixlv2", "mooncake"])
def front(
    request: pytest.FixtureRequest, vllm_servers: ServerPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """Before decode's server."""
    log = tmp_path_factory.mktemp("sidecar") / "sidecar.log"
    with sidecar(vllm_servers.decode.url, request.param, vllm_servers.bootstrap_port, log) as started:
        yield started


@pytest.mark.parametrize("asked", ASKED)
def test_behind_llm_ds_sidecar_an_answer_is_that_of_one_engine(
    vllm_servers: ServerPair, asked: str, front: Sidecar
) -> None:
    path, body = ASKED[asked]
    body = {"model": "m", "temperature": 0} | body
    if front.connector == "nixlv2":  # with the other prefill is sent it too, and vLLM refuses that: above max_tokens
        body["min_tokens"] = 16
    alone = front.post(path, body, {})
    assert alone.status == 200, alone
    rooms, byte_count = vllm_servers.received()
    # The proxy in front may have its own id of the request, which both servers get as well.
    for headers in ({}, {"x-request-id": str(uuid4())}):
        named = {PREFILLER: vllm_servers.prefill.url.removeprefix("http://")} | headers
        answer = front.post(path, body, named)
        assert answer.status == 200, answer
        if "stream" in body:
            assert pieces(answer.streamed) == pieces(alone.streamed)
        else:
            assert pieces([answer.json]) == pieces([alone.json])
            assert not answer.json["kv_transfer_params"]["kv_lost"]
    settles(lambda: vllm_servers.received()[0] - rooms, 2)
    assert vllm_servers.received()[1] > byte_count

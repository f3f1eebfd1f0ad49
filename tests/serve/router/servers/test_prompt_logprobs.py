"""A prompt's logprobs, which SGLang's prefill computes, in decode's answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.serve.router.backends.servers.sglang import SglangDialect, asks_for_logprobs
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import ServerSite

OF_PROMPT = {
    "input_token_logprobs": [[None, 1, None], [-2.5, 2, None]],
    "input_top_logprobs": [None, [[-0.1, 7, None]]],
}
PREFILL = {"text": "x", "output_ids": [4], "meta_info": {"id": "p", "completion_tokens": 1, **OF_PROMPT}}
DECODE = {
    "text": "xyz",
    "output_ids": [4, 5, 6],
    "meta_info": {"id": "d", "completion_tokens": 3, "input_token_logprobs": []},
}
GENERATED = DECODE | {"meta_info": DECODE["meta_info"] | OF_PROMPT}


def completion(*logprobs: dict[str, list] | None) -> dict:
    choices = [{"index": index, "text": "t", "logprobs": each} for index, each in enumerate(logprobs)]
    return {"id": "cmpl", "choices": choices, "usage": {"total_tokens": 9}}


def scored(*tokens: str) -> dict[str, list]:
    return {"tokens": [*tokens], "token_logprobs": [-float(len(token)) for token in tokens]}


def fields(**body: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


def joined_json(prefill: object, decode: object) -> object:
    return json.loads(SglangDialect().joined(json.dumps(prefill).encode(), json.dumps(decode).encode()))


@pytest.mark.parametrize(
    ("body", "is_asked"),
    [
        ({"echo": True, "logprobs": 1}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"echo": True, "logprobs": None}, False),
        ({"echo": False, "logprobs": 3}, False),
        ({"logprobs": True, "top_logprobs": 2, "stream": True}, False),
        ({"return_logprob": True, "logprob_start_len": 0}, True),
        ({"return_logprob": [False, True], "logprob_start_len": [-1, 5]}, True),
        ({"return_logprob": True}, False),
        ({"return_logprob": True, "logprob_start_len": -1}, False),
        ({"return_logprob": None, "logprob_start_len": 0}, False),
        ({"return_logprob": "yes", "logprob_start_len": 0}, False),
    ],
    ids=str,
)
def test_a_request_asks_for_its_prompts_logprobs_as_sglang_reads_it(body: dict, is_asked: bool) -> None:
    path = "/generate" if "return_logprob" in body else "/v1/completions"
    assert asks_for_logprobs(path, fields(**body)) is is_asked
    for elsewhere in {"/generate", "/v1/completions", "/v1/chat/completions"} - {path}:
        assert not asks_for_logprobs(elsewhere, fields(**(body | {"stream": True})))


@pytest.mark.parametrize("body", [{"echo": True, "logprobs": 1}, {"return_logprob": True, "logprob_start_len": 0}])
def test_a_stream_cannot_have_them(body: dict) -> None:
    with pytest.raises(RefusedRequestError, match="prompt's logprobs"):
        asks_for_logprobs("/v1/completions" if "echo" in body else "/generate", fields(**body, stream=True))


def test_what_prefill_computed_of_the_prompt_is_put_into_decodes_answer() -> None:
    assert joined_json(PREFILL, DECODE) == GENERATED
    assert joined_json([PREFILL, PREFILL], [DECODE, DECODE]) == [GENERATED, GENERATED]
    first, rest = scored("a", "bb", "first"), scored("first", "last")
    whole = scored("a", "bb", "first", "last")
    assert joined_json(completion(first, first), completion(rest, rest)) == completion(whole, whole)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([PREFILL], [DECODE, DECODE]),
        ({"error": "none"}, DECODE),
        (PREFILL, {"meta_info": 5}),
        (completion(scored("a")), completion(scored("a"), scored("b"))),
        (completion(None), completion(scored("a"))),
        ({"choices": 7}, completion(scored("a"))),
        (PREFILL, completion(scored("a"))),
        ("text", "text"),
    ],
    ids=range(8),
)
def test_answers_that_are_not_of_one_request_are_refused(prefill: object, decode: object) -> None:
    with pytest.raises(RemoteProtocolError):
        joined_json(prefill, decode)


async def answer_with(it: ServerSite, of_prefill: object) -> tuple[int, Any]:
    """What a client gets for a request with its prompt's logprobs."""
    for server, answer in ((it.prefill[0], of_prefill), (it.decode[0], DECODE)):

        async def reply(
            request: web.Request, seen: Any, server: FakeSglang = server, answer: object = answer
        ) -> web.Response:
            await server.hand_over(seen)
            return web.json_response(answer)

        server.reply = reply  # type: ignore[method-assign]
    status, answer, _ = await it.post("/generate", text="once", return_logprob=True, logprob_start_len=0)
    return status, answer


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.given(of=FakeSglang)
async def test_a_client_gets_one_answer_of_both_servers(site: ServerSite, fits: bool) -> None:
    status, answer = await answer_with(site, PREFILL if fits else [PREFILL, PREFILL])
    if fits:
        assert (status, answer) == (200, GENERATED)
    else:
        assert answer["error"]["code"] == "breach"
        assert "does not fit" in answer["error"]["message"]
    assert not any(server.unfinished for server in site.backend.pool.all)

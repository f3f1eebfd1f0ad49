"""Answers that servers have aborted, as vLLM does at SIGTERM: they are attempts that failed, and no answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdtransfer.serve.router.backends.servers.attempt import HELD_BYTES_MAX
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import PIECES, FakeVllm, Seen, ServerSite, server_site, streamed

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
CASES = [(FakeVllm, COMPLETIONS), (FakeVllm, CHATS), (FakeSglang, CHATS), (FakeSglang, GENERATE)]
WHOLE = "".join(PIECES)


def content(path: str, text: str, reason: str | None, *, delta: bool) -> dict[str, Any]:
    """An answer, or an event of one, as the server of this path writes it."""
    if path == GENERATE:
        full = None if reason is None else {"type": reason, "message": "Aborted", "status_code": None}
        return {"text": text, "meta_info": {"id": "r", "finish_reason": full}}
    named = {"text": text} if path == COMPLETIONS else {"delta" if delta else "message": {"content": text}}
    return {"id": "r", "choices": [{"index": 0, **named, "logprobs": None, "finish_reason": reason}], "usage": None}


def events(path: str, *contents: dict[str, Any]) -> list[str]:
    """A stream as these servers write it, compact and with the role first."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    texts = [json.dumps(event, separators=(",", ":")) for event in ((role,) if path == CHATS else ()) + contents]
    return [f"data: {text}\n\n" for text in (*texts, "[DONE]")]


def answers(server: FakeVllm, path: str, text: str, reason: str) -> None:
    """The server answers so from now on: with a stream event by event, or with all that is held and then the rest."""

    async def reply(request: web.Request, seen: Seen) -> web.StreamResponse:
        await server.hand_over(seen)
        if seen.body.get("stream"):
            begin = [content(path, text, None, delta=True)] if text else []
            pieces, kind = events(path, *begin, content(path, "", reason, delta=True)), "text/event-stream"
        else:
            body = json.dumps(content(path, text, reason, delta=False), separators=(",", ":"))
            pieces, kind = [body[:HELD_BYTES_MAX], body[HELD_BYTES_MAX:]], "application/json"
        return await streamed(request, map(str.encode, pieces), kind=kind)

    server.reply = reply  # type: ignore[method-assign]


def body_of(path: str, **more: object) -> dict[str, object]:
    of_chat = {"messages": [{"role": "user", "content": "once"}]}
    prompt = {GENERATE: {"text": "once"}, CHATS: of_chat, COMPLETIONS: {"prompt": "once"}}[path]
    return {"model": "m", **prompt, **more}


async def asked(site: ServerSite, path: str, **more: object) -> tuple[int, str]:
    async with site.http.post(site.url + path, json=body_of(path, **more)) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(("of", "path"), CASES, ids=lambda value: getattr(value, "speaks", value))
@pytest.mark.parametrize(
    ("text", "stream"), [("", False), (WHOLE, False), ("", True)], ids=["empty", "text", "empty stream"]
)
async def test_what_no_client_has_seen_is_tried_again(of: type[FakeVllm], path: str, text: str, stream: bool) -> None:
    """An answer has its reason at its end, so a whole one is read before it is passed on."""
    async with server_site(decode=2, of=of) as site:
        bad, good = site.decode
        site.server(good).unfinished += 1
        answers(bad, path, text, "abort")
        answers(good, path, "right", "stop")
        status, answer = await asked(site, path, stream=stream)
        assert (status, '"right"' in answer, "abort" in answer) == (200, True, False), answer
        assert (len(bad.seen), len(good.seen), site.backend.metrics.retries) == (1, 1, 1)
        assert answer.count('"role"') == (path == CHATS and stream)
        assert site.ended[-1].status == 200


@pytest.mark.parametrize(("of", "path"), CASES, ids=lambda value: getattr(value, "speaks", value))
async def test_a_stream_that_has_begun_ends_with_an_error_in_place_of_the_abort(of: type[FakeVllm], path: str) -> None:
    async with server_site(decode=2, of=of) as site:
        for server in site.decode:
            answers(server, path, WHOLE, "abort")
        status, stream = await asked(site, path, stream=True)
        *_, text, last, rest = stream.split("\n\n")
        assert (status, WHOLE in text, rest) == (200, True, "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["message"].endswith("has aborted the request")) == ("peer_lost", True)
        assert "[DONE]" not in stream
        assert sum(len(server.seen) for server in site.decode) == 1
        assert site.backend.metrics.answers_cut == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_where_no_other_server_is_the_client_gets_503(site: ServerSite, stream: bool) -> None:
    answers(site.decode[0], COMPLETIONS, "", "abort")
    for more in ({}, {"rid": "of another engine's servers"}):
        status, answer = await asked(site, COMPLETIONS, stream=stream, **more)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "peer_lost")


@pytest.mark.given(decode=2)
async def test_an_answer_too_long_to_be_held_breaks_off(site: ServerSite) -> None:
    """Wherever in it the first piece ends."""
    reason_at = len(json.dumps(content(COMPLETIONS, "", "abort", delta=False), separators=(",", ":")).encode())
    for beyond in (-1, *range(8, 64, 8)):
        for server in site.decode:
            answers(server, COMPLETIONS, "x" * (HELD_BYTES_MAX - reason_at + beyond), "abort")
        if beyond < 0:
            assert (await asked(site, COMPLETIONS))[0] == 503
            continue
        try:
            status, _ = await asked(site, COMPLETIONS)
        except aiohttp.ClientPayloadError:
            status = 0
        assert status in (0, 503), beyond
    assert status == 0


async def test_a_text_about_aborts_is_passed_on(site: ServerSite) -> None:
    text = '{"finish_reason":"abort"}'
    for stream in (False, True):
        answers(site.decode[0], COMPLETIONS, text, "stop")
        status, answer = await asked(site, COMPLETIONS, stream=stream)
        assert (status, json.dumps(text) in answer) == (200, True)
    assert site.backend.metrics.retries == 0


@pytest.mark.given(of=FakeSglang)
async def test_sglang_aborts_what_the_client_has_named_for_the_client(site: ServerSite) -> None:
    answers(site.decode[0], GENERATE, WHOLE, "abort")
    status, answer = await asked(site, GENERATE, rid="mine")
    assert (status, json.loads(answer)["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert site.backend.metrics.retries == 0


@pytest.mark.given(decode=2)
async def test_a_chat_begins_for_its_client_with_more_than_a_role(site: ServerSite) -> None:
    """And a server that is lost between both has shown nothing."""
    bad, good = site.decode
    site.server(good).unfinished += 1

    async def reply(request: web.Request, seen: Seen) -> web.StreamResponse:
        await bad.hand_over(seen)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events(CHATS)[0].encode())
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    bad.reply = reply  # type: ignore[method-assign]
    answers(good, CHATS, "right", "stop")
    status, answer = await asked(site, CHATS, stream=True)
    assert (status, answer.count('"role"'), '"right"' in answer) == (200, 1, True)

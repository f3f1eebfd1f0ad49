"""Streams that begin with prefill's first token, while decode does not have the KV yet."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.serve.router.backends.servers.early_token import (
    EARLY_KINDS_MAX,
    EARLY_WRONG_MAX,
    EarlyToken,
    may_come_early,
)
from tests.serve.router.servers.relayed import relayed
from tests.support.vllm_servers import PIECES, ServerSite, first_token_events, server_site, texts
from tests.support.waiting import until

GREEDY = {"model": "m", "prompt": "once", "max_tokens": 9, "stream": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "once"}], "stream": True, "temperature": 0.0}


def stream(events: list[dict]) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) + b"data: [DONE]\n\n"


def event(**choice: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"id": "d", "choices": [{"index": 0, "finish_reason": None} | choice]}).encode()
        + b"\n\n"
    )


def parsed(events: bytes) -> list[dict]:
    return [json.loads(each.removeprefix(b"data: "))["choices"][0] for each in events.split(b"\n\n") if each]


def early(text: str = "one ", body: dict = GREEDY, logprobs: tuple[float, ...] = (-0.1, -2.5)) -> EarlyToken | None:
    asked = body | ({"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2})
    return EarlyToken.of(stream(first_token_events(asked, text, logprobs)))


# What may come early


@pytest.mark.parametrize(
    "more",
    [
        {}, {"stop": None}, {"stop": []}, {"logprobs": None}, {"seed": 5, "top_p": 0.5}, {"ignore_eos": True},
        {"stream_options": {"include_usage": True}}, {"n": 1}, {"temperature": 0.0}, {"echo": False},
        {"repetition_penalty": 1.0}, {"repetition_penalty": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("body", [GREEDY, CHAT], ids=["completion", "chat"])
def test_a_greedy_stream_of_one_choice_may_come_early(body: dict, more: dict) -> None:
    assert may_come_early(relayed(body | more))


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False}, {"temperature": 0.1}, {"temperature": None}, {"temperature": "0"}, {"n": 2}, {"stop": "x"},
        {"logprobs": 0}, {"logprobs": True}, {"min_tokens": 3}, {"echo": True}, {"prompt": ["a", "b"]},
        {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1}}, {"tools": [{}]}, {"response_format": {"type": "json"}},
        {"stream_options": {"continuous_usage_stats": True}}, {"stream_options": 7}, {"of_tomorrow": 1},
        {"return_token_ids": True}, {"structured_outputs": {}}, {"prompt_logprobs": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_first_token_or_its_events_may_depend_on_waits_for_decode(more: dict) -> None:
    assert not may_come_early(relayed(GREEDY | more))


def test_without_a_temperature_of_its_own_a_request_has_the_servers() -> None:
    assert not may_come_early(relayed({"prompt": "once", "stream": True}))


@pytest.mark.parametrize("body", [GREEDY, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("text", "logprobs", "shown"),
    [
        ("one ", (-0.1, -2.5), True),
        ("one ", (-0.5, -1.5), True),
        ("one ", (-0.5, -1.4), False),
        ("one ", (-2.5, -0.1), False),
        ("one ", (-0.1,), False),
        ("", (-0.1, -2.5), False),
        ("\n", (-0.1, -2.5), False),
        ("<", (-0.1, -2.5), False),
        ("é\ufffd", (-0.1, -2.5), False),
    ],
    ids=["clear", "just", "close", "not the likeliest", "unknown", "no text", "a space", "a mark", "half a character"],
)
def test_a_token_is_shown_where_it_is_a_word_and_clearly_the_likeliest(
    body: dict, text: str, logprobs: tuple[float, ...], shown: bool
) -> None:
    token = early(text, body, logprobs)
    assert (token is not None) is shown
    if token is not None:
        *_, last = parsed(token.events)
        assert last.get("text", last.get("delta", {}).get("content")) == text
        assert (last["finish_reason"], last["logprobs"]) == (None, None)


@pytest.mark.parametrize(
    "change",
    [{"finish_reason": "stop"}, {"logprobs": None}, {"delta": {"tool_calls": [{"id": "x"}]}}, {"text": 7}],
    ids=str,
)
def test_an_answer_that_ends_or_has_more_than_a_text_is_not_shown(change: dict) -> None:
    (only,) = first_token_events(GREEDY | {"logprobs": 2}, "one ", (-0.1, -2.5))
    only["choices"][0] |= change
    assert EarlyToken.of(stream([only])) is None


@pytest.mark.parametrize(
    "body", [b"", b"data: 7\n\n", b"<html>", b'data: {"error": {"code": 500}}\n\n', b"data: {}\n\n"]
)
def test_an_answer_of_another_form_is_not_shown(body: bytes) -> None:
    assert EarlyToken.of(body) is None


# What comes behind it


@pytest.mark.parametrize(
    ("events", "new"),
    [
        ([event(text="one ")], []),
        ([event(text=""), event(text="one ")], []),
        ([event(text="o"), event(text="ne two ")], ["two "]),
        ([event(text="one two three")], ["two three"]),
        ([event(text="one ", finish_reason="length")], [""]),
    ],
    ids=["the same", "a role first", "in two", "several in one", "the last"],
)
def test_decodes_events_are_passed_on_without_what_was_shown(events: list[bytes], new: list[str]) -> None:
    token = early()
    assert token is not None
    behind = b"".join(token.behind(each) for each in events)
    assert token.repeated
    assert [each["text"] for each in parsed(behind)] == new


def test_a_chats_role_is_not_repeated() -> None:
    token = early(body=CHAT)
    assert token is not None
    assert [each["delta"] for each in parsed(token.events)] == [
        {"role": "assistant", "content": ""},
        {"content": "one "},
    ]
    assert token.behind(event(delta={"role": "assistant", "content": ""})) == b""
    assert not token.repeated
    (rest,) = parsed(token.behind(event(delta={"content": "one two "})))
    assert (rest["delta"], token.repeated) == ({"content": "two "}, True)


@pytest.mark.parametrize(
    "events",
    [
        [event(text="two ")],
        [event(text="on"), event(text="ce ")],
        [event(text="", finish_reason="stop")],
        [b"data: [DONE]\n\n"],
        [event(delta={"reasoning": "one "})],
        [b"data: 7\n\n"],
    ],
    ids=["another", "another end", "an end", "nothing", "another field", "no event"],
)
def test_a_stream_that_goes_on_in_another_way_is_an_error(events: list[bytes]) -> None:
    token = early()
    assert token is not None
    *before, last = events
    for each in before:
        assert token.behind(each) == b""
    with pytest.raises(RemoteProtocolError):
        token.behind(last)


# With servers


async def first_event(it: ServerSite, **body: Any) -> tuple[asyncio.Task[str], str]:
    """Begins a stream; returns what reads its rest, and its first event."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> str:
        async with it.http.post(it.url + "/v1/completions", json=GREEDY | body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            begun.set_result((await response.content.readuntil(b"\n\n")).decode())
            return begun.result() + (await response.read()).decode()

    return asyncio.create_task(read()), await begun


async def test_a_stream_begins_before_decode_and_goes_on_with_what_follows(site: ServerSite) -> None:
    await site.meet()
    site.decode[0].gate.clear()
    task, first = await first_event(site)
    assert '"one "' in first
    (seen,) = site.prefill[0].seen
    assert (seen.body["stream"], seen.body["logprobs"], seen.body["max_tokens"]) == (True, 2, 1)
    assert not task.done()
    site.decode[0].gate.set()
    assert texts(await task) == PIECES
    assert "logprobs" not in site.decode[0].seen[0].body
    assert (site.backend.metrics.first_tokens_early, site.backend.metrics.first_tokens_wrong) == (1, 0)
    await until(lambda: not any(each.unfinished for each in site.backend.pool.all))


async def test_the_first_request_of_a_prefill_learns_who_it_is_and_waits(site: ServerSite) -> None:
    assert texts(await site.stream(temperature=0)) == PIECES
    assert site.prefill[0].seen[0].body["stream"] is False
    assert site.backend.metrics.first_tokens_early == 0


@pytest.mark.parametrize("how", ["off", "not greedy", "close", "refused", "another position"])
async def test_where_it_may_not_come_early_decodes_stream_is_whole(how: str) -> None:
    async with server_site(stream_from="decode" if how == "off" else "prefill") as it:
        prefill = it.prefill[0]
        if how == "another position":  # what prefill of a hybrid model generates does not follow the prompt
            prefill.more_params = {"first_token": False}
        await it.meet()
        if how == "close":
            prefill.logprobs = (-0.7, -0.8)
        if how == "refused":  # as a server that computes no logprobs
            reply = prefill.reply

            async def refuses(request: Any, seen: Any) -> Any:
                prefill.status, prefill.answer = (400 if "logprobs" in seen.body else 200), {"error": {"code": 400}}
                if prefill.status == 200:
                    it.decode[0].gate.set()
                return await reply(request, seen)

            prefill.reply = refuses  # type: ignore[method-assign]
            it.decode[0].gate.clear()
        stream = await it.stream(temperature=0.5 if how == "not greedy" else 0)
        assert texts(stream) == PIECES
        assert it.backend.metrics.first_tokens_early == 0
        asked = [each.body["stream"] for each in prefill.seen]
        assert asked == {"close": [True], "refused": [True, False]}.get(how, [False])
        assert prefill.url == it.backend.pool.prefill[0].url
        assert it.backend.pool.prefill[0].identity is not None


@pytest.mark.given(decode=2)
async def test_another_decode_goes_on_where_the_first_one_fails_behind_the_first_token(site: ServerSite) -> None:
    await site.meet()
    bad, good = site.decode
    site.server(good).unfinished += 1
    bad.gate.clear()
    task, first = await first_event(site)
    assert '"one "' in first
    bad.first_error = 500
    bad.gate.set()
    assert texts(await task) == PIECES
    assert len(good.seen) == 1
    assert (site.backend.metrics.retries, site.backend.metrics.answers_cut) == (1, 0)
    await until(lambda: not site.server(bad).unfinished)


@pytest.mark.parametrize("how", ["another token", "no stream"])
async def test_a_stream_that_decode_does_not_go_on_with_ends_with_an_error(
    site: ServerSite, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    await site.meet()
    decode, reply = site.decode[0], site.decode[0].reply
    decode.pieces = ["One ", "two"]

    async def answers(request: web.Request, seen: Any) -> web.StreamResponse:
        await decode.gate.wait()
        return web.json_response({"choices": [{"text": "one "}]})

    for _ in range(EARLY_WRONG_MAX):
        decode.gate.clear()
        decode.reply = reply if how == "another token" else answers  # type: ignore[method-assign]
        task, first = await first_event(site)
        assert '"one "' in first
        decode.gate.set()
        *_, last, rest = (await task).split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine"
        assert (rest, site.ended[-1].status) == ("", 500)
    assert site.backend.metrics.first_tokens_wrong == EARLY_WRONG_MAX
    assert "does not go on behind prefill's first token" in caplog.text
    decode.reply = reply  # type: ignore[method-assign]
    site.prefill[0].seen.clear()
    assert texts(await site.stream(temperature=0)) == ["One ", "two"]
    assert site.prefill[0].seen[0].body["stream"] is False, "no first token is shown early any more"


def chat_texts(stream: str) -> list[dict]:
    *events, done, _ = stream.split("\n\n")
    assert done == "data: [DONE]"
    return [delta for each in events if (delta := json.loads(each.removeprefix("data: "))["choices"][0]["delta"])]


@pytest.mark.parametrize("text_field", ["content", "reasoning"])
async def test_chats_begin_with_prefills_token_once_one_of_their_kind_began_alike(
    site: ServerSite, text_field: str
) -> None:
    """Where the servers have other parsers, decode puts in another field what prefill puts in this one."""
    await site.meet()
    (prefill,), (decode,) = site.prefill, site.decode
    decode.text_field, whole = (
        text_field,
        [{"role": "assistant", "content": ""}, *({text_field: piece} for piece in PIECES)],
    )
    known = site.server(decode).begins_alike

    async def chat(**more: Any) -> list[dict]:
        async with site.http.post(site.url + "/v1/chat/completions", json=CHAT | more) as response:
            return chat_texts((await response.read()).decode())

    def begun() -> tuple[int, bool]:
        return site.backend.metrics.first_tokens_early, prefill.seen[-1].body["stream"]

    assert (await chat(), begun()) == (whole, (0, True)), "the first one is compared"
    await until(lambda: list(known.values()) == [text_field == "content"])
    if text_field == "content":
        decode.gate.clear()
        again = asyncio.create_task(chat())
        await until(lambda: site.backend.metrics.first_tokens_early == 1)
        decode.gate.set()
        assert await again == whole
    else:
        assert (await chat(), begun()) == (whole, (0, False))
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    early = site.backend.metrics.first_tokens_early
    assert (await chat(**thinks), begun()) == (whole, (early, True)), "another kind is compared anew"
    prefill.engine = "p0 again"  # another process: its identity is learnt first
    site.backend.pool.prefill[0].identity = None
    assert [(await chat(), begun()) for _ in range(2)] == [(whole, (early, False)), (whole, (early, True))]
    assert site.backend.metrics.first_tokens_wrong == 0


async def test_no_more_kinds_of_chats_than_are_remembered_are_compared(site: ServerSite) -> None:
    await site.meet()
    known = site.server(site.decode[0]).begins_alike
    known |= {("p0", bytes([number])): True for number in range(EARLY_KINDS_MAX)}
    async with site.http.post(site.url + "/v1/chat/completions", json=CHAT) as response:
        _, *pieces = chat_texts((await response.read()).decode())
    assert pieces == [{"content": piece} for piece in PIECES]
    assert site.prefill[0].seen[-1].body["stream"] is False
    assert len(known) == EARLY_KINDS_MAX


async def test_a_refusal_of_decode_behind_the_first_token_is_the_streams_last_event(site: ServerSite) -> None:
    await site.meet()
    site.decode[0].first_error = 400
    site.decode[0].gate.clear()
    task, _ = await first_event(site)
    site.decode[0].gate.set()
    *_, last, rest = (await task).split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"]["code"], rest) == ("refused", "")
    assert (site.ended[-1].status, site.backend.metrics.retries) == (400, 0)


async def test_a_client_that_leaves_behind_the_first_token_cancels_decode(site: ServerSite) -> None:
    await site.meet()
    site.decode[0].gate.clear()
    task, _ = await first_event(site)
    await until(lambda: site.decode[0].seen)
    task.cancel()
    await until(lambda: site.decode[0].seen[0].left)
    await until(lambda: site.prefill[0].given_up == [site.prefill[0].seen[0].kv["transfer_id"]])
    await until(lambda: not any(each.unfinished for each in site.backend.pool.all))

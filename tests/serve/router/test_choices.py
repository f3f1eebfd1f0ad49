"""A request of several rooms: one answer, one failure, and none of them left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message import FunctionCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from pdtransfer.errors import Cause
from pdtransfer.serve.router.backends.daemons.answer import TURN_TOKENS_MAX, Answer
from pdtransfer.serve.router.backends.daemons.answers import LOGPROBS_INLINE_MAX
from pdtransfer.serve.router.backends.daemons.router_effects import RoomEnded
from pdtransfer.serve.router.front.client_request import ClientRequest
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.serve.router.front.text import BytesText
from pdtransfer.wire import End, Logprobs, unpack_ids
from tests.serve.router.router_site import LIMITS, Site, parse
from tests.support.openai_types import checked_answer
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


async def test_a_chat_is_one_prompt_and_its_answer_has_a_message(site: Site) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    status, content, _ = await site.post(CHAT, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2)
    assert status == 200
    answer = checked_answer(content, chat=True)
    prompt = "system: x\nuser: ab\nassistant: "
    assert bytes(unpack_ids("", site.decode[0].begun[0].prompt).tolist()).decode() == prompt
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (prompt[::-1][:4], "assistant")
    assert [(each.token, each.logprob, each.bytes) for each in choice.logprobs.content][:2] == [
        (" ", -0.5, [32]), (":", -0.5, [58]),
    ]  # fmt: skip
    assert [each.logprob for each in choice.logprobs.content[0].top_logprobs] == [-1.0, -2.0]
    assert answer.usage.total_tokens == len(prompt) + 4
    assert content["pdtransfer"]["decode"] == "d0"


CALL = ChatCompletionMessageFunctionToolCall(
    id="c1", type="function", function=Function(name="weather", arguments='{"city": "Bern"}')
)
SENT_BACK: list[tuple[Any, str]] = [  # a message as OpenAI's client has it, and its line of the prompt
    ({"role": "developer", "content": "d", "name": "n"}, "developer: d"),
    ({"role": "system", "content": [{"type": "text", "text": "s"}]}, "system: s"),
    ({"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]}, "user: uv"),
    ({"role": "user", "content": ""}, "user: "),
    (ChatCompletionMessage(role="assistant", content="a"), "assistant: a"),
    (ChatCompletionMessage(role="assistant", content="a").model_dump(), "assistant: a"),
    (ChatCompletionMessage(role="assistant", content=None, refusal="no"), "assistant: no"),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "assistant: no"),
    (
        ChatCompletionMessage(role="assistant", content=None, tool_calls=[CALL]),
        'assistant: [{"id":"c1","type":"function","function":{"name":"weather","arguments":{"city":"Bern"}}}]',
    ),
    (
        ChatCompletionMessage(role="assistant", content="", tool_calls=[CALL]).model_dump(),
        'assistant: [{"id":"c1","type":"function","function":{"name":"weather","arguments":{"city":"Bern"}}}]',
    ),
    (
        ChatCompletionMessage(role="assistant", function_call=FunctionCall(name="f", arguments="{")),
        'assistant: [{"type":"function","function":{"name":"f","arguments":"{"}}]',
    ),
    ({"role": "tool", "tool_call_id": "c1", "content": "sun"}, "tool: sun"),
    ({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]}, "tool: sun"),
    ({"role": "function", "name": "f", "content": None}, "tool: "),
]


async def test_openais_client_sends_back_whatever_a_chat_is_made_of(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="-") as client:
        for sent in [SENT_BACK, *([message] for message in SENT_BACK)]:
            answer = await client.chat.completions.create(
                model="m", messages=[message for message, _ in sent], max_tokens=1
            )
            assert answer.choices[0].finish_reason == "length"
            prompt = bytes(unpack_ids("", site.decode[0].begun[-1].prompt).tolist()).decode()
            assert prompt == "".join(f"{line}\n" for _, line in sent) + "assistant: "
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}, ChatCompletionMessage(role="assistant")]
            )
        assert refused.value.param == "messages[1].content"


@pytest.mark.given(decode=2, limits=replace(LIMITS, slow_ms=LIMITS.silence_ms - 1))
async def test_several_prompts_and_choices_are_one_answer_in_order(site: Site) -> None:
    # On a busy host this process may stand still: no worker is taken for slow then, and passed over.
    for worker in site.decode:
        worker.gate.clear()  # no room ends before all are placed
    task = asyncio.create_task(site.post(prompt=["abc", "xy"], n=2, max_tokens=4, logprobs=1, echo=False))
    await until(lambda: sum(len(worker.begun) for worker in site.decode) == 4)
    for worker in site.decode:
        worker.gate.set()
    status, content, _ = await task
    assert status == 200
    answer = checked_answer(content, chat=False)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "cbac"), (1, "cbac"), (2, "yxyx"), (3, "yxyx"),
    ]  # fmt: skip
    assert answer.choices[2].logprobs.tokens == ["y", "x", "y", "x"]
    assert answer.choices[2].logprobs.text_offset == [0, 1, 2, 3]
    assert answer.choices[2].logprobs.top_logprobs[0] == {"\0": -1.0, "y": -0.5}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)
    assert content["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}  # of each prompt once
    assert [each["decode"] for each in content["pdtransfer"]].count("d0") == 2
    assert site.router.open_requests.count == 0


async def test_the_prompt_is_echoed_before_each_choice(site: Site) -> None:
    _, content, _ = await site.post(prompt=["abc", "\u20ac"], max_tokens=3, echo=True)
    assert [each["text"] for each in content["choices"]] == ["abccba", "\u20ac\ufffd\ufffd\ufffd"]
    _, content, _ = await site.post(prompt=[97, 98], max_tokens=2, echo=True)
    assert content["choices"][0]["text"] == "abba"


async def test_a_stop_string_cancels_its_room_alone(site: Site) -> None:
    site.decode[0].more.clear()  # after three tokens nothing more comes until it is let go
    task = asyncio.create_task(site.post(prompt=["xabc", "abc"], max_tokens=9, stop="ba"))
    await until(lambda: len(site.decode[0].stopped) == 2)
    status, content, _ = await task
    assert [(each["text"], each["finish_reason"]) for each in content["choices"]] == [("c", "stop")] * 2
    assert (status, content["usage"]["completion_tokens"]) == (200, 6)
    assert content["usage"]["prompt_tokens_details"] is None
    await until(lambda: not site.backend.routing.rooms)
    site.decode[0].more.set()
    _, content, _ = await site.post(prompt=["xabc", "abc"], max_tokens=5, stop="xc")
    assert [each["text"] for each in content["choices"]] == ["cba", "cbacb"]
    assert [each["finish_reason"] for each in content["choices"]] == ["stop", "length"]


async def failing(site: Site, *, stream: bool) -> tuple[int, bytes]:
    """Three choices, of which the second fails after a token."""
    site.decode[0].gate.clear()
    body = {"prompt": "abc", "max_tokens": 9, "n": 3, "stream": stream}
    task = asyncio.create_task(site.http.post(site.url + "/v1/completions", json=body).__aenter__())
    await until(lambda: len(site.decode[0].begun) == 3)
    room = site.decode[0].begun[1].room
    site.decode[0].perform(site.decode[0].service.tokens(room, [120], asyncio.get_running_loop().time()))
    if stream:
        await until(lambda: task.done())
    else:
        await until(lambda: site.backend.routing._rooms[room].received)
    site.decode[0].end(End(room, "engine", "broken", 0))
    response = await task
    content = await response.read()
    response.close()
    return response.status, content


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_fails_the_answer_and_cancels_the_other_rooms(site: Site, stream: bool) -> None:
    status, content = await failing(site, stream=stream)
    if stream:
        *_, last = content.decode().strip().split("\n\n")
        assert (status, json.loads(last.removeprefix("data: "))["error"]["code"]) == (200, "engine")
    else:
        assert (status, json.loads(content)["error"]["code"]) == (500, "engine")
    await until(lambda: len(site.decode[0].stopped) == 2)
    await until(lambda: not site.backend.routing.rooms)
    assert site.router.open_requests.count == site.router.open_requests.prompts_bytes == 0
    assert not site.backend._choices


async def test_a_room_that_cannot_begin_takes_the_others_with_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.decode[0].gate.clear()
    submit, calls = site.backend.routing.submit, []

    def refusing(request, now):
        calls.append(request)
        if len(calls) == 3:
            raise AnswerFailedError("full", Cause.FULL, retry_ms=1_000)
        return submit(request, now)

    monkeypatch.setattr(site.backend.routing, "submit", refusing)
    status, content, headers = await site.post(prompt="abc", n=4, max_tokens=2)
    assert (status, content["error"]["code"], headers["Retry-After"]) == (429, "full", "1")
    assert len(calls) == 3
    await until(lambda: not site.backend.routing.rooms)
    assert not site.backend._choices


@pytest.mark.given(limits=replace(LIMITS, rooms_max=3))
async def test_rooms_of_one_request_count_one_by_one(site: Site) -> None:
    status, content, _ = await site.post(prompt="a", n=4)
    assert (status, content["error"]["param"]) == (400, "n")
    assert not site.decode[0].begun
    assert (await site.post(prompt="a", n=3))[0] == 200
    site.router.open_requests.prompts_bytes = site.router._config.limits.prompts_bytes_max - 20
    status, content, _ = await site.post(prompt="abc", n=2)
    assert (status, content["error"]["code"]) == (429, "full")
    assert (await site.post(prompt="ab", n=2))[0] == 200
    assert (await site.post(prompt=["a", "b"], echo=True))[0] == 200
    assert (await site.post(prompt="ab", n=2, echo=True))[0] == 200
    site.router.open_requests.prompts_bytes += 1
    assert (await site.post(prompt="ab", n=2, echo=True))[0] == 429
    assert (await site.post(prompt="ab", n=2))[0] == 200


async def test_others_have_their_turn_between_the_rooms_of_one_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, turns, seen = site.backend.routing.submit, 0, []

    def watched(request, now):
        seen.append(turns)
        return submit(request, now)

    monkeypatch.setattr(site.backend.routing, "submit", watched)
    task = asyncio.create_task(site.post(prompt=["ab", "c"], n=2, max_tokens=2))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await task)[0] == 200
    assert len(set(seen)) == 4


@pytest.mark.parametrize("stop", [None, "b"])
async def test_tokens_that_a_slow_client_left_are_read_in_turns(stop: str | None) -> None:
    count = 3 * TURN_TOKENS_MAX
    body = {"prompt": "x", "n": 3, "max_tokens": count + 1, "logprobs": 0, "stop": stop}
    completion = parse(json.dumps(body).encode(), seed=1)
    turns, stopped = 0, []
    client = ClientRequest(node="r", path="/v1/completions", request_id="r-1")
    complete = partial(RoomEnded, id=1, prefill_node="p", decode_node="d")
    scores = b"".join(Logprobs(-float(index)).pack() for index in range(count))

    def stopping(request: int) -> None:
        stopped.append(request)
        choices[request].room_ended(complete(request=request), 0.0)

    answer = Answer(replace(completion, chat=True), client, BytesText(), stopping, lambda _: None)
    choices = [answer.add(index) for index in range(3)]
    for index, choice in enumerate(choices):
        choice.put([97] * count + [98], scores + Logprobs(-1.0).pack(), 0.0)
        if index or stop is None:
            choice.room_ended(complete(request=index), 0.0)

    async def other() -> None:
        nonlocal turns
        while not answer.ended:
            turns += 1
            await asyncio.sleep(0)

    texts, own = ["", "", ""], [[], [], []]
    task = asyncio.create_task(other())
    while events := (await answer.more()).decode().split("\n\n")[:-1]:
        gained = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if "[DONE]" not in event]
        assert sum(len(choice["delta"]["content"]) for choice in gained) <= TURN_TOKENS_MAX
        for choice in gained:
            index, delta = choice["index"], choice["delta"]
            assert ("role" in delta) == (texts[index] == "")
            texts[index] += delta["content"]
            own[index] += [token["logprob"] for token in choice["logprobs"]["content"]]
    await task
    assert texts == ["a" * count + ("" if stop else "b")] * 3
    assert own == [[-float(index) for index in range(count)] + ([] if stop else [-1.0])] * 3
    assert (turns >= 9, stopped) == (True, [0] if stop else [])
    assert [choice.text.tokens for choice in choices] == [count + 1] * 3


@pytest.mark.parametrize("chat", [False, True])
async def test_many_logprobs_are_written_on_a_thread(site: Site, chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, written = [], Answer._written

    def watched(self: Answer, *args):
        threads.append(threading.current_thread() is threading.main_thread())
        return written(self, *args)

    monkeypatch.setattr(Answer, "_written", watched)
    path, asked = (CHAT, {"messages": [{"role": "user", "content": "a"}]}) if chat else ("/v1/completions", {})
    for count in (2, LOGPROBS_INLINE_MAX):
        body = {"logprobs": True, "top_logprobs": 2} if chat else {"prompt": "ab", "logprobs": 2}
        status, content, _ = await site.post(path, **asked, **body, max_tokens=count, n=2)
        assert status == 200
        checked_answer(content, chat=chat)
    assert threads == [True, False]

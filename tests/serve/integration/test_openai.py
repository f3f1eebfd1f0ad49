"""OpenAI's API over real processes: its types hold every answer, and its client drives the fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import pdtransfer
from tests.support.fleets import Site, running
from tests.support.openai_types import checked_answer, checked_chunk
from tests.support.tiny_tokenizer import END, write_tokenizer
from tests.support.waiting import Running, standing

EOS, MODEL = 0, "stamp-mla"
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENGINE = {"engine_option": ("layers=2", f"eos={EOS}")}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    logs = tmp_path_factory.mktemp("fleet")
    # The engine answers with the ids of ASCII's lower case: with this many ids before them, these are the same letters.
    special = (END, *(f"<|{number}|>" for number in range(32)))
    model = write_tokenizer(
        logs / "model", vocabulary=256 + len(special), special=special, template=TEMPLATE, context=1_000, eos_token=END
    )
    yield from standing(running(logs, prefills=[ENGINE], decodes=[ENGINE], router={"model": model}))


def client(site: Site) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=site.fleet.url + "/v1", api_key="none", max_retries=0)


async def post(site: Site, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with site.http.post(path, json=body) as response:
        return response.status, await response.json()


async def chunks(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    async with site.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        *events, done = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


def joined(events: list[Any], index: int) -> str:
    own = [choice for event in events for choice in event.choices if choice.index == index]
    return "".join((each.delta.content or "") if hasattr(each, "delta") else each.text for each in own)


def text_of(choice: Any) -> str:
    return choice.message.content if hasattr(choice, "message") else choice.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_object_is_of_openais_types_and_streams_add_up_to_the_answer(site: Site, path: str) -> None:
    chat = path == CHAT
    body: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    body |= {"max_tokens": 12, "n": 2, "seed": 7, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.5}
    body |= {} if chat else {"prompt": ["hello", "two"]}
    status, content = await post(site, path, **body)
    assert status == 200, content
    whole = checked_answer(content, chat=chat)
    assert len(whole.choices) == (2 if chat else 4)
    assert len(content["pdtransfer"]) == len(whole.choices)
    tokens = whole.usage.completion_tokens
    assert tokens <= 12 * len(whole.choices)
    listed = [(choice.logprobs.content if chat else choice.logprobs.tokens) for choice in whole.choices]
    assert sum(map(len, listed)) == tokens
    raw = await chunks(site, path, **body, stream_options={"include_usage": True})
    *events, last = [checked_chunk(each, chat=chat) for each in raw]
    assert all(each["usage"] is None for each in raw[:-1])
    assert (last.choices, last.usage.completion_tokens) == ([], tokens)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        assert joined(events, choice.index) == text_of(choice)
        (end,) = (e for event in events for e in event.choices if e.index == choice.index and e.finish_reason)
        assert end.finish_reason == choice.finish_reason
    if chat:
        roles = [choice.delta.role for event in events for choice in event.choices if choice.delta.role]
        assert roles == ["assistant"] * len(whole.choices)
    assert not any("usage" in chunk for chunk in await chunks(site, path, **body))
    await site.settled()


async def test_openais_client_gets_answers_whole_and_streamed(site: Site) -> None:
    async with client(site) as api:
        how: Any = {"model": MODEL, "max_tokens": 10, "temperature": 0}
        chat = await api.chat.completions.create(messages=HELLO, **how)
        pieces = [each async for each in await api.chat.completions.create(messages=HELLO, stream=True, **how)]
        assert joined(pieces, 0) == chat.choices[0].message.content
        text = await api.completions.create(prompt="user: hello\n", **how)
        assert text.choices[0].text == chat.choices[0].message.content
        streamed = await api.completions.create(prompt="user: hello\n", stream=True, **how)
        assert joined([each async for each in streamed], 0) == text.choices[0].text
        ids = (await post(site, "/tokenize", prompt="user: hello\n"))[1]["tokens"]
        again = await api.completions.create(prompt=ids, echo=True, **how)
        assert again.choices[0].text == "user: hello\n" + text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await api.chat.completions.create(messages=HELLO, response_format={"type": "json_object"}, **how)
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(**{**how, "model": "gpt"}, messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it_and_frees_its_rooms(site: Site, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "tell me", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    status, content = await post(site, TEXT, **body)
    assert status == 200
    whole = content["choices"][0]["text"]
    stop = whole[20:23]  # of three tokens at least
    index = whole.index(stop)
    body |= {"stop": [stop, "\0never"], "max_tokens": 900}
    if stream:
        events = await chunks(site, TEXT, **body, stream_options={"include_usage": True})
        text = "".join(each["text"] for event in events for each in event["choices"])
        usage, extension = events[-1]["usage"], events[-2]["pdtransfer"]
        reason = events[-2]["choices"][0]["finish_reason"]
    else:
        _, content = await post(site, TEXT, **body)
        text, reason = content["choices"][0]["text"], content["choices"][0]["finish_reason"]
        usage, extension = content["usage"], content["pdtransfer"]
    assert (text, reason) == (whole[:index], "stop")
    assert usage["completion_tokens"] < 100
    assert (extension["kv_bytes"], extension["decode"]) == (None, "decode-0")
    await site.settled()
    kept = (await post(site, TEXT, **body, include_stop_str_in_output=True))[1]["choices"][0]["text"]
    assert kept == whole[: index + len(stop)]


async def test_biases_penalties_and_lengths_reach_the_model(site: Site) -> None:
    async def tokens(**body: Any) -> tuple[list[int], str]:
        how = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 0, **body}
        status, content = await post(site, TEXT, **how)
        assert status == 200, content
        choice = content["choices"][0]
        ids = [(await post(site, "/tokenize", prompt=each))[1]["tokens"] for each in choice["logprobs"]["tokens"]]
        return [each[0] for each in ids], choice["finish_reason"]

    x, y = (await post(site, "/tokenize", prompt="XY"))[1]["tokens"]
    biased = {str(x): 100, str(y): 99}
    assert await tokens(logit_bias=biased) == ([x] * 6, "length")
    alternating, _ = await tokens(logit_bias=biased, presence_penalty=2, frequency_penalty=2)
    assert set(alternating) == {x, y}
    assert (await tokens(logit_bias=biased, repetition_penalty=3))[0].count(y) >= 1
    ended = {str(EOS): 100, str(x): 50}
    assert await tokens(logit_bias=ended) == ([EOS], "stop")
    assert await tokens(logit_bias=ended, min_tokens=3) == ([x, x, x, EOS], "stop")
    assert await tokens(logit_bias=ended, ignore_eos=True) == ([EOS] * 6, "length")


async def test_what_serves_beside_the_answers(site: Site) -> None:
    async with client(site) as api:
        (listed,) = (await api.models.list()).data
        assert (listed.id, listed.model_extra) == (MODEL, {"max_model_len": 1_000})
        assert await api.models.retrieve(MODEL) == listed
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("gpt")
    _, found = await post(site, "/tokenize", messages=HELLO)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1_000)
    assert (await post(site, "/detokenize", tokens=found["tokens"]))[1] == {"prompt": "user: hello\n"}
    assert json.loads((await site.get(site.router, "/version"))[1]) == {"version": pdtransfer.__version__}
    status, refused = await post(site, "/tokenize", prompt=5)
    assert (status, refused["error"]["param"]) == (400, "prompt")
    status, refused = await post(site, "/detokenize", tokens=[-1])
    assert (status, refused["error"]["param"]) == (400, "tokens[0]")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": [5, 289]}, "prompt"), ({"prompt": "x", "logit_bias": {"289": 1}}, "logit_bias")]
)
async def test_what_the_model_has_not_is_refused_at_once(site: Site, body: dict[str, Any], param: str) -> None:
    status, content = await post(site, TEXT, **body)
    assert (status, content["error"]["param"], content["error"]["code"]) == (400, param, None)

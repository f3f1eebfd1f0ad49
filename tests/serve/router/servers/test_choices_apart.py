"""Several choices of a prompt in front of SGLang: a request for each, and one answer."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from aiohttp import web

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.serve.router.backends.servers.attempt import Relay
from pdtransfer.serve.router.backends.servers.choices import JOINED_INLINE_BYTES_MAX, Choices
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.backends.servers.joined_choices import JoinedAnswers, JoinedEvents
from pdtransfer.serve.router.backends.servers.server_request import ServerRequest
from pdtransfer.serve.router.backends.servers.sglang import SAMPLING_BYTES_MAX, SERVER_CHOICES_MAX
from pdtransfer.serve.router.front.client_request import ClientRequest
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from tests.serve.router.servers.relayed import relayed
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import LIMITS, Seen, ServerSite
from tests.support.waiting import until

CHATS, GENERATE = "/v1/chat/completions", "/generate"
SGLANG = DIALECTS["sglang"]
PROMPT_TOKENS = 5
COMPLETION_TOKENS = {7: 2, 8: 3, 9: 4}  # by the seed


def seed_of(body: dict) -> int:
    return body["sampling_params"]["sampling_seed"] if "sampling_params" in body else body["seed"]


@dataclass
class SamplingSglang(FakeSglang):
    """A server that answers with one choice for each prompt, as SGLang writes it: its text has the prompt and the seed.
    `fails` are the seeds of requests that it refuses, `breaks` those of streams that end with an error."""

    fails: dict[int, int] = field(default_factory=dict)  # with which status
    fails_after: asyncio.Event | None = None
    why: str = "fails"
    breaks: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # those of streams that never end

    async def reply(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        seed, body = seed_of(seen.body), seen.body
        if (status := self.fails.get(seed)) is not None:
            if self.fails_after is not None:
                await self.fails_after.wait()
            return web.json_response(
                {"object": "error", "message": f"{seed} {self.why}", "code": status}, status=status
            )
        await self.gate.wait()
        await self.hand_over(seen)
        if self.role == "prefill" or not body.get("stream"):
            await self.more.wait()
            return web.json_response(self.answer_of(seen.path, body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        first, *rest = self.events_of(seen.path, body)
        await self._event(response, json.dumps(first))
        await self.more.wait()
        if seed in self.held:
            await asyncio.Event().wait()
        if seed in self.breaks:
            rest = [{"error": {"message": f"{seed} breaks", "code": 500}}]
        for event in rest:
            await self._event(response, json.dumps(event))
        await self._event(response, "[DONE]")
        return response

    def texts_of(self, body: dict) -> list[str]:
        prompts = body["text"] if "text" in body else body.get("prompt") or body["messages"][0]["content"]
        return [f"{prompt}{seed_of(body)}" for prompt in (prompts if isinstance(prompts, list) else [prompts])]

    def usage_of(self, body: dict) -> dict:
        count, completion = len(self.texts_of(body)), COMPLETION_TOKENS[seed_of(body)]
        prompt_tokens, completion_tokens = PROMPT_TOKENS * count, completion * count
        return {
            "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens, "prompt_tokens_details": None, "reasoning_tokens": 1,
            "completion_tokens_details": {"reasoning_tokens": 1},
        }  # fmt: skip

    def answer_of(self, path: str, body: dict) -> Any:
        texts = self.texts_of(body)
        if path == GENERATE:
            answers = [{"text": text, "meta_info": {"id": body["rid"]}} for text in texts]
            return answers if isinstance(body["text"], list) else answers[0]
        named = [{"message": {"content": text}} if path == CHATS else {"text": text} for text in texts]
        choices = [{"index": index} | choice for index, choice in enumerate(named)]
        extension = {"output_ids": [[seed_of(body)]], "cached_tokens_details": {"device": 1}}
        return {"id": body["rid"], "choices": choices, "usage": self.usage_of(body), "sglext": extension}

    def events_of(self, path: str, body: dict) -> list[dict]:
        events = []
        for index, text in enumerate(self.texts_of(body)):
            for piece in (text, "!"):
                choice = {"index": index} | ({"delta": {"content": piece}} if path == CHATS else {"text": piece})
                several = {"index": index} if isinstance(body.get("text"), list) else {}
                events.append({"text": piece} | several if path == GENERATE else {"choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({"choices": [], "sglext": {"output_ids": [[seed_of(body)]]}, "usage": None})
            events.append({"choices": [], "usage": self.usage_of(body)})
        return events


def asked(path: str, prompts: Any, **more: Any) -> dict[str, Any]:
    """A body for three choices of each prompt, with the seed 7."""
    if path == GENERATE:
        return {"text": prompts, "sampling_params": {"n": 3, "sampling_seed": 7}} | more
    of = {"messages": [{"role": "user", "content": prompts}]} if path == CHATS else {"prompt": prompts}
    return of | {"n": 3, "seed": 7} | more


def parsed(body: dict, path: str = "") -> ServerRequest:
    """The request of this body, on the path that its prompts are for if none is named."""
    path = path or (GENERATE if {"text", "input_ids"} & body.keys() else "/v1/completions")
    return relayed(body, path=path, engine="sglang")


def choices_of(body: dict, path: str = "") -> list[ServerRequest]:
    request = parsed(body, path)
    choice = SGLANG.apart(request)
    assert choice is not None
    return [choice(number) for number in range(request.choices)]


async def events(site: ServerSite, path: str, body: dict, *, begin: int = 0) -> list[Any]:
    """The events of a stream, which must be whole. `begin` events come before decode's `more` is set."""
    async with site.http.post(site.url + path, json=body | {"stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        first = b"".join([await response.content.readuntil(b"\n\n") for _ in range(begin)])
        site.decode[0].more.set()
        *parts, done, rest = (first + await response.read()).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "data: [DONE]" not in parts
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def is_quiet(site: ServerSite) -> None:
    """All requests have ended, and the router waits for no server."""
    opened = site.router.open_requests
    await until(
        lambda: site.ended and not opened.count and not any(server.unfinished for server in site.backend.pool.all)
    )
    assert opened.prompts_bytes == 0


USAGE = {
    "prompt_tokens": PROMPT_TOKENS, "completion_tokens": 9, "total_tokens": PROMPT_TOKENS + 9,
    "prompt_tokens_details": None, "reasoning_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 3},
}  # fmt: skip


pytestmark = pytest.mark.given(of=SamplingSglang)


@pytest.mark.parametrize("path", ["/v1/completions", CHATS])
async def test_the_answer_has_all_choices_and_the_tokens_of_the_prompt_once(site: ServerSite, path: str) -> None:
    async with site.http.post(site.url + path, json=asked(path, "a")) as response:
        body = await response.read()
        assert (response.status, response.content_length) == (200, len(body))
    answer = json.loads(body)
    texts = [choice["message"]["content"] if path == CHATS else choice["text"] for choice in answer["choices"]]
    assert texts == ["a7", "a8", "a9"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == USAGE
    assert answer["sglext"] == {"output_ids": [[7], [8], [9]], "cached_tokens_details": {"device": 1}}
    assert [answer["id"]] == [seen.body["rid"] for seen in site.decode[0].seen if seed_of(seen.body) == 7]
    for server in site.servers:
        assert [seen.body["n"] for seen in server.seen] == [1, 1, 1]
        assert len({seen.body["bootstrap_room"] for seen in server.seen}) == 3
        assert len({seen.body["rid"] for seen in server.seen}) == 3
    assert {seen.body["bootstrap_room"] for seen in site.prefill[0].seen} == {
        seen.body["bootstrap_room"] for seen in site.decode[0].seen
    }
    await is_quiet(site)
    assert [record.status for record in site.ended] == [200]


async def test_choices_of_the_first_of_several_prompts_come_first(site: ServerSite) -> None:
    _, answer, _ = await site.post(**asked("/v1/completions", ["a", "b"]))
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        *enumerate(["a7", "a8", "a9", "b7", "b8", "b9"])
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2 * PROMPT_TOKENS, 18)
    texts: dict[int, str] = {}
    for event in await events(site, "/v1/completions", asked("/v1/completions", ["a", "b"])):
        [choice] = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[index] for index in range(6)] == ["a7!", "a8!", "a9!", "b7!", "b8!", "b9!"]


async def test_sglangs_own_path_answers_with_a_list(site: ServerSite) -> None:
    for prompts, texts in (("a", ["a7", "a8", "a9"]), (["a", "b"], ["a7", "a8", "a9", "b7", "b8", "b9"])):
        status, answer, _ = await site.post("/generate", **asked("/generate", prompts))
        assert (status, [generated["text"] for generated in answer]) == (200, texts)
        streamed = await events(site, "/generate", asked("/generate", prompts))
        assert {event["index"]: event["text"] for event in streamed if event["text"] != "!"} == {
            **dict(enumerate(texts))
        }
    sampling = [{"n": 3, "sampling_seed": 7}, {"n": 3, "sampling_seed": 7}]
    sent = [
        json.loads(SGLANG.decode_body(choice, bytes(16), {}))["sampling_params"]
        for choice in choices_of({"text": ["a", "b"], "sampling_params": sampling})
    ]
    assert sent == [[{"n": 1, "sampling_seed": seed}] * 2 for seed in (7, 8, 9)]


@pytest.mark.parametrize("path", ["/v1/completions", CHATS])
async def test_streams_are_one_stream_with_one_end(site: ServerSite, path: str) -> None:
    site.decode[0].more.clear()
    body = asked(path, "a", stream_options={"include_usage": True})
    *chunks, extension, usage = await events(site, path, body, begin=3)
    texts = ["", "", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"] if path == CHATS else choice["text"]
    assert texts == ["a7!", "a8!", "a9!"]
    assert {chunk["choices"][0]["index"] for chunk in chunks[:3]} == {0, 1, 2}, "none waits for another's end"
    assert sorted(extension["sglext"]["output_ids"]) == [[7], [8], [9]]
    assert (usage["choices"], usage["usage"]) == ([], USAGE)
    assert all("stream_options" not in seen.body for seen in site.prefill[0].seen)
    await is_quiet(site)
    assert [(record.status, record.stream) for record in site.ended] == [(200, True)]
    metrics = (await site.get("/metrics"))[1].splitlines()
    lines = [line for line in metrics if line.startswith("pdtransfer_first_token_seconds_count")]
    assert [line.rpartition(" ")[2] for line in lines] == ["1.0"], "the first of all choices counts"


async def test_the_others_follow_once_prefill_has_computed_the_prompt(site: ServerSite) -> None:
    [prefill], [decode] = site.prefill, site.decode
    prefill.gate.clear()
    decode.more.clear()
    task = asyncio.create_task(site.post(**asked("/v1/completions", "a")))
    await until(lambda: prefill.seen and decode.seen)
    behind = asyncio.create_task(site.post(prompt="b", seed=9))
    await until(lambda: len(prefill.seen) == len(decode.seen) == 2)
    assert [seed_of(seen.body) for seen in decode.seen] == [7, 9], "the other request has overtaken its other choices"
    assert site.router.open_requests.count == 4
    prefill.gate.set()
    await until(lambda: len(prefill.seen) == len(decode.seen) == 4, "no answer of decode has ended")
    decode.more.set()
    assert (await task)[0] == (await behind)[0] == 200


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_choice_that_is_refused_ends_the_request_with_its_answer(
    site: ServerSite, seed: int, role: str
) -> None:
    failing = site.prefill[0] if role == "prefill" else site.decode[0]
    failing.fails = {seed: 422}
    site.decode[0].more.clear()  # no other choice ends by itself
    status, answer, _ = await site.post(**asked("/v1/completions", "a"))
    assert (status, answer["message"]) == (422, f"{seed} fails")
    await until(lambda: all(seen.left or seen.answered for server in site.servers for seen in server.seen))
    given_up = {seen.body["rid"] for seen in site.decode[0].seen if seen.left}
    assert given_up or seed == 7
    await until(lambda: given_up <= {*site.decode[0].given_up})
    await is_quiet(site)
    assert [record.status for record in site.ended] == [422]


@pytest.mark.given(decode=2)
async def test_a_choice_is_tried_again_like_any_request(site: ServerSite) -> None:
    site.decode[0].fails = {7: 500}
    status, answer, _ = await site.post(**asked("/v1/completions", "a"))
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, ["a7", "a8", "a9"])
    assert site.backend.metrics.retries == 1
    await is_quiet(site)
    assert site.ended[0].retried


async def test_a_choice_keeps_what_another_one_has_noted_of_the_request(site: ServerSite) -> None:
    client = ClientRequest(node="r", path="/v1/completions", request_id="r", first_s=1.0, retried=True)
    read = relayed(asked("/v1/completions", "a", stream=True), engine="sglang")
    answer = await site.backend.answer(site.backend.request(read, read.body, client), client)
    assert (client.first_s, client.retried) == (1.0, True), "as another choice has left them"
    answer.close(complete=False)


async def test_a_stream_whose_choice_fails_before_it_has_begun_ends_with_an_error(site: ServerSite) -> None:
    [decode] = site.decode
    decode.fails, decode.fails_after = {9: 422}, asyncio.Event()
    decode.more.clear()
    async with site.http.post(
        site.url + "/v1/completions", json=asked("/v1/completions", "a", stream=True)
    ) as response:
        await response.content.readuntil(b"\n\n")
        decode.fails_after.set()
        *_, last, rest = (await response.read()).decode().split("\n\n")
    assert rest == ""
    message = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert f"choice 2: {decode.url}: answers 422" in message
    assert "9 fails" in message
    await until(lambda: sum(seen.left for seen in decode.seen) == len(decode.seen) - 1)
    await is_quiet(site)


async def test_an_error_in_one_stream_ends_the_others(site: ServerSite) -> None:
    [decode] = site.decode
    decode.breaks, decode.held = {8}, {7, 9}
    decode.more.clear()
    site.prefill[0].more.clear()  # prefill learns late that its KV has landed
    *_, last = await events(site, "/v1/completions", asked("/v1/completions", "a"), begin=3)
    assert last == {"error": {"message": "8 breaks", "code": 500}}
    for server in site.servers:
        await until(lambda server=server: {seed_of(seen.body) for seen in server.seen if seen.left} == {7, 9})
    site.prefill[0].more.set()
    await is_quiet(site)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("computed", [False, True])
async def test_a_client_that_leaves_cancels_all(site: ServerSite, stream: bool, computed: bool) -> None:
    [prefill], [decode] = site.prefill, site.decode
    decode.more.clear()
    if not computed:
        prefill.gate.clear()
    body = asked("/v1/completions", "a", stream=stream)
    task = asyncio.create_task(site.post(**body))
    await until(lambda: len(decode.seen) == (3 if computed else 1))
    if computed and stream:
        await until(lambda: decode.sent > 0)
    task.cancel()
    await until(lambda: all(seen.left for seen in decode.seen))
    await is_quiet(site)
    assert len(decode.seen) == (3 if computed else 1)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": SERVER_CHOICES_MAX + 1}, "n"),
        ({"sampling_params": {"n": SERVER_CHOICES_MAX + 1}}, "sampling_params.n"),
        ({"sampling_params": [{"n": 0}]}, "sampling_params.n"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 3}]}, "sampling_params.n"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, None]}, "sampling_params.n"),
    ],
    ids=str,
)
def test_how_many_choices_is_bounded_and_the_error_names_the_field(body: dict, name: str) -> None:
    prompts = {"text": "a"} if name.startswith("sampling_params") else {"prompt": "a"}
    with pytest.raises(RefusedRequestError) as caught:
        parsed(prompts | body)
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"text": "a", "sampling_params": [{}] * 2}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": []}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}] * 3}, "sampling_params"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 2, "stop": "x" * SAMPLING_BYTES_MAX}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 2, "sampling_seed": "x"}}, "sampling_seed"),
        ({"text": ["a"], "sampling_params": [{"n": 2, "sampling_seed": []}]}, "sampling_seed"),
        ({"prompt": "a", "n": 2, "seed": 1.5}, "seed"),
    ],
    ids=range(8),
)
def test_what_no_choice_can_be_made_of_is_refused_where_the_body_is_read(body: dict, name: str) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        parsed(body)
    assert (caught.value.param, caught.value.status) == (name, 400)


def test_a_request_for_one_choice_may_have_any_sampling_parameters() -> None:
    sampling = {"sampling_seed": "x", "stop": "x" * SAMPLING_BYTES_MAX}
    assert parsed({"text": ["a", "b"], "sampling_params": [sampling, None]}).choices == 1


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (GENERATE, {"text": "a", "n": 3}, 1),
        (GENERATE, {"text": "a", "n": "x", "sampling_params": {"n": 2}}, 2),
        ("/v1/completions", {"prompt": "a", "sampling_params": {"n": 4}}, 1),
        (CHATS, {"messages": [], "n": 2, "sampling_params": {"n": 4}}, 2),
        (CHATS, {"messages": [], "sampling_params": "of no form that SGLang has"}, 1),
    ],
    ids=range(5),
)
def test_choices_are_asked_for_where_sglang_reads_them(path: str, body: dict, count: int) -> None:
    request = parsed(body, path)
    assert request.choices == count
    if count > 1:
        changed = {name for name, value in request.fields.items() if choices_of(body, path)[1].fields[name] != value}
        assert changed == {"sampling_params" if path == GENERATE else "n"}


class AnsweredRelay(Relay):
    """A request for a choice that is answered at once."""

    async def begin(self) -> None:
        self.status, self.pieces = 200, [b"[{}]", b""]

    async def more(self) -> bytes:
        return self.pieces.pop(0)


async def test_each_choice_is_made_in_a_turn_of_the_loop_of_its_own() -> None:
    loop, turn, turns = asyncio.get_running_loop(), 0, dict[int, int]()

    def count() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < 9:
            loop.call_soon(count)

    request = relayed({"prompt": "a", "n": 9}, engine="sglang")

    def of_choice(number: int) -> ServerRequest:
        turns[number] = turn
        return request

    count()
    choices = Choices(AnsweredRelay(request, *(cast("Any", None),) * 5), of_choice)
    assert not turns, "nothing is made before it is sent"
    await choices.begin()
    choices.close(complete=True)
    assert [*turns] == [*range(9)]
    assert len({*turns.values()}) == 9


async def test_what_is_beyond_the_bound_reaches_nobody(site: ServerSite) -> None:
    status, answer, _ = await site.post(n=SERVER_CHOICES_MAX + 1)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert str(SERVER_CHOICES_MAX) in answer["error"]["message"]
    status, answer, _ = await site.post(n=2, seed="x")
    assert (status, answer["error"]["param"]) == (400, "seed")
    assert not any(server.seen for server in site.servers)


@pytest.mark.given(limits=replace(LIMITS, rooms_max=5))
async def test_a_request_counts_as_its_choices(site: ServerSite) -> None:
    assert (await site.post(**asked("/v1/completions", "a")))[0] == 200
    status, answer, _ = await site.post(**asked("/v1/completions", ["a", "b"]))
    assert (status, answer["error"]["param"]) == (400, "n")
    for count in (1, 4):
        read = relayed({"prompt": "a", "n": count}, engine="sglang")
        client = ClientRequest(node="r", path="/v1/completions", request_id="r")
        request = site.backend.request(read, read.body, client)
        assert (request.answers, request.kept_bytes) == (count, count * len(read.body))
    assert [choice.answers for choice in choices_of({"prompt": "a", "n": 4})] == [1] * 4


@pytest.mark.parametrize(
    ("seed", "seeds"), [(5, [5, 6, 7]), (2**63 - 1, [2**63 - 1, -(2**63), 1 - 2**63]), (None, [None] * 3)]
)
def test_choice_i_has_the_seed_plus_i(seed: int | None, seeds: list[int | None]) -> None:
    choices = choices_of({"prompt": "a", "n": 3, "seed": seed, "rid": "mine"})
    sent = [json.loads(SGLANG.decode_body(choice, bytes(16), {})) for choice in choices]
    assert [body["seed"] for body in sent] == seeds
    assert [body["rid"] for body in sent] == [f"r-{number}-00000000" for number in range(3)], "not the client's own"
    assert "seed" not in choices_of({"prompt": "a", "n": 2})[1].fields


def test_one_choice_is_left_as_it_came_and_so_are_those_of_vllm() -> None:
    assert SGLANG.apart(relayed({"prompt": "a", "n": 1, "seed": 3}, engine="sglang")) is None
    of_vllm = relayed({"prompt": "a", "n": 9})
    assert (DIALECTS["vllm"].apart(of_vllm), of_vllm.kept_bytes) == (None, len(of_vllm.body))


DEEP: dict = {}
for _ in range(800):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    "answers",
    [
        [{"choices": []}, [{}]],
        [{"choices": [{}]}, {"choices": [{}, {}]}],
        [{"choices": 5}, {"choices": []}],
        [[{}], [{}, {}]],
        [{"choices": [], "usage": {"completion_tokens": "2"}}] * 2,
        [{"choices": [], "usage": 3}] * 2,
        ["text", "text"],
        [{"choices": [], "sglext": {"output_ids": 5}}] * 2,
        [{"choices": [], "sglext": 5}] * 2,
        [{"choices": [], "usage": DEEP}] * 2,
        [{"choices": [], "sglext": {"output_ids": DEEP}}] * 2,
        [{"choices": [], "usage": {"completion_tokens": 10**30}}] * 2,
        [{"choices": [], "usage": {"completion_tokens": -1}}] * 2,
        [{"choices": [], "usage": {"completion_tokens": {"a": 1}}}, {"choices": [], "usage": {"completion_tokens": 1}}],
    ],
    ids=range(14),
)
def test_answers_that_do_not_fit_are_refused(answers: list) -> None:
    joined = JoinedAnswers(2)
    for number, answer in enumerate(answers):
        assert joined.take(number, json.dumps(answer).encode()) == b""
    with pytest.raises(RemoteProtocolError):
        joined.end()


@pytest.mark.parametrize(
    "stream",
    [
        b"data: x\n\n",
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [{"index": "0"}]}\n\n',
        b'data: {"choices": [{"index": 1%s}]}\n\n' % (b"0" * 5000),
        b"data: []\n\n",
    ],
    ids=range(5),
)
def test_streams_of_another_form_are_refused(stream: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        JoinedEvents(2).take(0, stream)


def test_an_event_may_come_in_pieces_and_has_a_bound() -> None:
    joined, event = JoinedEvents(2), b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
    assert [joined.take(1, event[begin : begin + 20]) for begin in range(0, len(event), 20)] == [
        b"", b"", b'data: {"choices":[{"index":1,"text":"x"}]}\n\n'
    ]  # fmt: skip
    joined.take(0, event[:20])
    with pytest.raises(RemoteProtocolError, match="ends within an event"):
        joined.take(0, b"")
    with pytest.raises(RemoteProtocolError, match="larger"):
        joined.take(0, b"d" * (HTTP_BODY_BYTES_MAX + 1))
    with pytest.raises(RemoteProtocolError, match="larger"):
        JoinedAnswers(2).take(0, b"d" * (HTTP_BODY_BYTES_MAX + 1))


@pytest.mark.parametrize("kind", [JoinedAnswers, JoinedEvents])
def test_all_answers_have_one_bound_together(kind: type[JoinedAnswers | JoinedEvents]) -> None:
    joined, half = kind(3), b"d" * (HTTP_BODY_BYTES_MAX // 2)
    joined.take(0, half)
    joined.take(2, half)
    assert joined.kept_bytes == HTTP_BODY_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match=f"larger than {HTTP_BODY_BYTES_MAX} bytes together"):
        joined.take(1, b"d")


def test_last_events_count_as_kept() -> None:
    joined = JoinedEvents(3)
    event = b'data: {"choices":[],"usage":{"note":"%s"}}\n\n' % (b"x" * (HTTP_BODY_BYTES_MAX // 2))
    assert (joined.take(0, event), joined.kept_bytes) == (b"", len(event))
    with pytest.raises(RemoteProtocolError, match="together"):
        joined.take(1, event)


def test_sglangs_own_fields_are_in_the_order_of_the_choices() -> None:
    def chunk(number: int, details: object) -> bytes:
        extension = {"output_ids": [[number]], "spec_tokens_details": details, "routed": "first"}
        return b"data: %s\n\n" % json.dumps({"choices": [], "sglext": extension}).encode()

    def end(*details: object) -> dict:
        joined = JoinedEvents(len(details))
        for number, of_choice in [*enumerate(details)][::-1]:
            joined.take(number, chunk(number, of_choice))
        return json.loads(joined.end().split(b"\n\n")[0].removeprefix(b"data: "))["sglext"]

    common = {"output_ids": [[0], [1], [2]], "routed": "first"}
    assert end({"x": 0}, {"x": 1}, {"x": 2}) == common | {"spec_tokens_details": [{"x": 0}, {"x": 1}, {"x": 2}]}
    assert end([{"x": 0}, {"x": 3}], [{"x": 1}, {"x": 4}], [{"x": 2}, {"x": 5}]) == common, "of which prompt is unknown"


@pytest.mark.parametrize(("length", "elsewhere"), [(10, False), (JOINED_INLINE_BYTES_MAX, True)])
async def test_large_answers_are_joined_in_a_thread(
    site: ServerSite, length: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins: list[bool] = []
    end = JoinedAnswers.end

    def seen_end(joined: JoinedAnswers) -> bytes:
        joins.append(threading.current_thread() is not threading.main_thread())
        return end(joined)

    monkeypatch.setattr(JoinedAnswers, "end", seen_end)
    status, answer, _ = await site.post(**asked("/v1/completions", "a" * length))
    assert (status, [len(choice["text"]) for choice in answer["choices"]]) == (200, [length + 1] * 3)
    assert joins == [elsewhere]


async def test_answers_that_are_too_large_together_fail_and_the_others_are_cancelled(site: ServerSite) -> None:
    [decode] = site.decode
    decode.answer_of = lambda path, body: {"choices": [{"text": "x" * (HTTP_BODY_BYTES_MAX // 2)}]}  # type: ignore[method-assign]
    status, answer, _ = await site.post(**asked("/v1/completions", "a"))
    assert (status, answer["error"]["code"]) == (502, "breach")
    assert f"larger than {HTTP_BODY_BYTES_MAX} bytes together" in answer["error"]["message"]
    await is_quiet(site)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_choices_share_the_bound_of_answers_that_are_kept_to_be_joined(site: ServerSite, role: str) -> None:
    """The last choice's answer never ends: what has come of it is more than a third."""
    size, last = HTTP_BODY_BYTES_MAX // 3, 9
    [server] = getattr(site, role)
    reply = server.reply

    async def endless(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seed_of(seen.body) != last:
            return await reply(request, seen)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b" " * (size + 1))
        await asyncio.Event().wait()
        return response

    server.reply = endless
    server.answer_of = lambda path, body: {"text": "x" * (size - 100), "meta_info": {}}
    body = asked("/generate", "a", return_logprob=True, logprob_start_len=0)
    status, answer, _ = await site.post("/generate", **body)
    assert (status, answer["error"]["code"]) == (502, "breach")
    assert f"{server.url}: the answer is larger than {size} bytes" in answer["error"]["message"]
    await is_quiet(site)


async def test_a_refusal_of_a_choice_has_a_bound(site: ServerSite) -> None:
    [decode] = site.decode
    decode.fails, decode.why = {8: 422}, "x" * (HTTP_BODY_BYTES_MAX + 1)
    status, answer, _ = await site.post(**asked("/v1/completions", "a"))
    assert (status, answer["error"]["code"]) == (502, "breach")
    assert f"{decode.url}: the answer is larger than {HTTP_BODY_BYTES_MAX} bytes" in answer["error"]["message"]
    await is_quiet(site)


async def test_an_answer_that_cannot_be_joined_is_an_error_of_the_servers(site: ServerSite) -> None:
    [decode] = site.decode
    for wrong in (
        lambda path, body: {"choices": [{}] * seed_of(body)},
        lambda path, body: {"choices": [{}], "sglext": {"output_ids": 5}},
        lambda path, body: {"choices": [{}], "usage": DEEP},
    ):
        decode.answer_of = wrong  # type: ignore[method-assign]
        status, answer, _ = await site.post(**asked("/v1/completions", "a"))
        assert (status, answer["error"]["code"]) == (502, "breach")
        assert "do not fit" in answer["error"]["message"]
    await is_quiet(site)

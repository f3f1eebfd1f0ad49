"""The router over HTTP, with workers built from Service on a real bus and without a model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdtransfer.bus import Bus
from pdtransfer.bus.keys import AllowList, KeyPair, generate, generate_pair
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.serve.router.backends.daemons.backend import Daemons
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.wire import Goodbye, Reject, Sampling, Tokens, pack_biases, unpack_ids
from tests.serve.router.router_site import LIMITS, LOAD, Site, parse, site
from tests.support.vllm_servers import ServerSite
from tests.support.waiting import PATIENCE_S, until


async def test_a_completion_carries_its_usage_and_the_extension(site: Site) -> None:
    status, answer, _ = await site.post(prompt="abc", max_tokens=7, temperature=0, seed=5)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["model"] == "m"
    assert answer["choices"] == [{"index": 0, "text": "cbacbac", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    room = f"{site.decode[0].begun[0].room:016x}"
    assert answer["pdtransfer"] == {
        "room": room, "kv_bytes": 640, "copy_us": 12, "handoff_us": 42.5, "tokens_digest": "01", "logits_digest": "02",
        "kv_digest": "03", "prefill": "p0", "decode": "d0", "enable_hisparse": False, "resumptions": 0,
    }  # fmt: skip
    begin = site.decode[0].begun[0]
    assert (begin.sampling.temperature, begin.sampling.seed, begin.sampling.top_p) == (0.0, 5, 1.0)
    assert begin.peers == site.router._config.prefill
    assert site.prefill[0].begun[0].peers == ("d0",)


@pytest.mark.parametrize(("prefill", "decode"), [(b"c", b"another host's"), (b"", b""), (b"c", b""), (b"", b"c")])
async def test_stamps_of_two_clocks_make_no_handoff_time(site: Site, prefill: bytes, decode: bytes) -> None:
    site.prefill[0].clock, site.decode[0].clock = prefill, decode
    _, answer, _ = await site.post(prompt="abc", max_tokens=7)
    assert answer["pdtransfer"]["handoff_us"] is None
    assert answer["pdtransfer"]["copy_us"] == 12, "what one clock measured is told"


async def test_a_stream_has_the_same_text_in_pieces_and_then_done(site: Site) -> None:
    site.decode[0].more.clear()
    body = {"prompt": "żółw", "max_tokens": 16, "stream": True}
    async with site.http.post(site.url + "/v1/completions", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        answer = await response.content.readuntil(b"\n\n")
        site.decode[0].more.set()
        answer += await response.content.read()
    assert answer.endswith(b"\n\n")
    *events, done = [each.removeprefix("data: ") for each in answer.decode()[:-2].split("\n\n")]
    assert done == "[DONE]"
    *pieces, last = [json.loads(event) for event in events]
    assert len(pieces) >= 1
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
    # In reverse, its bytes are not valid characters, neither in pieces nor in whole.
    text = "".join(each["choices"][0]["text"] for each in (*pieces, last))
    assert text == (("żółw".encode()[::-1]) * 4)[:16].decode("utf-8", "replace")
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in last
    assert last["pdtransfer"]["kv_digest"] == "03"
    assert len({each["id"] for each in (*pieces, last)}) == 1


BAD = [
    (b"{", None, "not JSON"), (b"[]", None, "object"),
    (b"\xff{}", None, "not JSON"), (b'{"prompt": "\\ud800"}', "prompt", "surrogate"),
    (b'{"\\ud800": "a"}', None, "not JSON"),
    (b'{"prompt": "\\ud83d\\ude00", "stop": ["\\udc00x"]}', "stop", "surrogate"),
    (b'{"prompt": "\\ud800', None, "not JSON"), (b'{"prompt": "\\ud800' + b" " * (1 << 20) + b'"}', None, "not JSON"),
    (b"[" * 100_000, None, ""), (b"{}", "prompt", "missing"),
    (b'{"prompt": ""}', "prompt", ">= 1"), (b'{"prompt": [""]}', "prompt[0]", ">= 1"),
    (b'{"prompt": []}', "prompt", "0 tokens"), (b'{"prompt": [[]]}', "prompt[0]", "0 tokens"),
    (b'{"prompt": 5}', "prompt", "int"), (b'{"prompt": null}', "prompt", "null"),
    (b'{"prompt": ["a", 5]}', "prompt[1]", "Expected `str`, got `int`"),
    (b'{"prompt": [[5], "a"]}', "prompt[1]", "Expected `array`, got `str`"),
    (b'{"prompt": [5.5]}', "prompt[0]", "float"), (b'{"prompt": [true]}', "prompt[0]", "bool"),
    (b'{"prompt": [[[5]]]}', "prompt[0][0]", "array"), (b'{"prompt": [-1]}', "prompt[0]", ">= 0"),
    (b'{"prompt": [4294967296]}', "prompt[0]", "<= 4294967295"),
    (b'{"prompt": [' + b"[1]," * 256 + b"[1]]}", "prompt", "257 prompts"),
    (b'{"prompt": [[' + b"1," * 524_288 + b"1]]}", "prompt[0]", "524289 tokens"),
    (b'{"prompt": [' + b"1," * 524_288 + b"1]}", "prompt", "524288"), (b'{"prompt": {"a": ' * 5_000, None, ""),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", ">= 1"),
    (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens", "str"),
    (b'{"prompt": "a", "max_tokens": 16777216}', "max_tokens", "limit"),
    (b'{"prompt": "a", "min_tokens": -1}', "min_tokens", ">= 0"),
    (b'{"prompt": "a", "min_tokens": 17}', "min_tokens", "max_tokens is 16"),
    (b'{"prompt": "a", "temperature": -1}', "temperature", ">= 0"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature", "out of range"),
    (b'{"prompt": "a", "temperature": NaN}', None, "not JSON"), (b'{"prompt": "a", "top_p": 0}', "top_p", "> 0"),
    (b'{"prompt": "a", "top_k": -2}', "top_k", ">= -1"), (b'{"prompt": "a", "top_k": 1.5}', "top_k", "float"),
    (b'{"prompt": "a", "min_p": 1.1}', "min_p", "<= 1"),
    (b'{"prompt": "a", "presence_penalty": 2.5}', "presence_penalty", "<= 2"),
    (b'{"prompt": "a", "frequency_penalty": "x"}', "frequency_penalty", "str"),
    (b'{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty", "> 0"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "'x'"),
    (b'{"prompt": "a", "logit_bias": {"05": 1}}', "logit_bias", "'05'"),
    (b'{"prompt": "a", "logit_bias": {"4294967296": 1}}', "logit_bias", "4294967295"),
    (b'{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias", "<= 100"),
    (b'{"prompt": "a", "logit_bias": [5]}', "logit_bias", "array"),
    (b'{"prompt": "a", "logit_bias": {%b}}' % b",".join(b'"%d": 1' % n for n in range(1_025)), "logit_bias", "1024"),
    (b'{"prompt": "a", "seed": 1.5}', "seed", "float"), (b'{"prompt": "a", "n": 0}', "n", ">= 1"),
    (b'{"prompt": "a", "n": 257}', "n", "<= 256"), (b'{"prompt": ["a", "b"], "n": 129}', "n", "at most 256"),
    (b'{"prompt": "a", "best_of": 2}', "best_of", "must equal n"),
    (b'{"prompt": "a", "n": 3, "best_of": 4}', "best_of", "must equal n"),
    (b'{"prompt": "a", "stop": ["1", "2", "3", "4", "5"]}', "stop", "<= 4"),
    (b'{"prompt": "a", "stop": 7}', "stop", "int"), (b'{"prompt": "a", "stop": [7]}', "stop[0]", "int"),
    (b'{"prompt": "a", "stop": "' + b"x" * 1_025 + b'"}', "stop", "1024"),
    (b'{"prompt": "a", "stream": 1}', "stream", "int"),
    (b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": 3}}', "stream_options.include_usage", "int"),
    (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options", "only together with stream"),
    (b'{"prompt": "a", "cache_salt": ""}', "cache_salt", ">= 1"),
    (b'{"prompt": "a", "logprobs": 21}', "logprobs", "<= 20"),
    (b'{"prompt": "a", "logprobs": true}', "logprobs", "bool"),
    (b'{"prompt": "a", "echo": true, "logprobs": 0}', "echo", "together with logprobs"),
    (b'{"prompt": "a", "suffix": "x"}', "suffix", "not supported"),
    (b'{"prompt": "a", "suffix": 1e999}', "suffix", "not supported"),
    (b'{"prompt": "a", "guided_json": {"type": "object"}}', "guided_json", "not supported"),
    (b'{"prompt": "a", "guided_json": {}}', "guided_json", "not supported"),
    (b'{"prompt": "a", "json_schema": {}}', "json_schema", "not supported"),
    (b'{"prompt": "a", "stop_token_ids": [5]}', "stop_token_ids", "not supported"),
    (b'{"prompt": "a", "tools": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, "deep"),
    (b'{"prompt": "a", "tools": "' + b"x" * 9_000 + b'"}', "tools", "not supported"),
]  # fmt: skip

IMAGE = b'{"type": "image_url", "image_url": {"url": "x"}}'
OF_USER, OF_ONE = b'{"messages": [{"role": "user", "content": "x"}], %b}', b'{"messages": [{%b}]}'
BAD_CHATS = [
    (b"{}", "messages", "missing"),
    (b'{"messages": []}', "messages", ">= 1"),
    (b'{"messages": "hi"}', "messages", "str"),
    (OF_ONE % b"},{".join([b'"role": "user", "content": ""'] * 4_097), "messages", "4096"),
    (b'{"messages": [{"role": "user", "content": ""}, {"role": "user"}]}', "messages[1].content", "missing"),
    (OF_ONE % b'"content": "x"', "messages[0].role", "missing"),
    (OF_ONE % b'"role": "critic", "content": "x"', "messages[0].role", "critic"),
    *(
        (OF_ONE % b'"role": "%s", "content": null' % role, "messages[0].content", "missing")
        for role in (b"developer", b"system", b"user", b"assistant", b"tool")
    ),
    (OF_ONE % b'"role": "user", "content": 5', "messages[0].content", "int"),
    (OF_ONE % b'"role": "user", "content": [%b]' % IMAGE, "messages[0].content[0].type", "image_url"),
    (OF_ONE % b'"role": "user", "content": [{"type": "text"}]', "messages[0].content[0].text", "missing"),
    (OF_ONE % b'"role": "assistant", "tool_calls": [{"id": "x"}]', "messages[0].tool_calls[0].type", "missing"),
    (OF_ONE % b'"role": "user", "content": "", "tool_calls": 1e999', "messages[0].tool_calls", "out of range"),
    (OF_ONE % b'"role": "assistant", "audio": {"id": "x"}', "messages[0].audio", "not supported"),
    (OF_USER % b'"max_tokens": 16777216', "max_tokens", "total limit"),
    (OF_USER % b'"max_completion_tokens": 16777216', "max_completion_tokens", "total limit"),
    (OF_USER % b'"max_completion_tokens": 0', "max_completion_tokens", ">= 1"),
    (OF_USER % b'"top_logprobs": 2', "top_logprobs", "logprobs"),
    (OF_USER % b'"logprobs": true, "top_logprobs": 21', "top_logprobs", "<= 20"),
    (OF_USER % b'"logprobs": 2', "logprobs", "int"),
    (OF_USER % b'"response_format": {"type": "json_object"}', "response_format", "not"),
    (OF_USER % b'"tools": [{"type": "function"}]', "tools", "not supported"),
    (OF_USER % b'"tool_choice": "required"', "tool_choice", "not supported"),
    (OF_USER % b'"functions": [{"name": "f"}]', "functions", "not supported"),
    (OF_USER % b'"audio": {"voice": "x"}', "audio", "not supported"),
    (OF_USER % b'"modalities": ["text", "audio"]', "modalities", "not supported"),
    (OF_USER % b'"echo": true', "echo", "not supported"),
    (OF_USER % b'"use_beam_search": 1', "use_beam_search", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "text"), BAD_CHATS, ids=[str(body[-64:]) for body, _, _ in BAD_CHATS])
def test_a_bad_chat_is_refused_by_the_name_of_its_field(body: bytes, param: str | None, text: str) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse(body, seed=1, chat=True)
    assert refused.value.param == param
    assert text in str(refused.value)


@pytest.mark.parametrize(("body", "param", "text"), BAD, ids=[str(body[:48]) for body, _, _ in BAD])
def test_a_bad_body_is_refused_by_the_name_of_its_field(body: bytes, param: str | None, text: str) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse(body, seed=1)
    assert refused.value.param == param
    assert text in str(refused.value)


def test_neutral_values_are_accepted_and_absent_fields_have_openais_defaults() -> None:
    body = b'{"prompt": "a", "n": 1, "echo": false, "stop": null, "logprobs": null, "suffix": "", "user": "me"}'
    (room,) = parse(body, seed=9).rooms
    assert room.sampling == Sampling(16, 1.0, 1.0, 9)
    assert sampling(b'{"prompt": "a", "seed": -1}').seed == (1 << 64) - 1
    assert sampling(b'{"prompt": [7, 300]}').seed == 9
    (room,) = parse(b'{"prompt": [7, 300], "tools": [ ], "response_format": {"type": "text"}}', seed=9).rooms
    assert unpack_ids("", room.prompt).tolist() == [7, 300]
    chat = b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "none", "modalities": ["text"], %b}'
    (room,) = parse(chat % b'"max_tokens": 9, "max_completion_tokens": 5', seed=1, chat=True).rooms
    assert room.sampling.max_tokens == 5
    (room,) = parse(chat % b'"n": null', seed=1, chat=True).rooms
    assert room.sampling.max_tokens == 1_024


def test_every_field_reaches_the_sampling() -> None:
    body = (
        b'{"prompt": "a", "max_tokens": 9, "min_tokens": 2, "ignore_eos": true, "temperature": 0.5, "top_p": 0.25,'
        b'"top_k": 7, "min_p": 0.125, "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.25,'
        b'"seed": 3, "logprobs": 4, "logit_bias": {"65": -100, "7": 0.5}}'
    )
    assert sampling(body) == Sampling(
        max_tokens=9, min_tokens=2, ignore_eos=True, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125,
        presence_penalty=1.5, frequency_penalty=-1.0, repetition_penalty=1.25, seed=3, logprobs=True, top_logprobs=4,
        logit_bias=pack_biases({65: -100.0, 7: 0.5}),
    )  # fmt: skip
    assert sampling(b'{"prompt": "a", "top_k": -1}').top_k == 0


def test_each_choice_of_each_prompt_is_a_room_with_a_seed_of_its_own() -> None:
    asked = parse(b'{"prompt": ["ab", "c"], "n": 2, "best_of": 2, "seed": 5}', seed=1)
    assert [(len(room.prompt) // 4, room.sampling.seed) for room in asked.rooms] == [(2, 5), (2, 6), (1, 5), (1, 6)]
    assert (asked.prompt_tokens, asked.kept_bytes) == (3, 24)
    assert [len(room.prompt) // 4 for room in parse(b'{"prompt": [[1, 2], [3]]}', seed=1).rooms] == [2, 1]


def sampling(body: bytes) -> Sampling:
    (room,) = parse(body, seed=9).rooms
    return room.sampling


async def test_a_cache_salt_reaches_both_workers_as_a_digest_that_differs_as_the_salts_do(site: Site) -> None:
    for salt in (None, "tenant a", "tenant b", "tenant a"):
        assert (await site.post(prompt="abc", max_tokens=2, cache_salt=salt))[0] == 200
    salts = [begin.salt for begin in site.decode[0].begun]
    assert salts == [begin.salt for begin in site.prefill[0].begun]
    assert salts[0] == b""
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3


async def test_http_errors_are_openais_objects(site: Site) -> None:
    status, answer, _ = await site.post(prompt="a", n=300)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert answer["error"]["type"] == "invalid_request_error"
    status, answer, _ = await site.post(prompt="a", model="gpt")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer, _ = await site.post(prompt="a", user="x" * HTTP_BODY_BYTES_MAX)
    assert (status, "error" in answer) == (413, True)
    for path, expected in (("/v1/completions", 405), ("/tokenize", 405), ("/v1/embeddings", 404)):
        status, text = await site.get(path)
        assert status == expected
        assert "POST /v1/completions" in json.loads(text)["error"]["message"]
    assert not site.decode[0].begun
    status, text = await site.get("/v1/models")
    assert (status, [each["id"] for each in json.loads(text)["data"]]) == (200, ["m"])


async def test_a_request_beyond_the_workers_context_is_refused_before_a_worker_is_asked() -> None:
    async with site(context_tokens=20) as it:
        for prompt, more, param, text in (
            ("a" * 25, {}, "prompt", "25 tokens leave no room for an answer: the context has 20"),
            ("a" * 15, {"max_tokens": 6}, "max_tokens", "6 after 15 of prompt, the total limit is 20"),
        ):
            for named in ({}, {"model": "m"}):
                status, answer, _ = await it.post(prompt=prompt, **more, **named)
                assert (status, answer["error"]["param"]) == (400, param)
                assert text in answer["error"]["message"]
                assert answer["error"]["code"] == "context_length_exceeded"
        assert [*it.prefill[0].begun, *it.decode[0].begun] == []
        status, answer, _ = await it.post(prompt="a" * 15)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5), "what the context leaves"
        listed = json.loads((await it.get("/v1/models"))[1])["data"]
        assert [(each["id"], each["max_model_len"]) for each in listed] == [("m", 20)]
        assert json.loads((await it.get("/v1/models/m"))[1])["max_model_len"] == 20
        assert (await it.post("/tokenize", prompt="ab"))[1]["max_model_len"] == 20
    async with site() as it:
        assert json.loads((await it.get("/v1/models/m"))[1])["max_model_len"] is None


async def test_health_and_completions_are_503_until_a_pair_is_ready(site: Site) -> None:
    site.decode[0].load(msgspec.structs.replace(LOAD, ready=False))
    await until(lambda: not site.backend.routing.workers.models())
    status, text = await site.get("/health")
    assert (status, json.loads(text)["ready"]) == (503, False)
    assert (await site.get("/live"))[0] == 200
    status, answer, headers = await site.post(prompt="a")
    assert (status, answer["error"]["type"]) == (503, "service_unavailable")
    assert int(headers["Retry-After"]) >= 1
    site.decode[0].load(LOAD)
    await until(site.backend.routing.workers.models)
    status, text = await site.get("/health")
    assert status == 200
    assert [each["role"] for each in json.loads(text)["workers"]] == ["prefill", "decode"]


@pytest.mark.parametrize("stream", [False, True])
async def test_full_workers_are_429_with_their_retry_time(site: Site, stream: bool) -> None:
    site.prefill[0].failure = "full"
    site.decode[0].gate.clear()
    status, answer, headers = await site.post(prompt="a", stream=stream)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "full", "3")
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
async def test_all_rooms_of_a_disconnected_client_are_cancelled_on_both_workers(site: Site, stream: bool) -> None:
    workers = site.prefill[0], site.decode[0]
    for worker in workers:
        worker.gate.clear()
    task = asyncio.create_task(site.post(prompt="a", n=3, stream=stream))
    await until(lambda: all(len(worker.begun) == 3 for worker in workers))
    task.cancel()
    await until(lambda: all(len(worker.stopped) == 3 for worker in workers))
    assert not site.backend.routing.requests
    await until(lambda: not site.backend.routing.rooms)
    await until(lambda: not any(worker.service.room_count for worker in workers))


async def test_a_worker_that_is_listed_again_is_dialled_again(tmp_path: Path) -> None:
    received = asyncio.Event()
    line = generate(tmp_path / "r0")
    keys, router_keys = generate_pair(), KeyPair.read(tmp_path / "r0.key")
    everybody = AllowList({keys.public: "p0", router_keys.public: "r0"})
    (tmp_path / "peers").write_text(f"{line}\np0 {keys.public}\n")
    bus = Bus(node="p0", keys=keys, allowed=everybody, receive=lambda *_: received.set(), refused=lambda *_: None)
    endpoint = f"{keys.public}@" + await bus.bind("tcp://127.0.0.1:0")
    router = router_of(
        RouterConfig(
            listen="127.0.0.1:0", prefill=(endpoint,), decode=(), limits=LIMITS,
            key=tmp_path / "r0.key", allow=tmp_path / "peers",
        )
    )  # fmt: skip
    try:
        await router.open()
        async with asyncio.timeout(PATIENCE_S):
            await received.wait()
        backend = router.backend
        assert isinstance(backend, Daemons)
        backend.allow(AllowList({router_keys.public: "r0"}))
        await asyncio.sleep(0)
        received.clear()
        backend.allow(everybody)
        async with asyncio.timeout(PATIENCE_S):
            await received.wait()
    finally:
        await router.close()
        await bus.close()


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_does_not_read_disturbs_no_other_and_is_closed(leaves: bool) -> None:
    async with site(limits=replace(LIMITS, room_deadline_ms=60_000 if leaves else 4_000)) as it:
        it.decode[0].piece = 4_000
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", int(it.url.rpartition(":")[2])))
        # Six bytes of JSON a token: more than the sockets in between can buffer.
        tokens = 1_000_000
        body = json.dumps({"prompt": "\1", "max_tokens": tokens, "stream": True}).encode()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: it.decode[0].begun)
        for _ in range(20):
            status, answer, _ = await it.post(prompt="xy", max_tokens=2)
            assert (status, answer["choices"][0]["text"]) == (200, "yx")
        if leaves:
            # Its tokens are all taken from its worker; the unread ones wait here, bounded by max_tokens.
            await until(lambda: it.decode[0].service.room_count == 0)
            (reply,) = it.backend._choices.values()
            assert 0 < len(reply._ids) <= tokens
            client.close()
        await until(lambda: not it.backend._choices)
        client.close()


async def test_a_draining_router_finishes_its_requests_and_accepts_none(either: Site | ServerSite) -> None:
    either.decode[0].more.clear()
    body = {"prompt": "abc", "max_tokens": 6, "stream": True}
    async with either.http.post(either.url + "/v1/completions", json=body) as stream:
        await stream.content.readuntil(b"\n\n")
        drain = asyncio.create_task(either.router.drain(asyncio.Event()))
        await asyncio.sleep(0)
        assert (await either.get("/health"))[0] == 503
        status, answer, headers = await either.post(prompt="abc")
        assert (status, answer["error"]["code"], "Retry-After" in headers) == (503, "shutdown", True)
        assert not drain.done()
        either.decode[0].more.set()
        assert (await stream.content.read()).endswith(b"\n\ndata: [DONE]\n\n")
    await drain


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_drain_waits_for_a_body_that_is_being_received(site: Site, path: str) -> None:
    more = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "abc", '
        await more.wait()
        yield b'"max_tokens": 3}'

    request = asyncio.create_task(site.http.post(site.url + path, data=body()).__aenter__())
    await until(lambda: site.router.open_requests.bodies_bytes)
    drain = asyncio.create_task(site.router.drain(asyncio.Event()))
    assert (await site.get("/health"))[0] == 503
    assert not drain.done()
    more.set()
    assert (await request).status == 200
    await drain


async def test_closing_fails_unfinished_requests_and_cancels_their_rooms(site: Site) -> None:
    site.decode[0].gate.clear()
    task = asyncio.create_task(site.post(prompt="abc", max_tokens=3))
    await until(lambda: site.decode[0].begun)
    hurry = asyncio.Event()
    hurry.set()
    await site.router.drain(hurry)
    await site.router.close()
    assert (await task)[0] == 503
    await until(lambda: site.decode[0].stopped)


async def test_metrics_have_our_prefix_total_on_counters_only_and_no_label_that_a_client_names(site: Site) -> None:
    await site.post(prompt="abc", max_tokens=5)
    await site.post(prompt="")
    for name in ("nonsense", "more nonsense"):
        assert (await site.post(prompt="abc", max_tokens=5, model=name))[0] == 404
    _, text = await site.get("/metrics")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types
    assert all(name.startswith(("pdtransfer_", "process_")) for name in types)
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
    assert "_created" not in text
    assert set(re.findall(r'[{,]model="(.*?)"', text)) == {"m", ""}
    assert 'pdtransfer_requests_total{model="m",status="200"} 1.0' in text
    assert 'pdtransfer_requests_total{model="",status="400"} 1.0' in text
    assert 'pdtransfer_requests_total{model="",status="404"} 2.0' in text
    assert 'pdtransfer_generated_tokens_total{model="m"} 5.0' in text
    assert 'pdtransfer_prompt_tokens_total{model="m"} 3.0' in text
    assert 'pdtransfer_first_token_seconds_count{model="m"} 1.0' in text
    assert 'pdtransfer_inter_token_seconds_count{model="m"} 2.0' in text, "5 tokens came in pieces of 3"
    assert 'pdtransfer_model_usable{model="m"} 1.0' in text


async def test_a_worker_that_breaks_the_protocol_is_disconnected_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with site() as it:
        for worker in it.backend.routing.workers.by_peer.values():
            assert f"{worker.role} {worker.identity.node} is connected at {worker.peer}" in caplog.messages
        it.decode[0].gate.clear()
        task = asyncio.create_task(it.post(prompt="abc", max_tokens=3))
        await until(lambda: it.decode[0].begun)
        room = it.decode[0].begun[0].room
        (router,) = it.decode[0].service._routers
        it.decode[0].bus.send(router, Tokens(room, 0, b"123"))
        status, answer, _ = await task
        assert (status, answer["error"]["code"]) == (502, "breach")
        assert "Tokens.ids" in answer["error"]["message"]
        await until(lambda: it.decode[0].stopped)
        assert "pdtransfer_breaches_total 1.0" in (await it.get("/metrics"))[1]
        assert it.backend.routing.workers.by_peer[it.router._config.decode[0]].why in caplog.messages


async def test_a_worker_that_sends_goodbye_is_no_warning_and_one_that_refuses_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def level(end: str) -> str:
        return next((record.levelname for record in caplog.records if record.message.endswith(end)), "")

    async with site() as it:
        d = it.backend.routing.workers.by_peer[it.router._config.decode[0]]
        goodbye, refuses = Goodbye(d.liveness.incarnation, "shutdown"), Reject(0, "refused", ("model",))
        for worker, leaves in ((it.decode[0], goodbye), (it.prefill[0], refuses)):
            (router,) = worker.service._routers
            worker.bus.send(router, leaves)
        assert await until(lambda: level("sent Goodbye (shutdown)")) == "INFO"
        assert await until(lambda: level("refuses (refused): model")) == "WARNING"


async def test_a_used_port_or_a_worker_listed_twice_is_a_one_line_error(site: Site) -> None:
    listen = site.url.removeprefix("http://")
    second = router_of(RouterConfig(listen=listen))
    with pytest.raises(WorldError, match=f"^listen: cannot listen on {listen}: Address already in use"):
        await second.open()
    await second.close()
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:5'?: listed twice"):
        router_of(RouterConfig(prefill=("tcp://127.0.0.1:5",), decode=("tcp://127.0.0.1:5",)))


@pytest.mark.given(limits=replace(LIMITS, rooms_max=2))
async def test_too_many_requests_at_once_are_429(either: Site | ServerSite) -> None:
    either.decode[0].gate.clear()
    tasks = [asyncio.create_task(either.post(prompt="abc", max_tokens=1)) for _ in range(2)]
    await until(lambda: either.at_decode == 2)
    status, answer, headers = await either.post(prompt="abc")
    assert (status, answer["error"]["code"], "Retry-After" in headers) == (429, "full", True)
    either.decode[0].gate.set()
    assert [(await task)[0] for task in tasks] == [200, 200]
    assert (await either.post(prompt="abc", max_tokens=1))[0] == 200
    for prompt, n in (("abc", 3), (["a", "b", "c"], 1)):
        status, answer, _ = await either.post(prompt=prompt, n=n, max_tokens=1)
        text = "n: 3 answers, this router takes at most 2 at once"
        assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "n", text)
    either.router.open_requests._limits = replace(LIMITS, prompts_bytes_max=11)
    status, answer, _ = await either.post(prompt="abc", max_tokens=1)
    kept = 12 if isinstance(either, Site) else 48  # its ids, or its body
    assert (status, answer["error"]["message"].startswith(f"{kept} bytes of prompts ")) == (400, True)


def test_the_process_reports_its_address_imports_no_torch_and_stops_on_sigterm() -> None:
    code = (
        "import sys; from pdtransfer.serve.router.process import run\n"
        "from pdtransfer.serve.settings.router import RouterConfig\n"
        "status = run(RouterConfig(listen='127.0.0.1:0', json=True, node='r'))\n"
        "print('torch' in sys.modules); sys.exit(status)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert (answer["ready"], answer["role"], answer["node"]) == (True, "router", "r")
        assert re.fullmatch(r"127\.0\.0\.1:\d+", answer["http"])
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().strip() == "False"
        assert process.wait(timeout=PATIENCE_S) == 0

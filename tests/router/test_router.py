"""The router over HTTP, with workers built from Service on a real bus and without a model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import uvloop

from pdtransfer.bus import Bus
from pdtransfer.bus.keys import AllowList, KeyPair, generate, generate_pair
from pdtransfer.config.config import RouterConfig
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.router.completions import BadRequestError, Text, parse
from pdtransfer.router.router import Router
from pdtransfer.wire import End, Goodbye, Reject, Tokens, unpack_ids
from tests.support.router_site import LIMITS, LOAD, site
from tests.support.waiting import PATIENCE_S, run_on_loop, until


def test_a_completion_carries_its_usage_and_the_extension() -> None:
    async def case() -> None:
        async with site() as it:
            status, answer, _ = await it.post(prompt="abc", max_tokens=7, temperature=0, seed=5)
            assert status == 200
            assert answer["object"] == "text_completion"
            assert answer["model"] == "m"
            assert answer["choices"] == [{"index": 0, "text": "cbacbac", "logprobs": None, "finish_reason": "length"}]
            assert answer["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 7,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            room = f"{it.decode[0].begun[0].room:016x}"
            assert answer["pdtransfer"] == {
                "room": room,
                "kv_bytes": 640,
                "copy_us": 12,
                "handoff_us": 42.5,
                "tokens_digest": "01",
                "logits_digest": "02",
                "kv_digest": "03",
                "prefill": "p0",
                "decode": "d0",
                "enable_hisparse": False,
            }
            begin = it.decode[0].begun[0]
            assert (begin.sampling.temperature, begin.sampling.seed, begin.sampling.top_p) == (0.0, 5, 1.0)
            assert begin.peers == it.router._config.prefill
            assert it.prefill[0].begun[0].peers == ("d0",)

    run_on_loop(case)


def test_a_stream_has_the_same_text_in_pieces_and_then_done() -> None:
    async def case() -> None:
        async with site() as it:
            it.decode[0].more.clear()
            body = {"prompt": "żółw", "max_tokens": 16, "stream": True}
            async with it.http.post(it.url + "/v1/completions", json=body) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                said = await response.content.readuntil(b"\n\n")
                it.decode[0].more.set()
                said += await response.content.read()
            assert said.endswith(b"\n\n")
            *events, done = [each.removeprefix("data: ") for each in said.decode()[:-2].split("\n\n")]
            assert done == "[DONE]"
            *pieces, last = [json.loads(each) for each in events]
            assert len(pieces) >= 1
            assert all(each["choices"][0]["finish_reason"] is None for each in pieces)
            # In reverse, its bytes are no valid characters, neither in pieces nor in whole.
            text = "".join(each["choices"][0]["text"] for each in (*pieces, last))
            assert text == (("żółw".encode()[::-1]) * 4)[:16].decode("utf-8", "replace")
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["usage"]["completion_tokens"] == 16
            assert last["pdtransfer"]["kv_digest"] == "03"
            assert len({each["id"] for each in (*pieces, last)}) == 1

    run_on_loop(case)


def test_an_incomplete_character_is_held_back_and_high_ids_have_no_text() -> None:
    euro, text = list("€".encode()), Text()
    assert [text.feed(euro[:1]), text.feed([300, 70_000]), text.feed(euro[1:])] == ["", "", "€"]
    assert text.feed(euro[:2], final=True) == "\ufffd"


BAD = [
    (b"{", None, "not JSON"),
    (b"[]", None, "object"),
    (b"\xff{}", None, "not JSON"),
    (b'{"prompt": "\\ud800"}', None, "not JSON"),
    (b"[" * 100_000, None, ""),
    (b"{}", "prompt", "missing"),
    (b'{"prompt": ""}', "prompt", "0 bytes"),
    (b'{"prompt": []}', "prompt", "0 ids"),
    (b'{"prompt": 5}', "prompt", "int"),
    (b'{"prompt": ["a"]}', "prompt", "str"),
    (b'{"prompt": [-1]}', "prompt", ">= 0"),
    (b'{"prompt": [4294967296]}', "prompt", "<= 4294967295"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", ">= 1"),
    (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens", "str"),
    (b'{"prompt": "a", "max_tokens": 16777216}', "max_tokens", "limit"),
    (b'{"prompt": "a", "temperature": -1}', "temperature", ">= 0"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature", "out of range"),
    (b'{"prompt": "a", "top_p": 0}', "top_p", "> 0"),
    (b'{"prompt": "a", "seed": 1.5}', "seed", "float"),
    (b'{"prompt": "a", "stream": 1}', "stream", "int"),
    (b'{"prompt": "a", "stream_options": {"include_usage": 3}}', "stream_options.include_usage", "int"),
    (b'{"prompt": "a", "cache_salt": ""}', "cache_salt", ">= 1"),
    (b'{"prompt": "a", "n": 2}', "n", "not supported"),
    (b'{"prompt": "a", "best_of": 2}', "best_of", "not supported"),
    (b'{"prompt": "a", "echo": true}', "echo", "not supported"),
    (b'{"prompt": "a", "logprobs": 0}', "logprobs", "not supported"),
    (b'{"prompt": "a", "stop": ["x"]}', "stop", "not supported"),
    (b'{"prompt": "a", "suffix": "x"}', "suffix", "not supported"),
    (b'{"prompt": "a", "presence_penalty": 0.5}', "presence_penalty", "not supported"),
    (b'{"prompt": "a", "logit_bias": {"5": 1}}', "logit_bias", "not supported"),
]


@pytest.mark.parametrize(("body", "param", "text"), BAD, ids=[str(body[:48]) for body, _, _ in BAD])
def test_a_bad_body_is_refused_by_the_name_of_its_field(body: bytes, param: str | None, text: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse(body, seed=1)
    assert refused.value.param == param
    assert text in str(refused.value)


def test_neutral_values_are_accepted_and_absent_fields_have_openais_defaults() -> None:
    body = b'{"prompt": "a", "n": 1, "echo": false, "stop": null, "logprobs": null, "suffix": "", "user": "me"}'
    asked = parse(body, seed=9)
    assert asked.request.sampling.max_tokens == 16
    assert asked.request.sampling.temperature == 1.0
    assert parse(b'{"prompt": "a", "seed": -1}', seed=9).request.sampling.seed == (1 << 64) - 1
    assert parse(b'{"prompt": [7, 300]}', seed=9).request.sampling.seed == 9
    assert unpack_ids("", parse(b'{"prompt": [7, 300]}', seed=9).request.prompt).tolist() == [7, 300]


def test_a_cache_salt_reaches_both_workers_as_a_digest_that_differs_as_the_salts_do() -> None:
    async def case() -> None:
        async with site() as it:
            for salt in (None, "tenant a", "tenant b", "tenant a"):
                assert (await it.post(prompt="abc", max_tokens=2, cache_salt=salt))[0] == 200
            salts = [begin.salt for begin in it.decode[0].begun]
            assert salts == [begin.salt for begin in it.prefill[0].begun]
            assert salts[0] == b""
            assert salts[1] == salts[3]
            assert len(set(salts)) == 3

    run_on_loop(case)


def test_http_errors_are_openais_objects() -> None:
    async def case() -> None:
        async with site() as it:
            status, answer, _ = await it.post(prompt="a", n=3)
            assert (status, answer["error"]["param"]) == (400, "n")
            assert answer["error"]["type"] == "invalid_request_error"
            status, answer, _ = await it.post(prompt="a", model="gpt")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            status, answer, _ = await it.post(prompt="a", user="x" * HTTP_BODY_BYTES_MAX)
            assert (status, "error" in answer) == (413, True)
            for path, expected in (("/v1/completions", 405), ("/v1/chat/completions", 404)):
                status, text = await it.get(path)
                assert status == expected
                assert "POST /v1/completions" in json.loads(text)["error"]["message"]
            assert not it.decode[0].begun
            status, text = await it.get("/v1/models")
            assert (status, [each["id"] for each in json.loads(text)["data"]]) == (200, ["m"])

    run_on_loop(case)


def test_health_and_completions_are_503_until_a_pair_is_ready() -> None:
    async def case() -> None:
        async with site() as it:
            it.decode[0].load(msgspec.structs.replace(LOAD, ready=False))
            await until(lambda: not it.router.routing.workers.models())
            status, text = await it.get("/health")
            assert (status, json.loads(text)["ready"]) == (503, False)
            assert (await it.get("/live"))[0] == 200
            status, answer, response = await it.post(prompt="a")
            assert (status, answer["error"]["type"]) == (503, "service_unavailable")
            assert int(response.headers["Retry-After"]) >= 1
            it.decode[0].load(LOAD)
            await until(it.router.routing.workers.models)
            status, text = await it.get("/health")
            assert status == 200
            assert [each["role"] for each in json.loads(text)["workers"]] == ["prefill", "decode"]

    run_on_loop(case)


@pytest.mark.parametrize("stream", [False, True])
def test_full_workers_are_429_with_their_retry_time(stream: bool) -> None:
    async def case() -> None:
        async with site() as it:
            it.prefill[0].failure = "full"
            it.decode[0].gate.clear()
            status, answer, response = await it.post(prompt="a", stream=stream)
            assert (status, answer["error"]["code"], response.headers["Retry-After"]) == (429, "full", "3")
            assert response.content_type == "application/json"

    run_on_loop(case)


def test_a_failed_prefill_is_retried_elsewhere_and_the_client_gets_one_answer() -> None:
    async def case() -> None:
        async with site(prefill=2) as it:
            for worker in (*it.prefill, *it.decode):
                worker.gate.clear()
            task = asyncio.create_task(it.post(prompt="abc", max_tokens=2))
            await until(lambda: it.prefill[0].begun or it.prefill[1].begun)
            first, second = it.prefill if it.prefill[0].begun else it.prefill[::-1]
            first.failure = "transfer"
            first.gate.set()
            await until(lambda: second.begun)
            for worker in (*it.prefill, *it.decode):
                worker.gate.set()
            status, answer, _ = await task
            assert (status, answer["choices"][0]["text"], answer["pdtransfer"]["prefill"]) == (200, "cb", second.node)
            assert it.router.routing.retries == 1

    run_on_loop(case)


def test_a_disconnected_clients_room_is_cancelled_on_both_workers() -> None:
    async def case(stream: bool) -> None:
        async with site() as it:
            it.prefill[0].gate.clear()
            it.decode[0].gate.clear()
            task = asyncio.create_task(it.post(prompt="a", stream=stream))
            await until(lambda: it.prefill[0].begun and it.decode[0].begun)
            task.cancel()
            await until(lambda: it.prefill[0].stopped and it.decode[0].stopped)
            assert it.router.routing.request_count == 0
            await until(lambda: it.router.routing.room_count == 0)
            await until(lambda: it.prefill[0].service.room_count == it.decode[0].service.room_count == 0)

    for stream in (False, True):
        run_on_loop(lambda each=stream: case(each))


def test_a_worker_that_is_listed_again_is_dialled_again(tmp_path: Path) -> None:
    async def case() -> None:
        heard = asyncio.Event()
        line = generate(tmp_path / "r0")
        keys, router_keys = generate_pair(), KeyPair.read(tmp_path / "r0.key")
        everybody = AllowList({keys.public: "p0", router_keys.public: "r0"})
        (tmp_path / "peers").write_text(f"{line}\np0 {keys.public}\n")
        bus = Bus(node="p0", keys=keys, allowed=everybody, receive=lambda *_: heard.set(), refused=lambda *_: None)
        endpoint = f"{keys.public}@" + await bus.bind("tcp://127.0.0.1:0")
        router = Router(
            RouterConfig(
                listen="127.0.0.1:0", prefill=(endpoint,), decode=(), limits=LIMITS,
                key=tmp_path / "r0.key", allow=tmp_path / "peers",
            )
        )  # fmt: skip
        try:
            await router.open()
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
            router.allow(AllowList({router_keys.public: "r0"}))
            await asyncio.sleep(0)
            heard.clear()
            router.allow(everybody)
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
        finally:
            await router.close()
            await bus.close()

    uvloop.run(case())


def test_a_failure_within_a_stream_is_an_error_event_without_done() -> None:
    async def case() -> None:
        async with site() as it:
            it.decode[0].gate.clear()
            request = it.http.post(it.url + "/v1/completions", json={"prompt": "abc", "max_tokens": 9, "stream": True})
            task = asyncio.create_task(request.__aenter__())
            await until(lambda: it.decode[0].begun)
            room = it.decode[0].begun[0].room
            it.decode[0].perform(it.decode[0].service.tokens(room, [120], asyncio.get_running_loop().time()))
            response = await task
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first[6:])["choices"][0]["text"] == "x"
            it.decode[0].end(End(room, "engine", "broken", 0))
            rest = (await response.content.read()).decode()
            assert json.loads(rest.removeprefix("data: "))["error"]["code"] == "engine"
            response.close()

    run_on_loop(case)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_does_not_read_disturbs_no_other_and_is_closed(leaves: bool) -> None:
    async def case() -> None:
        async with site(limits=replace(LIMITS, room_deadline_ms=60_000 if leaves else 4_000)) as it:
            it.decode[0].piece = 4_000
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", int(it.url.rpartition(":")[2])))
            # Six bytes of JSON a token: more than the sockets in between can buffer.
            tokens = 1_000_000
            body = json.dumps({"prompt": "\1", "max_tokens": tokens, "stream": True}).encode()
            client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: it.decode[0].begun)
            for _ in range(20):
                status, answer, _ = await it.post(prompt="xy", max_tokens=2)
                assert (status, answer["choices"][0]["text"]) == (200, "yx")
            if leaves:
                # Its tokens are all taken from its worker; the unread ones wait here, bounded by max_tokens.
                await until(lambda: it.decode[0].service.room_count == 0)
                (reply,) = it.router._replies.values()
                assert 0 < len(reply._ids) <= tokens
                client.close()
            await until(lambda: not it.router._replies)
            client.close()

    run_on_loop(case)


def test_a_draining_router_finishes_its_requests_and_accepts_none() -> None:
    async def case() -> None:
        async with site() as it:
            it.decode[0].gate.clear()
            task = asyncio.create_task(it.post(prompt="abc", max_tokens=3))
            await until(lambda: it.decode[0].begun)
            drain = asyncio.create_task(it.router.drain(asyncio.Event()))
            await asyncio.sleep(0)
            assert (await it.get("/health"))[0] == 503
            assert (await it.post(prompt="abc"))[0] == 503
            assert not drain.done()
            it.decode[0].gate.set()
            assert (await task)[0] == 200
            await drain

    run_on_loop(case)


def test_closing_fails_unfinished_requests_and_cancels_their_rooms() -> None:
    async def case() -> None:
        async with site() as it:
            it.decode[0].gate.clear()
            task = asyncio.create_task(it.post(prompt="abc", max_tokens=3))
            await until(lambda: it.decode[0].begun)
            hurry = asyncio.Event()
            hurry.set()
            await it.router.drain(hurry)
            await it.router.close()
            assert (await task)[0] == 503
            await until(lambda: it.decode[0].stopped)

    run_on_loop(case)


def test_metrics_have_our_prefix_and_total_on_counters_only() -> None:
    async def case() -> None:
        async with site() as it:
            await it.post(prompt="abc", max_tokens=5)
            await it.post(prompt="")
            _, text = await it.get("/metrics")
            types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
            assert types
            assert all(name.startswith("pdtransfer_") for name in types)
            for name, kind in types.items():
                assert (kind == "counter") == name.endswith("_total"), name
            assert "_created" not in text
            assert 'pdtransfer_requests_total{status="200"} 1.0' in text
            assert 'pdtransfer_requests_total{status="400"} 1.0' in text
            assert "pdtransfer_generated_tokens_total 5.0" in text
            assert "pdtransfer_prompt_tokens_total 3.0" in text
            assert "pdtransfer_first_token_seconds_count 1.0" in text

    run_on_loop(case)


def test_a_worker_that_breaks_the_protocol_is_disconnected_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def case() -> None:
        async with site() as it:
            for worker in it.router.routing.workers.by_peer.values():
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
            assert it.router.routing.workers.by_peer[it.router._config.decode[0]].why in caplog.messages

    run_on_loop(case)


def test_a_worker_that_says_goodbye_is_no_warning_and_one_that_refuses_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def level(end: str) -> str:
        return next((each.levelname for each in caplog.records if each.message.endswith(end)), "")

    async def case() -> None:
        async with site() as it:
            d = it.router.routing.workers.by_peer[it.router._config.decode[0]]
            goodbye, refuses = Goodbye(d.liveness.incarnation, "shutdown"), Reject(0, "refused", ("model",))
            for worker, leaves in ((it.decode[0], goodbye), (it.prefill[0], refuses)):
                (router,) = worker.service._routers
                worker.bus.send(router, leaves)
            assert await until(lambda: level("sent Goodbye (shutdown)")) == "INFO"
            assert await until(lambda: level("refuses (refused): model")) == "WARNING"

    run_on_loop(case)


def test_a_used_port_or_a_worker_listed_twice_is_a_one_line_error() -> None:
    async def case() -> None:
        async with site() as it:
            listen = it.url.removeprefix("http://")
            second = Router(RouterConfig(listen=listen))
            with pytest.raises(WorldError, match=f"cannot listen on {listen}: Address already in use"):
                await second.open()
            await second.close()
            with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:5'?: listed twice"):
                Router(RouterConfig(prefill=("tcp://127.0.0.1:5",), decode=("tcp://127.0.0.1:5",)))

    run_on_loop(case)


def test_too_many_requests_at_once_are_429() -> None:
    async def case() -> None:
        async with site(limits=replace(LIMITS, rooms_max=2)) as it:
            it.decode[0].gate.clear()
            tasks = [asyncio.create_task(it.post(prompt="abc", max_tokens=1)) for _ in range(2)]
            await until(lambda: len(it.decode[0].begun) == 2)
            status, _, response = await it.post(prompt="abc")
            assert (status, "Retry-After" in response.headers) == (429, True)
            it.decode[0].gate.set()
            assert [(await task)[0] for task in tasks] == [200, 200]

    run_on_loop(case)


def test_the_process_reports_its_address_imports_no_torch_and_stops_on_sigterm() -> None:
    code = (
        "import sys; from pdtransfer.router.router import run; from pdtransfer.config.config import RouterConfig\n"
        "status = run(RouterConfig(listen='127.0.0.1:0', json=True, node='r'))\n"
        "print('torch' in sys.modules); sys.exit(status)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert (said["ready"], said["role"], said["node"]) == (True, "router", "r")
        assert re.fullmatch(r"127\.0\.0\.1:\d+", said["http"])
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().strip() == "False"
        assert process.wait(timeout=PATIENCE_S) == 0

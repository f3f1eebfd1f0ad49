"""HTTP servers that behave like vLLM's with a KV connector and compute nothing, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from aiohttp import web

from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.servers.backend import Servers
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.front.router import Router
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.tracing.ended_request import EndedRequest, EndedRequests
from tests.support.waiting import until

LIMITS = Limits(ping_ms=20, silence_ms=20_000, room_deadline_ms=60_000)
PIECES = ["one ", "two ", "three"]


class Landings:
    """Where prefill's KV lands: an event for each transfer that a decode server waits for."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)

    def of(self, engine: str, transfer: str) -> asyncio.Event:
        return self._events[engine, transfer]


@dataclass
class Seen:
    """One request that came in, and whether its client went before the answer was complete."""

    path: str
    body: dict
    raw: bytes
    headers: Mapping[str, str]
    left: bool = False
    answered: bool = False
    rank: int = 0  # which of the server's engines it is for

    @property
    def kv(self) -> dict:
        return self.body.get("kv_transfer_params") or {}


@dataclass
class FakeVllm:
    """One server. `gate` holds its answers; `more` holds what follows a stream's first event, and prefill's answer when
    its KV has landed. `status` and `answer` replace the answer; `dies` cuts the connection: "early" before the first
    byte, "late" after the first event; `healthy` and `mute` are of /health."""

    speaks: ClassVar[str] = "vllm"

    role: str
    landings: Landings
    engine: str = ""
    connector: bool = True
    status: int = 200
    answer: dict | None = None
    dies: str = ""
    first_error: int = 0
    port: object = 7000  # what prefill returns of its process
    healthy: bool = True
    mute: bool = False
    pieces: list[str] = field(default_factory=lambda: PIECES)
    seen: list[Seen] = field(default_factory=list)
    counted: str = ""  # its metrics
    reports_kv: bool = False  # decode's answers say whether their KV was received
    lost: bool = False  # and say that it was not
    figures: dict[str, Any] = field(default_factory=dict[str, Any])  # usage and metrics of its answers
    given_up: list[str] = field(default_factory=list)  # transfers that it was asked to give up
    given_up_ranks: list[int] = field(default_factory=list)
    sent: int = 0  # bytes of streams
    url: str = ""
    ranks: int = 1  # data parallel engines
    longest: int = 0  # max_model_len, which a longer prompt is refused by
    first_token: str = PIECES[0]  # of a prefill server that is to stream it
    logprobs: tuple[float, ...] = (-0.1, -2.5)  # the token's own, and the next one's
    more_params: dict[str, Any] = field(default_factory=dict[str, Any])  # that prefill's connector returns
    text_field: str = "content"  # the field of a chat's first text: "reasoning" where a parser finds that it is

    def __post_init__(self) -> None:
        self.gate, self.more = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.more.set()
        self._runner: web.AppRunner | None = None

    async def open(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models)])
        app.add_routes([web.get("/metrics", self._metrics)])
        app.add_routes([web.post(path, self._generate) for path in DIALECTS[self.speaks].paths])
        self.routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self.url

    def routes(self, app: web.Application) -> None:
        """What this engine's servers have beside."""

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def stop_listening(self) -> None:
        """Goes on with what is under way, as an engine does that is about to end."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def come_back(self) -> None:
        """Listens again, at the same address."""
        await self.open(int(self.url.rpartition(":")[2]))

    async def _health(self, _: web.Request) -> web.Response:
        if self.mute:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0.0' for rank in range(self.ranks)]
        return web.Response(text="\n".join([*lines, self.counted]))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "list",
                "for": request.headers.get("Authorization"),
                "data": [{"id": self.engine} | ({"max_model_len": self.longest} if self.longest else {})],
            }
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = Seen(request.path, json.loads(raw), raw, request.headers)
        seen.rank = int(request.headers.get("X-data-parallel-rank", len(self.seen) % self.ranks))
        assert 0 <= seen.rank < self.ranks
        if (given_up := seen.kv.get("abort_transfer_id")) is not None:
            self.given_up.append(given_up)
            self.given_up_ranks.append(seen.rank)
            return web.json_response({"id": "cmpl-2", "choices": [{"text": "x"}]})
        self.seen.append(seen)
        try:
            response = await self.reply(request, seen)
        except (asyncio.CancelledError, ConnectionError):  # the second: the head of an answer was being written
            seen.left = True
            raise
        seen.answered = True
        return response

    async def reply(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if self.dies == "early":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.status != 200:
            await self.gate.wait()
            return web.json_response(self.answer, status=self.status, headers={"Retry-After": "7"})
        streams = bool(seen.body.get("stream"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if streams:
            await response.prepare(request)  # as vLLM: 200 before the first token
        await self.gate.wait()
        await self.hand_over(seen)
        if streams and self.role == "prefill" and seen.kv:
            for event in first_token_events(seen.body, self.first_token, self.logprobs, self.text_field):
                await self._event(response, json.dumps(event))
            await self._end(response, seen)
            return response
        if streams:
            return await self._stream(request, response, seen)
        if self.role == "prefill":
            await self.more.wait()
        return self._whole(seen)

    async def hand_over(self, seen: Seen) -> None:
        """Decode waits until prefill has been asked."""
        if seen.kv.get("do_remote_prefill"):
            await self.landings.of(seen.kv["remote_engine_id"], seen.kv["transfer_id"]).wait()
        elif seen.kv.get("do_remote_decode"):
            self.landings.of(self.engine_of(seen), seen.kv["transfer_id"]).set()

    def engine_of(self, seen: Seen) -> str:
        return self.engine if self.ranks == 1 else f"{self.engine}_dp{seen.rank}"

    def _whole(self, seen: Seen) -> web.Response:
        answer = {"id": "cmpl-1", "choices": [{"text": "".join(self.pieces)}], "server": self.engine_of(seen)}
        answer |= self.figures
        if self.connector and seen.kv.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.engine_of(seen),
                "remote_host": "127.0.0.1", "remote_port": self.port, "tp_size": 2, "transfer_mode": "push",
                "remote_request_id": "cmpl-1", "transfer_id": seen.kv["transfer_id"], "facts": {"dtype": "float32"},
                "remote_prefill_cached_tokens": len(self.seen),  # as vLLM adds it: of the one request
            } | self.more_params  # fmt: skip
        elif self.reports_kv and seen.kv.get("do_remote_prefill"):
            answer["kv_transfer_params"] = {"kv_bytes": 0 if self.lost else 4_096, "kv_lost": self.lost}
        return web.json_response(answer, headers={"X-Vllm": "yes"})

    async def _stream(self, request: web.Request, response: web.StreamResponse, seen: Seen) -> web.StreamResponse:
        text_field = self.text_field if "messages" in seen.body else "text"
        if self.first_error:
            text = json.dumps({"error": {"message": "KV is lost", "code": self.first_error}})
            for piece in (f"data: {text[:9]}", f"{text[9:]}\n", "\n"):
                await response.write(piece.encode())
                await asyncio.sleep(0.02)  # each arrives by itself
        else:
            if text_field != "text":
                role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
                await self._event(response, json.dumps(role))
            for index, piece in enumerate(self.pieces):
                if index:
                    await self.more.wait()
                    if self.dies == "late":
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                choice = {"text": piece} if text_field == "text" else {"delta": {text_field: piece}}
                await self._event(response, json.dumps({"choices": [choice], "server": self.engine}))
        await self._end(response, seen)
        await response.write_eof()
        return response

    async def _end(self, response: web.StreamResponse, seen: Seen) -> None:
        if (seen.body.get("stream_options") or {}).get("include_usage") and self.figures:
            await self._event(response, json.dumps({"choices": [], **self.figures}))
        await self._event(response, "[DONE]")

    async def _event(self, response: web.StreamResponse, text: str) -> None:
        event = f"data: {text}\n\n".encode()
        await response.write(event)
        self.sent += len(event)


def texts(stream: str) -> list[str]:
    """The text of each event but the last, which is [DONE]."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]


def first_token_events(body: dict, text: str, logprobs: tuple[float, ...], text_field: str = "content") -> list[dict]:
    """A stream of one token as vLLM writes it, by the body that asked for it."""
    head = {"id": "cmpl-1", "created": 7, "model": "m"}
    own, *others = logprobs
    end = {"finish_reason": "length", "stop_reason": None}
    if "messages" in body:
        assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
        top = [{"token": str(index), "logprob": value, "bytes": []} for index, value in enumerate(logprobs)]
        scored = {"content": [{"token": "0", "logprob": own, "bytes": [], "top_logprobs": top}]}
        deltas = [{"role": "assistant", "content": ""}, {text_field: text}]
        choices = [
            {"index": 0, "delta": deltas[0], "logprobs": None, "finish_reason": None},
            {"index": 0, "delta": deltas[1], "logprobs": scored, **end, "token_ids": None},
        ]
        return [head | {"object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    assert body["logprobs"] == 2
    top = {text: own} | {str(index): value for index, value in enumerate(others)}
    scored = {"text_offset": [0], "token_logprobs": [own], "tokens": [text], "top_logprobs": [top]}
    choice = {"index": 0, "text": text, "logprobs": scored, **end}
    return [head | {"object": "text_completion", "choices": [choice], "usage": None}]


@dataclass
class ServerSite:
    """A router with its servers, and a client."""

    router: Router
    backend: Servers
    prefill: list[FakeVllm]
    decode: list[FakeVllm]
    http: aiohttp.ClientSession
    url: str
    ended: list[EndedRequest] = field(default_factory=list)  # records, as they came

    @property
    def servers(self) -> list[FakeVllm]:
        return [*self.prefill, *self.decode]

    @property
    def at_decode(self) -> int:
        """How many requests its first decode server has got."""
        return len(self.decode[0].seen)

    async def get(self, path: str) -> tuple[int, str]:
        """Returns status and text."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def post(self, path: str = "/v1/completions", *, headers=None, **body):
        """Returns status, JSON and headers."""
        body = {"model": "m", "prompt": "once", "max_tokens": 9} | body
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def stream(self, **body) -> str:
        """Returns a stream as it came, which must be whole."""
        body = {"model": "m", "prompt": "once", "max_tokens": 9, "stream": True} | body
        async with self.http.post(self.url + "/v1/completions", json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            return (await response.read()).decode()

    async def meet(self) -> None:
        """Has every prefill server's identity learnt."""
        for each in self.backend.pool.prefill:
            others = [other for other in self.backend.pool.prefill if other is not each]
            for other in others:
                other.unfinished += 1_000
            assert (await self.post())[0] == 200
            for other in others:
                other.unfinished -= 1_000
            assert each.identity is not None
        for server in self.servers:
            server.seen.clear()

    def server(self, fake: FakeVllm):
        """What the router knows of it."""
        return next(each for each in self.backend.pool.all if each.url == fake.url)

    async def leaves_unnoticed(self, fake: FakeVllm) -> None:
        """The server is gone, and no look at its health shows it before a request meets it."""
        looked_at: set[str] = set()

        async def look(server: Any, _: str) -> tuple[None, str]:
            looked_at.add(server.url)
            await asyncio.Event().wait()
            return None, ""

        self.backend.upstream.look = look
        await until(lambda: fake.url in looked_at, "the look before this one has ended")
        await fake.close()
        # A request on a kept connection whose end is not read yet would meet a server that dies, not one that refuses.
        port = int(fake.url.rpartition(":")[2])
        await until(lambda: not is_dialled(port), "the router has closed its connections to it")


async def streamed(
    request: web.Request, pieces: Iterable[bytes], *, pause_s=0.05, kind="text/event-stream", length: int | None = None
) -> web.StreamResponse:
    """An answer that comes in these pieces, each by itself."""
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": kind})
    response.content_length = length
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(pause_s)
    return response


def is_dialled(port: int) -> bool:
    """Whether a socket of this host is connected to that port of 127.0.0.1. TIME_WAIT (06) is behind its end."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[2] == f"0100007F:{port:04X}" and line.split()[3] != "06" for line in lines)


@asynccontextmanager
async def server_site(
    *,
    prefill: int = 1,
    decode: int = 1,
    limits: Limits = LIMITS,
    of: type[FakeVllm] = FakeVllm,
    ranks: int = 1,
    **more: Any,
) -> AsyncIterator[ServerSite]:
    """`ranks` has every server; `more` are settings of the router."""
    landings = Landings()
    fakes = [of("prefill", landings, f"p{i}") for i in range(prefill)]
    fakes += [of("decode", landings, f"d{i}") for i in range(decode)]
    for fake in fakes:
        fake.ranks = ranks
    urls = [await fake.open() for fake in fakes]
    config = RouterConfig(
        engine=of.speaks,
        listen="127.0.0.1:0",
        prefill=(*urls[:prefill],),
        decode=(*urls[prefill:],),
        limits=limits,
        **more,
    )
    ended, records = EndedRequests(), list[EndedRequest]()
    ended.subscribe(records.append)
    router = router_of(config, ended)
    backend = router.backend
    assert isinstance(backend, Servers)
    url = "http://" + await router.open()
    async with aiohttp.ClientSession() as http:
        try:
            await until(lambda: all(each.usable for each in backend.pool.all))
            yield ServerSite(router, backend, fakes[:prefill], fakes[prefill:], http, url, records)
        finally:
            await router.close()
            for fake in fakes:
                await fake.close()

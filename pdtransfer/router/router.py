"""The router's process: OpenAI's HTTP API and the bus on one event loop. It imports no torch.

In front of HTTP servers there is no bus, and `servers` holds the router.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import replace

import msgspec
import uvloop
from aiohttp import web

from ..bus import Bus
from ..bus.keys import AllowList, KeyPair
from ..config.config import RouterConfig
from ..engine_api import Spans
from ..errors import ArenaFullError, ConfigError, RemoteProtocolError
from ..handoff.effects import Send
from ..limits import HTTP_BODY_BYTES_MAX, HTTP_CONNECTIONS_MAX
from ..node.core_driver import EffectRunner, LoopClock, Ticker
from ..process.http import Health, HttpListener, application
from ..process.setup import prepare
from ..process.signals import StopSignal, reload, reload_on_hangup
from ..tracing.trace import recorded
from ..wire import Identity, Message, Ranks
from .completions import BadRequestError, Completion, CompletionAnswer, Text, error, models, parse
from .openai_http import JSON, OpenRequests, error_response, openai_errors, refusal
from .router_effects import Emit, Fail, Finish, Refusal, RoutingEffect, WorkerChanged
from .router_metrics import RouterMetrics
from .routing import Routing
from .servers.server_router import ServerRouter
from .worker_pool import model_text

log = logging.getLogger(__name__)


class Reply:
    """Buffers the answer of a request for its HTTP task: at most max_tokens ids."""

    def __init__(self, began_s: float) -> None:
        self.began_s = self.first_s = began_s
        self.streaming = False
        self._ids: list[int] = []
        self._news = asyncio.Event()
        self.end: Finish | Fail | None = None

    def put(self, ids: list[int]) -> None:
        """Appends ids."""
        self.streaming = True
        self._ids += ids
        self._news.set()

    def close(self, end: Finish | Fail) -> None:
        """Ends the answer."""
        self.end = end
        self._news.set()

    async def take(self) -> tuple[list[int], Finish | Fail | None]:
        """Waits for ids or the end; returns all new ids, and the end if it was reached."""
        await self._news.wait()
        if self.end is None:
            self._news.clear()
        ids, self._ids = self._ids, []
        return ids, self.end


class Router:
    """One router process: `open`, then `drain` and `close`."""

    def __init__(self, config: RouterConfig, spans: Spans | None = None) -> None:
        self._config, self._spans = config, spans
        self._loop = asyncio.get_running_loop()
        self.incarnation = secrets.randbits(64)
        self._created = int(time.time())
        self._bus = Bus(
            node=config.node,
            keys=None if config.key is None else KeyPair.read(config.key),
            allowed=None if config.allow is None else AllowList.read(config.allow),
            receive=self._receive,
            refused=self._refused,
            insecure=config.insecure,
        )
        self.routing = Routing(
            Identity(config.node, "router", self.incarnation, Ranks(), "", b"", config.limits.window),
            prefill=config.prefill,
            decode=config.decode,
            limits=config.limits,
            mint=lambda: secrets.randbits(64),
        )
        self._clock = LoopClock(config.limits.ping_ms / 2e3)
        self._perform = EffectRunner(self._perform_one, Ticker(self.routing.next_tick, self._tick, self._clock))
        self._replies: dict[int, Reply] = {}
        self.open_requests = OpenRequests(config.limits)
        self.metrics = RouterMetrics(self.routing, self._bus)
        app = application(self._health, self.metrics.registry, body_bytes_max=HTTP_BODY_BYTES_MAX)
        app.middlewares.append(openai_errors("POST /v1/completions and GET /v1/models"))
        app.add_routes([web.post("/v1/completions", self._completions), web.get("/v1/models", self._models)])
        self._listener = HttpListener(app, connections_max=config.limits.rooms_max + HTTP_CONNECTIONS_MAX)

    async def open(self) -> str:
        """Dials the workers and listens; returns host:port. Raises ConfigError or WorldError."""
        for endpoint in (*self._config.prefill, *self._config.decode):
            self._bus.dial(endpoint)
        self._perform(self.routing.start(self._clock.now()))
        return await self._listener.open(self._config.listen)

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list: disconnects workers that it no longer lists, and dials listed ones again."""
        self._bus.allow(allowed)
        for endpoint in (*self._config.prefill, *self._config.decode):
            with suppress(ConfigError):  # not on the list
                self._bus.dial(endpoint)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Accepts no more requests; waits for unfinished ones until the room deadline or `hurry`."""
        self.routing.drain()
        await self.open_requests.drain(hurry)

    async def close(self) -> None:
        """Fails unfinished requests, sends Goodbye to the workers, and releases everything."""
        self._perform(self.routing.close(self._clock.now()))
        self._perform.ticker.stop()
        await self._listener.close()
        await self._bus.close()

    def _receive(self, peer: str, message: Message) -> None:
        try:
            effects = self.routing.receive(peer, message, self._clock.now())
        except RemoteProtocolError as breach:
            self._refused(peer, breach)
            return
        self._perform(effects)

    def _refused(self, peer: str, breach: RemoteProtocolError) -> None:
        """Handles a breach: the bus reports undecodable messages, the core invalid ones."""
        self.metrics.breaches.inc()
        log.warning("%s broke the protocol: %s", peer, breach)
        self._perform(self.routing.breach(peer, breach, self._clock.now()))

    def _tick(self) -> None:
        self._perform(self.routing.tick(self._clock.now()))

    def _perform_one(self, effect: RoutingEffect) -> None:
        match effect:
            case Send(peer, message):
                self._bus.send(peer, message)
            case Emit(request, ids):
                reply = self._replies[request]
                if not reply.streaming:
                    reply.first_s = time.monotonic()
                    self.metrics.answers.first_token_seconds.observe(reply.first_s - reply.began_s)
                reply.put(ids)
                self.metrics.generated_tokens.inc(len(ids))
            case Finish() | Fail():
                self._replies[effect.request].close(effect)
            case WorkerChanged(peer, ""):
                worker = self.routing.workers.by_peer[peer]
                assert worker.identity is not None
                log.info("%s %s is connected at %s", worker.role, worker.identity.node, peer)
            case WorkerChanged(_, why, orderly):
                log.log(logging.INFO if orderly else logging.WARNING, "%s", why)

    def _health(self) -> Health:
        workers = [
            {
                "peer": each.peer,
                "role": each.role,
                "usable": each.usable,
                "model": model_text(each.model) if each.identity is not None else None,
                "why": each.why or None,
            }
            for each in self.routing.workers.by_peer.values()
        ]
        draining = self.open_requests.draining
        ready = not draining and bool(self.routing.workers.models())
        return Health(ready, {"draining": draining, "workers": workers})

    async def _models(self, _: web.Request) -> web.Response:
        return web.Response(body=models(self.routing.workers.models(), self._created), content_type=JSON)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await self.open_requests.body(http)
            completion = self._of_one_model(
                parse(body, seed=secrets.randbits(63), enable_hisparse=self._config.enable_hisparse)
            )
            with self.open_requests.hold(len(completion.request.prompt)):
                return await self._complete(http, completion)
        except (BadRequestError, ArenaFullError) as why:
            return self._refuse(refusal(why))

    async def _complete(self, http: web.Request, completion: Completion) -> web.StreamResponse:
        accepted = self.routing.submit(completion.request, self._clock.now())
        if isinstance(accepted, Refusal):
            return self._refuse(_failed(accepted))
        reply = self._replies[accepted.request] = Reply(time.monotonic())
        self._perform(accepted.effects)
        self.metrics.prompt_tokens.inc(completion.prompt_tokens)
        model = completion.request.model or ""
        answer = CompletionAnswer(accepted.request, model, int(time.time()), completion.prompt_tokens)
        try:
            return await (self._stream(http, reply, answer) if completion.stream else self._whole(reply, answer))
        except (ConnectionError, TimeoutError):
            if http.transport is not None:
                http.transport.abort()
            return web.Response()  # The client does not read it.
        finally:
            if reply.end is None:
                self._perform(self.routing.cancel(accepted.request, self._clock.now()))
            del self._replies[accepted.request]
            self._count(reply)

    def _of_one_model(self, completion: Completion) -> Completion:
        """Fills in the model. Raises BadRequestError for a model that is not served, or a missing one among several."""
        served, model = self.routing.workers.models(), completion.request.model
        if not served or model in served:
            return completion
        if model is not None:
            raise BadRequestError(
                "model", f"{model!r} is not served: {', '.join(served)}", code="model_not_found", status=404
            )
        if len(served) > 1:
            raise BadRequestError("model", f"missing, one of: {', '.join(served)}")
        return replace(completion, request=replace(completion.request, model=served[0]))

    async def _whole(self, reply: Reply, answer: CompletionAnswer) -> web.StreamResponse:
        ids, end = await reply.take()
        while end is None:
            more, end = await reply.take()
            ids += more
        if isinstance(end, Fail):
            return _failed(end)
        return web.Response(body=answer.last(Text().feed(ids, final=True), end), content_type=JSON)

    async def _stream(self, http: web.Request, reply: Reply, answer: CompletionAnswer) -> web.StreamResponse:
        (ids, end), text = await reply.take(), Text()
        if isinstance(end, Fail):
            return _failed(end)  # Nothing was sent yet, so the status can report the failure.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        while end is None:
            await self._write_event(response, answer.piece(text.feed(ids)))
            ids, end = await reply.take()
        if isinstance(end, Finish):
            await self._write_event(response, answer.last(text.feed(ids, final=True), end))
            await self._write_event(response, b"[DONE]")
        else:
            await self._write_event(response, error(end.status, end.detail, code=end.cause.value))
        await response.write_eof()
        return response

    async def _write_event(self, response: web.StreamResponse, event: bytes) -> None:
        """Writes one event. A client that does not read delays only its own task, for a bounded time."""
        async with asyncio.timeout(self._deadline_s):
            await response.write(b"data: " + event + b"\n\n")

    @property
    def _deadline_s(self) -> float:
        return self._config.limits.room_deadline_ms / 1e3

    def _refuse(self, response: web.Response) -> web.Response:
        self.metrics.answers.count(response.status)
        return response

    def _count(self, reply: Reply) -> None:
        assert reply.end is not None
        status = 200 if isinstance(reply.end, Finish) else reply.end.status
        now = time.monotonic()
        self.metrics.answers.count(status, now - reply.began_s)
        if self._spans is not None and isinstance(reply.end, Finish):  # a failed one has no room to name
            self._spans("request", "to the first token", reply.began_s, reply.first_s, room=reply.end.room)
            self._spans("request", "from the first token on", reply.first_s, now, room=reply.end.room)


def _failed(end: Fail | Refusal) -> web.Response:
    return error_response(end.status, end.detail, code=end.cause.value, retry_ms=end.retry_ms)


async def serve(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT, drains it, and closes it; a later signal ends the drain."""
    prepare()
    with recorded(config.timeline, config.node) as spans:
        await _run_until_stopped(config, spans)


async def _run_until_stopped(config: RouterConfig, spans: Spans | None) -> None:
    stop, router = StopSignal(), ServerRouter(config) if config.relays else Router(config, spans)
    try:
        address = await router.open()
        if isinstance(router, Router):
            reload_on_hangup(config.allow, lambda: reload(config.allow, router.allow))
        log.info("%s listens on %s", config.node, address)
        for role, endpoints in (("prefill", config.prefill), ("decode", config.decode)):
            if not endpoints:
                form = "http" if config.relays else "tcp"
                log.warning("no request can be served: name a %s worker with --%s %s://host:port", role, role, form)
        if config.json:
            line = {"ready": True, "role": config.role, "node": config.node, "http": address}
            print(msgspec.json.encode(line).decode(), flush=True)
        await stop.asked.wait()
        await router.drain(stop.hurried)
    finally:
        await router.close()
        stop.close()


def run(config: RouterConfig) -> int:
    """The command `pdtransfer router`; returns its exit status. Raises ConfigError or WorldError."""
    uvloop.run(serve(config))
    return 0

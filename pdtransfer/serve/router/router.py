"""The router before our own daemons: OpenAI's HTTP API and the bus on one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from ... import __version__
from ...bus import Bus
from ...bus.gone import Gone
from ...bus.keys import AllowList, KeyPair, revoked
from ...bus.limits import BusLimits
from ...client.core_driver import EffectRunner, LoopClock, Ticker
from ...errors import ArenaFullError, ConfigError, RemoteProtocolError
from ...handoff.events import Spans
from ...handoff.send import Send
from ...limits import HTTP_BODY_BYTES_MAX, HTTP_CONNECTIONS_MAX, TOKENS_MAX, WORKERS_MAX
from ...wire import Identity, Message, Ranks, split_key
from ..process.http import Health, HttpListener, application
from ..process.signals import reload
from ..settings.router import RouterConfig
from ..tracing.ended_request import EndedRequests
from .answer_text import TextPiece
from .answering import GrowingAnswer, Reply
from .answers import AnswerForm, error, model_object, models, usage_of
from .api_keys import KeyLimitError
from .body_readers import BodyReaders
from .client_guard import ClientGuard
from .client_request import ClientRequest
from .completions import BadRequestError, Completion, RequestDefaults, completion_of
from .fleet_status import fleet_status, rooms_by_progress, worker_status
from .model_text import load_text
from .openai_http import JSON, OpenRequests, accept, error_response, openai_errors, refusal, stamp
from .pool_worker import Role, model_text
from .readings import ReadCompletion, ReadText
from .recent_requests import RecentRequests
from .router_effects import Emit, Fail, Finish, Refusal, Retry, RoutingEffect, WorkerChanged, WorkerLeft
from .router_metrics import RouterMetrics
from .routing import Routing
from .status import FleetStatus, WorkerStatus
from .status_http import StatusPages

log = logging.getLogger(__name__)

INLINE_BYTES_MAX = 4 << 10  # of a body that is read on the loop, tokenised too: some milliseconds whatever its shape
LOGPROBS_INLINE_MAX = 256  # tokens whose logprobs are written as JSON on the loop: some milliseconds
TEXT_PATHS = ("/tokenize", "/detokenize")


class Router:
    """One router process: `open`, then `drain` and `close`."""

    def __init__(self, config: RouterConfig, spans: Spans | None = None, ended: EndedRequests | None = None) -> None:
        """`ended` gets a record of each room, and of each request to generate, at its end."""
        self._config, self._spans, self._ended = config, spans, ended or EndedRequests()
        self._defaults = RequestDefaults(enable_hisparse=config.enable_hisparse, enable_resume=config.enable_resume)
        self._text = load_text(config.model)
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
            limits=BusLimits(dials_max=WORKERS_MAX),
            gone=self._report_gone,
        )
        self.routing = Routing(
            Identity(config.node, "router", self.incarnation, Ranks(), "", b"", config.limits.window),
            prefill=config.prefill,
            decode=config.decode,
            limits=config.limits,
            mint=lambda: secrets.randbits(64),
        )
        self._clock = LoopClock.among_peers(config.limits.ping_ms)
        self._perform = EffectRunner(self._perform_one, Ticker(self.routing.next_tick, self._tick, self._clock))
        self._replies: dict[int, Reply] = {}
        self._clients: dict[int, ClientRequest] = {}  # of these
        self.readers = BodyReaders(
            config.model, self._text, processes=config.body_readers, inline_bytes_max=INLINE_BYTES_MAX
        )
        self.open_requests = OpenRequests(config.limits, self.readers)
        self.metrics, self.recent = RouterMetrics(self.routing, self._bus, node=config.node), RecentRequests()
        self._ended.subscribe(self.metrics.ended)
        self._ended.subscribe(self.recent)
        self.guard = ClientGuard(config)
        app = application(
            self._health, self.metrics.registry, body_bytes_max=HTTP_BODY_BYTES_MAX, trusts=self.guard.trusts
        )
        paths = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, POST /tokenize and POST /detokenize"
        self.guard.protect(app, self.metrics.answers.count)
        app.middlewares.append(openai_errors(paths, TEXT_PATHS))
        app.add_routes([web.post(path, self._generate) for path in ("/v1/completions", "/v1/chat/completions")])
        app.add_routes([web.post(path, self._translate) for path in TEXT_PATHS])
        app.add_routes([web.get("/v1/models", self._models), web.get("/v1/models/{name:.+}", self._model)])
        app.add_routes([web.get("/version", self._version), *StatusPages(self._fleet_status).routes])
        app.on_response_prepare.append(stamp)
        self._listener = HttpListener(
            app, connections_max=config.limits.rooms_max + HTTP_CONNECTIONS_MAX, allowed_hosts=config.allowed_hosts
        )

    async def open(self) -> str:
        """Dials the workers and listens; returns host:port. Raises ConfigError or WorldError."""
        for endpoint, role in self.roles().items():
            self._bus.dial(endpoint, role)
        self._perform(self.routing.start(self._clock.now()))
        return await self._listener.open(self._config.listen, self.guard.tls)

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list: loses workers that it no longer lists in their role, and dials listed ones again."""
        for endpoint in self._bus.allow(allowed):
            self._receive(endpoint, revoked())
        for endpoint, role in self.roles().items():
            with suppress(ConfigError):  # not on the list
                self._bus.dial(endpoint, role)

    @property
    def reloads(self) -> tuple[Callable[[], None], ...]:
        """What SIGHUP reads again."""
        path = self._config.allow
        own = () if path is None else (lambda: reload(path, self.allow),)
        return (*own, *self.guard.reloads)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Accepts no more requests; waits for unfinished ones until the room deadline or `hurry`."""
        self.routing.drain()
        await self.open_requests.drain(hurry)

    async def close(self) -> None:
        """Fails unfinished requests, sends Goodbye to the workers, and releases everything."""
        self._perform(self.routing.close(self._clock.now()))
        self._perform.ticker.stop()
        await self._listener.close()
        await self.readers.close()
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

    def _report_gone(self, peer: str, gone: Gone | None) -> None:
        self._perform(self.routing.gone(peer, "" if gone is None else gone.text, self._clock.now()))

    def _tick(self) -> None:
        self._perform(self.routing.tick(self._clock.now()))

    def _perform_one(self, effect: RoutingEffect) -> None:
        match effect:
            case Send(peer, message):
                self._bus.send(peer, message)
            case Emit(request, ids, logprobs):
                reply = self._replies[request]
                self._clients[request].emitted(request, len(ids))
                of, now = self.metrics.of(self._clients[request].model), time.monotonic()
                if reply.streaming:
                    for _ in ids:
                        of.inter_token.observe((now - reply.token_s) / len(ids))
                else:
                    reply.first_s = now
                    of.first_token.observe(now - reply.began_s)
                reply.put(ids, logprobs, now)
                of.generated_tokens.inc(len(ids))
            case Finish() | Fail():
                self._replies[effect.request].close(effect)
                self._ended(self._clients[effect.request].ended_room(effect))
            case Retry():
                self._ended(self._clients[effect.request].ended_room(effect))
            case WorkerChanged(peer, ""):
                worker = self.routing.workers.by_peer[peer]
                assert worker.identity is not None
                log.info("%s %s is connected at %s", worker.role, worker.identity.node, peer)
            case WorkerLeft(peer):
                self._bus.hang_up(peer)
                log.info("worker %s was removed: its last room has ended", split_key(peer)[1])
            case WorkerChanged(_, why, orderly):
                log.log(logging.INFO if orderly else logging.WARNING, "%s", why)

    def _health(self) -> Health:
        pool = self.routing.workers
        why_not = pool.why_not(self._bus.trouble)
        workers = [
            {
                "peer": each.peer,
                "role": each.role,
                "node": each.identity.node if each.identity is not None else None,
                "usable": each.usable,
                "model": model_text(each.model) if each.identity is not None else None,
                "why": why_not[each.peer] or None,
            }
            for each in pool.by_peer.values()
        ]
        draining = self.open_requests.draining
        ready = not draining and bool(pool.models())
        return Health(ready, {"draining": draining, "workers": workers})

    def roles(self) -> dict[str, Role]:
        """The workers that are here, by endpoint."""
        return {each.peer: each.role for each in self.routing.workers.by_peer.values()}

    def add_worker(self, role: Role, address: str) -> None:
        """Dials a worker, or keeps one that was to leave. Raises ConfigError and WorldError."""
        self._bus.dial(address, role)
        self._perform(self.routing.add_worker(address, role, self._clock.now()))

    def drain_worker(self, address: str) -> None:
        """Gives the worker no new rooms."""
        self.routing.workers.drain(address)

    def remove_worker(self, address: str) -> None:
        """Gives the worker no new rooms, and closes its connection after the last one."""
        self._perform(self.routing.remove_worker(address))

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each worker."""
        pool = self.routing.workers
        why_not = pool.why_not(self._bus.trouble)
        return [worker_status(each, why_not[peer]) for peer, each in pool.by_peer.items()]

    def _fleet_status(self) -> FleetStatus:
        pool, draining = self.routing.workers, self.open_requests.draining
        models = pool.models()
        return fleet_status(
            self._config,
            self.recent,
            self.workers_status(),
            ready=bool(models) and not draining,
            draining=draining,
            models=list(models),
            requests_open=self.open_requests.count,
            rooms=rooms_by_progress(self.routing.rooms),
            retries=self.routing.retries,
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.Response(body=models(self._served(), self._created), content_type=JSON)

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        served = self._served()
        if name not in served:
            return error_response(404, f"model: {name[:64]!r} is not served", param="model", code="model_not_found")
        return web.json_response(model_object(name, self._created, served[name]))

    def _served(self) -> dict[str, int | None]:
        """The models that are served, with what the workers and the checkpoint say of their length."""
        own = self._text.max_model_len or TOKENS_MAX
        longest = {name: min(own, theirs) for name, theirs in self.routing.workers.models().items()}
        return {name: None if tokens == TOKENS_MAX else tokens for name, tokens in longest.items()}

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _translate(self, http: web.Request) -> web.Response:
        """Answers /tokenize and /detokenize."""
        try:
            answer, _ = await self.open_requests.read(http, ReadText(http.path == "/tokenize", self._served()))
            return web.Response(body=answer.parts[0], content_type=JSON)
        except (BadRequestError, ArenaFullError) as why:
            return refusal(why)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        """Answers /v1/completions and /v1/chat/completions."""
        client = accept(http, self._config)
        try:
            return await self._answer(http, client)
        except web.HTTPException as refused:
            client.answered(refused.status, detail=refused.text or refused.reason)
            raise
        finally:
            self._ended(client.ended())

    async def _answer(self, http: web.Request, client: ClientRequest) -> web.StreamResponse:
        try:
            client.check()
            read, _ = await self.open_requests.read(http, ReadCompletion(http.path == "/v1/chat/completions"))
            made = completion_of(
                read, seed=secrets.randbits(63), text=self._text, served=self._served(), defaults=self._defaults
            )
            completion = self._of_one_model(made).of_request(client.request_id, client.traceparent)
            client.model, client.stream = completion.model or "", completion.stream
            client.prompt_tokens, client.enable_hisparse = completion.prompt_tokens, completion.rooms[0].enable_hisparse
            with self.open_requests.hold(http, completion.prompt_bytes, rooms=len(completion.rooms)):
                return await self._complete(http, client, completion)
        except (BadRequestError, ArenaFullError, KeyLimitError) as why:
            response = refusal(why)
            client.answered(response.status, detail=str(why))
            return response

    async def _complete(self, http: web.Request, client: ClientRequest, completion: Completion) -> web.StreamResponse:
        """Begins all rooms, or none, and answers with them."""
        news, replies = asyncio.Event(), dict[int, Reply]()
        try:
            for room in completion.rooms:
                if replies:
                    await asyncio.sleep(0)  # The prompts of many rooms take their time: others have their turn.
                accepted = self.routing.submit(room, self._clock.now())
                if isinstance(accepted, Refusal):
                    client.answered(accepted.status, accepted.cause, accepted.detail)
                    return _failed(accepted)
                replies[accepted.request] = self._replies[accepted.request] = Reply(news, time.monotonic())
                self._clients[accepted.request] = client
                client.begun(accepted.request, len(room.prompt) // 4)
                self._perform(accepted.effects)
                self.metrics.of(client.model).prompt_tokens.inc(len(room.prompt) // 4)
            answer = GrowingAnswer(completion, replies, news, self._text, self._stop)
            form = self._form(completion, next(iter(replies)))
            response = await (self._stream(http, form, answer) if completion.stream else self._whole(form, answer))
            if (failed := answer.failed) is not None:
                client.answered(failed.status, failed.cause, failed.detail)
            else:
                client.answered(response.status)
            return response
        except (ConnectionError, TimeoutError):
            if http.transport is not None:
                http.transport.abort()
            return web.Response()  # The client does not read it.
        finally:
            for request, reply in replies.items():
                if reply.end is None:
                    self._perform(self.routing.cancel(request, self._clock.now()))
                del self._replies[request], self._clients[request]
            if len(replies) == len(completion.rooms):
                self._draw(list(replies.values()))

    def _form(self, completion: Completion, request: int) -> AnswerForm:
        return AnswerForm(
            chat=completion.chat,
            request=request,
            model=completion.model or "",
            created=int(time.time()),
            text=self._text,
            logprobs=completion.rooms[0].sampling.logprobs,
            usage_follows=completion.include_usage,
        )

    def _stop(self, request: int) -> None:
        """A stop string was met."""
        self._perform(self.routing.stop(request, self._clock.now()))

    def _of_one_model(self, completion: Completion) -> Completion:
        """Fills in the model. Raises BadRequestError for a model that is not served, or a missing one among several."""
        served, model = self.routing.workers.models(), completion.model
        if not served or model in served:
            return completion
        if model is not None:
            raise BadRequestError(
                "model", f"{model!r} is not served: {', '.join(served)}", code="model_not_found", status=404
            )
        if len(served) > 1:
            raise BadRequestError("model", f"missing, one of: {', '.join(served)}")
        (model,) = served
        return replace(completion, rooms=tuple(replace(room, model=model) for room in completion.rooms))

    async def _whole(self, form: AnswerForm, answer: GrowingAnswer) -> web.StreamResponse:
        pieces: list[list[TextPiece]] = [[] for _ in answer.completion.rooms]
        while not answer.ended:
            for news in await answer.next():
                pieces[news.index].append(news.piece)
            if answer.failed is not None:
                return _failed(answer.failed)
        choices = [
            replace(ended, piece=TextPiece.joined(own)) for ended, own in zip(answer.choices, pieces, strict=True)
        ]
        usage, scored = _usage(answer), sum(len(each.piece.tokens) for each in choices)
        if scored <= LOGPROBS_INLINE_MAX:
            return web.Response(body=form.whole(choices, usage), content_type=JSON)
        return web.Response(body=await asyncio.to_thread(form.whole, choices, usage), content_type=JSON)

    async def _stream(self, http: web.Request, form: AnswerForm, answer: GrowingAnswer) -> web.StreamResponse:
        news = await answer.next()
        if answer.failed is not None:
            return _failed(answer.failed)  # Nothing was sent yet, so the status can report the failure.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        while True:
            for each in news:
                chunk = form.chunk(each.index, each.piece, first=each.first, ended=each.ended)
                await self._write_event(response, chunk)
            if answer.ended or answer.failed is not None:
                break
            news = await answer.next()
        if answer.failed is not None:
            failed = answer.failed
            await self._write_event(response, error(failed.status, failed.detail, code=failed.cause.value))
        else:
            if answer.completion.include_usage:
                await self._write_event(response, form.usage_chunk(_usage(answer)))
            await self._write_event(response, b"[DONE]")
        await response.write_eof()
        return response

    async def _write_event(self, response: web.StreamResponse, event: bytes) -> None:
        """Writes one event. A client that does not read delays only its own task, for a bounded time."""
        async with asyncio.timeout(self._deadline_s):
            await response.write(b"data: " + event + b"\n\n")

    @property
    def _deadline_s(self) -> float:
        return self._config.limits.room_deadline_ms / 1e3

    def _draw(self, replies: list[Reply]) -> None:
        """Reports the parts of an answer to the timeline; a failed room has no name."""
        now = time.monotonic()
        for reply in replies:
            if self._spans is not None and isinstance(reply.end, Finish):
                self._spans("request", "to the first token", reply.began_s, reply.first_s, room=reply.end.room)
                self._spans("request", "from the first token on", reply.first_s, now, room=reply.end.room)


def _failed(end: Fail | Refusal) -> web.Response:
    return error_response(end.status, end.detail, code=end.cause.value, retry_ms=end.retry_ms)


def _usage(answer: GrowingAnswer) -> dict[str, object]:
    return usage_of(answer.completion.prompt_tokens, answer.choices, answer.completion.n)

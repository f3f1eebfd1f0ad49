"""The router in front of HTTP servers: it relays OpenAI's API, and hands each prompt's KV from prefill to decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from ....errors import ArenaFullError, Cause
from ....limits import HTTP_BODY_BYTES_MAX, HTTP_CONNECTIONS_MAX, SERVER_ATTEMPTS_MAX
from ...process.http import Health, HttpListener, application
from ...settings.node import REFERENCE
from ...settings.router import RouterConfig
from ...tracing.ended_request import EndedRequests
from ..answers import error
from ..api_keys import KeyLimitError
from ..body_readers import BodyReaders
from ..client_guard import ClientGuard
from ..client_request import REQUEST_ID, TRACEPARENT, ClientRequest
from ..completions import BadRequestError
from ..fleet_status import fleet_status
from ..openai_http import OpenRequests, accept, error_response, openai_errors, refusal, stamp
from ..pool_worker import Departure, NoPair, Role
from ..readings import ReadRelayed
from ..recent_requests import RecentRequests
from ..router_metrics import NO_MODEL
from ..status import FleetStatus, WorkerStatus
from ..status_http import StatusPages
from ..text import BytesText
from .dialects import DIALECTS
from .exchange import Answer, AttemptFailedError, Upstream
from .hand_offs import ANSWER_TAIL_BYTES, ComputedHandOffs, differences, received_of
from .server_metrics import ServerMetrics
from .server_pool import Server, ServerPair, ServerPool, server_status
from .server_request import ServerRequest, request_of

log = logging.getLogger(__name__)

EVENT_END = b"\n\n"
METRICS_S = 5.0  # between two looks at what a decode server counts
INLINE_BYTES_MAX = 32 << 10  # of a body that is read on the loop: some milliseconds whatever its shape
TRACESTATE = "tracestate"
TRACESTATE_LENGTH_MAX = 512  # W3C Trace Context asks for as many characters at least


class ServerRouter:
    """One router process: `open`, then `drain` and `close`."""

    def __init__(self, config: RouterConfig, ended: EndedRequests | None = None) -> None:
        """`ended` gets a record of each request to generate at its end."""
        self._config, self._limits, self._ended = config, config.limits, ended or EndedRequests()
        self.pool = ServerPool(
            config.prefill, config.decode, config.limits, without_prefill=config.without_prefill == "serve"
        )
        self._alone = False  # decode serves without prefill, as was last logged
        self._dialect = DIALECTS[config.engine]
        self.upstream = Upstream(self._dialect, config.limits, self._report)
        self.readers = BodyReaders(
            REFERENCE, BytesText(), processes=config.body_readers, inline_bytes_max=INLINE_BYTES_MAX
        )
        self.open_requests = OpenRequests(config.limits, self.readers)
        self.metrics, self.recent = ServerMetrics(self.pool, self.open_requests, node=config.node), RecentRequests()
        self._ended.subscribe(self.recent)
        self.guard = ClientGuard(config)
        app = application(
            self._health, self.metrics.registry, body_bytes_max=HTTP_BODY_BYTES_MAX, trusts=self.guard.trusts
        )
        posts = ", ".join(f"POST {path}" for path in self._dialect.paths)
        self.guard.protect(app, self.metrics.answers.count)
        app.middlewares.append(openai_errors(f"{posts} and GET /v1/models"))
        app.add_routes([web.post(path, self._generate) for path in self._dialect.paths])
        app.add_routes([web.get("/v1/models", self._models), *StatusPages(self._fleet_status).routes])
        app.on_response_prepare.append(stamp)
        self._listener = HttpListener(
            app, connections_max=config.limits.rooms_max + HTTP_CONNECTIONS_MAX, allowed_hosts=config.allowed_hosts
        )
        self._polls: dict[str, asyncio.Task[None]] = {}  # by the server's URL

    async def open(self) -> str:
        """Asks the servers for their health, from now on again and again, and listens; returns host:port. Raises
        WorldError."""
        for each in self.pool.all:
            self._watch(each)
        return await self._listener.open(self._config.listen, self.guard.tls)

    @property
    def reloads(self) -> tuple[Callable[[], None], ...]:
        """What SIGHUP reads again."""
        return self.guard.reloads

    async def drain(self, hurry: asyncio.Event) -> None:
        """Accepts no more requests; waits for unfinished ones until the room deadline or `hurry`."""
        await self.open_requests.drain(hurry)

    async def close(self) -> None:
        """Fails unfinished requests, and closes all connections."""
        self.open_requests.draining = True
        for each in self._polls.values():
            each.cancel()
        self.upstream.stop()
        await self._listener.close()
        await self.readers.close()
        await self.upstream.close()

    def roles(self) -> dict[str, Role]:
        """The servers that are here, by URL."""
        return {each.url: each.role for each in self.pool.all}

    def add_worker(self, role: Role, address: str) -> None:
        """Takes a server in, or keeps one that was to leave."""
        if (server := self.pool.add(address, role)) is not None:
            self._watch(server)

    def drain_worker(self, address: str) -> None:
        """Gives the server no new requests."""
        self.pool.depart(address, Departure.DRAINS)

    def remove_worker(self, address: str) -> None:
        """Gives the server no new requests, and forgets it after the last one."""
        self.pool.depart(address, Departure.LEAVES)

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each server."""
        return [server_status(each) for each in self.pool.all]

    def _watch(self, server: Server) -> None:
        self._polls[server.url] = asyncio.create_task(self._poll(server))

    async def _poll(self, server: Server) -> None:
        loop, share, asked = asyncio.get_running_loop(), ComputedHandOffs(), float("-inf")
        while not self.pool.left(server):
            self._report(server, await self.upstream.probe(server))
            if server.role == "decode" and not server.why and loop.time() - asked >= METRICS_S:
                asked, server.hand_offs = loop.time(), await self.upstream.hand_offs(server)
                if server.hand_offs is not None and (text := share.take(server.hand_offs)) is not None:
                    log.warning("decode %s: %s", server.url, text)
            if self.pool.overdue(server, loop.time()):
                self.upstream.lose(server)
            await asyncio.sleep(self._limits.ping_ms / 1e3)
        del self._polls[server.url]
        log.info("%s %s was removed: its last request has ended", server.role, server.url)

    def _report(self, server: Server, why: str) -> None:
        if not self.pool.report(server, why, asyncio.get_running_loop().time()):
            return
        if why:
            log.warning("%s %s is left out: %s", server.role, server.url, why)
        else:
            log.info("%s %s is healthy", server.role, server.url)
        if (alone := self.pool.serves_alone) != self._alone:
            self._alone = alone
            if alone:
                log.warning("no prefill server is healthy: decode computes the prompts (without_prefill: serve)")
            else:
                log.info("decode serves without prefill no more")

    def _health(self) -> Health:
        facts = {each.url: (each.identity or {}).get("facts") for each in self.pool.prefill}
        servers = [
            {
                "url": each.url,
                "role": each.role,
                "usable": each.usable,
                "why": each.why_not or None,
                "unfinished": each.unfinished,
                "identity": each.identity,
                "hand_offs": None if each.hand_offs is None else asdict(each.hand_offs),
                "differs": [] if each.hand_offs is None else differences(each.url, each.hand_offs.refusals, facts),
            }
            for each in self.pool.all
        ]
        draining = self.open_requests.draining
        return Health(self.pool.usable and not draining, {
            "draining": draining, "without_prefill": self.pool.serves_alone, "servers": servers,
        })  # fmt: skip

    def _fleet_status(self) -> FleetStatus:
        return fleet_status(
            self._config,
            self.recent,
            self.workers_status(),
            ready=self.pool.usable and not self.open_requests.draining,
            draining=self.open_requests.draining,
            models=[],
            requests_open=self.open_requests.count,
            rooms={},
            retries=self.metrics.retries,
        )

    async def _models(self, http: web.Request) -> web.StreamResponse:
        pair = self.pool.choose((), ())
        if isinstance(pair, NoPair):
            return self._unavailable(pair.detail)
        try:
            wait_ms = self._limits.silence_ms
            answer = await self.upstream.get(pair.decode, "/v1/models", _forwarded(http), wait_ms=wait_ms)
        except AttemptFailedError as failed:
            return self._failed(failed)
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        client = accept(http, self._config)
        try:
            response = await self._accept(http, client)
        except (BadRequestError, ArenaFullError, KeyLimitError) as why:
            response = refusal(why)
            client.answered(response.status, detail=str(why))
        except web.HTTPException as refused:
            client.answered(refused.status, detail=refused.text or refused.reason)
            raise
        except (ConnectionError, TimeoutError):  # the client does not read, or is gone
            if http.transport is not None:
                http.transport.abort()
            response = web.Response()  # nobody reads it
        finally:
            self.metrics.answers.count(client.status, time.monotonic() - client.began_s)
            self._ended(client.ended())
        return response

    async def _accept(self, http: web.Request, client: ClientRequest) -> web.StreamResponse:
        """Reads a request, and answers it. Raises BadRequestError, ArenaFullError, and what writing raises."""
        client.check()
        if self.open_requests.draining:
            text = "the router is draining"
            client.answered(503, Cause.SHUTDOWN, text)
            return error_response(503, text, code=Cause.SHUTDOWN.value, retry_ms=self._retry_ms)
        reading = ReadRelayed(self._config.engine, self._limits.prefix_block_tokens if self.pool.places else 0)
        read, body = await self.open_requests.read(http, reading)
        request = request_of(read, body, path=http.path, request_id=client.request_id)
        with self.open_requests.hold(http, len(body), rooms=request.rooms):
            return await self._answer(http, client, request)

    async def _answer(self, http: web.Request, client: ClientRequest, request: ServerRequest) -> web.StreamResponse:
        """Tries pairs of servers until decode's answer has begun; no pair is tried again that failed."""
        headers = _forwarded(http, client) | {REQUEST_ID: request.request_id}
        tried, avoid = set[ServerPair](), set[Server]()
        failed: AttemptFailedError | None = None
        for attempt in range(SERVER_ATTEMPTS_MAX):
            pair = self.pool.choose(request.keys, avoid)
            if isinstance(pair, NoPair):
                if failed is not None:
                    break
                client.answered(503, Cause.PEER_LOST, pair.detail)
                return self._unavailable(pair.detail)
            if pair in tried:
                break
            client.retried = attempt > 0
            client.prefill, client.decode = "" if pair.prefill is None else pair.prefill.url, pair.decode.url
            self.metrics.retries += attempt > 0
            self.metrics.served_alone += pair.prefill is None
            with pair.decode.serving(request.rooms):
                try:
                    answer = await self.upstream.dispatch(pair, request, headers)
                except AttemptFailedError as why:
                    log.warning("request %s: an attempt failed: %s", request.request_id, why)
                    failed = why
                    avoid.update(why.blamed)
                    if why.blamed:
                        tried.add(pair)
                    if why.again:
                        continue
                    break
                client.stream = answer.streams
                if answer.streams:
                    client.first_s = time.monotonic()
                    self.metrics.answers.first_token.labels(NO_MODEL).observe(client.first_s - client.began_s)
                return await self._relay(http, client, answer)
        assert failed is not None
        client.answered(failed.status, failed.cause, str(failed))
        return self._failed(failed)

    async def _relay(self, http: web.Request, client: ClientRequest, answer: Answer) -> web.StreamResponse:
        """Passes an answer on as it comes. One that is cut off ends with an error event, or with its connection."""
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = answer.length
        piece, end, complete = answer.first, b"", False
        try:
            await response.prepare(http)
            while piece:
                await self._write(response, piece)
                end = (end + piece[-ANSWER_TAIL_BYTES:])[-ANSWER_TAIL_BYTES:]
                piece = await answer.more()
            await response.write_eof()
            complete = answer.status < 400
            client.answered(answer.status)
            if not answer.streams and (received := received_of(end)) is not None:
                client.kv_bytes, client.kv_lost = received.kv_bytes, received.kv_lost
                self.metrics.computed += received.kv_lost
        except AttemptFailedError as failed:
            client.answered(failed.status, failed.cause, f"cut off: {failed}")
            self.metrics.cut_answers += 1
            if answer.streams and (not end or end.endswith(EVENT_END)):
                event = error(failed.status, str(failed), code=failed.cause.value)
                await self._write(response, b"data: " + event + EVENT_END)
                await response.write_eof()
            elif http.transport is not None:
                http.transport.abort()
        finally:
            answer.close(cancel=not complete)
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        """A client that does not read delays only its own request, for a bounded time."""
        async with asyncio.timeout(self._limits.room_deadline_ms / 1e3):
            await response.write(piece)

    @property
    def _retry_ms(self) -> int:
        return self._limits.resend_ms_max

    def _unavailable(self, text: str) -> web.Response:
        return error_response(503, text, code=Cause.PEER_LOST.value, retry_ms=self._retry_ms)

    def _failed(self, failed: AttemptFailedError) -> web.Response:
        if failed.answer is not None:
            return web.Response(status=failed.status, headers=failed.answer.headers, body=failed.answer.body)
        return error_response(failed.status, str(failed), code=failed.cause.value, retry_ms=self._retry_ms)


def _forwarded(http: web.Request, client: ClientRequest | None = None) -> dict[str, str]:
    """The headers that servers get: the client's key, and where the request stands in a trace. A tracestate without a
    valid traceparent means nothing."""
    headers = {"Authorization": http.headers["Authorization"]} if "Authorization" in http.headers else {}
    if client is not None and client.trace is not None:
        headers[TRACEPARENT] = client.traceparent
        state = ",".join(http.headers.getall(TRACESTATE, []))
        if (
            client.continues_trace
            and 0 < len(state) <= TRACESTATE_LENGTH_MAX
            and state.isascii()
            and state.isprintable()
        ):
            headers[TRACESTATE] = state
    return headers

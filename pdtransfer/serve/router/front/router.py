"""The HTTP side of a router, whatever its backend: it reads requests, bounds them, and writes their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import Gauge

from .... import __version__
from ....errors import Cause
from ....limits import HTTP_BODY_BYTES_MAX, HTTP_CONNECTIONS_MAX
from ...process.http import Health, HttpListener, application
from ...settings.router import RouterConfig
from ...tracing.ended_request import EndedRequests
from ..fleet.status import FleetStatus, RouterStatus, TotalsStatus
from .backend import AnswerStream, Backend
from .body_readers import BodyReaders
from .client_guard import ClientGuard
from .client_request import ClientRequest
from .json_bodies import EVENT_END, JSON, AnswerFailedError, WholeAnswer
from .loop_delay import LoopDelay
from .openai_http import OpenRequests, accept, error, openai_errors, stamp, written
from .status import RecentRequests, RouterMetrics, StatusPages


class Router:
    """One router process: `open`, then `drain` and `close`."""

    def __init__(self, config: RouterConfig, backend: Backend, metrics: RouterMetrics, ended: EndedRequests) -> None:
        """`ended` gets a record of each request to generate at its end. Raises ConfigError."""
        self._config, self.backend, self.metrics, self._ended = config, backend, metrics, ended
        self.readers = BodyReaders(
            config.model, backend.text, processes=config.body_readers, inline_bytes_max=backend.inline_bytes_max
        )
        self.open_requests = OpenRequests(config.limits, self.readers)
        Gauge("pdtransfer_requests_open", "Unfinished requests", registry=metrics.registry).set_function(
            lambda: self.open_requests.count
        )
        self.delay = LoopDelay()
        Gauge("pdtransfer_loop_delay_seconds", "How late the loop is", registry=metrics.registry).set_function(
            lambda: self.delay.seconds
        )
        self.recent = RecentRequests()
        ended.subscribe(metrics.ended)
        ended.subscribe(self.recent)
        self.guard, paths = ClientGuard(config, metrics.count), backend.paths
        app = application(self._health, metrics.registry, body_bytes_max=HTTP_BODY_BYTES_MAX, trusts=self.guard.trusts)
        app.middlewares.extend((self.guard.authenticated, openai_errors(paths.text, paths.texts)))
        app.add_routes([web.post(path, self._generate) for path in paths.generate])
        app.add_routes([web.post(path, self._translate) for path in paths.texts])
        app.add_routes([web.get(path, self._look_up) for path in ("/v1/models", *paths.lookups)])
        app.add_routes(StatusPages(self._fleet_status).routes)
        app.on_response_prepare.append(stamp)
        self._listener = HttpListener(
            app, connections_max=config.limits.rooms_max + HTTP_CONNECTIONS_MAX, allowed_hosts=config.allowed_hosts
        )

    async def open(self) -> str:
        """Has the backend reach its workers, and listens; returns host:port. Raises ConfigError or WorldError."""
        await self.backend.open()
        self.delay.start()
        return await self._listener.open(self._config.listen, self.guard.tls)

    @property
    def reloads(self) -> tuple[Callable[[], None], ...]:
        """What SIGHUP reads again."""
        return (*self.backend.reloads, *self.guard.reloads)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Accepts no more requests; waits for unfinished ones until the room deadline or `hurry`."""
        await self.open_requests.drain(hurry)

    async def close(self) -> None:
        """Fails unfinished requests, and releases everything."""
        self.open_requests.draining = True
        self.delay.stop()
        self.backend.stop()
        await self._listener.close()
        await self.readers.close()
        await self.backend.close()

    @property
    def _ready(self) -> bool:
        return not self.open_requests.draining and self.backend.usable()

    def _health(self) -> Health:
        router = {"draining": self.open_requests.draining, "overloaded": self.delay.overloaded}
        return Health(self._ready, {**router, **self.backend.health()})

    def _fleet_status(self) -> FleetStatus:
        config, recent = self._config, self.recent
        workers = self.backend.workers_status()
        router = RouterStatus(
            node=config.node, version=__version__, engine=config.engine if config.relays else "pdtransfer",
            ready=self._ready, draining=self.open_requests.draining, overloaded=self.delay.overloaded,
            uptime_s=recent.uptime_s, requests_open=self.open_requests.count, requests_s=recent.requests_s,
            answers=dict(recent.answers), first_token_ms=recent.first_token_ms(), **self.backend.state(),
        )  # fmt: skip
        failures = list(recent.failures)
        return FleetStatus(
            time=time.time(), router=router, totals=TotalsStatus.of(workers), workers=workers, failures=failures
        )

    async def _look_up(self, http: web.Request) -> web.Response:
        return written(await self.backend.look_up(http.path, http.headers.get("Authorization", "")))

    async def _translate(self, http: web.Request) -> web.Response:
        """Answers what takes no worker: reading the body writes the answer."""
        with self.open_requests.begun():
            answer, _ = await self.open_requests.read(http, self.backend.reading(http.path))
        return web.Response(body=answer.parts[0], content_type=JSON)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        client = accept(http, self._config)
        try:
            with self.open_requests.begun():
                return await self._answer(http, client)
        except AnswerFailedError as failed:
            client.answered(failed.status, failed.cause, str(failed))
            raise
        except web.HTTPException as refused:
            client.answered(refused.status, detail=refused.text or refused.reason)
            raise
        except (ConnectionError, TimeoutError):  # the client does not read, or is gone
            if http.transport is not None:
                http.transport.abort()
            return web.Response()  # nobody reads it
        finally:
            self._ended(client.ended())

    async def _answer(self, http: web.Request, client: ClientRequest) -> web.StreamResponse:
        """Reads a request, and answers it. Raises what `_generate` answers, and what writing raises."""
        if client.refused is not None:
            raise client.refused
        if self.open_requests.draining:
            retry_ms = self._config.limits.resend_ms_max
            raise AnswerFailedError("the router is draining", Cause.SHUTDOWN, retry_ms=retry_ms)
        if self.delay.overloaded:
            text = f"the router is overloaded: its loop is {self.delay.seconds:.1f} s late"
            raise AnswerFailedError(text, Cause.FULL, retry_ms=self._config.limits.resend_ms_max)
        read, body = await self.open_requests.read(http, self.backend.reading(http.path))
        request = self.backend.request(read, body, client)
        with self.open_requests.hold(http, request.kept_bytes, answers=request.answers):
            answer = await self.backend.answer(request, client)
            if isinstance(answer, WholeAnswer):
                client.answered(answer.status)
                return written(answer)
            return await self._relay(http, client, answer)

    async def _relay(self, http: web.Request, client: ClientRequest, answer: AnswerStream) -> web.StreamResponse:
        """Writes an answer as it comes. One that is cut off ends with an error event, or with its connection."""
        response = web.StreamResponse(headers=answer.headers)
        response.content_length = answer.length
        end, complete = EVENT_END, False
        try:
            await response.prepare(http)
            while piece := await answer.more():
                await self._write(response, piece)
                end = (end + piece[-len(EVENT_END) :])[-len(EVENT_END) :]
            await response.write_eof()
            complete = True
            client.answered(response.status)
        except AnswerFailedError as failed:
            client.answered(failed.status, failed.cause, f"cut off: {failed}")
            if answer.events and end == EVENT_END:
                event = error(failed.status, str(failed), code=failed.code)
                await self._write(response, b"data: " + event + EVENT_END)
                await response.write_eof()
            elif http.transport is not None:
                http.transport.abort()
        finally:
            answer.close(complete=complete)
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        """A client that does not read delays only its own request, for a bounded time."""
        async with asyncio.timeout(self._config.limits.room_deadline_ms / 1e3):
            await response.write(piece)

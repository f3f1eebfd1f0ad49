"""The HTTP endpoints of every process: /health, /live and /metrics, and the listener that serves them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ...disconnect import LentSocket
from ...errors import WorldError
from ...limits import HTTP_CONNECTIONS_MAX
from .browsers import BrowserGuard
from .connection_limit import ConnectionLimiter
from .process_metrics import http_counter

if TYPE_CHECKING:
    from .tls import Handshakes, ServerTls

disable_created_metrics()  # they double every counter's series and add nothing

BACKLOG = 128
CLOSE_S = 2.0  # answers may take this long to leave once the listener closes


@dataclass(frozen=True, slots=True)
class Health:
    """What /health reports: if this process works now, and details for people."""

    ready: bool
    detail: dict[str, object]


def application(
    health: Callable[[], Health],
    registry: CollectorRegistry,
    *,
    body_bytes_max: int = 1 << 16,
    trusts: Callable[[web.Request], bool] = lambda _: True,
) -> web.Application:
    """/health returns 503 until ready, with the details for a client that `trusts` accepts. /live returns 200
    while the loop runs. /metrics returns the registry as text, which counts all answers."""

    async def on_health(request: web.Request) -> web.Response:
        now = health()
        body = msgspec.json.encode({"ready": now.ready, **(now.detail if trusts(request) else {})})
        return web.Response(status=200 if now.ready else 503, body=body, content_type="application/json")

    async def on_live(_: web.Request) -> web.Response:
        return web.Response(body=b'{"live":true}', content_type="application/json")

    async def on_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=body_bytes_max, middlewares=[http_counter(registry)])
    app.add_routes([web.get("/health", on_health), web.get("/live", on_live), web.get("/metrics", on_metrics)])
    return app


class _WithoutHeaders(logging.Filter):
    """Shortens records of requests that the library could not parse: their text holds headers, and so perhaps keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "refused an invalid request: %s", (type(error).__name__,)
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        return True


requests_log = logging.getLogger(__name__ + ".requests")
requests_log.addFilter(_WithoutHeaders())


class HttpListener:
    """Serves an application on one host:port. The task of a request is cancelled when its client disconnects."""

    def __init__(
        self, app: web.Application, *, connections_max: int = HTTP_CONNECTIONS_MAX, allowed_hosts: Iterable[str] = ()
    ) -> None:
        """`allowed_hosts` are names of this server, as BrowserGuard takes them."""
        app.middlewares.insert(0, self._through)
        app.middlewares.insert(1, BrowserGuard(allowed_hosts).through)
        # Bodies are never decompressed: a small body must not become a large one.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S, auto_decompress=False,
            logger=requests_log,
        )  # fmt: skip
        self._connections_max = connections_max
        self.doors: ConnectionLimiter | None = None
        self._handshakes: Handshakes | None = None
        self._server: asyncio.Server | None = None

    async def open(self, listen: str, tls: ServerTls | None = None, *, named: str = "listen") -> str:
        """Listens on host:port, which `named` sets (port 0: any free port); returns it as bound. Raises WorldError."""
        host, _, port = listen.rpartition(":")
        await self._runner.setup()
        assert self._runner.server is not None
        self.doors = ConnectionLimiter(self._runner.server, connections_max=self._connections_max)
        if tls is not None:
            from .tls import Handshakes

            self._handshakes = Handshakes(self.doors, tls, handshakes_max=self._connections_max)
        loop, make = asyncio.get_running_loop(), self._handshakes or self.doors
        try:
            self._server = await loop.create_server(make, host.strip("[]"), int(port), backlog=BACKLOG)
        except OSError as error:
            await self._runner.cleanup()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise WorldError(f"{named}: cannot listen on {listen}: {reason}; set another host:port") from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stops accepting connections and closes the open ones."""
        if self._server is not None:
            for listening in self._server.sockets:
                LentSocket(listening.fileno()).shut_down()
            self._server.close()
        if self._handshakes is not None:
            self._handshakes.close()
        await self._runner.cleanup()

    @web.middleware
    async def _through(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.doors is not None
        self.doors.serving(request.transport)
        try:
            return await handler(request)
        finally:
            self.doors.served(request.transport)

"""The router's requests to HTTP servers, and its waits for their answers.

Each request has connections of its own, since closing one is how a server learns that its request is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp

from .....errors import Cause
from .....limits import HTTP_BODY_BYTES_MAX, Limits
from ...fleet.roles import NoPair
from ...front.json_bodies import AnswerFailedError, WholeAnswer
from .dialect import ServerOrder
from .server_pool import NO_LISTENER, Server, ServerIdentity
from .server_request import ServerRequest

log = logging.getLogger(__name__)

# Of one connection (RFC 9110), or set by each HTTP server itself.
_HOP_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date", "server", "x-request-id",
})  # fmt: skip


class AttemptFailedError(AnswerFailedError):
    """No bytes came from decode. `blamed` are the servers to avoid, `answer` is what a server answered; `again` is
    False where no other server would help."""

    def __init__(
        self,
        text: str,
        cause: Cause,
        blamed: tuple[Server, ...],
        *,
        answer: WholeAnswer | None = None,
        again: bool = True,
    ) -> None:
        super().__init__(text, cause, status=0 if answer is None else answer.status, answer=answer)
        self.blamed, self.again = blamed, again


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of an answer that are for the client."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}


class Upstream:
    """The client side of a router: its requests to servers, and the waits for their answers.

    `unreachable` is called with a server that accepts no connection, and the reason.
    """

    def __init__(self, limits: Limits, unreachable: Callable[[Server, str], None]) -> None:
        self.limits, self._unreachable = limits, unreachable
        self._stopped = False
        self._waits: dict[Server, dict[asyncio.Timeout, float]] = {}  # since when
        self.prefills: set[asyncio.Task[ServerIdentity | None]] = set()  # under way, some without their request
        self._orders: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.silence_ms / 1e3),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "pdtransfer"},
        )

    async def close(self) -> None:
        """Closes all connections; what `stop` has not ended fails. Servers are still notified of what was given up."""
        if self._orders:
            await asyncio.wait(self._orders, timeout=self.limits.silence_ms / 1e3)
        await self._session.close()

    async def look(self, server: Server, path: str) -> tuple[bytes | None, str]:
        """Asks a server for a page, without waiting for its health; returns None and the reason where it has none."""
        try:
            answer = await self._get(server, path, {}, self.limits.silence_ms)
        except (aiohttp.ClientError, OSError, AttemptFailedError) as error:
            log.debug("%s: %s", server.url, error)
            return None, _reason(error) or f"{path} has not answered within {self.limits.silence_ms} ms"
        return (answer.body, "") if answer.status == 200 else (None, f"{path} answers {answer.status}")

    async def _get(self, server: Server, path: str, headers: Mapping[str, str], wait_ms: int) -> WholeAnswer:
        async with (
            asyncio.timeout(wait_ms / 1e3),
            self._session.get(server.url + path, headers=headers, allow_redirects=False) as response,
        ):
            return await self.whole(server, response)

    def lose(self, server: Server, lasted_s: float = 0.0) -> None:
        """Ends all waits for a server that have lasted so long."""
        now = asyncio.get_running_loop().time()
        for wait, began in self._waits.get(server, {}).items():
            if now - began >= lasted_s and not wait.expired():
                wait.reschedule(now)

    def stop(self) -> None:
        """Ends all waits, those to come included: the router shuts down."""
        self._stopped = True
        for server in self._waits:
            self.lose(server)

    @asynccontextmanager
    async def waiting(self, server: Server) -> AsyncGenerator[None]:
        """Waits for a server in this scope, until it ends or `lose`. Raises AttemptFailedError for what fails."""
        if self._stopped:
            raise _shutdown()
        waits = self._waits.setdefault(server, {})
        try:
            async with asyncio.timeout(None) as wait:
                waits[wait] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    del waits[wait]
                    if not waits and self._waits.get(server) is waits:
                        del self._waits[server]
        except (aiohttp.ClientError, ConnectionError) as error:
            text = _reason(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError):
                self._unreachable(server, text)
            raise AttemptFailedError(f"{server.name}: {text}", Cause.PEER_LOST, (server,)) from None
        except TimeoutError:
            if self._stopped:
                raise _shutdown() from None
            why, cause = server.why or "no answer in time", Cause.PEER_LOST if server.why else Cause.DEADLINE
            raise AttemptFailedError(f"{server.name}: {why}", cause, (server,)) from None

    async def get(self, server: Server, path: str, headers: Mapping[str, str], *, wait_ms: int) -> WholeAnswer:
        """Asks a server for something small. Raises AttemptFailedError."""
        async with self.waiting(server):
            return await self._get(server, path, headers, wait_ms)

    async def post(self, server: Server, order: ServerOrder, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Posts a body; returns the answer once its head is there."""
        url, headers = server.url + order.path, {**headers, **server.headers, "Content-Type": "application/json"}
        return await self._session.post(url, data=order.body, headers=headers, allow_redirects=False)

    async def whole(
        self, server: Server, response: aiohttp.ClientResponse, bytes_max: int | None = None, *, begin: bytes = b""
    ) -> WholeAnswer:
        """Reads an answer of which `begin` was read to its end. Raises AttemptFailedError for one that is too large."""
        body, bytes_max = bytearray(begin), bytes_max or HTTP_BODY_BYTES_MAX
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > bytes_max:
                text = f"{server.name}: the answer is larger than {bytes_max} bytes"
                raise AttemptFailedError(text, Cause.BREACH, (server,), again=False)
        return WholeAnswer(response.status, end_to_end(response.headers), bytes(body))

    def notify(self, server: Server, order: ServerOrder, request: ServerRequest) -> None:
        """Notifies a server that a request was given up. One that cannot be notified waits for its own deadline."""
        task = asyncio.create_task(self._notify(server, order, request))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _notify(self, server: Server, order: ServerOrder, request: ServerRequest) -> None:
        try:
            async with (
                asyncio.timeout(self.limits.silence_ms / 1e3),
                await self.post(server, order, request.headers) as response,
            ):
                log.info("request %s: %s is notified that it was given up", request.request_id, server.name)
                if response.status != 200:
                    log.warning("request %s: %s answers %d to that", request.request_id, server.name, response.status)
        except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError as well
            text = _reason(error) or "no answer in time"
            log.warning(
                "request %s: %s is not notified that it was given up: %s", request.request_id, server.name, text
            )


def _reason(error: Exception) -> str:
    """What went wrong, without the client library's options of the connection."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
        return NO_LISTENER
    if type(error) is aiohttp.ClientConnectorError and error.os_error.errno:
        return f"cannot connect: {os.strerror(error.os_error.errno)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error)


def _shutdown() -> AttemptFailedError:
    return AttemptFailedError("the router shuts down", Cause.SHUTDOWN, (), again=False)


def no_server(why: NoPair, limits: Limits) -> AnswerFailedError:
    """The failure of what no server can be had for."""
    return AnswerFailedError(why.detail, Cause.PEER_LOST, retry_ms=limits.resend_ms_max)


def refused(blamed: tuple[Server, ...], answer: WholeAnswer) -> AttemptFailedError:
    """The failure that an answer is; the last of those who may be at fault has answered so. Another server may answer
    otherwise where this one failed, or has too much to do."""
    text, again = f"{blamed[-1].name}: answers {answer.status}", answer.status >= 500 or answer.status == 429
    return AttemptFailedError(text, Cause.ENGINE if again else Cause.REFUSED, blamed, answer=answer, again=again)

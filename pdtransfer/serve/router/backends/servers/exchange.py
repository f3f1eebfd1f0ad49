"""One attempt at a request: posted to a prefill and a decode server at once, until decode answers its first bytes.

Each request has connections of its own, since closing one is how a server learns that its request is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from .....errors import Cause, RemoteProtocolError
from .....limits import HTTP_BODY_BYTES_MAX, Limits
from .....schema import parse
from ...fleet.server import HandOffs, Server, ServerIdentity
from ...front.backend import AnswerFailedError, WholeAnswer
from .dialect import Dialect, ServerOrder
from .hand_offs import METRICS_BYTES_MAX, hand_offs_of
from .server_pool import ServerPair
from .server_request import ServerRequest

log = logging.getLogger(__name__)

EVENTS = "text/event-stream"
_EVENT_END = b"\n\n"
ERROR_BYTES_MAX = 65_536  # of an error that a stream may begin with
# Of one connection (RFC 9110), or set by each HTTP server itself.
_HOP_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date", "server", "x-request-id",
})  # fmt: skip


class _Error(Struct):
    code: Annotated[int, Meta(ge=400, le=599)]


class _ErrorEvent(Struct):
    error: _Error


_ERROR = msgspec.json.Decoder(_ErrorEvent)


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
        super().__init__(text, cause, status=None if answer is None else answer.status, answer=answer)
        self.blamed, self.again = blamed, again


def retriable(status: int) -> bool:
    """Whether another server may answer otherwise: this one failed, or has too much to do."""
    return status >= 500 or status == 429


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of an answer that are for the client."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}


class Answer:
    """A server's answer from its first bytes on."""

    def __init__(self, upstream: Upstream, server: Server, response: aiohttp.ClientResponse, first: bytes) -> None:
        self._upstream, self._server, self._response = upstream, server, response
        self.first = first
        self.given_up: Callable[[], None] = lambda: None  # tells both servers
        self.prefill: asyncio.Task[ServerIdentity | None] | None = None  # may still be under way
        self.status, self.headers = response.status, end_to_end(response.headers)
        self.length = response.content_length
        self.events = response.content_type == EVENTS

    async def first_event(self) -> bytes:
        """Waits for the whole first event of a stream, or for as many bytes as no error has; `first` has them."""
        while _EVENT_END not in self.first and len(self.first) < ERROR_BYTES_MAX:
            if not (more := await self._response.content.readany()):
                break
            self.first += more
        return self.first.partition(_EVENT_END)[0]

    async def more(self) -> bytes:
        """Waits for the next bytes, the first ones first; empty at the end. Raises AttemptFailedError."""
        if self.first:
            first, self.first = self.first, b""
            return first
        async with self._upstream.waiting(self._server):
            return await self._response.content.readany()

    def close(self, *, cancel: bool = False) -> None:
        """Closes the connection, which cancels decode's request unless it has ended; with `cancel` prefill's too. If
        decode may not have its KV, both are told."""
        self._response.close()
        if not cancel or self.prefill is None:
            return
        if self.status >= 400 or not self.prefill.done():
            self.given_up()
        self.prefill.cancel()


class Upstream:
    """The client side of a router: its requests to servers, and the waits for their answers.

    `unreachable` is called with a server that accepts no connection, and the reason.
    """

    def __init__(self, dialect: Dialect, limits: Limits, unreachable: Callable[[Server, str], None]) -> None:
        self._dialect, self._limits, self._unreachable = dialect, limits, unreachable
        self._stopped = False
        self._waits: dict[Server, set[asyncio.Timeout]] = {}
        self._prefills: set[asyncio.Task[ServerIdentity | None]] = set()
        self._orders: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.silence_ms / 1e3),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "pdtransfer"},
        )

    async def close(self) -> None:
        """Closes all connections; what `stop` has not ended fails. Servers are still told what was given up."""
        if self._orders:
            await asyncio.wait(self._orders, timeout=self._limits.silence_ms / 1e3)
        await self._session.close()

    async def probe(self, server: Server) -> str:
        """Asks a server for its health; returns the reason why it is not healthy, empty if it is."""
        try:
            async with (
                asyncio.timeout(self._limits.silence_ms / 1e3),
                self._session.get(server.url + "/health", allow_redirects=False) as response,
            ):
                return "" if response.status == 200 else f"/health answers {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            return _reason(error) or f"/health has not answered within {self._limits.silence_ms} ms"

    async def hand_offs(self, server: Server) -> HandOffs | None:
        """Asks a decode server how many prompts it received, and how many it computed itself; None where it does not
        say."""
        if self._dialect.metrics_path is None:
            return None
        try:
            async with (
                asyncio.timeout(self._limits.silence_ms / 1e3),
                self._session.get(server.url + self._dialect.metrics_path, allow_redirects=False) as response,
            ):
                text = bytearray()
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > METRICS_BYTES_MAX:
                        return None
                return hand_offs_of(bytes(text)) if response.status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            log.debug("%s: %s", server.url, error)
            return None

    def lose(self, server: Server) -> None:
        """Ends all waits for a server that has been down for too long."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits.get(server, ()):
            wait.reschedule(now)

    def stop(self) -> None:
        """Ends all waits, those to come included: the router shuts down."""
        self._stopped = True
        for server in self._waits:
            self.lose(server)

    @asynccontextmanager
    async def waiting(self, server: Server) -> AsyncGenerator[None]:
        """Waits for a server in this scope, until it ends or `lose`. Raises AttemptFailedError for what fails."""
        waits = self._waits.setdefault(server, set())
        if self._stopped:
            raise _shutdown()
        try:
            async with asyncio.timeout(None) as wait:
                waits.add(wait)
                try:
                    yield
                finally:
                    waits.discard(wait)
        except (aiohttp.ClientError, ConnectionError) as error:
            text = _reason(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError):
                self._unreachable(server, text)
            raise AttemptFailedError(f"{server.url}: {text}", Cause.PEER_LOST, (server,)) from None
        except TimeoutError:
            if self._stopped:
                raise _shutdown() from None
            why, cause = server.why or "no answer in time", Cause.PEER_LOST if server.why else Cause.DEADLINE
            raise AttemptFailedError(f"{server.url}: {why}", cause, (server,)) from None

    async def get(self, server: Server, path: str, headers: Mapping[str, str], *, wait_ms: int) -> WholeAnswer:
        """Asks a server for something small. Raises AttemptFailedError."""
        async with (
            self.waiting(server),
            asyncio.timeout(wait_ms / 1e3),
            self._session.get(server.url + path, headers=headers, allow_redirects=False) as response,
        ):
            return await self._whole(server, response)

    async def dispatch(self, pair: ServerPair, request: ServerRequest) -> Answer:
        """Posts the request to both servers; returns decode's answer once it has begun, whatever its status below 500.

        Only while prefill's identity is unknown both wait for what tells it, or decode for prefill's answer. Raises
        AttemptFailedError. Then, and when it is cancelled, both connections are closed.
        """
        transfer = secrets.token_bytes(16)
        if pair.prefill is None:
            return await self._decode(pair, request, transfer, None)
        identity = pair.prefill.identity
        orders = [(each, self._dialect.given_up(each.role, request, transfer)) for each in (pair.prefill, pair.decode)]
        if identity is None and self._dialect.info_path is not None:
            identity = await self._learn(pair.prefill, self._dialect.info_path, request)
        prefill = self._start_prefill(pair.prefill, request, transfer, identity)
        decode: asyncio.Task[Answer] | None = None

        def given_up() -> None:
            for (server, order), task in zip(orders, (prefill, decode), strict=True):
                # A server that failed, or refused the request, has nothing of it.
                if order is not None and task is not None and not (task.done() and _failed(task)):
                    self._spawn(self._tell(server, order, request))

        try:
            identity = identity or await prefill
            decode = asyncio.create_task(self._decode(pair, request, transfer, identity))
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not (decode.done() and decode.exception() is None):
                learned = prefill.result()
                if learned is not None and learned != identity:
                    text = f"{pair.prefill.url}: is another process than before"
                    raise AttemptFailedError(text, Cause.PEER_RESTARTED, ())
            answer = await decode
            answer.prefill, answer.given_up = prefill, given_up
        except BaseException:
            given_up()
            prefill.cancel()
            if decode is not None:
                decode.add_done_callback(_close_answer)
                decode.cancel()
            raise
        return answer

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _tell(self, server: Server, order: ServerOrder, request: ServerRequest) -> None:
        """Tells a server that a request was given up. One that cannot be told waits for its own deadline."""
        try:
            async with (
                asyncio.timeout(self._limits.silence_ms / 1e3),
                await self._post(server, order, request.headers) as response,
            ):
                log.info("request %s: %s is told that it was given up", request.request_id, server.url)
                if response.status != 200:
                    log.warning("request %s: %s answers %d to that", request.request_id, server.url, response.status)
        except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError as well
            text = _reason(error) or "no answer in time"
            log.warning("request %s: %s is not told that it was given up: %s", request.request_id, server.url, text)

    async def _learn(self, server: Server, path: str, request: ServerRequest) -> ServerIdentity:
        """Asks a prefill server for its identity, and keeps it. Raises AttemptFailedError."""
        wait_ms = self._limits.room_deadline_ms  # a busy scheduler answers late
        answer = await self.get(server, path, request.headers, wait_ms=wait_ms)
        if answer.status != 200:
            raise _refused((server,), answer)
        server.identity = identity = self._identity(server, answer.body)
        if identity is None:
            raise AttemptFailedError(f"{server.url}: {path} describes no prefill server", Cause.ENGINE, (server,))
        return identity

    def _identity(self, server: Server, answer: bytes) -> ServerIdentity | None:
        try:
            return self._dialect.identity(server.url, answer)
        except RemoteProtocolError as error:
            server.identity = None
            raise AttemptFailedError(f"{server.url}: its answer: {error}", Cause.BREACH, (server,)) from None

    def _start_prefill(
        self, server: Server, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None
    ) -> asyncio.Task[ServerIdentity | None]:
        """Starts a task that may outlive its request: once decode has answered, nobody waits for prefill."""
        order = ServerOrder(request.path, self._dialect.prefill_body(request, transfer, identity))
        task = asyncio.create_task(self._prefill(server, order, request.headers))
        server.unfinished += request.prompts
        self._prefills.add(task)

        def ended(_: object) -> None:
            server.unfinished -= request.prompts
            self._prefills.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.debug("%s", error)

        task.add_done_callback(ended)
        return task

    async def _prefill(self, server: Server, order: ServerOrder, headers: Mapping[str, str]) -> ServerIdentity | None:
        """Posts prefill's part; returns and keeps an identity in the answer. Raises AttemptFailedError."""
        try:
            async with (
                self.waiting(server),
                asyncio.timeout(self._limits.room_deadline_ms / 1e3),
                await self._post(server, order, headers) as response,
            ):
                answer = await self._whole(server, response)
            if answer.status != 200:
                raise _refused((server,), answer)
        except AttemptFailedError as failed:
            if failed.again:  # else it is the request that was wrong, and others need not wait to meet the server again
                server.identity = None
            raise
        identity = None
        if self._dialect.info_path is None:
            identity = self._identity(server, answer.body)
        if identity is not None:
            server.identity = identity
        return identity

    async def _decode(
        self, pair: ServerPair, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None
    ) -> Answer:
        """Posts decode's part; returns its answer from the first bytes on. Raises AttemptFailedError."""
        server = pair.decode
        blamed = (server,) if pair.prefill is None else (pair.prefill, server)
        async with self.waiting(server):
            order = ServerOrder(request.path, self._dialect.decode_body(request, transfer, identity))
            response = await self._post(server, order, request.headers)
            try:
                if retriable(response.status):
                    # Decode may fail for what prefill did or did not write: either may be at fault.
                    raise _refused(blamed, await self._whole(server, response))
                answer = Answer(self, server, response, await response.content.readany())
                if answer.events and (failed := _first_error(await answer.first_event())) is not None:
                    raise _refused(blamed, failed)
            except BaseException:
                response.close()
                raise
        return answer

    async def _post(self, server: Server, order: ServerOrder, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        url, headers = server.url + order.path, {**headers, "Content-Type": "application/json"}
        return await self._session.post(url, data=order.body, headers=headers, allow_redirects=False)

    async def _whole(self, server: Server, response: aiohttp.ClientResponse) -> WholeAnswer:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > HTTP_BODY_BYTES_MAX:
                text = f"{server.url}: the answer is larger than {HTTP_BODY_BYTES_MAX} bytes"
                raise AttemptFailedError(text, Cause.BREACH, (server,), again=False)
        return WholeAnswer(response.status, end_to_end(response.headers), bytes(body))


def _reason(error: Exception) -> str:
    """What went wrong, without the client library's options of the connection."""
    if type(error) is aiohttp.ClientConnectorError and error.os_error.errno:
        return f"cannot connect: {os.strerror(error.os_error.errno)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error)


def _shutdown() -> AttemptFailedError:
    return AttemptFailedError("the router shuts down", Cause.SHUTDOWN, (), again=False)


def _refused(blamed: tuple[Server, ...], answer: WholeAnswer) -> AttemptFailedError:
    text = f"{blamed[-1].url}: answers {answer.status}"
    return AttemptFailedError(text, Cause.ENGINE, blamed, answer=answer, again=retriable(answer.status))


def _first_error(event: bytes) -> WholeAnswer | None:
    """Returns the error that a stream's first event is, as the answer that it would have been."""
    body = event.removeprefix(b"data: ")
    try:
        status = parse(body, _ERROR).error.code
    except RemoteProtocolError:  # it is none
        return None
    return WholeAnswer(status, {"Content-Type": "application/json"}, body)


def _failed(task: asyncio.Task[Any]) -> bool:
    """Of a task that has ended."""
    return not task.cancelled() and task.exception() is not None


def _close_answer(task: asyncio.Task[Answer]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()

"""A request to HTTP servers: attempts one after the other, each at one pair, until one of them has its answer."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from .....errors import Cause, RemoteProtocolError
from .....limits import HTTP_BODY_BYTES_MAX, SERVER_ATTEMPTS_MAX
from .....schema import parse
from ...fleet.roles import NoPair
from ...front.client_request import ClientRequest
from ...front.json_bodies import EVENT_END, WholeAnswer
from .dialect import Dialect, ServerOrder
from .early_token import EARLY_KINDS_MAX, EARLY_WRONG_MAX, EarlyToken, kind_of
from .hand_offs import ANSWER_TAIL_BYTES, has_prompt_figures, received_of, with_prompt_figures
from .server_metrics import ServerMetrics
from .server_pool import Server, ServerIdentity, ServerPair, ServerPool
from .server_request import ServerRequest
from .upstream import AttemptFailedError, Upstream, end_to_end, no_server, refused

log = logging.getLogger(__name__)

EVENTS = "text/event-stream"
HELD_BYTES_MAX = 65_536  # of an answer, which are read before any of them are passed on
HEAD_BYTES_MAX = 16_384  # of a stream that is compared: all events of its first token


class _Error(Struct):
    code: Annotated[int, Meta(ge=400, le=599)]


class _ErrorEvent(Struct):
    error: _Error


_ERROR = msgspec.json.Decoder(_ErrorEvent)
# A text in an answer cannot pass for these: its quotes are escaped. SGLang's /generate has an object for a reason.
_ABORTED = re.compile(rb'"finish_reason":\s*(?:\{\s*"type":\s*)?"abort"')
_ABORTED_LENGTH = 128  # as far as it may lie in what was passed on before
_ROLE = re.compile(rb'"role":\s*"assistant",\s*"content":\s*""')  # of a chat's first event, before any token


@dataclass(slots=True, eq=False)
class Relay:
    """As AnswerStream: a request, and its attempts one after the other. `begin` comes first. A stream that began with
    prefill's first token goes on behind it with decode's, and is tried again as long as decode's has not begun.

    `replace` makes that of one choice, which shares `computed` with those of the others.
    """

    request: ServerRequest
    client: ClientRequest
    pool: ServerPool
    upstream: Upstream
    dialect: Dialect
    metrics: ServerMetrics
    early: bool = False  # prefill may answer before decode, where the dialect has that
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # set when prefill has answered
    choices: int = 1  # of its whole request, which share the bound of what is kept to be joined
    shown: EarlyToken | None = field(default=None, init=False)  # what the client has of an earlier attempt
    length: int | None = field(default=None, init=False)
    events: bool = field(default=False, init=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], init=False)
    count: int = field(default=0, init=False)  # of attempts
    _tried: set[ServerPair] = field(default_factory=set[ServerPair], init=False)
    _avoid: set[Server] = field(default_factory=set[Server], init=False)
    _last: AttemptFailedError | None = field(default=None, init=False)
    _attempt: Attempt | None = field(default=None, init=False)

    async def begin(self) -> None:
        """Tries pairs of servers until an answer has begun; no pair is tried again that failed. Raises
        AnswerFailedError."""
        while self._attempt is None:
            pair = self._pair()
            self.count += 1
            attempt = Attempt(self, pair)
            try:
                await attempt.begin()
            except AttemptFailedError as why:
                self._failed(why, pair)
            else:
                self._attempt = attempt
                if self.shown is None:
                    self._begun(attempt)

    def _begun(self, attempt: Attempt) -> None:
        """The client's answer begins."""
        self.headers, self.length, self.events = attempt.headers, attempt.length, attempt.events
        self.shown = attempt.shown
        client = self.client
        client.stream = attempt.events
        if attempt.events and client.first_s is None:  # no other choice of it has begun
            client.first_s = time.monotonic()
            self.metrics.first_token.observe(client.first_s - client.began_s)

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        while True:
            await self.begin()
            assert self._attempt is not None
            attempt = self._attempt
            try:
                return await attempt.more()
            except AttemptFailedError as why:
                if attempt.begun:
                    raise
                self._attempt = None
                attempt.close(complete=False)
                self._failed(why, attempt.pair)

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close."""
        attempt, self._attempt = self._attempt, None  # which refers to this one: nothing is to wait for the collector
        if attempt is not None:
            attempt.close(complete=complete)

    def _pair(self) -> ServerPair:
        """The next pair. Raises AnswerFailedError where there is no other."""
        pair = self.pool.choose(self.request.keys, self._avoid)
        if isinstance(pair, NoPair):
            raise self._last or no_server(pair, self.upstream.limits)
        if pair in self._tried:
            assert self._last is not None
            raise self._last
        client, metrics = self.client, self.metrics
        client.retried |= self.count > 0
        client.prefill, client.decode = "" if pair.prefill is None else pair.prefill.name, pair.decode.name
        metrics.retries += self.count > 0
        metrics.requests_without_prefill += pair.prefill is None and pair.computed is None
        metrics.requests_kept += pair.computed is not None
        return pair

    def _failed(self, why: AttemptFailedError, pair: ServerPair) -> None:
        """Notes a failure. Raises it where no other attempt may help."""
        if why.cause is not Cause.REFUSED:
            log.warning("request %s: an attempt failed: %s", self.request.request_id, why)
        why.retry_ms, self._last = self.upstream.limits.resend_ms_max, why
        self._avoid.update(why.blamed)
        if why.blamed:
            self._tried.add(pair)
        if not why.again or self.count == SERVER_ATTEMPTS_MAX:
            raise why


class Attempt:
    """As AnswerStream: a request posted to a prefill and a decode server at once, and decode's answer as it comes.
    `begin` comes first. What an answer reports of its KV is noted for the client's request and the metrics."""

    def __init__(self, relay: Relay, pair: ServerPair) -> None:
        self._relay, self._request, self._client = relay, relay.request, relay.client
        self._upstream, self._dialect, self._metrics = relay.upstream, relay.dialect, relay.metrics
        self.pair, self.shown = pair, relay.shown
        self._may_be_early = relay.early and relay.count == 1
        self._transfer = secrets.token_bytes(16)
        self._prefill: asyncio.Task[ServerIdentity | None] | None = None  # may outlive the answer
        self._decode: asyncio.Task[None] | None = None
        self._response: aiohttp.ClientResponse | None = None  # decode's
        self._first = self._tail = b""  # of its answer
        self._early: EarlyToken | None = None  # prefill's answer
        self._compares: tuple[object, bytes] | None = None  # in decode's `begins_alike`: the answer is not shown then
        self._head = b""  # of decode's stream, to be compared
        self._joins = pair.prefill is not None and self._dialect.joins(self._request)
        self._computed = b""  # prefill's answer, where it has a part of the whole one
        self._reported = None if pair.prefill is None else self._dialect.prompt_figures(b"")
        self._behind = b""  # what may be the begin of a figure of the prompt
        self._bytes_max = HTTP_BODY_BYTES_MAX // relay.choices if self._joins else None
        self.headers, self.length, self.events = dict[str, str](), None, False

    async def begin(self) -> None:
        """Posts the request to both servers, until decode's answer has begun, or prefill has answered early.

        Only while prefill's identity is unknown both wait for the answer that has it, or decode waits for prefill's
        answer. Raises AttemptFailedError. Then, and when it is cancelled, both connections are closed.
        """
        self.pair.decode.unfinished += self._request.answers
        try:
            if self.pair.prefill is None:
                await self._decode_alone()
            else:
                await self._post_both(self.pair.prefill)
            if self._response is not None and self._joins:
                await self._join(self._response)
        except BaseException:
            self.close(complete=False)
            raise
        if self._response is None and self._early is not None:
            self.headers, self.events = {"Content-Type": f"{EVENTS}; charset=utf-8"}, True
            self.shown = self._early
            self._metrics.first_tokens_early += 1

    async def _join(self, response: aiohttp.ClientResponse) -> None:
        """Reads both answers to their ends, and makes one of them. Raises AttemptFailedError."""
        prefill, decode = self.pair.prefill, self.pair.decode
        assert prefill is not None
        assert self._prefill is not None
        async with self._upstream.waiting(decode):
            whole = await self._upstream.whole(decode, response, self._bytes_max, begin=self._first)
            answer = self._checked(whole.body)
        await self._prefill
        try:
            self._first = self._dialect.joined(self._computed, answer)
        except RemoteProtocolError as error:
            text = f"{prefill.name}: its answer does not fit that of {decode.name}: {error}"
            raise AttemptFailedError(text, Cause.BREACH, (prefill,)) from None
        self.length = len(self._first)

    @property
    def begun(self) -> bool:
        """True if decode's answer has begun."""
        return self._response is not None

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        if (shown := self._early) is not None and shown is self.shown:
            self._early = None
            return shown.events
        while True:
            piece = await (self._read() if self.shown is None or self.shown.repeated else self._read_behind(self.shown))
            self._tail = (self._tail + piece[-ANSWER_TAIL_BYTES:])[-ANSWER_TAIL_BYTES:]
            if self._compares is not None and len(self._head) < HEAD_BYTES_MAX:
                self._head += piece
            new = await self._corrected(self._behind + piece)
            whole = self._reported is None or not piece or new.endswith(EVENT_END)
            end = len(new) if whole else max(0, len(new) - ANSWER_TAIL_BYTES)
            self._behind, new = new[end:], new[:end]
            if new or not piece:
                return new

    async def _corrected(self, piece: bytes) -> bytes:
        """What decode has counted of the hand-off becomes what prefill tells of the prompt, whose answer is due: decode
        has the KV."""
        if self._reported is None or not has_prompt_figures(piece):
            return piece
        if self._prefill is not None:
            await asyncio.wait((self._prefill,))
        return with_prompt_figures(piece, self._reported)

    async def _read(self) -> bytes:
        """The next bytes of decode's answer, empty at its end. Raises AttemptFailedError."""
        assert self._decode is not None
        await self._decode
        piece, self._first = self._first, b""
        if not piece:
            assert self._response is not None
            try:
                async with self._upstream.waiting(self.pair.decode):
                    piece = self._checked(await _next_bytes(self._response, events=self.events))
            except AttemptFailedError:
                self._metrics.answers_cut += 1
                raise
        return piece

    def _checked(self, piece: bytes) -> bytes:
        """A server that ends, such as vLLM at SIGTERM, aborts what it has under way and answers as if that were all:
        another may do better. Raises AttemptFailedError. What has the client's own name may be its to abort."""
        is_aborted = _ABORTED.search(self._tail[-_ABORTED_LENGTH:] + piece) is not None
        if not is_aborted or self._dialect.named_by_client(self._request):
            return piece
        decode = self.pair.decode
        raise AttemptFailedError(f"{decode.name}: has aborted the request", Cause.PEER_LOST, (decode,))

    async def _read_behind(self, shown: EarlyToken) -> bytes:
        """The next bytes of decode's stream that the client was not shown. Raises AttemptFailedError."""
        new, rest = b"", bytearray()
        try:
            while not shown.repeated:
                piece = await self._read()
                if not piece or not self.events or len(rest) > HELD_BYTES_MAX:
                    raise RemoteProtocolError("stream", "comes without it")
                rest += piece
                while not shown.repeated and (end := rest.find(EVENT_END) + len(EVENT_END)) >= len(EVENT_END):
                    new += shown.behind(bytes(rest[:end]))
                    del rest[:end]
        except RemoteProtocolError as error:
            self._metrics.first_tokens_wrong += 1
            text = f"{self.pair.decode.name}: does not go on behind prefill's first token, which was passed on: {error}"
            log.warning("request %s: %s", self._request.request_id, text)
            raise AttemptFailedError(text, Cause.ENGINE, (), again=False) from None
        return new + bytes(rest) or await self._read()

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close. If decode may not have its KV, both servers are notified."""
        self.pair.decode.unfinished -= self._request.answers
        if not complete:
            if not self.begun or not (self._prefill is None or self._prefill.done()):
                self._give_up()
            if self._prefill is not None:
                self._prefill.cancel()
        if self._response is not None:
            self._response.close()  # which cancels decode's request unless it has ended
        if self._decode is not None:
            self._decode.add_done_callback(forget)
            self._decode.cancel()
        if complete and self._prefill is not None:
            self._prefill.add_done_callback(self._compare)
        if complete and not self.events and (received := received_of(self._tail)) is not None:
            self._client.kv_bytes, self._client.kv_lost = received.kv_bytes, received.kv_lost
            self._metrics.prompts_computed += received.kv_lost

    def _compare(self, _: object) -> None:
        """Both have answered: notes whether later chats of this kind may begin with prefill's first token."""
        if self._compares is None or self._early is None:
            return
        alike = self.pair.decode.begins_alike[self._compares] = self._early.agrees(self._head)
        if not alike:
            assert self.pair.prefill is not None
            log.warning(
                "%s begins a chat otherwise than %s, so none of its kind begins with prefill's first token: "
                "give both servers the same flags, such as --reasoning-parser",
                self.pair.decode.name,
                self.pair.prefill.name,
            )

    def _give_up(self) -> None:
        """Tells the servers that nobody waits any more. One that failed, or refused the request, has nothing of it."""
        for server, task in ((self.pair.prefill, self._prefill), (self.pair.decode, self._decode)):
            if server is None or task is None or (task.done() and not task.cancelled() and task.exception()):
                continue
            order = self._dialect.given_up(server.role, self._request, self._transfer)
            if order is not None:
                self._upstream.notify(server, order, self._request)

    async def _decode_alone(self) -> None:
        """Decode computes the prompt."""
        server, tokens = self.pair.decode, self.pair.computed or 0
        server.computing += tokens
        try:
            self._decode = asyncio.create_task(self._post_decode(None))
            await self._decode
        finally:
            server.computing -= tokens

    async def _post_both(self, server: Server) -> None:
        """`server` is prefill's."""
        identity = server.identity
        if identity is None and self._dialect.info_path is not None:
            identity = await self._learn(server, self._dialect.info_path)
        prefill = self._prefill = self._start_prefill(server, identity)
        identity = identity or await prefill
        decode = self._decode = asyncio.create_task(self._post_decode(identity))
        await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and not (decode.done() and decode.exception() is None):
            learned = prefill.result()
            if learned is not None and learned != identity:
                text = f"{server.name}: is another process than before"
                raise AttemptFailedError(text, Cause.PEER_RESTARTED, ())
            if self._early is not None and self._compares is None and not decode.done():
                return
        await decode

    async def _learn(self, server: Server, path: str) -> ServerIdentity:
        """Asks a prefill server for its identity, and keeps it. Raises AttemptFailedError."""
        wait_ms = self._upstream.limits.room_deadline_ms  # a busy scheduler answers late
        answer = await self._upstream.get(server, path, self._request.headers, wait_ms=wait_ms)
        if answer.status != 200:
            raise refused((server,), answer)
        server.identity = identity = self._identity(server, answer.body)
        if identity is None:
            raise AttemptFailedError(f"{server.name}: {path} describes no prefill server", Cause.ENGINE, (server,))
        return identity

    def _identity(self, server: Server, answer: bytes) -> ServerIdentity | None:
        try:
            return self._dialect.identity(server.url, answer)
        except RemoteProtocolError as error:
            server.identity = None
            raise AttemptFailedError(f"{server.name}: its answer: {error}", Cause.BREACH, (server,)) from None

    def _start_prefill(self, server: Server, identity: ServerIdentity | None) -> asyncio.Task[ServerIdentity | None]:
        """Starts a task that may outlive its request: once decode has answered, nobody waits for prefill."""
        early = identity is not None and self._asks_early(identity)  # a stream does not tell the identity
        body = self._dialect.prefill_body(self._request, self._transfer, identity, early=early)
        task = asyncio.create_task(self._post_prefill(server, body, early))
        prompts, prefills = self._request.prompts, self._upstream.prefills
        server.unfinished += prompts
        prefills.add(task)

        def ended(_: object) -> None:
            server.unfinished -= prompts
            prefills.discard(task)
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                ours = None if isinstance(error, AttemptFailedError) else error
                log.log(logging.DEBUG if ours is None else logging.ERROR, "%s", error, exc_info=ours)
            else:
                self._relay.computed.set()

        task.add_done_callback(ended)
        return task

    def _asks_early(self, identity: ServerIdentity) -> bool:
        """True if prefill is asked for a stream, be it only to be compared."""
        kind, known = kind_of(self._request), self.pair.decode.begins_alike
        may = self._may_be_early and self._metrics.first_tokens_wrong < EARLY_WRONG_MAX
        if not may or identity.get("first_token") is False or not self._dialect.answers_early(self._request):
            return False
        if kind is None:
            return True
        key = identity.get("remote_engine_id"), kind
        if key not in known and len(known) < EARLY_KINDS_MAX:
            self._compares = key
        return self._compares is not None or known.get(key, False)

    async def _post_prefill(self, server: Server, body: bytes, early: bool) -> ServerIdentity | None:
        """Posts prefill's part; returns and keeps an identity in the answer. Raises AttemptFailedError."""
        order, upstream = ServerOrder(self._request.path, body), self._upstream
        try:
            async with (
                upstream.waiting(server),
                asyncio.timeout(upstream.limits.room_deadline_ms / 1e3),
                await upstream.post(server, order, self._request.headers) as response,
            ):
                answer = await upstream.whole(server, response, self._bytes_max)
            if answer.status != 200:
                failed = self._refused(server, (server,), answer)
                if early and not failed.again:  # It may refuse what an early answer needs: the next one is not early.
                    failed.again, failed.blamed = True, ()
                raise failed
        except AttemptFailedError as error:
            late = error.cause is Cause.DEADLINE and self._dialect.prefill_waits
            failed = await self._not_taken(server) if late else error
            if failed.again and server in failed.blamed and failed.cause is not Cause.REFUSED:
                server.identity = None  # else the request was wrong, and others need not wait to meet it again
            raise failed from None
        self._reported = self._dialect.prompt_figures(answer.body)
        if early:
            self._early = EarlyToken.of(answer.body)
            return None
        if self._joins:
            self._computed = answer.body
        identity = None
        if self._dialect.info_path is None:
            identity = self._identity(server, answer.body)
        if identity is not None:
            server.identity = identity
        return identity

    def _refused(self, server: Server, blamed: tuple[Server, ...], answer: WholeAnswer) -> AttemptFailedError:
        """As `refused`. It may be only since the request is longer than this server takes, and others take more."""
        is_short = answer.status == 400 and self._relay.pool.is_shorter(server)
        failed = refused((server,) if is_short else blamed, answer)
        failed.again |= is_short
        return failed

    async def _not_taken(self, prefill: Server) -> AttemptFailedError:
        """The failure where prefill waited for decode to take its KV: decode is asked whether it has the memory."""
        decode, limits = self.pair.decode, self._upstream.limits
        waiting = decode.waiting
        with suppress(AttemptFailedError):
            path, headers = self._dialect.metrics_path, self._request.headers
            answer = await self._upstream.get(decode, path, headers, wait_ms=limits.silence_ms)
            waiting = self._dialect.waiting(answer.body) or waiting
        text = f"{decode.name}: has not taken the KV from {prefill.name} within {limits.room_deadline_ms} ms"
        if waiting is None or not waiting.requests:
            return AttemptFailedError(f"{text}; either may be late", Cause.DEADLINE, (prefill, decode))
        return AttemptFailedError(f"{text}: {waiting}", Cause.DEADLINE, (decode,))

    async def _post_decode(self, identity: ServerIdentity | None) -> None:
        """Posts decode's part, and waits for the first bytes of its answer. Raises AttemptFailedError."""
        server, upstream = self.pair.decode, self._upstream
        blamed = (server,) if self.pair.prefill is None else (self.pair.prefill, server)
        async with upstream.waiting(server):
            body = self._dialect.decode_body(self._request, self._transfer, identity)
            response = await upstream.post(server, ServerOrder(self._request.path, body), self._request.headers)
            try:
                if response.status != 200:
                    # Decode may fail for what prefill did or did not write: either may be at fault.
                    raise self._refused(server, blamed, await upstream.whole(server, response))
                self.events = response.content_type == EVENTS
                first = await _next_bytes(response, events=self.events, roles_max=self._request.answers)
                self._first = self._checked(first)
                if self.events and (failed := _first_error(self._first.partition(EVENT_END)[0])) is not None:
                    raise refused(blamed, failed)
            except BaseException:
                response.close()
                raise
        self._response = response
        self.length = response.content_length if self._reported is None else None
        self.headers = end_to_end(response.headers)
        server.known.answered(self._request.keys)


def forget(task: asyncio.Task[Any]) -> None:
    """Its failure is nobody's any more."""
    if not task.cancelled():
        task.exception()


async def _next_bytes(response: aiohttp.ClientResponse, *, events: bool, roles_max: int = 0) -> bytes:
    """The next bytes of an answer, empty at its end. Of a stream whole events, more than the first `roles_max` which
    are no more than a role. Of another answer the rest. Of neither more than HELD_BYTES_MAX are waited for."""
    piece = b""
    while len(piece) < HELD_BYTES_MAX:
        if not (more := await response.content.readany()):
            break
        piece += more
        if events and piece.endswith(EVENT_END) and piece.count(EVENT_END) > min(len(_ROLE.findall(piece)), roles_max):
            break
    return piece


def _first_error(event: bytes) -> WholeAnswer | None:
    """Returns the error that a stream's first event is, as the answer that it would have been."""
    body = event.removeprefix(b"data: ")
    try:
        status = parse(body, _ERROR).error.code
    except RemoteProtocolError:  # it is none
        return None
    return WholeAnswer(status, {"Content-Type": "application/json"}, body)

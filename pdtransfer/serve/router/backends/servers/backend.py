"""HTTP servers of vLLM or SGLang behind a router: a request is passed on, and its KV goes from prefill to decode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ....settings.router import RouterConfig
from ...fleet.roles import Departure, NoPair, Role
from ...fleet.status import WorkerStatus
from ...front.backend import Paths
from ...front.body_readers import BodyReading
from ...front.client_request import REQUEST_ID, TRACEPARENT, ClientRequest
from ...front.json_bodies import WholeAnswer
from ...front.status import RouterMetrics
from ...front.text import BytesText, TextCodec
from .attempt import Relay
from .choices import Choices
from .dialect import with_longest
from .dialects import DIALECTS, read_for_servers
from .hand_offs import ComputedHandOffs, differences, hand_offs_of
from .server_metrics import ServerMetrics
from .server_pool import NO_LISTENER, Server, ServerPool, Waiting, server_status
from .server_request import ServerRequest
from .upstream import AttemptFailedError, Upstream, no_server

log = logging.getLogger(__name__)

METRICS_S = 5.0  # between two looks at what a decode server counts
TRACESTATE_LENGTH_MAX = 512  # W3C Trace Context asks for as many characters at least


class Servers:
    """As Backend. Each request is posted to a prefill and a decode server; nobody reads prefill's answer."""

    inline_bytes_max = 32 << 10

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._config, self._limits = config, config.limits
        self.text: TextCodec = BytesText()
        self.pool = ServerPool(
            config.prefill,
            config.decode,
            config.limits,
            without_prefill=config.without_prefill == "serve",
            decode_computes=config.engine == "vllm",
        )
        self._alone = False  # decode serves without prefill, as was last logged
        self._dialect = DIALECTS[config.engine]
        self.paths = Paths(generate=tuple(self._dialect.paths))
        self.upstream = Upstream(config.limits, self._report)
        self.metrics = ServerMetrics(metrics, self.pool)
        self._polls: dict[Server, asyncio.Task[None]] = {}
        self.reloads: Collection[Callable[[], None]] = ()

    async def open(self) -> None:
        """Asks the servers for their health, from now on again and again."""
        for server in self.pool.all:
            self._watch(server)

    def stop(self) -> None:
        """Ends all waits for servers, which fails their requests."""
        for poll in self._polls.values():
            poll.cancel()
        self.upstream.stop()

    async def close(self) -> None:
        """Closes all connections."""
        await self.upstream.close()

    # The servers

    def roles(self) -> dict[str, Role]:
        """The servers that are here, by URL."""
        return {server.url: server.role for server in self.pool.all}

    def add_worker(self, role: Role, address: str) -> None:
        """Takes a server in, or keeps one that was to leave."""
        if (server := self.pool.add(address, role)) is not None:
            self._watch(server)

    def depart_worker(self, address: str, departure: Departure) -> None:
        """Gives the server no new requests, and forgets one that leaves after the last one."""
        self.pool.depart(address, departure)

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each server."""
        return [server_status(ranks) for ranks in self.pool.sites]

    def _watch(self, server: Server) -> None:
        self._polls[server] = asyncio.create_task(self._poll(server))

    async def _poll(self, server: Server) -> None:
        loop, share, asked = asyncio.get_running_loop(), ComputedHandOffs(), float("-inf")
        path = self._dialect.ranks_path
        while True:
            try:
                if self.pool.left(server):
                    break
                for rank in [rank for rank in server.ranks if self.pool.overdue(rank, loop.time())]:
                    # A process that listens no more may still bring answers to their end: these are not silent.
                    self.upstream.lose(rank, self._limits.silence_ms / 1e3 if rank.why == NO_LISTENER else 0.0)
                was_down = bool(server.why)
                _, why = await self.upstream.look(server, "/health")
                if path is not None and was_down and not why:  # it may have other ranks than before
                    metrics, _ = await self.upstream.look(server, path)
                    self.pool.resize(server, 1 if metrics is None else self._dialect.ranks(metrics))
                self._report(server, why)
                if was_down and not why and len(self.pool.by_role[server.role]) > 1:
                    for rank in server.ranks:
                        await self._measure(rank, {})
                if server.role == "decode" and not why and loop.time() - asked >= METRICS_S:
                    asked = loop.time()
                    await self._count(server, share)
            except Exception as error:  # it is asked for as long as it is here
                why = f"the router cannot ask for its health: {type(error).__name__}: {error}"
                if why != server.why:
                    log.error("%s %s", server.role, server.url, exc_info=error)
                self._report(server, why)
            await asyncio.sleep(self._limits.ping_ms / 1e3)
        del self._polls[server]
        log.info("%s %s was removed: its last request has ended", server.role, server.url)

    async def _count(self, decode: Server, share: ComputedHandOffs) -> None:
        """Notes what a decode server counts. Too many prompts that it computes itself are logged."""
        metrics, _ = await self.upstream.look(decode, self._dialect.metrics_path)
        decode.hand_offs = None if metrics is None else hand_offs_of(metrics)
        if metrics is not None:
            self._wait(decode, self._dialect.waiting(metrics))
        if decode.hand_offs is not None and (text := share.take(decode.hand_offs)) is not None:
            log.warning("decode %s: %s", decode.url, text)

    def _wait(self, decode: Server, waiting: Waiting | None) -> None:
        """Notes which requests wait for a server's memory. A wait that is seen twice is logged, and its end."""
        before, count = decode.waits_seen, 0 if waiting is None else waiting.requests
        decode.waiting, decode.waits_seen = waiting, before + 1 if count else 0
        if decode.waits_seen == 2:
            log.warning("decode %s: %s", decode.url, waiting)
        elif before > 1 and not count:
            log.info("decode %s: no request waits for its memory any more", decode.url)

    def _report(self, server: Server, why: str) -> None:
        """Notes the health of a server, of all its ranks."""
        ranks, now = server.ranks, asyncio.get_running_loop().time()
        changed = [self.pool.report(rank, why, now) for rank in ranks]
        if not any(changed):
            return
        if why:
            log.warning("%s %s is left out: %s", server.role, server.url, why)
        else:
            several = f", {len(ranks)} data parallel ranks" if len(ranks) > 1 else ""
            log.info("%s %s is healthy%s", server.role, server.url, several)
        if (alone := self.pool.serves_alone) != self._alone:
            self._alone = alone
            if alone:
                log.warning("no prefill server is healthy: decode computes the prompts (without_prefill: serve)")
            else:
                log.info("decode serves without prefill no more")

    def usable(self) -> bool:
        """True if there is a pair of healthy servers, or a decode server that may serve alone."""
        return self.pool.usable

    def health(self) -> dict[str, object]:
        """Each server, what it was asked, and in what its facts differ from others'."""
        facts = {
            server.url: server.identity.get("facts") for server in self.pool.prefill if server.identity is not None
        }
        servers = [
            {
                "url": server.url,
                "role": server.role,
                "rank": server.rank,
                "usable": server.usable,
                "why": server.why_not or None,
                "unfinished": server.unfinished,
                "identity": server.identity,
                "waiting": server.waiting,
                "hand_offs": server.hand_offs,
                "differs": differences(server.url, server.hand_offs, facts),
            }
            for server in self.pool.all
        ]
        return {"without_prefill": self.pool.serves_alone, "servers": servers}

    def state(self) -> dict[str, Any]:
        """As Backend.state: the servers know their models and what they compute."""
        return {"models": [], "rooms": {}, "retries": self.metrics.retries}

    # Requests

    async def look_up(self, path: str, authorization: str) -> WholeAnswer:
        """Asks a decode server. Raises AnswerFailedError."""
        headers = {"Authorization": authorization} if authorization else {}
        decode = self.pool.one_decode()
        if isinstance(decode, NoPair):
            raise no_server(decode, self._limits)
        try:
            answer = await self.upstream.get(decode, path, headers, wait_ms=self._limits.silence_ms)
        except AttemptFailedError as failed:
            failed.retry_ms = self._limits.resend_ms_max
            raise
        unknown = [server for server in self.pool.all if server.usable and server.longest is None]
        await asyncio.gather(*(self._measure(server, headers) for server in unknown))
        return WholeAnswer(answer.status, answer.headers, with_longest(answer.body, self.pool.longest()))

    async def _measure(self, server: Server, headers: dict[str, str]) -> None:
        """Asks a server for the longest request that it takes, for a short while."""
        with suppress(AttemptFailedError):
            path, wait_ms = self._dialect.longest_path, self._limits.slow_ms
            answer = await self.upstream.get(server, path, headers, wait_ms=wait_ms)
            server.longest = self._dialect.longest(answer.body)

    def reading(self, path: str) -> BodyReading[ServerRequest]:
        """How a body is read."""
        block_tokens = self._limits.prefix_block_tokens if self.pool.places else 0
        arguments = {"engine": self._config.engine, "block_tokens": block_tokens, "path": path}
        return BodyReading(read_for_servers, ServerRequest, arguments)

    def request(self, read: ServerRequest, body: bytes, client: ClientRequest) -> ServerRequest:
        """The request that is passed on."""
        read.body, read.path, read.request_id, read.headers = body, client.path, client.request_id, _headers(client)
        read.apart = 1 if self._dialect.apart(read) is None else read.choices
        return read

    async def answer(self, request: ServerRequest, client: ClientRequest) -> Relay | Choices:
        """Tries pairs of servers until an answer has begun."""
        early = self._config.stream_from == "prefill"
        relay = Relay(
            request, client, self.pool, self.upstream, self._dialect, self.metrics, early, choices=request.choices
        )
        of_choice = self._dialect.apart(request)
        answer = relay if of_choice is None else Choices(relay, of_choice)
        await answer.begin()
        return answer


def _headers(client: ClientRequest) -> dict[str, str]:
    """The headers that servers get: the request's name, the client's key, and where it stands in a trace. A tracestate
    without a valid traceparent means nothing."""
    headers = {REQUEST_ID: client.request_id}
    if client.authorization:
        headers["Authorization"] = client.authorization
    if client.trace is not None:
        headers[TRACEPARENT] = client.traceparent
        state = client.tracestate
        is_valid = 0 < len(state) <= TRACESTATE_LENGTH_MAX and state.isascii() and state.isprintable()
        if client.client_trace is not None and is_valid:
            headers["tracestate"] = state
    return headers

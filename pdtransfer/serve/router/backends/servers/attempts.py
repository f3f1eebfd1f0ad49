"""A request's attempts, one after the other, until one of them has its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from .....limits import SERVER_ATTEMPTS_MAX
from ...front.backend import AnswerFailedError
from ...front.client_request import ClientRequest
from .early_token import EarlyToken
from .exchange import Exchange
from .server_metrics import ServerMetrics
from .server_pool import Server, ServerPair
from .server_request import ServerRequest
from .upstream import AttemptFailedError

log = logging.getLogger(__name__)


class Attempts:
    """As AnswerStream. `begin` comes first. A stream that began with prefill's first token goes on behind it with
    decode's, and is tried again as long as decode's has not begun."""

    def __init__(
        self,
        request: ServerRequest,
        client: ClientRequest,
        metrics: ServerMetrics,
        *,
        choose: Callable[[set[Server]], ServerPair],
        exchange: Callable[[ServerPair, EarlyToken | None, bool], Exchange],
        retry_ms: int,
    ) -> None:
        """`choose` gets the servers to avoid; `exchange` what the client was shown, and whether prefill may answer
        early. `retry_ms` is when the client of a failed request may ask again."""
        self._request, self._client, self._metrics = request, client, metrics
        self._choose, self._new, self._retry_ms = choose, exchange, retry_ms
        self._count = 0
        self._tried, self._avoid = set[ServerPair](), set[Server]()
        self._last: AttemptFailedError | None = None
        self._exchange: Exchange | None = None
        self._shown: EarlyToken | None = None
        self.status, self.length, self.events = 0, None, False
        self.headers: Mapping[str, str] = {}

    async def begin(self) -> None:
        """Tries pairs of servers until an answer has begun; no pair is tried again that failed. Raises
        AnswerFailedError."""
        while self._exchange is None:
            pair = self._pair()
            self._count += 1
            exchange = self._new(pair, self._shown, self._count == 1)
            try:
                await exchange.begin()
            except AttemptFailedError as why:
                self._failed(why, pair)
            else:
                self._exchange = exchange
                if self._shown is None:
                    self._begun(exchange)

    def _begun(self, exchange: Exchange) -> None:
        """The client's answer begins."""
        self.status, self.length, self.events = exchange.status, exchange.length, exchange.events
        self.headers, self._shown = exchange.headers, exchange.shown
        self._client.stream = exchange.events
        client = self._client
        if exchange.events and client.first_s is None:  # no other choice of it has begun
            client.first_s = time.monotonic()
            self._metrics.first_token.observe(client.first_s - client.began_s)

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        while True:
            await self.begin()
            assert self._exchange is not None
            exchange = self._exchange
            try:
                return await exchange.more()
            except AttemptFailedError as why:
                if exchange.begun:
                    raise
                self._exchange = None
                exchange.close(complete=False)
                self._failed(why, exchange.pair)

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close."""
        if self._exchange is not None:
            self._exchange.close(complete=complete)

    def _pair(self) -> ServerPair:
        """The next pair. Raises AnswerFailedError where there is no other."""
        try:
            pair = self._choose(self._avoid)
        except AnswerFailedError:
            if self._last is not None:
                raise self._last from None
            raise
        if pair in self._tried:
            assert self._last is not None
            raise self._last
        client, metrics = self._client, self._metrics
        client.retried |= self._count > 0
        client.prefill, client.decode = "" if pair.prefill is None else pair.prefill.name, pair.decode.name
        metrics.retries += self._count > 0
        metrics.served_alone += pair.prefill is None and pair.computed is None
        metrics.kept += pair.computed is not None
        return pair

    def _failed(self, why: AttemptFailedError, pair: ServerPair) -> None:
        """Notes a failure. Raises it where no other attempt may help."""
        log.warning("request %s: an attempt failed: %s", self._request.request_id, why)
        why.retry_ms, self._last = self._retry_ms, why
        self._avoid.update(why.blamed)
        if why.blamed:
            self._tried.add(pair)
        if not why.again or self._count == SERVER_ATTEMPTS_MAX:
            raise why

"""What stands between a router and its HTTP clients: API keys and TLS, both read again on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from ....bus.sockets import LogThrottle
from ....errors import ConfigError
from ...process.signals import read_again
from ...settings.router import RouterConfig
from .api_keys import ApiKeys
from .json_bodies import RefusedRequestError
from .openai_http import API_KEY_USE, error_response, failure

log = logging.getLogger(__name__)

# What probes and Prometheus ask for, without a key; and the status page, which has no data of its own.
PUBLIC = frozenset({"/", "/health", "/live", "/metrics"})
REFUSED_LOG_MS = 1_000  # between two log lines about unknown API keys


class ClientGuard:
    """The keys and the certificate of one router; `tls` is None where it serves HTTP."""

    def __init__(self, config: RouterConfig, count: Callable[[int], None]) -> None:
        """Reads the files that the config names. Raises ConfigError. `count` gets the status of each request that is
        refused here."""
        self.tls = self.keys = None
        self._count, self._throttle = count, LogThrottle(REFUSED_LOG_MS)
        reloads: list[Callable[[], None]] = []
        if config.tls_cert is not None and config.tls_key is not None:
            from ...process.tls import ServerTls

            self.tls = ServerTls(config.tls_cert, config.tls_key)
            reloads.append(partial(read_again, "the certificate", self.tls.read))
        if (path := config.api_keys) is not None:
            self.keys = ApiKeys()
            try:
                self.keys.read(path)
            except ConfigError as error:
                raise ConfigError(f"api_keys: {error}") from None
            reloads.append(partial(read_again, "the API keys", partial(self.keys.read, path)))
        self.reloads = tuple(reloads)

    def trusts(self, request: web.Request) -> bool:
        """True if a client may see the names of workers and hosts: it has a key, or there are none."""
        return self.keys is None or self.keys.find(request.headers.get("Authorization")) is not None

    @web.middleware
    async def authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets no request without a known API key through, where there are keys, but those for PUBLIC."""
        if self.keys is None or request.path in PUBLIC:
            return await handler(request)
        now, header = asyncio.get_running_loop().time(), request.headers.get("Authorization")
        key = self.keys.find(header)
        if key is None:
            if (suppressed := self._throttle.due(now)) is not None:
                missing = "no API key" if header is None else "no known API key"
                log.warning("%s has %s, %d other refusals not logged", request.remote, missing, suppressed)
            self._count(401)
            text = "no API key: send Authorization: Bearer KEY" if header is None else "unknown API key"
            refused = error_response(401, text, code="invalid_api_key")
            refused.headers["WWW-Authenticate"] = 'Bearer, Basic realm="pdtransfer", charset="UTF-8"'
            return refused
        try:
            with key.use(now) as use:
                request[API_KEY_USE] = use
                return await handler(request)
        except RefusedRequestError as why:
            self._count(why.status)
            return failure(why)

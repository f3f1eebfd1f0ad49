"""What stands between a router and its HTTP clients: API keys and TLS, both read again on SIGHUP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from ...errors import ConfigError
from ..process.signals import read_again
from ..settings.router import RouterConfig
from .api_keys import ApiKeys
from .openai_http import authenticated


class ClientGuard:
    """The keys and the certificate of one router; `tls` is None where it serves HTTP."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the files that the config names. Raises ConfigError."""
        self.tls = self.keys = None
        reloads: list[Callable[[], None]] = []
        if config.tls_cert is not None and config.tls_key is not None:
            from ..process.tls import ServerTls

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
        """Whether a client may see the names of workers and hosts: it has a key, or there are none."""
        return self.keys is None or self.keys.knows(request.headers.get("Authorization"))

    def protect(self, app: web.Application, count: Callable[[int], None]) -> None:
        """Lets only clients with a key through to the application, where there are keys."""
        if self.keys is not None:
            app.middlewares.append(authenticated(self.keys, count))

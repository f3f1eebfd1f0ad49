"""TLS of an HTTP listener: a certificate and its key, which may be replaced while the listener serves. Connections
whose handshake is under way are bounded."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from ...bus.keys import read_guarded
from ...errors import ConfigError

HANDSHAKE_S = 10.0  # a connection whose handshake takes longer is closed


class ServerTls:
    """The TLS context of a listener; connections that begin after `read` get what it has read."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError as `read`."""
        self._cert, self._key = cert, key
        self._latest = self._load()
        self.context = _context()
        self.context.sni_callback = self._hand_over

    def read(self) -> None:
        """Reads both files again. Raises ConfigError where they do not belong together, and changes nothing then."""
        self._latest = self._load()

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """A connection begins, with a name or without. A context may keep an earlier certificate: one by key type."""
        connection.context = self._latest

    def _load(self) -> ssl.SSLContext:
        context = _context()
        try:
            read_guarded(self._key, forbidden=0o007, advice=f"others may read or change it: chmod o-rwx {self._key}")
        except ConfigError as error:
            raise ConfigError(f"tls_key: {error}") from None
        try:
            # An encrypted key would ask for its password on the terminal: this one is wrong.
            context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            text = (error.reason or "no certificate with its key, in PEM").lower().replace("_", " ")
            raise ConfigError(f"tls_cert = '{self._cert}', tls_key = '{self._key}': {text}") from None
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"tls_cert = '{self._cert}': {text}") from None
        return context


class Handshakes:
    """Makes the protocol of each connection after its handshake. An event loop's own TLS counts no connection before:
    here each new one beyond `handshakes_max` closes the oldest."""

    def __init__(self, make: Callable[[], asyncio.Protocol], tls: ServerTls, *, handshakes_max: int) -> None:
        self._make, self._tls, self._handshakes_max = make, tls, handshakes_max
        self._loop = asyncio.get_running_loop()
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        """Returns the protocol of a connection that was accepted."""
        return _Accepted(self._begin)

    def close(self) -> None:
        """Closes what has not finished its handshake."""
        while self._open:
            self._give_up()

    def _give_up(self) -> None:
        """Ends the oldest handshake: its next read is the end of the stream."""
        oldest = next(iter(self._open))
        del self._open[oldest]
        with suppress(OSError):  # the client was faster
            oldest.shutdown(socket.SHUT_RDWR)

    def _begin(self, transport: asyncio.BaseTransport) -> None:
        while len(self._open) >= self._handshakes_max:
            self._give_up()
        # Another transport takes the socket over, of which nothing was read.
        taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        cast("asyncio.Transport", transport).abort()
        self._open[taken] = None
        task = self._loop.create_task(self._shake_hands(taken))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, taken: socket.socket) -> None:
        with suppress(OSError):  # no TLS, none that fits, or none in time: the client's doing
            await self._loop.connect_accepted_socket(
                self._make, taken, ssl=self._tls.context, ssl_handshake_timeout=HANDSHAKE_S
            )
        self._open.pop(taken, None)


class _Accepted(asyncio.Protocol):
    def __init__(self, on_connected: Callable[[asyncio.BaseTransport], None]) -> None:
        self._on_connected = on_connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_connected(transport)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context

"""Bounds the HTTP connections of one listener, and how long each may stay open without a request.

aiohttp bounds a request's line, headers and body. It bounds neither the number of connections nor the time until the
first request. At the bound, the connection that has waited longest without a request is closed first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from ...disconnect import LentSocket

WAIT_S = 20.0  # a connection without a complete request for this long is closed
UNREAD_WAITS_MAX = 3  # this many times as long where the client is still to read an answer


class ConnectionLimiter:
    """All connections of one listener. `serving` and `served` report which of them have a request under way."""

    def __init__(self, make: Callable[[], asyncio.Protocol], *, connections_max: int, wait_s: float = WAIT_S) -> None:
        """`make` builds the protocol of one connection."""
        self._make, self._connections_max, self._wait_s = make, connections_max, wait_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}  # oldest first
        self._serving: set[asyncio.BaseTransport] = set()
        self.refused = 0  # connections closed because the limit was reached

    def __call__(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        return _LimitedConnection(self, self._make())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._serving)

    def came(self, transport: asyncio.BaseTransport) -> bool:
        """Registers a new connection; returns False where no idle connection can be closed to make room."""
        if len(self) >= self._connections_max:
            self.refused += 1
            if not self._waiting:
                return False
            self._end(next(iter(self._waiting)))
        self._wait(transport)
        return True

    def serving(self, transport: asyncio.BaseTransport | None) -> None:
        """A request line and its headers have arrived; the body has a timeout of its own."""
        timer = self._waiting.pop(transport, None) if transport is not None else None
        if transport is not None and timer is not None:
            timer.cancel()
            self._serving.add(transport)

    def served(self, transport: asyncio.BaseTransport | None) -> None:
        """The request was answered."""
        if transport in self._serving:
            self._serving.remove(transport)
            self._wait(transport)

    def left(self, transport: asyncio.BaseTransport) -> None:
        """The connection is closed."""
        self._serving.discard(transport)
        timer = self._waiting.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _wait(self, transport: asyncio.BaseTransport, waits: int = 1) -> None:
        self._waiting[transport] = self._loop.call_later(self._wait_s, self._late, transport, waits)

    def _late(self, transport: asyncio.BaseTransport, waits: int) -> None:
        if waits < UNREAD_WAITS_MAX and cast("asyncio.Transport", transport).get_write_buffer_size():
            self._wait(transport, waits + 1)
        else:
            self._end(transport)

    def _end(self, transport: asyncio.BaseTransport) -> None:
        """Aborts the connection: a close would wait for a client that does not read. uvloop's transports are of no
        class of asyncio's."""
        self.left(transport)
        cast("asyncio.Transport", transport).abort()


class _LimitedConnection(asyncio.Protocol):
    """One connection; forwards every call to the wrapped protocol."""

    def __init__(self, doors: ConnectionLimiter, behind: asyncio.Protocol) -> None:
        self._doors, self._behind = doors, behind
        self._transport: asyncio.BaseTransport | None = None
        self._socket: LentSocket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = LentSocket(transport.get_extra_info("socket").fileno())
        if self._doors.came(transport):
            self._transport = transport
            self._behind.connection_made(transport)
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Over TLS the socket may be closed by now: its client has read the end that TLS has itself."""
        if self._socket is not None:
            self._socket.shut_down()
        if self._transport is not None:
            self._doors.left(self._transport)
            self._behind.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._behind.data_received(data)

    def eof_received(self) -> bool | None:
        return self._behind.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._behind.resume_writing()

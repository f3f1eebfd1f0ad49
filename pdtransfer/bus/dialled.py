"""One endpoint that this node dials, and the socket that keeps a connection to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from ..keys import Address, Endpoint, KeyPair
from .limits import BusLimits
from .sockets import NOBLOCK, Drain, Frames, open_socket, resolve

log = logging.getLogger(__name__)


class Dialled:
    """A DEALER towards one listener; `take` gets each first frame of it.

    Nothing is queued while there is no connection, so that nothing stale is delivered later, and `hello`, once set, is
    the first message of every connection. ZMQ itself reconnects, except where a handshake was refused or the name now
    means another address: so an endpoint that stays unreachable is resolved and dialled afresh.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[Dialled, zmq.Frame], None],
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        keys: KeyPair | None,
        limits: BusLimits,
    ) -> None:
        endpoint = Endpoint.parse(name)
        self.name, self._address, self._server_key = name, Address.parse(endpoint.address), endpoint.server_key
        self._take, self._context, self._loop, self._keys, self._limits = take, context, loop, keys, limits
        self.hello: bytes | None = None
        self.connected = False
        self.muted_until = float("-inf")
        self._socket: zmq.Socket[bytes] | None = None
        self._drain: Drain | None = None
        self._attempt = 0
        self._redial_ms = limits.redial_ms
        self._timer: asyncio.TimerHandle | None = None
        self._opening = loop.create_task(self._open())

    def send(self, frame: bytes) -> bool:
        """Whether ZMQ took it; False without a connection or with a full queue."""
        if not self.connected or self._socket is None or self._drain is None:
            return False
        self._drain.check()
        try:
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Hangs up; what was sent before has the limits' linger_ms to leave."""
        self._opening.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._drop(self._limits.linger_ms)

    async def _open(self) -> None:
        self._timer = self._loop.call_later(self._redial_ms / 1e3, self._redial)
        try:
            hosts = await resolve(self._loop, self._address.host)
            socket = self._connect(hosts[self._attempt % len(hosts)])
        except (OSError, zmq.ZMQError) as error:
            log.warning("%s: %s", self.name, error)
            return
        self._socket = socket
        frames = Frames(socket, lambda _, frame: self._take(self, frame), routed=False)
        self._drain = Drain(self._loop, socket, frames, self._limits, self._writable)

    def _connect(self, host: str) -> zmq.Socket[bytes]:
        socket = open_socket(self._context, zmq.DEALER, self._limits)
        try:
            socket.set(zmq.IMMEDIATE, 1)
            socket.set(zmq.IPV6, int(":" in host))
            if self._keys is not None and self._server_key is not None:
                socket.set(zmq.CURVE_SERVERKEY, self._server_key.encode())
                socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
                socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
            socket.connect(self._address.at(host, self._address.port_first))
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _writable(self, writable: bool) -> None:
        self.connected = writable
        if self._timer is not None:
            self._timer.cancel()
        if writable:
            self._redial_ms = self._limits.redial_ms
            if self.hello is not None:
                self.send(self.hello)
        else:
            self._timer = self._loop.call_later(self._redial_ms / 1e3, self._redial)

    def _redial(self) -> None:
        if self._redial_ms < self._limits.redial_ms_max:
            log.warning("%s: no connection; is it up, is its key the one given, does it allow ours?", self.name)
        self._attempt += 1
        self._redial_ms = min(2 * self._redial_ms, self._limits.redial_ms_max)
        self._opening.cancel()
        self._drop(0)
        self._opening = self._loop.create_task(self._open())

    def _drop(self, linger_ms: int) -> None:
        self.connected = False
        if self._drain is not None and self._socket is not None:
            self._drain.stop()
            self._socket.close(linger=linger_ms)
        self._drain = self._socket = None

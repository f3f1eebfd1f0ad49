"""One endpoint that this node dials, and the sockets that keep a connection to it.

ZMQ reconnects by itself, except where the handshake was refused or the name now means another address: so an endpoint
that stays unreachable is resolved and dialled afresh. ZMQ's IMMEDIATE would say whether there is a connection, but it
drops what was received and not yet read when the connection ends, last words above all: so the socket is monitored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import parse_monitor_message

from .keys import Address, Endpoint, KeyPair
from .limits import BusLimits
from .sockets import NOBLOCK, Drain, Frames, open_socket, resolve
from .wires import Wire

SOCKETS = 3  # that one endpoint takes: a DEALER and both ends of its monitor

_TROUBLE = {
    int(zmq.EVENT_CLOSED): "nobody listens there",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it hung up on our handshake; is its key the one given?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak as we do; has one side keys, the other none?",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it refused our key; is it on its allow-list?",
}
_UP, _DOWN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_MADE = int(zmq.EVENT_CONNECTED)  # before the handshake

_monitors = itertools.count()
log = logging.getLogger(__name__)


class Dialled:
    """Keeps a connection to one listener; `take` gets the first frame of each message.

    Nothing is sent without a connection, so that nothing stale is delivered later; `hello`, once set, opens each one.
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
        self.name, self._address, self.server_key = name, Address.parse(endpoint.address), endpoint.server_key
        self._take, self._context, self._loop, self._keys, self._limits = take, context, loop, keys, limits
        self.hello: bytes | None = None
        self.connected = False
        self.muted_until = float("-inf")
        self._line: _Line | None = None
        self._wire: Wire | None = None
        self._trouble = "no answer"
        self._attempt, self._reached = 0, False
        self._redial_ms = limits.redial_ms
        self._timer: asyncio.TimerHandle | None = None
        self._dialling = loop.create_task(self._dial())

    @property
    def hopeless(self) -> bool:
        """Whether it was tried and has never been reached."""
        return self._attempt > 0 and not self._reached

    @property
    def swamped(self) -> bool:
        """Whether too much waits to be read."""
        return self._wire is not None and self._wire.swamped(self._limits)

    def redial(self) -> None:
        """Hangs up, and dials again after a while."""
        self._trouble = "it was hung up on"
        self._hang_up(linger_ms=0)
        self._set_timer(self._redial_ms)

    def send(self, frame: bytes) -> bool:
        """Whether ZMQ took it; False without a connection or with a full queue."""
        return self.connected and self._line is not None and self._line.send(frame)

    def close(self) -> None:
        """Hangs up; what was sent before has the limits' linger_ms to leave."""
        self._dialling.cancel()
        self._set_timer(None)
        self._hang_up(self._limits.linger_ms)

    async def _dial(self) -> None:
        self._set_timer(self._redial_ms)
        try:
            hosts = await resolve(self._loop, self._address.host)
            self._line = _Line(
                self._dealer(),
                self._address.at(hosts[self._attempt % len(hosts)], self._address.port_first),
                context=self._context,
                loop=self._loop,
                limits=self._limits,
                heard=self._heard,
                spare=self._count,
                noticed=self._noticed,
            )
        except (OSError, zmq.ZMQError) as error:
            self._trouble = str(error)

    def _heard(self, route: bytes, frame: zmq.Frame) -> None:
        self._count(route, len(frame))
        self._take(self, frame)

    def _count(self, _: bytes, byte_count: int) -> None:
        if self._wire is not None:
            self._wire.took(byte_count)

    def _dealer(self) -> zmq.Socket[bytes]:
        dealer = open_socket(self._context, zmq.DEALER, self._limits)
        if self._keys is not None and self.server_key is not None:
            dealer.set(zmq.CURVE_SERVERKEY, self.server_key.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        return dealer

    def _redial(self) -> None:
        if self._redial_ms < self._limits.redial_ms_max:
            log.warning("no connection to %s: %s", self.name, self._trouble)
        self._attempt += 1
        self._redial_ms = min(2 * self._redial_ms, self._limits.redial_ms_max)
        self._dialling.cancel()
        self._hang_up(linger_ms=0)
        self._dialling = self._loop.create_task(self._dial())

    def _set_timer(self, wait_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_ms is None else self._loop.call_later(wait_ms / 1e3, self._redial)

    def _hang_up(self, linger_ms: int) -> None:
        self.connected = False
        if self._line is not None:
            self._line.close(linger_ms)
        self._line = None

    def _noticed(self, event: int, value: int) -> None:
        if event == _MADE:
            self._wire = Wire.of(value, curve=self._keys is not None)
        elif event == _UP:
            self.connected = self._reached = True
            self._redial_ms, self._trouble = self._limits.redial_ms, "the connection was lost"
            self._set_timer(None)
            if self.hello is not None:
                self.send(self.hello)
        elif event == _DOWN and self.connected:
            self.connected = False
            self._set_timer(self._redial_ms)
        else:
            self._trouble = _TROUBLE.get(event, self._trouble)


class _Line:
    """The sockets of one attempt; `noticed` hears the monitor's events."""

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        address: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        limits: BusLimits,
        heard: Callable[[bytes, zmq.Frame], None],
        spare: Callable[[bytes, int], None],
        noticed: Callable[[int, int], None],
    ) -> None:
        with ExitStack() as undo:
            undo.callback(dealer.close, linger=0)
            dealer.set(zmq.IPV6, int("[" in address))
            self._dealer, self._monitor, self._noticed = dealer, context.socket(zmq.PAIR), noticed
            undo.callback(self._monitor.close, linger=0)
            where = f"inproc://dialled-{next(_monitors)}"
            dealer.monitor(where, sum(_TROUBLE) + _MADE + _UP + _DOWN)
            self._monitor.connect(where)
            dealer.connect(address)
            undo.pop_all()
        self._drain = Drain(loop, dealer, Frames(dealer, heard, spare, routed=False), limits)
        self._monitor_drain = Drain(loop, self._monitor, self._take_event, limits)

    def send(self, frame: bytes) -> bool:
        self._drain.check()
        try:
            self._dealer.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        self._monitor_drain.stop()
        self._drain.stop()
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=linger_ms)

    def _take_event(self) -> int:
        event = parse_monitor_message(self._monitor.recv_multipart(NOBLOCK))
        self._noticed(int(event["event"]), int(event["value"]))
        return 0

"""One dialled endpoint, and the sockets that keep a connection to it.

ZMQ reconnects by itself, except after a refused handshake or a change of the name's address. So an endpoint that stays
unreachable is resolved and dialled again. The socket is monitored to learn whether it is connected. ZMQ's IMMEDIATE
would do, but it drops unread messages when the connection ends.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import resource
from collections.abc import Callable
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..handoff.timers import backoff_ms
from .gone import UNACKNOWLEDGED, Gone
from .keys import Address, Endpoint, KeyPair, address_of
from .limits import BusLimits
from .sockets import NOBLOCK, Drain, Frames, TcpConnection, open_socket, resolve

SOCKETS = 3  # for one endpoint: a DEALER and both ends of its monitor
_DESCRIPTORS = SOCKETS + 2  # and its connection, and the line of its session
_SHARE = 0.75  # of the process's descriptors, for all dialled endpoints

_ERRORS = {
    int(zmq.EVENT_CLOSED): "nothing listens there",  # refused, no route, or no answer within CONNECT_TIMEOUT
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it closed the connection in the handshake; is its key the one given?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol mismatch; does only one side have keys?",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it refused the key of this node; is it on the allow-list there?",
}
_UP, _DOWN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_CUT_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_CONNECTED = int(zmq.EVENT_CONNECTED)  # before the handshake

_HANDSHAKE_ERRORS = frozenset(text for event, text in _ERRORS.items() if event != int(zmq.EVENT_CLOSED))
_UNANSWERED = "it listens and does not answer; is it still starting?"
_NOT_YET, _LOST, _UNREAD = "no answer yet", "the connection was lost", "closed because too much was unread"
_NO_EVIDENCE = frozenset({_UNANSWERED, _NOT_YET, _LOST, _UNREAD})  # a busy process causes them as well

_monitors = itertools.count()
log = logging.getLogger(__name__)


def affordable_dials() -> int:
    """Returns how many endpoints may be dialled so that the process keeps descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, int(soft * _SHARE) // _DESCRIPTORS) if soft != resource.RLIM_INFINITY else 1 << 20


class Dialled:
    """Keeps a connection to one listener, dialled as a peer of `role`; `take` gets the first frame of each message.

    `make_place` is called where no descriptor is left for its sockets, and returns whether some are being freed.
    Nothing is sent without a connection, so no stale message is delivered later. `hello`, once set, opens each
    connection. `reached` gets the name after each handshake.
    """

    def __init__(
        self,
        name: str,
        role: str,
        take: Callable[[Dialled, zmq.Frame], None],
        *,
        make_place: Callable[[], bool],
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        keys: KeyPair | None,
        limits: BusLimits,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        endpoint = Endpoint.parse(name)
        self._make_place = make_place
        self.name, self._address, self.server_key = name, Address.parse(endpoint.address), endpoint.server_key
        self.role = role
        self._reached_again = reached
        self._take, self._context, self._loop, self._keys, self._limits = take, context, loop, keys, limits
        self.hello: bytes | None = None
        self.connected = False
        self.incarnation: int | None = None  # of the process that has answered last
        self.muted_until = float("-inf")
        self._link: _Link | None = None
        self._tcp: TcpConnection | None = None
        self.last_error = _NOT_YET  # why it is not connected
        self._attempt, self._reached, self._failed = 0, False, False
        self._connected_at = 0.0
        self._redial_ms = limits.redial_ms
        self._timer: asyncio.TimerHandle | None = None
        self._dialling = loop.create_task(self._dial())

    @property
    def unreachable(self) -> bool:
        """True if it was dialled, and not reached by an attempt that is over."""
        return not self._reached and (self._attempt > 0 or self._failed) and self._link is not None

    @property
    def address(self) -> str:
        """The address that it is connected to; empty where it is not."""
        return self._tcp.address if self.connected and self._tcp is not None else ""

    @property
    def port(self) -> int:
        """The port that it dials."""
        return self._address.port_first

    @property
    def gone(self) -> Gone | None:
        """The evidence that nobody is there who could answer; None where there is none."""
        if self.connected:
            return UNACKNOWLEDGED if self._tcp is not None and self._tcp.unacknowledged(self._limits) else None
        return None if self.last_error in _NO_EVIDENCE else Gone(self.last_error)

    @property
    def behind(self) -> bool:
        """True if this side reads what the peer sends later than it comes."""
        return self.connected and self._tcp is not None and self._tcp.behind

    @property
    def backlogged(self) -> bool:
        """True if too many bytes are unread."""
        return self._tcp is not None and self._tcp.backlogged(self._limits, self._limits.dialled_frames_max)

    def redial(self) -> None:
        """Closes the connection, and dials again later."""
        self.last_error = _UNREAD
        self._hang_up(linger_ms=0)
        self._set_timer(self._redial_ms)

    def send(self, frame: bytes) -> bool:
        """Returns whether ZMQ queued the frame; False without a connection or with a full queue."""
        return self.connected and self._link is not None and self._link.send(frame)

    def close(self) -> None:
        """Closes the connection; queued messages have linger_ms to leave."""
        self._dialling.cancel()
        self._set_timer(None)
        self._hang_up(self._limits.linger_ms)

    async def _dial(self) -> None:
        self._set_timer(self._redial_ms)
        try:
            hosts = await resolve(self._loop, self._address.host)
            address = address_of(hosts[self._attempt % len(hosts)], self._address.port_first)
            self._link = _Link(
                self._dealer(), address, context=self._context, loop=self._loop, limits=self._limits,
                on_frame=self._on_frame, on_extra=self._count, on_event=self._on_event,
            )  # fmt: skip
        except (OSError, zmq.ZMQError) as error:
            self.last_error = str(error)
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_place():
                self._set_timer(self._limits.reconnect_ms)  # ZMQ's own thread closes the descriptors

    def _on_frame(self, route: bytes, frame: zmq.Frame) -> None:
        self._count(route, len(frame))
        self._take(self, frame)

    def _count(self, _: bytes, byte_count: int) -> None:
        if self._tcp is not None:
            self._tcp.count_frame(byte_count)

    def _dealer(self) -> zmq.Socket[bytes]:
        dealer = open_socket(self._context, zmq.DEALER, self._limits)
        if self._keys is not None and self.server_key is not None:
            dealer.set(zmq.CURVE_SERVERKEY, self.server_key.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        return dealer

    def _redial(self) -> None:
        if self._redial_ms < self._limits.redial_ms_max:
            log.warning("no connection to %s: %s", self.name, self.last_error)
        self._attempt += 1
        self._redial_ms = backoff_ms(self._redial_ms, self._limits.redial_ms, self._limits.redial_ms_max)
        self._dialling.cancel()
        self._hang_up(linger_ms=0)
        self._dialling = self._loop.create_task(self._dial())

    def _set_timer(self, wait_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_ms is None else self._loop.call_later(wait_ms / 1e3, self._redial)

    def _hang_up(self, linger_ms: int) -> None:
        self.connected = False
        if self._link is not None:
            self._link.close(linger_ms)
        self._link = None

    def _on_event(self, event: int, value: int) -> None:
        if event == _CONNECTED:
            self._connected_at = self._loop.time()
            if self.last_error not in _HANDSHAKE_ERRORS:
                self.last_error = _UNANSWERED
            self._tcp = TcpConnection.of(value, curve=self._keys is not None)
        elif event == _UP:
            self.connected = self._reached = True
            self._redial_ms, self.last_error = self._limits.redial_ms, _LOST
            self._set_timer(None)
            self._reached_again(self.name)
            if self.hello is not None:
                self.send(self.hello)
        elif event == _DOWN and self.connected:
            self.connected = False
            self._set_timer(self._redial_ms)
        elif event == _CUT_OFF and self._loop.time() >= self._connected_at + self._limits.handshake_ms / 1e3:
            self.last_error = _UNANSWERED  # this side has given up
        else:
            self._failed = True
            self.last_error = _ERRORS.get(event, self.last_error)


class _Link:
    """The sockets of one dial attempt; `on_event` gets the monitor's events."""

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        address: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        limits: BusLimits,
        on_frame: Callable[[bytes, zmq.Frame], None],
        on_extra: Callable[[bytes, int], None],
        on_event: Callable[[int, int], None],
    ) -> None:
        with ExitStack() as undo:
            undo.callback(dealer.close, linger=0)
            dealer.set(zmq.IPV6, int("[" in address))
            self._dealer, self._monitor, self._on_event = dealer, context.socket(zmq.PAIR), on_event
            undo.callback(self._monitor.close, linger=0)
            where = f"inproc://dialled-{next(_monitors)}"
            dealer.monitor(where, sum(_ERRORS) + _CONNECTED + _UP + _DOWN)
            self._monitor.connect(where)
            dealer.connect(address)
            undo.pop_all()
        self._drain = Drain(loop, dealer, Frames(dealer, on_frame, on_extra, routed=False), limits)
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
        self._on_event(int(event["event"]), int(event["value"]))
        return 0

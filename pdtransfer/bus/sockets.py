"""Plain ZMQ sockets on an event loop: their options, and a drain that is fair to whatever else the loop has to do.

zmq.asyncio wraps every receive in a future and polls; watching a socket's FD and draining it with NOBLOCK does the
same work in a third of the time. The FD tells of changes only, so every drain ends by asking the socket itself.
"""

from __future__ import annotations

import asyncio
import socket as tcp
from collections.abc import Callable

import zmq

from ..limits import FRAME_BYTES_MAX
from .keys import is_literal
from .limits import BusLimits

ENVELOPE_BYTES = 256  # what CURVE adds to a frame is 33 bytes; `wire` holds the frame itself to FRAME_BYTES_MAX

# As plain integers: arithmetic on pyzmq's enums costs as much as a receive.
NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, limits: BusLimits) -> zmq.Socket[bytes]:
    """A socket for the network that bounds frames, handshakes, silence, and what waits to be sent.

    What was received has no bound here. A full queue stops ZMQ's reading, and if the connection ends meanwhile,
    whatever has ZMQ write on it, a heartbeat of ours or a PING of the peer's among what it has read, fails an assertion
    that aborts the process (libzmq#3937, 4.3.5). The bus looks after unread bytes itself.
    """
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, limits.linger_ms),
        (zmq.MAXMSGSIZE, FRAME_BYTES_MAX + ENVELOPE_BYTES),
        (zmq.SNDHWM, limits.send_queue),
        (zmq.RCVHWM, 0),
        (zmq.HANDSHAKE_IVL, limits.handshake_ms),
        (zmq.TCP_MAXRT, limits.unanswered_ms),
        (zmq.RECONNECT_IVL, limits.reconnect_ms),
        (zmq.RECONNECT_IVL_MAX, limits.reconnect_ms_max),
        (zmq.CONNECT_TIMEOUT, limits.redial_ms),
        (zmq.BACKLOG, limits.backlog),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.set(option, value)
    return socket


async def resolve(loop: asyncio.AbstractEventLoop, host: str) -> list[str]:
    """The addresses of a host, IPv4 first, without blocking the loop or ZMQ's I/O thread. Raises OSError for none."""
    if host == "*" or is_literal(host):
        return [host]
    try:
        answers = await loop.getaddrinfo(host, None, type=tcp.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host}: {error}") from None
    addresses = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return sorted(addresses, key=lambda address: ":" in address)


class Drain:
    """Calls `take` while its socket has something to read, at most `turn_messages` and `turn_bytes` a turn of the loop.

    `take` reads one frame or message without blocking, lets zmq.Again through, and returns how many bytes it took.
    An exception of `take` reaches the loop's exception handler, and the rest is drained all the same.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        take: Callable[[], int],
        limits: BusLimits,
    ) -> None:
        self._loop, self._socket, self._take, self._limits = loop, socket, take, limits
        self._fd = int(socket.get(zmq.FD))
        self._due = False  # a look is scheduled
        self._turning = False  # within a turn, which ends with a look
        self._stopped = False
        loop.add_reader(self._fd, self._turn)
        self.check()

    def check(self) -> None:
        """Has the socket looked at soon: a send may have swallowed the FD's only signal."""
        if not self._due and not self._turning:
            self._due = True
            self._loop.call_soon(self._look)

    def stop(self) -> None:
        """Drains no more; must come before the socket is closed, whose FD may then be another's."""
        self._stopped = True
        self._loop.remove_reader(self._fd)

    def _look(self) -> None:
        self._due = False
        if not self._stopped and self._readable():
            self._turn()

    def _readable(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & _POLLIN)

    def _turn(self) -> None:
        self._turning, drained = True, False
        try:
            drained = self._take_some()
        finally:
            self._turning = False
            if not drained:
                self.check()

    def _take_some(self) -> bool:
        """Whether nothing is left."""
        size = 0
        for taken in range(self._limits.turn_messages):
            # A message alone is the common case, and asking is cheaper than zmq.Again; after a second one it is not.
            if self._stopped or (taken == 1 and not self._readable()):
                return True
            try:
                size += self._take()
            except zmq.Again:
                return True
            if size > self._limits.turn_bytes:
                return False
        return False


class Frames:
    """Reads a socket for a Drain, handing on (route, first frame); `routed` says that ROUTER puts a route before it.

    A message has one frame: `frame.more` tells of a breach. Further frames are thrown away one by one, within the same
    budget, since one message may have millions of them; `spare(route, bytes)` hears of them.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[bytes, zmq.Frame], None],
        spare: Callable[[bytes, int], None],
        *,
        routed: bool,
    ) -> None:
        self._socket, self._take, self._spare, self._routed = socket, take, spare, routed
        self._route, self._more = b"", False

    def __call__(self) -> int:
        """Bytes taken; zmq.Again when there are none."""
        if self._more:
            frame = self._socket.recv(NOBLOCK, copy=False)
            self._more = frame.more
            self._spare(self._route, len(frame))
            return len(frame)
        route = self._route = self._socket.recv(NOBLOCK) if self._routed else b""
        frame = self._socket.recv(NOBLOCK, copy=False)
        self._more = frame.more
        self._take(route, frame)
        return len(frame)


class Seldom:
    """Says when a line may be logged again, and how many were held back since the last."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_s = interval_ms / 1e3
        self._next = float("-inf")
        self._held_back = 0

    def due(self, now: float) -> int | None:
        """How many were held back, None where this one has to be as well."""
        if now < self._next:
            self._held_back += 1
            return None
        held_back, self._held_back, self._next = self._held_back, 0, now + self._interval_s
        return held_back

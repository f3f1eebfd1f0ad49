"""Plain ZMQ sockets on an event loop: their options, fair reading, and the TCP connections below them.

zmq.asyncio wraps every receive in a future and polls. Watching a socket's FD and reading with NOBLOCK costs about a
third of the time. The FD signals changes only, so every drain ends by checking the socket itself.

ZMQ has no calls to count the bytes that arrived on a connection or to close one connection. It may close a descriptor
at any time, and the number may be reused. So a descriptor is used only after its cookie, unique per socket, was
compared.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket as tcp
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import pack, unpack_from

import zmq

from ..limits import FRAME_BYTES_MAX
from .keys import is_literal
from .limits import BusLimits

ENVELOPE_BYTES = 256  # more than CURVE adds to a frame; `wire` checks FRAME_BYTES_MAX itself

# Plain integers: arithmetic on pyzmq's enums costs as much as a receive.
NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

_libc = ctypes.CDLL(None, use_errno=True)
_SO_COOKIE = 57
_TCP_INFO_RECEIVED = 128  # offset of bytes_received in struct tcp_info (Linux 4.1 and later)
_TCP_INFO_RETRANSMITS = 2  # of its retransmits: timeouts in a row, without an acknowledgement
_TCP_INFO_UNACKED, _TCP_INFO_LAST_ACK = 24, 56  # of its unacked, in segments, and of last_ack_recv, in milliseconds
_RETRANSMITS = 2  # a segment may be lost, and its repetition
_ESTABLISHED, _CLOSE_WAIT = 1, 8  # the states, in its first byte, in which this side has not closed the connection
_NO_LINGER = pack("ii", 1, 0)
_SWEEP = 512  # descriptors checked in one call: about a millisecond
_BUSY = 0.02  # of a core: below it this process is not being flooded

_SHORT_MAX = 255  # bytes of the longest ZMTP body with a one-byte length; longer ones have eight
_CURVE_BYTES = 33  # command name, nonce, flags and authenticator of each frame
_COMMANDS_BYTES = 1 << 10  # more than the commands of ZMTP itself, which always count as unread


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, limits: BusLimits) -> zmq.Socket[bytes]:
    """Opens a network socket with limits on frames, handshakes, silence, and the send queue.

    The receive queue has no limit here. A full one stops ZMQ's reading. If the connection then ends, the next write on
    it (a heartbeat, or the answer to a PING) fails an assertion and aborts the process (libzmq#3937, 4.3.5). The bus
    checks unread bytes itself.
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
        (zmq.CONNECT_TIMEOUT, limits.unacknowledged_ms),
        (zmq.BACKLOG, limits.backlog),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.set(option, value)
    return socket


async def resolve(loop: asyncio.AbstractEventLoop, host: str) -> list[str]:
    """Returns a host's addresses, IPv4 first; blocks neither the loop nor ZMQ's I/O thread. Raises OSError for none."""
    if host == "*" or is_literal(host):
        return [host]
    try:
        answers = await loop.getaddrinfo(host, None, type=tcp.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host}: {error}") from None
    addresses = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return sorted(addresses, key=lambda address: ":" in address)


class Drain:
    """Calls `take` while its socket is readable, at most `turn_messages` and `turn_bytes` in one turn of the loop.

    `take` reads one frame or message without blocking, passes zmq.Again on, and returns the bytes read. Its exceptions
    go to the loop's exception handler, and draining continues.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], take: Callable[[], int], limits: BusLimits
    ) -> None:
        self._loop, self._socket, self._take, self._limits = loop, socket, take, limits
        self._fd = int(socket.get(zmq.FD))
        self._due = False  # a check is scheduled
        self._turning = False  # in a turn, which ends with a check
        self._stopped = False
        loop.add_reader(self._fd, self._turn)
        self.check()

    def check(self) -> None:
        """Schedules a check of the socket: a send may have consumed the FD's only signal."""
        if not self._due and not self._turning:
            self._due = True
            self._loop.call_soon(self._look)

    def stop(self) -> None:
        """Stops draining. Must be called before the socket is closed, because its FD may be reused."""
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
        """Returns whether nothing is left to read."""
        size = 0
        for taken in range(self._limits.turn_messages):
            # One message is the common case, where a check is cheaper than zmq.Again; from the second on it is not.
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
    """Reads a socket for a Drain and passes on (route, first frame); with `routed`, a ROUTER socket prepends the route.

    A message has one frame; `frame.more` marks a breach. Further frames are discarded one by one within the same
    budget, since one message may have millions of them. `on_extra(route, bytes)` is called for each.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[bytes, zmq.Frame], None],
        on_extra: Callable[[bytes, int], None],
        *,
        routed: bool,
    ) -> None:
        self._socket, self._take, self._on_extra, self._routed = socket, take, on_extra, routed
        self._route, self._more = b"", False

    def __call__(self) -> int:
        """Reads one frame and returns its bytes; raises zmq.Again when there is none."""
        if self._more:
            frame = self._socket.recv(NOBLOCK, copy=False)
            self._more = frame.more
            self._on_extra(self._route, len(frame))
            return len(frame)
        route = self._route = self._socket.recv(NOBLOCK) if self._routed else b""
        frame = self._socket.recv(NOBLOCK, copy=False)
        self._more = frame.more
        self._take(route, frame)
        return len(frame)


def address_of_frame(frame: zmq.Frame) -> str:
    """Returns the address that a frame came from. ZMQ knows none where the connection ended as it was accepted."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an ended connection"


class LogThrottle:
    """Limits how often a line is logged, and counts the lines suppressed in between."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_s = interval_ms / 1e3
        self._next = float("-inf")
        self._suppressed = 0

    def due(self, now: float) -> int | None:
        """Returns the number of suppressed lines, or None where this line must be suppressed too."""
        if now < self._next:
            self._suppressed += 1
            return None
        suppressed, self._suppressed, self._next = self._suppressed, 0, now + self._interval_s
        return suppressed


@dataclass(slots=True, eq=False)
class TcpConnection:
    """One TCP connection under a ZMQ socket: `frames` read, and `read_bytes` as counted on the network. It is `behind`
    where messages were unread at the last audit, although some had been read since the one before."""

    fd: int
    cookie: bytes
    curve: bool
    frames: int = 0
    read_bytes: int = 0
    frames_checked: int = -1
    frames_audited: int = 0
    behind: bool = False

    @classmethod
    def of(cls, fd: int, *, curve: bool) -> TcpConnection | None:
        """Returns the connection that has this descriptor now; None where it has been closed already."""
        cookie = _getsockopt(fd, tcp.SOL_SOCKET, _SO_COOKIE, 8)
        return cls(fd, cookie, curve) if cookie else None

    @classmethod
    def of_frame(cls, frame: zmq.Frame, *, curve: bool) -> TcpConnection | None:
        """Returns the connection that this frame came by; None where it has ended since."""
        try:
            return cls.of(int(frame.get(zmq.SRCFD)), curve=curve)
        except zmq.ZMQError:
            return None

    def count_frame(self, byte_count: int) -> None:
        """Counts a frame of this size that was read."""
        body = byte_count + _CURVE_BYTES if self.curve else byte_count
        self.read_bytes += body + (2 if body <= _SHORT_MAX else 9)
        self.frames += 1

    @property
    def is_open(self) -> bool:
        """True if the descriptor still belongs to this connection."""
        return _getsockopt(self.fd, tcp.SOL_SOCKET, _SO_COOKIE, 8) == self.cookie

    @property
    def address(self) -> str:
        """The address of the other end; empty once closed."""
        try:
            with tcp.socket(fileno=os.dup(self.fd)) as same:
                address = str(same.getpeername()[0])
        except OSError:
            return ""
        return address if self.is_open else ""

    @property
    def unread_bytes(self) -> int:
        """Bytes received and not yet read, in the kernel, in ZMQ, and of incomplete messages; 0 once closed.

        Handshakes and ZMTP's own commands count as unread forever: they are few.
        """
        received = received_bytes(self.fd)
        return 0 if received is None or not self.is_open else received - self.read_bytes

    def backlogged(self, limits: BusLimits, frames_max: int | None = None) -> bool:
        """Audits it: whether more is unread than a legitimate peer would send, in bytes or in frames of its mean
        size. `frames_max` is `unread_frames_max` by default."""
        unread = (received_bytes(self.fd) or 0) - self.read_bytes
        self.behind, self.frames_audited = unread > _COMMANDS_BYTES and self.frames > self.frames_audited, self.frames
        many = unread * self.frames > (frames_max or limits.unread_frames_max) * self.read_bytes
        return (many or unread > limits.unread_bytes_max) and self.is_open

    def unacknowledged(self, limits: BusLimits) -> bool:
        """True if the kernel repeats data, and the other host has acknowledged nothing for `unacknowledged_ms`.

        It acknowledges for a process that does not run as well. Frames that came since the last call answer it, too.
        """
        if self.frames != self.frames_checked:
            self.frames_checked = self.frames
            return False
        tcp_info = _getsockopt(self.fd, tcp.IPPROTO_TCP, tcp.TCP_INFO, _TCP_INFO_LAST_ACK + 4)
        return (
            len(tcp_info) == _TCP_INFO_LAST_ACK + 4
            and tcp_info[_TCP_INFO_RETRANSMITS] >= _RETRANSMITS
            and unpack_from("<I", tcp_info, _TCP_INFO_UNACKED)[0] > 0
            and unpack_from("<I", tcp_info, _TCP_INFO_LAST_ACK)[0] >= limits.unacknowledged_ms
            and self.is_open
        )

    def end(self) -> None:
        """Closes the connection with a reset; ZMQ closes the descriptor. Received data may still be read.

        A peer that fills its window would not notice a milder close.
        """
        if self.is_open:
            _libc.setsockopt(self.fd, tcp.SOL_SOCKET, tcp.SO_LINGER, _NO_LINGER, len(_NO_LINGER))
            _libc.shutdown(self.fd, tcp.SHUT_RDWR)


class Sweep:
    """Finds connections of a listener that have received much without a complete first message."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._left: list[int] = []
        self._cpu_s = self._checked_s = 0.0

    def backlogged(self, cookies: set[bytes], *, unread_bytes_max: int) -> Iterator[TcpConnection]:
        """Checks the next _SWEEP descriptors; yields those whose cookies are not in `cookies`. Costs nothing
        while idle."""
        cpu_s, now_s = time.process_time(), time.monotonic()
        busy = (cpu_s - self._cpu_s) / max(1e-9, now_s - self._checked_s)
        self._cpu_s, self._checked_s = cpu_s, now_s
        if busy < _BUSY:
            return
        if not self._left:
            try:
                self._left = [int(name) for name in os.listdir("/proc/self/fd")]
            except OSError:
                return  # No descriptor is left to open the directory.
        looked_at, self._left = self._left[:_SWEEP], self._left[_SWEEP:]
        for fd in looked_at:
            if (received_bytes(fd) or 0) <= unread_bytes_max or _port_of(fd) != self._port:
                continue
            tcp = TcpConnection.of(fd, curve=False)
            if tcp is not None and tcp.cookie not in cookies:
                yield tcp


def received_bytes(fd: int) -> int | None:
    """Returns the bytes received on a TCP connection, None for any other descriptor.

    Also None for a connection that this side has closed: ZMQ may close its descriptor later, and one close is enough.
    """
    tcp_info = _getsockopt(fd, tcp.IPPROTO_TCP, tcp.TCP_INFO, _TCP_INFO_RECEIVED + 8)
    if len(tcp_info) < _TCP_INFO_RECEIVED + 8 or tcp_info[0] not in (_ESTABLISHED, _CLOSE_WAIT):
        return None
    return unpack_from("<Q", tcp_info, _TCP_INFO_RECEIVED)[0]


def _getsockopt(fd: int, level: int, option: int, size: int) -> bytes:
    """Returns empty bytes where the descriptor does not exist or does not know the option."""
    answer, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    return b"" if _libc.getsockopt(fd, level, option, answer, ctypes.byref(length)) else answer.raw[: length.value]


def _port_of(fd: int) -> int:
    name, length = ctypes.create_string_buffer(32), ctypes.c_uint32(32)
    if _libc.getsockname(fd, name, ctypes.byref(length)):
        return -1
    return int.from_bytes(name.raw[2:4], "big")

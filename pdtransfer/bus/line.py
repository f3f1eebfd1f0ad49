"""The line of a session: a Unix socket beside ZMQ for what two peers of one host send about grants.

It is the connection that handed the arena over, so that its peer has shown the session's token. A frame is its length,
4 bytes, and the bytes that ZMQ would carry. Nothing depends on a line: what it does not take goes by ZMQ. What a peer
has sent by a line comes before what it sends by ZMQ after that: `read_now` is called before each message of ZMQ.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket as unix
import termios
from collections.abc import Callable
from struct import Struct

from ..disconnect import disconnect
from ..errors import RemoteProtocolError
from ..wire import Abort, Drained, Failed, Grant, Granted, Landed, Released
from .limits import BusLimits

GRANT_MESSAGES = (Grant, Granted, Landed, Released, Failed, Abort, Drained)  # what a line carries
OPENING = b"pdt-line"  # of each direction; the writer's comes first, since the arena's owner may have no lines
_LENGTH = Struct("<I")
_READ_BYTES = 64 << 10
_SEND_FLAGS = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL


class SessionLine:
    """Sends frames of at most `line_bytes_max`, and passes those that it receives to `take`.

    `take` gets at most `turn_messages` frames in one turn of the loop, and none after close. Its exceptions go to the
    loop's exception handler. `ended` is called once, with an error where the peer has broken the form; the line is
    closed then.
    """

    def __init__(
        self,
        socket: unix.socket,
        *,
        peer: str,
        process: str | int,
        session: int,
        greeted: bool,
        take: Callable[[SessionLine, bytes], None],
        ended: Callable[[SessionLine, RemoteProtocolError | None], None],
        limits: BusLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`greeted`: the peer's OPENING was read already. Raises OSError, and closes the socket then."""
        self.peer, self.process, self.session = peer, process, session
        self._socket, self._take, self._ended, self._limits = socket, take, ended, limits
        self._loop = loop
        self._open = greeted  # for frames to be sent
        self._unsent = b""  # the rest of what the kernel has the beginning of
        self.unfinished = b""  # the frame that this belongs to
        self._unread_since: float | None = None  # how long the peer has left something unread, if it has
        self._received = bytearray()
        self._due = False  # a turn is scheduled: nothing is received before it
        self._hurried = 0  # frames that read_now has taken since the latest turn of the loop
        self._closed = False
        try:
            socket.setblocking(False)
            # The kernel doubles it. So each side knows how much the other may have sent that it has not read.
            socket.setsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF, limits.line_queue_bytes // 2)
            self._loop.add_reader(socket, self._read)
        except OSError:
            disconnect(socket)
            raise
        self._push(OPENING)

    def send(self, frame: bytes) -> bool:
        """True if the kernel has the frame, or its beginning. False where it is full, the frame too long, the peer has
        not opened its direction, or reads nothing. A forked child may hold a line open that nobody reads."""
        if not self._open or self._unsent or self._closed or len(frame) > self._limits.line_bytes_max:
            return False
        if not self._is_read() or not self._push(_LENGTH.pack(len(frame)) + frame):
            return False
        self.unfinished = frame if self._unsent else b""
        return True

    def read_now(self) -> None:
        """Takes what the peer has sent until now, without waiting for the loop's next turn: of a peer that leaves no
        more unread than a line holds, everything."""
        if self._closed:
            return
        waiting = min(self._queued(termios.FIONREAD), 2 * self._limits.line_queue_bytes - len(self._received))
        while waiting > 0 and (received := self._receive(min(waiting, _READ_BYTES))):
            waiting -= received
        while self._hurried < self._limits.line_queue_frames and (frame := self._next()) is not None:
            if self._hurried == 0:
                self._loop.call_soon(self._calm)
            self._hurried += 1
            self._deliver(frame)
        if self._received and not self._due and not self._closed:
            self._turn_later()

    def close(self) -> None:
        """Ends it for both sides; idempotent. The kernel still delivers what was sent whole, which `unfinished`, where
        there is one, was not."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            disconnect(self._socket)

    def _is_read(self) -> bool:
        """True if the peer has read everything, or has had little time for it."""
        now = self._loop.time()
        if self._unread_since is None or not self._queued(termios.TIOCOUTQ):
            self._unread_since = now
        return (now - self._unread_since) * 1e3 < self._limits.line_unread_ms

    def _queued(self, queue: int) -> int:
        """Bytes that the kernel holds of one direction, as it counts them."""
        count = array.array("i", [0])
        try:
            fcntl.ioctl(self._socket, queue, count)
        except OSError:  # ended: then the reader finds that
            return 0
        return count[0]

    def _push(self, content: bytes) -> bool:
        try:
            sent = self._socket.send(content, _SEND_FLAGS)
        except OSError:  # full, or ended: then the reader finds that
            return False
        if sent < len(content):
            self._unsent = content[sent:]
            self._loop.add_writer(self._socket, self._push_rest)
        return True

    def _push_rest(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent, _SEND_FLAGS) :]
        except BlockingIOError:
            return
        except OSError:  # half a frame is out, and nothing may follow it
            self.read_now()  # what the peer sent before its end
            self._end(None)
            return
        if not self._unsent:
            self.unfinished = b""
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        if self._due:
            return
        if self._receive(_READ_BYTES) == 0:
            self._end(None)
            return
        self._turn()

    def _receive(self, byte_count: int) -> int | None:
        """Receives at most this many bytes; returns how many. 0 is the line's end, None means that none are there
        yet."""
        try:
            received = self._socket.recv(byte_count)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        self._received += received
        return len(received)

    def _turn(self) -> None:
        self._due = False
        for _ in range(self._limits.turn_messages):
            if (frame := self._next()) is None:
                return
            self._deliver(frame)
        self._turn_later()

    def _turn_later(self) -> None:
        self._due = True
        self._loop.call_soon(self._turn)

    def _calm(self) -> None:
        self._hurried = 0

    def _deliver(self, frame: bytes) -> None:
        try:
            self._take(self, frame)
        except Exception as error:  # noqa: BLE001 -- a defect of the node's, which costs no frame behind it
            text = f"a frame on the line of session {self.session:#x}"
            self._loop.call_exception_handler({"message": text, "exception": error})

    def _next(self) -> bytes | None:
        """The next whole frame; None where there is none yet, and after the line's end."""
        if self._closed:
            return None
        if not self._open:
            opening = bytes(self._received[: len(OPENING)])
            if not OPENING.startswith(opening):
                self._end(RemoteProtocolError("line", f"it begins with {opening!r}, not with {OPENING!r}"))
                return None
            if len(opening) < len(OPENING):
                return None
            self._open = True
            del self._received[: len(OPENING)]
        if len(self._received) < _LENGTH.size:
            return None
        size: int = _LENGTH.unpack_from(self._received)[0]
        if size > self._limits.line_bytes_max:
            self._end(RemoteProtocolError("line", f"a frame of {size} bytes, at most {self._limits.line_bytes_max}"))
            return None
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        frame = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return frame

    def _end(self, error: RemoteProtocolError | None) -> None:
        self.close()
        self._ended(self, error)

"""The line of a session: a Unix socket beside ZMQ for what two peers of one host send about grants.

It is the connection that handed the arena over, so that its peer has shown the session's token. A frame is its length,
4 bytes, and the bytes that ZMQ would carry. Nothing depends on a line: what it does not take goes by ZMQ.
"""

from __future__ import annotations

import asyncio
import socket as unix
from collections.abc import Callable
from struct import Struct

from ..errors import RemoteProtocolError
from ..wire import Abort, Drained, Failed, Grant, Granted, Landed, Released
from .limits import BusLimits

GRANT_MESSAGES = (Grant, Granted, Landed, Released, Failed, Abort, Drained)  # what a line carries
OPENING = b"pdt-line"  # of each direction; the writer's comes first, since the arena's owner may know no lines
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
        session: int,
        greeted: bool,
        take: Callable[[SessionLine, bytes], None],
        ended: Callable[[SessionLine, RemoteProtocolError | None], None],
        limits: BusLimits,
    ) -> None:
        """`greeted`: the peer's OPENING was read already."""
        self.peer, self.session = peer, session
        self._socket, self._take, self._ended, self._limits = socket, take, ended, limits
        self._loop = asyncio.get_running_loop()
        self._open = greeted  # for frames to be sent
        self._unsent = b""
        self._unread = bytearray()
        self._due = False  # a turn is scheduled: nothing is received before it
        self._closed = False
        socket.setblocking(False)
        self._loop.add_reader(socket, self._read)
        self._push(OPENING)

    def send(self, frame: bytes) -> bool:
        """Whether the kernel has the frame, or its beginning; False where it is full, the frame too long, or the peer
        has not opened its direction."""
        if not self._open or self._unsent or self._closed or len(frame) > self._limits.line_bytes_max:
            return False
        return self._push(_LENGTH.pack(len(frame)) + frame)

    def close(self) -> None:
        """Ends it; idempotent. The kernel still delivers what was sent whole."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

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
        rest, self._unsent = self._unsent, b""
        self._loop.remove_writer(self._socket)
        if not self._push(rest):
            self._end(None)  # half a frame is out: nothing may follow it

    def _read(self) -> None:
        if self._due:
            return
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._end(None)
            return
        self._unread += received
        self._turn()

    def _turn(self) -> None:
        self._due = False
        for _ in range(self._limits.turn_messages):
            if self._closed or (frame := self._next()) is None:
                return
            try:
                self._take(self, frame)
            except Exception:
                self._turn_later()
                raise
        self._turn_later()

    def _turn_later(self) -> None:
        self._due = True
        self._loop.call_soon(self._turn)

    def _next(self) -> bytes | None:
        """The next whole frame; None where there is none yet, and after the line's end."""
        if not self._open:
            opening = bytes(self._unread[: len(OPENING)])
            if not OPENING.startswith(opening):
                self._end(RemoteProtocolError("line", f"it begins with {opening!r}, not with {OPENING!r}"))
                return None
            if len(opening) < len(OPENING):
                return None
            self._open = True
            del self._unread[: len(OPENING)]
        if len(self._unread) < _LENGTH.size:
            return None
        size: int = _LENGTH.unpack_from(self._unread)[0]
        if size > self._limits.line_bytes_max:
            self._end(RemoteProtocolError("line", f"a frame of {size} bytes, at most {self._limits.line_bytes_max}"))
            return None
        end = _LENGTH.size + size
        if len(self._unread) < end:
            return None
        frame = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        return frame

    def _end(self, error: RemoteProtocolError | None) -> None:
        self.close()
        self._ended(self, error)

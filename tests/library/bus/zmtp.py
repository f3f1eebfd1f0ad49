"""A peer that speaks ZMTP 3.0 by itself, over a blocking socket and without keys: it does what no ZMQ socket would."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

_MORE, _LONG, _COMMAND = 1, 2, 4
PING = bytes((_COMMAND, 7)) + b"\x04PING" + bytes(2)  # with no time to live


def frame(body: bytes, *, more: bool = False) -> bytes:
    """One frame of a message, as it travels."""
    flags = _MORE if more else 0
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return bytes((flags, len(body))) + body


class Zmtp:
    """A connection that has shaken hands: as a DEALER that dialled, or as the ROUTER that `made` was dialled by."""

    def __init__(self, port: int = 0, made: socket.socket | None = None) -> None:
        self.socket = made or socket.create_connection(("127.0.0.1", port), timeout=30)
        kind = b"ROUTER" if made else b"DEALER"
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        self._read(64)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(bytes((_COMMAND, len(ready))) + ready)
        self._read(self._read(2)[1])

    def _read(self, count: int) -> bytes:
        read = b""
        while len(read) < count:
            piece = self.socket.recv(count - len(read))
            if not piece:
                raise ConnectionResetError("the other side has hung up on the handshake")
            read += piece
        return read

    def send(self, text: bytes) -> None:
        """Sends what is said, as it is."""
        self.socket.sendall(text)

    def reset(self) -> None:
        """Ends the connection in a way that its other end notices at once, read or not."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

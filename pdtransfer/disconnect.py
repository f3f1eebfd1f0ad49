"""Ends sockets for both sides: closing alone ends nothing while a forked child still has the descriptor."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def disconnect(ended: socket.socket) -> None:
    """Shuts the socket down and closes it; idempotent. The other side reads what was sent whole, and then the end. A
    listener accepts nothing more, in a child either."""
    with suppress(OSError):  # not connected, or closed already
        ended.shutdown(socket.SHUT_RDWR)
    ended.close()


class LentSocket:
    """A socket that an event loop owns and closes. Its descriptor's number may be another's by then, the inode not."""

    __slots__ = ("_descriptor", "_inode")

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._inode = descriptor, os.fstat(descriptor).st_ino

    def shut_down(self) -> None:
        """Ends it for both sides, unless its owner has closed it."""
        with suppress(OSError):
            same = os.dup(self._descriptor)
            try:
                if os.fstat(same).st_ino == self._inode:
                    with socket.socket(fileno=os.dup(same)) as ended:
                        ended.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(same)

"""The TCP connections under ZMQ's sockets: how much has come on one, and its end, for which ZMQ has no calls.

A descriptor is ZMQ's to close, and its number may be another's the next moment: nothing is done to it before its cookie
has been compared, a number that the kernel gives to one socket ever.
"""

from __future__ import annotations

import ctypes
import os
import socket as tcp
import time
from collections.abc import Iterator
from dataclasses import dataclass
from struct import pack, unpack_from

from .limits import BusLimits

_libc = ctypes.CDLL(None, use_errno=True)
_SO_COOKIE = 57
_TCP_INFO_RECEIVED = 128  # where bytes_received stands in struct tcp_info, from Linux 4.1 on
_ESTABLISHED, _CLOSE_WAIT = 1, 8  # its first byte, while this side has not ended the connection
_NO_LINGER = pack("ii", 1, 0)
_SWEEP = 512  # descriptors looked at in a row: about a millisecond
_BUSY = 0.02  # of a core: below it nobody floods this process

_SHORT_MAX = 255  # bytes of a body whose length ZMTP says in one byte, not in eight
_CURVE_BYTES = 33  # command name, nonce, flags and authenticator of each frame


@dataclass(slots=True, eq=False)
class Wire:
    """One connection, and what of it was read: `frames` in all, `taken` bytes as they travelled."""

    fd: int
    cookie: bytes
    curve: bool
    frames: int = 0
    taken: int = 0

    @classmethod
    def of(cls, fd: int, *, curve: bool) -> Wire | None:
        """The connection that has this descriptor now; None where it has ended already."""
        cookie = _ask(fd, tcp.SOL_SOCKET, _SO_COOKIE, 8)
        return cls(fd, cookie, curve) if cookie else None

    def took(self, byte_count: int) -> None:
        """A frame of so many bytes was read."""
        body = byte_count + _CURVE_BYTES if self.curve else byte_count
        self.taken += body + (2 if body <= _SHORT_MAX else 9)
        self.frames += 1

    @property
    def same(self) -> bool:
        """Whether the descriptor is still this connection's."""
        return _ask(self.fd, tcp.SOL_SOCKET, _SO_COOKIE, 8) == self.cookie

    @property
    def unread_bytes(self) -> int:
        """What has come and was not read yet, in the kernel, in ZMQ, and of messages that are not whole; 0 once ended.

        Handshakes and ZMTP's own commands count, and are never read: they are few.
        """
        received = received_bytes(self.fd)
        return 0 if received is None or not self.same else received - self.taken

    def swamped(self, limits: BusLimits) -> bool:
        """Whether more waits to be read than a peer that means well would send, by bytes or by its usual frames."""
        unread = (received_bytes(self.fd) or 0) - self.taken
        many = unread * self.frames > limits.unread_frames_max * self.taken
        return (many or unread > limits.unread_bytes_max) and self.same

    def end(self) -> None:
        """Ends the connection as its peer could: ZMQ closes the descriptor. What has come may still be read.

        The peer is told by a reset, whatever it has on its way: one that fills its window would not notice less.
        """
        if self.same:
            _libc.setsockopt(self.fd, tcp.SOL_SOCKET, tcp.SO_LINGER, _NO_LINGER, len(_NO_LINGER))
            _libc.shutdown(self.fd, tcp.SHUT_RDWR)


class Sweep:
    """Finds connections of a listener on which much has come though nobody has spoken: one message without an end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._left: list[int] = []
        self._used_s = self._asked_s = 0.0

    def swamped(self, known: set[bytes], *, unread_bytes_max: int) -> Iterator[Wire]:
        """Those among the next _SWEEP descriptors whose cookies are not `known`. Costs nothing while we are idle."""
        used_s, now_s = time.process_time(), time.monotonic()
        busy = (used_s - self._used_s) / max(1e-9, now_s - self._asked_s)
        self._used_s, self._asked_s = used_s, now_s
        if busy < _BUSY:
            return
        if not self._left:
            try:
                self._left = [int(name) for name in os.listdir("/proc/self/fd")]
            except OSError:
                return  # No descriptor is left to look with.
        looked_at, self._left = self._left[:_SWEEP], self._left[_SWEEP:]
        for fd in looked_at:
            if (received_bytes(fd) or 0) <= unread_bytes_max or _port_of(fd) != self._port:
                continue
            wire = Wire.of(fd, curve=False)
            if wire is not None and wire.cookie not in known:
                yield wire


def received_bytes(fd: int) -> int | None:
    """What has come on a TCP connection; None for any other descriptor, and for one that this side has ended: ZMQ may
    close it a while later, and nobody is hung up on twice."""
    told = _ask(fd, tcp.IPPROTO_TCP, tcp.TCP_INFO, _TCP_INFO_RECEIVED + 8)
    if len(told) < _TCP_INFO_RECEIVED + 8 or told[0] not in (_ESTABLISHED, _CLOSE_WAIT):
        return None
    return unpack_from("<Q", told, _TCP_INFO_RECEIVED)[0]


def _ask(fd: int, level: int, option: int, size: int) -> bytes:
    """Empty where there is no such descriptor, or it knows no such option."""
    answer, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    return b"" if _libc.getsockopt(fd, level, option, answer, ctypes.byref(length)) else answer.raw[: length.value]


def _port_of(fd: int) -> int:
    name, length = ctypes.create_string_buffer(32), ctypes.c_uint32(32)
    if _libc.getsockname(fd, name, ctypes.byref(length)):
        return -1
    return int.from_bytes(name.raw[2:4], "big")

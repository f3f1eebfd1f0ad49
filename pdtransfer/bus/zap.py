"""Answers ZMQ's question whether a CURVE key may come in (ZAP, RFC 27), from the allow-list, on the bus's own loop.

pyzmq's Authenticator runs a thread or a task of its own, answers by coroutine, reads keys from a directory of files and
logs a line for every refusal; what is needed here is one look into a dict for each handshake.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
from zmq.utils import z85

from ..keys import AllowList
from .limits import BusLimits
from .sockets import NOBLOCK, Drain, Seldom

DOMAIN = "pdtransfer"
_VERSION = b"1.0"
_KEY_BYTES = 32

log = logging.getLogger(__name__)


class Authenticator:
    """The ZAP handler of one context. `refused` counts strangers; what they were is logged, at a bounded rate."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        allowed: AllowList,
        limits: BusLimits,
    ) -> None:
        self._loop, self.allowed = loop, allowed  # may be replaced
        self.refused = 0
        self._seldom = Seldom(limits.log_ms)
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._drain = Drain(loop, self._socket, self._take, limits)

    def close(self) -> None:
        """Answers no more; handshakes that are under way end with their sockets."""
        self._drain.stop()
        self._socket.close()

    def _take(self) -> int:
        request = self._socket.recv_multipart(NOBLOCK)
        self._socket.send_multipart(self.answer(request), NOBLOCK)
        return 0

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to [version, request id, domain, address, routing id, mechanism, key]; its User-Id is the key."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        known = version == _VERSION and domain == DOMAIN.encode() and mechanism == b"CURVE"
        key = z85.encode(credentials[0]) if known and len(credentials[0]) == _KEY_BYTES else b""
        if self.allowed.name_of(key.decode()) is not None:
            return [_VERSION, request_id, b"200", b"OK", key, b""]
        self.refused += 1
        held_back = self._seldom.due(self._loop.time())
        if held_back is not None:
            text = "%s from %s is not on the allow-list, and %d others were not"
            log.warning(text, key.decode() or "no CURVE key", address.decode(errors="replace"), held_back)
        return [_VERSION, request_id, b"400", b"not on the allow-list", b"", b""]

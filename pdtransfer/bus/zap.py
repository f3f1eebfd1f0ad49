"""Answers ZMQ's question whether a CURVE key may come in (ZAP, RFC 27), from the allow-list, on the bus's own loop.

A listed key's connection gets its routing id here as well: an id of the peer's own choice can be one that the ROUTER is
about to give out, which then aborts the process (libzmq 4.3.5: routing ids are counted up, and a listed key could take
many of those to come). The answer's Identity replaces the peer's if it is read after it, and so comes a moment later.

pyzmq's Authenticator runs a thread or a task of its own, answers by coroutine, reads keys from a directory of files and
logs a line for every refusal; what is needed here is one look into a dict for each handshake.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import zmq
from zmq.utils import z85

from .connections import ROUTE_MARK, ROUTE_RANDOM_BYTES
from .keys import AllowList
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
        self._naming_s = limits.naming_ms / 1e3
        self._banned: dict[str, float] = {}
        self._socket = context.socket(zmq.ROUTER)  # not REP: answers overtake each other
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._drain = Drain(loop, self._socket, self._take, limits)

    def close(self) -> None:
        """Answers no more; handshakes that are under way end with their sockets."""
        self._drain.stop()
        self._socket.close()

    def ban(self, user: str, until: float) -> None:
        """Lets a key in no more before `until`, on the loop's clock."""
        self._banned[user] = until

    def _take(self) -> int:
        route, empty, *request = self._socket.recv_multipart(NOBLOCK)
        answer = [route, empty, *self.answer(request)]
        if answer[-1]:
            self._loop.call_later(self._naming_s, self._say, answer)
        else:
            self._say(answer)
        return 0

    def _say(self, answer: list[bytes]) -> None:
        if not self._socket.closed:
            self._drain.check()
            self._socket.send_multipart(answer, NOBLOCK)

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to [version, request id, domain, address, routing id, mechanism, key]; its User-Id is the key.

        With "OK" comes a routing id for the connection, as metadata.
        """
        version, request_id, domain, address, _, mechanism, *credentials = request
        known = version == _VERSION and domain == DOMAIN.encode() and mechanism == b"CURVE"
        key: bytes = z85.encode(credentials[0]) if known and len(credentials[0]) == _KEY_BYTES else b""
        if self.allowed.name_of(key.decode()) is not None:
            if self._banned.get(key.decode(), 0.0) > self._loop.time():
                self.refused += 1
                return [_VERSION, request_id, b"400", b"banned for a while", b"", b""]
            self._banned.pop(key.decode(), None)
            name = ROUTE_MARK + secrets.token_bytes(ROUTE_RANDOM_BYTES)
            return [_VERSION, request_id, b"200", b"OK", key, _property(b"Identity", name)]
        self.refused += 1
        held_back = self._seldom.due(self._loop.time())
        if held_back is not None:
            text = "%s from %s is not on the allow-list, and %d others were not"
            log.warning(text, key.decode() or "no CURVE key", address.decode(errors="replace"), held_back)
        return [_VERSION, request_id, b"400", b"not on the allow-list", b"", b""]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value

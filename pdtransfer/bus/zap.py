"""Answers ZMQ's authentication requests for CURVE keys (ZAP, RFC 27) from the allow-list, on the bus's own loop.

The answer also assigns the connection's routing id. A self-chosen id could equal one that the ROUTER assigns next,
which aborts the process (libzmq 4.3.5 assigns ids by counting). The id in the answer replaces the peer's own only if it
is read later, so the answer is delayed.

pyzmq's Authenticator runs a thread or task of its own, reads keys from a directory and logs every refusal. Here, each
handshake needs one look-up in a dict.
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
from .sockets import NOBLOCK, Drain, LogThrottle

DOMAIN = "pdtransfer"
_VERSION = b"1.0"
_KEY_BYTES = 32

log = logging.getLogger(__name__)


class Authenticator:
    """The ZAP server of one context. `refused` counts unknown keys, which are logged at a bounded rate."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        allowed: AllowList,
        limits: BusLimits,
    ) -> None:
        self._loop, self.allowed = loop, allowed  # may be replaced
        self.refused = 0
        self.last_refused = ""  # key and address
        self._throttle = LogThrottle(limits.log_ms)
        self._naming_s = limits.naming_ms / 1e3
        self._banned: dict[str, float] = {}
        self._socket = context.socket(zmq.ROUTER)  # not REP: answers may be sent out of order
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._drain = Drain(loop, self._socket, self._take, limits)

    def close(self) -> None:
        """Stops answering; pending handshakes end with their sockets."""
        self._drain.stop()
        self._socket.close()

    def ban(self, user: str, until: float) -> None:
        """Refuses a key until this time on the loop's clock."""
        self._banned[user] = until

    def _take(self) -> int:
        route, empty, *request = self._socket.recv_multipart(NOBLOCK)
        answer = [route, empty, *self.answer(request)]
        if answer[-1]:
            self._loop.call_later(self._naming_s, self._send, answer)
        else:
            self._send(answer)
        return 0

    def _send(self, answer: list[bytes]) -> None:
        if not self._socket.closed:
            self._drain.check()
            self._socket.send_multipart(answer, NOBLOCK)

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Returns the reply to [version, request id, domain, address, routing id, mechanism, key]; its User-Id is the
        key.

        With status 200, the metadata assigns the connection's routing id.
        """
        version, request_id, domain, address, _, mechanism, *credentials = request
        is_curve = version == _VERSION and domain == DOMAIN.encode() and mechanism == b"CURVE"
        key: bytes = z85.encode(credentials[0]) if is_curve and len(credentials[0]) == _KEY_BYTES else b""
        if key.decode() in self.allowed.names:
            if self._banned.get(key.decode(), 0.0) > self._loop.time():
                self.refused += 1
                return [_VERSION, request_id, b"400", b"banned for a while", b"", b""]
            self._banned.pop(key.decode(), None)
            name = ROUTE_MARK + secrets.token_bytes(ROUTE_RANDOM_BYTES)
            return [_VERSION, request_id, b"200", b"OK", key, _property(b"Identity", name)]
        self.refused += 1
        self.last_refused = f"{key.decode() or 'no CURVE key'} from {address.decode(errors='replace')}"
        suppressed = self._throttle.due(self._loop.time())
        if suppressed is not None:
            log.warning("%s is not on the allow-list, %d other refusals not logged", self.last_refused, suppressed)
        return [_VERSION, request_id, b"400", b"not on the allow-list", b"", b""]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value

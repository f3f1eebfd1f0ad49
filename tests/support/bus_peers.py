"""Peers for the tests of the bus: nodes that mean well, and bare sockets that say what they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import pytest
import zmq
from msgspec.structs import replace
from zmq.utils.monitor import parse_monitor_message

from pdtransfer.bus import Bus, BusLimits
from pdtransfer.bus.gone import Gone
from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.errors import RemoteProtocolError, WorldError
from pdtransfer.wire import Goodbye, Grant, Hello, Identity, Message, Part, Ping, Pong, Ranks, decode, encode
from tests.support.internals import dialled_by
from tests.support.waiting import until

Kind = TypeVar("Kind", bound=Message)
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LIMITS = BusLimits(reconnect_ms=20, reconnect_ms_max=50, redial_ms=200, redial_ms_max=400, linger_ms=500)
ANY_PORT = "tcp://127.0.0.1:0"
LARGE = Grant(1, 1, 1, 1, 0, (Part(0, 0, 1, bytes(1 << 20)),), True, 1)


def pair() -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(public=public, secret=secret)


def hello(node: str, incarnation: int = 7) -> Hello:
    return Hello(1, 1, Identity(node, "decode", incarnation, Ranks(), "model", b"", 16))


class Node:
    """A bus that keeps its messages, and answers each Ping with a Pong; each Hello with a Goodbye if it `greets`."""

    def __init__(
        self,
        name: str,
        keys: KeyPair | None = None,
        allowed: dict[str, KeyPair] | None = None,
        limits: BusLimits = LIMITS,
        *,
        greets: bool = False,
    ) -> None:
        self.greets = greets
        names = None if allowed is None else AllowList({pair.public: name for name, pair in allowed.items()})
        self.received: list[tuple[str, Message]] = []
        self.refusals: list[tuple[str, RemoteProtocolError]] = []
        self.reached: list[tuple[str, str]] = []  # who connected, and from where
        self.gone: dict[str, str] = {}  # the evidence that stands
        self.bus = Bus(
            node=name, keys=keys, allowed=names, receive=self.receive, refused=self.refused, limits=limits,
            reached=lambda peer: self.reached.append((peer, self.bus.address_of(peer))), gone=self.report_gone,
        )  # fmt: skip

    def receive(self, peer: str, message: Message) -> None:
        self.received.append((peer, message))
        if type(message) is Ping:
            self.bus.send(peer, Pong(message.incarnation))
        elif type(message) is Hello and self.greets:
            self.bus.send(peer, Goodbye(message.identity.incarnation, "met"))

    def report_gone(self, peer: str, gone: Gone | None) -> None:
        if gone is None:
            del self.gone[peer]
        else:
            self.gone[peer] = gone.text

    def refused(self, peer: str, error: RemoteProtocolError) -> None:
        self.refusals.append((peer, error))

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()

    async def meet(self, endpoint: str, name: str, role: str = "prefill") -> str:
        """Dials and says Hello, once; the peer's name when it went out."""
        peer = self.bus.dial(endpoint, role)
        assert not self.bus.send(peer, hello(name)), "it goes out with the connection"
        await until(lambda: dialled_by(self.bus)[peer].connected)
        return peer

    async def ping(self, peer: str, number: int) -> None:
        """Pings until this very number is answered."""
        while (peer, Pong(number)) not in self.received:
            self.bus.send(peer, Ping(number))
            await asyncio.sleep(0.01)


class Raw:
    """A hostile peer: a bare socket that sends what it likes."""

    def __init__(
        self, context: Context, endpoint: str, *, keys: KeyPair | None = None, server: str = "",
        routing_id: bytes = b"",
    ) -> None:  # fmt: skip
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        if routing_id:
            self.socket.set(zmq.ROUTING_ID, routing_id)
        if keys is not None:
            self.socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self.socket.set(zmq.CURVE_SERVERKEY, server.encode())
        self._seen: set[int] = set()
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def send(self, *messages: Message | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> Message:
        await until(lambda: not self.quiet)
        return decode(self.socket.recv())

    async def got(self, kind: type[Kind], **fields: Any) -> Kind:
        """The next message of this kind that has these fields."""
        while not isinstance(message := await self.receive(), kind) or replace(message, **fields) != message:
            pass
        return message

    @property
    def quiet(self) -> bool:
        return not self.socket.poll(0)

    @property
    def shook_hands(self) -> bool:
        return self._has_seen(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def was_cut_off(self) -> bool:
        return self._has_seen(zmq.EVENT_DISCONNECTED)

    def _has_seen(self, event: int) -> bool:
        while self._monitor.poll(0):
            self._seen.add(int(parse_monitor_message(self._monitor.recv_multipart())["event"]))
        return event in self._seen


@dataclass
class Listening:
    """A node that listens, and how raw peers dial it: with the keys of a name that it lists, or all without keys."""

    node: Node
    endpoint: str
    own: KeyPair | None
    keys: dict[str, KeyPair]
    context: Context

    def raw(self, name: str = "", **more: Any) -> Raw:
        if self.own is not None:
            more = {"keys": self.keys[name], "server": self.own.public, **more}
        return Raw(self.context, self.endpoint, **more)

    async def met(self, name: str, **more: Any) -> Raw:
        """One that has said Hello, and been answered."""
        raw = self.raw(name, **more)
        raw.send(hello(name), Ping(1))
        assert await raw.receive() == Pong(1)
        return raw


@asynccontextmanager
async def listening(context: Context, *names: str, **more: Any) -> AsyncIterator[Listening]:
    own, keys = pair() if names else None, {name: pair() for name in names}
    async with Node("p", own, keys if names else None, **more) as node:
        yield Listening(node, await node.bus.bind(ANY_PORT), own, keys, context)


async def rebind(node: Node, endpoint: str) -> None:
    while True:
        try:
            await node.bus.bind(endpoint)
            return
        except WorldError:
            await asyncio.sleep(0.02)


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)

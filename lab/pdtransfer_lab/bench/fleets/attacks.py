"""Hostile processes for `siege`: each does one thing to a listener for as long as its pipe is open."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from pdtransfer.bus.keys import Endpoint, KeyPair, generate_pair
from pdtransfer.layout.layout import Component
from pdtransfer.limits import FRAME_BYTES_MAX
from pdtransfer.serve.process.setup import prepare
from pdtransfer.wire import (
    VERSION,
    Abort,
    Grant,
    Hello,
    Identity,
    Landed,
    Message,
    Part,
    Ping,
    Ranks,
    Reach,
    Register,
    Released,
    encode,
)

_PAUSE_SECONDS = 0.005
_PATIENCE_MS = 20
_TRICKLE_SECONDS = 0.2
_AT_ONCE = 20  # handshakes under way
_BURST = 64  # frames between two looks at the pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to attack, and with what: `guest` is a key on the list; `connections` is for attacks that hold many."""

    endpoint: str
    guest: KeyPair
    component: Component
    connections: int

    @property
    def address(self) -> tuple[str, int]:
        """Of the listener."""
        host, _, port = Endpoint.parse(self.endpoint).address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    @property
    def server_key(self) -> str:
        """The listener's."""
        return Endpoint.parse(self.endpoint).server_key or ""


class Line:
    """A DEALER to the target. It is opened anew where it was refused, since ZMQ itself gives up then."""

    def __init__(self, target: Target, keys: KeyPair | None, server_key: str) -> None:
        self._target, self._keys, self._server_key = target, keys, server_key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, _BURST)
        if self._keys is not None:
            self.socket.set(zmq.CURVE_SERVERKEY, self._server_key.encode())
            self.socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            self.socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self.socket.connect("tcp://{}:{}".format(*self._target.address))

    def send(self, frame: bytes) -> bool:
        """Sends if the queue has a place within a moment, and discards what has come. Returns whether it did."""
        with suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)
        if self.socket.poll(_PATIENCE_MS, zmq.POLLOUT):
            self.socket.send(frame)
            return True
        self.socket.close()
        self._open()
        return False


def no_key(target: Target) -> Iterator[int]:
    """Handshakes without CURVE."""
    yield from _handshakes(target, lambda: (None, ""))


def wrong_key(target: Target) -> Iterator[int]:
    """A listed key, for the key of another server."""
    stranger = generate_pair()
    yield from _handshakes(target, lambda: (target.guest, stranger.public))


def stranger(target: Target) -> Iterator[int]:
    """Right in everything, but not on the list; a new key each time."""
    yield from _handshakes(target, lambda: (generate_pair(), target.server_key))


def _handshakes(target: Target, keys: Callable[[], tuple[KeyPair | None, str]]) -> Iterator[int]:
    """One every _PAUSE_SECONDS; each stays as long as it takes to be refused."""
    hello, lines = encode(_hello("stranger")), deque[Line]()
    for number in itertools.count(1):
        lines.append(Line(target, *keys()))
        with suppress(zmq.Again):  # refused already
            lines[-1].socket.send(hello, zmq.NOBLOCK)
        if len(lines) > _AT_ONCE:
            lines.popleft().socket.close()
        time.sleep(_PAUSE_SECONDS)
        yield number


def replay(target: Target) -> Iterator[int]:
    """The bytes that a listed peer has sent, on connections of its own."""
    recorded, open_sockets = record(target), deque[socket.socket]()
    for number in itertools.count(1):
        if (connection := _connect(target)) is not None:
            _push(connection, recorded)
            open_sockets.append(connection)
        if len(open_sockets) > _AT_ONCE:
            open_sockets.popleft().close()
        time.sleep(_PAUSE_SECONDS)
        yield number


def record(target: Target) -> bytes:
    """The bytes of the guest's Hello and a Ping, with their handshake, as an eavesdropper records them."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        near = Target(
            endpoint=f"{target.server_key}@tcp://127.0.0.1:{between.getsockname()[1]}",
            guest=target.guest,
            component=target.component,
            connections=0,
        )
        line = Line(near, near.guest, near.server_key)
        line.send(encode(_hello("guest")))
        line.send(encode(Ping(1)))
        theirs, _ = between.accept()
        with theirs, socket.create_connection(target.address) as ours:
            recorded, until = bytearray(), time.monotonic() + 0.5
            while time.monotonic() < until:
                for source, sink in ((theirs, ours), (ours, theirs)):
                    source.settimeout(0.01)
                    with suppress(TimeoutError):
                        came = source.recv(1 << 16)
                        sink.sendall(came)
                        recorded += came if source is theirs else b""
        line.socket.close()
    return bytes(recorded)


def oversize(target: Target) -> Iterator[int]:
    """A listed key whose frames are longer than any may be; each ends its connection."""
    frame = bytes(FRAME_BYTES_MAX + 4_096)
    line = Line(target, target.guest, target.server_key)
    sent = 0
    while True:
        sent += line.send(frame)
        time.sleep(_PAUSE_SECONDS)
        yield sent


def slow(target: Target) -> Iterator[int]:
    """Handshakes of one byte now and then; a closed connection is opened again."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
    open_sockets: list[tuple[socket.socket, int]] = []
    count = min(target.connections, 500)
    for number in itertools.count(1):
        while len(open_sockets) < count and (connection := _connect(target)) is not None:
            open_sockets.append((connection, 0))
        open_sockets = [
            (connection, sent + 1)
            for connection, sent in open_sockets
            if _push(connection, greeting[sent % 64 : sent % 64 + 1])
        ]
        time.sleep(_TRICKLE_SECONDS)
        yield number * count


def junk(target: Target) -> Iterator[int]:
    """Very many connections that send random bytes and stay open; a closed one is opened again."""
    open_sockets: list[socket.socket] = []
    bytes_sent = 0
    while True:
        for _ in range(_BURST):
            if len(open_sockets) < target.connections and (connection := _connect(target)) is not None:
                bytes_sent += _push(connection, secrets.token_bytes(9 if bytes_sent % 2 else 40))
                open_sockets.append(connection)
        if len(open_sockets) >= target.connections:
            open_sockets = [connection for connection in open_sockets if _push(connection, b"")]
            time.sleep(_PAUSE_SECONDS)
            yield bytes_sent


def trespass(target: Target) -> Iterator[int]:
    """A listed key that grants, lands, aborts and registers what it may not, as fast as it can."""
    line = Line(target, target.guest, target.server_key)
    frames = [encode(message) for message in _trespasses(target.component)]
    hello = encode(_hello("guest"))
    sent = 0
    while True:
        sent += sum(line.send(frame) for frame in (hello, *frames))
        yield sent


def _trespasses(component: Component) -> list[Message]:
    somebodys = secrets.randbits(63) + 1
    parts = (Part(0, 0, 16, b"\0\0\0\0\x10\0\0\0"),)
    reach = Reach("shm", "elsewhere", "/run/docker.sock", bytes(32), 0, component.layout.end)
    return [
        Grant(somebodys, 1, 1, 16, 0, parts, send_aux=True, time_left_ms=1_000),
        Landed(somebodys, 1, 1, b""),
        Abort(somebodys, 1),
        Released(somebodys, 1),
        Register(somebodys, (component,), reach),
        Grant(somebodys, 1, 1, 16, 0, parts, send_aux=True, time_left_ms=1_000),
    ]


def flood(target: Target) -> Iterator[int]:
    """A listed key that sends pings as fast as it can: each is correct."""
    line, ping, hello = Line(target, target.guest, target.server_key), encode(Ping(1)), encode(_hello("guest"))
    sent = 0
    while True:
        sent += sum(line.send(frame) for frame in (hello, *[ping] * _BURST))
        yield sent


ATTACKS: dict[str, Callable[[Target], Iterator[int]]] = {
    attack.__name__: attack for attack in (no_key, wrong_key, stranger, replay, oversize, slow, trespass, flood, junk)
}


def give_way() -> None:
    """Takes only what processors others leave: an attacker has a host of its own. A kernel that shares them among
    sessions first, and only then by priority, needs a session of its own as well."""
    os.nice(19)
    with suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")


def run(pipe: Connection, name: str, target: Target) -> None:
    """Attacks until the pipe has a message. Reports first that it is under way, and at last how often it attacked."""
    give_way()
    prepare()
    attack = ATTACKS[name](target)
    done = next(attack)
    with suppress(OSError):  # the benchmark has ended
        pipe.send(None)
        while not pipe.poll():
            done = next(attack)
        pipe.send(done)


def _hello(node: str) -> Hello:
    return Hello(VERSION, VERSION, Identity(node, "decode", 1, Ranks(), "bench", b"", 64))


def _connect(target: Target) -> socket.socket | None:
    try:
        connection = socket.create_connection(target.address, timeout=1.0)
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def _push(connection: socket.socket, text: bytes) -> bool:
    """Sends; False, and closed, where the other side has hung up."""
    try:
        with suppress(BlockingIOError):
            if not connection.recv(1 << 12):
                raise ConnectionResetError
        if text:
            connection.send(text)
    except BlockingIOError:
        return True
    except OSError:
        connection.close()
        return False
    return True

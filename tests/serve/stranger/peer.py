"""A process on the bus: connections, Hello and Welcome, repetition, Ping (sections 1, 3 and 5, Repetition).

Without keys, on loopback. What a peer does beyond this is a method `on_<message>(link, fields)` of its subclass.
"""

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import zmq

from tests.serve.stranger.messages import read, write

RESEND_S, RESEND_S_MAX, PING_S = 0.2, 2.0, 0.5  # choices of a host
POLL_MS, PATIENCE_S = 10, 60.0
Fields = dict[str, Any]


class Unusable(Exception):
    """What the other side offers cannot be taken."""


def require(holds: object, text: str) -> None:
    if not holds:
        raise Unusable(text)


@dataclass(eq=False)
class Link:
    """One connection: one that this peer dialled, or one that another dialled (then a ROUTER names it by `routing`)."""

    socket: zmq.Socket
    routing: bytes | None = None
    endpoint: str = ""
    identity: Fields | None = None  # of the other side, once it has said it

    def send(self, message: str, **fields: Any) -> None:
        self.send_frame(write(message, **fields))

    def send_frame(self, frame: bytes) -> None:
        parts = [frame] if self.routing is None else [self.routing, frame]
        with suppress(zmq.Again):  # the bus may lose: whoever waits for an answer sends again
            self.socket.send_multipart(parts, zmq.DONTWAIT)


@dataclass
class Repeated:
    """A message that awaits its answer."""

    link: Link
    frame: bytes
    due: float
    wait_s: float = RESEND_S


@dataclass
class Peer:
    """Run it in a thread of its own: `with peer: ...`. An error in that thread is raised at the end of the context."""

    node: str
    role: str
    model: str = ""
    weights: bytes = b""
    identity: Fields = field(default_factory=dict)  # what is not as below
    rejects: list[Fields] = field(default_factory=list)  # that this peer was sent
    endpoint: str = ""

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.incarnation = secrets.randbits(64)
        self.identity = {
            "node": self.node, "role": self.role, "incarnation": self.incarnation, "ranks": {}, "model": self.model,
            "weights": self.weights, "window": 256, **self.identity,
        }  # fmt: skip
        self.dialled: dict[str, Link] = {}
        self.accepted: dict[bytes, Link] = {}
        self.repeated: dict[tuple, Repeated] = {}
        self.poller = zmq.Poller()
        self.watched: dict[Any, Callable[[], None]] = {}
        self.listener: zmq.Socket | None = None
        self.ping_due = 0.0
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name=self.node)

    # Connections

    def listen(self) -> None:
        self.listener = self.context.socket(zmq.ROUTER)
        self.listener.linger = 0
        port = self.listener.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.watch(self.listener, self._accept)

    def dial(self, endpoint: str) -> Link:
        """The connection to a listener; its `identity` is None until it is welcome."""
        if endpoint not in self.dialled:
            socket = self.context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(endpoint)
            link = self.dialled[endpoint] = Link(socket, endpoint=endpoint)
            self.watch(socket, lambda: self._receive(link, socket.recv_multipart()))
            self._hello(link)
        return self.dialled[endpoint]

    def _hello(self, link: Link) -> None:
        self.repeat(("Hello", link.endpoint), link, "Hello", version_min=1, version_max=1, identity=self.identity)

    def _accept(self) -> None:
        routing, *frames = self.listener.recv_multipart()
        link = self.accepted.setdefault(routing, Link(self.listener, routing))
        self._receive(link, frames)

    def _receive(self, link: Link, frames: list[bytes]) -> None:
        if len(frames) != 1:
            return  # a message of more frames must be dropped
        message, fields = read(frames[0])
        if link.identity is None and message not in ("Hello", "Welcome", "Reject"):
            link.send("Reject", session=0, reason="hello_required", fields=[])
            return
        handler = "on_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", message).lower()
        getattr(self, handler)(link, fields)

    # What every role does with what it receives

    def on_hello(self, link: Link, hello: Fields) -> None:
        if not hello["version_min"] <= 1 <= hello["version_max"]:
            line = f"versions {hello['version_min']} to {hello['version_max']}: this peer speaks 1 to 1"
            link.send("Reject", session=0, reason="refused", fields=[line])
            return
        link.identity = hello["identity"]
        link.send("Welcome", version=1, identity=self.identity)
        self.on_greeted(link)

    def on_welcome(self, link: Link, welcome: Fields) -> None:
        self.answered(("Hello", link.endpoint))
        if link.identity is None:
            link.identity = welcome["identity"]
            self.on_greeted(link)

    def on_greeted(self, link: Link) -> None:
        """Both sides know each other."""

    def on_reject(self, link: Link, reject: Fields) -> None:
        self.rejects.append(reject)
        if reject["session"] == 0 and reject["reason"] == "hello_required" and link.endpoint:
            self._hello(link)

    def on_ping(self, link: Link, ping: Fields) -> None:
        link.send("Pong", incarnation=self.incarnation)

    def on_pong(self, link: Link, pong: Fields) -> None:
        pass

    def on_goodbye(self, link: Link, goodbye: Fields) -> None:
        pass

    # Repetition

    def repeat(self, key: tuple, link: Link, message: str, **fields: Any) -> None:
        """Sends it now, and again until `answered(key)`."""
        frame = write(message, **fields)
        self.repeated[key] = Repeated(link, frame, time.monotonic() + RESEND_S)
        link.send_frame(frame)

    def answered(self, key: tuple) -> bool:
        """Whether this was the first answer."""
        return self.repeated.pop(key, None) is not None

    def tick(self, now: float) -> None:
        for each in self.repeated.values():
            if now >= each.due:
                each.link.send_frame(each.frame)
                each.wait_s = min(2 * each.wait_s, RESEND_S_MAX)
                each.due = now + each.wait_s
        if now >= self.ping_due:
            self.ping_due = now + PING_S
            for link in self.dialled.values():  # who was dialled need not ping
                if link.identity is not None:
                    link.send("Ping", incarnation=self.incarnation, **self.ping_fields(link))

    def ping_fields(self, link: Link) -> Fields:
        return {}

    # The loop

    def watch(self, file: Any, ready: Callable[[], None]) -> None:
        """Calls `ready` whenever a socket has something to read."""
        self.poller.register(file, zmq.POLLIN)
        self.watched[file if isinstance(file, zmq.Socket) else file.fileno()] = ready

    def call(self, order: Callable[[], None]) -> None:
        """Has the peer's thread run it: for other threads."""
        self._orders.put(order)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for file, _ in self.poller.poll(POLL_MS):
                    self.watched[file]()
                while not self._orders.empty():
                    self._orders.get()()
                self.tick(time.monotonic())
        except Exception as error:  # noqa: BLE001 (for the thread that waits)
            self._error = error

    def wait(self, event: threading.Event, what: str) -> None:
        """For another thread: until it is set, the peer's thread has failed, or patience has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not event.wait(POLL_MS / 1e3):
            self.check()
            require(time.monotonic() < deadline, f"{self.node} waits in vain: {what}")

    def check(self) -> None:
        """Raises what has ended the peer's thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Once the thread has ended."""
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.close()
        self.check()

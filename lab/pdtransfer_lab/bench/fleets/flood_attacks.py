"""Hostile processes for `floods`: each floods one listener with all it can send for as long as its pipe is open."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import zmq

from pdtransfer.bus.keys import KeyPair
from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.wire import VERSION, Goodbye, Hello, Identity, Ping, Pong, Ranks, Reject, Welcome, encode

from .attacks import give_way

Role = Literal["prefill", "decode", "router"]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_READY_BODY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_READY = bytes((4, len(_READY_BODY))) + _READY_BODY
_ANSWER_S = 0.005  # for an answer to what was sent on a connection
_LINES = 8  # connections of one attacker that stay
_BURST = 64  # frames between two looks at the pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodTarget:
    """A listener of this host, its public key, and the key that the attacker may use: both empty without keys. A
    router's is that of its HTTP clients."""

    port: int
    role: str  # of the process that listens
    server_key: str = ""
    guest: KeyPair | None = None


def junk(target: FloodTarget) -> Iterator[int]:
    """Connections that shake hands, send frames of junk and end at once, one after the other."""
    frames = b"".join(bytes((0, 9)) + secrets.token_bytes(9) for _ in range(4))
    for number in itertools.count(1):
        _strike(target, frames)
        yield number


def junk_lines(target: FloodTarget) -> Iterator[int]:
    """Junk on connections that stay, as fast as they take it."""
    yield from _send_frames(target, [b"\xc1" * 9, b"\x93\x01\x01", secrets.token_bytes(200)])


def hellos(target: FloodTarget) -> Iterator[int]:
    """Hellos of ever new nodes, each on a connection of its own that ends at once."""
    for number in itertools.count(1):
        frame = encode(_hello(f"flood-{secrets.token_hex(4)}", "decode" if target.role == "prefill" else "router"))
        _strike(target, bytes((2, *struct.pack(">Q", len(frame)))) + frame)
        yield number


def hello_lines(target: FloodTarget) -> Iterator[int]:
    """Hellos on connections that stay, as fast as they take them."""
    hello = _hello(f"flood-{secrets.token_hex(4)}", "decode" if target.role == "prefill" else "router")
    yield from _send_frames(target, [encode(hello)])


def connections(target: FloodTarget) -> Iterator[int]:
    """Connections that are made and left, as fast as they are accepted."""
    for number in itertools.count(1):
        _strike(target, b"")
        yield number


def other_role(target: FloodTarget) -> Iterator[int]:
    """A listed key that sends Hello in roles that are not its own, and sends what only they may."""
    roles: tuple[Role, ...] = ("router", "prefill", "decode")
    frames = [encode(_hello("guest", role)) for role in roles]
    more = (Ping(1), Pong(1), Reject(0, "breach", ()), Goodbye(1, "shutdown"))
    frames += [encode(message) for message in more]
    frames.append(encode(Welcome(VERSION, _hello("guest", "prefill").identity)))
    yield from _send_frames(target, frames)


def busy(target: FloodTarget) -> Iterator[int]:  # noqa: ARG001
    """No attack: eight threads of other programs on each processor, at the same priority."""
    for _ in range(4 * (os.cpu_count() or 1)):
        if os.fork() == 0:
            parent = os.getppid()
            while os.getppid() == parent:
                sum(range(100_000))
            os._exit(0)
    for number in itertools.count(1):
        time.sleep(0.1)
        yield number


def nested_prompts(target: FloodTarget) -> Iterator[int]:
    """Bodies of the largest size to the router, one after the other: a list of very many prompts."""
    return _posted(target, "/v1/completions", _of_size(b'{"prompt":[', b"[1],", b"[1]]}"))


def nested_sampling(target: FloodTarget) -> Iterator[int]:
    """The same to a router in front of SGLang: very many lists in the sampling parameters."""
    return _posted(target, "/generate", _of_size(b'{"text":"a","sampling_params":[', b"[[]],", b"[]]}"))


def largest_prompts(target: FloodTarget) -> Iterator[int]:
    """Bodies of the largest size that are right: lists of ids, some fifty prompts."""
    prompt = b"[" + b"1000," * 30_000 + b"1],"
    return _posted(target, "/v1/completions", _of_size(b'{"max_tokens":1,"prompt":[', prompt, prompt[:-1] + b"]}"))


def largest_relayed(target: FloodTarget) -> Iterator[int]:
    """Bodies of the largest size that are right, to a router in front of SGLang."""
    return _posted(target, "/v1/completions", _of_size(b'{"prompt":"a","x":[', b'{"a":[1]},', b"1]}"))


def _of_size(head: bytes, item: bytes, tail: bytes) -> bytes:
    return head + item * ((HTTP_BODY_BYTES_MAX - len(head) - len(tail)) // len(item)) + tail


def _posted(target: FloodTarget, path: str, body: bytes) -> Iterator[int]:
    """One request after the other, and the answer to each."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    for number in itertools.count(1):
        try:
            with socket.create_connection(("127.0.0.1", target.port), timeout=30.0) as connection:
                connection.sendall(request)
                while connection.recv(65_536):
                    pass
        except OSError:
            time.sleep(0.01)
        yield number


KEYLESS: dict[str, Callable[[FloodTarget], Iterator[int]]] = {
    attack.__name__: attack for attack in (junk, junk_lines, hellos, hello_lines, connections, busy)
}
# Of the router's own clients, by the engine that it stands in front of; "pdtransfer" is the fleet of the others.
CLIENTS: dict[str, dict[str, Callable[[FloodTarget], Iterator[int]]]] = {
    "pdtransfer": {attack.__name__: attack for attack in (nested_prompts, largest_prompts)},
    "sglang": {attack.__name__: attack for attack in (nested_sampling, largest_relayed)},
}
KEYED = {attack.__name__: attack for attack in (other_role, hello_lines, junk, connections)}


def run(pipe: Connection, name: str, target: FloodTarget) -> None:
    """Attacks until the pipe has a message. Reports first that it is under way, and at last how often it attacked."""
    if name != busy.__name__:
        give_way()
    done, attack = 0, (KEYLESS | KEYED | CLIENTS["pdtransfer"] | CLIENTS["sglang"])[name](target)
    with suppress(OSError):  # the benchmark has ended
        pipe.send(None)
        while not pipe.poll():
            done = next(attack)
        pipe.send(done)


def _hello(node: str, role: Role) -> Hello:
    return Hello(VERSION, VERSION, Identity(node, role, 1, Ranks(), "paced", b"paced", 64))


def _strike(target: FloodTarget, data: bytes) -> None:
    """One connection that sends this and ends by a reset. Without data it does not even greet."""
    try:
        with socket.create_connection(("127.0.0.1", target.port), timeout=1.0) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if data:
                connection.sendall(_GREETING + _READY)
                received = 0
                # What comes with or before its READY is an error of ZMQ's, and none of the frames would be read.
                while received <= len(_GREETING):
                    if not (received_bytes := connection.recv(1_024)):
                        return
                    received += len(received_bytes)
                connection.sendall(data)
                connection.settimeout(_ANSWER_S)  # a reset takes back what has not been read
                with suppress(TimeoutError):
                    connection.recv(1_024)
    except OSError:
        time.sleep(0.001)


def _send_frames(target: FloodTarget, frames: list[bytes]) -> Iterator[int]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def opened() -> zmq.Socket[bytes]:
        line = context.socket(zmq.DEALER)
        line.set(zmq.LINGER, 0)
        line.set(zmq.SNDHWM, _BURST)
        if target.guest is not None:
            line.set(zmq.CURVE_SERVERKEY, target.server_key.encode())
            line.set(zmq.CURVE_PUBLICKEY, target.guest.public.encode())
            line.set(zmq.CURVE_SECRETKEY, target.guest.secret.encode())
        line.connect(f"tcp://127.0.0.1:{target.port}")
        return line

    lines, sent = [opened() for _ in range(_LINES)], 0
    while True:
        before = sent
        for index, line in enumerate(lines):
            with suppress(zmq.Again):
                while True:
                    line.recv(zmq.NOBLOCK)
            try:
                for _ in range(_BURST):
                    line.send(frames[sent % len(frames)], zmq.NOBLOCK)
                    sent += 1
            except zmq.Again:
                if not line.poll(20, zmq.POLLOUT):  # refused, perhaps: ZMQ itself gives up then
                    line.close()
                    lines[index] = opened()
        if sent == before:
            time.sleep(0.001)
        yield sent

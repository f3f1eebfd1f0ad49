"""A process with a bus, for what would abort it.

`python -m tests.library.bus.doomed_bus SETTINGS` reads and writes lines of JSON.
It stands still at the first Hello, until all of that connection's bytes are read, and again until ZMQ has on_event the
connection's end: what happens between is in ZMQ's own thread alone, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from pdtransfer.bus import Bus, BusLimits, bus, dialled, zap
from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.bus.sockets import TcpConnection, received_bytes
from pdtransfer.wire import Message, Ping, Pong
from tests.support.bus_peers import hello
from tests.support.internals import connections_of, dialled_by, routes_of


def send(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def receive() -> Any:
    return json.loads(sys.stdin.readline())


def is_watched(fd: int) -> bool:
    for epoll in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            watched = [line.split()[1] for line in epoll.read_text().splitlines() if line.startswith("tfd:")]
            if str(fd) in watched:
                return True
    return False


def unread_in_kernel(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def stand_still(node: Bus) -> None:
    wires = [each.tcp for each in connections_of(node)] + [each._tcp for each in dialled_by(node).values()]
    if wires[0] is None:  # a first message may be read before the monitor's word of the connection that it came on
        asyncio.get_running_loop().call_soon(stand_still, node)
    else:
        stand_still_on(wires[0])


def stand_still_on(tcp: TcpConnection) -> None:
    send(step="standing still")
    expected = receive()["bytes"]
    while (received_bytes(tcp.fd) or 0) < expected or unread_in_kernel(tcp.fd):
        time.sleep(0.001)
    send(step="read")
    while is_watched(tcp.fd):
        time.sleep(0.001)
    send(step="ended")
    receive()


def open_as(settings: dict[str, Any]) -> None:
    """Gives sockets what they had before."""
    real = bus.open_socket

    def opened(*args: Any) -> zmq.Socket[bytes]:
        socket = real(*args)
        for name, value in settings["options"].items():
            socket.set(getattr(zmq, name), value)
        return socket

    bus.open_socket = dialled.open_socket = opened


def name_as(settings: dict[str, Any]) -> None:
    """Leaves some handshakes, in their order, without a routing id of ours."""
    real, named = zap._property, iter(settings["named"])
    zap._property = lambda name, value: real(name, value) if next(named, True) else b""


async def main(settings: dict[str, Any]) -> None:
    stood = not settings["stands_still"]
    keys = settings.get("keys")

    def receive(peer: str, message: Message) -> None:
        nonlocal stood
        if not stood:
            stood = True
            stand_still(node)
        if type(message) is Ping:
            node.send(peer, Pong(message.incarnation))
        number = message.incarnation if type(message) is Ping else 0
        send(step="received", number=number, route=b"".join(routes_of(node, peer)).hex())

    node = Bus(
        node="doomed", keys=KeyPair(**keys["own"]) if keys else None,
        allowed=AllowList(keys["allowed"]) if keys else None, receive=receive, refused=lambda *_: None,
        limits=replace(BusLimits(), naming_ms=500, redial_ms=60_000, redial_ms_max=60_000, unread_frames_max=1 << 20),
    )  # fmt: skip
    if settings["dials"]:
        node.send(node.dial(settings["dials"], "prefill"), hello("doomed"))
    else:
        send(step="bound", endpoint=await node.bind("tcp://127.0.0.1:0"))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read) if keys else await asyncio.sleep(60)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    open_as(given)
    name_as(given)
    asyncio.run(main(given))

"""Situations in which libzmq 4.3.5 aborts its process, and the bus's measures against each.

Each test runs a process of its own. Without the measure, the same process must die.
"""

from __future__ import annotations

import json
import signal
import socket as tcp
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from pdtransfer.wire import Ping, Pong, decode, encode
from tests.library.bus.zmtp import PING, Zmtp, frame
from tests.support.bus_peers import Context, Raw, hello, pair

BEFORE = {"RCVHWM": 256, "HEARTBEAT_IVL": 200, "HEARTBEAT_TIMEOUT": 60_000}  # socket options before the fix
WITH_THE_BUG = pytest.mark.skipif(zmq.zmq_version_info() > (4, 3, 5), reason="this libzmq may have it mended")


class Doomed:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait_for(self, step: str, **fields: Any) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if message["step"] == step and fields.items() <= message.items():
                return message
        raise AssertionError(f"it died with status {self.process.wait(30)} before {step}")

    def send(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    @property
    def has_aborted(self) -> bool:
        return self.process.wait(30) == -signal.SIGABRT


@contextmanager
def doomed(**settings: Any) -> Iterator[Doomed]:
    given = {"options": {}, "named": [], "dials": "", "stands_still": True} | settings
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.library.bus.doomed_bus", json.dumps(given)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Doomed(process)
    finally:
        process.kill()
        process.communicate()


class Attack:
    """Fills the receive queue, optionally with ZMTP's PING behind it, and resets the connection."""

    def __init__(self, way: str, *, pings: bool = True, **options: int) -> None:
        self.way, self.options = way, options
        self.text = frame(encode(Ping(1))) * 400 + (PING if pings else b"") + frame(encode(Ping(2))) * 10

    def __enter__(self) -> Doomed:
        self.listener = tcp.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        dials = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}" if self.way == "dials" else ""
        self.running = doomed(options=self.options, dials=dials)
        process = self.running.__enter__()
        self.port = 0 if dials else int(process.wait_for("bound")["endpoint"].rpartition(":")[2])
        peer = self.connect()
        opening = frame(encode(hello("peer")))
        peer.send(opening)
        process.wait_for("standing still")
        peer.send(self.text)
        process.send(bytes=len(opening + self.text))
        process.wait_for("read")
        peer.reset()
        if "HEARTBEAT_IVL" not in self.options:  # then it may have died already
            process.wait_for("ended")
        return process

    def connect(self) -> Zmtp:
        return Zmtp(self.port) if self.port else Zmtp(made=self.listener.accept()[0])

    def __exit__(self, *error: Any) -> None:
        self.running.__exit__(*error)
        self.listener.close()


@pytest.mark.parametrize("way", ["binds", "dials"])
def test_a_closed_connection_with_an_unread_ping_aborts_no_process(way: str) -> None:
    """libzmq#3937: a full queue, a closed connection, and then a write on it."""
    attack = Attack(way)
    with attack as process:
        process.send(step="go on")
        process.wait_for("received", number=1)
        with attack.connect() as again:
            again.send(frame(encode(hello("peer"))) + frame(encode(Ping(3))))
            process.wait_for("received", number=3)


@WITH_THE_BUG
@pytest.mark.parametrize("way", ["binds", "dials"])
def test_with_a_bounded_queue_a_ping_of_the_peers_aborts_the_process(way: str) -> None:
    with Attack(way, RCVHWM=256) as process:
        process.send(step="go on")
        assert process.has_aborted


@WITH_THE_BUG
@pytest.mark.parametrize("way", ["binds", "dials"])
def test_with_a_bounded_queue_our_own_heartbeats_abort_the_process(way: str) -> None:
    """A prefill that was stopped for some seconds and then continued died this way in every run."""
    with Attack(way, pings=False, **BEFORE) as process:
        assert process.has_aborted


@pytest.mark.parametrize("named", [pytest.param(True), pytest.param(False, marks=WITH_THE_BUG)])
def test_choosing_the_next_routing_id_aborts_no_process(named: bool, context: Context) -> None:
    own, listed = pair(), [pair() for _ in range(3)]
    keys = {
        "own": {"public": own.public, "secret": own.secret},
        "allowed": {each.public: f"peer-{number}" for number, each in enumerate(listed)},
    }
    # The first and the last have ids of the ROUTER's own, as if the authenticator answered too late.
    with doomed(stands_still=False, named=[False, named, False], keys=keys) as process:
        bound = process.wait_for("bound")["endpoint"]
        first = Raw(context, bound, keys=listed[0], server=own.public)
        first.send(hello("first"))
        count = int.from_bytes(bytes.fromhex(process.wait_for("received")["route"])[1:], "big")
        following = b"\0" + ((count + 1) % (1 << 32)).to_bytes(4, "big")
        squatter = Raw(context, bound, keys=listed[1], server=own.public, routing_id=following)
        squatter.send(hello("squatter"))
        process.wait_for("received")
        newcomer = Raw(context, bound, keys=listed[2], server=own.public)
        newcomer.send(hello("newcomer"), Ping(1))
        if named:
            process.wait_for("received", number=1)
            assert newcomer.socket.poll(30_000)
            assert decode(newcomer.socket.recv()) == Pong(1)
        else:
            assert process.has_aborted

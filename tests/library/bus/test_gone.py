"""Evidence that a peer is gone: what the kernel says of it, and what it does not say."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from pdtransfer.bus.gone import ENDED, UNACKNOWLEDGED, AbsentPeers
from pdtransfer.bus.line import OPENING
from tests.support.bus_peers import ANY_PORT, LIMITS, Node, rebind
from tests.support.internals import dialled_by
from tests.support.waiting import until

QUICK = replace(LIMITS, audit_ms=20)
pytestmark = pytest.mark.given(limits=QUICK)
LISTENER = """
import asyncio
from tests.support.bus_peers import ANY_PORT, Node
async def main():
    node = Node("p")
    print(await node.bus.bind(ANY_PORT), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Process:
    """A listener in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def test_a_listener_that_is_killed_is_gone_and_its_successor_is_not(decode_node: Node) -> None:
    with Process() as prefill:
        peer = await decode_node.meet(prefill.endpoint, "d")
        await decode_node.ping(peer, 1)
        assert decode_node.gone == {}
        os.kill(prefill.process.pid, signal.SIGKILL)
        await until(lambda: decode_node.gone == {peer: "nothing listens there"})
    async with Node("p") as successor:
        await rebind(successor, prefill.endpoint)
        await until(lambda: decode_node.gone == {})


async def test_a_listener_that_is_frozen_is_not_gone_even_where_its_connection_ends(decode_node: Node) -> None:
    with Process() as prefill:
        peer = await decode_node.meet(prefill.endpoint, "d")
        await decode_node.ping(peer, 1)
        os.kill(prefill.process.pid, signal.SIGSTOP)
        dialled = dialled_by(decode_node.bus)[peer]
        assert dialled._tcp is not None
        dialled._tcp.end()  # as after a reset on the way; its kernel accepts the next one
        await until(lambda: not dialled.connected)
        for _ in range(50):
            await asyncio.sleep(QUICK.audit_ms / 1e3)
            assert decode_node.gone == {}


async def test_a_dialler_that_is_gone_is_known_to_its_listener_and_one_that_is_back_is_not(prefill: Node) -> None:
    bound = await prefill.bus.bind(ANY_PORT)
    first = Node("d")
    await first.ping(await first.meet(bound, "d"), 1)
    await first.bus.close()
    await until(lambda: prefill.gone == {"node:d": ENDED.text})
    async with Node("d") as second:
        await second.ping(await second.meet(bound, "d"), 2)
        await until(lambda: prefill.gone == {})


async def test_a_dialler_whose_connection_ends_and_whose_line_stands_is_not_gone(prefill: Node) -> None:
    bound = await prefill.bus.bind(ANY_PORT)
    first = Node("d")
    await first.ping(await first.meet(bound, "d"), 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.send(OPENING)
    prefill.bus.attach("node:d", 7, ours, greeted=False)
    await first.bus.close()
    for _ in range(50):
        await asyncio.sleep(QUICK.audit_ms / 1e3)
        assert prefill.gone == {}
    theirs.close()
    await until(lambda: prefill.gone == {"node:d": ENDED.text})


async def test_an_endpoint_where_nothing_listens_is_gone_from_the_start(decode_node: Node) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    peer = decode_node.bus.dial(f"tcp://127.0.0.1:{port}", "prefill")
    await until(lambda: decode_node.gone == {peer: "nothing listens there"})


def test_a_connection_that_the_kernel_ended_for_want_of_an_answer_proves_nothing_about_the_process() -> None:
    class Tcp:
        is_open, silent = True, True

        def unacknowledged(self, _: object) -> bool:
            return self.silent

    class Connection:
        name, tcp = "node:d", Tcp()

    absent, connection = AbsentPeers(QUICK), Connection()
    assert absent.check([connection], lambda _: False, 0.0) == {"node:d": UNACKNOWLEDGED}
    connection.tcp.is_open = False
    assert absent.check([connection], lambda _: False, 1.0) == {"node:d": UNACKNOWLEDGED}
    assert absent.check([], lambda _: False, 2.0) == {"node:d": UNACKNOWLEDGED}
    absent.back("node:d")
    assert absent.check([], lambda _: False, 2.0) == {}


def test_a_peer_that_goes_on_by_another_connection_is_not_gone() -> None:
    class Tcp:
        def __init__(self, *, is_open: bool) -> None:
            self.is_open = is_open

        def unacknowledged(self, _: object) -> bool:
            return False

    class Connection:
        name = "node:d"

        def __init__(self, *, is_open: bool) -> None:
            self.tcp = Tcp(is_open=is_open)

    absent, ended, stands = AbsentPeers(QUICK), Connection(is_open=False), Connection(is_open=True)
    assert absent.check([ended], lambda _: False, 0.0) == {"node:d": ENDED}
    assert absent.check([ended, stands], lambda _: False, 1.0) == {}
    assert absent.check([ended], lambda _: False, 2.0) == {"node:d": ENDED}


def test_few_absent_peers_are_kept_and_none_for_long() -> None:
    absent = AbsentPeers(replace(QUICK, named_max=2))
    for number in range(4):
        absent.end(f"node:{number}", 0.0)
    assert absent.check([], lambda _: False, 0.1) == {"node:2": ENDED, "node:3": ENDED}
    assert absent.check([], lambda _: False, QUICK.absent_kept_ms / 1e3) == {}


async def test_a_host_that_acknowledges_is_not_gone(prefill: Node, decode_node: Node) -> None:
    peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
    await decode_node.ping(peer, 1)
    tcp = dialled_by(decode_node.bus)[peer]._tcp
    assert tcp is not None
    assert not tcp.unacknowledged(replace(QUICK, unacknowledged_ms=0))
    assert not tcp.unacknowledged(replace(QUICK, unacknowledged_ms=0)), "nothing is repeated"

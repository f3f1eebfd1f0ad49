"""The bus reconnects after outages, refusals and moves, logs the reason, and releases everything on close."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as tcp
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import zmq

from pdtransfer.bus.sockets import resolve
from pdtransfer.wire import Goodbye, Ping, Reject
from tests.support.bus_peers import ANY_PORT, LIMITS, Context, Listening, Node, hello, pair, rebind
from tests.support.internals import dialled_by
from tests.support.waiting import until


async def test_a_restarted_listener_receives_hello_first_and_nothing_stale(decode_node: Node) -> None:
    first = Node("p")
    bound = await first.bus.bind(ANY_PORT)
    peer = await decode_node.meet(bound, "d")
    await decode_node.ping(peer, 1)
    await first.bus.close()
    await until(lambda: not decode_node.bus.send(peer, Ping(2)))
    async with Node("p") as second:
        assert await second.bus.bind(bound) == bound
        await until(lambda: bool(second.received))
        await decode_node.ping(peer, 3)
        # A busy machine may have Hello sent again; what was sent between the two listeners never comes.
        opening, *more = second.received
        assert opening == ("node:d", hello("d"))
        assert next(each for each in more if each != opening) == ("node:d", Ping(3))


async def test_hello_is_sent_again_to_a_listener_that_forgot_it(prefill: Node, decode_node: Node) -> None:
    peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
    await decode_node.ping(peer, 1)
    prefill.bus.hang_up("node:d")
    assert not prefill.bus.send("node:d", Ping(9))
    prefill.received.clear()
    await decode_node.ping(peer, 2)
    assert prefill.received[0] == ("node:d", hello("d"))
    assert not [message for _, message in decode_node.received if isinstance(message, Reject)]


async def test_unread_messages_of_a_closed_peer_are_dropped_silently(it: Listening) -> None:
    raw = it.raw()
    raw.send(hello("d"))
    await until(lambda: it.node.received == [("node:d", hello("d"))])
    raw.send(*(Ping(number) for number in range(100)))
    raw.socket.close(linger=10_000)
    while it.node.bus.send("node:d", Goodbye(7, "shutdown")):
        time.sleep(0.001)  # noqa: ASYNC251 - so that the loop reads none of them before
    await until(lambda: it.node.bus.dropped >= 101)
    assert len(it.node.received) == 1
    assert (it.node.refusals, it.node.bus.refused) == ([], 0)
    again = it.raw()
    again.send(Ping(1))
    assert isinstance(await again.receive(), Reject)  # a new connection still gets the reject "Hello first"
    again.send(hello("d"))
    await until(lambda: len(it.node.received) == 2)


@pytest.mark.parametrize("at_first", ["does not list us", "has no keys"])
async def test_an_endpoint_that_refused_us_is_dialled_until_it_accepts(at_first: str, context: Context) -> None:
    p, d = pair(), pair()
    router = context.socket(zmq.ROUTER)
    if at_first == "does not list us":
        unlisted = Node("p", p, {})
        bound = await unlisted.bus.bind(ANY_PORT)
    else:
        bound = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    async with Node("d", d, {"p": p}) as decode_node:
        peer = decode_node.bus.dial(f"{p.public}@{bound}", "prefill")
        assert not decode_node.bus.send(peer, hello("d"))
        if at_first == "does not list us":
            await until(lambda: unlisted.bus.strangers > 0)
            await unlisted.bus.close()
        else:
            await until(lambda: dialled_by(decode_node.bus)[peer]._attempt > 0)
        router.close()
        async with Node("p", p, {"d": d}) as prefill:
            await rebind(prefill, bound)
            await decode_node.ping(peer, 1)
            assert prefill.received[0] == ("key:d", hello("d"))


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        ("nobody", "nothing listens there"),
        ("does not list us", "it refused the key of this node; is it on the allow-list there?"),
        ("has another key", "it closed the connection in the handshake; is its key the one given?"),
        ("has no keys", "protocol mismatch; does only one side have keys?"),
    ],
)
async def test_the_log_gives_the_reason_for_a_missing_connection(
    listener: str, text: str, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    p, d, other = pair(), pair(), pair()
    limits = replace(LIMITS, redial_ms_max=60_000)
    own = p if listener == "does not list us" else other
    async with Node("p", own, {}) as prefill, Node("d", d, {"p": p}, limits) as node:
        bound = await prefill.bus.bind(ANY_PORT)
        if listener == "nobody":
            await prefill.bus.close()
        elif listener == "has no keys":
            keyless = context.socket(zmq.ROUTER)
            bound = f"tcp://127.0.0.1:{keyless.bind_to_random_port('tcp://127.0.0.1')}"
        node.bus.dial(f"{p.public}@{bound}", "prefill")
        # A first attempt may be closed before its handshake.
        await until(lambda: text in caplog.text)
        assert f"no connection to {p.public}@{bound}: " in caplog.text


@pytest.mark.given(limits=replace(LIMITS, redial_ms=10, redial_ms_max=40))
async def test_an_outage_is_logged_a_bounded_number_of_times(
    decode_node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Node("p")
    bound = await listener.bus.bind(ANY_PORT)
    await listener.bus.close()
    dialled = dialled_by(decode_node.bus)[decode_node.bus.dial(bound, "prefill")]
    await until(lambda: dialled._attempt > 5)
    assert caplog.text.count("no connection") == 2  # after the first two waits
    async with Node("p") as listener:
        await rebind(listener, bound)
        await decode_node.ping(await decode_node.meet(bound, "d") if not dialled.connected else bound, 1)
    await until(lambda: dialled._attempt > 10)
    assert caplog.text.count("no connection") == 4


@pytest.mark.given(limits=replace(LIMITS, redial_ms=20, redial_ms_max=40))
async def test_nothing_is_dialled_after_hanging_up(decode_node: Node, caplog: pytest.LogCaptureFixture) -> None:
    peer = decode_node.bus.dial("tcp://127.0.0.1:9", "prefill")
    dialled = dialled_by(decode_node.bus)[peer]
    await asyncio.sleep(0.01)
    decode_node.bus.hang_up(peer)
    before = dialled._attempt, caplog.text  # none left, unless this sleep took twice as long
    await asyncio.sleep(0.1)
    assert (dialled._attempt, caplog.text) == before
    assert not dialled.connected


async def test_names_resolve_to_ipv4_first() -> None:
    async def answer(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(0, 0, 0, "", (address, 0)) for address in ("::1", "127.0.0.1", "::1", "127.0.0.2")]

    loop = SimpleNamespace(getaddrinfo=answer)
    assert await resolve(loop, "prefill-0.kv") == ["127.0.0.1", "127.0.0.2", "::1"]


async def test_every_address_of_a_name_is_dialled_and_the_name_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def answer(_: object, host: str) -> list[str]:
        asked.append(host)
        if len(asked) == 1:
            raise tcp.gaierror(tcp.EAI_NONAME, "not yet")
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr("pdtransfer.bus.dialled.resolve", answer)
    async with Node("p") as prefill, Node("d") as decode_node:
        port = (await prefill.bus.bind(ANY_PORT)).rpartition(":")[2]
        peer = await decode_node.meet(f"tcp://prefill-0.kv:{port}", "d")
        await decode_node.ping(peer, 1)
        assert set(asked) == {"prefill-0.kv"}
        assert len(asked) >= 2


async def test_descriptors_and_threads_return_after_close() -> None:
    p, d = pair(), pair()

    async def life() -> None:
        async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
            peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "d")
            decode_node.bus.dial(f"{p.public}@tcp://127.0.0.1:9", "prefill")
            decode_node.bus.dial(f"{p.public}@tcp://localhost:9", "prefill")
            await decode_node.ping(peer, 1)
            await asyncio.sleep(0.25)  # the unreachable endpoints are dialled again
            decode_node.bus.hang_up(peer)
            decode_node.bus.hang_up(peer)
        await prefill.bus.close()

    await life()
    await until(lambda: threads_of("ZMQ") == 0)  # a joined thread stays visible for a moment
    # A lookup of "localhost" that was under way at the close may have its file open still: at most one.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await life()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before and threads_of("ZMQ") == 0)


def threads_of(prefix: str) -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read())
    return sum(name.startswith(prefix) for name in names)

"""The bus between legitimate peers, over real sockets on loopback: order, names, keys, binding."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as tcp
from dataclasses import replace

import pytest
import zmq

from pdtransfer.bus.connections import TurnedAwayError
from pdtransfer.bus.keys import KeyPair
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import FRAME_BYTES_MAX
from pdtransfer.wire import Goodbye, Grant, Message, Part, Ping, Pong, Reject, encode
from tests.support.bus_peers import ANY_PORT, LARGE, LIMITS, Context, Listening, Node, Raw, hello, pair
from tests.support.waiting import until


async def test_messages_pass_both_ways_in_order_under_the_nodes_name(prefill: Node, decode_node: Node) -> None:
    peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d0")
    for number in range(1, 501):
        assert decode_node.bus.send(peer, Ping(number))
    await until(lambda: len(decode_node.received) == 500)
    assert prefill.received == [("node:d0", hello("d0")), *(("node:d0", Ping(n)) for n in range(1, 501))]
    assert decode_node.received == [(peer, Pong(n)) for n in range(1, 501)]
    assert (prefill.bus.received, prefill.bus.sent) == (501, 500)
    assert (decode_node.bus.received, decode_node.bus.sent) == (500, 500)


async def test_the_first_dial_starts_no_thread(prefill: Node, decode_node: Node) -> None:
    endpoint, before = await prefill.bus.bind(ANY_PORT), os.listdir("/proc/self/task")
    await decode_node.meet(endpoint, "d0")
    assert set(os.listdir("/proc/self/task")) <= set(before)


async def test_with_keys_a_peer_is_the_allow_lists_name_whatever_its_hello_names() -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"decode-7": d}) as prefill, Node("d", d, {"prefill-1": p}) as decode_node:
        peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "somebody-else")
        await decode_node.ping(peer, 1)
        assert {name for name, _ in prefill.received} == {"key:decode-7"}
        assert peer.startswith(p.public)


async def test_the_address_of_a_peer_is_that_of_its_connection_and_none_once_it_has_none() -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"decode-7": d}) as prefill:
        async with Node("d", d, {"prefill-1": p}) as decode_node:
            peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind('tcp://127.0.0.2:0')}", "d")
            await decode_node.ping(peer, 1)
            assert decode_node.reached == [(peer, "127.0.0.2")]
            assert prefill.reached == [("key:decode-7", "127.0.0.1")], "the kernel's word, at the peer's Hello"
            assert prefill.bus.address_of("key:another") == decode_node.bus.address_of("key:another") == ""
        await until(lambda: prefill.bus.address_of("key:decode-7") == "")


async def test_the_largest_frame_of_the_protocol_passes_encrypted() -> None:
    p, d = pair(), pair()
    part = Part(0, 0, 1, b"\1" * (1 << 20))
    grant = Grant(1, 1, 1, 1, 0, (part, part, part, with_extents(part, 0)), True, 1)
    last = with_extents(part, FRAME_BYTES_MAX - len(encode(grant)) - 3)  # its length takes 3 bytes more
    grant = Grant(1, 1, 1, 1, 0, (part, part, part, last), True, 1)
    assert len(encode(grant)) == FRAME_BYTES_MAX
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
        peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "d")
        assert decode_node.bus.send(peer, grant)
        await until(lambda: len(prefill.received) == 2)
        assert prefill.received[1] == ("key:d", grant)


def with_extents(part: Part, size: int) -> Part:
    return Part(part.component, part.first_row, part.rows, b"\1" * size)


async def test_a_message_sent_just_before_close_arrives() -> None:
    # Megabytes queue before the Goodbye, so that it is unsent when the bus closes.
    limits = replace(LIMITS, linger_ms=10_000, unread_frames_max=1 << 20)
    async with Node("p", limits=limits) as prefill:
        decode_node = Node("d", limits=limits)
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
        for _ in range(20):
            assert decode_node.bus.send(peer, LARGE)
        assert decode_node.bus.send(peer, Goodbye(7, "shutdown"))
        await decode_node.bus.close()
        await until(lambda: prefill.received[-1:] == [("node:d", Goodbye(7, "shutdown"))])

        listener = Node("l", limits=limits)
        peer = await prefill.meet(await listener.bus.bind(ANY_PORT), "p")
        await until(lambda: len(listener.received) == 1)
        for _ in range(20):
            assert listener.bus.send("node:p", LARGE)
        assert listener.bus.send("node:p", Goodbye(8, "shutdown"))
        await listener.bus.close()
        await until(lambda: prefill.received[-1:] == [(peer, Goodbye(8, "shutdown"))])


async def test_a_message_is_received_though_a_send_consumed_its_signal(
    prefill: Node, decode_node: Node, context: Context
) -> None:
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    raw = Raw(context, await prefill.bus.bind(ANY_PORT))
    raw.send(hello("d"))
    peer = await decode_node.meet(f"tcp://127.0.0.1:{port}", "d")
    await until(lambda: len(prefill.received) == 1 and router.poll(0) != 0)
    route = router.recv_multipart()[0]
    raw.send(Pong(1))
    router.send_multipart([route, encode(Pong(2))])
    raw.socket.poll(100)  # blocking: both have arrived by then, and the loop has not read yet
    assert prefill.bus.send("node:d", Ping(3))
    assert decode_node.bus.send(peer, Ping(4))
    await until(lambda: prefill.received[-1] == ("node:d", Pong(1)))
    await until(lambda: decode_node.received == [(peer, Pong(2))])


async def test_an_exception_of_the_node_stops_nothing(prefill: Node, decode_node: Node) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    take = prefill.receive

    def fail_on_odd(peer: str, message: Message) -> None:
        take(peer, message)
        if type(message) is Ping and message.incarnation % 2:
            raise ZeroDivisionError

    prefill.bus._receive = fail_on_odd
    peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
    for number in range(1, 101):
        decode_node.bus.send(peer, Ping(number))
    await until(lambda: len(decode_node.received) == 100)
    assert [type(failure) for failure in failures] == [ZeroDivisionError] * 50


async def test_unlisted_keys_are_refused_at_the_handshake_and_listed_peers_go_on(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    p, d, stranger = pair(), pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
        bound = await prefill.bus.bind(ANY_PORT)
        with caplog.at_level(logging.WARNING):
            crowd = [
                Raw(context, bound),  # no keys at all
                Raw(context, bound, keys=stranger, server=p.public),  # an unlisted key
                Raw(context, bound, keys=d, server=stranger.public),  # a listed key, with another server's key
                Raw(
                    context, bound, keys=KeyPair(d.public, stranger.secret), server=p.public
                ),  # another peer's public key
            ]
            for raw in crowd:
                raw.send(hello("d"), Ping(666))
            bare = tcp.create_connection(("127.0.0.1", int(bound.rpartition(":")[2])))
            bare.sendall(b"\x01\x00" + b"GET / HTTP/1.0\r\n\r\n" + os.urandom(4_096))
            peer = await decode_node.meet(f"{p.public}@{bound}", "d")
            await until(lambda: prefill.bus.strangers >= 1)
            await decode_node.ping(peer, 1)
            bare.close()
        assert {name for name, _ in prefill.received} == {"key:d"}
        assert ("key:d", Ping(666)) not in prefill.received
        assert all(raw.quiet for raw in crowd)
        assert stranger.public in caplog.text


async def test_refused_handshakes_are_counted_and_logged_at_a_bounded_rate(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    p = pair()
    async with Node("p", p, {}, replace(LIMITS, log_ms=60_000)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        crowd = [Raw(context, bound, keys=pair(), server=p.public) for _ in range(20)]
        await until(lambda: prefill.bus.strangers >= len(crowd))
        assert len([record for record in caplog.records if "allow-list" in record.message]) == 1


async def test_nothing_is_sent_to_a_listener_with_another_key_than_the_pinned_one() -> None:
    p, d, other = pair(), pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p, "o": other}) as decode_node:
        bound = await prefill.bus.bind(ANY_PORT)
        wrong, right = decode_node.bus.dial(f"{other.public}@{bound}", "prefill"), f"{p.public}@{bound}"
        await decode_node.ping(await decode_node.meet(right, "d"), 1)
        assert not decode_node.bus.send(wrong, hello("d"))


async def test_only_endpoints_that_the_keys_allow_are_dialled() -> None:
    p, d, stranger = pair(), pair(), pair()
    async with Node("d", d, {"p": p}, replace(LIMITS, dials_max=1)) as keyed, Node("n") as keyless:
        with pytest.raises(ConfigError, match="key: missing"):
            keyed.bus.dial("tcp://127.0.0.1:9", "prefill")
        with pytest.raises(ConfigError, match="not on the allow-list"):
            keyed.bus.dial(f"{stranger.public}@tcp://127.0.0.1:9", "prefill")
        with pytest.raises(ConfigError, match="no key pair"):
            keyless.bus.dial(f"{p.public}@tcp://127.0.0.1:9", "prefill")
        with pytest.raises(ConfigError, match="is not tcp"):
            keyless.bus.dial("inproc://zeromq.zap.01", "prefill")
        endpoint = f"{p.public}@tcp://127.0.0.1:9"
        assert keyed.bus.dial(endpoint, "prefill") == keyed.bus.dial(endpoint, "prefill") == endpoint
        with pytest.raises(WorldError, match="limit"):
            keyed.bus.dial(f"{p.public}@tcp://127.0.0.1:10", "prefill")
        keyed.bus.hang_up(endpoint)
        keyed.bus.dial(f"{p.public}@tcp://127.0.0.1:10", "prefill")


async def test_bind_takes_the_first_free_port_of_a_range_and_returns_it() -> None:
    async with Node("a") as a, Node("b") as b, Node("c") as c:
        first = int((await a.bus.bind(ANY_PORT)).rpartition(":")[2])
        last = min(first + 20, 65_535)
        bound = await b.bus.bind(f"tcp://localhost:{first}-{last}")
        assert bound.startswith("tcp://127.0.0.1:")
        assert first < int(bound.rpartition(":")[2]) <= last
        with pytest.raises(WorldError, match=f"cannot bind tcp://127.0.0.1:{first}: the port is in use"):
            await c.bus.bind(f"tcp://127.0.0.1:{first}")
        assert await c.bus.bind(ANY_PORT)


async def test_bind_accepts_ipv6() -> None:
    probe = tcp.socket(tcp.AF_INET6)
    try:
        probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    finally:
        probe.close()
    async with Node("p") as prefill, Node("d") as decode_node:
        bound = await prefill.bus.bind("tcp://[::1]:0")
        assert bound.startswith("tcp://[::1]:")
        await decode_node.ping(await decode_node.meet(bound, "d"), 1)


async def test_an_address_that_can_never_be_bound_is_a_config_error() -> None:
    async with Node("p") as node:
        for endpoint, named in (
            ("tcp://0.0.0.0:0", "set insecure"),
            ("tcp://*:0", "set insecure"),
            ("tcp://host.invalid:0", "does not resolve"),
            ("ipc:///tmp/x", "is not tcp"),
        ):
            with pytest.raises(ConfigError, match=named):
                await node.bus.bind(endpoint)
    p = pair()
    async with Node("p", p, {}) as node:
        with pytest.raises(ConfigError, match=r"no interface of this host has 192\.0\.2\.1"):
            await node.bus.bind("tcp://192.0.2.1:0")
        assert await node.bus.bind("tcp://0.0.0.0:0")


async def test_a_connection_must_open_with_hello(it: Listening) -> None:
    raw = it.raw()
    raw.send(Ping(1), Ping(2))
    answer = await raw.receive()
    assert isinstance(answer, Reject)
    assert (answer.session, answer.reason) == (0, "hello_first")
    raw.send(hello("d"), Ping(3))
    assert await raw.receive() == Pong(3)
    assert it.node.received == [("node:d", hello("d")), ("node:d", Ping(3))]
    assert [(name, type(error)) for name, error in it.node.refusals] == [("unknown:127.0.0.1", TurnedAwayError)]
    assert it.node.bus.refused == 2


async def test_a_connections_name_is_fixed_by_its_first_hello(it: Listening) -> None:
    victim, thief = await it.met("victim"), it.raw()
    thief.send(hello("thief"), hello("victim"), Ping(2))
    answer = await thief.receive()
    assert isinstance(answer, Reject)
    assert answer.fields == ("Hello.identity.node: node:victim, on a connection of node:thief",)
    assert [name for name, _ in it.node.refusals] == ["node:thief"]
    it.node.bus.send("node:victim", Ping(9))
    assert await victim.receive() == Ping(9)
    assert thief.quiet


async def test_a_name_that_cannot_be_printed_is_refused(it: Listening) -> None:
    raw = it.raw()
    raw.send(hello("d\nforged log line"))
    answer = await raw.receive()
    assert isinstance(answer, Reject)
    assert answer.fields[0].startswith("Hello.identity.node")
    assert it.node.received == []


async def test_a_newer_process_supersedes_the_connection_of_the_older_one_of_its_name(it: Listening) -> None:
    old, new = await it.met("d"), it.raw()
    new.send(hello("d", 8), Ping(2))
    assert await new.receive() == Pong(2)
    old.send(Ping(3), hello("d"), Ping(4))
    answer = await old.receive()
    assert isinstance(answer, Reject)
    assert answer.reason == "superseded"
    assert [name for name, _ in it.node.refusals] == ["unknown:127.0.0.1"]
    it.node.bus.send("node:d", Ping(5))
    assert await new.receive() == Ping(5)
    await asyncio.sleep(0.05)
    assert old.quiet
    assert [message for _, message in it.node.received] == [hello("d"), Ping(1), hello("d", 8), Ping(2)]


@pytest.mark.given(greets=True)
async def test_a_second_connection_of_one_process_costs_the_first_nothing(it: Listening) -> None:
    """Its Hello is answered where it came; all else goes on where that process last sent something else."""
    first, second = it.raw(), it.raw()
    first.send(hello("d"), Ping(1))
    assert [await first.receive(), await first.receive()] == [Goodbye(7, "met"), Pong(1)]
    second.send(hello("d"))
    assert await second.receive() == Goodbye(7, "met")
    assert it.node.bus.send("node:d", Ping(2))
    assert await first.receive() == Ping(2)
    second.send(Ping(3))
    assert await second.receive() == Pong(3)
    second.socket.close()
    await until(lambda: it.node.bus.send("node:d", Ping(4)) and not first.quiet)
    assert await first.receive() == Ping(4)
    assert it.node.refusals == []


@pytest.mark.given("d")
async def test_a_restarted_process_with_the_same_key_gets_the_replies(it: Listening) -> None:
    old, new = await it.met("d"), it.raw("d")
    new.send(hello("another"), Ping(2))
    assert await new.receive() == Pong(2)
    assert it.node.bus.send("key:d", Ping(3))
    assert await new.receive() == Ping(3)
    assert old.quiet


async def test_without_keys_two_endpoints_are_one_process_only_at_one_address(decode_node: Node) -> None:
    async with Node("p") as prefill, Node("q") as other:
        endpoints = [await prefill.bus.bind(ANY_PORT), await other.bus.bind(ANY_PORT)]
        first, liar = [await decode_node.meet(endpoint, "d") for endpoint in endpoints]
        second = await decode_node.meet(first.replace("127.0.0.1", "localhost"), "d")
        assert decode_node.bus.may_be_one(first, second)
        assert not decode_node.bus.may_be_one(first, liar)
        assert not decode_node.bus.may_be_one(first, "tcp://127.0.0.1:1"), "not dialled"
        await prefill.bus.close()
        await until(lambda: not decode_node.bus.may_be_one(first, second), "nothing is known of what is not connected")


async def test_with_keys_two_endpoints_are_one_process_if_they_have_its_key() -> None:
    d, p, q = pair(), pair(), pair()
    async with Node("d", d, {"p": p, "q": q}) as node:
        first, second, other = (
            node.bus.dial(f"{key.public}@tcp://{end}", "prefill") for key, end in ((p, "a:1"), (p, "b:2"), (q, "a:1"))
        )
        assert node.bus.may_be_one(first, second)
        assert not node.bus.may_be_one(first, other)

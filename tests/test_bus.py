"""The bus over real sockets on loopback: who is heard under which name, what hostile peers cannot do to others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket as tcp
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import uvloop
import zmq

from pdtransfer.bus import Bus, BusLimits
from pdtransfer.bus.connections import Connections, TurnedAwayError
from pdtransfer.bus.sockets import resolve
from pdtransfer.errors import ConfigError, RemoteProtocolError, WorldError
from pdtransfer.keys import AllowList, KeyPair
from pdtransfer.limits import FRAME_BYTES_MAX
from pdtransfer.wire import Goodbye, Grant, Hello, Identity, Message, Part, Ping, Pong, Ranks, Reject, decode, encode

LIMITS = BusLimits(reconnect_ms=20, reconnect_ms_max=50, redial_ms=200, redial_ms_max=400, linger_ms=500)
ANY_PORT = "tcp://127.0.0.1:0"
LARGE = Grant(1, 1, 1, 1, 0, (Part(0, 0, 1, bytes(1 << 20)),), True, 1)


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(*args, **kwargs)

        uvloop.run(bounded())

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other threads
        await asyncio.sleep(0.001)


def pair() -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(public=public, secret=secret)


def hello(node: str) -> Hello:
    return Hello(1, 1, Identity(node, "decode", 7, Ranks(), "model", b"", 16))


class Node:
    """A bus that keeps what it hears, and answers each Ping with a Pong."""

    def __init__(
        self,
        name: str,
        keys: KeyPair | None = None,
        allowed: dict[str, KeyPair] | None = None,
        limits: BusLimits = LIMITS,
    ) -> None:
        names = None if allowed is None else AllowList({pair.public: name for name, pair in allowed.items()})
        self.heard: list[tuple[str, Message]] = []
        self.refusals: list[tuple[str, RemoteProtocolError]] = []
        self.bus = Bus(node=name, keys=keys, allowed=names, receive=self.receive, refused=self.refused, limits=limits)

    def receive(self, peer: str, message: Message) -> None:
        self.heard.append((peer, message))
        if type(message) is Ping:
            self.bus.send(peer, Pong(message.incarnation))

    def refused(self, peer: str, error: RemoteProtocolError) -> None:
        self.refusals.append((peer, error))

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()

    async def meet(self, endpoint: str, name: str) -> str:
        """Dials and says Hello, once; the peer's name when it went out."""
        peer = self.bus.dial(endpoint)
        assert not self.bus.send(peer, hello(name)), "it goes out with the connection"
        await until(lambda: self.bus._dialled[peer].connected)
        return peer

    async def ping(self, peer: str, number: int) -> None:
        """Pings until this very number is answered."""
        while (peer, Pong(number)) not in self.heard:
            self.bus.send(peer, Ping(number))
            await asyncio.sleep(0.01)


class Raw:
    """A hostile peer: a bare socket that says what it likes."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, keys: KeyPair | None = None, server: str = "",
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
        self.socket.connect(endpoint)

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def hear(self) -> Message:
        await until(lambda: not self.quiet)
        return decode(self.socket.recv())

    @property
    def quiet(self) -> bool:
        return not self.socket.poll(0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


# Two sides that mean well


@on_loop
async def test_messages_pass_both_ways_in_order_under_the_nodes_name() -> None:
    async with Node("prefill") as prefill, Node("decode") as decode_node:
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d0")
        for number in range(1, 501):
            assert decode_node.bus.send(peer, Ping(number))
        await until(lambda: len(decode_node.heard) == 500)
        assert prefill.heard == [("node:d0", hello("d0")), *(("node:d0", Ping(n)) for n in range(1, 501))]
        assert decode_node.heard == [(peer, Pong(n)) for n in range(1, 501)]
        assert (prefill.bus.received, prefill.bus.sent) == (501, 500)
        assert (decode_node.bus.received, decode_node.bus.sent) == (500, 500)


@on_loop
async def test_with_keys_a_peer_is_the_allow_lists_name_whatever_its_hello_says() -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"decode-7": d}) as prefill, Node("d", d, {"prefill-1": p}) as decode_node:
        peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "somebody-else")
        await decode_node.ping(peer, 1)
        assert {name for name, _ in prefill.heard} == {"key:decode-7"}
        assert peer.startswith(p.public)


@on_loop
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
        await until(lambda: len(prefill.heard) == 2)
        assert prefill.heard[1] == ("key:d", grant)


def with_extents(part: Part, size: int) -> Part:
    return Part(part.component, part.first_row, part.rows, b"\1" * size)


@on_loop
async def test_last_words_arrive_when_the_bus_closes_right_after() -> None:
    # Megabytes stand before the Goodbye, so that it is still here when the bus closes.
    limits = replace(LIMITS, linger_ms=10_000)
    async with Node("p", limits=limits) as prefill:
        decode_node = Node("d", limits=limits)
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
        for _ in range(20):
            assert decode_node.bus.send(peer, LARGE)
        assert decode_node.bus.send(peer, Goodbye(7, "shutdown"))
        await decode_node.bus.close()
        await until(lambda: prefill.heard[-1:] == [("node:d", Goodbye(7, "shutdown"))])

        listener = Node("l", limits=limits)
        peer = await prefill.meet(await listener.bus.bind(ANY_PORT), "p")
        await until(lambda: len(listener.heard) == 1)
        for _ in range(20):
            assert listener.bus.send("node:p", LARGE)
        assert listener.bus.send("node:p", Goodbye(8, "shutdown"))
        await listener.bus.close()
        await until(lambda: prefill.heard[-1:] == [(peer, Goodbye(8, "shutdown"))])


@on_loop
async def test_a_message_is_heard_though_a_send_has_swallowed_its_signal(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with Node("p") as prefill, Node("d") as decode_node:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(hello("d"))
        peer = await decode_node.meet(f"tcp://127.0.0.1:{port}", "d")
        await until(lambda: len(prefill.heard) == 1 and router.poll(0) != 0)
        route = router.recv_multipart()[0]
        raw.say(Pong(1))
        router.send_multipart([route, encode(Pong(2))])
        raw.socket.poll(100)  # blocking: both are in by then, and the loop has not looked yet
        assert prefill.bus.send("node:d", Ping(3))
        assert decode_node.bus.send(peer, Ping(4))
        await until(lambda: prefill.heard[-1] == ("node:d", Pong(1)))
        await until(lambda: decode_node.heard == [(peer, Pong(2))])


@on_loop
async def test_an_exception_of_the_node_stops_nothing() -> None:
    async with Node("p") as prefill, Node("d") as decode_node:
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
        await until(lambda: len(decode_node.heard) == 100)
        assert [type(failure) for failure in failures] == [ZeroDivisionError] * 50


# Who is let in


@on_loop
async def test_strangers_are_refused_at_the_handshake_and_the_listed_go_on(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    p, d, stranger = pair(), pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
        bound = await prefill.bus.bind(ANY_PORT)
        with caplog.at_level(logging.WARNING):
            crowd = [
                Raw(context, bound),  # no keys at all
                Raw(context, bound, keys=stranger, server=p.public),  # a key that is not listed
                Raw(context, bound, keys=d, server=stranger.public),  # a listed key, for another server
                Raw(context, bound, keys=KeyPair(d.public, stranger.secret), server=p.public),  # another's public key
            ]
            for raw in crowd:
                raw.say(hello("d"), Ping(666))
            bare = tcp.create_connection(("127.0.0.1", int(bound.rpartition(":")[2])))
            bare.sendall(b"\x01\x00" + b"GET / HTTP/1.0\r\n\r\n" + os.urandom(4_096))
            peer = await decode_node.meet(f"{p.public}@{bound}", "d")
            await until(lambda: prefill.bus.strangers >= 1)
            await decode_node.ping(peer, 1)
            bare.close()
        assert {name for name, _ in prefill.heard} == {"key:d"}
        assert ("key:d", Ping(666)) not in prefill.heard
        assert all(raw.quiet for raw in crowd)
        assert stranger.public in caplog.text


@on_loop
async def test_a_crowd_of_strangers_is_counted_but_logged_seldom(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    p = pair()
    async with Node("p", p, {}, replace(LIMITS, log_ms=60_000)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        crowd = [Raw(context, bound, keys=pair(), server=p.public) for _ in range(20)]
        await until(lambda: prefill.bus.strangers >= len(crowd))
        assert len([record for record in caplog.records if "allow-list" in record.message]) == 1


@on_loop
async def test_a_listener_whose_key_is_not_the_pinned_one_is_not_spoken_to() -> None:
    p, d, other = pair(), pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p, "o": other}) as decode_node:
        bound = await prefill.bus.bind(ANY_PORT)
        wrong, right = decode_node.bus.dial(f"{other.public}@{bound}"), f"{p.public}@{bound}"
        await decode_node.ping(await decode_node.meet(right, "d"), 1)
        assert not decode_node.bus.send(wrong, hello("d"))


@on_loop
async def test_only_endpoints_that_the_keys_allow_are_dialled() -> None:
    p, d, stranger = pair(), pair(), pair()
    async with Node("d", d, {"p": p}, replace(LIMITS, dials_max=1)) as keyed, Node("n") as keyless:
        with pytest.raises(ConfigError, match="key: missing"):
            keyed.bus.dial("tcp://127.0.0.1:9")
        with pytest.raises(ConfigError, match="not on the allow-list"):
            keyed.bus.dial(f"{stranger.public}@tcp://127.0.0.1:9")
        with pytest.raises(ConfigError, match="no keys of its own"):
            keyless.bus.dial(f"{p.public}@tcp://127.0.0.1:9")
        with pytest.raises(ConfigError, match="is not tcp"):
            keyless.bus.dial("inproc://zeromq.zap.01")
        endpoint = f"{p.public}@tcp://127.0.0.1:9"
        assert keyed.bus.dial(endpoint) == keyed.bus.dial(endpoint) == endpoint
        with pytest.raises(WorldError, match="limit"):
            keyed.bus.dial(f"{p.public}@tcp://127.0.0.1:10")
        keyed.bus.hang_up(endpoint)
        keyed.bus.dial(f"{p.public}@tcp://127.0.0.1:10")


# Binding


@on_loop
async def test_bind_takes_the_first_free_port_of_a_range_and_says_what_it_bound() -> None:
    async with Node("a") as a, Node("b") as b, Node("c") as c:
        first = int((await a.bus.bind(ANY_PORT)).rpartition(":")[2])
        last = min(first + 20, 65_535)
        bound = await b.bus.bind(f"tcp://localhost:{first}-{last}")
        assert bound.startswith("tcp://127.0.0.1:")
        assert first < int(bound.rpartition(":")[2]) <= last
        with pytest.raises(WorldError, match=f"cannot bind tcp://127.0.0.1:{first}: the port is in use"):
            await c.bus.bind(f"tcp://127.0.0.1:{first}")
        assert await c.bus.bind(ANY_PORT)


@on_loop
async def test_bind_speaks_ipv6() -> None:
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


@on_loop
async def test_what_can_never_be_bound_is_a_config_error() -> None:
    async with Node("p") as node:
        for endpoint, named in (
            ("tcp://0.0.0.0:0", "--insecure"),
            ("tcp://*:0", "--insecure"),
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


# Names and connections


@on_loop
async def test_a_connection_must_open_with_hello(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(Ping(1), Ping(2))
        answer = await raw.hear()
        assert isinstance(answer, Reject)
        assert (answer.session, answer.reason) == (0, "hello_first")
        raw.say(hello("d"), Ping(3))
        assert await raw.hear() == Pong(3)
        assert prefill.heard == [("node:d", hello("d")), ("node:d", Ping(3))]
        assert [(name, type(error)) for name, error in prefill.refusals] == [("unknown:127.0.0.1", TurnedAwayError)]
        assert prefill.bus.refused == 2


@on_loop
async def test_a_connections_name_is_fixed_by_its_first_hello(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        victim, thief = Raw(context, bound), Raw(context, bound)
        victim.say(hello("victim"), Ping(1))
        assert await victim.hear() == Pong(1)
        thief.say(hello("thief"), hello("victim"), Ping(2))
        answer = await thief.hear()
        assert isinstance(answer, Reject)
        assert answer.fields == ("Hello.identity.node: node:victim, this connection is node:thief's",)
        assert [name for name, _ in prefill.refusals] == ["node:thief"]
        prefill.bus.send("node:victim", Ping(9))
        assert await victim.hear() == Ping(9)
        assert thief.quiet


@on_loop
async def test_a_name_that_cannot_be_printed_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(hello("d\nforged log line"))
        answer = await raw.hear()
        assert isinstance(answer, Reject)
        assert answer.fields[0].startswith("Hello.identity.node")
        assert prefill.heard == []


@on_loop
async def test_a_newer_connection_supersedes_the_older_one_of_its_name(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with Node("p") as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        old, new = Raw(context, bound), Raw(context, bound)
        old.say(hello("d"), Ping(1))
        assert await old.hear() == Pong(1)
        new.say(hello("d"), Ping(2))
        assert await new.hear() == Pong(2)
        old.say(Ping(3), hello("d"), Ping(4))
        answer = await old.hear()
        assert isinstance(answer, Reject)
        assert answer.reason == "superseded"
        assert [name for name, _ in prefill.refusals] == ["unknown:127.0.0.1"]
        prefill.bus.send("node:d", Ping(5))
        assert await new.hear() == Ping(5)
        await asyncio.sleep(0.05)
        assert old.quiet
        assert [message for _, message in prefill.heard] == [hello("d"), Ping(1), hello("d"), Ping(2)]


@on_loop
async def test_a_restarted_process_with_the_same_key_gets_the_replies(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        old = Raw(context, bound, keys=d, server=p.public)
        old.say(hello("a"), Ping(1))
        assert await old.hear() == Pong(1)
        new = Raw(context, bound, keys=d, server=p.public)
        new.say(hello("b"), Ping(2))
        assert await new.hear() == Pong(2)
        assert prefill.bus.send("key:d", Ping(3))
        assert await new.hear() == Ping(3)
        assert old.quiet


@on_loop
async def test_a_routing_id_of_the_dialers_choice_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT), keys=d, server=p.public, routing_id=b"decode")
        raw.say(hello("d"))
        answer = await raw.hear()
        assert isinstance(answer, Reject)
        assert answer.fields[0].startswith("routing id")
        assert not prefill.bus.send("key:d", Ping(1))
        assert prefill.heard == []


@on_loop
async def test_who_takes_the_routing_id_of_a_living_peer_hears_and_says_nothing(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    p, v, t = pair(), pair(), pair()
    async with Node("p", p, {"victim": v, "thief": t}) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        victim = Raw(context, bound, keys=v, server=p.public)
        victim.say(hello("v"), Ping(1))
        assert await victim.hear() == Pong(1)
        route = prefill.bus._connections.route_of("key:victim")
        assert route is not None
        thief = Raw(context, bound, keys=t, server=p.public, routing_id=route)
        thief.say(hello("v"), Ping(2))
        await asyncio.sleep(0.3)
        assert prefill.bus.send("key:victim", Ping(3))
        assert await victim.hear() == Ping(3)
        assert thief.quiet
        assert {name for name, _ in prefill.heard} == {"key:victim"}


@on_loop
async def test_who_takes_the_routing_id_of_a_peer_that_left_is_heard_only_under_its_own_key(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    # No peer is ever told a routing id, so this one cheats: even a right guess gives no other name, and no replies.
    p, v, t = pair(), pair(), pair()
    async with Node("p", p, {"victim": v, "thief": t}) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        victim = Raw(context, bound, keys=v, server=p.public)
        victim.say(hello("v"), Ping(1))
        assert await victim.hear() == Pong(1)
        route = prefill.bus._connections.route_of("key:victim")
        assert route is not None
        victim.socket.close()
        await asyncio.sleep(0.1)
        thief = Raw(context, bound, keys=t, server=p.public, routing_id=route)
        thief.say(Ping(2))
        answer = await thief.hear()
        assert isinstance(answer, Reject)
        assert answer.reason == "hello_first"
        assert not prefill.bus.send("key:victim", Ping(3))
        thief.say(hello("v"), Ping(4))
        assert await thief.hear() == Pong(4)
        assert [name for name, _ in prefill.heard] == ["key:victim"] * 2 + ["key:thief"] * 2


# Breaches


@on_loop
async def test_a_breach_names_its_field_mutes_its_connection_and_nobody_elses(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=300)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        bad.say(hello("bad"), encode(Ping(1))[:-9] + b"\xa1x", Ping(2))
        good.say(hello("good"), Ping(3))
        answer = await bad.hear()
        assert isinstance(answer, Reject)
        assert (answer.reason, len(answer.fields)) == ("breach", 1)
        assert await good.hear() == Pong(3)
        [(name, error)] = prefill.refusals
        assert name == "node:bad"
        assert answer.fields[0].startswith(f"{error.field}: ")
        assert ("node:bad", Ping(2)) not in prefill.heard
        assert prefill.bus.dropped == 1
        await asyncio.sleep(0.35)
        bad.say(Ping(4))
        assert await bad.hear() == Pong(4)


@on_loop
async def test_junk_of_any_kind_is_refused_and_the_bus_goes_on(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=0)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        bad.say(hello("bad"))
        junk = [b"", b"\0", b"\xc1", b"\x90", b"\x93\x01\x15", b"\xdd\xff\xff\xff\xff"]
        junk += [os.urandom(40) for _ in range(200)]
        bad.say(*junk)
        good.say(hello("good"))
        await until(lambda: len(prefill.refusals) == len(junk))
        assert {name for name, _ in prefill.refusals} == {"node:bad"}
        good.say(Ping(1))
        assert await good.hear() == Pong(1)


@on_loop
async def test_an_oversize_frame_ends_its_connection_and_no_other(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        good.say(hello("good"))
        bad.say(hello("bad"))
        await until(lambda: len(prefill.heard) == 2)
        monitor = bad.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bad.say(b"\x93\x01\x15" + bytes(FRAME_BYTES_MAX + 4_096))
        await until(lambda: monitor.poll(0) != 0)
        good.say(Ping(1))
        assert await good.hear() == Pong(1)
        assert len(prefill.heard) == 3


@on_loop
async def test_a_message_of_several_frames_is_a_breach_however_many(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=0)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        bad.say(hello("bad"))
        bad.socket.send_multipart([encode(Ping(1)), encode(Ping(2))])
        bad.socket.send_multipart([encode(Ping(3))] * 10_000)
        bad.say(Ping(4))
        good.say(hello("good"), Ping(5))
        assert await good.hear() == Pong(5)
        await until(lambda: ("node:bad", Ping(4)) in prefill.heard)
        assert [message for name, message in prefill.heard if name == "node:bad"] == [hello("bad"), Ping(4)]
        assert [(name, error.field) for name, error in prefill.refusals] == [("node:bad", "frames")] * 2


@on_loop
async def test_a_breach_of_a_dialled_peer_is_told_by_its_endpoint(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with Node("d") as decode_node:
        peer = await decode_node.meet(f"tcp://127.0.0.1:{port}", "d")
        await until(lambda: router.poll(0) != 0)
        route, opening = router.recv_multipart()
        assert decode(opening) == hello("d")
        router.send_multipart([route, b"junk"])
        router.send_multipart([route, encode(Ping(1))])
        await until(lambda: decode_node.bus.dropped == 1 + 1)  # the Ping; the Hello had to wait
        await until(lambda: len(decode_node.refusals) == 1 and router.poll(0) != 0)
        assert decode_node.refusals[0][0] == peer
        assert isinstance(decode(router.recv_multipart()[1]), Reject)


# Nobody waits for anybody


@on_loop
async def test_a_flood_takes_turns_with_other_peers_and_with_the_loop(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    limits = replace(LIMITS, turn_messages=16, receive_queue=100_000)
    async with Node("p", limits=limits) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        flood, good = Raw(context, bound), Raw(context, bound)
        flood.say(hello("flood"))
        good.say(hello("good"))
        await until(lambda: len(prefill.heard) == 2)
        prefill.heard.clear()
        flooding = threading.Event()

        def fill() -> None:
            flood.say(*[Pong(1)] * 20_000)
            flooding.set()

        thread = threading.Thread(target=fill)
        thread.start()
        # The loop stands still until the flood is in, so that the good peer's words come last of all.
        assert flooding.wait(20)
        thread.join()
        good.say(*[Ping(n) for n in range(1, 6)])
        flood.socket.poll(100)  # blocking: both are in by then
        bursts, seen = [0], 0
        while len(prefill.heard) < 20_005:
            await asyncio.sleep(0)
            bursts.append(len(prefill.heard) - seen)
            seen = len(prefill.heard)
        places = [place for place, (name, _) in enumerate(prefill.heard) if name == "node:good"]
        assert max(bursts) <= 2 * limits.turn_messages  # the reader's turn and the scheduled one
        assert places[-1] < 10_000


@on_loop
async def test_a_peer_that_does_not_read_blocks_nobody(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, send_queue=8)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        deaf, good = Raw(context, bound), Raw(context, bound)
        deaf.socket.set(zmq.RCVHWM, 1)
        deaf.say(hello("deaf"))
        good.say(hello("good"))
        await until(lambda: len(prefill.heard) == 2)
        refused_after = 0
        while prefill.bus.send("node:deaf", LARGE) and refused_after < 3_000:
            refused_after += 1
            await asyncio.sleep(0)
        assert refused_after < 3_000
        assert prefill.bus.dropped == 1
        good.say(Ping(1))
        assert await good.hear() == Pong(1)


@on_loop
async def test_sending_to_who_has_gone_is_false_and_no_exception(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill, Node("d") as decode_node:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(hello("d"))
        await until(lambda: len(prefill.heard) == 1)
        raw.socket.close()
        await until(lambda: not prefill.bus.send("node:d", Ping(1)))
        assert not prefill.bus.send("node:nobody", Ping(1))

        listener = Node("x")
        peer = await decode_node.meet(await listener.bus.bind(ANY_PORT), "d")
        await listener.bus.close()
        await until(lambda: not decode_node.bus.send(peer, Ping(1)))
        await decode_node.bus.close()
        assert not decode_node.bus.send(peer, Ping(1))


@on_loop
async def test_a_listener_that_does_not_read_blocks_nobody(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router = context.socket(zmq.ROUTER)
    router.set(zmq.RCVHWM, 1)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with Node("p") as prefill, Node("d", limits=replace(LIMITS, send_queue=8)) as decode_node:
        deaf = await decode_node.meet(f"tcp://127.0.0.1:{port}", "d")
        taken = 0
        while decode_node.bus.send(deaf, LARGE) and taken < 3_000:
            taken += 1
            await asyncio.sleep(0)
        assert taken < 3_000
        await decode_node.ping(await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d"), 1)


@on_loop
async def test_a_peer_that_is_not_read_is_held_back(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, receive_queue=4)) as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(hello("d"))
        await until(lambda: len(prefill.heard) == 1)
        raw.socket.set(zmq.SNDHWM, 4)
        # The loop stands still meanwhile; what the kernel holds is some megabytes.
        taken = 0
        while raw.socket.poll(200, zmq.POLLOUT) and taken < 200:
            raw.say(LARGE)
            taken += 1
        assert taken < 200


@on_loop
async def test_large_frames_take_turns_by_their_bytes(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, turn_bytes=1)) as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT))
        raw.say(hello("d"), *[LARGE] * 20)
        raw.socket.poll(200)  # blocking: they are in by then
        bursts = [0]
        while len(prefill.heard) < 21:
            before = len(prefill.heard)
            await asyncio.sleep(0)
            bursts.append(len(prefill.heard) - before)
        assert max(bursts) <= 2


@on_loop
async def test_a_connection_that_never_greets_ends() -> None:
    async with Node("p", limits=replace(LIMITS, handshake_ms=100)) as prefill:
        port = int((await prefill.bus.bind(ANY_PORT)).rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read()  # ZMQ's greeting, then the end
        writer.close()


@on_loop
async def test_a_connection_that_answers_no_heartbeat_ends() -> None:
    async with Node("p", limits=replace(LIMITS, heartbeat_ms=50, heartbeat_timeout_ms=100)) as prefill:
        port = int((await prefill.bus.bind(ANY_PORT)).rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        writer.write(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
        assert b"PING" in await reader.read()
        writer.close()


# Coming back


@on_loop
async def test_a_restarted_listener_hears_hello_first_and_nothing_stale() -> None:
    async with Node("d") as decode_node:
        first = Node("p")
        bound = await first.bus.bind(ANY_PORT)
        peer = await decode_node.meet(bound, "d")
        await decode_node.ping(peer, 1)
        await first.bus.close()
        await until(lambda: not decode_node.bus.send(peer, Ping(2)))
        async with Node("p") as second:
            assert await second.bus.bind(bound) == bound
            await until(lambda: bool(second.heard))
            await decode_node.ping(peer, 3)
            assert second.heard[:2] == [("node:d", hello("d")), ("node:d", Ping(3))]


@on_loop
async def test_a_listener_that_forgot_us_is_told_our_hello_again() -> None:
    async with Node("p") as prefill, Node("d") as decode_node:
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
        await decode_node.ping(peer, 1)
        prefill.bus.hang_up("node:d")
        assert not prefill.bus.send("node:d", Ping(9))
        prefill.heard.clear()
        await decode_node.ping(peer, 2)
        assert prefill.heard[0] == ("node:d", hello("d"))
        assert not [message for _, message in decode_node.heard if isinstance(message, Reject)]


@pytest.mark.parametrize("at_first", ["does not list us", "has no keys"])
@on_loop
async def test_an_endpoint_that_refused_us_is_dialled_until_it_lets_us_in(
    at_first: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    p, d = pair(), pair()
    router = context.socket(zmq.ROUTER)
    if at_first == "does not list us":
        unlisted = Node("p", p, {})
        bound = await unlisted.bus.bind(ANY_PORT)
    else:
        bound = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    async with Node("d", d, {"p": p}) as decode_node:
        peer = decode_node.bus.dial(f"{p.public}@{bound}")
        assert not decode_node.bus.send(peer, hello("d"))
        await asyncio.sleep(0.3)
        if at_first == "does not list us":
            assert unlisted.bus.strangers
            await unlisted.bus.close()
        router.close()
        async with Node("p", p, {"d": d}) as prefill:
            await rebind(prefill, bound)
            await decode_node.ping(peer, 1)
            assert prefill.heard[0] == ("key:d", hello("d"))


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        ("nobody", "nobody listens there"),
        ("does not list us", "it refused our key; is it on its allow-list?"),
        ("has another key", "it hung up on our handshake; is its key the one given?"),
        ("has no keys", "has one side keys, the other none?"),
    ],
)
@on_loop
async def test_the_log_says_why_there_is_no_connection(
    listener: str, text: str, context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    p, d, other = pair(), pair(), pair()
    async with Node("p", p if listener == "does not list us" else other, {}) as prefill, Node("d", d, {"p": p}) as node:
        bound = await prefill.bus.bind(ANY_PORT)
        if listener == "nobody":
            await prefill.bus.close()
        elif listener == "has no keys":
            keyless = context.socket(zmq.ROUTER)
            bound = f"tcp://127.0.0.1:{keyless.bind_to_random_port('tcp://127.0.0.1')}"
        node.bus.dial(f"{p.public}@{bound}")
        await until(lambda: f"no connection to {p.public}@{bound}: " in caplog.text)
        assert text in caplog.text


@on_loop
async def test_an_outage_is_logged_at_first_and_then_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async with Node("d", limits=replace(LIMITS, redial_ms=10, redial_ms_max=40)) as decode_node:
        listener = Node("p")
        bound = await listener.bus.bind(ANY_PORT)
        await listener.bus.close()
        dialled = decode_node.bus._dialled[decode_node.bus.dial(bound)]
        await until(lambda: dialled._attempt > 5)
        assert caplog.text.count("no connection") == 2  # after 10 and 20 ms
        async with Node("p") as listener:
            await rebind(listener, bound)
            await decode_node.ping(await decode_node.meet(bound, "d") if not dialled.connected else bound, 1)
        await until(lambda: dialled._attempt > 10)
        assert caplog.text.count("no connection") == 4


@on_loop
async def test_nothing_is_dialled_after_hanging_up(caplog: pytest.LogCaptureFixture) -> None:
    async with Node("d", limits=replace(LIMITS, redial_ms=20, redial_ms_max=40)) as decode_node:
        peer = decode_node.bus.dial("tcp://127.0.0.1:9")
        dialled = decode_node.bus._dialled[peer]
        await asyncio.sleep(0.01)
        decode_node.bus.hang_up(peer)
        await asyncio.sleep(0.1)
        assert (dialled._attempt, dialled.connected, caplog.text) == (0, False, "")


@on_loop
async def test_names_resolve_to_ipv4_first() -> None:
    async def answer(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(0, 0, 0, "", (address, 0)) for address in ("::1", "127.0.0.1", "::1", "127.0.0.2")]

    loop = SimpleNamespace(getaddrinfo=answer)
    assert await resolve(loop, "prefill-0.kv") == ["127.0.0.1", "127.0.0.2", "::1"]


async def rebind(node: Node, endpoint: str) -> None:
    while True:
        try:
            await node.bus.bind(endpoint)
            return
        except WorldError:
            await asyncio.sleep(0.02)


@on_loop
async def test_a_name_is_dialled_address_by_address_and_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


@on_loop
async def test_descriptors_and_threads_return_after_close() -> None:
    p, d = pair(), pair()

    async def life() -> None:
        async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
            peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "d")
            decode_node.bus.dial(f"{p.public}@tcp://127.0.0.1:9")
            decode_node.bus.dial(f"{p.public}@tcp://localhost:9")
            await decode_node.ping(peer, 1)
            await asyncio.sleep(0.25)  # the unreachable ones are dialled again
            decode_node.bus.hang_up(peer)
            decode_node.bus.hang_up(peer)
        await prefill.bus.close()

    await life()
    before = len(os.listdir("/proc/self/fd")), threads_of("ZMQ")
    for _ in range(3):
        await life()
    assert (len(os.listdir("/proc/self/fd")), threads_of("ZMQ")) == before


def threads_of(prefix: str) -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read())
    return sum(name.startswith(prefix) for name in names)


# The table of connections, without sockets


def route(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def named(connections: Connections, number: int, now: float) -> None:
    connections.introduce(connections.find(route(number), "", now), f"node:{number}", now)


def test_junk_connections_push_out_each_other_and_never_a_named_one() -> None:
    connections = Connections(BusLimits(named_max=4, unnamed_max=8))
    named(connections, 0, 0.0)
    assert len(connections) == 1
    for number in range(1, 1_000):
        connections.find(route(number), "", 0.0)
    assert len(connections) == 1 + 8
    assert connections.route_of("node:0") == route(0)
    assert connections.find(route(0), "", 0.0).name == "node:0"


def test_a_full_table_turns_newcomers_away_until_somebody_has_long_been_silent() -> None:
    connections = Connections(BusLimits(named_max=2, stale_ms=10_000))
    named(connections, 1, 0.0)
    named(connections, 2, 5.0)
    with pytest.raises(TurnedAwayError) as refusal:
        named(connections, 3, 9.9)
    assert refusal.value.reason == "full"
    named(connections, 3, 10.1)
    assert [connections.route_of(f"node:{n}") for n in (1, 2, 3)] == [None, route(2), route(3)]


def test_superseded_connections_are_bounded_too() -> None:
    connections = Connections(BusLimits(named_max=4, unnamed_max=8))
    for number in range(100):
        connections.introduce(connections.find(route(number), "", 0.0), "node:d", 0.0)
    assert len(connections) <= 1 + 8
    assert connections.route_of("node:d") == route(99)

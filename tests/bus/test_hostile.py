"""What hostile peers cannot do to the others: take a name or its replies, break the bus, or make it wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as tcp
import time
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
import zmq

from pdtransfer.bus import BusLimits, wires
from pdtransfer.bus.connections import Connections, TurnedAwayError
from pdtransfer.bus.keys import AllowList
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import FRAME_BYTES_MAX
from pdtransfer.wire import Grant, Hello, Message, Part, Ping, Pong, Reject, decode, encode
from tests.support.bus_peers import ANY_PORT, LARGE, LIMITS, Node, Raw, context, hello, on_loop, pair, until
from tests.support.zmtp import Zmtp, frame

__all__ = ["context"]  # a fixture


@on_loop
async def test_a_routing_id_of_the_dialers_choice_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p") as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT), routing_id=b"decode")
        raw.say(hello("d"))
        answer = await raw.hear()
        assert isinstance(answer, Reject)
        assert answer.fields[0].startswith("routing id")
        assert not prefill.bus.send("node:d", Ping(1))
        assert prefill.heard == []


@on_loop
async def test_a_listed_keys_routing_id_is_ours_whatever_it_chose(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}, replace(LIMITS, naming_ms=200)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        for chosen in (b"", b"decode", b"\0abcd"):
            raw = Raw(context, bound, keys=d, server=p.public, routing_id=chosen)
            raw.say(hello("d"), Ping(1))
            assert await raw.hear() == Pong(1)
            route = prefill.bus._connections.route_of("key:d")
            assert route is not None
            assert (route[:1], len(route)) == (b"\1", 9)


@on_loop
async def test_who_takes_the_routing_id_of_a_living_peer_hears_nothing_that_is_meant_for_it(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    p, v, t = pair(), pair(), pair()
    async with Node("p", p, {"victim": v, "thief": t}, replace(LIMITS, naming_ms=200)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        victim = Raw(context, bound, keys=v, server=p.public)
        victim.say(hello("v"), Ping(1))
        assert await victim.hear() == Pong(1)
        route = prefill.bus._connections.route_of("key:victim")
        assert route is not None
        thief = Raw(context, bound, keys=t, server=p.public, routing_id=route)
        thief.say(hello("v"), Ping(2))
        assert await thief.hear() == Pong(2)
        assert prefill.bus.send("key:victim", Ping(3))
        assert await victim.hear() == Ping(3)
        assert thief.quiet
        assert [name for name, _ in prefill.heard] == ["key:victim"] * 2 + ["key:thief"] * 2


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
        answer = None
        while answer is None:  # before the victim's end is seen, ZMQ never lets its id in
            thief = Raw(context, bound, keys=t, server=p.public, routing_id=route)
            thief.say(Ping(2))
            with suppress(TimeoutError):
                answer = await asyncio.wait_for(thief.hear(), 1)
        assert isinstance(answer, Reject)
        assert answer.reason == "hello_first"
        await until(lambda: not prefill.bus.send("key:victim", Ping(3)))
        thief.say(hello("v"), Ping(4))
        assert await thief.hear() == Pong(4)
        assert [name for name, _ in prefill.heard] == ["key:victim"] * 2 + ["key:thief"] * 2


@on_loop
async def test_a_breach_names_its_field_mutes_its_connection_and_nobody_elses(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=60_000)) as prefill:
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
        await until(lambda: prefill.bus.dropped == 1)
        unmute(prefill, "node:bad", 60)
        bad.say(Ping(4))
        assert await bad.hear() == Pong(4)


def unmute(node: Node, name: str, mute_s: float) -> None:
    """The while is over for which it was muted."""
    [muted] = [each for each in node.bus._connections._all() if each.name == name]
    now = asyncio.get_running_loop().time()
    assert now < muted.muted_until <= now + mute_s
    muted.muted_until = now


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
        bad.say(b"\x93\x01\x15" + bytes(FRAME_BYTES_MAX + 4_096))
        await until(lambda: bad.was_cut_off)
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


@on_loop
async def test_a_flood_takes_turns_with_other_peers_and_with_the_loop(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    limits = replace(LIMITS, turn_messages=16)
    async with Node("p", limits=limits) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        flood, good = Raw(context, bound), Raw(context, bound)
        flood.say(hello("flood"))
        good.say(hello("good"))
        await until(lambda: len(prefill.heard) == 2)
        prefill.heard.clear()
        wires = {each.name: each.wire for each in prefill.bus._connections._all()}

        def stand_still_until(name: str, unread_bytes: int) -> None:
            wire = wires[f"node:{name}"]
            while wire is not None and wire.unread_bytes < unread_bytes:
                time.sleep(0.001)

        # The loop stands still until the flood is in, so that the good peer's words come last of all.
        flood.say(*[Pong(1)] * 20_000)
        stand_still_until("flood", 20_000 * len(frame(encode(Pong(1)))))
        good.say(*[Ping(n) for n in range(1, 6)])
        stand_still_until("good", 5 * len(frame(encode(Ping(1)))))
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
@pytest.mark.parametrize(
    ("limits", "message"),
    [(replace(LIMITS, unread_bytes_max=1 << 20), LARGE), (replace(LIMITS, unread_frames_max=5_000), Ping(1))],
)
async def test_who_sends_more_than_can_be_read_is_hung_up_on_and_kept_out_for_a_while(
    limits: BusLimits, message: Message, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    p, v, g = pair(), pair(), pair()
    async with Node("p", p, {"villain": v, "good": g}, replace(limits, banned_ms=600_000)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        raw, good = (Raw(context, bound, keys=keys, server=p.public) for keys in (v, g))
        raw.say(hello("v"), Ping(1))
        good.say(hello("g"), Ping(1))
        assert [await each.hear() for each in (raw, good)] == [Pong(1), Pong(1)]
        [wire] = [each.wire for each in prefill.bus._connections._all() if each.name == "key:villain"]
        assert wire is not None
        many = 50 if message is LARGE else 20_000
        raw.say(*[message] * many)
        while not wire.swamped(limits):
            time.sleep(0.01)  # noqa: ASYNC251 - so that the loop reads none of them before
        strangers = prefill.bus.strangers
        prefill.bus._audit()
        await until(lambda: raw.was_cut_off)
        # ZMQ dials again by itself, and says the rest again: that connection may be found before it has a name.
        assert [(name, error.field) for name, error in prefill.refusals][:1] == [("key:villain", "unread")]
        assert {error.field for _, error in prefill.refusals} == {"unread"}
        assert not prefill.bus.send("key:villain", Ping(2))
        await until(lambda: prefill.bus.strangers > strangers)  # it dials again
        good.say(Ping(3))
        assert await good.hear() == Pong(3)
        assert prefill.bus._zap is not None
        prefill.bus._zap.ban(v.public, 0.0)  # the while is over
        raw = Raw(context, bound, keys=v, server=p.public)  # ZMQ itself does not dial again where it was refused
        raw.say(hello("v"), Ping(4))
        assert await raw.hear() == Pong(4)


@on_loop
async def test_a_message_without_an_end_ends_its_connection_before_it_was_ever_heard(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with Node("p", limits=replace(LIMITS, unread_bytes_max=1 << 20, audit_ms=20)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        good = Raw(context, bound)
        good.say(hello("good"))

        def go_on_for_ever() -> None:
            with Zmtp(int(bound.rpartition(":")[2])) as endless, contextlib.suppress(OSError):
                while True:
                    endless.say(frame(bytes(1 << 16), more=True))

        await asyncio.get_running_loop().run_in_executor(None, go_on_for_ever)
        assert [(name, error.field) for name, error in prefill.refusals] == [("unknown:", "frames")]
        good.say(Ping(1))
        assert await good.hear() == Pong(1)


def test_a_connection_that_was_ended_is_not_found_again_before_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_BUSY", 0.0)
    with tcp.create_server(("127.0.0.1", 0)) as listener, tcp.create_connection(listener.getsockname()) as peer:
        ours, _ = listener.accept()
        sweep = wires.Sweep(listener.getsockname()[1])
        peer.sendall(bytes(1_000))
        with ours:
            while wires.received_bytes(ours.fileno()) != 1_000:
                pass
            [found] = sweep.swamped(set(), unread_bytes_max=100)
            found.frames, found.taken = 1, 10
            assert found.swamped(BusLimits(unread_bytes_max=100))
            found.end()
            assert list(sweep.swamped(set(), unread_bytes_max=100)) == []
            assert not found.swamped(BusLimits(unread_bytes_max=100))


@on_loop
async def test_what_waits_to_be_read_is_known_to_the_byte(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    p, d = pair(), pair()
    for keys, allowed in ((None, None), (p, {"d": d})):
        async with Node("p", keys, allowed) as prefill:
            dialler = d if keys else None
            raw = Raw(context, await prefill.bus.bind(ANY_PORT), keys=dialler, server=p.public if keys else "")
            raw.say(hello("d"), Ping(1))
            assert await raw.hear() == Pong(1)
            [connection] = prefill.bus._connections._all()
            wire = connection.wire
            assert wire is not None
            handshake = wire.unread_bytes
            assert 0 < handshake < 1_024
            sizes = [Grant(1, 1, 1, 1, 0, (Part(0, 0, 1, bytes(8 * n)),), True, 1) for n in range(60)]
            raw.say(*sizes, Ping(2), *[LARGE] * 3, Ping(3))
            raw.socket.send_multipart([encode(Ping(4))] * 3)
            await until(lambda: len(prefill.refusals) == 1)
            await until(lambda wire=wire: wire.frames == 2 + 60 + 5 + 3)
            assert wire.unread_bytes == handshake


@on_loop
async def test_a_muted_connection_that_goes_on_is_hung_up_on(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=60_000, ignored_max=100)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        good.say(hello("good"))
        bad.say(hello("bad"), b"junk")
        bad.say(*[Ping(2)] * 100)
        await until(lambda: prefill.bus.dropped == 100)
        bad.say(Ping(2))
        await until(lambda: bad.was_cut_off)
        assert [(name, error.field) for name, error in prefill.refusals][-1] == ("node:bad", "muted")
        good.say(Ping(1))
        assert await good.hear() == Pong(1)


@on_loop
async def test_large_frames_take_turns_by_their_bytes(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    # By its Hello alone, a slow loop would take so many bytes for a flood of small frames.
    async with Node("p", limits=replace(LIMITS, turn_bytes=1, unread_frames_max=1 << 20)) as prefill:
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
async def test_who_is_revoked_is_neither_heard_nor_told_anything_and_the_others_go_on(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    p, v, g = pair(), pair(), pair()
    async with Node("p", p, {"villain": v, "good": g}) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        villain, good, late = (Raw(context, bound, keys=keys, server=p.public) for keys in (v, g, v))
        villain.say(hello("v"), Ping(1))
        good.say(hello("g"), Ping(1))
        assert [await each.hear() for each in (villain, good)] == [Pong(1), Pong(1)]
        await until(lambda: late.shook_hands)
        assert prefill.bus.allow(AllowList({g.public: "good"})) == ["key:villain"]
        strangers, dropped = prefill.bus.strangers, prefill.bus.dropped
        heard = len(prefill.heard)
        assert not prefill.bus.send("key:villain", Ping(2))
        late.say(hello("v"), Ping(5))  # it has shaken hands, and never said a word
        await until(lambda: prefill.bus.dropped > dropped + 1)  # its Ping may have found the connection at its end
        await until(lambda: villain.was_cut_off and late.was_cut_off)
        again = Raw(context, bound, keys=v, server=p.public)
        again.say(hello("v"))
        await until(lambda: prefill.bus.strangers >= strangers + 3)  # ZMQ dials again for the other two
        good.say(Ping(6))
        assert await good.hear() == Pong(6)
        assert [name for name, _ in prefill.heard[heard:]] == ["key:good"]
        assert all(each.quiet for each in (villain, late, again))
        assert prefill.refusals == []
        # Listed again, it says Hello again.
        assert prefill.bus.allow(AllowList({g.public: "good", v.public: "villain"})) == []
        back = Raw(context, bound, keys=v, server=p.public)
        back.say(hello("v"), Ping(8))
        assert await back.hear() == Pong(8)


@on_loop
async def test_a_key_that_is_listed_under_another_name_has_to_say_hello_for_it(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"old": d}) as prefill:
        raw = Raw(context, await prefill.bus.bind(ANY_PORT), keys=d, server=p.public)
        raw.say(hello("d"), Ping(1))
        assert await raw.hear() == Pong(1)
        assert prefill.bus.allow(AllowList({d.public: "new"})) == ["key:old"]
        await until(lambda: raw.was_cut_off)
        raw.say(Ping(2), hello("d"), Ping(3))
        assert isinstance(await raw.hear(), Reject)
        assert await raw.hear() == Pong(3)
        assert prefill.heard[-1] == ("key:new", Ping(3))


@on_loop
async def test_who_earns_rejects_in_floods_is_not_read_for_a_while(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with Node("p", limits=replace(LIMITS, mute_ms=60_000, rejects_max=8)) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        bad, good = Raw(context, bound), Raw(context, bound)
        bad.say(hello("bad"))
        good.say(hello("good"))
        await until(lambda: len(prefill.heard) == 2)
        for _ in range(8):
            assert prefill.bus.send("node:bad", Reject(1, "unknown_session", ()))
        bad.say(Ping(1))
        await until(lambda: ("node:bad", Ping(1)) in prefill.heard)
        prefill.bus.send("node:bad", Reject(1, "unknown_session", ()))
        dropped = prefill.bus.dropped
        bad.say(Ping(2))
        await until(lambda: prefill.bus.dropped == dropped + 1)
        good.say(Ping(3))
        assert await good.hear() == Pong(3)
        unmute(prefill, "node:bad", 60)
        bad.say(Ping(4))
        await until(lambda: ("node:bad", Ping(4)) in prefill.heard)
        assert ("node:bad", Ping(2)) not in prefill.heard


@on_loop
async def test_endpoints_where_nobody_is_keep_no_place_from_others() -> None:
    async with Node("p") as prefill, Node("d", limits=replace(LIMITS, dials_max=3)) as decode_node:
        bus, bound = decode_node.bus, await prefill.bus.bind(ANY_PORT)
        reached = await decode_node.meet(bound, "d")
        nowhere = [bus.dial(f"tcp://127.0.0.1:{port}") for port in (1, 2)]
        with pytest.raises(WorldError, match="3 are dialled already"):
            bus.dial("tcp://127.0.0.1:3")  # nobody has had the time to answer yet
        await until(lambda: all(bus._dialled[each].hopeless for each in nowhere))
        other = await decode_node.meet(bound.replace("127.0.0.1", "localhost"), "d")
        assert list(bus._dialled) == [reached, nowhere[1], other]
        await decode_node.ping(other, 1)


@on_loop
async def test_a_key_is_of_no_role_that_the_allow_list_does_not_give_it(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}, replace(LIMITS, mute_ms=0)) as prefill:
        prefill.bus.allow(AllowList({d.public: "d"}, {d.public: frozenset({"decode"})}))
        raw = Raw(context, await prefill.bus.bind(ANY_PORT), keys=d, server=p.public)
        as_router = replace_role(hello("d"), "router")
        raw.say(as_router, Ping(1))
        refused = await raw.hear()
        assert isinstance(refused, Reject)
        assert refused.fields == ("Hello.identity.role: 'router', the allow-list lets d be ['decode']",)
        assert isinstance(await raw.hear(), Reject)  # of the Ping: it has no name
        raw.say(hello("d"), Ping(2))
        assert await raw.hear() == Pong(2)
        assert prefill.heard == [("key:d", hello("d")), ("key:d", Ping(2))]
        assert prefill.bus.allow(AllowList({d.public: "d"}, {d.public: frozenset({"router"})})) == ["key:d"]
        await until(lambda: raw.was_cut_off)
        raw.say(hello("d"))
        assert isinstance(await raw.hear(), Reject)


def replace_role(message: Hello, role: str) -> Hello:
    return msgspec.structs.replace(message, identity=msgspec.structs.replace(message.identity, role=role))


@on_loop
async def test_who_hangs_up_before_it_is_revoked_is_cut_off_all_the_same(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """A session outlives its connection: whoever holds it has to hear that its peer is listed no more."""
    p, v, g = pair(), pair(), pair()
    async with Node("p", p, {"villain": v, "good": g}) as prefill:
        bound = await prefill.bus.bind(ANY_PORT)
        villain, good = (Raw(context, bound, keys=keys, server=p.public) for keys in (v, g))
        villain.say(hello("v"))
        good.say(hello("g"))
        await until(lambda: len(prefill.heard) == 2)
        villain.socket.close()
        await until(lambda: not prefill.bus.send("key:villain", Ping(1)))
        assert prefill.bus.allow(AllowList({g.public: "good"})) == ["key:villain"]
        assert prefill.bus.allow(AllowList({g.public: "good"})) == []


@on_loop
async def test_a_listener_that_is_revoked_is_hung_up_on() -> None:
    p, d, other = pair(), pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p, "o": other}) as decode_node:
        peer = await decode_node.meet(f"{p.public}@{await prefill.bus.bind(ANY_PORT)}", "d")
        await decode_node.ping(peer, 1)
        assert decode_node.bus.allow(AllowList({other.public: "o"})) == [peer]
        assert not decode_node.bus.send(peer, Ping(2))
        with pytest.raises(ConfigError, match="not on the allow-list"):
            decode_node.bus.dial(peer)


class Between:
    """Who sits on the wire between two nodes: keeps what the dialler says, and may say it again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.kept = bytearray()
        self._onward: asyncio.StreamWriter | None = None

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, self._onward = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks = [asyncio.create_task(self._pump(reader, self._onward, self.kept))]
        self._tasks.append(asyncio.create_task(self._pump(back, writer, bytearray())))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        while piece := await reader.read(1 << 16):
            kept += piece
            writer.write(piece)
        writer.close()

    def say_again(self, piece: bytes) -> None:
        assert self._onward is not None
        self._onward.write(piece)


@on_loop
async def test_a_session_that_is_replayed_on_another_connection_is_not_heard() -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
        port = int((await prefill.bus.bind(ANY_PORT)).rpartition(":")[2])
        between = Between(port)
        peer = await decode_node.meet(f"{p.public}@tcp://127.0.0.1:{await between.open()}", "d")
        await decode_node.ping(peer, 1)
        await decode_node.ping(peer, 2)  # by now every Ping(1) of its own is heard
        heard = len(prefill.heard)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(between.kept)
        await reader.read(64)  # the greeting, which is no secret
        while await reader.read(1 << 16):  # until it is hung up on
            pass
        assert [message for _, message in prefill.heard[heard:] if message == Ping(1)] == []
        await decode_node.ping(peer, 3)
        writer.close()


@on_loop
async def test_a_frame_that_is_replayed_within_its_connection_ends_it_and_is_not_heard_twice() -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as prefill, Node("d", d, {"p": p}) as decode_node:
        between = Between(int((await prefill.bus.bind(ANY_PORT)).rpartition(":")[2]))
        peer = await decode_node.meet(f"{p.public}@tcp://127.0.0.1:{await between.open()}", "d")
        await decode_node.ping(peer, 1)
        start = len(between.kept)
        assert decode_node.bus.send(peer, Ping(2))
        await until(lambda: (peer, Pong(2)) in decode_node.heard)
        between.say_again(bytes(between.kept[start:]))
        await until(lambda: not decode_node.bus._dialled[peer].connected)
        await decode_node.ping(peer, 3)  # it has a new connection
        assert [message for _, message in prefill.heard].count(Ping(2)) == 1


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

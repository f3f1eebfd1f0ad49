"""A session's line beside ZMQ: what goes by it, what it refuses, and that nothing is lost where it cannot carry it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from struct import pack

import msgspec
import pytest

from pdtransfer.bus import bus, dialled
from pdtransfer.bus.line import OPENING, SessionLine
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import (
    Abort,
    Goodbye,
    Grant,
    Granted,
    Identity,
    Landed,
    Message,
    Part,
    Ping,
    Ranks,
    Reject,
    Released,
    Welcome,
    encode,
)
from tests.support.bus_peers import ANY_PORT, LIMITS, Node
from tests.support.internals import lines_of
from tests.support.waiting import until

SESSION = 5
LANDED = Landed(SESSION, 1, 4_096, b"aux", b"")


class Ends:
    """One line over a socket pair, whose other end the test holds."""

    def __init__(self, *, greeted: bool = True, broken: int = 0, **limits: int) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.theirs.setblocking(False)
        self.taken: list[bytes] = []
        self.ended: list[RemoteProtocolError | None] = []
        self._broken = broken
        self.line = SessionLine(
            self.ours, peer="p", process="p", session=SESSION, greeted=greeted, take=self._take,
            ended=lambda _, error: self.ended.append(error), limits=replace(LIMITS, **limits),
            loop=asyncio.get_running_loop(),
        )  # fmt: skip

    def _take(self, _: SessionLine, frame: bytes) -> None:
        self.taken.append(frame)
        if len(self.taken) == self._broken:
            raise ValueError("a defect of the node")

    def send(self, *frames: bytes) -> None:
        self.theirs.sendall(b"".join(pack("<I", len(frame)) + frame for frame in frames))

    def received(self) -> bytes:
        received = b""
        while True:
            try:
                part = self.theirs.recv(1 << 20)
            except BlockingIOError:
                return received
            if not part:
                return received
            received += part


async def test_frames_come_whole_and_in_order_however_they_are_cut() -> None:
    ends = Ends()
    frames = [b"", b"a", b"b" * 300, b"c" * LIMITS.line_bytes_max]
    for byte in b"".join(pack("<I", len(frame)) + frame for frame in frames[:3]):
        ends.theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    ends.send(frames[3], *frames)
    await until(lambda: len(ends.taken) == 8)
    assert ends.taken == [*frames, *frames]
    ends.line.close()


async def test_a_turn_takes_a_bounded_number_of_frames() -> None:
    ends = Ends(turn_messages=4)
    ends.send(*[b"x"] * 10)
    seen: list[int] = []
    while len(ends.taken) < 10:
        before = len(ends.taken)
        await asyncio.sleep(0)
        seen.append(len(ends.taken) - before)
    assert max(seen) == 4
    ends.line.close()


async def test_an_exception_of_the_node_costs_no_frame_behind_it() -> None:
    ends, faults = Ends(broken=1), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context.get("exception"))))
    ends.send(b"1", b"2", b"3")
    await until(lambda: len(ends.taken) == 3)
    assert faults == ["a defect of the node"]
    ends.line.close()


async def test_a_line_sends_nothing_before_its_peer_has_opened_it() -> None:
    ends = Ends(greeted=False)
    assert not ends.line.send(b"early")
    ends.theirs.sendall(OPENING[:3])
    await asyncio.sleep(0.01)
    ends.theirs.sendall(OPENING[3:])
    await until(lambda: ends.line.send(b"now"))
    assert ends.received() == OPENING + pack("<I", 3) + b"now"
    ends.line.close()


@pytest.mark.parametrize("sent", [b"x", OPENING[:7] + b"!", b"\0" * 40])
async def test_another_opening_ends_the_line(sent: bytes) -> None:
    ends = Ends(greeted=False)
    ends.theirs.sendall(sent)
    await until(lambda: ends.ended)
    assert "it begins with" in str(ends.ended[0])
    assert not ends.line.send(b"x")


async def test_a_frame_that_is_announced_too_long_ends_the_line_unread() -> None:
    ends = Ends()
    ends.theirs.sendall(pack("<I", LIMITS.line_bytes_max + 1))
    await until(lambda: ends.ended)
    assert str(ends.ended[0]) == f"line: a frame of {LIMITS.line_bytes_max + 1} bytes, at most {LIMITS.line_bytes_max}"
    assert ends.taken == []


async def test_a_line_whose_peer_does_not_read_takes_no_more_and_cuts_no_frame() -> None:
    ends = Ends()
    frame, sent = b"f" * 9_000, 0
    while ends.line.send(frame):
        sent += 1
        assert sent < 10_000, "a Unix socket holds a bounded number of bytes"
    assert not ends.line.send(frame)
    received = b""
    whole = len(OPENING) + sent * (4 + len(frame))

    def read() -> bool:
        nonlocal received
        received += ends.received()
        return len(received) >= whole

    await until(read)
    assert received == OPENING + sent * (pack("<I", len(frame)) + frame)
    assert ends.line.send(b"again")
    assert not ends.line.send(b"l" * (LIMITS.line_bytes_max + 1))
    ends.line.close()


def narrow(ends: Ends) -> None:
    """Lets the kernel take a part of a frame: its least buffer for what is sent holds about 2 KiB a piece."""
    ends.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


async def test_a_frame_that_the_kernel_takes_a_part_of_arrives_whole_and_nothing_comes_between() -> None:
    ends = Ends()
    narrow(ends)
    frames = [bytes([number]) * LIMITS.line_bytes_max for number in range(3)]
    received = b""
    for frame in frames:
        assert ends.line.send(frame)
        assert ends.line.unfinished == frame, "the kernel has taken a part of it"
        assert not ends.line.send(b"between")

        def read() -> bool:
            nonlocal received
            received += ends.received()
            return not ends.line.unfinished

        await until(read)
    received += ends.received()
    assert received == OPENING + b"".join(pack("<I", len(frame)) + frame for frame in frames)
    ends.line.close()


async def test_a_line_that_ends_within_a_frame_names_it() -> None:
    ends = Ends()
    narrow(ends)
    assert ends.line.send(b"x" * LIMITS.line_bytes_max)
    ends.send(b"the last")
    ends.theirs.close()
    await until(lambda: ends.ended)
    assert (ends.ended, ends.taken) == ([None], [b"the last"])
    assert ends.line.unfinished == b"x" * LIMITS.line_bytes_max
    assert not ends.line.send(b"y")


@pytest.mark.parametrize("reads", [False, True])
async def test_a_line_that_nobody_reads_takes_nothing_more(reads: bool) -> None:
    """As one that its peer has closed where a forked child still holds it: it would swallow what is sent."""
    ends = Ends(line_unread_ms=50)
    for _ in range(10):
        if reads:
            ends.received()
        assert ends.line.send(b"read") or not reads
        await asyncio.sleep(0.02)
    assert ends.line.send(b"more") is reads
    ends.received()
    assert ends.line.send(b"again"), "it was read"
    ends.line.close()


async def test_a_closed_line_ends_although_a_forked_child_has_its_descriptor() -> None:
    """A child has what os.dup makes here: another descriptor of the same connection."""
    ends = Ends()
    inherited = os.dup(ends.ours.fileno())
    ends.line.send(b"the last")
    ends.line.close()
    assert ends.received() == OPENING + pack("<I", 8) + b"the last"
    assert ends.theirs.recv(1) == b"", "the end"
    with pytest.raises(BrokenPipeError):
        ends.theirs.send(b"x")
    os.close(inherited)


async def test_what_has_been_sent_is_read_at_once_and_within_a_bound() -> None:
    ends = Ends(line_queue_frames=100)
    ends.send(*[b"x"] * 90)
    ends.line.read_now()
    assert len(ends.taken) == 90
    ends.send(*[b"x"] * 90)
    for _ in range(3):
        ends.line.read_now()
    assert len(ends.taken) == 100, "the loop has not turned since"
    await until(lambda: len(ends.taken) == 180)
    ends.line.close()
    ends.line.read_now()


async def test_what_is_read_at_once_and_not_taken_yet_is_bounded() -> None:
    """A peer that sends without end, by the line and by ZMQ, makes nobody hold more than twice what a line holds."""
    ends, accepted = Ends(line_queue_frames=1), 0
    for _ in range(200):
        with suppress(BlockingIOError):
            accepted += ends.theirs.send((pack("<I", 4) + b"full") * 8_192)
        ends.line.read_now()
    assert len(ends.taken) == 1
    assert len(ends.line._received) <= 2 * LIMITS.line_queue_bytes < accepted
    assert accepted < 4 * LIMITS.line_queue_bytes, "what is read, and what the kernel holds"
    ends.line.close()


# On a bus


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Node, Node, str]]:
    """A prefill's and a decode's bus with a line of SESSION, and decode's name for prefill."""
    async with Node("p") as prefill, Node("d") as decode_node:
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
        await until(lambda: prefill.received)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefill.bus.attach("node:d", SESSION, ours, greeted=False)
        theirs.recv(len(OPENING))
        decode_node.bus.attach(peer, SESSION, theirs, greeted=True)
        await asyncio.sleep(0.01)  # prefill's line has read the answer
        prefill.received.clear()
        yield prefill, decode_node, peer


async def test_what_is_sent_about_grants_goes_by_the_line_and_all_else_by_zmq(prefill: Node, decode_node: Node) -> None:
    # they have no connection by ZMQ
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    prefill.bus.attach("node:d", SESSION, ours, greeted=False)
    theirs.recv(len(OPENING))
    decode_node.bus.attach("p", SESSION, theirs, greeted=True)
    await until(lambda: prefill.bus.send("node:d", LANDED))
    assert not prefill.bus.send("node:d", msgspec.structs.replace(LANDED, session=6)), "this session has no line"
    assert not prefill.bus.send("node:d", Ping(1))
    assert not prefill.bus.send("node:x", LANDED), "the line is of another peer"
    await until(lambda: decode_node.received)
    assert decode_node.received == [("p", LANDED)]
    for message in (Released(SESSION, 1), Abort(SESSION, 1, 7)):
        assert decode_node.bus.send("p", message)
    await until(lambda: len(prefill.received) == 2)
    assert (decode_node.bus.received, prefill.bus.received) == (1, 2) == (prefill.bus.sent, decode_node.bus.sent)


async def test_a_frame_too_long_for_the_line_goes_by_zmq() -> None:
    async with joined() as (prefill, decode_node, peer):
        grant = Grant(SESSION, 1, 1, 1, 0, (Part(0, 0, 1, bytes(LIMITS.line_bytes_max)),), True, 1)
        assert decode_node.bus.send(peer, grant)
        await until(lambda: prefill.received == [("node:d", grant)])
        assert lines_of(prefill.bus)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (encode(Ping(1)), "kind: Ping, which no line carries"),
        (encode(Granted(6, 1)), "Granted.session: 0x6, on the line of 0x5"),
        (b"\xc1", "frame: not msgpack"),
    ],
)
async def test_a_breach_ends_the_line_and_messages_go_by_zmq(sent: bytes, field: str) -> None:
    async with joined() as (prefill, decode_node, peer):
        assert lines_of(prefill.bus)[SESSION].send(sent)
        await until(lambda: decode_node.refusals)
        name, error = decode_node.refusals[0]
        assert name == peer
        assert str(error).startswith(field)
        assert decode_node.bus.refused == 1
        await until(lambda: not lines_of(prefill.bus), "its end is seen")
        assert prefill.bus.send("node:d", LANDED)
        await until(lambda: (peer, LANDED) in decode_node.received)
        assert lines_of(decode_node.bus) == {}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("last", [Goodbye(7, "shutdown"), Reject(SESSION, "shutdown", ()), Ping(1)])
async def test_what_a_peer_has_sent_by_a_line_comes_before_what_it_sends_by_zmq(last: Message, side: str) -> None:
    """However many frames a turn of the loop takes of a line, and however late that turn comes."""
    async with joined() as (prefill, decode_node, peer):
        sender, to, receiver, source = (prefill, "node:d", decode_node, peer)
        if side == "decode":
            sender, to, receiver, source = decode_node, peer, prefill, "node:d"
        sent = [
            Landed(SESSION, number, 1, b"", b"") if side == "prefill" else Released(SESSION, number)
            for number in range(1, 61)
        ]
        for message in (*sent, last):
            assert sender.bus.send(to, message)
        time.sleep(0.2)  # noqa: ASYNC251 - the I/O threads carry the last one meanwhile, and the loop reads nothing
        await until(lambda: (source, last) in receiver.received)
        assert receiver.received == [(source, message) for message in (*sent, last)]


async def test_the_lines_of_a_process_and_no_others_are_read_before_its_messages_by_any_of_its_names() -> None:
    async with joined() as (prefill, decode_node, peer), Node("q") as other:
        alias = await decode_node.meet(peer.replace("127.0.0.1", "localhost"), "d")
        stranger = await decode_node.meet(await other.bus.bind(ANY_PORT), "d")
        for node, name, incarnation in ((prefill, peer, 8), (prefill, alias, 8), (other, stranger, 9)):
            await decode_node.ping(name, incarnation)  # by which its answer goes
            welcome = Welcome(1, Identity("n", "prefill", incarnation, Ranks(), "model", b"", 16))
            node.bus.send("node:d", welcome)
            await until(lambda name=name, welcome=welcome: (name, welcome) in decode_node.received)
        for node, name, session in ((prefill, peer, SESSION), (other, stranger, 6)):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            node.bus.attach("node:d", session, ours, greeted=False)
            theirs.recv(len(OPENING))
            decode_node.bus.attach(name, session, theirs, greeted=True)
        await decode_node.ping(alias, 10)
        await asyncio.sleep(0.01)  # the openings are read
        decode_node.received.clear()
        strangers_reads: list[int] = []
        lines_of(decode_node.bus)[6].read_now = lambda: strangers_reads.append(1)  # type: ignore[method-assign]
        sent = [Landed(SESSION, number, 1, b"", b"") for number in range(1, 61)]
        for message in (*sent, Goodbye(8, "shutdown")):
            assert prefill.bus.send("node:d", message)
        time.sleep(0.2)  # noqa: ASYNC251 - the I/O threads carry the last one meanwhile, and the loop reads nothing
        await until(lambda: (alias, Goodbye(8, "shutdown")) in decode_node.received)
        assert decode_node.received == [*((peer, message) for message in sent), (alias, Goodbye(8, "shutdown"))]
        assert not strangers_reads


async def test_a_message_that_its_line_does_not_take_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined() as (_, decode_node, peer):
        encoded: list[Message] = []
        monkeypatch.setattr(bus, "encode", lambda message: encoded.append(message) or encode(message))
        grant = Grant(SESSION, 1, 1, 1, 0, (Part(0, 0, 1, bytes(LIMITS.line_bytes_max)),), True, 1)
        assert decode_node.bus.send(peer, grant)
        assert decode_node.bus.send(peer, Released(SESSION, 1))
        assert encoded == [grant, Released(SESSION, 1)]


async def test_a_frame_that_a_line_has_begun_goes_by_zmq_when_the_line_ends() -> None:
    async with joined() as (prefill, decode_node, peer):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefill.bus.attach("node:d", SESSION, ours, greeted=True)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        large = Landed(SESSION, 1, 4_096, bytes(LIMITS.line_bytes_max - 100), b"")
        assert prefill.bus.send("node:d", large)
        assert lines_of(prefill.bus)[SESSION].unfinished
        assert prefill.bus.send("node:d", Goodbye(7, "shutdown"))
        await until(lambda: len(decode_node.received) == 2)
        assert decode_node.received == [(peer, large), (peer, Goodbye(7, "shutdown"))]
        theirs.close()


async def test_a_reject_of_another_peers_session_ends_no_line() -> None:
    async with joined() as (prefill, _, __):
        prefill.bus.send("node:x", Reject(SESSION, "breach", ()))
        assert list(lines_of(prefill.bus)) == [SESSION]


async def test_there_are_no_more_lines_than_the_processs_descriptors_are_enough_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialled.resource, "getrlimit", lambda _: (64, 64))
    async with Node("p") as prefill:
        theirs: list[socket.socket] = []
        for session in range(1, 21):
            line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            theirs.append(other)
            prefill.bus.attach(f"node:d{session % 3}", session, line, greeted=False)
        assert list(lines_of(prefill.bus)) == [*range(1, 10)]
        assert [each.recv(100) for each in theirs[9:]] == [b""] * 11, "these go by ZMQ"
        prefill.bus.detach(4)
        line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefill.bus.attach("node:d", 30, line, greeted=False)
        assert other.recv(100) == OPENING, "a place was free"
        for each in (*theirs, other):
            each.close()


@pytest.mark.parametrize("way", ["detach", "hang_up", "close", "reject", "goodbye"])
async def test_a_line_ends_with_its_session_its_peer_and_its_bus(way: str) -> None:
    async with joined() as (prefill, decode_node, peer):
        match way:
            case "goodbye":
                decode_node.bus.send(peer, Goodbye(7, "shutdown"))
            case "detach":
                decode_node.bus.detach(SESSION)
            case "hang_up":
                decode_node.bus.hang_up(peer)
            case "reject":
                decode_node.bus.send(peer, Reject(SESSION, "breach", ()))
            case _:
                await decode_node.bus.close()
        assert lines_of(decode_node.bus) == {}
        await until(lambda: not lines_of(prefill.bus))

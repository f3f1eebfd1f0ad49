"""A session's line beside ZMQ: what goes by it, what it refuses, and that nothing is lost where it cannot carry it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from struct import pack

import pytest

from pdtransfer.bus.line import OPENING, SessionLine
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import Abort, Grant, Granted, Landed, Part, Ping, Reject, Released, encode
from tests.support.bus_peers import ANY_PORT, LIMITS, Node
from tests.support.internals import lines_of
from tests.support.waiting import on_loop, until

SESSION = 5
LANDED = Landed(SESSION, 1, 4_096, b"aux", b"")


class Ends:
    """One line over a socket pair, whose other end the test holds."""

    def __init__(self, *, greeted: bool = True, broken: int = 0, **limits: int) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.theirs.setblocking(False)
        self.taken: list[bytes] = []
        self.ended: list[RemoteProtocolError | None] = []
        self._broken = broken
        self.line = SessionLine(
            ours, peer="p", session=SESSION, greeted=greeted, take=self._take,
            ended=lambda _, error: self.ended.append(error), limits=replace(LIMITS, **limits),
        )  # fmt: skip

    def _take(self, _: SessionLine, frame: bytes) -> None:
        self.taken.append(frame)
        if len(self.taken) == self._broken:
            raise ValueError("a defect of the node")

    def say(self, *frames: bytes) -> None:
        self.theirs.sendall(b"".join(pack("<I", len(frame)) + frame for frame in frames))

    def heard(self) -> bytes:
        heard = b""
        while True:
            try:
                part = self.theirs.recv(1 << 20)
            except BlockingIOError:
                return heard
            if not part:
                return heard
            heard += part


@on_loop
async def test_frames_come_whole_and_in_order_however_they_are_cut() -> None:
    ends = Ends()
    frames = [b"", b"a", b"b" * 300, b"c" * LIMITS.line_bytes_max]
    for byte in b"".join(pack("<I", len(frame)) + frame for frame in frames[:3]):
        ends.theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    ends.say(frames[3], *frames)
    await until(lambda: len(ends.taken) == 8)
    assert ends.taken == [*frames, *frames]
    ends.line.close()


@on_loop
async def test_a_turn_takes_a_bounded_number_of_frames() -> None:
    ends = Ends(turn_messages=4)
    ends.say(*[b"x"] * 10)
    seen: list[int] = []
    while len(ends.taken) < 10:
        before = len(ends.taken)
        await asyncio.sleep(0)
        seen.append(len(ends.taken) - before)
    assert max(seen) == 4
    ends.line.close()


@on_loop
async def test_an_exception_of_the_node_costs_no_frame_behind_it() -> None:
    ends, faults = Ends(broken=1), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context.get("exception"))))
    ends.say(b"1", b"2", b"3")
    await until(lambda: len(ends.taken) == 3)
    assert faults == ["a defect of the node"]
    ends.line.close()


@on_loop
async def test_a_line_sends_nothing_before_its_peer_has_opened_it() -> None:
    ends = Ends(greeted=False)
    assert not ends.line.send(b"early")
    ends.theirs.sendall(OPENING[:3])
    await asyncio.sleep(0.01)
    ends.theirs.sendall(OPENING[3:])
    await until(lambda: ends.line.send(b"now"))
    assert ends.heard() == OPENING + pack("<I", 3) + b"now"
    ends.line.close()


@pytest.mark.parametrize("said", [b"x", OPENING[:7] + b"!", b"\0" * 40])
@on_loop
async def test_another_opening_ends_the_line(said: bytes) -> None:
    ends = Ends(greeted=False)
    ends.theirs.sendall(said)
    await until(lambda: ends.ended)
    assert "it begins with" in str(ends.ended[0])
    assert not ends.line.send(b"x")


@on_loop
async def test_a_frame_that_is_announced_too_long_ends_the_line_unread() -> None:
    ends = Ends()
    ends.theirs.sendall(pack("<I", LIMITS.line_bytes_max + 1))
    await until(lambda: ends.ended)
    assert str(ends.ended[0]) == f"line: a frame of {LIMITS.line_bytes_max + 1} bytes, at most {LIMITS.line_bytes_max}"
    assert ends.taken == []


@on_loop
async def test_a_line_whose_peer_does_not_read_takes_no_more_and_cuts_no_frame() -> None:
    ends = Ends()
    frame, sent = b"f" * 9_000, 0
    while ends.line.send(frame):
        sent += 1
        assert sent < 10_000, "a Unix socket holds a bounded number of bytes"
    assert not ends.line.send(frame)
    heard = b""
    whole = len(OPENING) + sent * (4 + len(frame))

    def read() -> bool:
        nonlocal heard
        heard += ends.heard()
        return len(heard) >= whole

    await until(read)
    assert heard == OPENING + sent * (pack("<I", len(frame)) + frame)
    assert ends.line.send(b"again")
    assert not ends.line.send(b"l" * (LIMITS.line_bytes_max + 1))
    ends.line.close()


# On a bus


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Node, Node, str]]:
    """A prefill's and a decode's bus with a line of SESSION, and decode's name for prefill."""
    async with Node("p") as prefill, Node("d") as decode_node:
        peer = await decode_node.meet(await prefill.bus.bind(ANY_PORT), "d")
        await until(lambda: prefill.heard)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefill.bus.attach("node:d", SESSION, ours, greeted=False)
        theirs.recv(len(OPENING))
        decode_node.bus.attach(peer, SESSION, theirs, greeted=True)
        await asyncio.sleep(0.01)  # prefill's line has read the answer
        prefill.heard.clear()
        yield prefill, decode_node, peer


@on_loop
async def test_what_is_sent_about_grants_goes_by_the_line_and_all_else_by_zmq() -> None:
    async with Node("p") as prefill, Node("d") as decode_node:  # they have no connection by ZMQ
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        prefill.bus.attach("node:d", SESSION, ours, greeted=False)
        theirs.recv(len(OPENING))
        decode_node.bus.attach("p", SESSION, theirs, greeted=True)
        await until(lambda: prefill.bus.send("node:d", LANDED))
        assert not prefill.bus.send("node:d", replace_session(LANDED, 6)), "this session has no line"
        assert not prefill.bus.send("node:d", Ping(1))
        assert not prefill.bus.send("node:x", LANDED), "the line is of another peer"
        await until(lambda: decode_node.heard)
        assert decode_node.heard == [("p", LANDED)]
        for message in (Released(SESSION, 1), Abort(SESSION, 1, 7)):
            assert decode_node.bus.send("p", message)
        await until(lambda: len(prefill.heard) == 2)
        assert (decode_node.bus.received, prefill.bus.received) == (1, 2)


@on_loop
async def test_a_frame_too_long_for_the_line_goes_by_zmq() -> None:
    async with joined() as (prefill, decode_node, peer):
        grant = Grant(SESSION, 1, 1, 1, 0, (Part(0, 0, 1, bytes(LIMITS.line_bytes_max)),), True, 1)
        assert decode_node.bus.send(peer, grant)
        await until(lambda: prefill.heard == [("node:d", grant)])
        assert lines_of(prefill.bus)


def replace_session(landed: Landed, session: int) -> Landed:
    return Landed(session, landed.grant, landed.kv_bytes, landed.aux, landed.checksum)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (encode(Ping(1)), "kind: Ping, which no line carries"),
        (encode(Granted(6, 1)), "Granted.session: 0x6, on the line of 0x5"),
        (b"\xc1", "frame: not msgpack"),
    ],
)
@on_loop
async def test_a_breach_ends_the_line_and_messages_go_by_zmq(said: bytes, field: str) -> None:
    async with joined() as (prefill, decode_node, peer):
        assert lines_of(prefill.bus)[SESSION].send(said)
        await until(lambda: decode_node.refusals)
        name, error = decode_node.refusals[0]
        assert name == peer
        assert str(error).startswith(field)
        assert decode_node.bus.refused == 1
        await until(lambda: not lines_of(prefill.bus), "its end is seen")
        assert prefill.bus.send("node:d", LANDED)
        await until(lambda: (peer, LANDED) in decode_node.heard)
        assert lines_of(decode_node.bus) == {}


@pytest.mark.parametrize("way", ["detach", "hang_up", "close", "reject"])
@on_loop
async def test_a_line_ends_with_its_session_its_peer_and_its_bus(way: str) -> None:
    async with joined() as (prefill, decode_node, peer):
        match way:
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

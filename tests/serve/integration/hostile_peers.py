"""Peers that break the protocol on purpose: a decode and a prefill over raw sockets, a router that lies, junk."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import EngineDescription
from pdtransfer.serve.process.fleet import Daemon
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.wire import (
    Begin,
    Goodbye,
    Grant,
    Hello,
    Identity,
    Load,
    Message,
    Part,
    Ping,
    Pong,
    Ranks,
    Register,
    Registered,
    Reject,
    Sampling,
    Welcome,
    decode,
    encode,
    pack_extents,
    pack_ids,
)

CANARY = 0xEE
SECONDS = 60.0

JUNK = [
    b"",
    b"\x00",
    b"\xff" * 1_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x92\x01\x01",  # a Hello without fields
    b"\x93\x01\xcc\xff\x00",  # a kind that is none
    b"\x93\x02\x01\x00",  # a version that is none
    b"\x91" * 5_000,  # nested
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xc6\xff\xff\xff\xff",  # four gigabytes
    b"\x81\xa1a\x01",  # a map
]


def identity(role: str, like: Identity | EngineDescription, node: str) -> Identity:
    return Identity(node, role, secrets.randbits(64), Ranks(), like.model, like.weights, 16)  # pyright: ignore


def extents(*pairs: tuple[int, int]) -> bytes:
    return pack_extents(np.array(pairs, dtype=np.int64).reshape(-1, 2))


class Peer:
    """One socket, one frame a message; what is not asked for is skipped, pings are answered where `alive`."""

    def __init__(self, socket: zmq.asyncio.Socket, route: bytes | None = None) -> None:
        self._socket, self._route = socket, route
        self.incarnation = 0

    async def send(self, *messages: Message | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            await self._socket.send_multipart([frame] if self._route is None else [self._route, frame])

    async def receive(self, *kinds: type[Any]) -> Any:
        """The next message of these kinds. Load and the like pass by."""
        async with asyncio.timeout(SECONDS):
            while True:
                *route, frame = await self._socket.recv_multipart()
                message = decode(frame)
                if route:
                    self._route = route[0]
                if isinstance(message, Ping) and self.incarnation:
                    await self.send(Pong(self.incarnation))
                if isinstance(message, kinds):
                    return message


@asynccontextmanager
async def dialler(daemon: Daemon) -> AsyncIterator[Callable[[], Peer]]:
    """Makes connections to a daemon."""
    context = zmq.asyncio.Context()

    def dial() -> Peer:
        socket = context.socket(zmq.DEALER)
        socket.connect(daemon.ready["endpoint"])
        return Peer(socket)

    try:
        yield dial
    finally:
        context.destroy(linger=200)


class FakeDecode:
    """A decode node with an arena of its own, full of canaries, whose grants are the test's."""

    def __init__(self, peer: Peer, like: EngineDescription, component: Component, directory: Path) -> None:
        self.peer, self._like, self.component = peer, like, component
        self.arena = ArenaMemory.create(component.layout.end, huge_pages="never")
        self.arena.mapping.array[:] = CANARY
        self._transport = ShmArena(self.arena, directory=directory)
        self.session = self.incarnation = 0

    async def greet(self, node: str = "mallory") -> Welcome:
        mine = identity("decode", self._like, node)
        self.incarnation = mine.incarnation
        await self.peer.send(Hello(1, 1, mine))
        return await self.peer.receive(Welcome)

    async def register(self) -> int:
        """A session whose arena is mapped."""
        session = secrets.randbits(63) + 1
        await self.peer.send(Register(session, (self.component,), await self._transport.offer(session)))
        message = await self.peer.receive(Registered, Reject)
        assert isinstance(message, Registered), message
        self.session = session
        return session

    def grant(self, number: int, *parts: Part, room: int = 1, tokens: int = 10, **more: Any) -> Grant:
        fields = {"prefix": 0, "send_aux": True, "time_left_ms": 60_000, **more}
        return Grant(self.session, number, room, tokens, fields.pop("prefix"), tuple(parts), **fields)

    @property
    def untouched(self) -> bool:
        return bool((self.arena.mapping.array == CANARY).all())

    async def close(self) -> None:
        await self.peer.send(Goodbye(self.incarnation, "shutdown"))
        await self._transport.close()
        self.arena.close()


class FakePrefill:
    """A prefill that decode is made to dial: `endpoint` goes into a Begin."""

    def __init__(self, context: zmq.asyncio.Context, like: Identity) -> None:
        self._like = like
        socket = context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = Peer(socket)

    async def registered(self, *, arena_bytes: int | None = None) -> Register:
        """Meets decode, and says that the arena is mapped, which it is not."""
        await self.peer.receive(Hello)
        mine = identity("prefill", self._like, "mallory")
        self.peer.incarnation = mine.incarnation
        await self.peer.send(Welcome(1, mine))
        register = await self.peer.receive(Register)
        await self.peer.send(Registered(register.session, arena_bytes or register.reach.arena_bytes))
        return register


class FakeRouter:
    """A router that begins rooms on one daemon."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def greet(self) -> Identity:
        mine = Identity(f"trickster-{secrets.token_hex(4)}", "router", secrets.randbits(64), Ranks(), "", b"", 16)
        self.peer.incarnation = mine.incarnation
        await self.peer.send(Hello(1, 1, mine))
        theirs = (await self.peer.receive(Welcome)).identity
        await self.peer.receive(Load)
        return theirs

    async def begin(self, *peers: str, tokens: int = 20, max_tokens: int = 4, **more: Any) -> int:
        room = secrets.randbits(63)
        prompt = more.pop("prompt", pack_ids([97 + index % 26 for index in range(tokens)]))
        await self.peer.send(Begin(room, prompt, Sampling(max_tokens=max_tokens), peers, 20_000, **more))
        return room


class Canaries:
    """The upper half of a decode daemon's arena, where its first-come slots never are: nobody writes there."""

    def __init__(self, daemon: Daemon) -> None:
        fds = Path(f"/proc/{daemon.process.pid}/fd")
        found = next(path for path in fds.iterdir() if f"memfd:{daemon.ready['node']}" in os.readlink(path))
        fd = os.open(found, os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self._upper = np.frombuffer(mapped, np.uint8)[len(mapped) // 2 :]
        self._upper[:] = CANARY

    @property
    def untouched(self) -> bool:
        return bool((self._upper == CANARY).all())


async def beside(honest: Callable[[], Awaitable[None]], hostile: Callable[[], Awaitable[None]]) -> int:
    """Runs the hostile case while honest requests go on one after the other; returns how many were served."""
    over = asyncio.ensure_future(hostile())
    served = 0
    while not over.done() or not served:
        await honest()
        served += 1
    await over
    return served

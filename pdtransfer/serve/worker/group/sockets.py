"""Tensors between the ranks of one worker, over TCP: bytes of arrays whose shape both sides know.

Each pair of ranks that exchange tensors has one connection: those of a stage, and those of equal tp_rank in
neighbouring stages. A rank that dies ends its connections, and so the calls of the others. A frozen rank stops them
until the bus reports its silence.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import select
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....bus.keys import Address, address_of
from ....errors import WorldError
from ....wire import Ranks
from ....wire.ranks import label, rank_index, ranks_of

MEET_S = 60.0  # seconds until all ranks are connected
GREETING_S = 2.0  # seconds for a connection to prove whose it is
GREETINGS_MAX = 64  # connections that may do so at once
AHEAD_MAX = 2  # chunks that a stage may be ahead of the next
SECRET_BYTES = 32

_INDEX = struct.Struct("<H")
_SIZE = struct.Struct("<Q")


class RankSockets:
    """Implements engine_api.Group; `listen` and `meet` must be called first."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        first = ranks.pp_rank * ranks.tp_size
        self._index = rank_index(ranks)
        self._stage = range(first, first + ranks.tp_size)
        self._before, self._behind = self._index - ranks.tp_size, self._index + ranks.tp_size
        beside = {index for index in (self._before, self._behind) if 0 <= index < ranks.tp_size * ranks.pp_size}
        self._peers = beside | {*self._stage} - {self._index}
        self._listener: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}  # by the other rank's number
        self._complete = asyncio.Event()
        self._ahead: Queue[bytes] = Queue(AHEAD_MAX)  # what the next stage has not taken yet
        self._gone: OSError | None = None  # why the next stage takes nothing more

    # Meeting

    def listen(self, host: str) -> str:
        """Takes connections at a port of this host's address; returns the endpoint, for the other ranks."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind((host, 0))
        listener.listen()
        self._listener = listener
        return address_of(host, listener.getsockname()[1])

    async def meet(self, endpoints: Sequence[str], secret: bytes) -> None:
        """Connects to the ranks before this one, and waits for those behind it. `endpoints` are those of all ranks by
        number. Raises WorldError with the ranks that are missing."""
        taking = asyncio.ensure_future(self._take_links(secret))
        try:
            async with asyncio.timeout(MEET_S):
                for index in sorted(index for index in self._peers if index < self._index):
                    await self._dial(index, Address.parse(endpoints[index]), secret)
                await self._complete.wait()
        except TimeoutError:
            missing = ", ".join(map(self._name, sorted(self._peers - self._links.keys())))
            raise WorldError(f"{missing} did not connect within {MEET_S:.0f} s") from None
        finally:
            taking.cancel()
            await asyncio.wait((taking,))
            assert self._listener is not None, "listen comes first"
            self._listener.close()
        if self._behind in self._links:
            self._links[self._behind].setblocking(True)
            threading.Thread(target=self._send_ahead, name="next-stage", daemon=True).start()

    def _name(self, index: int) -> str:
        return f"rank {label(ranks_of(self.ranks.tp_size, self.ranks.pp_size)[index])}"

    async def _dial(self, index: int, address: Address, secret: bytes) -> None:
        loop = asyncio.get_running_loop()
        link = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            await loop.sock_connect(link, (address.host, address.port_first))
            await loop.sock_sendall(link, secret + _INDEX.pack(self._index))
        except OSError as error:
            link.close()
            raise WorldError(f"{self._name(index)}: {os.strerror(error.errno or 0)}") from None
        self._keep(index, link)

    async def _take_links(self, secret: bytes) -> None:
        assert self._listener is not None, "listen comes first"
        loop, free = asyncio.get_running_loop(), asyncio.Semaphore(GREETINGS_MAX)
        async with asyncio.TaskGroup() as greetings:
            while True:
                await free.acquire()
                link, _ = await loop.sock_accept(self._listener)
                greetings.create_task(self._greet(link, secret)).add_done_callback(lambda _: free.release())

    async def _greet(self, link: socket.socket, secret: bytes) -> None:
        """Keeps a connection that proves to be a rank's that is expected, once; closes any other."""
        loop, greeting = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(GREETING_S):
                while len(greeting) < SECRET_BYTES + _INDEX.size:
                    if not (data := await loop.sock_recv(link, SECRET_BYTES + _INDEX.size - len(greeting))):
                        break
                    greeting += data
        except (OSError, TimeoutError):
            greeting = b""
        (index,) = _INDEX.unpack(greeting[SECRET_BYTES:]) if len(greeting) == SECRET_BYTES + _INDEX.size else (0,)
        proven = hmac.compare_digest(greeting[:SECRET_BYTES], secret)
        if proven and index > self._index and index in self._peers - self._links.keys():
            self._keep(index, link)
        else:
            link.close()

    def _keep(self, index: int, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[index] = link
        if self._peers <= self._links.keys():
            self._complete.set()

    # Steps of the engine

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        part = np.ascontiguousarray(part)
        parts = {index: part if index == self._index else np.empty_like(part) for index in self._stage}
        sizes = {index: bytearray(_SIZE.size) for index in self._stage if index != self._index}
        flows: list[_Flow] = []
        for index, size in sizes.items():
            link = self._links[index]
            flows.append(_Flow(link, select.POLLOUT, [memoryview(_SIZE.pack(part.nbytes)), _bytes_of(part)]))
            flows.append(_Flow(link, select.POLLIN, [memoryview(size), _bytes_of(parts[index])]))
        with _ranks_that_may_be_gone():
            _move(flows)
        for index, size in sizes.items():
            if (theirs := _SIZE.unpack(size)[0]) != part.nbytes:
                raise WorldError(f"{self._name(index)} gathers {theirs} bytes, this one {part.nbytes}")
        return list(parts.values())

    def hand_on(self, hidden: NDArray[np.float32]) -> None:
        if self._gone is None:
            self._ahead.put(hidden.tobytes())
        if self._gone is not None:
            raise WorldError(_gone(self._gone))

    def take_over(self, hidden: NDArray[np.float32]) -> None:
        with _ranks_that_may_be_gone():
            _move([_Flow(self._links[self._before], select.POLLIN, [_bytes_of(hidden)])])

    def _send_ahead(self) -> None:
        while True:
            chunk = self._ahead.get()
            try:
                self._links[self._behind].sendall(chunk)
            except OSError as error:
                self._gone = error


@dataclass(slots=True)
class _Flow:
    """Bytes that a link carries one way."""

    link: socket.socket
    event: int  # of poll, when it can carry more
    rest: list[memoryview]

    def moved(self) -> bool:
        """Moves as much as it can carry now; returns whether all has."""
        with suppress(BlockingIOError):
            while self.rest:
                view = self.rest[0]
                if len(view):
                    count = self.link.send(view) if self.event == select.POLLOUT else self.link.recv_into(view)
                    if not count:
                        raise ConnectionError("its connection has ended")
                    self.rest[0] = view[count:]
                if not len(self.rest[0]):
                    self.rest.pop(0)
        return not self.rest


def _move(flows: list[_Flow]) -> None:
    """Moves all flows at once: a part may be larger than what sockets hold, and then both ends have to read."""
    while flows := [flow for flow in flows if not flow.moved()]:
        ready = select.poll()
        for link in {flow.link for flow in flows}:
            ready.register(link, sum(flow.event for flow in flows if flow.link is link))
        ready.poll()


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, in place."""
    return array.reshape(-1).view(np.uint8).data


def _gone(error: OSError) -> str:
    return f"a rank of this worker is gone: {error.strerror or error}"


@contextmanager
def _ranks_that_may_be_gone() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise WorldError(_gone(error)) from None

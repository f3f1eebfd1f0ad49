"""What runs in the two processes of a bench: nodes on a loop, no engine, and batches of rooms that a pipe orders.

Decode expects a batch's rooms, some at once. Prefill has as many open, and offers the one cell of a room when its grant
has come, in a turn of the loop of its own, as an engine would. Where a process has several nodes they take turns.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import uvloop
import zmq

from ..bus import BusLimits
from ..bus.sockets import NOBLOCK, NOBLOCK_MORE, Drain
from ..errors import PDTransferError
from ..handoff.decode.records import SessionState
from ..handoff.effects import Drained, Landed, Leased, Ready, RoomFailed
from ..handoff.prefill.sessions import Cell
from ..handoff.slot_allocator import Holding
from ..layout.layout import Component, expand_pages
from ..memory.arena_memory import Arena, allocate
from ..node import DecodeNode, NodeSettings, PrefillNode
from ..process.setup import prepare
from ..transports.network import Transport
from ..wire import Grant, Message, Part, encode
from .orders import Batch, Echoes, Failure, Fragment, GiveUp, Memcpy, Stall

_ANY_PORT = "tcp://127.0.0.1:0"
_AUX = b"\0" * 32  # about what the reference engine says of a room
_ROOM_SECONDS = 60.0
_LOOK_SECONDS = 0.005
_ECHO = encode(Grant(1 << 63, 1, 1 << 63, 16, 0, (Part(0, 0, 16, b"\0" * 8),), send_aux=True, time_left_ms=1))
_STALLED = 1 << 48  # rooms from here on are stalled ones
_PAGE_STEP = 7  # rooms take every 7th page: what was just read is not read again at once


class _Rank(ABC):
    """One process. It ends when its pipe does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._loop, self._over = pipe, asyncio.get_running_loop(), asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._batch = Batch(1, 0, 0, 0)
        self._started = self._ended = 0  # rooms of the batch
        self._next_stalled, self._stalled = _STALLED, 0
        self._cpu_ns = 0
        self._loop.add_reader(pipe.fileno(), self._asked)

    async def serve(self) -> None:
        """Until the pipe ends."""
        await self._over.wait()
        self._loop.remove_reader(self._pipe.fileno())
        self._context.destroy(linger=0)

    def fail(self, text: str) -> None:
        """The batch cannot end as it should."""
        if not self._over.is_set():
            self._over.set()
            self._pipe.send(Failure(text))

    def begin(self, batch: Batch) -> None:
        """Starts as many rooms as may be under way."""
        self._batch, self._started, self._ended, self._cpu_ns = batch, 0, 0, time.process_time_ns()
        for _ in range(min(batch.at_once, batch.rooms)):
            self._next()

    def room_over(self) -> bool:
        """Starts another room, if there is one; whether the batch is over."""
        self._ended += 1
        if self._started < self._batch.rooms:
            self._next()
        return self._ended == self._batch.rooms

    @property
    def cpu_ns(self) -> int:
        """This process's since the batch began."""
        return time.process_time_ns() - self._cpu_ns

    def stalled(self, stall: Stall) -> range:
        """The labels of rooms to be stalled: both sides count alike."""
        first, self._next_stalled = self._next_stalled, self._next_stalled + stall.rooms
        return range(first, self._next_stalled)

    def _next(self) -> None:
        self._started += 1
        self.start(self._batch.first + self._started - 1)

    def _asked(self) -> None:
        try:
            self.perform(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            self._over.set()

    @abstractmethod
    def perform(self, order: object) -> None:
        """Does what was asked, and answers now or when it is done."""

    @abstractmethod
    def start(self, room: int) -> None:
        """Starts one room of the batch."""


class _PrefillRank(_Rank):
    def __init__(
        self,
        pipe: Connection,
        source: Component,
        copy_threads: int,
        settings: Sequence[NodeSettings],
        transport: Transport,
    ) -> None:
        super().__init__(pipe)
        self._source, self._page_count = source, source.layout.slots // source.layout.page_size
        # What sends it elsewhere may read it there.
        shared = Arena.create(source.layout.end, name="pdtransfer-pool") if transport == "mooncake" else None
        self._pool = allocate(source.layout.end) if shared is None else shared.mapping
        self._pool.array[:] = 7
        self._copy: Arena | None = None
        self._nodes = [
            PrefillNode(
                each,
                (source,),
                self._told,
                pool_address=self._pool.address,
                pool_fd=-1 if shared is None else shared.fd,
                copy_threads=copy_threads,
                transport=transport,
            )
            for each in settings
        ]
        self._router = self._context.socket(zmq.ROUTER)
        self._echoing = Drain(self._loop, self._router, self._echo, BusLimits())
        self._written = np.zeros(0, np.int64)

    async def serve(self) -> None:
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._pipe.send(([await node.bus.bind(_ANY_PORT) for node in self._nodes], f"tcp://127.0.0.1:{port}"))
        await super().serve()
        self._echoing.stop()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def perform(self, order: object) -> None:
        match order:
            case Batch():
                self._written = np.zeros(order.rooms, np.int64)
                self.begin(order._replace(at_once=order.rooms) if order.abort_s else order)
            case GiveUp():
                for room in range(self._batch.first, self._batch.first + self._batch.rooms):
                    self._of(room).abort(room)
            case Echoes(trips):
                self._pipe.send(None)
                for _ in range(trips):
                    self._echo(flags=0)
                self._pipe.send(None)
            case Memcpy(byte_count):
                self._pipe.send(self._memcpy(byte_count))
            case Stall(rooms, tokens):
                self._stalled = rooms
                for room in self.stalled(order):
                    self._of(room).open(room, tokens=tokens, time_left_s=_ROOM_SECONDS)
            case _:
                raise AssertionError(order)

    def start(self, room: int) -> None:
        self._of(room).open(room, tokens=self._batch.tokens, time_left_s=_ROOM_SECONDS)

    def _of(self, room: int) -> PrefillNode:
        return self._nodes[room % len(self._nodes)]

    def _told(self, event: Leased | Landed | RoomFailed | Drained) -> None:
        match event:
            case Leased(room) if room >= _STALLED:
                self._stalled -= 1
                if not self._stalled:
                    self._pipe.send(None)
            case Leased(room):
                self._loop.call_soon(self._offer, room)
            case Landed():
                pass
            case RoomFailed(room) | Drained(room) if room >= _STALLED:
                pass
            case RoomFailed(room, _, detail):
                if not self._batch.abort_s:
                    self.fail(f"room {room} failed at prefill: {detail}")
            case Drained():
                if self.room_over():
                    self._pipe.send((self._written, self.cpu_ns))

    def _offer(self, room: int) -> None:
        tokens, page_size = self._batch.tokens, self._source.layout.page_size
        needed = -(-tokens // page_size)
        pages = (room * needed + np.arange(needed)) * _PAGE_STEP % self._page_count
        cell = Cell(self._source.name, 0, self._source.layout.layer_range, expand_pages(pages, page_size, tokens))
        self._of(room).push(room, cell)
        # A small room's cell is written by now: nothing of what follows is left out of its hand-off.
        self._written[room - self._batch.first] = time.monotonic_ns()
        self._of(room).finish(room, aux=_AUX)

    def _echo(self, flags: int = NOBLOCK) -> int:
        route, frame = self._router.recv(flags), self._router.recv(flags)
        self._echoing.check()
        self._router.send(route, NOBLOCK_MORE)
        self._router.send(frame, NOBLOCK)
        return len(frame)

    def _memcpy(self, byte_count: int) -> int:
        if self._copy is None:
            self._copy = Arena.create(byte_count)
            self._copy.prefault()
        start = time.monotonic_ns()
        ctypes.memmove(self._copy.mapping.address, self._pool.address, byte_count)
        return time.monotonic_ns() - start


class _DecodeRank(_Rank):
    def __init__(
        self,
        pipe: Connection,
        target: Component,
        endpoints: Sequence[str],
        bare: str,
        settings: Sequence[NodeSettings],
        verify: bool,
        transport: Transport,
    ) -> None:
        super().__init__(pipe)
        self._nodes: list[DecodeNode] = []
        for each in settings:
            arena = Arena.create(target.layout.end)
            arena.prefault()
            self._nodes.append(
                DecodeNode(each, (target,), arena, self._told, others=self._heard, verify=verify, transport=transport)
            )
        self._endpoints = endpoints
        self._held: list[Holding] = []
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(bare)
        self._echoes = Drain(self._loop, self._dealer, self._answered, BusLimits())
        self._trips_ns: list[int] = []
        self._trips_left = self._sent_ns = 0
        self._expected = self._ready = np.zeros(0, np.int64)
        self._to_abort: asyncio.TimerHandle | None = None  # of the room that is under way
        self._aborted: int | None = None  # the room whose lease has not ended yet

    async def serve(self) -> None:
        await super().serve()
        self._echoes.stop()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def perform(self, order: object) -> None:
        match order:
            case Batch() if not self._whole:
                self._loop.call_later(_LOOK_SECONDS, self.perform, order)
            case Batch():
                self._expected, self._ready = np.zeros((2, order.rooms), np.int64)
                self.begin(order)
            case Echoes(trips, blocking):
                self._trips_ns, self._trips_left = [], trips
                self._ask()
                while blocking and self._trips_left:
                    self._answered(flags=0)
            case Fragment(run):
                arena = self._nodes[0].core.arena
                for holding in self._held:
                    arena.drop(holding)
                runs = arena.free[0].free_slots // run
                holdings = [each for _ in range(runs) if (each := arena.allocate((run,))) is not None]
                for holding in holdings[::2]:
                    arena.drop(holding)
                self._held = holdings[1::2]
                self._pipe.send(arena.free[0].largest)
            case Stall(_, tokens, source):
                for room in self.stalled(order):
                    self._of(room).expect(room, tokens=tokens, sources=(source,), time_left_s=_ROOM_SECONDS)
            case _:
                raise AssertionError(order)

    @property
    def _whole(self) -> bool:
        """Whether whoever has a session has all of the arena ready: the first rooms land while the rest is entered, and
        what is measured is not to."""
        sessions = [session for node in self._nodes for session in node.core.links.sessions.values()]
        return all(each.whole for each in sessions if each.state is SessionState.UP)

    def start(self, room: int) -> None:
        tokens, shared, node = self._batch.tokens, self._batch.shared, self._of(room)
        prompt = None
        if shared >= 0:
            prompt = np.arange(tokens, dtype="<u4")
            prompt[shared:] += room * tokens
        self._expected[room - self._batch.first] = time.monotonic_ns()
        source = self._endpoints[room % len(self._endpoints)]
        keys = () if prompt is None else node.core.cache.keys(prompt.tobytes(), b"")
        node.expect(room, tokens=tokens, sources=(source,), time_left_s=_ROOM_SECONDS, keys=keys)
        if self._batch.abort_s and (after_s := self._batch.abort_s[room - self._batch.first]):
            self._to_abort = self._loop.call_later(after_s, self._abort, room)
        elif self._batch.abort_s:
            self._abort(room)  # at once: before anything is read that it could be READY by

    def _abort(self, room: int) -> None:
        """Of a batch of aborts `expected` is when a room was aborted, `ready` when its slots were free; 0: it was READY
        before."""
        self._to_abort = None
        self._expected[room - self._batch.first], self._aborted = time.monotonic_ns(), room
        self._of(room).abort(room)

    def _heard(self, _: str, __: Message) -> bool:
        if self._aborted is not None:
            self._loop.call_soon(self._look)  # when the node has taken it
        return False

    def _look(self) -> None:
        room = self._aborted
        if room is not None and self._of(room).core.idle:
            self._ready[room - self._batch.first], self._aborted = time.monotonic_ns(), None
            self._over_with()

    def _over_with(self) -> None:
        if self.room_over():
            self._pipe.send((self._expected, self._ready, self.cpu_ns))

    def _of(self, room: int) -> DecodeNode:
        return self._nodes[room % len(self._nodes)]

    def _told(self, event: Ready | RoomFailed) -> None:
        if isinstance(event, RoomFailed):
            if event.room < _STALLED and not self._batch.abort_s:
                self.fail(f"room {event.room} failed at decode: {event.detail}")
            return
        at = event.room - self._batch.first
        self._ready[at] = time.monotonic_ns()
        self._of(event.room).release(event.room)
        if self._to_abort is not None:
            self._to_abort.cancel()
            self._expected[at], self._ready[at], self._to_abort = 0, 0, None
            self._over_with()
        elif not self._batch.abort_s:
            self._over_with()

    def _ask(self) -> None:
        self._sent_ns = time.monotonic_ns()
        self._echoes.check()
        self._dealer.send(_ECHO, NOBLOCK)

    def _answered(self, flags: int = NOBLOCK) -> int:
        frame = self._dealer.recv(flags)
        self._trips_ns.append(time.monotonic_ns() - self._sent_ns)
        self._trips_left -= 1
        if self._trips_left:
            self._ask()
        else:
            self._pipe.send(np.array(self._trips_ns))
        return len(frame)


def run_prefill(
    pipe: Connection, source: Component, copy_threads: int, settings: Sequence[NodeSettings], transport: Transport
) -> None:
    """The prefill process: answers first with its nodes' endpoints and the bare socket's."""
    _run(pipe, lambda: _PrefillRank(pipe, source, copy_threads, settings, transport))


def run_decode(
    pipe: Connection,
    target: Component,
    endpoints: Sequence[str],
    bare: str,
    settings: Sequence[NodeSettings],
    verify: bool,
    transport: Transport,
) -> None:
    """The decode process: every node has an arena of its own."""
    _run(pipe, lambda: _DecodeRank(pipe, target, endpoints, bare, settings, verify, transport))


def _run(pipe: Connection, make: Callable[[], _Rank]) -> None:
    async def serve() -> None:
        await make().serve()

    prepare()
    # Rooms that fail end the bench; what attackers do is what is measured.
    logging.getLogger("pdtransfer").setLevel(logging.CRITICAL)
    try:
        uvloop.run(serve())
    except PDTransferError as error:
        pipe.send(Failure(str(error)))

"""The two processes of a benchmark: nodes on a loop, no engine, and batches of rooms that a pipe orders.

Decode expects a batch's rooms, some at once. Prefill keeps as many open. It offers the only cell of a room when its
grant has come, in its own turn of the loop, as an engine would. Rooms go to the nodes of a process in turn. An order is
the name of a public method and its arguments.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from abc import abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import zmq

from pdtransfer.bus import BusLimits
from pdtransfer.bus.sockets import NOBLOCK, NOBLOCK_MORE, Drain
from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.client.settings import NodeSettings, Others
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import (
    DecodeEvent,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
)
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.slot_allocator import Holding
from pdtransfer.handoff.states import SessionState
from pdtransfer.layout.layout import Component, expand_pages
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from pdtransfer.transports.registry import TRANSPORTS
from pdtransfer.wire import Grant, Message, Part, encode

from .processes import PipeProcess

_ROOM_SECONDS = 60.0
_ANY_PORT = "tcp://127.0.0.1:0"
_AUX = b"\0" * 32  # about as long as the reference engine's
_LOOK_SECONDS = 0.005
_PAGE_STEP = 7  # rooms take every 7th page, so that no room reads what was just read
_ECHO = encode(Grant(1 << 63, 1, 1 << 63, 16, 0, (Part(0, 0, 16, b"\0" * 8),), send_aux=True, time_left_ms=1))
_STALLED = 1 << 48  # rooms from here on are stalled ones: they hold a grant, and their ends are not failures


class RoomBatch(NamedTuple):
    """Rooms first .. first + rooms - 1 of `tokens` tokens each, `at_once` of them under way.

    The i-th one is aborted by decode `after_s[i]` seconds after it was expected; prefill then opens all at once.
    """

    first: int
    rooms: int
    tokens: int
    at_once: int
    after_s: tuple[float, ...] = ()


class _Rank(PipeProcess):
    """One process."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe)
        self._batch = RoomBatch(1, 0, 0, 0)
        self._started = self._ended = 0  # rooms of the batch
        self._cpu_ns = 0
        self._next_stalled = _STALLED
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._echoes: Drain | None = None

    async def serve(self) -> None:
        """Executes orders until the pipe ends."""
        await super().serve()
        if self._echoes is not None:
            self._echoes.stop()
        self._context.destroy(linger=0)

    def move(self, batch: RoomBatch) -> None:
        """Starts as many rooms as may be under way."""
        self._batch, self._started, self._ended, self._cpu_ns = batch, 0, 0, time.process_time_ns()
        for _ in range(min(batch.at_once, batch.rooms)):
            self._next()

    def _room_over(self) -> bool:
        """Starts another room, if there is one; whether the batch is over."""
        self._ended += 1
        if self._started < self._batch.rooms:
            self._next()
        return self._ended == self._batch.rooms

    def _used_ns(self) -> int:
        """CPU time of this process since the batch began."""
        return time.process_time_ns() - self._cpu_ns

    def _next(self) -> None:
        self._started += 1
        self._start(self._batch.first + self._started - 1)

    @abstractmethod
    def _start(self, room: int) -> None:
        """Starts one room of the batch."""

    def _stalled(self, rooms: int) -> range:
        first, self._next_stalled = self._next_stalled, self._next_stalled + rooms
        return range(first, self._next_stalled)


class PrefillProcess(_Rank):
    """Nodes that share one pool."""

    def __init__(
        self, pipe: Connection, source: Component, copy_threads: int, settings: Sequence[NodeSettings], transport: str
    ) -> None:
        super().__init__(pipe)
        self._source, self._page_count = source, source.layout.slots // source.layout.page_size
        # Another process that sends from the pool has to map it.
        between_hosts = transport in TRANSPORTS and TRANSPORTS[transport].any_host
        shared = ArenaMemory.create(source.layout.end, name="pdtransfer-pool") if between_hosts else None
        self._pool = allocate(source.layout.end) if shared is None else shared.mapping
        self._pool.array[:] = 7
        self._copy: ArenaMemory | None = None
        writer = WriterOptions(
            pool_address=self._pool.address, pool_fd=-1 if shared is None else shared.fd, copy_threads=copy_threads,
            transport=transport,
        )  # fmt: skip
        self._nodes = [PrefillNode(setting, (source,), self._on_event, writer=writer) for setting in settings]
        self._written = np.zeros(0, np.int64)
        self._unleased = 0  # stalled rooms

    async def serve(self) -> None:
        """Sends its nodes' endpoints, then executes orders until the pipe ends."""
        self._pipe.send([await node.bus.bind(_ANY_PORT) for node in self._nodes])
        await super().serve()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def move(self, batch: RoomBatch) -> None:
        self._written = np.zeros(batch.rooms, np.int64)
        super().move(batch._replace(at_once=batch.rooms) if batch.after_s else batch)

    def give_up(self) -> None:
        """Ends what is left of the batch: the rooms that were aborted before their grants came."""
        for room in range(self._batch.first, self._batch.first + self._batch.rooms):
            self._node_of(room).abort(room)

    def stall(self, rooms: int, tokens: int) -> None:
        """Opens rooms of which nothing is ever written; answers when each has a grant."""
        self._unleased = rooms
        for room in self._stalled(rooms):
            self._node_of(room).open(room, tokens=tokens, time_left_s=_ROOM_SECONDS)

    def memcpy(self, byte_count: int) -> None:
        """One memcpy of this many bytes of the pool."""
        if self._copy is None:
            self._copy = ArenaMemory.create(byte_count)
            self._copy.prefault()
        start = time.monotonic_ns()
        ctypes.memmove(self._copy.mapping.address, self._pool.address, byte_count)
        self._pipe.send(time.monotonic_ns() - start)

    def listen(self) -> None:
        """Binds a bare socket, whose messages a loop sends back, and answers with its address."""
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._echoes = Drain(self._loop, self._router, self._echo, BusLimits())
        self._pipe.send(f"tcp://127.0.0.1:{port}")

    def echo(self, trips: int) -> None:
        """Sends back this many messages with a blocking socket; answers before and after."""
        self._pipe.send(None)
        for _ in range(trips):
            self._echo(flags=0)
        self._pipe.send(None)

    def _echo(self, flags: int = NOBLOCK) -> int:
        assert self._echoes is not None
        route, frame = self._router.recv(flags), self._router.recv(flags)
        self._echoes.check()
        self._router.send(route, NOBLOCK_MORE)
        self._router.send(frame, NOBLOCK)
        return len(frame)

    def _start(self, room: int) -> None:
        self._node_of(room).open(room, tokens=self._batch.tokens, time_left_s=_ROOM_SECONDS)

    def _node_of(self, room: int) -> PrefillNode:
        """The node whose turn it is."""
        return self._nodes[room % len(self._nodes)]

    def _on_event(self, event: PrefillEvent) -> None:
        if event.room >= _STALLED:
            if isinstance(event, RoomLeased):
                self._unleased -= 1
                if not self._unleased:
                    self._pipe.send(None)
            return
        match event:
            case RoomLeased(room):
                self._loop.call_soon(self._offer, room)
            case RoomAsked() | RoomLanded():
                pass
            case RoomFailed(room, _, detail):
                if not self._batch.after_s:
                    self.fail(f"room {room} failed at prefill: {detail}")
            case RoomDrained():
                if self._room_over():
                    self._pipe.send((self._written, self._used_ns()))

    def _offer(self, room: int) -> None:
        tokens, page_size = self._batch.tokens, self._source.layout.page_size
        needed = -(-tokens // page_size)
        pages = (room * needed + np.arange(needed)) * _PAGE_STEP % self._page_count
        cell = Cell(self._source.name, 0, self._source.layout.layer_range, expand_pages(pages, page_size, tokens))
        self._node_of(room).push(room, cell)
        # A small room's cell is written by now: its hand-off contains all that follows.
        self._written[room - self._batch.first] = time.monotonic_ns()
        self._node_of(room).finish(room, aux=_AUX)


class DecodeProcess(_Rank):
    """Nodes with an arena each."""

    def __init__(
        self, pipe: Connection, target: Component, endpoints: Sequence[str], settings: Sequence[NodeSettings],
        transport: str,
    ) -> None:  # fmt: skip
        super().__init__(pipe)
        self._nodes: list[DecodeNode] = []
        for setting in settings:
            arena = ArenaMemory.create(target.layout.end)
            arena.prefault()
            options, others = ArenaOptions(transport=transport), Others(self._on_message)
            self._nodes.append(DecodeNode(setting, (target,), arena, self._on_event, options=options, others=others))
        self._endpoints = endpoints
        self._held: list[Holding] = []
        self._expected = self._ready = np.zeros(0, np.int64)
        self._trips_ns: list[int] = []
        self._trips_left = self._sent_ns = 0
        self._to_abort: asyncio.TimerHandle | None = None  # of the room that is under way
        self._aborted: int | None = None  # the room whose lease has not ended yet

    async def serve(self) -> None:
        await super().serve()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def move(self, batch: RoomBatch) -> None:
        """Starts once peers have mapped whole arenas: no room is timed while the rest is mapped."""
        sessions = [session for node in self._nodes for session in node.core.prefill_peers.sessions.values()]
        if not all(session.whole for session in sessions if session.state is SessionState.UP):
            self._loop.call_later(_LOOK_SECONDS, self.move, batch)
            return
        self._expected, self._ready = np.zeros((2, batch.rooms), np.int64)
        super().move(batch)

    def stall(self, rooms: int, tokens: int, source: str) -> None:
        """Expects rooms of which `source` never writes anything."""
        for room in self._stalled(rooms):
            request = RoomRequest(room=room, tokens=tokens, sources=(source,), time_left_s=_ROOM_SECONDS)
            self._node_of(room).expect(request)

    def fragment(self, run: int) -> None:
        """Holds every second run of this many slots of the arena, in place of what it held before."""
        arena = self._nodes[0].core.arena
        for holding in self._held:
            arena.drop(holding)
        runs = arena.free[0].free_slots // run
        holdings = [leased for _ in range(runs) if (leased := arena.allocate((run,))) is not None]
        for holding in holdings[::2]:
            arena.drop(holding)
        self._held = holdings[1::2]
        self._pipe.send(arena.free[0].largest)

    def connect(self, address: str) -> None:
        """Connects a bare socket to prefill's."""
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._echoes = Drain(self._loop, self._dealer, self._on_echo, BusLimits())

    def echo(self, trips: int, blocking: bool) -> None:
        """This many bare round trips, one after another: drained on the loop as a bus is, or with blocking sockets."""
        self._trips_ns, self._trips_left = [], trips
        self._ask()
        while blocking and self._trips_left:
            self._on_echo(flags=0)

    def _ask(self) -> None:
        assert self._echoes is not None
        self._sent_ns = time.monotonic_ns()
        self._echoes.check()
        self._dealer.send(_ECHO, NOBLOCK)

    def _on_echo(self, flags: int = NOBLOCK) -> int:
        frame = self._dealer.recv(flags)
        self._trips_ns.append(time.monotonic_ns() - self._sent_ns)
        self._trips_left -= 1
        if self._trips_left:
            self._ask()
        else:
            self._pipe.send(np.array(self._trips_ns))
        return len(frame)

    def _start(self, room: int) -> None:
        index, source = room - self._batch.first, self._endpoints[room % len(self._endpoints)]
        self._expected[index] = time.monotonic_ns()
        request = RoomRequest(room=room, tokens=self._batch.tokens, sources=(source,), time_left_s=_ROOM_SECONDS)
        self._node_of(room).expect(request)
        if not self._batch.after_s:
            return
        if after_s := self._batch.after_s[index]:
            self._to_abort = self._loop.call_later(after_s, self._abort, room)
        else:
            self._abort(room)  # before any message is read by which the room could be READY

    def _node_of(self, room: int) -> DecodeNode:
        """The node whose turn it is."""
        return self._nodes[room % len(self._nodes)]

    def _on_event(self, event: DecodeEvent) -> None:
        """Of aborts `expected` becomes when a room was aborted, `ready` when its slots were free; both are 0 for a room
        that was READY before."""
        aborts, failed = bool(self._batch.after_s), isinstance(event, RoomFailed)
        if event.room >= _STALLED or (aborts and failed):
            return
        if isinstance(event, RoomFailed):
            self.fail(f"room {event.room} failed at decode: {event.detail}")
            return
        index = event.room - self._batch.first
        if not aborts:
            self._ready[index] = time.monotonic_ns()
        self._node_of(event.room).release(event.room)
        if not aborts:
            self._end_room()
        elif self._to_abort is not None:
            self._to_abort.cancel()
            self._expected[index], self._ready[index], self._to_abort = 0, 0, None
            self._end_room()

    def _abort(self, room: int) -> None:
        self._to_abort = None
        self._expected[room - self._batch.first], self._aborted = time.monotonic_ns(), room
        self._node_of(room).abort(room)

    def _on_message(self, _: str, __: Message) -> bool:
        if self._aborted is not None:
            self._loop.call_soon(self._check_aborted)  # when the node has taken the message
        return False

    def _check_aborted(self) -> None:
        room = self._aborted
        if room is not None and self._node_of(room).core.idle:
            self._ready[room - self._batch.first], self._aborted = time.monotonic_ns(), None
            self._end_room()

    def _end_room(self) -> None:
        """Answers the batch with its last room."""
        if self._room_over():
            self._pipe.send((self._expected, self._ready, self._used_ns()))

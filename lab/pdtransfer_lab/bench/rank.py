"""The two processes of a benchmark: nodes on a loop, no engine, and batches of rooms that a pipe orders.

Decode expects a batch's rooms, some at once. Prefill keeps as many open, and offers the only cell of a room when its
grant has come, in a turn of the loop of its own, as an engine would. Rooms go to the nodes of a process in turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from abc import abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.client.settings import NodeSettings
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

from .processes import PipeProcess

ROOM_SECONDS = 60.0
_ANY_PORT = "tcp://127.0.0.1:0"
_AUX = b"\0" * 32  # about as long as the reference engine's
_LOOK_SECONDS = 0.005
_PAGE_STEP = 7  # rooms take every 7th page, so that no room reads what was just read


class RoomBatch(NamedTuple):
    """Rooms first .. first + rooms - 1 of `tokens` tokens each, `at_once` of them under way."""

    first: int
    rooms: int
    tokens: int
    at_once: int


class Memcpy(NamedTuple):
    """One memcpy of this many bytes of the pool."""

    byte_count: int


class Fragment(NamedTuple):
    """Decode holds every second run of this many slots of its arena from now on, in place of what it held before."""

    run: int


class Rank(PipeProcess):
    """One process."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe)
        self._batch = RoomBatch(1, 0, 0, 0)
        self._started = self._ended = 0  # rooms of the batch
        self._cpu_ns = 0

    def begin(self, batch: RoomBatch) -> None:
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
        """CPU time of this process since the batch began."""
        return time.process_time_ns() - self._cpu_ns

    def _next(self) -> None:
        self._started += 1
        self.start(self._batch.first + self._started - 1)

    @abstractmethod
    def start(self, room: int) -> None:
        """Starts one room of the batch."""


class PrefillProcess(Rank):
    """Nodes that share one pool."""

    def __init__(
        self,
        pipe: Connection,
        source: Component,
        copy_threads: int,
        settings: Sequence[NodeSettings],
        transport: str,
    ) -> None:
        super().__init__(pipe)
        self._source, self._page_count = source, source.layout.slots // source.layout.page_size
        # Another process that sends from the pool has to map it.
        between_hosts = transport in TRANSPORTS and TRANSPORTS[transport].any_host
        shared = ArenaMemory.create(source.layout.end, name="pdtransfer-pool") if between_hosts else None
        self._pool = allocate(source.layout.end) if shared is None else shared.mapping
        self._pool.array[:] = 7
        self._copy: ArenaMemory | None = None
        self._nodes = [
            PrefillNode(
                setting,
                (source,),
                self.on_event,
                writer=WriterOptions(
                    pool_address=self._pool.address,
                    pool_fd=-1 if shared is None else shared.fd,
                    copy_threads=copy_threads,
                    transport=transport,
                ),
            )
            for setting in settings
        ]
        self._written = np.zeros(0, np.int64)

    async def serve(self) -> None:
        """Sends its nodes' endpoints, then executes orders until the pipe ends."""
        self._pipe.send([await node.bus.bind(_ANY_PORT) for node in self._nodes])
        await super().serve()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def begin(self, batch: RoomBatch) -> None:
        """As Rank.begin."""
        self._written = np.zeros(batch.rooms, np.int64)
        super().begin(batch)

    def perform(self, order: object) -> None:
        """As Rank.perform."""
        match order:
            case RoomBatch():
                self.begin(order)
            case Memcpy(byte_count):
                self._pipe.send(self._memcpy(byte_count))
            case _:
                raise AssertionError(order)

    def start(self, room: int) -> None:
        """As Rank.start."""
        self.node_of(room).open(room, tokens=self._batch.tokens, time_left_s=ROOM_SECONDS)

    def node_of(self, room: int) -> PrefillNode:
        """The node whose turn it is."""
        return self._nodes[room % len(self._nodes)]

    def on_event(self, event: PrefillEvent) -> None:
        """From a node."""
        match event:
            case RoomLeased(room):
                self._loop.call_soon(self._offer, room)
            case RoomAsked() | RoomLanded():
                pass
            case RoomFailed(room, _, detail):
                self.fail(f"room {room} failed at prefill: {detail}")
            case RoomDrained():
                if self.room_over():
                    self._pipe.send((self._written, self.cpu_ns))

    def _offer(self, room: int) -> None:
        tokens, page_size = self._batch.tokens, self._source.layout.page_size
        needed = -(-tokens // page_size)
        pages = (room * needed + np.arange(needed)) * _PAGE_STEP % self._page_count
        cell = Cell(self._source.name, 0, self._source.layout.layer_range, expand_pages(pages, page_size, tokens))
        self.node_of(room).push(room, cell)
        # A small room's cell is written by now: its hand-off contains all that follows.
        self._written[room - self._batch.first] = time.monotonic_ns()
        self.node_of(room).finish(room, aux=_AUX)

    def _memcpy(self, byte_count: int) -> int:
        if self._copy is None:
            self._copy = ArenaMemory.create(byte_count)
            self._copy.prefault()
        start = time.monotonic_ns()
        ctypes.memmove(self._copy.mapping.address, self._pool.address, byte_count)
        return time.monotonic_ns() - start


class DecodeProcess(Rank):
    """Nodes with an arena each."""

    def __init__(
        self,
        pipe: Connection,
        target: Component,
        endpoints: Sequence[str],
        settings: Sequence[NodeSettings],
        transport: str,
        **options: Any,
    ) -> None:
        """`options` are DecodeNode's."""
        super().__init__(pipe)
        self._nodes: list[DecodeNode] = []
        for setting in settings:
            arena = ArenaMemory.create(target.layout.end)
            arena.prefault()
            self._nodes.append(
                DecodeNode(
                    setting, (target,), arena, self.on_event, options=ArenaOptions(transport=transport), **options
                )
            )
        self._endpoints = endpoints
        self._held: list[Holding] = []
        self._expected = self._ready = np.zeros(0, np.int64)

    async def serve(self) -> None:
        """As Rank.serve."""
        await super().serve()
        await asyncio.gather(*(node.close() for node in self._nodes))

    def begin(self, batch: RoomBatch) -> None:
        """As Rank.begin, once peers have mapped whole arenas: no room is timed while the rest is mapped."""
        sessions = [session for node in self._nodes for session in node.core.prefill_peers.sessions.values()]
        if not all(session.whole for session in sessions if session.state is SessionState.UP):
            self._loop.call_later(_LOOK_SECONDS, self.begin, batch)
            return
        self._expected, self._ready = np.zeros((2, batch.rooms), np.int64)
        super().begin(batch)

    def perform(self, order: object) -> None:
        """As Rank.perform."""
        match order:
            case RoomBatch():
                self.begin(order)
            case Fragment(run):
                self._pipe.send(self._fragment(run))
            case _:
                raise AssertionError(order)

    def start(self, room: int) -> None:
        """As Rank.start."""
        self._expected[room - self._batch.first] = time.monotonic_ns()
        source = self._endpoints[room % len(self._endpoints)]
        request = RoomRequest(
            room=room, tokens=self._batch.tokens, sources=(source,), time_left_s=ROOM_SECONDS, keys=self.keys_of(room)
        )
        self.node_of(room).expect(request)

    def keys_of(self, room: int) -> tuple[bytes, ...]:
        """Prefix keys of the room's prompt: none, so that nothing is kept."""
        del room
        return ()

    def node_of(self, room: int) -> DecodeNode:
        """The node whose turn it is."""
        return self._nodes[room % len(self._nodes)]

    def on_event(self, event: DecodeEvent) -> None:
        """From a node."""
        if isinstance(event, RoomFailed):
            self.fail(f"room {event.room} failed at decode: {event.detail}")
            return
        self._ready[event.room - self._batch.first] = time.monotonic_ns()
        self.node_of(event.room).release(event.room)
        self.end_room()

    def end_room(self) -> None:
        """Answers the batch with its last room."""
        if self.room_over():
            self._pipe.send((self._expected, self._ready, self.cpu_ns))

    def _fragment(self, run: int) -> int:
        arena = self._nodes[0].core.arena
        for holding in self._held:
            arena.drop(holding)
        runs = arena.free[0].free_slots // run
        holdings = [leased for _ in range(runs) if (leased := arena.allocate((run,))) is not None]
        for holding in holdings[::2]:
            arena.drop(holding)
        self._held = holdings[1::2]
        return arena.free[0].largest

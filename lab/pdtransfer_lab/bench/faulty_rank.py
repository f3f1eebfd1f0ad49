"""The two processes of a benchmark with faults: besides batches they take orders to echo, to stall, and to abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq

from pdtransfer.bus import BusLimits
from pdtransfer.bus.sockets import NOBLOCK, NOBLOCK_MORE, Drain
from pdtransfer.client.settings import Others
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import DecodeEvent, PrefillEvent, RoomFailed, RoomLeased
from pdtransfer.wire import Grant, Message, Part, encode

from . import rank
from .rank import ROOM_SECONDS, RoomBatch

_ECHO = encode(Grant(1 << 63, 1, 1 << 63, 16, 0, (Part(0, 0, 16, b"\0" * 8),), send_aux=True, time_left_ms=1))
_STALLED = 1 << 48  # rooms from here on are stalled ones


class Listen(NamedTuple):
    """Prefill binds a bare socket, and answers with its address."""


class Connect(NamedTuple):
    """Decode connects a bare socket to prefill's."""

    address: str


class Echoes(NamedTuple):
    """This many bare round trips, one after the other: drained on the loop as a bus is, or with blocking sockets.

    Prefill gets the order for blocking ones only, and answers twice: before and after.
    """

    trips: int
    blocking: bool


class Aborts(NamedTuple):
    """A batch whose i-th room decode aborts `after_s[i]` seconds after it was expected. Prefill opens all at once."""

    batch: RoomBatch
    after_s: tuple[float, ...]


class GiveUp(NamedTuple):
    """Prefill ends what is left of its batch: the rooms that were aborted before their grants came."""


class Share(NamedTuple):
    """A batch of whose prompts the first `shared` tokens are the same; decode publishes and looks up prefixes."""

    batch: RoomBatch
    shared: int


class Stall(NamedTuple):
    """Rooms that hold a grant of this source, and of which nothing is ever written; their ends are not failures.

    Prefill answers when every one is leased.
    """

    rooms: int
    tokens: int
    source: str


class FaultyPrefillRank(rank.PrefillProcess):
    """Takes Listen, Echoes, Aborts, GiveUp and Stall as well."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._echoing: Drain | None = None
        self._aborts = False
        self._next_stalled, self._unleased = _STALLED, 0

    async def serve(self) -> None:
        """As Rank.serve."""
        await super().serve()
        if self._echoing is not None:
            self._echoing.stop()
        self._context.destroy(linger=0)

    def perform(self, order: object) -> None:
        """As Rank.perform."""
        match order:
            case RoomBatch():
                self._aborts = False
                super().perform(order)
            case Aborts(batch):
                self._aborts = True
                self.begin(batch._replace(at_once=batch.rooms))
            case Share(batch):
                self.perform(batch)
            case GiveUp():
                for room in range(self._batch.first, self._batch.first + self._batch.rooms):
                    self.node_of(room).abort(room)
            case Listen():
                self._router = self._context.socket(zmq.ROUTER)
                port = self._router.bind_to_random_port("tcp://127.0.0.1")
                self._echoing = Drain(self._loop, self._router, self._echo, BusLimits())
                self._pipe.send(f"tcp://127.0.0.1:{port}")
            case Echoes(trips):
                self._pipe.send(None)
                for _ in range(trips):
                    self._echo(flags=0)
                self._pipe.send(None)
            case Stall(rooms, tokens):
                first, self._next_stalled = self._next_stalled, self._next_stalled + rooms
                self._unleased = rooms
                for room in range(first, self._next_stalled):
                    self.node_of(room).open(room, tokens=tokens, time_left_s=ROOM_SECONDS)
            case _:
                super().perform(order)

    def on_event(self, event: PrefillEvent) -> None:
        """From a node."""
        if event.room >= _STALLED:
            if isinstance(event, RoomLeased):
                self._unleased -= 1
                if not self._unleased:
                    self._pipe.send(None)
        elif not (self._aborts and isinstance(event, RoomFailed)):
            super().on_event(event)

    def _echo(self, flags: int = NOBLOCK) -> int:
        assert self._echoing is not None
        route, frame = self._router.recv(flags), self._router.recv(flags)
        self._echoing.check()
        self._router.send(route, NOBLOCK_MORE)
        self._router.send(frame, NOBLOCK)
        return len(frame)


class FaultyDecodeRank(rank.DecodeProcess):
    """Takes Connect, Echoes, Aborts, Share and Stall as well."""

    def __init__(self, *arguments: Any) -> None:
        """The last argument is whether decode verifies."""
        super().__init__(*arguments[:-1], others=Others(self._on_message), verify=arguments[-1])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._echoes: Drain | None = None
        self._trips_ns: list[int] = []
        self._trips_left = self._sent_ns = 0
        self._after_s: Sequence[float] = ()
        self._shared = -1
        self._next_stalled = _STALLED
        self._to_abort: asyncio.TimerHandle | None = None  # of the room that is under way
        self._aborted: int | None = None  # the room whose lease has not ended yet

    async def serve(self) -> None:
        """As Rank.serve."""
        await super().serve()
        if self._echoes is not None:
            self._echoes.stop()
        self._context.destroy(linger=0)

    def perform(self, order: object) -> None:
        """As Rank.perform."""
        match order:
            case RoomBatch():
                self._after_s, self._shared = (), -1
                super().perform(order)
            case Aborts(batch, after_s):
                self._after_s, self._shared = after_s, -1
                self.begin(batch)
            case Share(batch, shared):
                self._after_s, self._shared = (), shared
                self.begin(batch)
            case Connect(address):
                self._dealer = self._context.socket(zmq.DEALER)
                self._dealer.connect(address)
                self._echoes = Drain(self._loop, self._dealer, self._on_echo, BusLimits())
            case Echoes(trips, blocking):
                self._trips_ns, self._trips_left = [], trips
                self._ask()
                while blocking and self._trips_left:
                    self._on_echo(flags=0)
            case Stall(rooms, tokens, source):
                first, self._next_stalled = self._next_stalled, self._next_stalled + rooms
                for room in range(first, self._next_stalled):
                    request = RoomRequest(room=room, tokens=tokens, sources=(source,), time_left_s=ROOM_SECONDS)
                    self.node_of(room).expect(request)
            case _:
                super().perform(order)

    def start(self, room: int) -> None:
        """As Rank.start."""
        super().start(room)
        if not self._after_s:
            return
        if after_s := self._after_s[room - self._batch.first]:
            self._to_abort = self._loop.call_later(after_s, self._abort, room)
        else:
            self._abort(room)  # before any message is read by which the room could be READY

    def keys_of(self, room: int) -> tuple[bytes, ...]:
        """Of the room's prompt, which shares its first tokens with all others of the batch."""
        if self._shared < 0:
            return ()
        prompt = np.arange(self._batch.tokens, dtype="<u4")
        prompt[self._shared :] += room * self._batch.tokens
        return self.node_of(room).core.cache.keys(prompt.tobytes(), b"")

    def on_event(self, event: DecodeEvent) -> None:
        """From a node. Of aborts `expected` becomes when a room was aborted, `ready` when its slots were free; both are
        0 for a room that was READY before."""
        if event.room >= _STALLED or (self._after_s and isinstance(event, RoomFailed)):
            return
        if not self._after_s:
            super().on_event(event)
            return
        index = event.room - self._batch.first
        self.node_of(event.room).release(event.room)
        if self._to_abort is not None:
            self._to_abort.cancel()
            self._expected[index], self._ready[index], self._to_abort = 0, 0, None
            self.end_room()

    def _abort(self, room: int) -> None:
        self._to_abort = None
        self._expected[room - self._batch.first], self._aborted = time.monotonic_ns(), room
        self.node_of(room).abort(room)

    def _on_message(self, _: str, __: Message) -> bool:
        if self._aborted is not None:
            self._loop.call_soon(self._check_aborted)  # when the node has taken the message
        return False

    def _check_aborted(self) -> None:
        room = self._aborted
        if room is not None and self.node_of(room).core.idle:
            self._ready[room - self._batch.first], self._aborted = time.monotonic_ns(), None
            self.end_room()

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

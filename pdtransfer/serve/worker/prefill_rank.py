"""One rank of a prefill worker, leader or follower: its engine's thread, its node, and their rooms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from ...client.prefill_node import PrefillNode
from ...client.settings import NO_OTHERS, NodeSettings, Others
from ...client.thread_queues import ThreadQueues
from ...errors import Cause, RemoteProtocolError
from ...handoff.effects import PrefillEvent, RoomAsked, RoomDrained, RoomFailed, RoomLanded, RoomLeased
from ...transports.options import WriterOptions
from ...wire import Begin, StepOrder
from ..engine_api import Broken, GpuMemory, Prefilled, PrefillEngine, Request, SharedMemory, Token
from ..settings.worker import PrefillConfig
from ..tracing.timeline import Journeys
from .daemon_metrics import PrefillMetrics
from .engine_thread import Compute, Drop, Free, Offered, Order, PrefillOutcome, PrefillThread, Refused, Stepped, Steps
from .worker_times import PrefillTimes


@dataclass(slots=True, eq=False)
class PrefillRankRoom:
    """A room that is computed, or will be. What all ranks together have of it is the leader's to know; sets hold ranks
    by their numbers in the group."""

    begin: Begin
    request: Request
    over: bool = False  # nothing reads this rank's pages of it any more
    # Of all ranks.
    landed: set[int] = field(default_factory=set[int])
    drained: set[int] = field(default_factory=set[int])
    computed: bool = False
    aux: bytes | None = None
    ended: bool = False
    kv_bytes: int = 0
    copy_us: int = 0
    stamp_ns: int = 0  # of the last rank, if every rank's is of `clock`
    clock: bytes = b""

    @property
    def room_id(self) -> int:
        """The router's id of the room; nodes know the room by it."""
        return self.begin.room

    @property
    def local_id(self) -> int:
        """The leader's id, used once; engines and other ranks know the room by it."""
        return self.request.room


class PrefillReports(Protocol):
    """Receives what happens to a rank's rooms."""

    def computed(self, room: PrefillRankRoom, aux: bytes | None, first: Token | None) -> None:
        """The engine has computed the prompt. `aux` and `first`: on the rank that picks the first token. `finish` must
        follow."""

    def landed(self, room: PrefillRankRoom, kv_bytes: int, copy_us: int, stamp_ns: int) -> None:
        """All bytes that this rank had to write are written."""

    def failed(self, room: PrefillRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """The node gave the room up."""

    def engine_failed(self, room: PrefillRankRoom, cause: Cause, detail: str) -> None:
        """The engine refuses the room, or failed on it."""

    def drained(self, room: PrefillRankRoom) -> None:
        """Nothing reads this rank's pages of the room any more. Always comes, and comes last."""


class PrefillRank:
    """Computes its own layers and heads of each prompt, and writes them."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        port: ThreadQueues[Any],
        steps: Steps,
        reports: PrefillReports,
        registry: CollectorRegistry,
        journeys: Journeys,
        *,
        others: Others = NO_OTHERS,
        condemned: Callable[[], None] = lambda: None,
    ) -> None:
        """`others` takes messages of peers that are no decode rank: on the leader, those of routers. `condemned` as
        PrefillNode has it."""
        self._reports, self.journeys, self.times = reports, journeys, PrefillTimes(registry)
        ranks = settings.ranks
        self._picks = ranks.pp_rank == ranks.pp_size - 1 and ranks.tp_rank == 0
        pool, fd = engine.pool, -1
        if isinstance(pool, SharedMemory):
            pool, fd = pool.view, pool.fd
        on_card = isinstance(pool, GpuMemory)
        self.node = PrefillNode(
            settings,
            engine.description.components,
            self._on_node_event,
            writer=WriterOptions(
                pool_address=pool.address if on_card else np.frombuffer(pool, dtype=np.uint8).ctypes.data,
                pool_fd=fd,
                copy_threads=config.copy_threads,
                device=pool.device if on_card else None,
                transport=config.transport,
                network=config.network,
            ),
            replicas=engine.description.replicas,
            others=others,
            spans=journeys.spans,
            handed_off=self.times.handed_off,
            condemned=condemned,
        )
        self.metrics = PrefillMetrics(self.node, registry)
        self.thread = PrefillThread(engine, port, self.on_outcomes, steps)
        self.rooms: dict[int, PrefillRankRoom] = {}  # by local id, until Free
        self.by_id: dict[int, PrefillRankRoom] = {}  # by room id; here, one that is over gives its place to the next

    @property
    def idle(self) -> bool:
        """True if no peer waits for a message of this rank."""
        return self.node.idle

    def start(self, begin: Begin, request: Request) -> PrefillRankRoom:
        """Opens the room. The leader starts no other room of this id before this one has drained on all ranks."""
        room, earlier = PrefillRankRoom(begin, request), self.by_id.get(begin.room)
        if (earlier is not None and not earlier.over) or room.local_id in self.rooms:
            raise RemoteProtocolError("RankRoom.begin.room", f"{room.room_id:016x} is open here")
        self.rooms[room.local_id] = self.by_id[room.room_id] = room
        self.journeys.begin(room.room_id, room.local_id)
        time_left_s = begin.time_left_ms / 1e3
        self.node.open(
            room.room_id,
            tokens=len(request.prompt),
            time_left_s=time_left_s,
            grants=len(begin.peers),
            peers=begin.peers,
        )
        return room

    def finish(self, local_id: int, aux: bytes) -> None:
        """The room lands once its cells have landed."""
        room = self._open(local_id)
        if room is not None:
            self.node.finish(room.room_id, aux=aux)

    def abort(self, local_id: int, cause: Cause, detail: str) -> None:
        """The room failed on some rank."""
        room = self._open(local_id)
        if room is not None:
            self.node.abort(room.room_id, cause, detail)

    def free(self, local_id: int) -> Free:
        """Ends a room that has drained on all ranks."""
        room = self.rooms.pop(local_id)
        if self.by_id.get(room.room_id) is room:
            del self.by_id[room.room_id]
            self.journeys.forget(room.room_id)
        return Free(local_id)

    def order(self, order: StepOrder) -> Order:
        """Takes an order of the leader. Raises RemoteProtocolError for an invalid one."""
        room = self.rooms.get(order.local_id)
        match order.order:
            case "compute" if room is not None:
                return Compute(room.request)
            case "drop":
                return Drop(order.local_id)
            case "free" if room is not None and self._open(order.local_id) is None:
                return self.free(order.local_id)
            case _:
                raise RemoteProtocolError(
                    "StepOrders.orders", f"{order.order} of room {order.local_id}, not known here"
                )

    def on_outcomes(self, outcomes: list[PrefillOutcome]) -> None:
        """Takes the outcomes of the engine's thread."""
        for outcome in outcomes:
            room = self._open(outcome.room)
            if room is None:
                continue  # The room was over when the engine made this.
            match outcome:
                case Stepped(_, begin_s, end_s):
                    self.journeys.stepped(room.room_id, begin_s, end_s)
                case Offered(cell=cell):
                    self.node.push(room.room_id, cell)
                case Prefilled(aux=aux, first=first):
                    self._reports.computed(room, *((aux, first) if self._picks else (None, None)))
                case Broken(detail=detail):
                    self._reports.engine_failed(room, Cause.ENGINE, detail)
                case Refused(detail=detail):
                    self._reports.engine_failed(room, Cause.REFUSED, detail)

    def _open(self, local_id: int) -> PrefillRankRoom | None:
        """The room, unless it has drained."""
        room = self.rooms.get(local_id)
        return None if room is None or room.over else room

    def _on_node_event(self, event: PrefillEvent) -> None:
        if isinstance(event, RoomAsked):
            return  # its Begin comes from the router
        room_id, room = event.room, self.by_id[event.room]
        match event:
            case RoomLeased():
                if (journey := self.journeys.of(room_id)) is not None:
                    journey.peer, journey.transport = self.node.way_of(room_id)
                self.journeys.reached(room_id, "control", "begin to grant")
            case RoomLanded(kv_bytes=kv_bytes):
                self.journeys.reached(room_id, "control", "grant to landed")
                copy_us = self.node.copy_ns.get(room_id, 0) // 1_000
                self.metrics.rooms.kv_bytes.inc(kv_bytes)
                self.metrics.copy_seconds.observe(copy_us / 1e6)
                self._reports.landed(room, kv_bytes, copy_us, self.node.stamp_ns)
            case RoomFailed(_, cause, detail, retry_ms):
                self._reports.failed(room, cause, detail, retry_ms)
            case RoomDrained():
                room.over = True
                self._reports.drained(room)

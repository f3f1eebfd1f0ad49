"""One rank of a prefill worker, leader or follower: its engine's thread, its node, and their rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from ...client.prefill_node import PrefillNode
from ...client.settings import NodeSettings, Others
from ...client.thread_queues import ThreadQueues
from ...errors import Cause, RemoteProtocolError
from ...handoff.effects import PrefillEvent, RoomAsked, RoomDrained, RoomFailed, RoomLanded, RoomLeased
from ...transports.options import WriterOptions
from ...wire import Begin, StepOrder
from ..engine_api import Broken, CardMemory, Prefilled, PrefillEngine, Request, SharedMemory
from ..settings.worker import PrefillConfig
from ..tracing.timeline import Journeys
from .daemon_metrics import PrefillMetrics
from .engine_thread import Compute, Drop, Free, Offered, Order, PrefillOutcome, PrefillThread, Refused, Stepped, Steps
from .worker_times import PrefillTimes


class PrefillReports(Protocol):
    """Receives what happens to a rank's rooms, each by its local id."""

    def computed(self, local_id: int, aux: bytes | None) -> None:
        """The engine has computed the prompt. `aux`: on the rank that picks the first token. `finish` must follow."""

    def landed(self, local_id: int, kv_bytes: int, copy_us: int, stamp_ns: int) -> None:
        """All bytes that this rank had to write are written."""

    def failed(self, local_id: int, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """The node gave the room up."""

    def engine_failed(self, local_id: int, cause: Cause, detail: str) -> None:
        """The engine refuses the room, or failed on it."""

    def drained(self, local_id: int) -> None:
        """Nothing reads this rank's pages of the room any more. Always comes, and comes last."""


@dataclass(frozen=True, slots=True)
class PrefillRankRoom:
    """A room that is open on this rank."""

    room_id: int  # the router's id; the node knows the room by it
    request: Request

    @property
    def local_id(self) -> int:
        """The leader's id; engines and other ranks know the room by it."""
        return self.request.room


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
        others: Others | None = None,
    ) -> None:
        """`others` takes messages of peers that are no decode rank: on the leader, those of routers."""
        self._reports, self.journeys, self.times = reports, journeys, PrefillTimes(registry)
        ranks = settings.ranks
        self._picks = ranks.pp_rank == ranks.pp_size - 1 and ranks.tp_rank == 0
        pool, fd = engine.pool, -1
        if isinstance(pool, SharedMemory):
            pool, fd = pool.view, pool.fd
        on_card = isinstance(pool, CardMemory)
        self.node = PrefillNode(
            settings,
            engine.card.components,
            self._on_node_event,
            writer=WriterOptions(
                pool_address=pool.address if on_card else np.frombuffer(pool, dtype=np.uint8).ctypes.data,
                pool_fd=fd,
                copy_threads=config.copy_threads,
                card=pool.card if on_card else None,
                transport=config.transport,
                network=config.network,
            ),
            replicas=engine.card.replicas,
            others=others,
            spans=journeys.spans,
            handed_off=self.times.handed_off,
        )
        self.metrics = PrefillMetrics(self.node, registry)
        self.thread = PrefillThread(engine, port, self.on_outcomes, steps)
        self._rooms: dict[int, PrefillRankRoom] = {}  # by local id, until Free
        self._here: dict[int, PrefillRankRoom] = {}  # by room id, until drained

    @property
    def idle(self) -> bool:
        """Whether no peer waits for a message of this rank."""
        return self.node.idle

    def start(self, begin: Begin, request: Request) -> None:
        """Opens the room. The leader starts no other room of this id before this one has drained on all ranks."""
        room = PrefillRankRoom(begin.room, request)
        if room.room_id in self._here or room.local_id in self._rooms:
            raise RemoteProtocolError("RankRoom.begin.room", f"{room.room_id:016x} is open here")
        self._rooms[room.local_id] = self._here[room.room_id] = room
        self.journeys.begin(room.room_id, room.local_id)
        time_left_s = begin.time_left_ms / 1e3
        self.node.open(
            room.room_id,
            tokens=len(request.prompt),
            time_left_s=time_left_s,
            grants=len(begin.peers),
            peers=begin.peers,
        )

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
        del self._rooms[local_id]
        return Free(local_id)

    def order(self, order: StepOrder) -> Order:
        """Takes an order of the leader. Raises RemoteProtocolError for an invalid one."""
        room = self._rooms.get(order.local_id)
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
                case Offered(cell=cell, after=after):
                    self.node.push(room.room_id, cell, after=after)
                case Prefilled(aux=aux):
                    self._reports.computed(room.local_id, aux if self._picks else None)
                case Broken(detail=detail):
                    self._reports.engine_failed(room.local_id, Cause.ENGINE, detail)
                case Refused(detail=detail):
                    self._reports.engine_failed(room.local_id, Cause.REFUSED, detail)

    def _open(self, local_id: int) -> PrefillRankRoom | None:
        """The room, unless it has drained."""
        room = self._rooms.get(local_id)
        return room if room is not None and self._here.get(room.room_id) is room else None

    def _on_node_event(self, event: PrefillEvent) -> None:
        if isinstance(event, RoomAsked):
            return  # its Begin comes from the router
        room_id, local_id = event.room, self._here[event.room].local_id
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
                self._reports.landed(local_id, kv_bytes, copy_us, self.node.stamp_ns)
            case RoomFailed(_, cause, detail, retry_ms):
                self._reports.failed(local_id, cause, detail, retry_ms)
            case RoomDrained():
                del self._here[room_id]
                self._reports.drained(local_id)
                self.journeys.forget(room_id)

"""One rank of a decode worker, leader or follower: its engine's thread, its node, and their rooms."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from ...client.decode_node import DecodeNode
from ...client.settings import NodeSettings, Others
from ...client.thread_queues import ThreadQueues
from ...errors import Cause, RemoteProtocolError
from ...handoff.decode.room_request import RoomRequest
from ...handoff.effects import DecodeEvent, RoomDrained, RoomFailed, RoomReady
from ...handoff.prefix_keys import RunningKeys
from ...limits import TOKENS_MAX
from ...memory.arena_memory import ArenaMemory
from ...transports.options import ArenaOptions
from ...wire import Begin, StepOrder, pack_ids
from ..engine_api import Broken, ComputesRests, DecodeEngine, Finished, Request, Token
from ..settings.worker import DecodeConfig
from ..tracing.timeline import Journeys
from .daemon_metrics import DecodeMetrics
from .engine_thread import DecodeOutcome, DecodeThread, Drop, Dropped, Generate, GenerateFrom, Order, Stepped, Steps
from .worker_times import DecodeTimes

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeRankRoom:
    """A room that is expected, or generates. What all ranks together have of it is the leader's to know."""

    begin: Begin
    request: Request
    landing: RoomReady | None = None
    keys: RunningKeys | None = None  # of its prompt and of its answer, without the last id; None: no answer is shared
    leased_s: float = 0.0  # when it got its slots, by CLOCK_MONOTONIC; 0: it has none
    # Of all ranks.
    ranks_ready: set[int] = field(default_factory=set[int])  # by their numbers in the group
    ready_ns: int = 0  # when the last rank became ready
    token_s: float = 0.0  # when its latest token came, by CLOCK_MONOTONIC
    kv_bytes: int = 0
    prefix: int = TOKENS_MAX  # cached tokens: the smallest of all ranks, since each rank evicts by itself
    tokens: int = 0  # generated
    dropped: tuple[Cause, str] | None = None  # why it is to end early
    ended: bool = False  # its router has its End; the engine may still read its slots

    @property
    def room_id(self) -> int:
        """The router's id of the room; nodes know the room by it."""
        return self.begin.room

    @property
    def local_id(self) -> int:
        """The leader's id, used once; engines and other ranks know the room by it."""
        return self.request.room

    @property
    def written_keys(self) -> tuple[bytes, ...]:
        """The keys of the blocks of its prompt and answer whose rows are written."""
        return tuple(self.keys.keys) if self.keys is not None and self.keys.last_id else ()


class DecodeReports(Protocol):
    """Receives what happens to a rank's rooms."""

    def ready(self, room: DecodeRankRoom, kv_bytes: int, prefix: int) -> None:
        """The room is in this rank's arena; `prefix` tokens of its prompt were cached there."""

    def failed(self, room: DecodeRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """The node gave the room up and has forgotten it."""

    def tokens(self, new_tokens: Iterable[Token]) -> None:
        """The tokens of one step, of several rooms."""

    def closed(self, room: DecodeRankRoom, reason: str, detail: str, finished: Finished | None) -> None:
        """The engine ended the room: its slots are free, and it is forgotten."""


class DecodeRank:
    """Generates with its own heads from an arena of its own."""

    def __init__(
        self,
        config: DecodeConfig,
        settings: NodeSettings,
        engine: DecodeEngine,
        arena: ArenaMemory,
        port: ThreadQueues[Any],
        steps: Steps,
        reports: DecodeReports,
        registry: CollectorRegistry,
        journeys: Journeys,
        *,
        others: Others | None = None,
        leased: Callable[[int], None] = lambda _: None,
        unusable_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`others` takes messages of peers other than prefill ranks; `leased` takes the ids of rooms with slots;
        `unusable_changed` as DecodeNode has it."""
        self._reports, self.journeys, self._leased = reports, journeys, leased
        self.times = DecodeTimes(registry)
        self.node = DecodeNode(
            settings,
            engine.description.arena_components,
            arena,
            self._on_node_event,
            options=ArenaOptions(
                transport=config.transport, network=config.network, socket_directory=config.socket_directory
            ),
            enable_hisparse=config.enable_hisparse,
            prefix_cache=config.prefix_cache,
            verify=config.verify,
            others=others or Others(self._unknown),
            leased=self._on_leased,
            quarantined=self.times.quarantined,
            unusable_changed=unusable_changed,
        )
        rests = isinstance(engine, ComputesRests) and engine.computes_rests
        self._shares_answers = rests and self.node.core.cache.block_tokens > 0
        self.rest_max = settings.limits.turn_tokens_max if self._shares_answers else 0  # tokens of one prompt
        self._leads = settings.ranks.tp_rank == settings.ranks.pp_rank == 0
        figures = (lambda: engine.figures) if config.enable_hisparse else None
        self.metrics = DecodeMetrics(self.node, registry, figures)
        self.thread = DecodeThread(engine, port, self.on_outcomes, steps)
        self.rooms: dict[int, DecodeRankRoom] = {}  # by local id
        self.by_id: dict[int, DecodeRankRoom] = {}  # by room id

    @property
    def idle(self) -> bool:
        """True if no peer waits for a message of this rank. A lease without proof of a quiet writer holds up nobody."""
        return not self.node.core.rooms

    def start(self, begin: Begin, request: Request) -> None:
        """Expects the room; no other room here has its id."""
        room = DecodeRankRoom(begin, request)
        if room.local_id in self.rooms:
            raise RemoteProtocolError("RankRoom.local_id", f"{room.local_id} is here already")
        if begin.rest_max > self.rest_max:
            raise RemoteProtocolError("Begin.rest_max", f"{begin.rest_max}, this rank computes {self.rest_max} tokens")
        self.rooms[room.local_id] = self.by_id[room.room_id] = room
        self.journeys.begin(room.room_id, room.local_id)
        cache = self.node.core.cache
        if self._shares_answers and not begin.enable_hisparse:
            room.keys = cache.running_keys(begin.prompt, begin.salt)
        keys = cache.keys(begin.prompt, begin.salt) if room.keys is None else tuple(room.keys.keys)
        if begin.rest_max and not self._leads:  # all ranks compute the tokens that the leader has not cached
            keys = keys[: (len(request.prompt) - begin.rest_max) // cache.block_tokens]
        self.node.expect(
            RoomRequest(
                room=begin.room,
                tokens=len(request.prompt),
                sources=() if begin.rest_max else begin.peers,
                time_left_s=begin.time_left_ms / 1e3,
                growth=begin.sampling.max_tokens,
                keys=keys,
                enable_hisparse=begin.enable_hisparse,
                rest_max=begin.rest_max,
            )
        )

    def abort(self, local_id: int, cause: Cause, detail: str) -> DecodeRankRoom | None:
        """Forgets a room that failed on some rank and never generates; returns it if it was known here."""
        room = self._forget(local_id)
        if room is not None and room.landing is not None:
            self.node.release(room.room_id)
        elif room is not None:
            self.node.abort(room.room_id, cause, detail)
        if room is not None:
            self.journeys.forget(room.room_id)
        return room

    def generate(self, local_id: int, aux: bytes) -> Generate | GenerateFrom:
        """Has the engine generate, and first compute what no prefill did.

        Raises RemoteProtocolError if the room is not in the arena.
        """
        room = self.rooms.get(local_id)
        if room is None or room.landing is None:
            raise RemoteProtocolError("StepOrders.orders", f"generate of room {local_id}, not ready here")
        if room.begin.rest_max:
            return GenerateFrom(room.request, room.landing.slots, room.landing.prefix)
        return Generate(room.request, room.landing.slots, aux)

    def order(self, order: StepOrder) -> Order:
        """Takes an order of the leader. Raises RemoteProtocolError for an invalid one."""
        match order.order:
            case "generate":
                return self.generate(order.local_id, order.aux)
            case "drop":
                return Drop(order.local_id)
            case _:
                raise RemoteProtocolError("StepOrders.orders", f"{order.order}: a decode rank computes no prompt")

    def on_outcomes(self, outcomes: list[DecodeOutcome]) -> None:
        """Takes the outcomes of the engine's thread."""
        for outcome in outcomes:
            if isinstance(outcome, Stepped) and (room := self.rooms.get(outcome.room)) is not None:
                self.journeys.admitted(room.room_id, outcome.begin_s)
            elif isinstance(outcome, Token):
                room = self.rooms.get(outcome.room)
                if room is not None and room.keys is not None:
                    room.keys.generated(pack_ids([outcome.id]))
        self._reports.tokens(outcome for outcome in outcomes if isinstance(outcome, Token))
        for outcome in outcomes:
            match outcome:
                case Token() | Stepped():
                    pass
                case Finished(room=local_id, reason=reason):
                    self._close(local_id, reason, "", outcome)
                case Broken(room=local_id, detail=detail):
                    self._close(local_id, Cause.ENGINE.value, detail)
                case Dropped(local_id):
                    if local_id in self.rooms:  # else it finished before the order came
                        self._close(local_id, Cause.ABORTED.value, "")

    def _close(self, local_id: int, reason: str, detail: str, finished: Finished | None = None) -> None:
        """The engine touches no slot of the room any more."""
        room = self.rooms.get(local_id)
        if room is None:
            log.error("engine ended unknown room %d", local_id)
            return
        self.journeys.reached(room.room_id, "generate", reason)
        self._forget(local_id)
        causes = reason, *(() if room.dropped is None else (room.dropped[0].value,))
        broken = Cause.ENGINE.value in causes  # what it has written is not known
        self.node.release(room.room_id, keys=() if broken else room.written_keys)
        self._reports.closed(room, reason, detail, finished)
        self.journeys.forget(room.room_id)

    def _forget(self, local_id: int) -> DecodeRankRoom | None:
        room = self.rooms.pop(local_id, None)
        if room is not None:
            del self.by_id[room.room_id]
            if room.leased_s:
                self.times.held(time.monotonic() - room.leased_s)
        return room

    def _on_leased(self, room_id: int) -> None:
        free, total = self.node.core.cache.scarcest(enable_hisparse=False)
        self.times.leased(free=free, total=total)
        if (room := self.by_id.get(room_id)) is not None:
            room.leased_s = time.monotonic()
        self._leased(room_id)

    def _unknown(self, peer: str, message: Any) -> bool:  # noqa: ARG002
        """Drops messages of peers that this rank has not dialled: routers dial the leader alone."""
        return peer not in self.node.core.prefill_peers.peers

    def _on_node_event(self, event: DecodeEvent) -> None:
        room = self.by_id.get(event.room)
        match event:
            case RoomReady():
                assert room is not None
                room.landing = event
                self.metrics.rooms.kv_bytes.inc(event.kv_bytes)
                self._reports.ready(room, event.kv_bytes, event.prefix)
            case RoomFailed(_, cause, detail, retry_ms) if room is not None:
                self._forget(room.local_id)
                self._reports.failed(room, cause, detail, retry_ms)
                self.journeys.forget(room.room_id)
            case RoomFailed() | RoomDrained():
                pass  # the room was aborted; no room here drains, since the engine chooses no slots

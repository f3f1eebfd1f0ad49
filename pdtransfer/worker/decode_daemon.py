"""A decode daemon: KV in, tokens out. The node lands rooms in the arena, the engine generates from where they lie.

Where this process leads a group of ranks, each expects the room in an arena of its own: a room is admitted when it is
READY on all, and fails on all when it fails on one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import msgspec
from prometheus_client import CollectorRegistry

from ..config.config import DecodeConfig
from ..engine_api import Broken, DecodeEngine, Finished, Request, Token
from ..errors import Cause, LocalProtocolError, RemoteProtocolError
from ..handoff.effects import DecodeEvent, Ready, RoomFailed
from ..limits import TEXT_LENGTH_MAX, TOKENS_MAX
from ..memory.arena_memory import Arena
from ..node import DecodeNode, NodeSettings, Others
from ..node.thread_queues import Port
from ..tracing.timeline import Journeys
from ..wire import Begin, End, Load, Message
from . import engine_thread
from .daemon_metrics import DecodeMetrics
from .engine_thread import Cancel, DecodeOutcome, Dropped, Generate, Order
from .group import frames
from .group.leader import Follower, Lead
from .router_link import Desk, failure, request_of
from .service import Service

log = logging.getLogger(__name__)

RETRY_MS_MIN = 100  # before who is told that too many wait asks again


@dataclass(slots=True, eq=False)
class Work:
    """One room that decodes, or will."""

    request: Request
    begin: Begin
    landing: Ready | None = None  # in this rank's own arena
    ranks_ready: int = 0
    ready_ns: int = 0  # on all of them: it generates
    kv_bytes: int = 0  # of all of them
    prefix: int = TOKENS_MAX  # tokens that crossed to none of them; ranks evict each by itself, so the least counts
    dropped: tuple[Cause, str] | None = None  # why it is to end early
    ended: bool = False  # its router has heard so; the engine may still read its slots

    @property
    def room(self) -> int:
        """Its label, which the node and the router know it by."""
        return self.begin.room

    @property
    def serial(self) -> int:
        """Which the engine and the other ranks know it by."""
        return self.request.room


def node_of(
    config: DecodeConfig,
    settings: NodeSettings,
    engine: DecodeEngine,
    arena: Arena,
    tell: Callable[[DecodeEvent], None],
    *,
    others: Others,
    leased: Callable[[int], None] = lambda _: None,
) -> DecodeNode:
    """One rank's node: the same on every rank of a group, but for what is done with `others` and what was leased."""
    return DecodeNode(
        settings,
        engine.card.arena_components,
        arena,
        tell,
        socket_directory=config.socket_directory,
        enable_hisparse=config.enable_hisparse,
        prefix_cache=config.prefix_cache,
        verify=config.verify,
        others=others,
        transport=config.transport,
        network=config.network,
        leased=leased,
    )


def expect(node: DecodeNode, begin: Begin, request: Request) -> None:
    """What one rank leases for a room: the same on every rank of a group."""
    node.expect(
        begin.room,
        tokens=len(request.prompt),
        sources=begin.peers,
        time_left_s=begin.time_left_ms / 1e3,
        growth=begin.sampling.max_tokens,
        keys=node.core.cache.keys(begin.prompt, begin.salt),
        enable_hisparse=begin.enable_hisparse,
    )


class DecodeDaemon:
    """KV in, tokens out: the node lands rooms in the arena, the engine generates from them where they lie."""

    def __init__(
        self,
        config: DecodeConfig,
        settings: NodeSettings,
        engine: DecodeEngine,
        arena: Arena,
        port: Port[Order],
        registry: CollectorRegistry,
        group: Lead | None = None,
        journeys: Journeys | None = None,
    ) -> None:
        self.config, self._engine, self.port, self.group = config, engine, port, group or Lead()
        self._journeys = journeys or Journeys()
        self.group.heard = self._reported
        self.node = node_of(config, settings, engine, arena, self._told, others=self._receive, leased=self._leased)
        service = Service(self.node.core.links.identity, config.limits)
        self.desk = Desk(
            service,
            self.node.bus.send,
            start=self._start,
            stop=self._stop,
            load=self.load,
            introduce=self._introduce,
        )
        self._work: dict[int, Work] = {}  # by serial number
        self._rooms: dict[int, Work] = {}  # the same, by label
        self._serials = count(1)
        self._sparse = 0  # of them, that want HiSparse
        figures = (lambda: engine.figures) if config.enable_hisparse else None
        self.metrics = DecodeMetrics(self.node, registry, figures)
        turns = engine_thread.leading(engine, port, self.group.turn)
        self.thread = engine_thread.DecodeThread(engine, port, self._heard, turns)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits to be acknowledged; a lease whose writer is not proven quiet holds up nobody."""
        return not self.node.core.rooms and self.desk.idle

    def load(self) -> Load:
        """What there is and what is left, in tokens, for requests of either kind. What the prefix cache would give up
        counts as free."""
        core, cache = self.node.core, self.node.core.cache
        free, total = cache.scarcest(enable_hisparse=False)
        sparse_free, sparse_total = cache.scarcest(enable_hisparse=True)
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(core.rooms) - len(core.admission),
            rooms_queued=len(core.admission),
            slots_free=free,
            slots_total=total,
            slots_quarantined=cache.tokens_of(core.leases.quarantined_bytes),
            enable_hisparse=self.config.enable_hisparse,
            sparse_slots_free=sparse_free,
            sparse_slots_total=sparse_total,
        )

    def ready(self, bytes_ready: int) -> None:
        """As DecodeNode.ready; routers hear what there is now."""
        self.node.ready(bytes_ready)
        self.desk.run([])

    def _receive(self, peer: str, message: Message) -> bool:
        """Whether the message came from one who dialled us, which only routers do."""
        router = peer not in self.node.core.links.peers
        if router:
            self.desk.receive(peer, message)
        return router

    def _introduce(self, sources: tuple[str, ...]) -> None:
        self.node.introduce(sources)
        self.group.introduce(sources)

    def _start(self, begin: Begin) -> None:
        self.metrics.rooms.begun.inc()
        try:
            request = request_of(begin, next(self._serials))
            if begin.room in self._rooms:  # another router's, over, and the engine has not let go of it yet
                raise ValueError(f"room: {begin.room:#x} is in use")
            if begin.enable_hisparse and not self.config.enable_hisparse:
                raise ValueError("enable_hisparse: the request wants it, this node is run without it")
            self._engine.check(request)
        except (ValueError, RemoteProtocolError) as error:
            self._say(failure(begin.room, Cause.REFUSED, str(error)))
            return
        if begin.enable_hisparse and (full := self._full()) is not None:
            self._say(failure(begin.room, Cause.FULL, *full))
            return
        work = Work(request, begin)
        self._work[work.serial] = self._rooms[work.room] = work
        self._sparse += begin.enable_hisparse
        self._journeys.begin(work.room, work.serial)
        expect(self.node, begin, request)

    def _full(self) -> tuple[str, int] | None:
        """Why no other HiSparse request is taken now, if it is so, and in how many ms it is worth asking again."""
        figures, most = self._engine.figures, self.config.limits.hisparse_queue_max
        waiting = self._sparse - figures.running
        if waiting < most:
            return None
        detail = f"hisparse_queue_max = {most}: {waiting} requests wait for the device"
        return detail, max(figures.retry_ms, RETRY_MS_MIN)

    def _forget(self, work: Work) -> None:
        self._journeys.forget(work.room)
        del self._work[work.serial], self._rooms[work.room]
        self._sparse -= work.begin.enable_hisparse

    def _leased(self, room: int) -> None:
        """The other ranks wait for slots in the order in which this one got its own: two rooms that each had some
        would wait for one another."""
        self._journeys.reached(room, "control", "wait for slots")
        work = self._rooms.get(room)
        if work is not None:
            self.group.start(work.serial, work.begin)

    def _stop(self, room: int, cause: Cause) -> None:
        self._fail(self._rooms.get(room), cause, "the router gave it up")

    def end_all(self, cause: Cause, detail: str) -> None:
        """The worker cannot go on: ends what is under way, for the routers to hear why.

        The engine may be in a step, for ever if another rank is gone: the slots that it has come back when it says so,
        or with the end of this process.
        """
        for work in list(self._work.values()):
            self._fail(work, cause, detail)
            self._end(work, failure(work.room, cause, detail))

    def _told(self, event: DecodeEvent) -> None:
        work = self._rooms.get(event.room)
        match event:
            case Ready():
                assert work is not None
                work.landing = event
                self.metrics.rooms.kv_bytes.inc(event.kv_bytes)
                self._ready(work, event.kv_bytes, event.prefix)
            case RoomFailed(_, cause, detail, retry_ms):
                self._fail(work, cause, detail, retry_ms)

    def _reported(self, follower: Follower, report: frames.Report) -> None:
        """What has become of a room on another rank."""
        work = self._work.get(report.serial)
        match report:
            case frames.Ready(_, kv_bytes, prefix) if work is not None:
                self._ready(work, kv_bytes, prefix)
            case frames.Failed(_, cause, detail, retry_ms):
                self._fail(work, Cause.of(cause), f"{follower.name}: {detail}", retry_ms)
            case frames.Ready():
                pass  # It has failed since.
            case _:
                raise AssertionError(report)

    def _ready(self, work: Work, kv_bytes: int, prefix: int) -> None:
        """On one rank; it generates once it is on all."""
        work.ranks_ready += 1
        work.kv_bytes += kv_bytes
        work.prefix = min(work.prefix, prefix)
        if work.ranks_ready == self.group.size:
            assert work.landing is not None
            self._journeys.reached(work.room, "landing", "READY", byte_count=work.kv_bytes)
            work.ready_ns = time.monotonic_ns()
            self.port.tell(Generate(work.request, work.landing.slots, work.landing.aux))

    def _fail(self, work: Work | None, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """Before it generates: on every rank, for the first reason that there is. Then its slots are the engine's until
        Dropped."""
        if work is None:
            return
        if work.ready_ns:
            work.dropped = cause, detail
            self.port.tell(Cancel(work.serial))
            return
        self._forget(work)
        self._end(work, failure(work.room, cause, detail, retry_ms))
        self.group.abort(work.serial, cause, detail)
        if work.landing is None:
            self.node.abort(work.room, cause, detail)
        else:
            self.node.release(work.room)

    def _heard(self, outcomes: list[DecodeOutcome]) -> None:
        """What the engine's thread has done."""
        self._tell(outcome for outcome in outcomes if isinstance(outcome, Token))
        for outcome in outcomes:
            match outcome:
                case Token():
                    pass
                case Finished(room=serial, reason=reason):
                    self._close(serial, reason, "", outcome)
                case Broken(room=serial, detail=detail):
                    self._close(serial, Cause.ENGINE.value, detail)
                case Dropped(serial):
                    if serial in self._work:  # else it finished before the Cancel came
                        self._close(serial, Cause.ABORTED.value, "")

    def _tell(self, made: Iterable[Token]) -> None:
        """A room's tokens of one step go out in one message."""
        tokens: dict[int, list[int]] = {}
        for token in made:
            tokens.setdefault(token.room, []).append(token.id)
            if token.index == 0 and token.room in self._work:
                self._journeys.reached(self._work[token.room].room, "first token", "READY to first token")
        for serial, ids in tokens.items():
            work = self._work.get(serial)
            try:
                if work is not None:
                    self.desk.tokens(work.room, ids)
            except LocalProtocolError as error:  # more than it was asked for
                self._fail(work, Cause.ENGINE, str(error))

    def _close(self, serial: int, reason: str, detail: str, finished: Finished | None = None) -> None:
        """The engine touches no slot of the room any more."""
        work = self._work.get(serial)
        if work is None:
            log.error("the engine ends room %d, which it has not", serial)
            return
        self._journeys.reached(work.room, "generate", reason)
        self._forget(work)
        self.node.release(work.room)
        if work.dropped is not None:
            reason, detail, finished = work.dropped[0].value, work.dropped[1], None
        end = End(
            work.room,
            reason,
            detail[:TEXT_LENGTH_MAX],
            0,
            kv_bytes=work.kv_bytes,
            stamp_ns=work.ready_ns,
            prefix=work.prefix,
        )
        if finished is not None:
            end = msgspec.structs.replace(
                end,
                tokens_digest=finished.tokens_digest,
                logits_digest=finished.logits_digest,
                kv_digest=finished.kv_digest,
            )
        self._end(work, end)

    def _end(self, work: Work, end: End) -> None:
        """Each room ends once, though its slots may be held for longer."""
        if not work.ended:
            work.ended = True
            self._say(end)

    def _say(self, end: End) -> None:
        self.metrics.rooms.ended.labels(end.reason).inc()
        self.desk.end(end)

"""A decode daemon: KV in, tokens out. The node lands rooms in the arena, the engine generates from where they lie.

Where this process leads a group of ranks, each expects the room in an arena of its own: a room is admitted when it is
READY on all, and fails on all when it fails on one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry

from . import engine_thread
from .config import DecodeConfig
from .daemon_metrics import DecodeMetrics
from .desk import Desk, failure, request_of
from .effects import Ready, RoomFailed
from .engine.base import Broken, DecodeEngine, Finished, Request, Token
from .engine_thread import Cancel, DecodeOutcome, Dropped, Generate, Order
from .errors import Cause, LocalProtocolError, RemoteProtocolError
from .group import frames
from .group.lead import Follower, Lead
from .limits import TEXT_LENGTH_MAX
from .memory import Arena
from .node import DecodeNode, NodeSettings
from .port import Port
from .service import Service
from .wire import Begin, End, Load, Message

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """One room that decodes, or will."""

    request: Request
    begin: Begin
    landing: Ready | None = None  # in this rank's own arena
    ranks_ready: int = 0
    ready_ns: int = 0  # on all of them: it generates
    kv_bytes: int = 0  # of all of them
    prefix: int = 0  # tokens that did not cross
    dropped: tuple[Cause, str] | None = None  # why it is to end early


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
    ) -> None:
        self.config, self._engine, self.port, self.group = config, engine, port, group or Lead()
        self.group.heard = self._reported
        card = engine.card
        self.node = DecodeNode(
            settings,
            card.components,
            arena,
            self._told,
            socket_directory=config.socket_directory,
            enable_hisparse=config.enable_hisparse,
            prefix_cache=config.prefix_cache,
            verify=config.verify,
            others=self._receive,
            leased=self._leased,
        )
        service = Service(self.node.core.links.identity, config.limits)
        self.desk = Desk(service, self.node.bus.send, start=self._start, stop=self._stop, load=self.load)
        self._work: dict[int, Work] = {}
        self.metrics = DecodeMetrics(self.node, registry)
        turns = engine_thread.leading(engine, port, self.group.turn)
        self.thread = engine_thread.DecodeThread(engine, port, self._heard, turns)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits to be acknowledged; a lease whose writer is not proven quiet holds up nobody."""
        return not self.node.core.rooms and self.desk.idle

    def load(self) -> Load:
        """What there is and what is left, in slots of the component that has fewest left.

        What the prefix cache would give up counts as free.
        """
        core = self.node.core
        each = zip(core.arena.free, core.cache.free_slots, strict=True)
        free_slots, slots = min(((free, of.ready) for of, free in each), key=lambda pair: pair[0] / max(1, pair[1]))
        row_bytes = sum(component.layout.row_bytes for component in core.arena.components)
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(core.rooms) - len(core.admission),
            rooms_queued=len(core.admission),
            slots_free=free_slots,
            slots_total=slots,
            slots_quarantined=core.leases.quarantined_bytes // row_bytes,
            enable_hisparse=self.config.enable_hisparse,
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

    def _start(self, begin: Begin) -> None:
        self.metrics.rooms.begun.inc()
        try:
            request = request_of(begin)
            if begin.enable_hisparse and not self.config.enable_hisparse:
                raise ValueError("enable_hisparse: the request wants it, this node is run without it")
            self._engine.check(request)
        except (ValueError, RemoteProtocolError) as error:
            self._end(failure(begin.room, Cause.REFUSED, str(error)))
            return
        self._work[begin.room] = Work(request, begin)
        expect(self.node, begin, request)

    def _leased(self, room: int) -> None:
        """The other ranks wait for slots in the order in which this one got its own: two rooms that each had some
        would wait for one another."""
        work = self._work.get(room)
        if work is not None:
            self.group.start(work.begin)

    def _stop(self, room: int, cause: Cause) -> None:
        work = self._work.get(room)
        if work is not None and work.ready_ns:
            self._drop(room, cause, "the router gave it up")
        else:
            self._fail(room, cause, "the router gave it up")

    def end_all(self, cause: Cause, detail: str) -> None:
        """The worker cannot go on: ends what is under way, for the routers to hear why. No engine steps any more."""
        for room in list(self._work):
            if self._work[room].ready_ns:
                self._close(room, cause.value, detail)
            else:
                self._fail(room, cause, detail)

    def _drop(self, room: int, cause: Cause, detail: str) -> None:
        """Of a READY room: its slots are the engine's until Dropped."""
        self._work[room].dropped = cause, detail
        self.port.tell(Cancel(room))

    def _told(self, event: Ready | RoomFailed) -> None:
        match event:
            case Ready(room):
                work = self._work[room]
                work.landing, work.prefix = event, event.prefix
                self.metrics.rooms.kv_bytes.inc(event.kv_bytes)
                self._ready(room, event.kv_bytes)
            case RoomFailed(room, cause, detail, retry_ms):
                self._fail(room, cause, detail, retry_ms)

    def _reported(self, follower: Follower, report: frames.Report) -> None:
        """What has become of a room on another rank."""
        match report:
            case frames.Ready(room, kv_bytes):
                self._ready(room, kv_bytes)
            case frames.Failed(room, cause, detail, retry_ms):
                self._fail(room, Cause.of(cause), f"{follower.name}: {detail}", retry_ms)
            case _:
                raise AssertionError(report)

    def _ready(self, room: int, kv_bytes: int) -> None:
        """On one rank; it generates once it is on all."""
        work = self._work.get(room)
        if work is None:
            return  # It has failed since.
        work.ranks_ready += 1
        work.kv_bytes += kv_bytes
        if work.ranks_ready == self.group.size:
            assert work.landing is not None
            work.ready_ns = time.monotonic_ns()
            self.port.tell(Generate(work.request, work.landing.slots, work.landing.aux))

    def _fail(self, room: int, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """Before it generates: on every rank, for the first reason that there is."""
        work = self._work.pop(room, None)
        if work is None:
            return
        self._end(failure(room, cause, detail, retry_ms))
        self.group.abort(room, cause, detail)
        if work.landing is None:
            self.node.abort(room, cause, detail)
        else:
            self.node.release(room)

    def _heard(self, outcomes: list[DecodeOutcome]) -> None:
        """What the engine's thread has done; a room's tokens of one step go out in one message."""
        tokens: dict[int, list[int]] = {}
        for outcome in outcomes:
            if isinstance(outcome, Token):
                tokens.setdefault(outcome.room, []).append(outcome.id)
        for room, ids in tokens.items():
            try:
                self.desk.tokens(room, ids)
            except LocalProtocolError as error:  # more than it was asked for
                self._drop(room, Cause.ENGINE, str(error))
        for outcome in outcomes:
            match outcome:
                case Token():
                    pass
                case Finished():
                    self._close(outcome.room, outcome.reason, "", outcome)
                case Broken():
                    self._close(outcome.room, Cause.ENGINE.value, outcome.detail)
                case Dropped(room):
                    if room in self._work:  # else it finished before the Cancel came
                        self._close(room, Cause.ABORTED.value, "")

    def _close(self, room: int, reason: str, detail: str, finished: Finished | None = None) -> None:
        """The engine touches no slot of the room any more."""
        work = self._work.pop(room, None)
        if work is None:
            log.error("the engine ends room %#x, which it has not", room)
            return
        self.node.release(room)
        if work.dropped is not None:
            reason, detail, finished = work.dropped[0].value, work.dropped[1], None
        end = End(
            room,
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
        self._end(end)

    def _end(self, end: End) -> None:
        self.metrics.rooms.ended.labels(end.reason).inc()
        self.desk.end(end)

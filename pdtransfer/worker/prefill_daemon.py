"""A prefill daemon: prompts in, KV out. The engine computes, the node writes, the router hears how it ended.

A daemon is three parties that never wait for each other: the router's Service, the node, the engine's thread. Every
room that the router began ends with one End, whoever of the three ends it. Where this process leads a group of ranks,
a room has landed when it has on every rank, fails on all when it fails on one, and its pages are free when all are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from prometheus_client import CollectorRegistry

from ..config.config import PrefillConfig
from ..engine_api import Broken, CardMemory, Prefilled, PrefillEngine, SharedMemory, Spans
from ..errors import Cause, RemoteProtocolError
from ..handoff.effects import Drained, Landed, Leased, PrefillEvent, RoomFailed
from ..node import NodeSettings, Others, PrefillNode
from ..node.thread_queues import Port
from ..tracing.timeline import Journeys
from ..wire import Begin, End, Hello, Load, Message
from . import engine_thread
from .daemon_metrics import PrefillMetrics
from .engine_thread import Cancel, Compute, Free, Offered, Order, PrefillOutcome, Refused
from .group import frames
from .group.leader import Follower, Lead
from .router_link import Desk, failure, request_of
from .service import Service


@dataclass(slots=True, eq=False)
class Work:
    """One room that the engine computes, or will; the counts are of ranks."""

    room: int  # its label, which the node and the router know it by
    serial: int  # which the engine and the other ranks know it by
    tokens: int
    landed: int = 0
    drained: int = 0
    computed: bool = False
    aux: bytes | None = None
    ended: bool = False
    kv_bytes: int = 0
    copy_us: int = 0
    stamp_ns: int = 0


def open_room(node: PrefillNode, begin: Begin, tokens: int) -> None:
    """What one rank opens for a room: the same on every rank of a group."""
    time_left_s = begin.time_left_ms / 1e3
    node.open(begin.room, tokens=tokens, time_left_s=time_left_s, grants=len(begin.peers), peers=begin.peers)


def node_of(
    config: PrefillConfig,
    settings: NodeSettings,
    engine: PrefillEngine,
    tell: Callable[[PrefillEvent], None],
    *,
    others: Others | None = None,
    spans: Spans | None = None,
) -> PrefillNode:
    """One rank's node: the same on every rank of a group, but that only the leader hears `others`."""
    pool, fd = engine.pool, -1
    if isinstance(pool, SharedMemory):
        pool, fd = pool.view, pool.fd
    on_card = isinstance(pool, CardMemory)
    return PrefillNode(
        settings,
        engine.card.components,
        tell,
        pool_address=pool.address if on_card else np.frombuffer(pool, dtype=np.uint8).ctypes.data,
        pool_fd=fd,
        copy_threads=config.copy_threads,
        card=pool.card if on_card else None,
        replicas=engine.card.replicas,
        others=others,
        transport=config.transport,
        network=config.network,
        spans=spans,
    )


def landed(serial: int, event: Landed, node: PrefillNode, metrics: PrefillMetrics) -> frames.Landed:
    """Counts what has landed from this rank, and says it as its leader adds it up."""
    copy_us = node.copy_ns.get(event.room, 0) // 1_000
    metrics.rooms.kv_bytes.inc(event.kv_bytes)
    metrics.copy_seconds.observe(copy_us / 1e6)
    return frames.Landed(serial, event.kv_bytes, copy_us, node.stamp_ns)


class PrefillDaemon:
    """Prompts in, KV out: the engine computes, the node writes, the router hears how it ended."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        port: Port[Order],
        registry: CollectorRegistry,
        group: Lead | None = None,
        journeys: Journeys | None = None,
    ) -> None:
        self.config, self._engine, self.port, self.group = config, engine, port, group or Lead()
        self._journeys = journeys or Journeys()
        self.group.heard = self._reported
        self.node = node_of(config, settings, engine, self._told, others=self._receive, spans=self._journeys.spans)
        service = Service(self.node.core.identity, config.limits)
        self.desk = Desk(service, self.node.bus.send, start=self._start, stop=self._stop, load=self.load)
        self._work: dict[int, Work] = {}  # by serial number: rooms whose pages the engine has, or waits for
        self._rooms: dict[int, Work] = {}  # the same, by label
        self._tokens = 0  # theirs, all together
        self._serials = count(1)
        self.metrics = PrefillMetrics(self.node, registry)
        turns = engine_thread.leading(engine, port, self.group.turn)
        self.thread = engine_thread.PrefillThread(engine, port, self._heard, turns, push=config.push)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits to be acknowledged by anybody who lives."""
        return self.node.idle and self.desk.idle and not self._work

    def load(self) -> Load:
        """What there is and what is left, in tokens of the pool."""
        waiting = min(self.thread.waiting, len(self._work))
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(self._work) - waiting,
            rooms_queued=waiting,
            slots_free=max(0, self.config.slots - self._tokens),
            slots_total=self.config.slots,
        )

    def _receive(self, peer: str, message: Message) -> bool:
        """Whether the message is the router's business, who says so in its Hello."""
        router = message.identity.role == "router" if isinstance(message, Hello) else self.desk.service.knows(peer)
        if router:
            self.desk.receive(peer, message)
        return router

    def _start(self, begin: Begin) -> None:
        self.metrics.rooms.begun.inc()
        try:
            request = request_of(begin, next(self._serials))
            if begin.room in self._rooms:  # another router's, over and not drained yet: its pages are still read
                raise ValueError(f"room: {begin.room:#x} is in use")
        except (ValueError, RemoteProtocolError) as error:
            self._end(failure(begin.room, Cause.REFUSED, str(error)))
            return
        work = Work(begin.room, request.room, len(request.prompt))
        self._work[work.serial] = self._rooms[work.room] = work
        self._tokens += work.tokens
        self._journeys.begin(work.room, work.serial)
        self.group.start(work.serial, begin)
        open_room(self.node, begin, work.tokens)
        if not work.ended:  # open may have failed at once
            self.port.tell(Compute(request))

    def _stop(self, room: int, cause: Cause) -> None:
        self._fail(self._rooms.get(room), cause, "the router gave it up")

    def end_all(self, cause: Cause, detail: str) -> None:
        """The worker cannot go on: ends what is under way, for the routers to hear why."""
        for work in list(self._work.values()):
            self._fail(work, cause, detail)

    def _heard(self, outcomes: list[PrefillOutcome]) -> None:
        """What the engine's thread has done."""
        for outcome in outcomes:
            work = self._work.get(outcome.room)
            if work is None:
                continue  # It was over when the engine made this.
            match outcome:
                case Offered(cell=cell, after=after):
                    self.node.push(work.room, cell, after=after)
                case Prefilled(aux=aux):
                    work.computed = True
                    self._finish(work, aux or None)
                case Broken(detail=detail):
                    self._fail(work, Cause.ENGINE, detail)
                case Refused(detail=detail):
                    self._fail(work, Cause.REFUSED, detail)

    def _told(self, event: PrefillEvent) -> None:
        """What has become of a room; Drained always comes last."""
        work = self._rooms[event.room]
        match event:
            case Leased(room):
                self._journeys.reached(room, "control", "begin to grant")
            case Landed(room):
                self._journeys.reached(room, "control", "grant to landed")
                self._landed(work, landed(work.serial, event, self.node, self.metrics))
            case RoomFailed(_, cause, detail, retry_ms):
                self._fail(work, cause, detail, retry_ms)
            case Drained(room):
                self._journeys.forget(room)
                self._drained(work)

    def _reported(self, follower: Follower, report: frames.Report) -> None:
        """What has become of a room on another rank."""
        work = self._work.get(report.serial)
        if work is None:
            return  # It was over everywhere when that rank's engine made this.
        match report:
            case frames.Landed():
                self._landed(work, report)
            case frames.Failed(_, cause, detail, retry_ms):
                self._fail(work, Cause.of(cause), f"{follower.name}: {detail}", retry_ms)
            case frames.Drained():
                self._drained(work)
            case frames.Picked(_, aux):
                self._finish(work, aux)
            case frames.Ready():
                raise AssertionError("nothing lands in a prefill rank")

    def _finish(self, work: Work, aux: bytes | None) -> None:
        """Of a pipeline the last stage picks the token, and this rank, the first, tells decode when both are done."""
        work.aux = work.aux if aux is None else aux
        if work.computed and work.aux is not None:
            self.node.finish(work.room, aux=work.aux)

    def _landed(self, work: Work, on: frames.Landed) -> None:
        """On one rank; the room has landed when it has on all."""
        work.landed += 1
        work.kv_bytes += on.kv_bytes
        work.copy_us += on.copy_us
        work.stamp_ns = max(work.stamp_ns, on.stamp_ns)
        if work.landed == self.group.size and not work.ended:
            work.ended = True
            end = End(work.room, "done", "", 0, kv_bytes=work.kv_bytes, copy_us=work.copy_us, stamp_ns=work.stamp_ns)
            self._end(end)

    def _fail(self, work: Work | None, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """On every rank, for the first reason that there is."""
        if work is None or work.ended:
            return
        work.ended = True
        self.port.tell(Cancel(work.serial))
        self._end(failure(work.room, cause, detail, retry_ms))
        self.group.abort(work.serial, cause, detail)
        self.node.abort(work.room, cause, detail)

    def _drained(self, work: Work) -> None:
        work.drained += 1
        if work.drained == self.group.size:
            del self._work[work.serial], self._rooms[work.room]
            self._tokens -= work.tokens
            self.port.tell(Free(work.serial))

    def _end(self, end: End) -> None:
        self.metrics.rooms.ended.labels(end.reason).inc()
        self.desk.end(end)

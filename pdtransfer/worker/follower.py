"""A rank that follows: its node and its engine do what the leader orders, and the leader hears what came of it.

No router knows it. Its engine repeats the leader's turns, so both have the same rooms at every step; what its node
reports may come at any time. When the leader is gone there is nothing to do any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ..config.config import DecodeConfig, PrefillConfig
from ..engine_api import Broken, DecodeEngine, Finished, Prefilled, PrefillEngine, Request, Token
from ..errors import Cause
from ..handoff.effects import DecodeEvent, Drained, Landed, Leased, PrefillEvent, Ready, RoomFailed
from ..memory.arena_memory import Arena
from ..node import NodeSettings
from ..node.thread_queues import Port
from ..tracing.timeline import Journeys
from ..wire import Begin, Message
from . import decode_daemon, engine_thread, prefill_daemon
from .daemon_metrics import DecodeMetrics, PrefillMetrics
from .engine_thread import (
    Cancel,
    Compute,
    DecodeOutcome,
    Dropped,
    Free,
    Generate,
    Offered,
    Order,
    PrefillOutcome,
    Refused,
)
from .group import frames
from .group.link import Link
from .prefill_daemon import open_room
from .router_link import request_of


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A room of the leader's, whose rows are this rank's."""

    room: int  # its label, which the node knows it by
    request: Request

    @property
    def serial(self) -> int:
        """Which the leader and the engine know it by."""
        return self.request.room


class PrefillFollower:
    """Computes its layers and heads of each prompt, and writes them."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        link: Link,
        registry: CollectorRegistry,
        journeys: Journeys | None = None,
    ) -> None:
        self.config, self._link, self._journeys = config, link, journeys or Journeys()
        self.port: Port[list[Order]] = Port()
        ranks = settings.ranks
        self.node = prefill_daemon.node_of(config, settings, engine, self._told, spans=self._journeys.spans)
        self._picks = ranks.pp_size > 1 and ranks.pp_rank == ranks.pp_size - 1 and ranks.tp_rank == 0
        self._work: dict[int, _Prefill] = {}  # by serial number, until the leader says Free
        self._rooms: dict[int, _Prefill] = {}  # by label, until drained
        self.metrics = PrefillMetrics(self.node, registry)
        turns = engine_thread.following(self.port)
        self.thread = engine_thread.PrefillThread(engine, self.port, self._heard, turns, push=config.push)

    @property
    def idle(self) -> bool:
        """Nobody waits for anything that this process still has to say."""
        return self.node.idle

    def start(self, serial: int, begin: Begin) -> None:
        """The leader's room, open here as well. The leader starts no other of its label before this one has drained."""
        work = _Prefill(begin.room, request_of(begin, serial))
        self._work[serial] = self._rooms[work.room] = work
        self._journeys.begin(work.room, serial)
        self.metrics.rooms.begun.inc()
        open_room(self.node, begin, len(work.request.prompt))

    def abort(self, serial: int, cause: Cause, detail: str) -> None:
        """It has failed on some rank."""
        work = self._here(serial)
        if work is not None:
            self.node.abort(work.room, cause, detail)

    def turn(self, turn: frames.Turn) -> None:
        """The engine's next step."""
        self.port.tell(list(self._orders(turn)))

    def _orders(self, turn: frames.Turn) -> Iterator[Order]:
        for what, serial, _ in turn.orders:
            match what:
                case "compute":
                    yield Compute(self._work[serial].request)
                case "cancel":
                    yield Cancel(serial)
                case "free":
                    del self._work[serial]
                    yield Free(serial)
                case "generate":
                    raise AssertionError("a prefill rank generates nothing")

    def _heard(self, outcomes: list[PrefillOutcome]) -> None:
        for outcome in outcomes:
            work = self._here(outcome.room)
            if work is None:
                continue  # It has drained: its label may be another room's.
            match outcome:
                case Offered(cell=cell, after=after):
                    self.node.push(work.room, cell, after=after)
                case Prefilled(aux=aux):
                    if self._picks:
                        self._link.send(frames.Picked(work.serial, aux))
                    self.node.finish(work.room, aux=b"")
                case Broken(detail=detail):
                    self._link.send(frames.Failed(work.serial, Cause.ENGINE.value, detail, 0))
                case Refused():
                    pass  # The leader's engine refuses it, too.

    def _here(self, serial: int) -> _Prefill | None:
        """The room, unless it has drained."""
        work = self._work.get(serial)
        return work if work is not None and self._rooms.get(work.room) is work else None

    def _told(self, event: PrefillEvent) -> None:
        serial = self._rooms[event.room].serial
        match event:
            case Leased(room):
                self._journeys.reached(room, "control", "begin to grant")
            case Landed(room):
                self._journeys.reached(room, "control", "grant to landed")
                self.metrics.rooms.ended.labels("done").inc()
                self._link.send(prefill_daemon.landed(serial, event, self.node, self.metrics))
            case RoomFailed(_, cause, detail, retry_ms):
                self.metrics.rooms.ended.labels(cause.value).inc()
                self._link.send(frames.Failed(serial, cause.value, detail, retry_ms))
            case Drained(room):
                self._journeys.forget(room)
                del self._rooms[room]
                self._link.send(frames.Drained(serial))


@dataclass(slots=True, eq=False)
class _Decode:
    """A room of the leader's, in this rank's arena."""

    room: int  # its label, which the node knows it by
    request: Request
    landing: Ready | None = None

    @property
    def serial(self) -> int:
        """Which the leader and the engine know it by."""
        return self.request.room


class DecodeFollower:
    """Generates with its heads, out of an arena of its own."""

    def __init__(
        self,
        config: DecodeConfig,
        settings: NodeSettings,
        engine: DecodeEngine,
        arena: Arena,
        link: Link,
        registry: CollectorRegistry,
        journeys: Journeys | None = None,
    ) -> None:
        self.config, self._link, self._journeys = config, link, journeys or Journeys()
        self.port: Port[list[Order]] = Port()
        self.node = decode_daemon.node_of(config, settings, engine, arena, self._told, others=self._strange)
        self._work: dict[int, _Decode] = {}  # by serial number
        self._rooms: dict[int, _Decode] = {}  # the same, by label
        figures = (lambda: engine.figures) if config.enable_hisparse else None
        self.metrics = DecodeMetrics(self.node, registry, figures)
        self.thread = engine_thread.DecodeThread(engine, self.port, self._heard, engine_thread.following(self.port))

    @property
    def idle(self) -> bool:
        """Nobody waits for anything that this process still has to say."""
        return not self.node.core.rooms

    def start(self, serial: int, begin: Begin) -> None:
        """The leader's room, expected here as well."""
        self.metrics.rooms.begun.inc()
        if begin.room in self._rooms:  # the leader's engine has let go of another one of this label, ours not yet
            self._fail(serial, Cause.REFUSED, f"room: {begin.room:#x} is in use")
            return
        work = _Decode(begin.room, request_of(begin, serial))
        self._work[serial] = self._rooms[work.room] = work
        self._journeys.begin(work.room, serial)
        decode_daemon.expect(self.node, begin, work.request)

    def abort(self, serial: int, cause: Cause, detail: str) -> None:
        """It has failed on some rank, and never generates."""
        work = self._forget(serial)
        if work is not None and work.landing is not None:
            self._release(work, cause.value)
        elif work is not None:
            self.node.abort(work.room, cause, detail)

    def turn(self, turn: frames.Turn) -> None:
        """The engine's next step."""
        self.port.tell(list(self._orders(turn)))

    def _orders(self, turn: frames.Turn) -> Iterator[Order]:
        for what, serial, aux in turn.orders:
            match what:
                case "generate":
                    work = self._work[serial]
                    assert work.landing is not None, "the leader waits until it is ready here"
                    yield Generate(work.request, work.landing.slots, aux)
                case "cancel":
                    yield Cancel(serial)
                case "compute" | "free":
                    raise AssertionError("a decode rank computes no prompt")

    def _strange(self, peer: str, message: Message) -> bool:  # noqa: ARG002
        """Routers dial the leader alone: what comes from anybody that was not dialled is dropped."""
        return peer not in self.node.core.links.peers

    def _heard(self, outcomes: list[DecodeOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Token():
                    pass
                case Finished(room=serial, reason=reason):
                    self._close(serial, reason)
                case Broken(room=serial):
                    self._close(serial, Cause.ENGINE.value)
                case Dropped(serial):
                    self._close(serial, Cause.ABORTED.value)

    def _close(self, serial: int, reason: str) -> None:
        """The engine touches no slot of the room any more."""
        work = self._forget(serial)
        if work is not None:  # else it finished before the Cancel came
            self._release(work, reason)

    def _forget(self, serial: int) -> _Decode | None:
        work = self._work.pop(serial, None)
        if work is not None:
            self._journeys.forget(work.room)
            del self._rooms[work.room]
        return work

    def _release(self, work: _Decode, reason: str) -> None:
        self.metrics.rooms.ended.labels(reason).inc()
        self.node.release(work.room)

    def _told(self, event: DecodeEvent) -> None:
        work = self._rooms.get(event.room)
        match event:
            case Ready():
                assert work is not None
                self._journeys.reached(work.room, "landing", "READY", byte_count=event.kv_bytes)
                self.metrics.rooms.kv_bytes.inc(event.kv_bytes)
                work.landing = event
                self._link.send(frames.Ready(work.serial, event.kv_bytes, event.prefix))
            case RoomFailed(_, cause, detail, retry_ms) if work is not None:
                self._forget(work.serial)
                self._fail(work.serial, cause, detail, retry_ms)
            case RoomFailed(_, cause):  # the leader has said so
                self.metrics.rooms.ended.labels(cause.value).inc()

    def _fail(self, serial: int, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self.metrics.rooms.ended.labels(cause.value).inc()
        self._link.send(frames.Failed(serial, cause.value, detail, retry_ms))

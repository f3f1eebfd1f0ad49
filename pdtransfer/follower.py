"""A rank that follows: its node and its engine do what the leader orders, and the leader hears what came of it.

No router knows it. Its engine repeats the leader's turns, so both have the same rooms at every step; what its node
reports may come at any time. When the leader is gone there is nothing to do any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from . import engine_thread
from .config import DecodeConfig, PrefillConfig
from .daemon_metrics import DecodeMetrics, PrefillMetrics
from .decode_daemon import expect
from .desk import request_of
from .effects import Drained, Landed, Leased, Ready, RoomFailed
from .engine.base import Broken, DecodeEngine, Finished, Prefilled, PrefillEngine, Request, Token
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
from .errors import Cause
from .group import frames
from .group.link import Link
from .memory import Arena
from .node import DecodeNode, NodeSettings, PrefillNode
from .port import Port
from .prefill_daemon import open_room
from .wire import Begin, Message


class PrefillFollower:
    """Computes its layers and heads of each prompt, and writes them."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        link: Link,
        registry: CollectorRegistry,
    ) -> None:
        self.config, self._link = config, link
        self.port: Port[list[Order]] = Port()
        card, ranks = engine.card, settings.ranks
        self.node = PrefillNode(
            settings,
            card.components,
            self._told,
            pool_address=np.frombuffer(engine.pool, dtype=np.uint8).ctypes.data,
            copy_threads=config.copy_threads,
            replicas=card.replicas,
        )
        self._picks = ranks.pp_size > 1 and ranks.pp_rank == ranks.pp_size - 1 and ranks.tp_rank == 0
        self._requests: dict[int, Request] = {}  # until the leader says Free
        self.metrics = PrefillMetrics(self.node, registry)
        self.thread = engine_thread.PrefillThread(engine, self.port, self._heard, engine_thread.following(self.port))

    @property
    def idle(self) -> bool:
        """Nobody waits for anything that this process still has to say."""
        return self.node.idle

    def start(self, begin: Begin) -> None:
        """The leader's room, open here as well."""
        request = self._requests[begin.room] = request_of(begin)
        self.metrics.rooms.begun.inc()
        open_room(self.node, begin, len(request.prompt))

    def abort(self, room: int, cause: Cause, detail: str) -> None:
        """It has failed on some rank."""
        self.node.abort(room, cause, detail)

    def turn(self, turn: frames.Turn) -> None:
        """The engine's next step."""
        self.port.tell(list(self._orders(turn)))

    def _orders(self, turn: frames.Turn) -> Iterator[Order]:
        for what, room, _ in turn.orders:
            match what:
                case "compute":
                    yield Compute(self._requests[room])
                case "cancel":
                    yield Cancel(room)
                case "free":
                    del self._requests[room]
                    yield Free(room)
                case "generate":
                    raise AssertionError("a prefill rank generates nothing")

    def _heard(self, outcomes: list[PrefillOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Offered(room, cell):
                    self.node.push(room, cell)
                case Prefilled(room=room, aux=aux):
                    if self._picks:
                        self._link.send(frames.Picked(room, aux))
                    self.node.finish(room, aux=b"")
                case Broken(room=room, detail=detail):
                    self._link.send(frames.Failed(room, Cause.ENGINE.value, detail, 0))
                case Refused():
                    pass  # The leader's engine refuses it, too.

    def _told(self, event: Leased | Landed | RoomFailed | Drained) -> None:
        match event:
            case Leased():
                pass
            case Landed(room, kv_bytes):
                copy_us = self.node.copy_ns.get(room, 0) // 1_000
                self.metrics.rooms.kv_bytes.inc(kv_bytes)
                self.metrics.copy_seconds.observe(copy_us / 1e6)
                self.metrics.rooms.ended.labels("done").inc()
                self._link.send(frames.Landed(room, kv_bytes, copy_us, self.node.stamp_ns))
            case RoomFailed(room, cause, detail, retry_ms):
                self.metrics.rooms.ended.labels(cause.value).inc()
                self._link.send(frames.Failed(room, cause.value, detail, retry_ms))
            case Drained(room):
                self._link.send(frames.Drained(room))


@dataclass(slots=True, eq=False)
class _Work:
    """A room of the leader's, in this rank's arena."""

    request: Request
    landing: Ready | None = None


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
    ) -> None:
        self.config, self._link = config, link
        self.port: Port[list[Order]] = Port()
        self.node = DecodeNode(
            settings,
            engine.card.components,
            arena,
            self._told,
            socket_directory=config.socket_directory,
            enable_hisparse=config.enable_hisparse,
            prefix_cache=config.prefix_cache,
            verify=config.verify,
            others=self._strange,
        )
        self._work: dict[int, _Work] = {}
        self.metrics = DecodeMetrics(self.node, registry)
        self.thread = engine_thread.DecodeThread(engine, self.port, self._heard, engine_thread.following(self.port))

    @property
    def idle(self) -> bool:
        """Nobody waits for anything that this process still has to say."""
        return not self.node.core.rooms

    def start(self, begin: Begin) -> None:
        """The leader's room, expected here as well."""
        work = self._work[begin.room] = _Work(request_of(begin))
        self.metrics.rooms.begun.inc()
        expect(self.node, begin, work.request)

    def abort(self, room: int, cause: Cause, detail: str) -> None:
        """It has failed on some rank, and never generates."""
        work = self._work.pop(room, None)
        if work is not None and work.landing is not None:
            self._release(room, cause.value)
        elif work is not None:
            self.node.abort(room, cause, detail)

    def turn(self, turn: frames.Turn) -> None:
        """The engine's next step."""
        self.port.tell(list(self._orders(turn)))

    def _orders(self, turn: frames.Turn) -> Iterator[Order]:
        for what, room, aux in turn.orders:
            match what:
                case "generate":
                    work = self._work[room]
                    assert work.landing is not None, "the leader waits until it is ready here"
                    yield Generate(work.request, work.landing.slots, aux)
                case "cancel":
                    yield Cancel(room)
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
                case Finished(room=room, reason=reason):
                    self._close(room, reason)
                case Broken(room=room):
                    self._close(room, Cause.ENGINE.value)
                case Dropped(room):
                    self._close(room, Cause.ABORTED.value)

    def _close(self, room: int, reason: str) -> None:
        """The engine touches no slot of the room any more."""
        if self._work.pop(room, None) is not None:  # else it finished before the Cancel came
            self._release(room, reason)

    def _release(self, room: int, reason: str) -> None:
        self.metrics.rooms.ended.labels(reason).inc()
        self.node.release(room)

    def _told(self, event: Ready | RoomFailed) -> None:
        match event:
            case Ready(room):
                self.metrics.rooms.kv_bytes.inc(event.kv_bytes)
                self._work[room].landing = event
                self._link.send(frames.Ready(room, event.kv_bytes))
            case RoomFailed(room, cause, detail, retry_ms):
                self._work.pop(room, None)
                self.metrics.rooms.ended.labels(cause.value).inc()
                self._link.send(frames.Failed(room, cause.value, detail, retry_ms))

"""A prefill daemon: prompts in, KV out. The engine computes, the node writes, the router hears how it ended.

A daemon is three parties that never wait for each other: the router's Service, the node, the engine's thread. Every
room that the router began ends with one End, whoever of the three ends it.
"""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from . import engine_thread
from .config import PrefillConfig
from .daemon_metrics import PrefillMetrics
from .desk import Desk, failure, request_of
from .effects import Drained, Landed, Leased, RoomFailed
from .engine.base import Broken, Prefilled, PrefillEngine
from .engine_thread import Cancel, Compute, Free, Offered, Order, PrefillOutcome, Refused
from .errors import Cause, RemoteProtocolError
from .node import NodeSettings, PrefillNode
from .port import Port
from .service import Service
from .wire import Begin, End, Hello, Load, Message


class PrefillDaemon:
    """Prompts in, KV out: the engine computes, the node writes, the router hears how it ended."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        port: Port[Order],
        registry: CollectorRegistry,
    ) -> None:
        self.config, self._engine, self.port = config, engine, port
        card = engine.card
        pool_address = np.frombuffer(engine.pool, dtype=np.uint8).ctypes.data
        self.node = PrefillNode(
            settings,
            card.components,
            self._told,
            pool_address=pool_address,
            copy_threads=config.copy_threads,
            replicas=card.replicas,
            others=self._receive,
        )
        service = Service(self.node.core.identity, config.limits)
        self.desk = Desk(service, self.node.bus.send, start=self._start, stop=self._stop, load=self.load)
        self._tokens: dict[int, int] = {}  # of rooms whose pages the engine has, or waits for
        self.metrics = PrefillMetrics(self.node, registry)
        self.thread = engine_thread.PrefillThread(engine, port, self._heard)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits to be acknowledged by anybody who lives."""
        return self.node.idle and self.desk.idle

    def load(self) -> Load:
        """What there is and what is left, in tokens of the pool."""
        used, waiting = sum(self._tokens.values()), min(self.thread.waiting, len(self._tokens))
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(self._tokens) - waiting,
            rooms_queued=waiting,
            slots_free=max(0, self.config.slots - used),
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
            request = request_of(begin)
        except (ValueError, RemoteProtocolError) as error:
            self._end(failure(begin.room, Cause.REFUSED, str(error)))
            return
        tokens = self._tokens[begin.room] = len(request.prompt)
        self.node.open(begin.room, tokens=tokens, time_left_s=begin.time_left_ms / 1e3, grants=len(begin.peers))
        if begin.room in self._tokens:  # open may have failed at once
            self.port.tell(Compute(request))

    def _stop(self, room: int, cause: Cause) -> None:
        self.node.abort(room, cause, "the router gave it up")

    def _heard(self, outcomes: list[PrefillOutcome]) -> None:
        """What the engine's thread has done."""
        for outcome in outcomes:
            match outcome:
                case Offered(room, cell):
                    self.node.push(room, cell)
                case Prefilled():
                    self.node.finish(outcome.room, aux=outcome.aux)
                case Broken():
                    self.node.abort(outcome.room, Cause.ENGINE, outcome.detail)
                case Refused(room, detail):
                    self.node.abort(room, Cause.REFUSED, detail)

    def _told(self, event: Leased | Landed | RoomFailed | Drained) -> None:
        """What has become of a room; Drained always comes last."""
        match event:
            case Leased():
                pass
            case Landed(room, kv_bytes):
                copy_us = self.node.copy_ns.get(room, 0) // 1_000
                self.metrics.rooms.kv_bytes.inc(kv_bytes)
                self.metrics.copy_seconds.observe(copy_us / 1e6)
                end = End(room, "done", "", 0, kv_bytes=kv_bytes, copy_us=copy_us, stamp_ns=self.node.stamp_ns)
                self._end(end)
            case RoomFailed(room, cause, detail, retry_ms):
                self.port.tell(Cancel(room))
                self._end(failure(room, cause, detail, retry_ms))
            case Drained(room):
                self._tokens.pop(room, None)
                self.port.tell(Free(room))

    def _end(self, end: End) -> None:
        self.metrics.rooms.ended.labels(end.reason).inc()
        self.desk.end(end)

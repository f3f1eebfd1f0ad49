"""The prefill and decode daemons: one loop for node and service, one thread for the engine, and the way to an end.

A daemon is three parties that never wait for each other: the router's Service, the node, the engine's thread. Every
room that the router began ends with one End, whoever of the three ends it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import uvloop

from . import engine_thread
from .config import DecodeConfig, PrefillConfig
from .daemon_metrics import DecodeMetrics, PrefillMetrics
from .desk import Desk
from .effects import Drained, Landed, Leased, Ready, RoomFailed
from .engine.base import Broken, DecodeEngine, EngineConfig, Finished, Prefilled, PrefillEngine, Request, Token
from .engine_thread import Cancel, Compute, DecodeOutcome, Dropped, Free, Generate, Offered, Order, PrefillOutcome, Quit
from .errors import Cause, ConfigError
from .http import Health, Listener, application
from .keys import AllowList, KeyPair
from .memory import Arena
from .node import DecodeNode, NodeSettings, PrefillNode
from .port import Port
from .service import Service
from .signals import Stop
from .wire import Begin, End, Hello, Load, Message, unpack_ids

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # a busy Python thread otherwise delays the loop by 5 ms
DRAIN_POLL_S = 0.05
JOIN_S = 5.0  # an engine's step is over by then


class PrefillDaemon:
    """Prompts in, KV out: the engine computes, the node writes, the router hears how it ended."""

    def __init__(self, config: PrefillConfig, engine: PrefillEngine, port: Port[Order]) -> None:
        self.config, self._engine, self.port = config, engine, port
        card = engine.card
        pool_address = np.frombuffer(engine.pool, dtype=np.uint8).ctypes.data
        self.node = PrefillNode(
            settings(config, card.model, card.weights),
            card.components,
            self._told,
            pool_address=pool_address,
            copy_threads=config.copy_threads,
            others=self._receive,
        )
        service = Service(self.node.core.identity, config.limits)
        self.desk = Desk(service, self.node.bus.send, start=self._start, stop=self._stop, load=self.load)
        self._tokens: dict[int, int] = {}  # of rooms whose pages the engine has, or waits for
        self.metrics = PrefillMetrics(self.node)
        self.thread = engine_thread.PrefillThread(engine, port, self._heard)

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits to be acknowledged."""
        return self.node.core.idle and not self.desk.service.room_count

    def load(self) -> Load:
        """What there is and what is left, in tokens of the pool."""
        used = sum(self._tokens.values())
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(self._tokens),
            rooms_queued=0,
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
        prompt = unpack_ids("Begin.prompt", begin.prompt)
        if not len(prompt):
            self.desk.end(_end(begin.room, Cause.REFUSED, "prompt: no tokens"))
            return
        request = Request(
            room=begin.room, prompt=prompt, sampling=begin.sampling, enable_hisparse=begin.enable_hisparse
        )
        self._tokens[begin.room] = len(prompt)
        self.node.open(begin.room, tokens=len(prompt), time_left_s=begin.time_left_ms / 1e3, grants=len(begin.peers))
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

    def _told(self, event: Leased | Landed | RoomFailed | Drained) -> None:
        """What has become of a room; Drained always comes last."""
        match event:
            case Leased():
                pass
            case Landed(room, kv_bytes):
                copy_us = self.node.copy_ns.get(room, 0) // 1_000
                self.metrics.rooms.kv_bytes.inc(kv_bytes)
                self.metrics.rooms.copy_seconds.observe(copy_us / 1e6)
                end = End(room, "done", "", 0, kv_bytes=kv_bytes, copy_us=copy_us, stamp_ns=self.node.stamp_ns)
                self.desk.end(end)
            case RoomFailed(room, cause, detail, retry_ms):
                self.port.tell(Cancel(room))
                self.desk.end(_end(room, cause, detail, retry_ms))
            case Drained(room):
                self._tokens.pop(room, None)
                self.port.tell(Free(room))


@dataclass(slots=True, eq=False)
class Work:
    """One room that decodes, or will."""

    request: Request
    ready_ns: int = 0
    kv_bytes: int = 0
    cause: Cause | None = None  # why it was stopped


class DecodeDaemon:
    """KV in, tokens out: the node lands rooms in the arena, the engine generates from them where they lie."""

    def __init__(self, config: DecodeConfig, engine: DecodeEngine, arena: Arena, port: Port[Order]) -> None:
        self.config, self._engine, self.port = config, engine, port
        card = engine.card
        self.node = DecodeNode(
            settings(config, card.model, card.weights),
            card.components,
            arena,
            self._told,
            socket_directory=config.socket_directory,
            enable_hisparse=config.enable_hisparse,
            others=self._receive,
        )
        service = Service(self.node.core.links.identity, config.limits)
        self.desk = Desk(service, self.node.bus.send, start=self._start, stop=self._stop, load=self.load)
        self._work: dict[int, Work] = {}
        self.metrics = DecodeMetrics(self.node)
        self.thread = engine_thread.DecodeThread(engine, port, self._heard)

    @property
    def idle(self) -> bool:
        """Nothing runs, no lease is open, nothing waits to be acknowledged."""
        return self.node.core.idle and not self.desk.service.room_count

    def load(self) -> Load:
        """What there is and what is left, in slots of the component that has fewest left."""
        core = self.node.core
        free = min(core.arena.free, key=lambda each: each.free_slots / each.slots)
        row_bytes = sum(component.layout.row_bytes for component in core.arena.components)
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(core.rooms) - len(core.admission),
            rooms_queued=len(core.admission),
            slots_free=free.free_slots,
            slots_total=free.slots,
            slots_quarantined=core.leases.quarantined_bytes // row_bytes,
            enable_hisparse=self.config.enable_hisparse,
        )

    def _receive(self, peer: str, message: Message) -> bool:
        """Whether the message came from one who dialled us, which only routers do."""
        router = peer not in self.node.core.links.peers
        if router:
            self.desk.receive(peer, message)
        return router

    def _start(self, begin: Begin) -> None:
        prompt = unpack_ids("Begin.prompt", begin.prompt)
        request = Request(
            room=begin.room, prompt=prompt, sampling=begin.sampling, enable_hisparse=begin.enable_hisparse
        )
        try:
            if begin.enable_hisparse and not self.config.enable_hisparse:
                raise ValueError("enable_hisparse: the request wants it, this node is run without it")
            if not len(prompt):
                raise ValueError("prompt: no tokens")
            self._engine.check(request)
        except ValueError as error:
            self.desk.end(_end(begin.room, Cause.REFUSED, str(error)))
            return
        self._work[begin.room] = Work(request)
        self.node.expect(
            begin.room,
            tokens=len(prompt),
            sources=begin.peers,
            time_left_s=begin.time_left_ms / 1e3,
            growth=begin.sampling.max_tokens,
            enable_hisparse=begin.enable_hisparse,
        )

    def _stop(self, room: int, cause: Cause) -> None:
        work = self._work.get(room)
        if work is not None and work.ready_ns:
            work.cause = cause
            self.port.tell(Cancel(room))  # the slots are the engine's until Dropped
        else:
            self.node.abort(room, cause, "the router gave it up")

    def _told(self, event: Ready | RoomFailed) -> None:
        match event:
            case Ready(room, slots, aux, kv_bytes):
                work = self._work[room]
                work.ready_ns, work.kv_bytes = time.monotonic_ns(), kv_bytes
                self.port.tell(Generate(work.request, slots, aux))
            case RoomFailed(room, cause, detail, retry_ms):
                del self._work[room]
                self.desk.end(_end(room, cause, detail, retry_ms))

    def _heard(self, outcomes: list[DecodeOutcome]) -> None:
        """What the engine's thread has done; a room's tokens of one step go out in one message."""
        tokens: dict[int, list[int]] = {}
        for outcome in outcomes:
            if isinstance(outcome, Token):
                tokens.setdefault(outcome.room, []).append(outcome.id)
        for room, ids in tokens.items():
            self.desk.tokens(room, ids)
        for outcome in outcomes:
            match outcome:
                case Token():
                    pass
                case Finished():
                    self._close(outcome.room, outcome.reason, "", outcome)
                case Broken():
                    self._close(outcome.room, Cause.ENGINE.value, outcome.detail)
                case Dropped(room):
                    work = self._work.get(room)
                    if work is not None:  # else it finished while the Cancel was on its way
                        self._close(room, (work.cause or Cause.ABORTED).value, "the router gave it up")

    def _close(self, room: int, reason: str, detail: str, finished: Finished | None = None) -> None:
        """The engine touches no slot of the room any more."""
        work = self._work.pop(room)
        self.node.release(room)
        end = End(room, reason, detail[:500], 0, kv_bytes=work.kv_bytes, stamp_ns=work.ready_ns)
        if finished is not None:
            end = msgspec.structs.replace(
                end,
                tokens_digest=finished.tokens_digest,
                logits_digest=finished.logits_digest,
                kv_digest=finished.kv_digest,
            )
        self.desk.end(end)


Daemon = PrefillDaemon | DecodeDaemon


def _end(room: int, cause: Cause, detail: str, retry_ms: int = 0) -> End:
    return End(room, cause.value, detail[:500], 0, retry_ms=retry_ms)


def settings(config: PrefillConfig | DecodeConfig, model: str, weights: bytes) -> NodeSettings:
    """The node's part of a daemon's config. Raises ConfigError for keys that can't be read."""
    return NodeSettings(
        node=config.node,
        model=model,
        weights=weights,
        keys=KeyPair.read(config.key) if config.key is not None else None,
        allowed=AllowList.read(config.allow) if config.key is not None and config.allow is not None else None,
        insecure=config.insecure,
        limits=config.limits,
    )


def create_engine(path: str, config: EngineConfig) -> Any:
    """Calls the factory that `module:attribute` names; ConfigError, in one line, where that fails."""
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        return factory(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine = {path!r}: {error}") from error


def run_prefill(config: PrefillConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""

    async def make() -> PrefillDaemon:
        engine = cast("PrefillEngine", create_engine(config.engine, config.engine_config))
        return PrefillDaemon(config, engine, Port[Order]())

    return uvloop.run(_serve(config, make))


def run_decode(config: DecodeConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""

    async def make() -> DecodeDaemon:
        engine = cast("DecodeEngine", create_engine(config.engine, config.engine_config))
        arena = Arena.create(engine.card.memory_bytes, huge_pages=config.huge_pages, name=config.node)
        await asyncio.to_thread(_prefault, arena)
        engine.attach(arena.mapping.view[: engine.card.memory_bytes])
        return DecodeDaemon(config, engine, arena, Port[Order]())

    return uvloop.run(_serve(config, make))


def _prefault(arena: Arena) -> None:
    """Backs the arena with memory before anybody writes, and says how far it is."""
    told = 0

    def progress(byte_count: int) -> None:
        nonlocal told
        if byte_count * 10 // arena.byte_count > told:
            told = byte_count * 10 // arena.byte_count
            log.info("arena: %d of %d MiB ready", byte_count >> 20, arena.byte_count >> 20)

    arena.prefault(progress)


async def _serve(config: PrefillConfig | DecodeConfig, make: Callable[[], Awaitable[Daemon]]) -> int:
    """From the first line to the last: engine, node, sockets, then whatever peers and signals bring."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop, stop, died = asyncio.get_running_loop(), Stop(), asyncio.Event()
    daemon = await make()
    listener = Listener(application(lambda: _health(daemon, stop), daemon.metrics.registry))
    try:
        daemon.port.attach(loop)
        endpoint = await daemon.node.bus.bind(config.bind)
        http = await listener.open(config.http) if config.http else ""
        thread = engine_thread.start(daemon.thread, lambda _: _call(loop, died.set))
        log.info("%s %s is ready at %s", config.role, config.node, endpoint)
        if config.json:
            ready = {"ready": True, "role": config.role, "node": config.node, "endpoint": endpoint, "http": http}
            print(json.dumps(ready), flush=True)
        waits = [asyncio.ensure_future(event.wait()) for event in (stop.asked, died)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        daemon.node.core.drain()
        while not (daemon.idle or stop.hurried.is_set() or died.is_set()):
            daemon.desk.run([])
            await asyncio.sleep(DRAIN_POLL_S)
        cause = Cause.ENGINE if died.is_set() else Cause.SHUTDOWN
        daemon.desk.run(daemon.desk.service.goodbye(cause.value))
        for wait in waits:
            wait.cancel()
    finally:
        daemon.desk.ticker.stop()
        await daemon.node.close()
        await listener.close()
    daemon.port.tell(Quit())
    if not died.is_set():
        await asyncio.to_thread(thread.join, JOIN_S)
    return 1 if died.is_set() else 0


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


def _health(daemon: Daemon, stop: Stop) -> Health:
    load = daemon.load()
    detail: dict[str, object] = {"role": daemon.config.role, "node": daemon.config.node, "draining": load.draining}
    return Health(not stop.asked.is_set(), detail | {"rooms": load.rooms_running, "slots_free": load.slots_free})

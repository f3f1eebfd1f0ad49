"""The processes of the prefill and decode daemons: engine, node and sockets, and the way to an end."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import uvloop
from prometheus_client import CollectorRegistry

from . import engine_thread, process
from .config import DecodeConfig, PrefillConfig
from .decode_daemon import DecodeDaemon
from .engine.base import DecodeEngine, EngineCard, EngineConfig, PrefillEngine
from .engine_thread import Order, Quit
from .errors import Cause, ConfigError
from .http import Health, Listener, application
from .keys import AllowList, KeyPair
from .memory import Arena
from .node import NodeSettings
from .port import Port
from .prefill_daemon import PrefillDaemon
from .signals import Stop, reload_on_hangup

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
JOIN_S = 5.0  # an engine's step is over by then

Daemon = PrefillDaemon | DecodeDaemon


def _settings(config: PrefillConfig | DecodeConfig, card: EngineCard) -> NodeSettings:
    """The node's part of a daemon's config. Raises ConfigError for keys that can't be read."""
    return NodeSettings(
        node=config.node,
        model=card.model,
        weights=card.weights,
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

    async def make(registry: CollectorRegistry, _: Stop) -> PrefillDaemon:
        engine = cast("PrefillEngine", create_engine(config.engine, config.engine_config))
        return PrefillDaemon(config, _settings(config, engine.card), engine, Port[Order](), registry)

    return uvloop.run(_serve(config, make))


def run_decode(config: DecodeConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""

    async def make(registry: CollectorRegistry, stop: Stop) -> DecodeDaemon:
        engine = cast("DecodeEngine", create_engine(config.engine, config.engine_config))
        arena = Arena.create(engine.card.memory_bytes, huge_pages=config.huge_pages, name=config.node)
        await asyncio.to_thread(_prefault, arena, stop.asked.is_set)
        engine.attach(arena.mapping.view[: engine.card.memory_bytes])
        return DecodeDaemon(config, _settings(config, engine.card), engine, arena, Port[Order](), registry)

    return uvloop.run(_serve(config, make))


def _prefault(arena: Arena, stop: Callable[[], bool]) -> None:
    """Backs the arena with memory before anybody writes, and says how far it is."""
    told = 0

    def progress(byte_count: int) -> None:
        nonlocal told
        if byte_count * 10 // arena.byte_count > told:
            told = byte_count * 10 // arena.byte_count
            log.info("arena: %d of %d MiB ready", byte_count >> 20, arena.byte_count >> 20)

    arena.prefault(progress, stop)


async def _serve(
    config: PrefillConfig | DecodeConfig, make: Callable[[CollectorRegistry, Stop], Awaitable[Daemon]]
) -> int:
    """From the first line to the last: sockets, engine, node, then whatever peers and signals bring."""
    process.prepare()
    stop, died = Stop(), asyncio.Event()
    registry, daemon = CollectorRegistry(), None
    listener = Listener(application(lambda: _health(config, daemon, stop), registry))
    try:
        http = await listener.open(config.http) if config.http else ""
        daemon = await make(registry, stop)
        try:
            await _live(config, daemon, http, stop, died)
        finally:
            daemon.desk.ticker.stop()
            await daemon.node.close()
    finally:
        await listener.close()
        stop.close()
    return 1 if died.is_set() else 0


async def _live(
    config: PrefillConfig | DecodeConfig, daemon: Daemon, http: str, stop: Stop, died: asyncio.Event
) -> None:
    """Serves until it is asked to stop or the engine dies, and lets what is under way end."""
    loop = asyncio.get_running_loop()
    daemon.port.attach(loop)
    reload_on_hangup(config.allow if config.key is not None else None, daemon.node.allow)
    endpoint = _public(config) + await daemon.node.bus.bind(config.bind)
    thread = engine_thread.start(daemon.thread, lambda _: _call(loop, died.set))
    log.info("%s %s is ready at %s", config.role, config.node, endpoint)
    if config.json:
        ready = {"ready": True, "role": config.role, "node": config.node, "endpoint": endpoint, "http": http}
        print(json.dumps(ready), flush=True)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop.asked, died)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    daemon.node.core.drain()
    while not (daemon.idle or stop.hurried.is_set() or died.is_set()):
        daemon.desk.run([])
        await asyncio.sleep(DRAIN_POLL_S)
    cause = Cause.ENGINE if died.is_set() else Cause.SHUTDOWN
    daemon.desk.run(daemon.desk.service.goodbye(cause.value))
    daemon.port.tell(Quit())
    if not died.is_set():
        await asyncio.to_thread(thread.join, JOIN_S)


def _public(config: PrefillConfig | DecodeConfig) -> str:
    """What stands before an endpoint that wants keys."""
    return f"{KeyPair.read(config.key).public}@" if config.key is not None else ""


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


def _health(config: PrefillConfig | DecodeConfig, daemon: Daemon | None, stop: Stop) -> Health:
    detail: dict[str, object] = {"role": config.role, "node": config.node}
    if daemon is None:
        return Health(False, detail | {"starting": True})
    load = daemon.load()
    detail |= {"draining": load.draining, "rooms": load.rooms_running, "slots_free": load.slots_free}
    return Health(not stop.asked.is_set(), detail)

"""The processes of the prefill and decode daemons: engine, node and sockets, ranks, and the way to an end."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import uvloop
from prometheus_client import CollectorRegistry

from ..bus.keys import AllowList, KeyPair
from ..config.config import DecodeConfig, PrefillConfig
from ..config.ranks import advertised
from ..engine_api import DecodeEngine, EngineCard, EngineConfig
from ..errors import Cause, ConfigError, WorldError
from ..kernels.card import card
from ..limits import LOAD_MS
from ..memory.arena_memory import Arena
from ..memory.hbm import Hbm
from ..node import NodeSettings
from ..node.thread_queues import Port
from ..process import setup
from ..process.http import Health, Listener, application
from ..process.signals import Stop, reload, reload_on_hangup
from ..tracing.timeline import Journeys
from ..tracing.trace import recorded
from ..wire import Member
from . import engine_thread
from .decode_daemon import DecodeDaemon
from .engine_thread import Order, Quit
from .follower import DecodeFollower, PrefillFollower
from .group import frames, meeting
from .group.frames import Abort, Asked, Bound, Frame, Start, Turn
from .group.leader import Lead
from .group.link import Link
from .prefill_daemon import PrefillDaemon

if TYPE_CHECKING:
    from .group.gloo import Gloo

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
JOIN_S = 5.0  # an engine's step is over by then
LOSS_S = 1.0  # how much later than the engine's thread the link to a dead rank may be known to be dead

Config = PrefillConfig | DecodeConfig
Daemon = PrefillDaemon | DecodeDaemon | PrefillFollower | DecodeFollower


def _settings(config: Config, card: EngineCard, group: tuple[Member, ...] = ()) -> NodeSettings:
    """The node's part of a daemon's config. Raises as `_keys`."""
    keys, allowed = _keys(config)
    return NodeSettings(
        node=config.node,
        model=card.model,
        weights=card.weights,
        keys=keys,
        allowed=allowed,
        insecure=config.insecure,
        ranks=config.ranks,
        group=group,
        limits=config.limits,
    )


def _keys(config: Config) -> tuple[KeyPair | None, AllowList | None]:
    """Ours and our peers', as they are in their files now. Raises ConfigError for what can't be read."""
    return (
        KeyPair.read(config.key) if config.key is not None else None,
        AllowList.read(config.allowed) if config.allowed is not None else None,
    )


def create_engine(path: str, config: EngineConfig) -> Any:
    """Calls the factory that `module:attribute` names; ConfigError, in one line, where that fails."""
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        if not callable(factory):
            raise ConfigError(f"engine = {path!r}: it is a {type(factory).__name__}, no factory")
        return factory(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine = {path!r}: {error}") from error


def run_prefill(config: PrefillConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""
    return _run(config)


def run_decode(config: DecodeConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""
    return _run(config)


def _run(config: Config) -> int:
    status = uvloop.run(_serve(config))
    if status and config.grouped:
        # The engine's thread may wait for a rank that is gone, or frozen, and nothing would ever end that wait.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


async def _arena(config: DecodeConfig, engine: DecodeEngine, stop: Stop) -> Arena:
    """The arena of a decode rank, which its engine reads from now on."""
    arena = Arena.create(engine.card.arena_bytes, huge_pages=config.huge_pages, name=config.node)
    if config.card is not None:
        arena.card = here = card(config.card)
        if (node := here.numa_node) is not None and not arena.mapping.bind(node):
            log.info("arena: its memory may be of any node: the kernel takes no wish for node %d", node)
        if engine.card.hbm_bytes:
            arena.hbm = Hbm.of_card(config.card, base=engine.card.hbm_base, byte_count=engine.card.hbm_bytes)
    # Alone it serves from the first chunk on, and nobody waits for the rest; a group's ranks become ready together.
    try:
        await asyncio.to_thread(
            arena.prefault, None, lambda: stop.asked.is_set() or (arena.bytes_ready > 0 and not config.grouped)
        )
    except WorldError:
        arena.close()
        raise
    if arena.card is not None and not arena.bytes_ready:
        raise meeting.StoppedError
    attach(engine, arena)
    return arena


def attach(engine: DecodeEngine, arena: Arena) -> None:
    """Engines that know no HBM, and no card, are told of none."""
    given: dict[str, Any] = {}
    if (registered := arena.mapping.registered) is not None:
        given["device_address"] = registered.device_address
    if arena.hbm is not None:
        given["hbm"] = arena.hbm.engine_memory
    elif engine.card.hbm_bytes:
        given["hbm"] = arena.mapping.view[engine.card.hbm_base : engine.card.arena_bytes]
    engine.attach(arena.mapping.view[: engine.card.memory_bytes], **given)


async def _back(arena: Arena, daemon: DecodeDaemon, died: asyncio.Event) -> None:
    """Backs the rest of the arena while it serves, and says how far it is. Without memory for it the daemon ends."""
    loop, told, over = asyncio.get_running_loop(), arena.bytes_ready * 10 // arena.byte_count, False

    def progress(byte_count: int) -> None:
        nonlocal told
        _call(loop, lambda: None if over else daemon.ready(byte_count))
        if byte_count * 10 // arena.byte_count > told:
            told = byte_count * 10 // arena.byte_count
            log.info("arena: %d of %d MiB ready", byte_count >> 20, arena.byte_count >> 20)

    try:
        await asyncio.shield(loop.run_in_executor(None, arena.prefault, progress, lambda: over))
    except WorldError as error:
        log.error("%s", error)
        died.set()
    finally:
        over = True


@dataclass(slots=True, eq=False)
class Shared:
    """What a process has before and besides its daemon."""

    stop: Stop
    registry: CollectorRegistry
    http: str = ""
    daemon: Daemon | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)  # the engine did, or the group
    journeys: Journeys = field(default_factory=Journeys)


async def _serve(config: Config) -> int:
    """From the first line to the last: sockets, engine, node, then whatever peers and signals bring."""
    setup.prepare()
    with recorded(config.timeline, config.node) as spans:
        return await _served(config, Journeys(spans))


async def _served(config: Config, journeys: Journeys) -> int:
    _keys(config)  # what is wrong with them is said before the engine and the arena are made, which takes a while
    shared = Shared(Stop(), CollectorRegistry(), journeys=journeys)
    listener = Listener(application(lambda: _health(config, shared), shared.registry))
    try:
        shared.http = await listener.open(config.http) if config.http else ""
        gloo = _collectives(config)
        given = replace(config.engine_config, spans=journeys.engine)
        given = given if gloo is None else replace(given, group=gloo)
        engine = create_engine(config.engine, given)
        arena = await _arena(config, engine, shared.stop) if isinstance(config, DecodeConfig) else None
        if config.leads:
            async with meeting.leading(config, engine.card, gloo, shared.stop.asked) as group:
                await _lead(config, shared, engine, arena, group)
        else:
            assert gloo is not None
            link = await meeting.following(config, engine.card, gloo, shared.stop.asked)
            await _follow(config, shared, engine, arena, link)
    except meeting.StoppedError:
        pass
    finally:
        await listener.close()
        shared.stop.close()
    return 1 if shared.died.is_set() else 0


def _collectives(config: Config) -> Gloo | None:
    """How the engines of a group meet: a process that is alone never loads it."""
    if not config.grouped:
        return None
    from .group.gloo import Gloo

    return Gloo(config.ranks)


async def _lead(config: Config, shared: Shared, engine: Any, arena: Arena | None, group: Lead) -> None:
    """Serves routers until it is asked to stop, the engine dies or a rank is lost; lets what is under way end."""
    members = () if group.nobody else await group.members(config.node)
    settings, port = _settings(config, engine.card, members), Port[Order]()
    backing: asyncio.Task[None] | None = None
    if isinstance(config, PrefillConfig):
        daemon = PrefillDaemon(config, settings, engine, port, shared.registry, group, shared.journeys)
        daemon.node.condemned = shared.died.set
    else:
        assert arena is not None
        daemon = DecodeDaemon(config, settings, engine, arena, port, shared.registry, group, shared.journeys)
        if arena.bytes_ready < arena.byte_count:
            backing = asyncio.get_running_loop().create_task(_back(arena, daemon, shared.died))
    try:
        await _live(config, shared, daemon)
    finally:
        if backing is not None:
            backing.cancel()
        daemon.desk.ticker.stop()
        await daemon.node.close()


async def _warmed(daemon: Daemon, died: asyncio.Event) -> threading.Thread:
    """The engine's thread, once the engine has warmed up there, or died."""
    loop, warm = asyncio.get_running_loop(), asyncio.Event()
    thread = engine_thread.start(daemon.thread, lambda _: _call(loop, died.set), lambda: _call(loop, warm.set))
    await _first(warm, died)
    return thread


async def _live(config: Config, shared: Shared, daemon: PrefillDaemon | DecodeDaemon) -> None:
    loop, stop, died, group = asyncio.get_running_loop(), shared.stop, shared.died, daemon.group
    daemon.port.attach(loop)

    def reload_all() -> None:
        reload(config.allowed, daemon.node.allow)
        group.reload()

    reload_on_hangup(config.allowed, reload_all)
    thread = await _warmed(daemon, died)
    if not died.is_set():
        endpoint = _endpoint(config, await daemon.node.bus.bind(config.bind))
        group.asked = stop.asked.set
        shared.daemon = daemon
        log.info("%s %s is ready at %s", config.role, config.node, endpoint)
        if config.json:
            own = {"node": config.node, "endpoint": endpoint, "http": shared.http}
            ready = {"ready": True, "role": config.role, **own, "ranks": [own, *group.described()]}
            print(json.dumps(ready), flush=True)
    await _first(stop.asked, died, group.lost)
    daemon.node.core.drain()
    while not (daemon.idle or stop.hurried.is_set() or died.is_set() or group.lost.is_set()):
        daemon.desk.run([])
        await asyncio.sleep(DRAIN_POLL_S)
    if died.is_set() and not group.nobody:
        await _within(group.lost.wait(), LOSS_S)  # the thread hears of a dead rank before its link does
    if group.lost.is_set():
        log.error("%s: this worker ends", group.why)
        died.set()
        daemon.desk.run([])
        await asyncio.sleep(2 * LOAD_MS / 1e3)  # routers hear that it drains first, else they would try again here
        daemon.end_all(Cause.ENGINE, group.why)
    cause = Cause.ENGINE if died.is_set() else Cause.SHUTDOWN
    daemon.desk.run(daemon.desk.service.goodbye(cause.value))
    daemon.port.tell(Quit())
    if not died.is_set():
        await asyncio.to_thread(thread.join, JOIN_S)


async def _follow(config: Config, shared: Shared, engine: Any, arena: Arena | None, link: Link) -> None:
    """Does what the leader says until it says that all is over, or is gone."""
    loop, settings = asyncio.get_running_loop(), _settings(config, engine.card)
    if isinstance(config, PrefillConfig):
        daemon = PrefillFollower(config, settings, engine, link, shared.registry, shared.journeys)
        daemon.node.condemned = shared.died.set
    else:
        assert arena is not None
        daemon = DecodeFollower(config, settings, engine, arena, link, shared.registry, shared.journeys)
    over = asyncio.Event()
    try:
        daemon.port.attach(loop)
        reload_on_hangup(config.allowed, lambda: reload(config.allowed, daemon.node.allow))
        thread = await _warmed(daemon, shared.died)
        if not shared.died.is_set():
            endpoint = _endpoint(config, await daemon.node.bus.bind(config.bind))
            link.send(Bound(endpoint, shared.http))
            shared.daemon = daemon
            log.info("%s %s follows at %s", config.role, config.node, endpoint)
            if config.json:
                own = {"node": config.node, "endpoint": endpoint, "http": shared.http}
                ready = {"ready": True, "role": config.role, **own}
                print(json.dumps(ready), flush=True)
        listening = asyncio.create_task(link.listen(lambda frame: _obey(config, daemon, over, frame)))
        listening.add_done_callback(lambda _: over.set())
        await _first(shared.stop.asked, shared.died, over)
        if shared.stop.asked.is_set():
            link.send(Asked())
        await _first(shared.stop.hurried, shared.died, over)
        if listening.done() or not over.is_set():
            log.error("the leader is lost: %s", listening.result() if listening.done() else "this rank ends before it")
            shared.died.set()
        else:
            await _within(_idle(daemon), JOIN_S)
            daemon.port.tell([Quit()])
            await asyncio.to_thread(thread.join, JOIN_S)
    finally:
        await daemon.node.close()
        await link.close()


def _obey(config: Config, daemon: PrefillFollower | DecodeFollower, over: asyncio.Event, frame: Frame) -> None:
    match frame:
        case Start(serial, begin):
            daemon.start(serial, begin)
        case Turn():
            daemon.turn(frame)
        case Abort(serial, cause, detail):
            daemon.abort(serial, Cause.of(cause), detail)
        case frames.Introduce(peers):
            assert isinstance(daemon, DecodeFollower), "prefill dials nobody"
            daemon.node.introduce(peers)
        case frames.Reload():
            reload(config.allowed, daemon.node.allow)
        case frames.Quit():
            over.set()
        case _:
            raise AssertionError(f"a leader says no {type(frame).__name__}")


async def _idle(daemon: PrefillFollower | DecodeFollower) -> None:
    while not daemon.idle:  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_POLL_S)


async def _within(wait: Coroutine[Any, Any, object], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(wait, seconds)


async def _first(*events: asyncio.Event) -> None:
    """Waits for any of them."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _endpoint(config: Config, bound: str) -> str:
    """Where peers dial this daemon, with its key before it where they need one."""
    key = f"{KeyPair.read(config.key).public}@" if config.key is not None else ""
    return key + advertised(bound, config.advertise)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From another thread. A loop that has ended has nobody left who would want to hear it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _health(config: Config, shared: Shared) -> Health:
    detail: dict[str, object] = {"role": config.role, "node": config.node}
    if shared.daemon is None:
        return Health(False, detail | {"starting": True})
    if not config.leads:
        detail["follows"] = True
    elif isinstance(shared.daemon, PrefillDaemon | DecodeDaemon):
        load = shared.daemon.load()
        detail |= {"draining": load.draining, "rooms": load.rooms_running, "slots_free": load.slots_free}
    return Health(not shared.stop.asked.is_set(), detail)

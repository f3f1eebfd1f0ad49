"""Runs the process of a prefill or decode daemon: engine, node, sockets and ranks, from the start to the end."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from ...bus.keys import AllowList, KeyPair
from ...bus.listening import reserve
from ...client.settings import NodeSettings
from ...client.thread_queues import ThreadQueues
from ...errors import Cause, ConfigError, PDTransferError, WorldError, missing_extra
from ...handoff.identity_check import shown
from ...kernels import native
from ...kernels.gpu import gpu_at
from ...limits import LOAD_MS
from ...memory.arena_memory import ArenaMemory
from ...memory.hbm import Hbm, staging_bytes
from ...transports.select import needs_no_guard
from ..engine_api import DecodeEngine, EngineConfig, EngineDescription
from ..firewall import Firewall, admit_networks, firewall_for
from ..process.ended_requests import recorded_ends
from ..process.http import Health, HttpListener, application
from ..process.process_metrics import process_registry
from ..process.setup import prepare
from ..process.signals import StopSignal, reload, reload_on_hangup
from ..settings.ranks import advertised
from ..settings.worker import DecodeConfig, PrefillConfig
from ..tracing.ended_request import EndedRequests
from ..tracing.timeline import Journeys
from ..tracing.trace import recorded
from . import engine_thread
from .decode_daemon import DecodeDaemon
from .decode_rank import DecodeRank
from .engine_thread import FollowerPort, Order, Quit, follower_steps
from .follower import Follower
from .group import meeting
from .group.follower import GroupFollower
from .group.leader import GroupLeader
from .group.sockets import RankSockets
from .prefill_daemon import PrefillDaemon
from .prefill_rank import PrefillRank

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
JOIN_S = 5.0  # seconds for the engine's last step
LOSS_S = 1.0  # seconds after the engine's thread within which the group finds a dead rank

Config = PrefillConfig | DecodeConfig
Daemon = PrefillDaemon | DecodeDaemon


def _settings(config: Config, description: EngineDescription, firewall: Firewall | None = None) -> NodeSettings:
    """The node's settings from a daemon's config. Raises as `_keys`."""
    keys, allowed = _keys(config)
    return NodeSettings(
        node=config.node,
        model=description.model,
        weights=description.weights,
        context_tokens=description.context_tokens,
        keys=keys,
        allowed=allowed,
        insecure=config.insecure,
        ranks=config.ranks,
        limits=config.limits,
        guard=firewall,
    )


def _keys(config: Config) -> tuple[KeyPair | None, AllowList | None]:
    """Reads this node's keys and its allow-list from their files. Raises ConfigError for what cannot be read."""
    return (
        KeyPair.read(config.key) if config.key is not None else None,
        AllowList.read(config.allowed) if config.allowed is not None else None,
    )


def create_engine(path: str, config: EngineConfig) -> Any:
    """Calls the factory that `module:attribute` names. Raises ConfigError, in one line, where that fails.

    An unexpected error in a factory of this package is passed on: that is our bug.
    """
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        if not callable(factory):
            raise ConfigError(f"engine = {path!r}: must be a factory, it is a {type(factory).__name__}")
        engine = factory(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine = {path!r}: {missing_extra(error) or error}") from error
    except PDTransferError:
        raise
    except Exception as error:
        if module_name.partition(".")[0] == __name__.partition(".")[0]:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        raise ConfigError(f"engine = {path!r}: {text}") from error
    if not isinstance(getattr(engine, "description", None), EngineDescription):
        text = f"the factory returns a {type(engine).__name__} without `description`, an EngineDescription"
        raise ConfigError(f"engine = {path!r}: {text}")
    return engine


def run(config: Config) -> int:
    """Runs a prefill or a decode daemon until SIGTERM or SIGINT; returns the exit status."""
    status = uvloop.run(_serve(config))
    if status and config.grouped:
        # The engine's thread may wait forever for a rank that is gone or frozen.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


async def _arena(config: DecodeConfig, engine: DecodeEngine, stop: StopSignal) -> ArenaMemory:
    """Makes the arena of a decode rank, which its engine reads from now on."""
    arena = create_arena(config, engine.description)
    if config.device_index is not None:
        arena.gpu = gpu = gpu_at(config.device_index)
        if (node := gpu.numa_node) is not None and not arena.mapping.bind(node):
            log.info("arena: the kernel cannot bind memory to NUMA node %d: it may lie on any node", node)
        if engine.description.hbm_bytes:
            arena.hbm = Hbm.of_gpu(
                config.device_index, base=engine.description.hbm_base, byte_count=engine.description.hbm_bytes
            )
            if not arena.hbm.handle:
                arena.need_all()
    # A single process serves from the first chunk on; the ranks of a group become ready together.
    try:
        await asyncio.to_thread(
            arena.prefault, None, lambda: stop.asked.is_set() or (arena.bytes_ready > 0 and not config.grouped)
        )
    except WorldError:
        arena.close()
        raise
    if arena.gpu is not None and not arena.bytes_ready:
        raise meeting.StoppedError
    attach(engine, arena)
    return arena


def create_arena(config: DecodeConfig, description: EngineDescription) -> ArenaMemory:
    """With a GPU, HBM components are there, and the arena has a staging buffer for them."""
    if config.device_index is None:
        return ArenaMemory.create(description.arena_bytes, huge_pages=config.huge_pages, name=config.node)
    buffer_bytes = staging_bytes(config.host_buffer_gib, description.hbm_bytes)
    return ArenaMemory.create(
        description.memory_bytes, huge_pages=config.huge_pages, name=config.node, staging_bytes=buffer_bytes
    )


def attach(engine: DecodeEngine, arena: ArenaMemory) -> None:
    """Attaches the arena. An engine without HBM components, or without a GPU, gets no such argument."""
    given: dict[str, Any] = {}
    if (registered := arena.mapping.registered) is not None:
        given["device_address"] = registered.device_address
    if arena.hbm is not None:
        given["hbm"] = arena.hbm.engine_memory
    elif engine.description.hbm_bytes:
        given["hbm"] = arena.mapping.view[engine.description.hbm_base : engine.description.arena_bytes]
    engine.attach(arena.mapping.view[: engine.description.memory_bytes], **given)


async def _back(arena: ArenaMemory, daemon: DecodeDaemon, died: asyncio.Event) -> None:
    """Backs the rest of the arena while the daemon serves, and reports the progress. Without memory the daemon ends."""
    loop, tenths, over = asyncio.get_running_loop(), arena.bytes_ready * 10 // arena.needed, False

    def progress(byte_count: int) -> None:
        nonlocal tenths
        _call(loop, lambda: None if over else daemon.backed(byte_count))
        if byte_count * 10 // arena.needed > tenths:
            tenths = byte_count * 10 // arena.needed
            log.info("arena: %d of %d MiB ready", byte_count >> 20, arena.needed >> 20)

    try:
        await asyncio.shield(loop.run_in_executor(None, arena.prefault, progress, lambda: over))
    except Exception as error:
        log.error("%s", error, exc_info=None if isinstance(error, WorldError) else error)
        died.set()
    finally:
        over = True


@dataclass(slots=True, eq=False)
class Shared:
    """What a process has besides its daemon."""

    stop: StopSignal
    registry: CollectorRegistry
    reserved: socket.socket  # what peers will connect to, from the first second on
    http: str = ""
    ready: bool = False
    daemon: Daemon | None = None  # None on a follower
    died: asyncio.Event = field(default_factory=asyncio.Event)  # set when the engine or the group has failed
    journeys: Journeys = field(default_factory=Journeys)
    ended: EndedRequests = field(default_factory=EndedRequests)
    slow: list[str] = field(default_factory=list[str])  # what works, and is slower than it need be
    firewall: Firewall | None = None
    no_firewall: str = ""  # why it is missing, where it would be of use


async def _serve(config: Config) -> int:
    """Runs the whole process: sockets, engine, node, then whatever peers and signals bring."""
    prepare()
    with recorded(config.timeline, config.node) as spans, recorded_ends(config) as ended:
        return await _served(config, Journeys(spans), ended)


async def _served(config: Config, journeys: Journeys, ended: EndedRequests) -> int:
    _keys(config)  # report errors in the keys before the engine and the arena are made, which takes time
    stop, registry = (
        StopSignal(ended, "room" if config.leads else None),
        process_registry(role=config.role, node=config.node),
    )
    reserved = await reserve(config.bind, keyed=config.key is not None, insecure=config.insecure)
    shared = Shared(stop, registry, reserved, journeys=journeys, ended=ended)
    app = application(lambda: _health(config, shared), shared.registry)
    listener = HttpListener(app, allowed_hosts=config.allowed_hosts)
    try:
        shared.http = await listener.open(config.listen) if config.listen else ""
        await _open_firewall(config, shared)
        if not (copy := await asyncio.to_thread(native)).used:
            shared.slow.append(copy.text)
            log.warning("slow: %s", copy.text)
        given = replace(config.engine_config, spans=journeys.engine)
        async with meeting.started(config) as others:
            async with meeting.after_leader():
                sockets = RankSockets(config.ranks) if config.grouped else None
                given = given if sockets is None else replace(given, group=sockets)
                engine = create_engine(config.factory, given)
                arena = await _arena(config, engine, shared.stop) if isinstance(config, DecodeConfig) else None
                settings = _settings(config, engine.description, shared.firewall)
            if config.leads:
                async with meeting.leading(
                    config, engine.description, settings, sockets, shared.stop.asked, others
                ) as group:
                    await _lead(config, shared, settings, engine, arena, group)
            else:
                assert sockets is not None
                async with meeting.following(
                    config, engine.description, settings, sockets, shared.stop.asked
                ) as leader:
                    await _follow(config, shared, settings, engine, arena, leader)
    except meeting.StoppedError:
        pass
    finally:
        reserved.close()
        await listener.close()
        if shared.firewall is not None:
            await shared.firewall.close()
        shared.stop.close()
    return 1 if shared.died.is_set() else 0


async def _open_firewall(config: Config, shared: Shared) -> None:
    """Closes the ports of transports to all but peers, as configured. Raises ConfigError where that has to be
    and cannot."""
    network = config.network
    needless = needs_no_guard(config.transport, loopback=network.loopback)
    networks = admit_networks("firewall_admit", config.firewall_admit)
    firewall, why = await firewall_for(config.firewall, node=config.node, needless=needless, networks=networks)
    shared.firewall = firewall
    if firewall is not None:
        log.info("firewall: table inet %s admits only peers with a session to transport ports", firewall.table)
    elif not needless:
        shared.no_firewall = why
    if shared.no_firewall and config.firewall == "auto":
        text = "firewall: none, and a host that reaches ports %d to %d may read and write this node's memory: %s"
        log.warning(text, *network.ports, why)


async def _lead(
    config: Config, shared: Shared, settings: NodeSettings, engine: Any, arena: ArenaMemory | None, group: GroupLeader
) -> None:
    """Serves routers until it is asked to stop, the engine dies or a rank is lost. Work under way runs to its end."""
    settings, port = replace(settings, group=await group.members(config.node)), ThreadQueues[Order]()
    backing: asyncio.Task[None] | None = None
    if isinstance(config, PrefillConfig):
        given = port, shared.registry, group, shared.journeys, shared.ended, shared.died.set
        daemon = PrefillDaemon(config, settings, engine, *given)
    else:
        assert arena is not None
        given = arena, port, shared.registry, group, shared.journeys, shared.ended
        daemon = DecodeDaemon(config, settings, engine, *given)
        if arena.bytes_ready < arena.needed:
            backing = asyncio.get_running_loop().create_task(_back(arena, daemon, shared.died))
    async with _opened(config, shared, daemon.rank, port, group) as (thread, endpoint):
        try:
            if endpoint:
                shared.daemon = daemon
                _print_ready(config, shared, endpoint, group.described())
            await _live(config, shared, daemon)
            if not shared.died.is_set():
                await asyncio.to_thread(thread.join, JOIN_S)
        finally:
            if backing is not None:
                backing.cancel()
            daemon.desk.ticker.stop()


@asynccontextmanager
async def _opened(
    config: Config,
    shared: Shared,
    rank: PrefillRank | DecodeRank,
    port: ThreadQueues[Any],
    group: GroupLeader | GroupFollower,
) -> AsyncGenerator[tuple[threading.Thread, str]]:
    """A leader or a follower whose engine has warmed up on this thread, and whose node listens at this endpoint, which
    is empty where the engine has died. The node is closed when the context is left."""
    loop, warm = asyncio.get_running_loop(), asyncio.Event()
    port.attach(loop)
    if config.allowed is not None:
        reload_on_hangup(lambda: _reload(config, rank, group))
    try:
        thread = engine_thread.start(rank.thread, lambda _: _call(loop, shared.died.set), lambda: _call(loop, warm.set))
        await _first(warm, shared.died)
        if isinstance(rank, PrefillRank):  # after the engine: it may capture graphs while it warms up
            await rank.node.prepare()
        yield thread, "" if shared.died.is_set() else _endpoint(config, rank.node.bus.listen(shared.reserved))
    finally:
        await rank.node.close()


def _reload(config: Config, rank: PrefillRank | DecodeRank, group: GroupLeader | GroupFollower) -> None:
    """Reads the allow-list again, if there is one."""

    def allow(allowed: AllowList) -> None:
        rank.node.allow(allowed)
        group.allow(allowed)

    if config.allowed is not None:
        reload(config.allowed, allow)


def _print_ready(config: Config, shared: Shared, endpoint: str, others: list[dict[str, str]] | None) -> None:
    """Reports readiness; `others` are the ranks that this one leads."""
    shared.ready = True
    log.info("%s %s %s at %s", config.role, config.node, "follows" if others is None else "is ready", endpoint)
    if config.json:
        leader = {"node": config.node, "endpoint": endpoint, "http": shared.http}
        ranks = {} if others is None else {"ranks": [leader, *others]}
        print(json.dumps({"ready": True, "role": config.role, **leader, **ranks}), flush=True)


async def _live(config: Config, shared: Shared, daemon: Daemon) -> None:
    """Serves, drains, and takes leave of the routers."""
    stop, died, group = shared.stop, shared.died, daemon.group
    await _first(stop.asked, died, group.lost)
    daemon.node.core.drain()
    while not (daemon.idle or stop.hurried.is_set() or died.is_set() or group.lost.is_set()):
        daemon.desk.run([])
        await asyncio.sleep(DRAIN_POLL_S)
    if died.is_set() and config.grouped:
        await _within(group.lost.wait(), LOSS_S)
    if group.lost.is_set():
        log.error("%s: this worker ends", group.why)
        died.set()
        daemon.desk.run([])
        await asyncio.sleep(2 * LOAD_MS / 1e3)  # routers must get the draining Load first, else they would retry here
        daemon.end_all(Cause.ENGINE, group.why)
    elif stop.hurried.is_set():
        daemon.end_all(Cause.SHUTDOWN, "a second signal ended it at once")
    cause = Cause.ENGINE if died.is_set() else Cause.SHUTDOWN
    daemon.desk.run(daemon.desk.service.goodbye(cause.value))
    daemon.port.to_engine(Quit())


async def _follow(
    config: Config, shared: Shared, settings: NodeSettings, engine: Any, arena: ArenaMemory | None, group: GroupFollower
) -> None:
    """Follows the leader's orders until the leader ends the group, or is lost."""
    port: FollowerPort = ThreadQueues()
    follower, steps = Follower(group, port, lambda: _reload(config, rank, group)), follower_steps(port)
    given = (port, steps, follower, shared.registry, shared.journeys)
    if isinstance(config, PrefillConfig):
        rank = PrefillRank(config, settings, engine, *given, condemned=shared.died.set)
    else:
        assert arena is not None
        rank = DecodeRank(config, settings, engine, arena, *given)
    follower.rank, group.take = rank, follower.take
    async with _opened(config, shared, rank, port, group) as (thread, endpoint):
        if endpoint:
            group.bound(endpoint, shared.http)
            _print_ready(config, shared, endpoint, None)
        await _first(shared.stop.asked, shared.died, group.over, group.lost)
        if shared.stop.asked.is_set():
            group.ask()
        await _first(shared.stop.hurried, shared.died, group.over, group.lost)
        if group.over.is_set():
            await _within(_idle(rank), JOIN_S)
            port.to_engine([Quit()])
            await asyncio.to_thread(thread.join, JOIN_S)
        else:
            log.error("the leader is lost: %s", group.why or "this rank ends before it")
            shared.died.set()


async def _idle(rank: PrefillRank | DecodeRank) -> None:
    while not rank.idle:  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_POLL_S)


async def _within(wait: Coroutine[Any, Any, object], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(wait, seconds)


async def _first(*events: asyncio.Event) -> None:
    """Waits for the first of these events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _endpoint(config: Config, bound: str) -> str:
    """The endpoint that peers dial, with this node's key if they need one."""
    key = f"{KeyPair.read(config.key).public}@" if config.key is not None else ""
    return key + advertised(bound, config.advertise)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls on the loop from another thread. If the loop has ended, nobody needs the call."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _health(config: Config, shared: Shared) -> Health:
    detail: dict[str, object] = {"role": config.role, "node": config.node}
    if not shared.ready:
        return Health(False, detail | {"starting": True})
    if shared.daemon is None:
        detail["follows"] = True
    else:
        load, bus = shared.daemon.load(), shared.daemon.node.bus
        detail["identity"] = shown(shared.daemon.desk.service.identity)
        detail |= {"draining": load.draining, "rooms": load.rooms_running, "slots_free": load.slots_free}
        troubles = {
            "unusable_prefills": {peer.endpoint: peer.why for peer in load.unusable},
            "refused_by": shared.daemon.desk.refusals,
            "refused_keys": {"count": bus.strangers, "last": bus.last_stranger} if bus.strangers else {},
        }
        detail |= {name: trouble for name, trouble in troubles.items() if trouble}
    if shared.slow:
        detail["slow"] = shared.slow
    if shared.firewall is not None:
        detail["firewall"] = shared.firewall.report
    elif shared.no_firewall:
        detail["firewall"] = {"state": "off", "why": shared.no_firewall}
    return Health(not shared.stop.asked.is_set(), detail)

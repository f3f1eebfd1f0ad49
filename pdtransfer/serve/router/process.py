"""The router's process: one HTTP side, and the backend that the settings name. It imports no torch.

It loads the modules of that backend alone, and nothing that moves KV: no transport, kernel or memory of an arena.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import msgspec
import uvloop

from ...handoff.events import Spans
from ..process.ended_requests import recorded_ends
from ..process.setup import prepare
from ..process.signals import StopSignal, reload_on_hangup
from ..settings.router import RouterConfig
from ..tracing.ended_request import EndedRequests
from .front.router import Router
from .front.status import RouterMetrics

log = logging.getLogger(__name__)


async def serve(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT, drains it, and closes it; a later signal ends the drain."""
    prepare()
    with _spans(config) as spans, recorded_ends(config) as ended:
        await _run_until_stopped(config, spans, ended)


def _spans(config: RouterConfig) -> AbstractContextManager[Spans | None]:
    if config.timeline is None:
        return nullcontext()
    from ..tracing.trace import recorded

    return recorded(config.timeline, config.node)


def router_of(config: RouterConfig, ended: EndedRequests | None = None, spans: Spans | None = None) -> Router:
    """A router with the settings' backend. `ended` gets a record of each ended request and room. Raises ConfigError."""
    metrics, ended = RouterMetrics(node=config.node), ended or EndedRequests()
    if config.relays:
        from .backends.servers.backend import Servers

        return Router(config, Servers(config, metrics), metrics, ended)
    from .backends.daemons.backend import Daemons

    return Router(config, Daemons(config, metrics, ended, spans), metrics, ended)


async def _run_until_stopped(config: RouterConfig, spans: Spans | None, ended: EndedRequests) -> None:
    stop, router = StopSignal(ended, "request"), router_of(config, ended, spans)
    changes = None
    if config.finds_workers:
        from .fleet.fleet_changes import FleetChanges

        changes = FleetChanges(config, router.backend)
    try:
        address = await router.open()
        admin = await changes.open() if changes is not None else ""
        reload_on_hangup(*router.reloads)
        log.info("%s listens on %s", config.node, address)
        for role, endpoints in (("prefill", config.prefill), ("decode", config.decode)):
            if not endpoints and not config.finds_workers:
                form = "http" if config.relays else "tcp"
                log.warning("no request can be served: name a %s worker with --%s %s://host:port", role, role, form)
        if config.json:
            line = {"ready": True, "role": config.role, "node": config.node, "http": address}
            line |= {"admin": admin} if admin else {}
            print(msgspec.json.encode(line).decode(), flush=True)
        await stop.asked.wait()
        await router.drain(stop.hurried)
    finally:
        if changes is not None:
            await changes.close()
        await router.close()
        stop.close()


def run(config: RouterConfig) -> int:
    """The command `pdtransfer router`; returns its exit status. Raises ConfigError or WorldError."""
    uvloop.run(serve(config))
    return 0

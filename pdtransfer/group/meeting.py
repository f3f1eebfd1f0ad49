"""How the ranks of a worker find each other: a leader that waits, or starts the others; a follower that joins.

A rank builds its engine first, so what makes no sense is said once, and before anybody is started or waits.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import DecodeConfig, PrefillConfig, arguments, child_environment
from ..engine.base import EngineCard
from ..errors import WorldError
from ..ranks import group_address
from ..signals import end_with_parent
from ..wire import Ranks
from .follow import join
from .frames import Join
from .lead import Lead, label
from .link import Link

if TYPE_CHECKING:
    from .gloo import Gloo

log = logging.getLogger(__name__)

QUIT_S = 5.0  # a follower that is told to go is gone by then

Config = PrefillConfig | DecodeConfig


class StoppedError(Exception):
    """Somebody asked this process to end before the group was complete."""


def common(config: Config, card: EngineCard) -> dict[str, str]:
    """What must be the same on all ranks, for their engines to be in step."""
    config_fields = ("slots", "page_size", "batch_max" if isinstance(config, DecodeConfig) else "chunk_tokens")
    return {
        "version": __version__,
        "role": config.role,
        "model": card.model,
        "weights": card.weights.hex(),
        "engine_option": " ".join(sorted(f"{name}={value}" for name, value in config.engine_options.items())),
        **{name: str(getattr(config, name)) for name in config_fields},
    }


@asynccontextmanager
async def leading(config: Config, card: EngineCard, gloo: Gloo | None, stop: asyncio.Event) -> AsyncGenerator[Lead]:
    """This worker's group, complete and connected; its followers are gone, or sent away, when this is left.

    Raises WorldError for one that does not come, StoppedError when `stop` comes first.
    """
    lead = Lead(config.ranks, common(config, card))
    if gloo is None:
        yield lead
        return
    children: list[asyncio.subprocess.Process] = []
    try:
        host, port = group_address(config.group)
        bound = await lead.open(host, port)
        if not config.group:
            await _start(config, bound, children)
            watches = [asyncio.create_task(_watch(lead, config, at, child)) for at, child in enumerate(children, 1)]
        else:
            log.info("waiting for %d more ranks at %s", lead.size - 1, bound)
            watches = []
        await _unless(stop, lead.joined())
        listening = gloo.store_socket(host)
        port = listening.getsockname()[1]
        lead.meet(port)
        await _meet(gloo, host, port, listening)
        yield lead
    finally:
        await lead.quit(QUIT_S)
        for child in children:
            if child.returncode is None:
                child.kill()
        for child in children:
            await child.wait()
    for watch in watches:
        watch.cancel()


async def following(config: Config, card: EngineCard, gloo: Gloo, stop: asyncio.Event) -> Link:
    """The link to the leader, once all ranks have met. Raises ConfigError, WorldError, StoppedError."""
    words = Join(config.ranks, config.node, common(config, card))
    found = await join(group_address(config.group), words, stop)
    if found is None:
        raise StoppedError
    link, joined = found
    await _meet(gloo, group_address(config.group)[0], joined.port, None)
    return link


async def _meet(gloo: Gloo, host: str, port: int, listening: Any) -> None:
    try:
        await asyncio.to_thread(gloo.meet, host, port, listening)
    except RuntimeError as error:
        raise WorldError(f"the ranks do not find each other: {str(error).splitlines()[0]}") from None


async def _unless(stop: asyncio.Event, wait: Coroutine[Any, Any, None]) -> None:
    waited, stopped = asyncio.create_task(wait), asyncio.create_task(stop.wait())
    await asyncio.wait((waited, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not waited.done():
        waited.cancel()
        raise StoppedError
    waited.result()


async def _start(config: Config, bound: str, children: list[asyncio.subprocess.Process]) -> None:
    """Every other rank as a child of this process, with this very config."""
    for place in range(1, config.ranks.tp_size * config.ranks.pp_size):
        ranks = _ranks_at(config, place)
        child = replace(
            config,
            node=f"{config.node}-{label(ranks)}"[-128:],
            bind=config.bind.rpartition(":")[0] + ":0",
            http=config.http.rpartition(":")[0] + ":0" if config.http else "",
            group=bound,
            json=False,
            tp_rank=ranks.tp_rank,
            **({"pp_rank": ranks.pp_rank} if isinstance(config, PrefillConfig) else {}),
        )
        children.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdtransfer", config.role, *arguments(child),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                env=child_environment(), start_new_session=True, preexec_fn=end_with_parent,
            )
        )  # fmt: skip


def _ranks_at(config: Config, place: int) -> Ranks:
    tp_size, pp_size = config.ranks.tp_size, config.ranks.pp_size
    return Ranks(place % tp_size, tp_size, place // tp_size, pp_size)


async def _watch(lead: Lead, config: Config, place: int, child: asyncio.subprocess.Process) -> None:
    status = await child.wait()
    lead.fail(f"rank {label(_ranks_at(config, place))} of this worker has ended with status {status}")

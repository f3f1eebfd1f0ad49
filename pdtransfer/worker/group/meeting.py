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

from ... import __version__
from ...config.config import DecodeConfig, PrefillConfig
from ...config.config_to_argv import arguments
from ...config.ranks import group_address, key_of, label, ranks_of
from ...engine_api import EngineCard
from ...environment import child_environment
from ...errors import ConfigError, WorldError
from ...process.signals import end_with_parent
from ...wire import Ranks
from .follower import join
from .frames import Join
from .leader import Lead
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
    decode = "batch_max", "verify", "enable_hisparse", "device_slots", "hot_tokens", "dense_slots"
    own = decode if isinstance(config, DecodeConfig) else ("chunk_tokens",)
    return {
        "version": __version__,
        "role": config.role,
        "keys": "none" if config.key is None else "given",
        "model": card.model,
        "weights": card.weights.hex(),
        "engine_option": " ".join(sorted(f"{name}={value}" for name, value in config.engine_options.items())),
        "hisparse_queue_max": str(config.limits.hisparse_queue_max),
        **{name: str(getattr(config, name)) for name in ("slots", "page_size", *own)},
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
            await _start(rank_configs(config, bound), children)
            others = ranks_of(config.ranks.tp_size, config.ranks.pp_size)[1:]
            watches = [asyncio.create_task(_watch(lead, *each)) for each in zip(others, children, strict=True)]
        else:
            log.info("waiting for %d more ranks at %s", lead.size - 1, bound)
            watches = []
        await _unless(stop, lead.joined())
        listening = gloo.store_socket(host)
        port = listening.getsockname()[1]
        lead.meet(port)
        await _meet(gloo, host, port, host, listening)
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
    await _meet(gloo, group_address(config.group)[0], joined.port, link.host, None)
    return link


async def _meet(gloo: Gloo, host: str, port: int, own: str, listening: Any) -> None:
    try:
        await asyncio.to_thread(gloo.meet, host, port, own, listening)
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


def rank_configs(config: Config, bound: str) -> list[Config]:
    """This very config for every other rank, each with a name, a key and ports of its own.

    Raises ConfigError for a key that is not there.
    """
    found: list[Config] = []
    for ranks in ranks_of(config.ranks.tp_size, config.ranks.pp_size)[1:]:
        key = None if config.key is None else key_of(config.key, ranks)
        if key is not None and not key.exists():
            stem = str(key).removesuffix(".key")
            text = f"rank {label(ranks)} is a peer of its own and needs a key: pdtransfer keygen {stem}"
            raise ConfigError(f"key = '{config.key}': there is no {key.name} beside it; {text}")
        found.append(
            replace(
                config,
                node=f"{config.node}-{label(ranks)}"[-128:],
                key=key,
                bind=config.bind.rpartition(":")[0] + ":0",
                http=config.http.rpartition(":")[0] + ":0" if config.http else "",
                group=bound,
                json=False,
                tp_rank=ranks.tp_rank,
                **({"pp_rank": ranks.pp_rank} if isinstance(config, PrefillConfig) else {}),
            )
        )
    return found


async def _start(configs: list[Config], children: list[asyncio.subprocess.Process]) -> None:
    """Every other rank as a child of this process."""
    for child in configs:
        children.append(  # noqa: PERF401 -- whoever gives up in the middle has to find the first ones
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdtransfer", child.role, *arguments(child),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                env=child_environment(), start_new_session=True, preexec_fn=end_with_parent,
            )
        )  # fmt: skip


async def _watch(lead: Lead, ranks: Ranks, child: asyncio.subprocess.Process) -> None:
    status = await child.wait()
    lead.fail(f"rank {label(ranks)} of this worker has ended with status {status}")

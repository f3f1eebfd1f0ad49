"""How the ranks of a worker meet: a leader waits for the others or starts them; a follower joins.

A leader starts the other ranks before it makes its engine: on one host all ranks load their parts of a model at the
same time. A rank joins once its engine is made. What is wrong with the settings of all is reported by the leader alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any, Literal, TypeVar

from .... import __version__
from ....bus.keys import Address, AllowList, KeyPair, address_of, key_of
from ....bus.listening import address_bound, reserve
from ....client.settings import NodeSettings
from ....disconnect import disconnect
from ....environment import led, rank_environment
from ....errors import ConfigError, WorldError
from ....limits import TEXT_LENGTH_MAX
from ....wire import RankJoin, Setting
from ....wire.ranks import label, ranks_of
from ...engine_api import EngineDescription
from ...process.signals import end_with_parent
from ...settings.config_to_argv import config_to_argv
from ...settings.ranks import group_endpoint
from ...settings.worker import DecodeConfig, PrefillConfig
from .follower import GroupFollower
from .leader import GroupLeader
from .sockets import SECRET_BYTES, RankSockets

log = logging.getLogger(__name__)

QUIT_S = 5.0  # seconds until a follower that was asked to end is gone
LOST_S = 1.0  # the same where a rank of the worker is lost

Config = PrefillConfig | DecodeConfig
T = TypeVar("T")


class StoppedError(Exception):
    """This process was asked to end before the group was complete."""


def common(config: Config, description: EngineDescription) -> dict[str, str]:
    """Settings that must be the same on all ranks, to keep their engines in step."""
    decode = "batch_max", "verify", "enable_hisparse", "device_slots", "hot_tokens", "dense_slots", "prefix_cache"
    own_names = decode if isinstance(config, DecodeConfig) else ("chunk_tokens",)
    limits = "hisparse_queue_max", "prefix_block_tokens", "turn_tokens_max"
    return {
        "version": __version__,
        "role": config.role,
        "model": description.model,
        "weights": description.weights.hex(),
        "engine_option": " ".join(sorted(f"{name}={value}" for name, value in config.engine_options.items())),
        **{name: str(getattr(config.limits, name)) for name in limits},
        **{name: str(getattr(config, name)) for name in ("slots", "page_size", *own_names)},
    }


def _settings(config: Config, description: EngineDescription) -> tuple[Setting, ...]:
    """The same for the wire; a long value is replaced by its digest."""
    return tuple(
        Setting(name, value if len(value) <= TEXT_LENGTH_MAX else hashlib.sha256(value.encode()).hexdigest())
        for name, value in common(config, description).items()
    )


class StartedRanks:
    """The other ranks of a worker, where their leader starts them itself. They join at `listener`."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.configs: list[Config] = []
        self.children: list[asyncio.subprocess.Process] = []

    async def start(self, configs: list[Config]) -> None:
        """Starts each as a child process."""
        for config in configs:
            self.configs.append(config)
            self.children.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pdtransfer", config.role, *config_to_argv(config),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                    env=rank_environment(), start_new_session=True, preexec_fn=end_with_parent,
                )
            )  # fmt: skip

    def release(self) -> None:
        """Lets each report what it finds wrong: the leader has found nothing."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(b"\n")

    async def end(self, patience_s: float) -> None:
        """Waits this long for their end, then kills them. Idempotent."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(child.wait() for child in self.children)), patience_s)
        for child in self.children:
            if child.returncode is None:
                child.kill()
            await child.wait()


@asynccontextmanager
async def started(config: Config) -> AsyncGenerator[StartedRanks | None]:
    """The other ranks of this worker, under way; None where this process leads none, or others start them. They have
    ended when the context is left. Raises ConfigError for their keys."""
    if not (config.grouped and config.leads) or config.group:
        yield None
        return
    key = "" if config.key is None else f"{KeyPair.read(config.key).public}@"
    listener = await reserve("tcp://127.0.0.1:0", keyed=config.key is not None, insecure=config.insecure)
    ranks = StartedRanks(listener)
    try:
        await ranks.start(rank_configs(config, key + address_bound(listener).removeprefix("tcp://")))
        yield ranks
    finally:
        disconnect(listener)
        await ranks.end(0.0)


@asynccontextmanager
async def after_leader() -> AsyncGenerator[None]:
    """Holds an error of a rank that its leader has started until the leader's own engine is made: what is wrong with
    both is reported once. Raises StoppedError where the leader ends before."""
    try:
        yield
    except StoppedError:
        raise
    except Exception:
        if led() and not await asyncio.to_thread(sys.stdin.buffer.read, 1):
            raise StoppedError from None
        raise


@asynccontextmanager
async def leading(
    config: Config,
    description: EngineDescription,
    settings: NodeSettings,
    sockets: RankSockets | None,
    stop: asyncio.Event,
    others: StartedRanks | None,
) -> AsyncGenerator[GroupLeader]:
    """This worker's group, complete and connected. Its followers have ended when the context is left.

    Raises WorldError for a rank that does not come, StoppedError when `stop` comes first.
    """
    group = GroupLeader(config.ranks, stop.set)
    if sockets is None:
        yield group
        return
    watches: list[asyncio.Task[None]] = []
    try:
        listener = await _listener(config, settings) if others is None else others.listener
        bound = group.open(settings, _role(config), _settings(config, description), listener)
        if others is None:
            log.info("waiting for %d more ranks at %s", group.size - 1, bound)
        else:
            others.release()
            children = zip(others.configs, others.children, strict=True)
            watches += [asyncio.create_task(_watch(group, *child)) for child in children]
        await unless(group.joined(), stop)
        secret = token_bytes(SECRET_BYTES)
        endpoints = group.meet(sockets.listen(Address.parse(bound).host), secret)
        await connected(sockets.meet(endpoints, secret), group, stop)
        yield group
    finally:
        await group.close()
        if others is not None:
            # Where a rank is lost, the others may hang on it, and there is nothing left for them to finish.
            await others.end(LOST_S if group.lost.is_set() else QUIT_S)
    for watch in watches:
        watch.cancel()


async def _listener(config: Config, settings: NodeSettings) -> socket.socket:
    """Where the leader waits for ranks that others start. Raises as `reserve`, and ConfigError for another's key."""
    endpoint = group_endpoint(config.group)
    if endpoint.server_key is not None and (settings.keys is None or endpoint.server_key != settings.keys.public):
        raise ConfigError(f"group = {config.group!r}: key: must be the public key of rank 0, which leads")
    return await reserve(endpoint.address, keyed=settings.keys is not None, insecure=config.insecure)


@asynccontextmanager
async def following(
    config: Config, description: EngineDescription, settings: NodeSettings, sockets: RankSockets, stop: asyncio.Event
) -> AsyncGenerator[GroupFollower]:
    """The connection to the leader, once all ranks have met. Raises ConfigError, WorldError, StoppedError."""
    endpoint = group_endpoint(config.group)
    host, own_address = await asyncio.to_thread(_addresses, Address.parse(endpoint.address).host)
    tensors = sockets.listen(own_address)
    join = RankJoin(config.ranks, config.node, _settings(config, description), tensors)
    key = "" if endpoint.server_key is None else f"{endpoint.server_key}@"
    group = GroupFollower(settings, _role(config), key + endpoint.address, join)
    try:
        meet = await unless(group.join(), stop, group.over)
        endpoints = [address_of(host, meet.port), *meet.tensors]
        await connected(sockets.meet(endpoints, meet.secret), group, stop, group.over)
        yield group
    finally:
        await group.close()


def _role(config: Config) -> Literal["prefill", "decode"]:
    return "prefill" if isinstance(config, PrefillConfig) else "decode"


def _addresses(host: str) -> tuple[str, str]:
    """The address of another host, and this host's on the way there. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(address[0]), str(probe.getsockname()[0])


async def connected(
    meeting: Coroutine[Any, Any, None], group: GroupLeader | GroupFollower, *ends: asyncio.Event
) -> None:
    """Waits until all ranks are connected. That takes a minute where a rank has died on the way: its loss, and what
    asks this process to end, come first."""
    try:
        await unless(meeting, *ends, group.lost)
    except WorldError as error:
        raise WorldError(f"the ranks cannot connect to each other: {error}") from None
    except StoppedError:
        if group.lost.is_set():
            raise WorldError(f"the ranks cannot connect to each other: {group.why}") from None
        raise


async def unless(wait: Coroutine[Any, Any, T], *ends: asyncio.Event) -> T:
    """Returns the result of the wait. Raises StoppedError when one of the events comes first."""
    waiting = asyncio.create_task(wait)
    ending = [asyncio.create_task(event.wait()) for event in ends]
    try:
        await asyncio.wait((waiting, *ending), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise StoppedError
        return waiting.result()
    finally:
        for task in (waiting, *ending):
            task.cancel()


def rank_configs(config: Config, bound: str) -> list[Config]:
    """This config for every other rank, each with its own name, key and ports.

    Raises ConfigError for a missing key, or one that is not on the allow-list that all ranks share.
    """
    configs: list[Config] = []
    if config.key is not None:
        _check_listed(config, config.key, "this rank")
    for ranks in ranks_of(config.ranks.tp_size, config.ranks.pp_size)[1:]:
        key = None if config.key is None else key_of(config.key, ranks)
        if key is not None and not key.exists():
            stem = str(key).removesuffix(".key")
            text = f"rank {label(ranks)} is a peer of its own and needs a key: pdtransfer keygen {stem}"
            raise ConfigError(f"key = '{config.key}': there is no {key.name} beside it; {text}")
        if key is not None:
            _check_listed(config, key, f"rank {label(ranks)}")
        configs.append(
            replace(
                config,
                node=f"{config.node}-{label(ranks)}"[-128:],
                key=key,
                bind=config.bind.rpartition(":")[0] + ":0",
                listen=config.listen.rpartition(":")[0] + ":0" if config.listen else "",
                http=None,
                group=bound,
                json=False,
                tp_rank=ranks.tp_rank,
                **({"pp_rank": ranks.pp_rank} if isinstance(config, PrefillConfig) else {}),
            )
        )
    return configs


def _check_listed(config: Config, key: Path, member: str) -> None:
    """Checks that a rank's key is listed: the ranks of a worker are peers of each other."""
    assert config.allowed is not None
    public = KeyPair.read(key).public
    allowed = AllowList.read(config.allowed)
    if allowed.why_not(public, config.role):
        text = f"the ranks of a worker list each other: add the line of {key.with_suffix('.pub')}"
        raise ConfigError(f"allow = '{config.allowed}': {member} is not on it as {config.role}; {text}")


async def _watch(group: GroupLeader, config: Config, child: asyncio.subprocess.Process) -> None:
    status = await child.wait()
    group.fail(f"rank {label(config.ranks)} ({config.node}) of this worker has ended with status {status}")

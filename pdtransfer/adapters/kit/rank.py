"""A rank's start, alike in all engines: who it is among its peers, its clients, and the line that says where its KV
goes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...bus.keys import address_of
from ...client.api import (
    ArenaOptions,
    Component,
    DecodeClient,
    NodeSettings,
    PrefillClient,
    Replicas,
    WriterOptions,
    weights_digest,
)
from ...handoff.identity_check import shown
from ...wire import Ranks
from .cache_memory import CacheMemory, Extent, Target
from .facts import first_line, model_name
from .settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of an engine, whose KV cache lies in `extent`."""

    settings: Settings
    name: str  # that no other rank has
    number: int  # among the ranks of this host that share the settings
    ranks: Ranks
    model: str  # as clients call it, unless the settings name it
    facts: Mapping[str, Any]  # that make two caches the same bytes for the same tokens, `cache` among them
    shown: Mapping[str, str]  # the same as peers show them
    memory: CacheMemory
    extent: Extent

    def node(self, role: Literal["prefill", "decode"]) -> NodeSettings:
        """Who it is. Raises ConfigError for keys that cannot be read."""
        settings, (keys, allowed) = self.settings, self.settings.keys_of(self.ranks)
        return NodeSettings(
            node=f"{role[0]}-{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}",
            model=model_name(settings.model or self.model, self.facts["cache"]), weights=weights_digest(self.facts),
            facts=self.shown, keys=keys, allowed=allowed, insecure=settings.insecure, ranks=self.ranks,
            limits=settings.limits, cpus=settings.client_cpus,
        )  # fmt: skip

    def prefill(self, components: Sequence[Component], replicas: Replicas) -> tuple[PrefillClient, str]:
        """A client that runs, and where it listens: [KEY@]tcp://host:port."""
        settings, node = self.settings, self.node("prefill")
        writer = WriterOptions(
            pool_address=self.memory.base(self.extent), pool_fd=self.memory.pool_fd(self.extent),
            copy_threads=settings.copy_threads, device=self.extent.device, transport=settings.transport,
            network=settings.network,
        )  # fmt: skip
        client = PrefillClient(node, components, bind=settings.bind_of(self.number), writer=writer, replicas=replicas)
        client.start()
        key = f"{node.keys.public}@" if node.keys is not None else ""
        return client, key + address_of(settings.host, int(client.endpoint.rpartition(":")[2]))

    def decode(self, components: Sequence[Component], target: Target, **more: Any) -> DecodeClient:
        """A client that runs, and that has `more` of DecodeClient's options."""
        options = ArenaOptions(transport=self.settings.transport, network=self.settings.network)
        client = DecodeClient(
            self.node("decode"), components, target.arena, options=options, engine_slots=True, prefix_cache=False,
            verify=self.settings.verify, **more,
        )  # fmt: skip
        client.start()
        return client

    def announced(self, endpoint: str, target: Target | None, pages: str) -> tuple[dict[str, Any], str]:
        """What peers compare of it, and its first line. It listens on `endpoint`, if that is not empty. KV lands in
        `target`, with the engine's name of its `pages`."""
        role, both = "prefill" if endpoint else "decode", bool(endpoint) and target is not None
        identity = self.node(role).identity(role)
        where = [f"listens on {endpoint}"] if endpoint else []
        if target is not None:
            copied_up = "in host memory first, and is copied to " if target.copied_up else "in "
            where.append(f"KV lands {copied_up}{pages}")
        return shown(identity, both=both), first_line(identity, ", ".join(where), both=both)

"""The identity of a node among its peers, and its sockets."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from ..bus import Bus
from ..bus.gone import Gone
from ..bus.keys import AllowList, KeyPair
from ..bus.limits import BusLimits
from ..bus.sockets import LogThrottle
from ..errors import RemoteProtocolError
from ..limits import FACTS_MAX, NAME_LENGTH_MAX, TEXT_LENGTH_MAX, TOKENS_MAX, Limits
from ..threads import AUTO
from ..transports.port_guard import PortGuard
from ..transports.select import place
from ..wire import Fact, Holds, Identity, Member, Message, Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Others:
    """What a node shares its sockets with, such as a daemon's answers to routers."""

    receive: Callable[[str, Message], bool] = lambda _, __: False  # takes a peer's message, and returns whether it did
    gone: Callable[[str, str], None] = lambda _, __: None  # gets evidence that a peer is gone; empty: no longer


NO_OTHERS = Others()


PeerTimed = Callable[[str, str, float], None]
"""Gets a peer's name, the transport of the session with it, and a time in seconds by this process's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The identity of a node among its peers, and what it allows them. Peers pair only if `model` and `weights` are
    equal. If `weights` are not, each side names the `facts` that differ. Without `keys` and `allowed` a node serves
    loopback alone, unless it is `insecure`."""

    node: str  # a name that no other node of the fleet has; at most 128 letters, digits, '.', '_', '-'
    model: str  # at most 128 characters
    weights: bytes  # a digest of the weights, at most 64 bytes: equal weights, equal digest
    facts: Mapping[str, str] = field(default_factory=dict[str, str])  # what stands behind it, at most FACTS_MAX
    context_tokens: int = 0  # of a prompt and its answer at most, for routers; 0: unknown
    keys: KeyPair | None = None  # this node's own; they need an allow-list as well
    allowed: AllowList | None = None  # the peers that may connect
    insecure: bool = False  # lets other hosts connect without keys
    ranks: Ranks = field(default_factory=Ranks)  # of this rank in its model
    # For the leader of a worker of several ranks: all of them, the leader first. None: set_group names them later.
    group: tuple[Member, ...] | None = ()
    limits: Limits = field(default_factory=Limits)
    bus_limits: BusLimits = field(default_factory=BusLimits)
    # Of a client's threads: "auto" undoes a binding that they inherit from the engine, "inherit" leaves it, or 0-3,6.
    cpus: str = AUTO
    guard: PortGuard | None = None  # opens the ports of transports to peers with a session alone

    def identity(
        self, role: Literal["prefill", "decode"], holds: tuple[Holds, ...] = (), transports: tuple[str, ...] = ("shm",)
    ) -> Identity:
        """A new incarnation under this name."""
        return Identity(
            self.node, role, secrets.randbits(64), self.ranks, self.model, self.weights, self.limits.window,
            holds=holds, group=self.group or (), transports=transports, place=place(),
            context_tokens=min(self.context_tokens, TOKENS_MAX),
            facts=tuple([
                Fact(name[:NAME_LENGTH_MAX], value[:TEXT_LENGTH_MAX])
                for name, value in islice(self.facts.items(), FACTS_MAX)
            ]),
        )  # fmt: skip

    def bus(self, receive: Callable[[str, Message], None], gone: Callable[[str, Gone | None], None]) -> Bus:
        """This node's sockets, with `gone` as Bus has it. Breaches that the bus finds are logged, at a bounded rate in
        an engine's process too."""
        throttle, loop = LogThrottle(self.bus_limits.log_ms), asyncio.get_running_loop()

        def refused(peer: str, error: RemoteProtocolError) -> None:
            if (suppressed := throttle.due(loop.time())) is not None:
                log.warning("%s: %s%s", peer, error, f" ({suppressed} other breaches not logged)" if suppressed else "")

        bus = Bus(
            node=self.node, keys=self.keys, allowed=self.allowed, insecure=self.insecure, receive=receive,
            limits=self.bus_limits, refused=refused,
            reached=self.guard.moved if self.guard is not None else lambda _: None, gone=gone,
        )  # fmt: skip
        if self.guard is not None:
            self.guard.meet(bus.address_of)
        return bus

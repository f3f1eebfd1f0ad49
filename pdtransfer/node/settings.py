"""Who a node is, and how it meets its peers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..bus import Bus
from ..bus.keys import AllowList, KeyPair
from ..errors import Cause
from ..limits import Limits
from ..transports.select import place
from ..wire import Holds, Identity, Member, Message, Ranks, Reject

log = logging.getLogger(__name__)

Others = Callable[[str, Message], bool]
"""Takes what is no node's business, a router's messages say; says whether it did."""

REVOKED = "its key was revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Who a node is, and how it meets its peers. `weights` is a digest: equal weights, equal digest."""

    node: str
    model: str
    weights: bytes
    keys: KeyPair | None = None
    allowed: AllowList | None = None
    insecure: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    group: tuple[Member, ...] = ()  # of the rank that leads a worker of several: all its ranks, itself first
    limits: Limits = field(default_factory=Limits)

    def identity(
        self, role: Literal["prefill", "decode"], holds: tuple[Holds, ...] = (), transports: tuple[str, ...] = ("shm",)
    ) -> Identity:
        """A new life under this name."""
        return Identity(
            self.node, role, secrets.randbits(64), self.ranks, self.model, self.weights, self.limits.window,
            holds=holds, group=self.group, transports=transports, place=place(),
        )  # fmt: skip

    def bus(self, receive: Callable[[str, Message], None]) -> Bus:
        """This node's sockets; breaches that the bus itself finds are logged."""
        return Bus(
            node=self.node, keys=self.keys, allowed=self.allowed, insecure=self.insecure, receive=receive,
            refused=lambda peer, error: log.warning("%s: %s", peer, error),
        )  # fmt: skip


def revoked() -> Message:
    """What a peer would say that wants no more of us: it is never asked again."""
    return Reject(0, Cause.REFUSED.value, (REVOKED,))

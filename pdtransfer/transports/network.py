"""Where Mooncake's engines are reached, and which transports a node takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["auto", "shm", "mooncake"]
Protocol = Literal["tcp", "rdma"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Each engine takes two `ports`, [first, last]. `host` is what peers dial, a name or an IPv4 address; empty: this
    host's address on the way to the peer."""

    host: str = ""
    ports: tuple[int, int] = (21_000, 21_999)
    protocol: Protocol = "tcp"


NETWORK = Network()

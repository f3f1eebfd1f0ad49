"""Where Mooncake's engines are reached, and which transports a node takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from ..errors import TransportError
from ..limits import ENGINES_A_SESSION, ENGINES_MAX

Transport = Literal["auto", "shm", "mooncake"]
Protocol = Literal["tcp", "rdma"]

_ENGINES_MIN, _CORES_AN_ENGINE = 2, 4  # two are faster than one on two cores, too


def engines_for(cores: int | None = None) -> int:
    """How many engines a session has on a host of so many cores, by default this process's: each has one thread that
    sends or receives, and that alone is not as fast as a link may be."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(_ENGINES_MIN, min(ENGINES_A_SESSION, cores // _CORES_AN_ENGINE))


def engines_left(wanted: int, *, taken: int) -> int:
    """How many of them a session gets where this process has so many already: the fewer are left the fewer, so that
    sessions find one each for longer. Raises TransportError where none is left."""
    if taken >= ENGINES_MAX:
        raise TransportError(f"engines: {taken} of {ENGINES_MAX}, one at least for each session")
    return min(wanted, -(-ENGINES_A_SESSION * (ENGINES_MAX - taken) // ENGINES_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Each engine takes two `ports`, [first, last]. `host` is what peers dial, a name or an IPv4 address; empty: this
    host's address on the way to the peer. A session has `engines` of them on either side, or as few as the other takes,
    as there are left for this process, or ports for.
    """

    host: str = ""
    ports: tuple[int, int] = (21_000, 21_999)
    protocol: Protocol = "tcp"
    engines: int = field(default_factory=engines_for)


NETWORK = Network()

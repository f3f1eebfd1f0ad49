"""How many engines a session gets, and where they can be dialled."""

from __future__ import annotations

import os

from ...errors import ConfigError, TransportError
from ...limits import ENGINES_A_SESSION, ENGINES_MAX
from ..options import Network

REACH_KIND = "mooncake"  # of every library's Reach: this kind names engines by their ports

_ENGINES_MIN, _CORES_AN_ENGINE = 2, 4  # two are faster than one on two cores, too


def check_host(transport: str, host: str) -> None:
    """Raises ConfigError where engines cannot be dialled at this host, which peers are given."""
    if ":" in host:
        raise ConfigError(f"advertise = {host!r}: transport {transport} is reached by a name or an IPv4 address alone")


def engines_for(cores: int | None = None) -> int:
    """How many engines a session has by default on a host of this many cores, by default those of this process.

    An engine sends or receives in one thread, and one thread is slower than a fast link.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(_ENGINES_MIN, min(ENGINES_A_SESSION, cores // _CORES_AN_ENGINE))


def engines_left(network: Network, *, taken: int) -> int:
    """How many engines a new session gets where this process has this many already.

    The fewer are left, the fewer a session gets, so that more sessions find one each. Raises TransportError where none
    is left.
    """
    if taken >= ENGINES_MAX:
        raise TransportError(f"engines: {taken} of {ENGINES_MAX}, one at least for each session")
    return min(network.streams or engines_for(), -(-ENGINES_A_SESSION * (ENGINES_MAX - taken) // ENGINES_MAX))

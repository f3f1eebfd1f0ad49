"""What engines need of a host and of a process: libraries, an environment, and how many of them there may be."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

from ...environment import child_environment, pip_install
from ...errors import ConfigError, TransportError
from ...limits import ENGINES_A_SESSION, ENGINES_MAX
from ..options import Network

_ENGINES_MIN, _CORES_AN_ENGINE = 2, 4  # two are faster than one on two cores, too

# Connections of an engine to its peer: a session's together, and of one at least.
_LANES, _LANES_MIN = 8, 2

# Few log lines, and no wait that a session would not outlive.
_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}

_LIBRARIES = {  # and the Debian packages that have them
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


@cache
def why_not() -> str:
    """Why this host can have no engine, and the command that changes that; empty where it can."""
    try:
        found = find_spec("mooncake.engine") is not None
    except ImportError:  # the package is not there, or what it imports by itself is not
        found = False
    if not found:
        return f"mooncake is not installed, or not whole: {pip_install('mooncake')}"
    missing: list[str] = []
    for library, package in _LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return f"mooncake cannot be loaded: apt-get install -y {' '.join(missing)}" if missing else ""


def check_host(host: str) -> None:
    """Raises ConfigError where engines cannot be dialled at this host, which peers are given."""
    if ":" in host:
        raise ConfigError(f"advertise = {host!r}: transport mooncake is reached by a name or an IPv4 address alone")


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


def environment(network: Network, engines: int = 1) -> dict[str, str]:
    """The whole environment of a process of this many engines."""
    forced = {"MC_FORCE_TCP": "1"} if network.protocol == "tcp" else {}
    ports = {"MC_MIN_RPC_PORT": str(network.ports[0]), "MC_MAX_RPC_PORT": str(network.ports[1])}
    lanes = {"MC_TCP_LANES_PER_PEER": str(max(_LANES_MIN, _LANES // engines))}
    return {**_ENVIRONMENT, **lanes, **child_environment(), **forced, **ports}

"""What Mooncake's engine needs of a host and of a process: a wheel, libraries, and an environment."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...environment import child_environment, pip_install
from ...probe import Seen, ok, warn
from ..options import Network

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

_WHEELS = {  # wheels that provide the module `mooncake`, and what each is for
    "mooncake-transfer-engine-non-cuda": "TCP and RDMA",
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
}
_INSTALL = pip_install("mooncake")

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
        installed = find_spec("mooncake.engine") is not None
    except ImportError:  # the package is not there, or what it imports by itself is not
        installed = False
    if not installed:
        return f"mooncake is not installed, or not whole: {_INSTALL}"
    missing: list[str] = []
    for library, package in _LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return f"mooncake cannot be loaded: apt-get install -y {' '.join(missing)}" if missing else ""


def environment(network: Network, engines: int = 1) -> dict[str, str]:
    """The whole environment of a process of this many engines."""
    forced = {"MC_FORCE_TCP": "1"} if network.protocol == "tcp" else {}
    ports = {"MC_MIN_RPC_PORT": str(network.ports[0]), "MC_MAX_RPC_PORT": str(network.ports[1])}
    lanes = {"MC_TCP_LANES_PER_PEER": str(max(_LANES_MIN, _LANES // engines))}
    return {**_ENVIRONMENT, **lanes, **child_environment(), **forced, **ports}


def wheel(_root: Path) -> Seen:
    """Which wheel of Mooncake is installed, and whether it loads.

    It is imported in a process of its own, because a wrong wheel may crash the process.
    """
    from ..engines.probes import version_of, why_not_loaded

    present = [name for name in _WHEELS if version_of(name)]
    if not present:
        return warn("none: KV reaches arenas of this host alone", _INSTALL)
    wheels = ", ".join(f"{name} {version_of(name)} ({_WHEELS[name]})" for name in present)
    if len(present) > 1:
        return warn(f"{wheels}: these replace each other, keep one", f"pip uninstall {' '.join(present[1:])}")
    if reason := why_not():
        problem, _, mend = reason.rpartition(": ")
        return warn(f"{wheels}: {problem}", mend)
    try:
        why = why_not_loaded("from mooncake.engine import TransferEngine")
    except TimeoutError as error:
        return warn(f"{wheels} {error}", f"{sys.executable} -X importtime -c 'import mooncake.engine'")
    if why:
        return warn(f"{wheels} {why}", f"pip uninstall {present[0]}; {_INSTALL}")
    return ok(wheels)

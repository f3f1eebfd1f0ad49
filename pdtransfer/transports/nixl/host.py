"""What NIXL's agent needs of a host and of a process: a package, and an environment."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...environment import child_environment
from ...errors import ConfigError
from ...probe import Seen, ok, warn
from ..options import Network
from .driver import PACKAGES

# Its packages require torch, of which it uses nothing.
INSTALL = "pip install --no-deps nixl-cu12"

# Never shared memory: a peer's kernel may write with it what a dead process had mapped.
_TRANSPORTS = {"tcp": "tcp", "rdma": "ib"}

_ENVIRONMENT = {
    "UCX_HANDLE_ERRORS": "none",  # a process that crashes is to be dead at once, not frozen for a debugger
    "UCX_VFS_ENABLE": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_LEFT_OUT = {
    "NIXL_ETCD_ENDPOINTS",  # each agent would announce itself in that store, and look for its peers there
    "NIXL_ETCD_NAMESPACE",
    "UCX_TCP_PORT_RANGE",  # it would have the better of the port that an engine gives to UCX
}

RDMA_DEVICES = "/sys/class/infiniband"

_SIOCGIFADDR = 0x8915
_INTERFACE = struct.Struct("16s16x8x")
_ADDRESS_IN_REPLY = slice(20, 24)

_TRY = """
import sys
from importlib import import_module
nixl = import_module(sys.argv[1] + "._bindings")
sys.exit("UCX" not in nixl.nixlAgent("doctor", nixl.nixlAgentConfig()).getAvailPlugins() and "it has no UCX plugin")
"""


@cache
def why_not() -> str:
    """Why this host can have no agent, and the command that changes that; empty where it can."""
    return "" if any(find_spec(package) is not None for package in PACKAGES) else f"nixl is not installed: {INSTALL}"


def check(network: Network) -> None:
    """Raises ConfigError for RDMA on a host without a device, where UCX does not start."""
    if network.protocol == "rdma" and not (os.path.isdir(RDMA_DEVICES) and os.listdir(RDMA_DEVICES)):
        raise ConfigError(
            f"transport_protocol = 'rdma': transport nixl finds no device in {RDMA_DEVICES}: set tcp, or load a driver"
        )


def environment(network: Network, *, host: str) -> dict[str, str]:
    """The whole environment of a process whose peer is on the way to `host`, or that is dialled there itself.

    By itself UCX listens on every interface, and may dial its peer on one that only looks alike on both hosts. What
    UCX_NET_DEVICES says in this process's environment is kept.
    """
    device = interface_to(host) if network.protocol == "tcp" else ""
    devices = {"UCX_NET_DEVICES": device} if device else {}
    inherited = {name: value for name, value in child_environment().items() if name not in _LEFT_OUT}
    return {**_ENVIRONMENT, **devices, **inherited, "UCX_TLS": _TRANSPORTS[network.protocol]}


def interface_to(host: str) -> str:
    """The interface that this host sends by to an IPv4 address; empty where it is a name, or there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            socket.inet_aton(host)
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return ""
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, _INTERFACE.pack(name.encode()))
            except OSError:  # one without an address
                continue
            if reply[_ADDRESS_IN_REPLY] == address:
                return name
    return ""


def package(_root: Path) -> Seen:
    """Which package of NIXL is installed, and whether it loads, tried in a process of its own."""
    from ..engines.probes import version_of, why_not_loaded

    if why_not():
        return ok(f"not installed, and needed only for --transport nixl: {INSTALL}")
    present = [name for name in PACKAGES if version_of(name)]
    versions = (
        ", ".join(f"{name.replace('_', '-')} {version_of(name)}" for name in present) or "a package without a version"
    )
    try:
        why = why_not_loaded(_TRY, (present or PACKAGES)[0])
    except TimeoutError as error:
        why = str(error)
    return warn(f"{versions} {why}", INSTALL) if why else ok(f"{versions} (UCX)")

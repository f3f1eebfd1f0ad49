"""How many engines a session gets, and where they can be dialled."""

from __future__ import annotations

import os
import socket
import struct

from ...bus.keys import Address
from ...errors import ConfigError, TransportError
from ...limits import ENGINES_A_SESSION, ENGINES_MAX
from ...wire import Reach
from ..options import Network

_ADDRESS = struct.Struct(">Q")
_ADDRESS_END = 1 << 62

_ENGINES_MIN, _CORES_AN_ENGINE = 2, 4  # two are faster than one on two cores, too


def check_host(transport: str, network: Network) -> None:
    """Raises ConfigError where engines cannot be dialled at the host that peers are given, or that they know."""
    if ":" in network.host:
        raise ConfigError(
            f"advertise = {network.host!r}: transport {transport} is reached by a name or an IPv4 address alone: "
            "set one that peers dial"
        )
    if network.bind and not network.host and _only_ipv6(network.bind):
        raise ConfigError(
            f"bind = {network.bind!r}: transport {transport} is reached by IPv4 alone: bind an IPv4 address, or set "
            "advertise to a name or an IPv4 address of this host"
        )


def _only_ipv6(address: str) -> bool:
    bound = Address.parse(address)
    if bound.wildcard:
        return False
    try:
        answers = socket.getaddrinfo(bound.host, None, type=socket.SOCK_STREAM)
    except OSError:  # whoever binds it has the reason
        return False
    return all(family == socket.AF_INET6 for family, *_ in answers)


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


def packed_address(address: int) -> bytes:
    """The address of a GPU's memory in an engine's process, as Reach.hbm_handle has it."""
    return _ADDRESS.pack(address)


def hbm_address(reach: Reach) -> int:
    """The address of offset 0 of HBM components for an engine that writes; 0 where their rows land in the arena. Raises
    TransportError for one that a peer may not name."""
    if not reach.hbm_handle:
        return 0
    if len(reach.hbm_handle) != _ADDRESS.size:
        raise TransportError(f"hbm_handle: {len(reach.hbm_handle)} bytes, must be {_ADDRESS.size}")
    first: int = _ADDRESS.unpack(reach.hbm_handle)[0]
    if not reach.hbm_base < first <= _ADDRESS_END - reach.hbm_bytes:
        raise TransportError(f"hbm_handle: {reach.hbm_bytes} bytes of a GPU's memory cannot be at {first:#x}")
    return first - reach.hbm_base

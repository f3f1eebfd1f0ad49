"""The list of transports. A new one is a package beside `shm`, with a Transport in it, and one line here.

Where engines of a library write between hosts, it is a package beside `mooncake`, with a Library in it.

A program that embeds a node may `register` one of its own before it makes the node; both ends need it.

A Reach has what a writer needs to reach one arena. `transport` is the transport's name, and what the other fields mean
is the transport's own affair:

| transport | `host`                        | `address`                                               |
|-----------|-------------------------------|---------------------------------------------------------|
| shm       | boot id and network namespace | path of a Unix socket, or "@name" of an abstract one    |
| engines   | host:port of an engine        | further ports of that host, comma by comma, or empty    |
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..limits import TRANSPORTS_MAX
from ..wire.messages import TransportName
from .base import Transport
from .engines import EngineTransport
from .mooncake import MooncakeLibrary
from .nixl import NixlLibrary
from .options import Network
from .shm import ShmTransport

TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (  # "auto" takes the first that reaches a writer
        ShmTransport(),
        EngineTransport(MooncakeLibrary()),
        EngineTransport(NixlLibrary()),
    )
}


def register(transport: Transport) -> None:
    """Adds a transport behind those that are there. Raises ConfigError for a name that is taken or that the wire does
    not carry, and for more transports than one Hello names."""
    if transport.name in ("auto", *TRANSPORTS):
        raise ConfigError(f"transport {transport.name}: this name is taken")
    try:
        msgspec.convert(transport.name, TransportName)
    except msgspec.ValidationError:
        raise ConfigError(f"transport {transport.name!r}: the name must be 1 to 32 of a-z, 0-9, - and _") from None
    if len(TRANSPORTS) >= TRANSPORTS_MAX:
        raise ConfigError(f"transport {transport.name}: {len(TRANSPORTS)} are registered, the most is {TRANSPORTS_MAX}")
    TRANSPORTS[transport.name] = transport


def check(name: str, network: Network) -> None:
    """Raises ConfigError for a name that `--transport` does not accept, and for options under which every hand-off over
    that transport would fail. Auto has shared memory, which needs none."""
    check_name(name)
    if name != "auto":
        TRANSPORTS[name].check(network)


def check_name(name: str) -> None:
    """Raises ConfigError unless the name is one that `--transport` accepts."""
    if name != "auto" and name not in TRANSPORTS:
        raise ConfigError(f"transport = {name!r}: must be auto or one of {', '.join(TRANSPORTS)}")

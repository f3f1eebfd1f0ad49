"""The list of transports. A new one is a package beside `shm`, with a Transport in it, and one line here.

Where engines of a library write between hosts, it is a package beside `mooncake`, with a Library in it.

A program that embeds a node may `register` one of its own before it makes the node; both ends need it.

A Reach has what a writer needs to reach one arena. Version 1 of the protocol knows two kinds of Reach, and a transport
uses the fields of one of them. `transport` is the kind, `base` is where the owner has the arena mapped, and:

| kind       | `host`                        | `address`                                               |
|------------|-------------------------------|---------------------------------------------------------|
| "shm"      | boot id and network namespace | path of a Unix socket, or "@name" of an abstract one    |
| "mooncake" | host:port of an engine        | further ports of that host, comma by comma, or empty    |

`select` writes the name of any other transport before `host`, as in "NAME!host", and takes it away again.
"""

from __future__ import annotations

from ..errors import ConfigError
from .base import Transport
from .engines import EngineTransport
from .mooncake import MooncakeLibrary
from .nixl import NixlLibrary
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
    """Adds a transport behind those that are there. Raises ConfigError where its name is taken."""
    if transport.name in ("auto", *TRANSPORTS):
        raise ConfigError(f"transport {transport.name}: this name is taken")
    TRANSPORTS[transport.name] = transport


def check_name(name: str) -> None:
    """Raises ConfigError unless the name is one that `--transport` accepts."""
    if name != "auto" and name not in TRANSPORTS:
        raise ConfigError(f"transport = {name!r}: must be auto or one of {', '.join(TRANSPORTS)}")

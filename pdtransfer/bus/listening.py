"""Binds a listener's port before anything serves it: a conflict is reported at once, and the port stays reserved.

ZMQ gets the socket later (ZMQ_USE_FD). Until then connections wait in its backlog, and get no greeting.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import ExitStack

from ..errors import ConfigError, WorldError
from .keys import Address, address_of, check_exposure
from .limits import BusLimits
from .sockets import resolve


async def reserve(endpoint: str, *, keyed: bool, insecure: bool) -> socket.socket:
    """Listens on tcp://host:port (port 0: any, first-last: the first free one).

    Raises ConfigError for an endpoint that can never be bound, WorldError for a port in use.
    """
    address = Address.parse(endpoint)
    try:
        host = (await resolve(asyncio.get_running_loop(), address.host))[0]
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint!r}: host: {address.host} does not resolve: {error}") from None
    wanted = address_of(host, address.port_first)
    check_exposure(wanted, named=f"bind {wanted}", keyed=keyed, insecure=insecure)
    for port in range(address.port_first, address.port_last + 1):
        try:
            return _listening(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise ConfigError(f"endpoint {endpoint!r}: host: no interface of this host has {host}") from None
            raise WorldError(f"cannot bind {endpoint}: {os.strerror(error.errno or 0)}") from None
    ports = "the port is" if address.port_first == address.port_last else "all ports are"
    raise WorldError(f"cannot bind {endpoint}: {ports} in use")


def address_bound(listener: socket.socket) -> str:
    """Returns tcp://host:port of a listening socket."""
    host, port = listener.getsockname()[:2]
    return address_of(host, port)


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket as ZMQ makes it. `*` is every interface, of IPv4 and of IPv6 where the host has that."""
    with ExitStack() as undo:
        both = host == "*" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
        listener.bind(("::" if both else "0.0.0.0" if host == "*" else host, port))  # noqa: S104 (asked for by "*")
        listener.listen(BusLimits().backlog)
        undo.pop_all()
        return listener

"""What objects keep to themselves and tests ask for: here alone, so that a change of theirs changes one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # processes under test import no more than they need
    from pdtransfer.bus import Bus
    from pdtransfer.bus.connections import Connections
    from pdtransfer.client.clients import DecodeClient, PrefillClient


def node_of(client: DecodeClient | PrefillClient) -> Any:
    """The node below a client's thread."""
    return client._node


def core_of(client: DecodeClient | PrefillClient) -> Any:
    """The sessions of a client's node."""
    return client._node.core


def sessions_of(side: Any) -> dict[int, Any]:
    """A transport's sessions, of its arena or its writer."""
    return side._sessions


def connections_of(bus: Bus) -> list[Any]:
    """Every connection that peers have made to it, named or not."""
    return bus._connections._all()


def routes_of(listener: Bus | Connections, peer: str) -> list[bytes]:
    """Of the connections of a peer that has dialled; messages to it go to the last."""
    return [connection.route for connection in getattr(listener, "_connections", listener).all_of(peer)]


def audited(bus: Bus, peer: str = "") -> Any:
    """Looks for connections with too much unread; the TCP connection to a peer that was dialled."""
    bus._audit()
    return peer and dialled_by(bus)[peer]._tcp


def lines_of(bus: Bus) -> dict[int, Any]:
    """Its lines, by session."""
    return {line.session: line for line in sorted(bus._lines.of(), key=lambda line: line.session)}


def dialled_by(bus: Bus) -> dict[str, Any]:
    """What it dials, by endpoint."""
    return bus._dialled

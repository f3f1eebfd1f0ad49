"""Defences of peers that are known by several names, taken away."""

from __future__ import annotations

from pdtransfer.bus.connections import Connection, Connections
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.sessions import DecodeSessions

from . import Patch


def second_connection_supersedes_the_first(patch: Patch) -> None:
    """Each connection counts as a process of its own."""
    introduce = Connections.introduce

    def lone(self: Connections, connection: Connection, name: str, incarnation: int, now: float) -> None:
        introduce(self, connection, name, int.from_bytes(connection.route), now)

    patch(Connections, "introduce", lone)


def second_name_opens_a_session(patch: Patch) -> None:
    """A process has a session for each of its names."""
    patch(PrefillPeers, "_is_known", lambda self, peer, now: False)


def rooms_of_a_second_name_forgotten(patch: Patch) -> None:
    """Rooms that wait at a name go on waiting there when it turns out to be another peer's."""
    patch(DecodeSessions, "_peers_merged", lambda self, name, into, now: None)


def messages_go_to_the_first_connection(patch: Patch) -> None:
    """A peer is sent to where its first Hello came from, wherever it sends from now."""
    check = Connections.check

    def still(self: Connections, connection: Connection) -> bool:
        routes = self.routes_of(connection.name)
        moved = check(self, connection)
        self._routes[connection.name][:] = routes
        return moved

    patch(Connections, "check", still)

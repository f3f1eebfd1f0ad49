"""The listener's connections and the names that they own; no I/O, times are arguments in seconds.

A route is the id of a connection on the listener's ROUTER socket. A name belongs to the process whose Hello came last,
by all connections on which that process has sent Hello: it may know this node by several addresses. Messages to the
name go to the connection on which it last sent something else than Hello. Connections of an earlier process of the name
are superseded: their messages are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import RemoteProtocolError
from .limits import BusLimits
from .sockets import TcpConnection

ROUTE_MARK, ROUTE_RANDOM_BYTES = b"\1", 8  # an id assigned by the authenticator
_ROUTERS_MARK, _ROUTERS_BYTES = b"\0", 4  # an id assigned by the ROUTER


class TurnedAwayError(RemoteProtocolError):
    """The connection has no name or no place; this is not a breach. `reason` goes into the Reject."""

    def __init__(self, reason: str, field: str, text: str) -> None:
        super().__init__(field, text)
        self.reason = reason


HELLO_FIRST = "hello_first"
SUPERSEDED = "superseded"
FULL = "full"
TAKEN = "taken"
BREACH = "breach"


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of the listener. `user` is its CURVE key, empty without keys; `name` is empty until its Hello."""

    route: bytes
    user: str
    last_message_at: float
    name: str = ""
    incarnation: int = 0  # of its latest Hello
    superseded: bool = False
    departed: bool = False  # closed; its late messages belong to no peer
    muted_until: float = float("-inf")  # messages before this time are dropped
    next_reject_at: float = float("-inf")  # no second Reject is sent before this time
    costs: int = 0  # of what it has caused since costs_since, beyond messages that only peers with a name may send
    costs_since: float = float("-inf")
    ignored: int = 0  # messages since it was muted
    hostile: bool = False  # muted for what no peer does that only restarts or lags behind
    tcp: TcpConnection | None = None

    def mute(self, until: float, *, hostile: bool) -> None:
        """Drops its messages until then."""
        self.muted_until, self.ignored, self.hostile = until, 0, hostile

    def charge(self, cost: int, now: float, limits: BusLimits, *, hostile: bool = False) -> None:
        """Counts what it causes; mutes it where it causes too much. A Reject costs one, and so does a message that is
        turned away."""
        period_s = limits.mute_ms / 1e3
        if now - self.costs_since >= period_s:
            self.costs, self.costs_since = 0, now
        self.costs += cost
        if self.costs > limits.costs_max:
            self.mute(now + period_s, hostile=hostile)


class Connections:
    """The listener's bounded table. Unnamed connections are kept apart, so that they never evict named ones.

    Without `supersede` a name stays with its connection for as long as that stands: a later Hello for it is refused.
    """

    def __init__(self, limits: BusLimits, *, supersede: bool = True) -> None:
        self._limits, self._supersede = limits, supersede
        self._named: dict[bytes, Connection] = {}
        self._unnamed: dict[bytes, Connection] = {}
        self._owners: dict[str, list[Connection]] = {}  # by name, those of _named; messages to the name go to the last

    def __len__(self) -> int:
        return len(self._named) + len(self._unnamed)

    def find(self, route: bytes, user: str, now: float) -> Connection:
        """Returns the connection of a route; a new one where the route is unknown or belongs to another user now."""
        existing = self._named.get(route) or self._unnamed.get(route)
        if existing is not None and existing.user == user:
            return existing
        self.forget(route)
        connection = Connection(route, user, now)
        self._keep_unnamed(connection)
        return connection

    def introduce(self, connection: Connection, name: str, incarnation: int, now: float) -> None:
        """Handles a Hello: the connection gets `name`, beside others of the same process. Those of another process are
        superseded. Raises RemoteProtocolError.

        A superseded connection regains its name once the newer ones have been silent for stale_ms. Otherwise two
        processes with the same name by mistake would keep superseding each other.
        """
        route = connection.route
        if connection.name == name and not connection.superseded:
            self._demote_others(connection, name, incarnation)
            return
        if connection.name and not (connection.name == name and self._is_stale(name, now)):
            self.check(connection)
            raise RemoteProtocolError("Hello.identity.node", f"{name}, on a connection of {connection.name}")
        # A self-chosen id could be that of a closed connection, and would receive its messages.
        if not _is_given(route):
            raise RemoteProtocolError("routing id", f"{route[:16].hex()} was set by the dialler; it must not be")
        if not self._supersede and any(
            connection.tcp is not None and connection.tcp.is_open for connection in self.all_of(name)
        ):
            raise TurnedAwayError(TAKEN, "Hello.identity.node", f"{name} is connected already")
        self._demote_others(connection, name, incarnation)
        if len(self._named) >= self._limits.named_max:
            self._make_place(now)
        self._unnamed.pop(route, None)
        connection.name, connection.superseded, connection.last_message_at = name, False, now
        self._named[route] = connection
        self._owners.setdefault(name, []).insert(0, connection)

    def check(self, connection: Connection) -> bool:
        """The connection has sent something else than Hello: messages to its name go there from now on; returns whether
        they went elsewhere before. Raises TurnedAwayError unless it has a name, and no newer process has taken it."""
        if not connection.name:
            raise TurnedAwayError(HELLO_FIRST, "kind", "the first message of a connection must be Hello")
        if connection.superseded:
            text = f"{connection.name} has a newer connection: is another process run with this --node, or this key?"
            raise TurnedAwayError(SUPERSEDED, "connection", text)
        owners = self._owners[connection.name]
        if owners[-1] is connection:
            return False
        owners.remove(connection)
        owners.append(connection)
        return True

    def all_of(self, name: str) -> list[Connection]:
        """Returns all connections of a name; messages to it go to the last."""
        return list(self._owners.get(name, ()))

    def named(self, name: str) -> Connection | None:
        """Returns the connection to which messages to a name go."""
        return self._owners[name][-1] if name in self._owners else None

    @property
    def all_named(self) -> Iterator[Connection]:
        """The connections that own a name."""
        return iter(self._named.values())

    def forget(self, route: bytes) -> None:
        """Removes the connection, which is closed or must send Hello again. Ignores unknown routes."""
        self._unnamed.pop(route, None)
        connection = self._named.pop(route, None)
        if connection is not None:
            self._unroute(connection)

    def depart(self, route: bytes) -> None:
        """Marks the connection as closed. Its earlier messages may still be read, and its id is not reused."""
        connection = self._named.get(route) or self._unnamed.get(route)
        self.forget(route)
        if connection is not None:
            connection.name, connection.departed = "", True
            self._keep_unnamed(connection)

    def expel(self, stays: Callable[[str], bool]) -> list[Connection]:
        """Removes and returns the connections of users that `stays` does not accept."""
        removed = [connection for connection in self._all() if not stays(connection.user)]
        for connection in removed:
            self.forget(connection.route)
        return removed

    def count(self, route: bytes, byte_count: int) -> None:
        """Counts a further frame of a multi-frame message."""
        connection = self._named.get(route) or self._unnamed.get(route)
        if connection is not None and connection.tcp is not None:
            connection.tcp.count_frame(byte_count)

    @property
    def cookies(self) -> set[bytes]:
        """The cookies of all TCP connections. Two equal ones mean a reused descriptor: both are looked up again."""
        claims = Counter(connection.tcp.cookie for connection in self._all() if connection.tcp is not None)
        for connection in self._all():
            if connection.tcp is not None and claims[connection.tcp.cookie] > 1:
                connection.tcp = None
        return set(claims)

    def backlogged(self) -> list[Connection]:
        """Connections with too many unread bytes."""
        return [
            connection
            for connection in self._all()
            if connection.tcp is not None and connection.tcp.backlogged(self._limits)
        ]

    def _all(self) -> Iterator[Connection]:
        yield from self._named.values()
        yield from self._unnamed.values()

    def _is_stale(self, name: str, now: float) -> bool:
        return all(now - connection.last_message_at >= self._limits.stale_ms / 1e3 for connection in self.all_of(name))

    def _demote_others(self, connection: Connection, name: str, incarnation: int) -> None:
        """A process has said this name on the connection: supersedes those of other processes with it. Where its own
        process has too many, also the one that has been silent longest."""
        connection.incarnation, same = incarnation, 1
        for elder in sorted(self.all_of(name), key=lambda other: -other.last_message_at):
            if elder is not connection:
                same += elder.incarnation == incarnation
                if elder.incarnation != incarnation or same > self._limits.same_max:
                    del self._named[elder.route]
                    self._unroute(elder)
                    elder.superseded = True
                    self._keep_unnamed(elder)

    def _unroute(self, connection: Connection) -> None:
        owners = self._owners[connection.name]
        owners.remove(connection)
        if not owners:
            del self._owners[connection.name]

    def _keep_unnamed(self, connection: Connection) -> None:
        while len(self._unnamed) >= self._limits.unnamed_max:
            del self._unnamed[next(iter(self._unnamed))]
        self._unnamed[connection.route] = connection

    def _make_place(self, now: float) -> None:
        silent = min(self._named.values(), key=lambda connection: connection.last_message_at)
        if now - silent.last_message_at < self._limits.stale_ms / 1e3:
            text = f"{len(self._named)} peers are connected, the limit is {self._limits.named_max}"
            raise TurnedAwayError(FULL, "connections", text)
        self.forget(silent.route)


def _is_given(route: bytes) -> bool:
    """True if the id was assigned by the authenticator, or by the ROUTER (no keys, or a late answer)."""
    return (route[:1], len(route) - 1) in ((ROUTE_MARK, ROUTE_RANDOM_BYTES), (_ROUTERS_MARK, _ROUTERS_BYTES))

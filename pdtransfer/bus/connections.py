"""Who speaks on which connection of the listener; no I/O, times are arguments in seconds.

A route is the id under which the listener's ROUTER files a connection. A name belongs to the connection that said Hello
for it last, and to no other: what goes to a name goes there alone, what its older connections say is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import RemoteProtocolError
from .limits import BusLimits
from .wires import Wire

ROUTE_MARK, ROUTE_RANDOM_BYTES = b"\1", 8  # an id that the authenticator gave out
_ROUTERS_MARK, _ROUTERS_BYTES = b"\0", 4  # one that the ROUTER did


class TurnedAwayError(RemoteProtocolError):
    """No breach, but a connection without a name or a place; `reason` goes into the Reject."""

    def __init__(self, reason: str, field: str, text: str) -> None:
        super().__init__(field, text)
        self.reason = reason


HELLO_FIRST = "hello_first"
SUPERSEDED = "superseded"
FULL = "full"
BREACH = "breach"


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of the listener. `user` is its CURVE key, empty without keys; `name` is "" until its Hello."""

    route: bytes
    user: str
    heard: float
    name: str = ""
    superseded: bool = False
    departed: bool = False  # what is still read of it comes late, and is nobody's
    muted_until: float = float("-inf")  # nothing is read before
    told_until: float = float("-inf")  # no other Reject goes out before
    rejects: int = 0  # that it has earned since
    rejects_since: float = float("-inf")
    ignored: int = 0  # messages since it was muted
    wire: Wire | None = None

    def mute(self, until: float) -> None:
        """Nothing that it says is heard before."""
        self.muted_until, self.ignored = until, 0


class Connections:
    """The listener's table: bounded, nameless connections apart from named ones, which junk can never push out."""

    def __init__(self, limits: BusLimits) -> None:
        self._limits = limits
        self._named: dict[bytes, Connection] = {}
        self._unnamed: dict[bytes, Connection] = {}
        self._routes: dict[str, bytes] = {}  # by name; values are keys of _named

    def __len__(self) -> int:
        return len(self._named) + len(self._unnamed)

    def find(self, route: bytes, user: str, now: float) -> Connection:
        """The connection that a frame came on; a new one where the route is new, or has come to another user."""
        known = self._named.get(route) or self._unnamed.get(route)
        if known is not None and known.user == user:
            return known
        self.forget(route)
        connection = Connection(route, user, now)
        self._keep_unnamed(connection)
        return connection

    def introduce(self, connection: Connection, name: str, now: float) -> None:
        """Takes a Hello: binds `name` to the connection, superseding whichever had it. Raises RemoteProtocolError.

        A superseded connection gets its name back once the newer one has been silent for stale_ms: whoever it was, it
        is gone, and two processes under one name by mistake must not go on to disturb each other.
        """
        route = connection.route
        if connection.name == name and not connection.superseded:
            return
        if connection.name == name and self._is_stale(name, now):
            connection.superseded = False
        elif connection.name:
            self.check(connection)
            raise RemoteProtocolError("Hello.identity.node", f"{name}, this connection is {connection.name}'s")
        # An id of the peer's own choice could be that of a peer that has gone, and would get what is meant for it.
        if not _is_given(route):
            raise RemoteProtocolError("routing id", f"{route[:16].hex()} was chosen by the dialler, who must set none")
        elder = self._routes.get(name)
        if elder is not None:
            self._demote(elder)
        elif len(self._named) >= self._limits.named_max:
            self._make_place(now)
        self._unnamed.pop(route, None)
        connection.name, connection.heard = name, now
        self._named[route] = connection
        self._routes[name] = route

    def check(self, connection: Connection) -> None:
        """Raises TurnedAwayError unless the connection has said Hello and nobody after it has for the same name."""
        if not connection.name:
            raise TurnedAwayError(HELLO_FIRST, "kind", "the first message of a connection must be Hello")
        if connection.superseded:
            raise TurnedAwayError(SUPERSEDED, "connection", f"{connection.name} speaks over a newer one")

    def route_of(self, name: str) -> bytes | None:
        """Where to reach a name."""
        return self._routes.get(name)

    def rejected(self, route: bytes, now: float) -> None:
        """A Reject went to this connection. Who earns them in floods is not read for a while: refusing costs, too."""
        connection, period_s = self._named.get(route), self._limits.mute_ms / 1e3
        if connection is None:
            return
        if now - connection.rejects_since >= period_s:
            connection.rejects, connection.rejects_since = 0, now
        connection.rejects += 1
        if connection.rejects > self._limits.rejects_max:
            connection.mute(now + period_s)

    def forget(self, route: bytes) -> None:
        """The connection is gone, or must say Hello again; unknown routes are ignored."""
        self._unnamed.pop(route, None)
        gone = self._named.pop(route, None)
        if gone is not None:
            del self._routes[gone.name]

    def depart(self, route: bytes) -> None:
        """The connection has ended. What it said before may still be read; its id comes to nobody else."""
        gone = self._named.get(route) or self._unnamed.get(route)
        self.forget(route)
        if gone is not None:
            gone.name, gone.departed = "", True
            self._keep_unnamed(gone)

    def expel(self, stays: Callable[[str], bool]) -> list[Connection]:
        """Forgets the connections of users that do not stay, and returns them."""
        gone = [each for each in self._all() if not stays(each.user)]
        for connection in gone:
            self.forget(connection.route)
        return gone

    def count(self, route: bytes, byte_count: int) -> None:
        """One more frame of so many bytes was read of a message whose first one was heard."""
        connection = self._named.get(route) or self._unnamed.get(route)
        if connection is not None and connection.wire is not None:
            connection.wire.took(byte_count)

    @property
    def wires(self) -> set[bytes]:
        """The cookies of all wires. Where two have one, a descriptor has changed hands: both are looked for anew."""
        claims = Counter(each.wire.cookie for each in self._all() if each.wire is not None)
        for connection in self._all():
            if connection.wire is not None and claims[connection.wire.cookie] > 1:
                connection.wire = None
        return set(claims)

    def swamped(self) -> list[Connection]:
        """Those on whose wires too much waits to be read."""
        return [each for each in self._all() if each.wire is not None and each.wire.swamped(self._limits)]

    def _all(self) -> Iterator[Connection]:
        yield from self._named.values()
        yield from self._unnamed.values()

    def _is_stale(self, name: str, now: float) -> bool:
        route = self._routes.get(name)
        return route is None or now - self._named[route].heard >= self._limits.stale_ms / 1e3

    def _demote(self, route: bytes) -> None:
        elder = self._named.pop(route)
        elder.superseded = True
        self._keep_unnamed(elder)

    def _keep_unnamed(self, connection: Connection) -> None:
        while len(self._unnamed) >= self._limits.unnamed_max:
            del self._unnamed[next(iter(self._unnamed))]
        self._unnamed[connection.route] = connection

    def _make_place(self, now: float) -> None:
        silent = min(self._named.values(), key=lambda connection: connection.heard)
        if now - silent.heard < self._limits.stale_ms / 1e3:
            text = f"{len(self._named)} peers are connected, the limit is {self._limits.named_max}"
            raise TurnedAwayError(FULL, "connections", text)
        self.forget(silent.route)


def _is_given(route: bytes) -> bool:
    """Whether a connection has its id from the authenticator or, where there is none, or it was late, the ROUTER."""
    return (route[:1], len(route) - 1) in ((ROUTE_MARK, ROUTE_RANDOM_BYTES), (_ROUTERS_MARK, _ROUTERS_BYTES))

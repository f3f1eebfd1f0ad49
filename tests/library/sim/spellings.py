"""A world in which a process has several names: who dials has a connection for each name that it dials. A listener's
table of connections is the bus's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdtransfer.bus.connections import HELLO_FIRST, Connections, TurnedAwayError
from pdtransfer.bus.limits import BusLimits
from pdtransfer.wire import Hello, Message, Reject

from .network import Network, decode

if TYPE_CHECKING:
    from .process import Process
    from .world import World

_MARK = "#"


def plain(name: str) -> str:
    """The process that a name leads to."""
    return name.partition(_MARK)[0]


def spell(world: World, name: str) -> str:
    """One of the names of a process."""
    number = world.rng.randrange(world.profile.spellings) if world.profile.spellings > 1 else 0
    return f"{name}{_MARK}{number}" if number else name


@dataclass(frozen=True, slots=True)
class Way:
    """A connection: from one life of a process to one of another, by the name that it has dialled."""

    dialler: str
    life: int
    name: str
    listener: str
    listener_life: int


class SpelledNetwork(Network):
    """Carries frames by connections. A connection ends with either process."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._tables: dict[tuple[str, int], Connections] = {}  # of each life of a listener
        self._routes: dict[Way, bytes] = {}
        self._ways: dict[bytes, Way] = {}
        self._hellos: dict[tuple[str, int, str], Hello] = {}  # the latest of each life to each name
        self._greeting: Way | None = None  # whose Hello is being answered

    def send(self, source: Process, target: str, message: Message, way: object = None) -> None:
        listener = self.world.processes[plain(target)]
        if way is None and self._dials(source.name, listener.name):
            way = Way(source.name, source.life, target, listener.name, listener.life)
            if isinstance(message, Hello):
                self._hellos[source.name, source.life, target] = message
        elif way is None and (way := self._back(source, target)) is None:
            return
        super().send(source, plain(target), message, way)

    def deliver(self, process: Process, source: str, frame: bytes, way: object) -> None:
        assert isinstance(way, Way)
        message = decode(frame)
        if process.name == way.dialler:
            if process.life != way.life:
                return
            hello = self._hellos.get((way.dialler, way.life, way.name))
            if isinstance(message, Reject) and message.reason == HELLO_FIRST and hello is not None:
                self.send(process, way.name, hello)
            else:
                process.deliver(way.name, message)
        elif process.life == way.listener_life and self._lives(way):
            self._listen(process, message, way)

    def _listen(self, process: Process, message: Message, way: Way) -> None:
        now, table = self.world.now, self._table(process)
        connection = table.find(self._route(way), "", now)
        try:
            if isinstance(message, Hello):
                table.introduce(connection, way.dialler, message.identity.incarnation, now)
            else:
                table.check(connection)
        except TurnedAwayError as error:
            self.world.seen[f"connections {error.reason}"] += 1
            if now >= connection.next_reject_at:
                connection.next_reject_at = now + 1.0
                self.send(process, way.dialler, Reject(0, error.reason, (str(error),)), way)
            return
        connection.last_message_at = now
        self.world.seen["messages by a second name"] += way.name != way.listener
        self._greeting = way if isinstance(message, Hello) else None
        process.deliver(way.dialler, message)
        self._greeting = None

    def _back(self, source: Process, target: str) -> Way | None:
        """The connection by which a listener reaches who has dialled it."""
        if self._greeting is not None and (self._greeting.listener, self._greeting.dialler) == (source.name, target):
            return self._greeting
        table = self._table(source)
        while (connection := table.named(target)) is not None:
            if self._lives(way := self._ways[connection.route]):
                return way
            table.depart(connection.route)
        return None

    def _lives(self, way: Way) -> bool:
        dialler = self.world.processes[way.dialler]
        return dialler.life == way.life and not dialler.dead

    def _table(self, process: Process) -> Connections:
        return self._tables.setdefault((process.name, process.life), Connections(BusLimits()))

    def _route(self, way: Way) -> bytes:
        route = self._routes.setdefault(way, b"\0" + len(self._routes).to_bytes(4))
        self._ways[route] = way
        return route

    def _dials(self, source: str, target: str) -> bool:
        """A router dials both, decode dials prefill."""
        world = self.world
        return source in world.routers or (source in world.decodes and target in world.prefills)

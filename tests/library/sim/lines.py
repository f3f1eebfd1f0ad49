"""The lines of the simulated world: sockets of one host beside the network, under the very code that a bus has.

A socket's kernel holds a bounded number of bytes of each direction, and takes a part of a frame where no more fits. It
delivers at once and in order, and its reader comes late, or not before it thaws. One direction may end alone. A child
that an engine has forked may keep a socket: closing it is no end then. A peer may stop reading a line and say nothing.
"""

from __future__ import annotations

import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdtransfer.bus.limits import BusLimits
from pdtransfer.bus.line import OPENING, SessionLine
from pdtransfer.bus.lines import SessionLines
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import Landed, Message, decode, encode

if TYPE_CHECKING:
    from .process import Process
    from .world import World

NOTICED_S = 0.5  # the end of a line reaches a process that runs within this time


class SimSocket:
    """One end. `held`: a forked child has it too, and reads nothing."""

    def __init__(self, owner: Process, *, queue_bytes: int) -> None:
        self.owner, self._life, self._queue_bytes = owner, owner.life, queue_bytes
        self.peer: SimSocket = self
        self.held = self.closed = self.forgotten = False
        self.receives = self.sends = True  # whether this direction has not ended
        self.unread = bytearray()  # that the peer has sent
        self.line: SimLine | None = None
        self.readers: list[Callable[[], None]] = []
        self.writers: list[Callable[[], None]] = []

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def send(self, content: bytes, _: int = 0) -> int:
        peer, world = self.peer, self.owner.world
        if self.closed or not self.sends or not peer.receives:
            raise BrokenPipeError
        room = self._queue_bytes - len(peer.unread)
        if room <= 0:
            world.seen["lines that were full"] += 1
            raise BlockingIOError
        world.seen["frames that a line took a part of"] += room < len(content)
        peer.unread += content[:room]
        peer.wake()
        return min(room, len(content))

    def recv(self, byte_count: int) -> bytes:
        if self.forgotten:
            raise BlockingIOError
        received = bytes(self.unread[:byte_count])
        del self.unread[:byte_count]
        if received:
            self.peer.wake_writer()
        elif self.receives and self.peer.sends and not self.closed:
            raise BlockingIOError
        return received

    def queued(self, what: int) -> int:
        if what == termios.FIONREAD:
            return 0 if self.forgotten else len(self.unread)
        return len(self.peer.unread)

    def shutdown(self, _: int = 0) -> None:
        """Both directions end, whoever else has this socket."""
        if self.closed:
            raise OSError
        self.sends = self.receives = False
        self.peer.wake()
        self.peer.wake_writer()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.held:
            self.sends = self.receives = False
            self.peer.wake()
        elif self.sends:
            self.owner.world.at(NOTICED_S, self._check_ended)

    def end_sending(self) -> None:
        """Its own direction ends, and the other stands."""
        self.sends = False
        self.peer.wake()
        self.owner.world.at(NOTICED_S, self._check_ended)

    def forget(self) -> None:
        """Its process reads it no more and says nothing, as one that closes a line that a child of its holds."""
        self.closed = self.held = self.forgotten = True

    def wake(self) -> None:
        """There is something to read, or the end."""
        self._call(self.readers, lambda: bool(self.unread) or not (self.receives and self.peer.sends))

    def wake_writer(self) -> None:
        self._call(self.writers, lambda: len(self.peer.unread) < self._queue_bytes or not self.peer.receives)

    def _call(self, calls: list[Callable[[], None]], due: Callable[[], bool]) -> None:
        """In a turn of its own process, which comes soon, late, or never."""
        world = self.owner.world

        def turn() -> None:
            if not self.closed and calls and due():
                calls[0]()
                self._call(calls, due)

        if not self.closed and calls and due():
            self.owner.act_in(self._life, world.rng.expovariate(1.0 / world.profile.line_delay), turn)

    def _check_ended(self) -> None:
        """A line that one side has ended is open for nobody."""
        owner = self.peer.owner
        if not (self.peer.closed or owner.dead or owner.disturbed):
            self.owner.fail(f"has ended a line that {owner.name} keeps open")


class _Loop:
    """What a line asks of an event loop, in the turns of one life of a process."""

    def __init__(self, process: Process) -> None:
        self._process, self._life = process, process.life

    def time(self) -> float:
        return self._process.clock

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._process.act_in(self._life, 0.0, lambda: call(*arguments))

    def add_reader(self, socket: SimSocket, call: Callable[[], None]) -> None:
        socket.readers[:] = [call]
        socket.wake()

    def remove_reader(self, socket: SimSocket) -> None:
        socket.readers.clear()

    def add_writer(self, socket: SimSocket, call: Callable[[], None]) -> None:
        socket.writers[:] = [call]
        socket.wake_writer()

    def remove_writer(self, socket: SimSocket) -> None:
        socket.writers.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context["exception"]


class SimLine(SessionLine):
    """A line over a socket of this world."""

    _socket: Any

    def __init__(self, socket: Any, **how: Any) -> None:
        super().__init__(socket, **how)
        socket.line = self

    @property
    def received(self) -> bytes:
        return bytes(self._received)

    def _queued(self, what: int) -> int:
        return self._socket.queued(what)


class ProcessLines:
    """The lines of one life of a process, and their owner, as a bus is one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._sockets: dict[int, SimSocket] = {}
        self._lines = SessionLines(
            self, lines_max=64, limits=BusLimits(line_bytes_max=process.world.profile.line_bytes),
            loop=_Loop(process),  # type: ignore[arg-type]
            line_type=SimLine,
        )  # fmt: skip
        self.detach, self.read, self.end = self._lines.detach, self._lines.read, self._lines.end

    def send(self, peer: str, message: Message) -> bool:
        sent = self._lines.send(peer, message, encode(message))
        if sent:
            self._process.world.seen["messages by a line"] += 1
            self._process.world.log(f"{self._process.name} -> {peer} by a line {message}")
        return sent

    def attach(self, peer: str, session: int, socket: SimSocket, *, greeted: bool) -> None:
        self._sockets[session] = socket
        self._lines.attach(peer, session, socket, greeted=greeted)  # type: ignore[arg-type]

    def send_frame(self, peer: str, frame: bytes) -> bool:
        """As LineOwner: what a line has begun goes by the network."""
        self._process.world.seen["frames that a line had begun when it ended"] += 1
        self._process.world.network.send(self._process, peer, decode(frame))
        return True

    def received_message(self, peer: str, message: Message) -> None:
        self._process.world.log(f"{self._process.name} reads {type(message).__name__} of {peer} from its line")
        self._process.receive(peer, message)

    def refused_message(self, peer: str, error: RemoteProtocolError) -> None:
        self._process.fail(f"accuses {peer}, whose line it reads: {error}")

    @property
    def sockets(self) -> list[SimSocket]:
        return [socket for socket in self._sockets.values() if not socket.closed]

    def die(self, *, held: bool) -> None:
        """Its process is gone; a child that it forked may hold every socket."""
        for socket in self.sockets:
            if held or socket.held:
                socket.forget()
            else:
                socket.close()

    def landed(self, session: int) -> set[int]:
        """Grants of which Landed lies in the session's line, whole and unread."""
        found: set[int] = set()
        socket = self._sockets.get(session)
        if socket is None or socket.forgotten or socket.closed or socket.line is None:
            return found
        content = socket.line.received + bytes(socket.unread)
        while len(content) >= 4 and len(content) >= (end := 4 + int.from_bytes(content[:4], "little")):
            message = decode(content[4:end])
            if isinstance(message, Landed):
                found.add(message.grant)
            content = content[end:]
        return found


def join(writer: Process, owner: Process, session: int, known: Callable[[], bool]) -> None:
    """The connection of a hand-over stays as a line; `known` returns whether decode has the session still, when it
    reads the opening."""
    world = writer.world
    ends = [SimSocket(process, queue_bytes=world.profile.line_queue) for process in (writer, owner)]
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    for end in ends:
        end.held = world.rng.random() < world.profile.line_forks
    writer.lines.attach(owner.name, session, ends[0], greeted=False)

    def opened() -> None:
        if ends[1].recv(len(OPENING)) == OPENING and known():
            owner.lines.attach(writer.name, session, ends[1], greeted=True)
            world.seen["lines"] += 1
        else:
            ends[1].shutdown()
            ends[1].close()

    owner.later(world.rng.expovariate(1.0 / world.profile.line_delay), opened)


def damage(world: World) -> None:
    """One line of somebody's: a direction of it ends, or a process forgets it."""
    sockets = [socket for process in world.processes.values() for socket in process.lines.sockets]
    if not sockets or world.healed:
        return
    socket = world.rng.choice(sockets)
    if world.rng.random() < 0.3:
        world.log(f"{socket.owner.name} ends one direction of its line with {socket.peer.owner.name}")
        world.seen["lines that end one way"] += 1
        socket.end_sending()
    else:
        world.log(f"{socket.owner.name} forgets its line with {socket.peer.owner.name}")
        world.seen["lines that nobody reads"] += 1
        socket.forget()

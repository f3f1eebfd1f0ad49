"""Both ends of the Unix socket over which an arena's descriptor goes to a peer that sends the session's token.

The listener runs on the loop and never blocks it. A connection sends one short request within a short time, and behind
the reply perhaps the opening of a line. Then it is the session's line from there on. Where there are too many
connections, the oldest is closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...bus.line import OPENING
from ...disconnect import disconnect
from ...errors import TransportError
from ...wire import Reach
from ..options import KeepLine

MAGIC = b"pdt-shm1"
REQUEST = struct.Struct("<8sQ32s")  # magic, session, token
REPLY = struct.Struct("<8sQ")  # magic, bytes of the arena; the descriptor comes with it
_NONE_LEFT = REPLY.pack(MAGIC, 0)  # no descriptor was left to hand over: the token stays valid
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_INT = struct.Struct("i")
PATH_BYTES_MAX = 107
_NAME = re.compile(r"@pdtransfer-[0-9a-f]{16}|(?:/[^\0]*)?/arena-[0-9a-f]{16}")
_RETRY_SECONDS = 0.01
TOKEN_BYTES = 32

Give = Callable[[int, bytes], int | None]
"""Of (session, token) the descriptor, which the listener sends and closes, or None to refuse. Raises OSError where the
process has none left."""

log = logging.getLogger(__name__)


def host() -> str:
    """The kernel that this process runs on, and its network namespace: Reach.host of shared memory.

    On one kernel a socket in the file system connects processes that see its file, an abstract one those of a network
    namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    timer: asyncio.TimerHandle
    shown: bytearray = field(default_factory=bytearray)
    given: int | None = None  # the session whose arena it has got


class HandoverListener:
    """Hands descriptors over on `address`, until close. Make it on the loop's thread.

    `directory` is made with mode 0700 and must be private to this user. None binds in the abstract namespace, which
    every process of the network namespace sees. Peers of users that are not `admitted` are refused, whatever they send.
    """

    def __init__(
        self,
        give: Give,
        *,
        byte_count: int,
        directory: Path | None,
        keep_line: KeepLine | None = None,
        connections_max: int = 64,
        seconds: float = 2.0,
    ) -> None:
        self._give, self._byte_count, self._keep_line, self.seconds = give, byte_count, keep_line, seconds
        self._connections_max = connections_max
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._resume: asyncio.TimerHandle | None = None
        self._short = False  # of descriptors to accept with
        self._socket, self._path = _bound(directory)
        self.address = str(self._path) if self._path else "@" + self._socket.getsockname()[1:].decode()
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(self._connections_max):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or gone before it was accepted
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._short:
                    self._short = True
                    log.warning("writers wait for the arena: %s", error.strerror)
                self._pause()
                return
            self._short = False
            accepted.setblocking(False)
            if _uid_of(accepted) not in admitted():
                disconnect(accepted)
                continue
            if len(self._connections) >= self._connections_max:
                self._drop(next(iter(self._connections)))
            number = accepted.fileno()
            timer = self._loop.call_later(self.seconds, self._drop, number)
            self._connections[number] = _Connection(accepted, timer)
            self._loop.add_reader(number, self._read, number)

    def _pause(self) -> None:
        """Stops accepting for a moment: a socket that stays readable would keep the loop busy."""
        self._loop.remove_reader(self._socket)
        self._resume = self._loop.call_later(0.1, self._loop.add_reader, self._socket, self._accept)

    def _read(self, number: int) -> None:
        connection = self._connections[number]
        wanted = REQUEST.size if connection.given is None else len(OPENING)
        try:
            shown = connection.socket.recv(wanted - len(connection.shown) + (connection.given is None))
        except BlockingIOError:
            return
        except OSError:
            shown = b""
        connection.shown += shown
        if shown and len(connection.shown) < wanted:
            return
        if connection.given is not None:
            self._keep(number, connection, connection.given)
            return
        if len(connection.shown) == wanted and self._answer(connection) and self._keep_line is not None:
            connection.shown.clear()
            return
        self._drop(number)

    def _keep(self, number: int, connection: _Connection, session: int) -> None:
        if bytes(connection.shown) != OPENING or self._keep_line is None:
            self._drop(number)
            return
        with ExitStack() as undo:
            line = self._release(number)
            undo.callback(disconnect, line)
            self._keep_line(session, line)
            undo.pop_all()

    def _answer(self, connection: _Connection) -> bool:
        """True if it has the descriptor now."""
        magic, session, token = REQUEST.unpack(connection.shown)
        if magic != MAGIC:
            return False
        try:
            fd = self._give(session, token)
        except OSError as error:
            log.warning("no descriptor of the arena for the writer of session %#x: %s", session, error.strerror)
            with suppress(OSError):  # the writer has left
                connection.socket.send(_NONE_LEFT)
            return False
        if fd is None:
            return False
        try:
            # The socket's buffer is empty, so that this never waits.
            socket.send_fds(connection.socket, [REPLY.pack(MAGIC, self._byte_count)], [fd])
        except OSError:
            return False  # the writer has left: once our copy is closed, no process has the descriptor
        finally:
            os.close(fd)
        connection.given = session
        return True

    def _drop(self, number: int) -> None:
        disconnect(self._release(number))

    def _release(self, number: int) -> socket.socket:
        connection = self._connections.pop(number)
        connection.timer.cancel()
        self._loop.remove_reader(number)
        return connection.socket

    def close(self) -> None:
        """Closes all connections and removes the socket; idempotent."""
        for number in list(self._connections):
            self._drop(number)
        if self._resume is not None:
            self._resume.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._refuse_waiting()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _refuse_waiting(self) -> None:
        """Ends the listener, and then the connections that wait in its backlog."""
        self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            while True:
                disconnect(self._socket.accept()[0])
        self._socket.close()


def _bound(directory: Path | None) -> tuple[socket.socket, Path | None]:
    """A listening socket, and its path unless it is abstract. Raises TransportError."""
    name = secrets.token_hex(8)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if directory is None:
            listener.bind(f"\0pdtransfer-{name}")
            listener.listen(128)
            return listener, None
        _check_private(directory)
        path, aside = directory / f"arena-{name}", directory / f".{name}"
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise TransportError(f"socket {path}: {len(os.fsencode(path))} bytes, a path has {PATH_BYTES_MAX} at most")
        _sweep(directory)
        listener.bind(str(aside))
        listener.listen(128)
        aside.rename(path)  # only now: a sweep removes sockets that do not listen
    except OSError as error:
        listener.close()
        raise TransportError(f"socket in {directory or 'the abstract namespace'}: {error.strerror}") from None
    except TransportError:
        listener.close()
        raise
    return listener, path


def _check_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        actual = f"mode {stat.filemode(status.st_mode)}, owner {status.st_uid}"
        raise TransportError(f"socket directory {directory}: {actual}; it must be drwx------, owner {os.geteuid()}")


def _sweep(directory: Path) -> None:
    """Removes the sockets that killed processes have left behind."""
    for path in directory.glob("arena-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # busy, or not a socket


def admitted() -> frozenset[int]:
    """The users whose processes are trusted: root, and that of this one."""
    return frozenset((0, os.geteuid()))


def _uid_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


async def receive(reach: Reach, session: int, *, seconds: float, keep_line: KeepLine | None = None) -> int:
    """Receives the arena's descriptor, which the caller closes. Raises TransportError, also after `seconds`.

    The token is sent only to an owner whose user is `admitted`. `keep_line` takes the connection over, which is closed
    without it.
    """
    _check_reachable(reach)
    try:
        with ExitStack() as undo:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(disconnect, peer)
            async with asyncio.timeout(seconds):
                await _connect(peer, reach.address)
                if (uid := _uid_of(peer)) not in admitted():
                    raise TransportError(f"{reach.address} belongs to user {uid}, not to one of {sorted(admitted())}")
                peer.sendall(REQUEST.pack(MAGIC, session, reach.token))
                fd = await _answer(peer, reach)
            undo.callback(os.close, fd)
            if keep_line is None:
                disconnect(peer)
            else:
                keep_line(session, peer)
            undo.pop_all()
            return fd
    except TimeoutError:
        raise TransportError(f"{reach.address}: no answer within {seconds:g} s") from None
    except OSError as error:
        hint = "; containers must share the directory" if isinstance(error, FileNotFoundError) else ""
        raise TransportError(f"{reach.address}: {error.strerror}{hint}") from None


def _check_reachable(reach: Reach) -> None:
    own_host, (boot, _, namespace) = host().partition(" "), reach.host.partition(" ")
    if boot != own_host[0]:
        raise TransportError(f"the arena is on another host: its boot id is {boot!r}, here it is {own_host[0]!r}")
    if reach.address.startswith("@") and namespace != own_host[2]:
        raise TransportError(f"{reach.address}: network namespace {namespace!r}, here it is {own_host[2]!r}")
    # A peer chose this address: it must not lead to the socket of another program.
    if not _NAME.fullmatch(reach.address):
        raise TransportError(f"address {reach.address!r} must be /.../arena-NUMBER or @pdtransfer-NUMBER, in hex")
    if len(os.fsencode(reach.address)) > PATH_BYTES_MAX:
        raise TransportError(f"address {reach.address!r} is longer than {PATH_BYTES_MAX} bytes")
    if len(reach.token) != TOKEN_BYTES:
        raise TransportError(f"token: {len(reach.token)} bytes, not {TOKEN_BYTES}")


async def _connect(peer: socket.socket, address: str) -> None:
    with _found(address) as name:
        while True:
            try:
                peer.connect(name)
            except BlockingIOError:  # its backlog is full
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return


@contextmanager
def _found(address: str) -> Generator[str]:
    """The name to connect to: that of the socket itself, never of what a symbolic link leads to."""
    if address.startswith("@"):
        yield "\0" + address[1:]
        return
    place = os.open(address, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise TransportError(f"{address} is not a socket")
        yield f"/proc/self/fd/{place}"
    finally:
        os.close(place)


async def _answer(peer: socket.socket, reach: Reach) -> int:
    """The one descriptor that comes with a complete and correct reply; any others are closed."""
    await readable(peer)
    # One message on an empty stream arrives in one piece. socket.recv_fds cannot set the flag: without it a child that
    # is started just now would keep the arena and its lock.
    reply, ancillary, flags, _ = peer.recvmsg(REPLY.size, socket.CMSG_SPACE(4 * _INT.size), socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd for *_, payload in ancillary for (fd,) in _INT.iter_unpack(payload[: len(payload) // _INT.size * _INT.size])
    ]
    right = reply == REPLY.pack(MAGIC, reach.arena_bytes) and len(fds) == 1 and not flags & socket.MSG_CTRUNC
    if right:
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not reply:
        raise TransportError(f"{reach.address}: the arena's owner refused the token")
    if reply == _NONE_LEFT:
        raise TransportError(f"{reach.address}: the arena's owner has no descriptor left")
    if flags & socket.MSG_CTRUNC and not fds:  # one has place in the buffer: it could not be installed
        raise TransportError(f"{reach.address}: this process has no descriptor left for the arena")
    content = f"{len(reply)} bytes {reply.hex()} with {len(fds)} descriptors"
    raise TransportError(f"{reach.address}: an answer of {content}, for an arena of {reach.arena_bytes} bytes")


async def readable(peer: socket.socket) -> None:
    """Waits until the socket has something to read, or has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(peer, set_ready)
    try:
        await ready
    finally:
        loop.remove_reader(peer)

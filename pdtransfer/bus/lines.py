"""All lines of a bus: which messages go by them, and what comes by them before what comes by ZMQ.

It uses neither ZMQ nor a real socket: the simulator runs the same code.
"""

from __future__ import annotations

import asyncio
import logging
import socket as unix
from typing import Protocol, TypeAlias

from ..disconnect import disconnect
from ..errors import RemoteProtocolError
from ..wire import Goodbye, Message, Reject, decode
from .limits import BusLimits
from .line import GRANT_MESSAGES, SessionLine

log = logging.getLogger(__name__)


Process: TypeAlias = str | int
"""What tells one process of a peer from another: the peer's name, or the incarnation that it has told."""


class LineOwner(Protocol):
    """A bus, as its lines see it."""

    def send_frame(self, peer: str, frame: bytes) -> bool:
        """Sends a frame by ZMQ; returns whether it was queued."""
        ...

    def received_message(self, peer: str, message: Message) -> None:
        """Takes a message of a peer."""
        ...

    def refused_message(self, peer: str, error: RemoteProtocolError) -> None:
        """Reports a breach of a peer's."""
        ...


class SessionLines:
    """The lines of one bus, at most `lines_max`."""

    def __init__(
        self,
        owner: LineOwner,
        *,
        lines_max: int,
        limits: BusLimits,
        loop: asyncio.AbstractEventLoop,
        line_type: type[SessionLine] = SessionLine,
    ) -> None:
        self._owner, self._lines_max, self._limits, self._loop = owner, lines_max, limits, loop
        self._line_type = line_type
        self._lines: dict[int, SessionLine] = {}  # by session
        self._processes: dict[Process, dict[int, SessionLine]] = {}  # the same, by the process at the other end

    def attach(
        self, peer: str, session: int, socket: unix.socket, *, greeted: bool, process: Process | None = None
    ) -> None:
        """Takes over a socket as the line of a session with this peer, until its end. `greeted` as SessionLine has it.
        `process`: which one it is, where its peer has several names. Beyond `lines_max`, and on an error, the socket is
        closed."""
        self.detach(session)
        if len(self._lines) >= self._lines_max:
            disconnect(socket)
            return
        try:
            line = self._line_type(
                socket, peer=peer, process=peer if process is None else process, session=session, greeted=greeted,
                take=self._on_frame, ended=self._on_end, limits=self._limits, loop=self._loop,
            )  # fmt: skip
        except OSError as error:
            log.warning("session %#x has no line, and its messages go by ZMQ: %s", session, error.strerror)
        else:
            self._lines[session] = self._processes.setdefault(line.process, {})[session] = line

    def detach(self, session: int) -> None:
        """Closes the line of a session: its messages go by ZMQ from now on. Idempotent."""
        if (line := self._lines.get(session)) is not None:
            self._drop(line)

    def end(self, peer: str | None = None) -> None:
        """Closes every line with this peer, or with every peer."""
        for line in list(self._lines.values()):
            if peer in (None, line.peer):
                self._drop(line)

    def send(self, peer: str, message: Message, frame: bytes) -> bool:
        """True if the message, encoded as `frame`, has gone by a line. What ends a session, or all of them, ends their
        lines first."""
        if isinstance(message, GRANT_MESSAGES):
            line = self._lines.get(message.session)
            return line is not None and line.peer == peer and line.send(frame)
        if type(message) is Reject:  # what still comes by the session's line would cost more Rejects
            if (line := self._lines.get(message.session)) is not None and line.peer == peer:
                self._drop(line)
        elif type(message) is Goodbye:
            self.end(peer)
        return False

    def read(self, process: Process | None = None) -> None:
        """Receives what this process, or every one, has sent by lines until now. It counts before what comes by ZMQ,
        and before the time since the peer was last seen."""
        for line in self.of(process):
            line.read_now()

    def of(self, process: Process | None = None) -> list[SessionLine]:
        """The lines with this process, or with every one."""
        return list((self._lines if process is None else self._processes.get(process, {})).values())

    def _on_frame(self, line: SessionLine, frame: bytes) -> None:
        try:
            message = decode(frame)
            if not isinstance(message, GRANT_MESSAGES):
                raise RemoteProtocolError("kind", f"{type(message).__name__}, which no line carries")
            if message.session != line.session:
                text = f"{message.session:#x}, on the line of {line.session:#x}"
                raise RemoteProtocolError(f"{type(message).__name__}.session", text)
        except RemoteProtocolError as error:
            self._on_end(line, error)
            return
        self._owner.received_message(line.peer, message)

    def _on_end(self, line: SessionLine, error: RemoteProtocolError | None) -> None:
        self._drop(line)
        if error is not None:
            self._owner.refused_message(line.peer, error)

    def _drop(self, line: SessionLine) -> None:
        """Closes a line; the frame that it has sent the beginning of goes by ZMQ."""
        if self._lines.get(line.session) is line:
            of_process = self._processes[line.process]
            del self._lines[line.session], of_process[line.session]
            if not of_process:
                del self._processes[line.process]
        line.close()
        unfinished, line.unfinished = line.unfinished, b""
        if unfinished:
            self._owner.send_frame(line.peer, unfinished)

"""All lines of a bus: which messages go by them, and what comes by them before what comes by ZMQ.

It knows neither ZMQ nor a real socket: the simulator runs this very code.
"""

from __future__ import annotations

import asyncio
import logging
import socket as unix
from typing import Protocol

from ..disconnect import disconnect
from ..errors import RemoteProtocolError
from ..wire import Goodbye, Message, Reject, decode, encode
from .limits import BusLimits
from .line import GRANT_MESSAGES, SessionLine

log = logging.getLogger(__name__)


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
        self._lines: dict[str, dict[int, SessionLine]] = {}  # by peer and session

    def attach(self, peer: str, session: int, socket: unix.socket, *, greeted: bool) -> None:
        """Takes over a socket as the line of a session with this peer, until its end. `greeted` as SessionLine has it.
        Beyond `lines_max`, and on an error, the socket is closed."""
        self.detach(session)
        if sum(map(len, self._lines.values())) >= self._lines_max:
            disconnect(socket)
            return
        try:
            line = self._line_type(
                socket, peer=peer, session=session, greeted=greeted,
                take=self._on_frame, ended=self._on_end, limits=self._limits, loop=self._loop,
            )  # fmt: skip
        except OSError as error:
            log.warning("session %#x has no line, and its messages go by ZMQ: %s", session, error.strerror)
        else:
            self._lines.setdefault(peer, {})[session] = line

    def detach(self, session: int) -> None:
        """Closes the line of a session: its messages go by ZMQ from now on. Idempotent."""
        for lines in list(self._lines.values()):
            if (line := lines.get(session)) is not None:
                self._drop(line)

    def end(self, peer: str | None = None) -> None:
        """Closes every line with this peer, or with every peer."""
        for line in self.of(peer):
            self._drop(line)

    def send(self, peer: str, message: Message) -> bool:
        """Whether the message has gone by a line. What ends a session, or all of them, ends their lines first."""
        if isinstance(message, GRANT_MESSAGES):
            line = self._lines.get(peer, {}).get(message.session)
            return line is not None and line.send(encode(message))
        if type(message) is Reject:  # what still comes by the session's line would cost more Rejects
            if (line := self._lines.get(peer, {}).get(message.session)) is not None:
                self._drop(line)
        elif type(message) is Goodbye:
            self.end(peer)
        return False

    def read(self, peer: str | None = None) -> None:
        """Receives what this peer, or every peer, has sent by lines until now: it counts before what comes by ZMQ, and
        before what the clock says of the peer."""
        for line in self.of(peer):
            line.read_now()

    def of(self, peer: str | None = None) -> list[SessionLine]:
        """The lines with this peer, or with every peer."""
        of_peers = self._lines.values() if peer is None else [self._lines.get(peer, {})]
        return [line for lines in of_peers for line in lines.values()]

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
        lines = self._lines.get(line.peer, {})
        if lines.get(line.session) is line:
            del lines[line.session]
            if not lines:
                del self._lines[line.peer]
        line.close()
        unfinished, line.unfinished = line.unfinished, b""
        if unfinished:
            self._owner.send_frame(line.peer, unfinished)

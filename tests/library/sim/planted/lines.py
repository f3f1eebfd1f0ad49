"""Defences of sessions' lines, taken away."""

from __future__ import annotations

from typing import Any

from pdtransfer import disconnect
from pdtransfer.bus import line, lines
from pdtransfer.bus.line import SessionLine
from pdtransfer.bus.lines import Process, SessionLines

from . import Patch


def read_in_its_own_turn(patch: Patch) -> None:
    """What comes over the network counts before what has come by a line."""
    read = SessionLines.read

    def late(self: SessionLines, process: Process | None = None) -> None:
        if process is None:
            read(self)

    patch(SessionLines, "read", late)


def lost_before_it_is_read(patch: Patch) -> None:
    """The clock says that a peer is silent, of which something waits to be read."""
    read = SessionLines.read

    def late(self: SessionLines, process: Process | None = None) -> None:
        if process is not None:
            read(self, process)

    patch(SessionLines, "read", late)


def closed_and_not_shut_down(patch: Patch) -> None:
    """A line is closed, which ends nothing where a forked child has it."""

    def close(ended: Any) -> None:
        ended.close()

    for module in (disconnect, line, lines):
        patch(module, "disconnect", close)


def sent_into_a_line_that_nobody_reads(patch: Patch) -> None:
    """A line takes what it has room for, whoever reads it."""
    patch(SessionLine, "_is_read", lambda self: True)


def rest_of_a_frame_forgotten(patch: Patch) -> None:
    """The kernel has taken a part of a frame, and the next one follows."""

    def forget(self: SessionLine) -> None:
        self._unsent = self.unfinished = b""
        self._loop.remove_writer(self._socket)

    patch(SessionLine, "_push_rest", forget)


def rest_of_a_frame_overtaken(patch: Patch) -> None:
    """A frame is sent while the rest of the one before it waits."""
    send = SessionLine.send

    def hasty(self: SessionLine, frame: bytes) -> bool:
        waits, self._unsent = self._unsent, b""
        sent = send(self, frame)
        self._unsent = waits + self._unsent
        return sent

    patch(SessionLine, "send", hasty)


def begun_frame_swallowed(patch: Patch) -> None:
    """A line ends within a frame, which nobody sends again."""
    close = SessionLine.close

    def swallow(self: SessionLine) -> None:
        close(self)
        self.unfinished = b""

    patch(SessionLine, "close", swallow)


def end_of_a_line_unnoticed(patch: Patch) -> None:
    """One direction has ended, and the other is kept open."""
    patch(SessionLine, "_end", lambda self, error: None)

"""One connection between a follower and its leader: frames in order, beats between them, and one word when it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from . import frames
from .frames import Beat, Frame

BEAT_S = 1.0
SILENCE_BEATS = 10  # of ours, in which a rank that says nothing is frozen, and the group with it
BUFFER_BYTES_MAX = 64 << 20  # not yet sent: its reader has stopped long ago


class LinkLostError(Exception):
    """The other rank has gone, or makes no sense."""


class Link:
    """Send at any time; one task reads. A link that was lost sends nothing more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._beating: asyncio.TimerHandle | None = None
        self._unheard = 0  # beats of ours since the last frame of theirs
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def host(self) -> str:
        """This host's address, as the other rank sees it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Frame) -> None:
        """In order, some time; lost with the link."""
        if self._writer.is_closing():
            return
        self._writer.write(frames.encode(frame))
        if self._writer.transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            self._writer.transport.abort()

    async def read(self, timeout_s: float | None) -> Frame:
        """The next frame. Raises LinkLostError."""
        try:
            async with asyncio.timeout(timeout_s):
                size = int.from_bytes(await self._reader.readexactly(frames.LENGTH_BYTES), "little")
                if size > frames.BYTES_MAX:
                    raise LinkLostError(f"a frame of {size} bytes, at most {frames.BYTES_MAX} are allowed")
                return frames.decode(await self._reader.readexactly(size))
        except TimeoutError:
            raise LinkLostError(f"silent for {timeout_s} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            silent = self._unheard > SILENCE_BEATS
            raise LinkLostError(f"silent for {SILENCE_BEATS * BEAT_S:g} s" if silent else "gone") from None
        except ValueError as error:
            raise LinkLostError(f"says what is no frame: {error}") from None

    async def listen(self, heard: Callable[[Frame], None]) -> str:
        """Beats, and hands on all that comes, until the link is lost: returns why."""
        self._beat()
        try:
            while True:
                frame = await self.read(timeout_s=None)
                self._unheard = 0
                if not isinstance(frame, Beat):
                    heard(frame)
        except LinkLostError as lost:
            return str(lost)
        finally:
            self._writer.close()

    async def close(self) -> None:
        """Sends what is left, and ends."""
        if self._beating is not None:
            self._beating.cancel()
        self._writer.close()
        with suppress(ConnectionError, OSError, TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._writer.wait_closed()

    def _beat(self) -> None:
        # Beats are counted, not seconds: those in which this process did not run itself say nothing of the other.
        self._unheard += 1
        if self._unheard > SILENCE_BEATS:
            self._writer.transport.abort()
            return
        self.send(Beat())
        if not self._writer.is_closing():
            self._beating = self._loop.call_later(BEAT_S, self._beat)

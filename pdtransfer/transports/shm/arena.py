"""Decode's side of shared memory: hands the arena to each writer with a lock, and reads that lock from the kernel."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from msgspec.structs import replace

from ...memory.arena_memory import ArenaMemory
from ...wire import Reach
from ..options import KeepLine
from .handover import TOKEN_BYTES, HandoverListener, host

# From <fcntl.h>: only some builds of Python have them in the fcntl module.
_F_OFD_GETLK, F_OFD_SETLK = 36, 37
FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

log = logging.getLogger(__name__)


def lock(fd: int, byte: int) -> None:
    """Locks a byte for the open file description of `fd`, as long as that or a mapping of it stands."""
    fcntl.fcntl(fd, F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """True if another open file description than that of `fd` has the byte locked."""
    asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = FLOCK.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


@dataclass(slots=True, eq=False)
class _HandOver:
    """The hand-over of one session: a token until it is used or revoked, and the bytes that were locked for writers."""

    token: bytes = b""
    locked: list[int] = field(default_factory=list[int])


class ShmArena:
    """An ArenaTransport. Make it on the loop's thread, with the arena open until after close.

    `directory` holds the socket, and must be private to this user; None takes the abstract namespace. Writers of other
    users than this one and root are refused.
    """

    def __init__(
        self, arena: ArenaMemory, *, directory: Path | None, hbm_direct: bool = True, keep_line: KeepLine | None = None
    ) -> None:
        """Without `hbm_direct` no writer gets a GPU's memory: all rows land in the arena."""
        self._arena, self._hbm_direct, self._closed = arena, hbm_direct, False
        if arena.hbm is not None:
            arena.hbm.watch(self._all_quiet)
        self._sessions: dict[int, _HandOver] = {}
        self._next_byte = 0  # each byte is used once; a lock may lie beyond the file's end
        self._host = host()  # read now: later no descriptor may be left to read it with
        self.listener = HandoverListener(
            self._give, byte_count=arena.byte_count, directory=directory, keep_line=keep_line
        )

    async def offer(self, session: int, host: str = "") -> Reach:  # noqa: ARG002
        """Makes a new token for this session, valid once; a token that was offered before is void."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._sessions.setdefault(session, _HandOver()).token = token
        reach = Reach(
            transport="shm", host=self._host, address=self.listener.address, token=token, base=0,
            arena_bytes=self._arena.byte_count,
        )  # fmt: skip
        hbm = self._arena.hbm
        if hbm is None or not hbm.handle or not self._hbm_direct:
            return reach
        return replace(reach, hbm_handle=hbm.handle, hbm_base=hbm.base, hbm_bytes=hbm.byte_count)

    def revoke(self, session: int) -> None:
        """Makes the token void. A descriptor that was handed over stays where it is."""
        if (hand := self._sessions.get(session)) is not None:
            hand.token = b""

    def quiet(self, session: int) -> bool:
        """True if no token is valid and every lock that was handed over is free, by the kernel."""
        if (hand := self._sessions.get(session)) is None:
            return True
        hand.locked = [byte for byte in hand.locked if is_locked(self._arena.fd, byte)]
        return not hand.token and not hand.locked

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        assert self.quiet(session), f"session {session:#x} is not quiet"
        self._sessions.pop(session, None)

    async def close(self) -> None:
        """Stops handing over. `quiet` works as long as the arena is open."""
        self._closed = True
        self.listener.close()

    def _all_quiet(self) -> bool:
        """True if no writer can come any more, and no writer's lock is held."""
        locked = (byte for hand in self._sessions.values() for byte in hand.locked)
        return self._closed and not any(is_locked(self._arena.fd, byte) for byte in locked)

    def _give(self, session: int, token: bytes) -> int | None:
        hand = self._sessions.get(session)
        if hand is None or not hand.token or not compare_digest(hand.token, token):
            return None
        fd = self._arena.reopen()  # where it raises, the token stays valid
        byte, self._next_byte = self._next_byte, self._next_byte + 1
        try:
            lock(fd, byte)
        except OSError as error:
            # Without its lock nothing would ever prove that this writer is gone.
            os.close(fd)
            log.error("a writer holds locks that are not its own: no writer is admitted (%s)", error.strerror)
            return None
        hand.token = b""
        hand.locked.append(byte)
        return fd

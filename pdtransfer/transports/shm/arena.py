"""Decode's side of shared memory: hands the arena to its writers, each with a lock, and asks the kernel for it."""

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

from ...memory.arena_memory import Arena
from ...wire import Reach
from .handover import TOKEN_BYTES, Listener, host

# From <fcntl.h>: Python's fcntl module has them on some builds only.
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HandOver:
    """One session's: a token until it is shown or revoked, and the bytes whose locks went away with descriptors."""

    token: bytes = b""
    locked: list[int] = field(default_factory=list[int])


class ShmArena:
    """An ArenaTransport. Make it on the loop's thread, with the arena open until after close.

    `directory` holds the socket, is made private and must be this user's alone; None takes the abstract namespace.
    Writers of other users than `uids` (this one and root) are turned away.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        directory: Path | None,
        uids: frozenset[int] | None = None,
        hbm_direct: bool = True,
    ) -> None:
        """Without `hbm_direct` nobody is told of a card's memory: all rows land in the arena."""
        arena.use("served")
        self._arena, self._hbm_direct, self._closed = arena, hbm_direct, False
        if arena.hbm is not None:
            arena.hbm.watch(self._all_quiet)
        self._sessions: dict[int, _HandOver] = {}
        self._next_byte = 0  # never used twice; a lock may lie beyond the file's end
        self._host = host()  # read now: later there may be no descriptor left to read it with
        self._listener = Listener(self._give, byte_count=arena.byte_count, directory=directory, uids=uids)

    async def offer(self, session: int) -> Reach:
        """A fresh token for this session, good once; one that was offered before is good no more."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._sessions.setdefault(session, _HandOver()).token = token
        reach = Reach(
            transport="shm",
            host=self._host,
            address=self._listener.address,
            token=token,
            base=0,
            arena_bytes=self._arena.byte_count,
        )
        hbm = self._arena.hbm
        if hbm is None or not hbm.handle or not self._hbm_direct:
            return reach
        return replace(reach, hbm_handle=hbm.handle, hbm_base=hbm.base, hbm_bytes=hbm.byte_count)

    def revoke(self, session: int) -> None:
        """The token is good no more. A descriptor that was handed over stays where it is."""
        if (hand := self._sessions.get(session)) is not None:
            hand.token = b""

    def quiet(self, session: int) -> bool:
        """Whether no token is good and every lock that was handed over is free, which the kernel says."""
        if (hand := self._sessions.get(session)) is None:
            return True
        hand.locked = [byte for byte in hand.locked if self._held(byte)]
        return not hand.token and not hand.locked

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        assert self.quiet(session), f"session {session:#x} is not quiet"
        self._sessions.pop(session, None)

    async def close(self) -> None:
        """Stops handing over. `quiet` answers as long as the arena is open."""
        self._closed = True
        self._listener.close()

    def _all_quiet(self) -> bool:
        """Whether nobody can be let in any more, and no lock is held that ever was."""
        return self._closed and not any(self._held(byte) for hand in self._sessions.values() for byte in hand.locked)

    def _give(self, session: int, token: bytes) -> int | None:
        hand = self._sessions.get(session)
        if hand is None or not hand.token or not compare_digest(hand.token, token):
            return None
        try:
            fd = self._arena.reopen()
        except OSError:  # out of descriptors: the token stays good
            return None
        byte, self._next_byte = self._next_byte, self._next_byte + 1
        try:
            fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            # Without its lock nothing would ever say that this writer is gone.
            os.close(fd)
            log.error("a writer of this arena holds locks that are not its own: nobody is let in (%s)", error.strerror)
            return None
        hand.token = b""
        hand.locked.append(byte)
        return fd

    def _held(self, byte: int) -> bool:
        """Whether a description other than the arena's own, which never takes a lock, has the byte locked."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._arena.fd, _F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

"""Decode's side of Mooncake: for each writer a process that has the arena registered, and whose death is the fence."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import TransportError
from ...memory.arena_memory import Arena
from ...wire import Reach
from ..network import Network, engines_left
from .process import EngineProcess

# Far from where the kernel maps what it is not told a place for.
_BASE_FIRST, _BASE_END = 0x1000_0000_0000, 0x5000_0000_0000
_BASE_STEP = 2 << 20  # a huge page: the place is nothing that a peer could guess in 2**24 handshakes or so

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Offered:
    process: EngineProcess
    ready: bool = False
    revoked: bool = False


class MooncakeArena:
    """An ArenaTransport. Make it on the loop's thread, with the arena open until after close.

    `lost` is called with a session whose process has died, revoked or not: it is quiet.
    """

    def __init__(
        self, arena: Arena, network: Network, *, lost: Callable[[int, str], None] = lambda _, __: None
    ) -> None:
        arena.use("served")
        self._arena, self._network, self._lost = arena, network, lost
        self._sessions: dict[int, _Offered] = {}
        self._ended, self._closing = asyncio.Event(), False
        places = (_BASE_END - _BASE_FIRST) // _BASE_STEP
        self._next_base = _BASE_FIRST + secrets.randbelow(places) * _BASE_STEP

    async def offer(self, session: int, host: str = "") -> Reach:
        """A process for this session, at an address that no earlier one had: what a late writer means for that one is
        refused. Its writer dials the network's host, or else `host`. Raises TransportError where there can be none."""
        assert session not in self._sessions, f"session {session:#x} has its engine already"
        if self._closing:
            raise TransportError("this arena is closing")
        taken = sum(offered.process.engines for offered in self._sessions.values())
        engines = engines_left(self._network.engines, taken=taken)
        host = self._network.host or host or "127.0.0.1"
        if ":" in host:
            raise TransportError(f"advertise {host}: transport mooncake is reached by a name or an IPv4 address alone")
        base, byte_count = self._place(), self._arena.byte_count
        process = EngineProcess(
            self._network, host=host, memory=self._arena.fd, byte_count=byte_count, base=base,
            engines=engines, died=lambda: self._died(session),
        )  # fmt: skip
        offered = self._sessions[session] = _Offered(process)
        port, *others = await process.ready()
        offered.ready = True
        log.debug("session %#x: engine %d listens at %s:%d", session, process.pid, host, port)
        return Reach(
            transport="mooncake", host=f"{host}:{port}", address=",".join(map(str, others)), token=b"", base=base,
            arena_bytes=byte_count,
        )  # fmt: skip

    def revoke(self, session: int) -> None:
        """Ends the session's process: nothing that any writer has sent or will send reaches the arena through it."""
        if (offered := self._sessions.get(session)) is not None:
            offered.revoked = True
            offered.process.kill()

    def quiet(self, session: int) -> bool:
        """Whether the session's process is dead, which the kernel says."""
        offered = self._sessions.get(session)
        return offered is None or offered.process.dead

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        assert self.quiet(session), f"session {session:#x} is not quiet"
        self._sessions.pop(session, None)

    async def close(self) -> None:
        """Ends every process, and returns when all are dead: a session that comes meanwhile gets none."""
        self._closing = True
        for session in self._sessions:
            self.revoke(session)
        while any(not offered.process.dead for offered in self._sessions.values()):
            self._ended.clear()
            await self._ended.wait()

    def _died(self, session: int) -> None:
        self._ended.set()
        offered = self._sessions[session]
        if not offered.ready:
            return  # who waits for the offer hears why
        if not offered.revoked:
            log.warning("session %#x: its engine, process %d, has died", session, offered.process.pid)
        self._lost(session, "its engine has ended")

    def _place(self) -> int:
        """Where the next one maps the arena: after the one before, round and round through 64 TiB."""
        span = -(-self._arena.byte_count // _BASE_STEP) * _BASE_STEP
        base = self._next_base if self._next_base + span <= _BASE_END else _BASE_FIRST
        self._next_base = base + span
        return base

"""Decode's side of engines: each writer gets a process that has the arena registered, and its death is the fence."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from ...errors import ConfigError, TransportError
from ...memory.arena_memory import ArenaMemory
from ...memory.cuda_ipc import Handle
from ...wire import Reach
from ..options import Network
from .card_use import CardMemory, CardUse, Span, remembered
from .library import Library
from .process import EngineProcess
from .settings import check_host, engines_left, packed_address

# Far from where the kernel maps memory of no given place.
_BASE_FIRST, _BASE_END = 0x1000_0000_0000, 0x5000_0000_0000
_BASE_STEP = 2 << 20  # a huge page: a peer could guess the place only with millions of handshakes

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Offered:
    process: EngineProcess
    ready: bool = False
    revoked: bool = False


class EngineArena:
    """An ArenaTransport. Make it on the loop's thread, with the arena open until after close.

    `lost` is called for a session whose process has died, revoked or not: it is quiet.
    """

    def __init__(
        self,
        library: Library,
        arena: ArenaMemory,
        network: Network,
        *,
        hbm_direct: bool = True,
        lost: Callable[[int, str], None] = lambda _, __: None,
    ) -> None:
        """Without `hbm_direct` no writer gets a GPU's memory: all rows land in the arena."""
        self._library = library
        self._arena, self._network, self._lost, self._warned = arena, network, lost, False
        self._sessions: dict[int, _Offered] = {}
        self._ended, self._closing = asyncio.Event(), False
        self._card = CardUse(
            library, network, self._hbm_handle if hbm_direct else lambda: None,
            what="rows of HBM components land in the staging buffer",
        )  # fmt: skip
        self._waiting: set[int] = set()  # sessions whose process is started once that is known
        self._card_used: list[Span] = []  # where the last sessions had it
        places = (_BASE_END - _BASE_FIRST) // _BASE_STEP
        self._next_base = _BASE_FIRST + secrets.randbelow(places) * _BASE_STEP

    async def offer(self, session: int, host: str = "") -> Reach:
        """Starts a process for this session, with the arena at an address that no earlier one had: writes meant for an
        earlier one are refused. The writer dials the network's host, or else `host`."""
        assert session not in self._sessions, f"session {session:#x} has its engine already"
        self._waiting.add(session)
        handle = await self._card.handle()
        if self._closing or session not in self._waiting:
            raise TransportError("this arena is closing" if self._closing else "the session has ended meanwhile")
        self._waiting.remove(session)
        taken = sum(offered.process.engines for offered in self._sessions.values())
        engines = engines_left(self._network, taken=taken)
        host = self._network.host or host or "127.0.0.1"
        try:
            check_host(self._library.name, Network(host=host))
        except ConfigError as error:
            raise TransportError(str(error)) from None
        if not self._warned and self._network.guard is None:
            text = "hosts that reach ports %d to %d of this host %s: firewall them"
            log.warning(text, *self._network.ports, self._library.open_ports)
            self._warned = True
        base, byte_count = self._place(), self._arena.byte_count
        card = None if handle is None else CardMemory(handle=handle, used=tuple(self._card_used))
        process = EngineProcess(
            self._library, self._network, host=host, memory=self._arena.fd, byte_count=byte_count, base=base,
            engines=engines, card=card, session=session, died=lambda: self._died(session),
        )  # fmt: skip
        offered = self._sessions[session] = _Offered(process)
        port, *others = await process.ready()
        offered.ready = True
        log.debug("session %#x: engine %d listens at %s:%d", session, process.pid, host, port)
        reach = Reach(
            transport=self._library.name, host=f"{host}:{port}", address=",".join(map(str, others)), token=b"",
            base=base, arena_bytes=byte_count,
        )  # fmt: skip
        hbm = self._arena.hbm
        if card is None or hbm is None:
            return reach
        if not (address := process.card_address):
            self._card.report(process.why_no_card)
            return reach
        self._card_used = remembered(self._card_used, (address, address + hbm.byte_count))
        return replace(reach, hbm_handle=packed_address(address), hbm_base=hbm.base, hbm_bytes=hbm.byte_count)

    def revoke(self, session: int) -> None:
        """Ends the session's process: nothing that a writer has sent or will send reaches the arena through it."""
        self._waiting.discard(session)
        if (offered := self._sessions.get(session)) is not None:
            offered.revoked = True
            offered.process.kill()

    def quiet(self, session: int) -> bool:
        """True if the session's process is dead, by the kernel."""
        offered = self._sessions.get(session)
        return offered is None or offered.process.dead

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        assert self.quiet(session), f"session {session:#x} is not quiet"
        self._sessions.pop(session, None)

    async def close(self) -> None:
        """Ends every process, and returns once all are dead. A session that comes meanwhile gets none."""
        self._closing = True
        for session in self._sessions:
            self.revoke(session)
        while any(not offered.process.dead for offered in self._sessions.values()):
            self._ended.clear()
            await self._ended.wait()

    def _hbm_handle(self) -> Handle | None:
        hbm = self._arena.hbm
        return None if hbm is None or not hbm.handle else Handle.unpack(hbm.handle)

    def _died(self, session: int) -> None:
        self._ended.set()
        offered = self._sessions[session]
        if not offered.ready:
            return  # offer raises the reason
        if not offered.revoked:
            log.warning("session %#x: its engine, process %d, has died", session, offered.process.pid)
        self._lost(session, "its engine has ended")

    def _place(self) -> int:
        """Where the next process maps the arena: behind the one before it, in a circle of 64 TiB."""
        span = -(-self._arena.byte_count // _BASE_STEP) * _BASE_STEP
        base = self._next_base if self._next_base + span <= _BASE_END else _BASE_FIRST
        self._next_base = base + span
        return base

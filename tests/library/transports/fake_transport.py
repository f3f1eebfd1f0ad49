"""An arena and its writers in one process, for tests: each write waits until the test says how it ends.

Both keep the promises of transports.base: a write's end comes on the loop and never from within write(), and a
session is quiet only when no write of it can land any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdtransfer.errors import TransportError
from pdtransfer.handoff.effects import Map, Outcome, Write
from pdtransfer.handoff.sharing import pair_share
from pdtransfer.handoff.slot_allocator import Extents
from pdtransfer.kernels import checksum_copy, numpy_copy
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.layout.layout import Component
from pdtransfer.layout.pairing import Pairing
from pdtransfer.layout.plan import plan
from pdtransfer.transports.base import Ready, Wrote
from pdtransfer.wire import Reach


def ignore_end(order: Write, outcome: Outcome, text: str, checksum: int) -> None:
    """For a test that looks at no end of a write."""


class FakeArena:
    """Decode's side, an ArenaTransport; `memory` is what its writers write, uint8 (byte_count,)."""

    def __init__(self, byte_count: int) -> None:
        self.memory: NDArray[np.uint8] = np.zeros(byte_count, np.uint8)
        self.writers: dict[int, FakeWriter] = {}  # by session, while mapped
        self._tokens: dict[int, bytes] = {}  # by session, until shown or revoked
        self._offers = 0

    async def offer(self, session: int, host: str = "") -> Reach:
        """A token that no other offer has."""
        self._offers += 1
        token = self._tokens[session] = self._offers.to_bytes(32, "little")
        return Reach(transport="shm", host="fake", address="@fake", token=token, base=0, arena_bytes=len(self.memory))

    def take(self, session: int, token: bytes, writer: FakeWriter) -> None:
        """The hand-over. Raises TransportError for a token that is good no more."""
        if self._tokens.get(session) != token:
            raise TransportError("the arena's owner refused the token")
        del self._tokens[session]
        self.writers[session] = writer

    def revoke(self, session: int) -> None:
        """The token is good no more."""
        self._tokens.pop(session, None)

    def quiet(self, session: int) -> bool:
        """Whether no token is good and no writer has the arena mapped."""
        return session not in self._tokens and session not in self.writers

    def forget(self, session: int) -> None:
        """Only of a quiet session."""
        assert self.quiet(session), f"session {session:#x} is not quiet"

    async def close(self) -> None:
        """Hands over no more."""
        self._tokens.clear()


@dataclass(slots=True, eq=False)
class Pending:
    """A write whose bytes may still move."""

    order: Write
    cancelled: bool = False  # asked to stop: the test decides whether it was in time
    reported: bool = False  # that its outcome is unknown


@dataclass(slots=True, eq=False)
class _Mapped:
    components: tuple[Component, ...]
    pairings: tuple[Pairing, ...]
    leaving: bool = False
    pending: list[Pending] = field(default_factory=list[Pending])


class FakeWriter:
    """Prefill's side, a WriterTransport, from a `pool` of uint8 in which `components` have their bases.

    With `outcome` set, every write ends so by itself; else `pending` holds it until `end`.
    """

    def __init__(
        self,
        arena: FakeArena,
        components: tuple[Component, ...],
        pool: NDArray[np.uint8],
        wrote: Wrote,
        *,
        outcome: Outcome | None = None,
    ) -> None:
        self.outcome = outcome
        self._arena, self._pool, self._wrote = arena, pool, wrote
        self._components = {component.name: component for component in components}
        self._sessions: dict[int, _Mapped] = {}

    @property
    def pending(self) -> list[Pending]:
        """Writes that have not ended, oldest first within a session; those with an unknown outcome too."""
        return [each for mapped in self._sessions.values() for each in mapped.pending]

    async def map(self, order: Map, more: Ready = lambda _: None) -> int:
        """Takes the whole arena."""
        session, components = order.session, order.components
        assert session not in self._sessions
        self._arena.take(session, order.reach.token, self)
        pairings = tuple(pair_share(self._components[each.name].layout, each.layout) for each in components)
        self._sessions[session] = _Mapped(components, pairings)
        return len(self._arena.memory)

    sleeps_on_cuda = False

    def hbm_direct(self, session: int) -> bool:
        """There is no GPU."""
        return False

    def unmap(self, session: int) -> None:
        """Leaves the arena once nothing is pending."""
        if (mapped := self._sessions.get(session)) is not None:
            mapped.leaving = True
            self._leave(session, mapped)

    def expect_rows(self, session: int, component: int, extents: Extents) -> None:
        pass

    def write(self, order: Write) -> None:
        """Pends; on a session that is not mapped it fails."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.leaving:
            asyncio.get_running_loop().call_soon(self._wrote, order, Outcome.FAILED, "not mapped", 0)
            return
        pending = Pending(order)
        mapped.pending.append(pending)
        if self.outcome is not None:
            self.end(pending, self.outcome)

    def end(self, pending: Pending, outcome: Outcome, text: str = "") -> None:
        """LANDED writes the rows. After UNKNOWN the write pends on, silently: `land` or `lose` it."""
        checksum = 0
        if outcome is Outcome.LANDED:
            checksum = self._checksum(pending.order)
            self._copy(pending.order)
        if outcome is Outcome.UNKNOWN:
            pending.reported = True
        else:
            self.lose(pending)
        asyncio.get_running_loop().call_soon(self._wrote, pending.order, outcome, text, checksum)

    def land(self, pending: Pending) -> None:
        """The bytes of a write whose outcome is unknown land after all."""
        assert pending.reported
        self._copy(pending.order)
        self.lose(pending)

    def lose(self, pending: Pending) -> None:
        """No byte of this write moves any more."""
        mapped = self._sessions[pending.order.session]
        mapped.pending.remove(pending)
        self._leave(pending.order.session, mapped)

    def cancel(self, session: int, grant: int) -> None:
        """Marks the grant's writes."""
        for pending in self.pending:
            if (pending.order.session, pending.order.grant) == (session, grant):
                pending.cancelled = True

    def die(self) -> None:
        """As if the process were killed: nothing is said, and no byte moves any more."""
        for session in self._sessions:
            del self._arena.writers[session]
        self._sessions.clear()

    async def fence(self, session: int) -> bool:
        """What pends is lost."""
        for pending in [each for each in self.pending if each.order.session == session]:
            self.lose(pending)
        return True

    async def close(self) -> None:
        """What pends ends as FAILED, and is reported before this returns."""
        for session, mapped in list(self._sessions.items()):
            for pending in list(mapped.pending):
                self.lose(pending) if pending.reported else self.end(pending, Outcome.FAILED, "closed")
            self.unmap(session)
        await asyncio.sleep(0)  # what was reported is received

    def _leave(self, session: int, mapped: _Mapped) -> None:
        if mapped.leaving and not mapped.pending and session in self._sessions:
            del self._sessions[session]
            del self._arena.writers[session]

    def _checksum(self, order: Write) -> int:
        if not order.verify:
            return 0
        theirs = self._sessions[order.session].components[order.component]
        lines = lines_of(theirs.name, self._components[theirs.name].layout, layers=order.layers, like=theirs.layout)
        runs = runs_of(order.source_slots, np.ones(len(order.source_slots), np.int64), order.first_row)
        return checksum_copy.checksum(lines, runs, self._pool.ctypes.data, by=checksum_copy.NUMPY) or 0

    def _copy(self, order: Write) -> None:
        pairing = self._sessions[order.session].pairings[order.component].within_layers(*order.layers)
        work = plan(pairing, order.source_slots, order.target_slots)
        numpy_copy.copy(work, self._pool.ctypes.data, self._arena.memory.ctypes.data, CancelWord())

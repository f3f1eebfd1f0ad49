"""What a transport promises: one-sided writes with honest outcomes, and a proof that a writer is quiet.

A writer (prefill) maps an arena and writes into it; an arena's owner (decode) hands it over and fences writers.
Neither decides anything: sessions do. No error code of a vendor leaves a transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..handoff.effects import Outcome, Write
from ..handoff.ready_gate import Gate
from ..layout.layout import Component
from ..wire import Reach

WriteDone = Callable[[Write, Outcome, str, int], None]
"""Called once for each write, on the loop's thread and never from within write(): with a text where it did not land,
and where it did and the order says verify, with the checksum of its rows as they were read."""


Near = Callable[[Write], None]
"""Called on the loop's thread, again and again, while an urgent write that waited for its rows waits for the last of
them, or is in flight."""

Ready = Callable[[int], None]


class WriterTransport(Protocol):
    """The prefill side. Everything here is called on the loop's thread and never blocks it."""

    async def map(
        self, session: int, reach: Reach, components: tuple[Component, ...], more: Ready = lambda _: None
    ) -> int:
        """Maps the arena that `reach` names; returns how many of its first bytes are ready, and tells `more` on the
        loop's thread, until all are or the session is unmapped, whenever there are more.

        Raises TransportError where it cannot be reached, LayoutMismatchError where a component holds another model
        than ours, RemoteProtocolError where its layout leaves the arena.
        """
        ...

    def hbm_direct(self, session: int) -> bool:
        """Of a mapped session: whether rows of HBM components go to the memory that they are for, and not to the
        arena's range for them. The same as long as it is mapped."""
        ...

    def unmap(self, session: int) -> None:
        """Lets the mapping go once the session's writes have ended; idempotent."""
        ...

    def waits(self, gate: Gate) -> bool:
        """Whether it waits for such a gate itself, off the loop; else it is given a write once its gate is open."""
        ...

    def write(self, order: Write, done: WriteDone) -> None:
        """Starts a write; fair between grants: a small one does not wait for a large one."""
        ...

    def cancel(self, session: int, grant: int) -> None:
        """Asks this grant's writes to stop early; each still reports its own outcome (FAILED if it stopped)."""
        ...

    async def fence(self, session: int) -> bool:
        """Ends whatever writes for this session, and returns when nothing of it reads the pool, or sends, any more:
        True. False where only the end of this process could do that."""
        ...

    async def close(self) -> None:
        """Waits for what is in flight, unmaps everything."""
        ...


class ArenaTransport(Protocol):
    """The decode side: hands one arena over to writers, and proves them quiet."""

    async def offer(self, session: int) -> Reach:
        """Prepares one hand-over for this session, good for one writer. Raises TransportError where there can be none;
        a fence ends what it has left."""
        ...

    def revoke(self, session: int) -> None:
        """No hand-over for this session any more; the first step of every fence. Idempotent. Where the kernel lets us
        end every way to write that was handed over, it does."""
        ...

    def quiet(self, session: int) -> bool:
        """Whether the kernel proves that nobody can write through this session's hand-over, now or later."""
        ...

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        ...

    async def close(self) -> None:
        """Stops handing over; the arena itself is memory's to unmap."""
        ...

"""What a transport is: one-sided writes with honest outcomes, and a proof that a writer is quiet.

A writer (prefill) maps an arena and writes into it. The arena's owner (decode) hands it over, and fences writers. Both
carry out what sessions decide. No error code of a vendor leaves a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..handoff.effects import Map, Outcome, Write
from ..handoff.slot_allocator import Extents
from ..layout.layout import Component
from ..memory.arena_memory import ArenaMemory
from ..probe import Probe
from ..wire import Reach
from .options import ArenaOptions, Network, WriterOptions

if TYPE_CHECKING:
    from .gpu_launcher import WriterGpu

Wrote = Callable[[Write, Outcome, str, int], None]
"""Called once for each write, on the loop's thread and never from within write(). The text says why a write did not
land. The number is the checksum of the rows as they were read, where the write has landed and its order says verify."""


WakeHint = Callable[[Write], None]
"""Called on the loop's thread for an urgent write that waited for its rows: repeatedly while it waits for the last of
them, and while it is in flight."""

Ready = Callable[[int], None]
LostArena = Callable[[int, str], None]
Components = tuple[Component, ...]


class WriterCalls(NamedTuple):
    """What a writer calls."""

    wrote: Wrote
    lost: Callable[[int], None] = lambda _: None  # for a session that can write no more, and is to be fenced
    wake_hint: WakeHint = lambda _: None


class WriterTransport(Protocol):
    """The prefill side. Everything here is called on the loop's thread and never blocks it."""

    async def map(self, order: Map, more: Ready = lambda _: None) -> int:
        """Maps the arena that the order's `reach` names; returns how many of its first bytes are ready.

        Calls `more` on the loop's thread whenever more are ready, until all are or the session is unmapped. Raises
        TransportError where the arena cannot be reached, LayoutMismatchError where a component is of another model,
        RemoteProtocolError where its layout leaves the arena.
        """
        ...

    def hbm_direct(self, session: int) -> bool:
        """True if the rows of HBM components go to the memory that they are for, and not to the arena.
        It is the same for as long as the session is mapped."""
        ...

    def unmap(self, session: int) -> None:
        """Drops the mapping once the session's writes have ended; idempotent."""
        ...

    @property
    def sleeps_on_cuda(self) -> bool:
        """True if it waits for CUDA events itself, in the thread that launches. Else it gets a write once the write's
        gate is open."""
        ...

    def expect_rows(self, session: int, component: int, extents: Extents) -> None:
        """Writes of these slots are about to follow: starts, off the loop, what they would wait for."""
        ...

    def write(self, order: Write) -> None:
        """Starts a write, whose end `wrote` gets. Grants take turns: a small one does not wait for a large one."""
        ...

    def cancel(self, session: int, grant: int) -> None:
        """Asks this grant's writes to stop early; each still reports its own outcome (FAILED if it stopped)."""
        ...

    async def fence(self, session: int) -> bool:
        """Ends everything that writes for this session. Returns True once nothing of it reads the pool or sends; False
        where only the end of this process could ensure that."""
        ...

    async def close(self) -> None:
        """Waits for what is in flight, and unmaps everything."""
        ...


class ArenaTransport(Protocol):
    """The decode side: hands one arena over to writers, and proves them quiet."""

    async def offer(self, session: int, host: str = "") -> Reach:
        """Prepares one hand-over for this session, good for one writer; the Reach has this transport's name. `host` is
        this host's address on the way to the writer, empty for a transport within one host. Raises TransportError where
        it cannot be prepared; a fence then ends what is left of it."""
        ...

    def revoke(self, session: int) -> None:
        """Ends the hand-over for this session, the first step of every fence. Where the kernel can end every way to
        write that was handed over, it does. Idempotent."""
        ...

    def quiet(self, session: int) -> bool:
        """True if the kernel proves that no process can write through this session's hand-over, now or later."""
        ...

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        ...

    async def close(self) -> None:
        """Stops handing over; the arena itself stays mapped."""
        ...


class Transport(Protocol):
    """One way for KV to reach an arena, as the registry lists it."""

    @property
    def name(self) -> str:
        """What flags, logs, metrics and Identity.transports call it; 1 to 32 of a-z, 0-9, - and _."""
        ...

    @property
    def any_host(self) -> bool:
        """True if it reaches arenas of other hosts; else only those of this host, namespaces and user."""
        ...

    @property
    def listens_everywhere(self) -> bool:
        """True if it opens ports on every interface, whatever address it is given. It then calls `network.guard` before
        it serves, and a node on loopback takes it only by name."""
        ...

    @property
    def by_name_alone(self) -> bool:
        """True if a node takes it only where its name is set, since a host that reaches its ports can do more than to
        read and write arenas. Auto leaves it out."""
        ...

    def why_not(self) -> str:
        """Why this host cannot use it, a colon, and the command that changes that; empty where it can."""
        ...

    def check(self, network: Network) -> None:
        """Raises ConfigError, with the field, where every hand-off would fail under these options, on either side: a
        process asks before it serves."""
        ...

    def arena(self, memory: ArenaMemory, options: ArenaOptions, *, hbm_direct: bool, lost: LostArena) -> ArenaTransport:
        """Makes the decode side, on the loop's thread, for an arena that is open until after close.

        Without `hbm_direct` all rows have to land in the arena. `lost` is called for a session whose hand-over has
        ended by itself, with the reason: it is quiet.
        """
        ...

    def writer(
        self, components: Components, options: WriterOptions, gpu: WriterGpu | None, calls: WriterCalls
    ) -> WriterTransport:
        """Makes the prefill side, on the loop's thread, for a pool that stays mapped until after close.

        `gpu` is that of `options`.
        """
        ...

    def probes(self, ports: Sequence[tuple[int, int]]) -> Sequence[Probe]:
        """What `pdtransfer doctor` tries for it, where daemons of this host listen on these ranges of `ports`."""
        ...

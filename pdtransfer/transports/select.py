"""Which transport a session takes: shared memory where both ends are on one host, else Mooncake; and both as one.

Decode chooses, since it offers; prefill tells in its Welcome where it is and what it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..bus.keys import Address
from ..errors import TransportError
from ..handoff.effects import Outcome, Write
from ..handoff.ready_gate import Gate
from ..layout.layout import Component
from ..memory.arena_memory import Arena
from ..wire import Identity, Reach, split_key
from .base import ArenaTransport, Near, Ready, WriteDone, WriterTransport
from .card_launcher import WriterCard
from .copier import CANCELLED
from .device_events import EventQueue
from .mooncake import MooncakeArena, MooncakeWriter, why_not
from .network import Network, Transport
from .shm import ShmArena, ShmWriter
from .shm.handover import host

log = logging.getLogger(__name__)


def place() -> str:
    """Where this process is: whoever says the same can be handed an arena. Identity.place."""
    return f"{host()} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def taken(transport: Transport) -> tuple[str, ...]:
    """The transports that a node takes. Raises TransportError where the one that it is told to take cannot be had."""
    reason = why_not()
    match transport:
        case "auto":
            return ("shm",) if reason else ("shm", "mooncake")
        case "mooncake" if reason:
            raise TransportError(f"transport mooncake: {reason}")
        case name:
            return (name,)


def choose(ours: tuple[str, ...], here: str, theirs: Identity) -> tuple[str, str]:
    """The transport for a session with that prefill, and the reason for people. Raises TransportError for none."""
    both = [name for name in ours if name in theirs.transports]
    if not both:
        raise TransportError(
            f"transport: {theirs.node} takes {', '.join(theirs.transports)}, this node {', '.join(ours)}"
        )
    if len(both) == 1:
        others = [name for name in ("shm", "mooncake") if name not in both]
        return both[0], f"{' and '.join(others)} is not taken by both"
    names = ("kernel", "network namespace", "mount namespace", "user")
    different = [
        name for name, ours, theirs in zip(names, here.split(), theirs.place.split(), strict=False) if ours != theirs
    ]
    if different:
        return "mooncake", f"it has another {different[0]}"
    return "shm", "it is on this host"


class ArenaChoice:
    """Decode's transports as one; `lost` hears of a session whose hand-over has gone: it is quiet.

    Make it on the loop's thread. Raises TransportError where `transport` cannot be had.
    """

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        network: Network,
        *,
        directory: Path | None,
        hbm_direct: bool = True,
        lost: Callable[[int, str], None] = lambda _, __: None,
    ) -> None:
        self.taken = taken(transport)
        self._shm = ShmArena(arena, directory=directory, hbm_direct=hbm_direct) if "shm" in self.taken else None
        self._mooncake = MooncakeArena(arena, network, lost=lost) if "mooncake" in self.taken else None
        self._here, self._network, self._warned = place(), network, False
        self._of: dict[int, str] = {}

    @property
    def counts(self) -> dict[str, int]:
        """How many sessions are over each."""
        names = list(self._of.values())
        return {name: names.count(name) for name in self.taken}

    async def offer(self, session: int, endpoint: str, theirs: Identity) -> Reach:
        """As ArenaTransport.offer, to the prefill that was dialled at `endpoint`."""
        name, reason = choose(self.taken, self._here, theirs)
        self._of[session] = name
        log.info("session %#x with %s: over %s: %s", session, theirs.node, name, reason)
        if name == "shm":
            assert self._shm is not None
            return await self._shm.offer(session)
        assert self._mooncake is not None
        if not self._warned:
            first, last = self._network.ports
            log.warning(
                "who reaches ports %d to %d of this host can read and write the arena: firewall them", first, last
            )
            self._warned = True
        address = await asyncio.get_running_loop().run_in_executor(None, own_address, endpoint)
        if session not in self._of:  # nobody would ever end what is begun for it
            raise TransportError("the session has ended meanwhile")
        return await self._mooncake.offer(session, address)

    def revoke(self, session: int) -> None:
        """As ArenaTransport says."""
        if (found := self._found(session)) is not None:
            found.revoke(session)

    def quiet(self, session: int) -> bool:
        """As ArenaTransport says."""
        return (found := self._found(session)) is None or found.quiet(session)

    def forget(self, session: int) -> None:
        """As ArenaTransport says."""
        if (found := self._found(session)) is not None:
            found.forget(session)
            del self._of[session]

    async def close(self) -> None:
        """As ArenaTransport says, of both."""
        for each in (self._shm, self._mooncake):
            if each is not None:
                await each.close()

    def _found(self, session: int) -> ArenaTransport | None:
        match self._of.get(session):
            case None:
                return None
            case "shm":
                return self._shm
            case _:
                return self._mooncake


class WriterChoice:
    """Prefill's transports as one, a WriterTransport: a session's is the one that its Reach names."""

    def __init__(
        self,
        components: tuple[Component, ...],
        transport: Transport,
        network: Network,
        *,
        pool_address: int = 0,
        pool_fd: int = -1,
        copy_threads: int = 2,
        card: WriterCard | None = None,
        lost: Callable[[int], None] = lambda _: None,
        broken: Callable[[int, Exception], None] = lambda _, __: None,
        near: Near = lambda _: None,
    ) -> None:
        """`lost` hears of a session that can write no more, and is to be fenced; `broken` of a room whose event can be
        asked no more: its writes are held back until they are cancelled; `near` as Near says, over shared memory."""
        self.taken = taken(transport)
        self._loop, self._closing = asyncio.get_running_loop(), False
        self._of: dict[int, str] = {}
        self._made: dict[str, WriterTransport] = {}
        self._events = EventQueue(self._broke)
        self._held: dict[tuple[int, int], list[tuple[Write, WriteDone]]] = {}  # by session and grant, in order
        self._broken = broken
        self._make: dict[str, Callable[[], WriterTransport]] = {  # when first wanted: each has threads
            "shm": lambda: ShmWriter(
                components, pool_address=pool_address, copy_threads=copy_threads, card=card, near=near
            ),
            "mooncake": lambda: MooncakeWriter(
                components,
                network,
                pool_address=pool_address,
                pool_fd=pool_fd,
                copy_threads=copy_threads,
                card=card,
                lost=lost,
            ),
        }

    @property
    def counts(self) -> dict[str, int]:
        """How many sessions are over each."""
        names = list(self._of.values())
        return {name: names.count(name) for name in self.taken}

    async def map(
        self, session: int, reach: Reach, components: tuple[Component, ...], more: Ready = lambda _: None
    ) -> int:
        """As WriterTransport says."""
        if (name := reach.transport) not in self.taken:
            raise TransportError(f"transport {name!r}, this node takes {', '.join(self.taken)}")
        if self._closing:
            raise TransportError("this writer is closing")
        if name not in self._made:
            self._made[name] = self._make[name]()
        self._of[session] = name
        try:
            bytes_ready = await self._made[name].map(session, reach, components, more)
        except BaseException:
            self._of.pop(session, None)
            raise
        log.info("session %#x: over %s", session, name)
        return bytes_ready

    def hbm_direct(self, session: int) -> bool:
        """As WriterTransport says."""
        return (name := self._of.get(session)) is not None and self._made[name].hbm_direct(session)

    def unmap(self, session: int) -> None:
        """As WriterTransport says."""
        if (name := self._of.pop(session, None)) is not None:
            log.info("session %#x: over", session)
            self._made[name].unmap(session)

    def write(self, order: Write, done: WriteDone) -> None:
        """As WriterTransport says."""
        name = self._of.get(order.session)
        if name is None:
            self._loop.call_soon(done, order, Outcome.FAILED, f"session {order.session:#x} is not mapped", 0)
        elif order.after is None or order.after.opened_ns or self._made[name].waits(order.after):
            self._made[name].write(order, done)
        else:
            self._hold(order.after, order, done)

    def _hold(self, gate: Gate, order: Write, done: WriteDone) -> None:
        """Until its event has fired, and what is held of its grant before it has gone."""
        key = order.session, order.grant
        self._held.setdefault(key, []).append((order, done))
        self._events.call(key, _Asked(gate), partial(self._let, key))

    def _let(self, key: tuple[int, int]) -> None:
        held = self._held[key]
        order, done = held.pop(0)
        if not held:
            del self._held[key]
        self.write(order, done)

    def _broke(self, key: tuple[int, int], error: Exception) -> None:
        self._broken(self._held[key][0][0].room, error)

    def cancel(self, session: int, grant: int) -> None:
        """As WriterTransport says."""
        self._events.forget((session, grant))
        for order, done in self._held.pop((session, grant), ()):
            self._loop.call_soon(done, order, Outcome.FAILED, CANCELLED, 0)
        if (name := self._of.get(session)) is not None:
            self._made[name].cancel(session, grant)

    async def fence(self, session: int) -> bool:
        """As WriterTransport says."""
        name = self._of.get(session)
        return name is None or await self._made[name].fence(session)  # its last write had ended when it was unmapped

    async def close(self) -> None:
        """As WriterTransport says, of both."""
        self._closing = True
        for session, grant in list(self._held):
            self.cancel(session, grant)
        self._events.stop()
        for each in self._made.values():
            await each.close()


class _Asked:
    """A gate, as an event that is asked on the loop."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def query(self) -> bool:
        return self._gate.asked(time.monotonic_ns())


def own_address(endpoint: str) -> str:
    """This host's address on the way to a peer, `[KEY@]tcp://host:port`; TransportError where there is none."""
    address = Address.parse(split_key(endpoint)[1])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port_first))  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise TransportError(f"no IPv4 way to {address.host}, name one with advertise: {error.strerror}") from None

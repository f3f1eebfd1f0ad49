"""The transport of each session: decode selects it for a writer, and the Reach names it to the writer.

Decode offers, so decode selects. Prefill reports in its Welcome where it is and which transports it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ..bus.keys import Address, is_loopback
from ..errors import ConfigError, TransportError, WorldError
from ..handoff.effects import Map, Outcome, Write
from ..handoff.events import Spans
from ..handoff.slot_allocator import Extents
from ..layout.layout import Component
from ..memory.arena_memory import ArenaMemory
from ..wire import Identity, Reach, split_key
from .base import ArenaTransport, Ready, WriterCalls, WriterTransport
from .gpu_launcher import WriterGpu, prepare_copies
from .options import ArenaOptions, Network, WriterOptions
from .registry import TRANSPORTS, check
from .shm.handover import host

Side = TypeVar("Side", ArenaTransport, WriterTransport)

log = logging.getLogger(__name__)


def place() -> str:
    """Identity.place: processes with an equal place can share an arena."""
    return f"{host()} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def taken(transport: str, *, loopback: bool = False) -> tuple[str, ...]:
    """The transports that a node takes, in the order of the registry. `auto` skips those that must be named, and on
    `loopback` those that open ports to other hosts. Raises TransportError where the named one cannot be used."""
    if transport == "auto":
        chosen = [name for name in TRANSPORTS if not TRANSPORTS[name].by_name_alone]
        wide = [name for name in chosen if loopback and TRANSPORTS[name].listens_everywhere]
        if wide:  # whether they could be used is not asked: that loads their libraries
            names = ", ".join(wide)
            log.info("this node is bound to loopback: auto leaves out %s, which listens on every interface", names)
        return tuple(name for name in chosen if name not in wide and not TRANSPORTS[name].why_not())
    if reason := TRANSPORTS[transport].why_not():
        raise TransportError(f"transport {transport}: {reason}")
    return (transport,)


def needs_no_guard(transport: str, *, loopback: bool) -> str:
    """Why a node of this setting opens no port that is to be closed to strangers; empty where it may open one."""
    if loopback and transport == "auto":
        return "this node is bound to loopback"
    usable = taken("auto") if transport == "auto" else (transport,) if not TRANSPORTS[transport].why_not() else ()
    wide = any(TRANSPORTS[name].listens_everywhere for name in usable)
    return "" if wide else f"transport {transport} opens no port here"


async def on_loopback(endpoint: str) -> bool:
    """True if a dialled endpoint, `[KEY@]tcp://host:port`, is on this host by its address."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, is_loopback, split_key(endpoint)[1])
    except ConfigError:  # it resolves no more
        return False


def choose_near(ours: tuple[str, ...], host: str, theirs: Identity) -> tuple[str, str]:
    """As `choose`, for auto and a peer on loopback: never a transport that listens on other interfaces."""
    near = tuple(name for name in ours if not TRANSPORTS[name].listens_everywhere)
    different = _different(host, theirs)
    common = [name for name in near if name in theirs.transports]
    if (common and not different) or any(TRANSPORTS[name].any_host for name in common):
        return choose(near, host, theirs)
    why = f"has another {different[0]}" if different else f"takes {', '.join(theirs.transports)}"
    raise TransportError(
        f"transport: {theirs.node} is dialled on loopback and {why}, which shared memory does not reach; auto opens no "
        "port to other hosts for it: run both alike, or set --transport on both"
    )


def choose(ours: tuple[str, ...], host: str, theirs: Identity) -> tuple[str, str]:
    """The transport for a session with that prefill, and the reason for people. Raises TransportError for none."""
    both = [name for name in ours if name in theirs.transports]
    if not both:
        raise TransportError(
            f"transport: {theirs.node} takes {', '.join(theirs.transports)}, this node {', '.join(ours)}"
        )
    if len(both) == 1:
        others = [name for name in TRANSPORTS if name not in both and name in (*ours, *theirs.transports)]
        if not others:
            return both[0], "neither offers another"
        return both[0], f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} not offered by both"
    different = _different(host, theirs)
    if not different:
        return both[0], "it is on this host"
    return next((name for name in both if TRANSPORTS[name].any_host), both[0]), f"it has another {different[0]}"


def _different(host: str, theirs: Identity) -> list[str]:
    """What differs between this process and a writer that keeps shared memory from reaching it."""
    names, place = ("kernel", "network namespace", "mount namespace", "user"), theirs.place
    return [name for name, ours, theirs in zip(names, host.split(), place.split(), strict=False) if ours != theirs]


class _NodeTransports(Generic[Side]):
    """The transports of a node, and which of them each session has."""

    def __init__(self, taken: tuple[str, ...], network: Network) -> None:
        self.taken, self._guard = taken, network.guard
        self._made: dict[str, Side] = {}
        self._names: dict[int, str] = {}  # by session

    @property
    def counts(self) -> dict[str, int]:
        """How many sessions each transport has."""
        return {name: sum(chosen == name for chosen in self._names.values()) for name in self.taken}

    def name_of(self, session: int) -> str:
        """The transport of a session; empty for none."""
        return self._names.get(session, "")

    def _of(self, session: int) -> Side | None:
        return self._made.get(self.name_of(session))

    def _forget(self, session: int) -> None:
        self._names.pop(session, None)
        if self._guard is not None:
            self._guard.forget(session)

    async def close(self) -> None:
        """Stops handing over, or waits for what is in flight and unmaps everything."""
        for transport in self._made.values():
            await transport.close()


class DecodeTransports(_NodeTransports[ArenaTransport]):
    """What a decode rank's arena is offered over: each session has its transport from `offer` until `forget`.

    Make it on the loop's thread. Raises ConfigError or TransportError where the transport of `options` cannot be used.
    """

    def __init__(
        self,
        arena: ArenaMemory,
        options: ArenaOptions,
        *,
        hbm_direct: bool = True,
        lost: Callable[[int, str], None] = lambda _, __: None,
    ) -> None:
        """`lost` is called for a session whose hand-over has ended by itself: it is quiet."""
        check(options.transport, options.network)
        super().__init__(taken(options.transport), options.network)
        self._made |= {
            name: TRANSPORTS[name].arena(arena, options, hbm_direct=hbm_direct, lost=lost) for name in self.taken
        }
        self._here, self._host, self._auto = place(), options.network.host, options.transport == "auto"

    async def offer(self, session: int, endpoint: str, theirs: Identity, *, loopback: bool = False) -> Reach:
        """As ArenaTransport.offer, to the prefill that was dialled at `endpoint`, perhaps on `loopback`."""
        name, reason = (choose_near if loopback and self._auto else choose)(self.taken, self._here, theirs)
        self._names[session], transport = name, self._made[name]
        log.info("session %#x with %s: over %s: %s", session, theirs.node, name, reason)
        own_host, spared = "", ""
        if TRANSPORTS[name].any_host:
            if not (own_host := self._host):
                own_host = await asyncio.get_running_loop().run_in_executor(None, own_address, endpoint)
            elif self._guard is not None and self._guard.peers_only:
                spared = await asyncio.get_running_loop().run_in_executor(None, elsewhere, endpoint, own_host)
            if session not in self._names:  # nothing would ever end what is begun for it
                raise TransportError("the session has ended meanwhile")
        if self._guard is not None and TRANSPORTS[name].listens_everywhere:
            self._guard.expect(session, endpoint, spared=spared)
        return await transport.offer(session, own_host)

    def fence(self, session: int) -> bool:
        """Revokes what was offered; returns True if the session is quiet by now."""
        if (transport := self._of(session)) is None:
            return True
        transport.revoke(session)
        return transport.quiet(session)

    def forget(self, session: int) -> None:
        """Drops what is kept of a session that was proven quiet."""
        if (transport := self._of(session)) is not None:
            self._forget(session)
            transport.forget(session)


class PrefillTransports(_NodeTransports[WriterTransport]):
    """What a prefill rank writes with: each session has the transport that its Reach names, from `map` until `unmap`.

    A transport is made when the first session wants it, since each has threads.
    """

    def __init__(
        self, components: tuple[Component, ...], options: WriterOptions, calls: WriterCalls, spans: Spans | None = None
    ) -> None:
        """`spans` gets each launch of a GPU."""
        check(options.transport, options.network)
        super().__init__(taken(options.transport, loopback=options.network.loopback), options.network)
        gpu = self._gpu = None if options.device is None else WriterGpu(options.device, spans)
        self._make = {name: partial(TRANSPORTS[name].writer, components, options, gpu, calls) for name in self.taken}
        self._loop, self._closing, self._wrote = asyncio.get_running_loop(), False, calls.wrote

    def prepare(self) -> None:
        """As prepare_copies, before the engine computes: the first session would have to wait for it. What fails here
        fails again for the session that needs it, with the reason."""
        try:
            prepare_copies(self._gpu)
        except WorldError as error:
            log.warning("the GPU cannot copy rows: %s", error)

    async def map(self, order: Map, more: Ready = lambda _: None, *, peer: str = "") -> int:
        """As WriterTransport.map, with the transport that its `reach` names; `peer` has offered it."""
        session = order.session
        if (name := order.reach.transport) not in self.taken:
            text = f"Register.reach.transport: {name!r}, this node takes {', '.join(self.taken)}"
            raise TransportError(f"{text}: set transport alike on both, or install {name} here")
        if self._closing:
            raise TransportError("this writer is closing")
        if name not in self._made:
            self._made[name] = self._make[name]()
        self._names[session], transport = name, self._made[name]
        if self._guard is not None and TRANSPORTS[name].listens_everywhere:
            self._guard.expect(session, peer)
        try:
            bytes_ready = await transport.map(order, more)
        except BaseException:
            self._forget(session)
            raise
        log.info("session %#x: over %s", session, name)
        return bytes_ready

    def hbm_direct(self, session: int) -> bool:
        """As WriterTransport.hbm_direct."""
        return (transport := self._of(session)) is not None and transport.hbm_direct(session)

    def unmap(self, session: int) -> None:
        """As WriterTransport.unmap."""
        if (transport := self._of(session)) is not None:
            log.info("session %#x: ended", session)
            self._forget(session)
            transport.unmap(session)

    def expect_rows(self, session: int, component: int, extents: Extents) -> None:
        """As WriterTransport.expect_rows, of a session that may be mapped no more."""
        if (transport := self._of(session)) is not None:
            transport.expect_rows(session, component, extents)

    def sleeps_on_cuda(self, session: int) -> bool:
        """As WriterTransport.sleeps_on_cuda, of a session that may be mapped no more."""
        return (transport := self._of(session)) is not None and transport.sleeps_on_cuda

    def write(self, order: Write) -> None:
        """As WriterTransport.write, of a session that may be mapped no more."""
        if (transport := self._of(order.session)) is None:
            self._loop.call_soon(self._wrote, order, Outcome.FAILED, f"session {order.session:#x} is not mapped", 0)
        else:
            transport.write(order)

    def cancel(self, session: int, grant: int) -> None:
        """As WriterTransport.cancel."""
        if (transport := self._of(session)) is not None:
            transport.cancel(session, grant)

    async def fence(self, session: int) -> bool:
        """As WriterTransport.fence; the last write of a session that is mapped no more has ended."""
        return (transport := self._of(session)) is None or await transport.fence(session)

    async def close(self) -> None:
        """As _NodeTransports; a session that comes meanwhile is refused."""
        self._closing = True
        await super().close()


def elsewhere(endpoint: str, host: str) -> str:
    """Why a writer that dials `host` may come from another address than that of `endpoint`; empty where it may not."""
    try:
        own_host = own_address(endpoint)
        dialled = {str(answer[4][0]) for answer in socket.getaddrinfo(host, None, socket.AF_INET)}
    except (OSError, TransportError) as error:
        return f"{host} cannot be compared with the route to {split_key(endpoint)[1]}: {error}"
    if own_host in dialled:
        return ""
    return (
        f"prefill dials {host}, and its connections on the bus come to {own_host}: over another network it has another "
        "address; name its network with --firewall-admit, or set --firewall on"
    )


def own_address(endpoint: str) -> str:
    """This host's address on the way to a peer, `[KEY@]tcp://host:port`; TransportError where there is none."""
    address = Address.parse(split_key(endpoint)[1])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port_first))  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise TransportError(
            f"no IPv4 route to {address.host}, set advertise to an address of this host: {error.strerror}"
        ) from None

"""The only loop and the only clock: a node hands inputs to its core and performs the effects that come back, in order.

Everything here runs on one event loop's thread. `tell` gets what the engine has to hear.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .bus import Bus
from .effects import (
    DecodeEffect,
    Drained,
    Fence,
    FenceWriter,
    Forget,
    HangUp,
    Landed,
    Leased,
    Map,
    Offer,
    Outcome,
    PeerRefused,
    PrefillEffect,
    Ready,
    RoomFailed,
    Send,
    StopWriting,
    Unmap,
    Verify,
    Write,
)
from .errors import Cause, LocalProtocolError, PDTransferError, WorldError
from .events import Event, EventQueue
from .keys import AllowList, KeyPair
from .layout import Component
from .limits import Limits
from .memory import Arena
from .session.decode import DecodeSessions
from .session.prefill import Cell, PrefillSessions
from .sharing import Replicas, holds_of
from .transports.base import ArenaTransport, WriterTransport
from .transports.shm import ShmArena, ShmWriter
from .transports.verifier import Verifier
from .turn import Performer, Ticker
from .wire import Goodbye, Holds, Identity, Member, Message, Ranks, Reject

log = logging.getLogger(__name__)

Others = Callable[[str, Message], bool]
"""Takes what is no node's business, a router's messages say; says whether it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Who a node is, and how it meets its peers. `weights` is a digest: equal weights, equal digest."""

    node: str
    model: str
    weights: bytes
    keys: KeyPair | None = None
    allowed: AllowList | None = None
    insecure: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    group: tuple[Member, ...] = ()  # of the rank that leads a worker of several: all its ranks, itself first
    limits: Limits = field(default_factory=Limits)

    def identity(self, role: Literal["prefill", "decode"], holds: tuple[Holds, ...] = ()) -> Identity:
        """A new life under this name."""
        return Identity(
            self.node, role, secrets.randbits(64), self.ranks, self.model, self.weights, self.limits.window,
            holds=holds, group=self.group,
        )  # fmt: skip

    def bus(self, receive: Callable[[str, Message], None]) -> Bus:
        """This node's sockets; breaches that the bus itself finds are logged."""
        return Bus(
            node=self.node, keys=self.keys, allowed=self.allowed, insecure=self.insecure, receive=receive,
            refused=lambda peer, error: log.warning("%s: %s", peer, error),
        )  # fmt: skip


_REVOKED = "its key was revoked"


def _revoked() -> Message:
    """What a peer would say that wants no more of us: it is never asked again."""
    return Reject(0, Cause.REFUSED.value, (_REVOKED,))


class DecodeNode:
    """A decode rank on the loop: expects rooms, hands its arena over, fences writers."""

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        arena: Arena,
        tell: Callable[[Ready | RoomFailed], None],
        *,
        socket_directory: Path | None = None,
        enable_hisparse: bool = False,
        prefix_cache: bool = True,
        verify: bool = False,
        others: Others | None = None,
        leased: Callable[[int], None] | None = None,
    ) -> None:
        """`leased` hears of rooms that have got their slots, some time before they are READY."""
        self._tell, self._others, self._leased = tell, others, leased
        self._loop = asyncio.get_running_loop()
        core = self.core = DecodeSessions(
            settings.identity("decode"),
            components,
            settings.limits,
            lambda: secrets.randbits(64) or 1,  # 0 is no session
            enable_hisparse=enable_hisparse,
            prefix_cache=prefix_cache,
            verify=verify,
            bytes_ready=arena.bytes_ready or None,  # one that nobody prefaults is backed as it is written
        )
        self._verifier = Verifier(arena.mapping.address) if verify else None
        self._transport: ArenaTransport = ShmArena(arena, directory=socket_directory)
        self.bus = settings.bus(self.receive)
        ticker = Ticker(core.next_tick, lambda: self._run(core.tick(self._loop.time())))
        self._run: Performer[DecodeEffect] = Performer(self._perform, ticker)
        self._events = EventQueue(self._never_quiet)

    def dial(self, source: str) -> None:
        """Opens a session with a prefill rank ahead of its first room. Raises as Bus.dial."""
        self.bus.dial(source)
        self._run(self.core.dial(source, self._loop.time()))

    def expect(
        self,
        room: int,
        *,
        tokens: int,
        sources: Sequence[str],
        time_left_s: float,
        growth: int = 0,
        prefix: int = 0,
        keys: tuple[bytes, ...] = (),
        enable_hisparse: bool = False,
    ) -> None:
        """As DecodeSessions.expect; what makes no sense, and a source that may not be dialled, fail the room."""
        now = self._loop.time()
        try:
            for source in sources:
                self.bus.dial(source)
            effects = self.core.expect(
                room, tokens=tokens, sources=sources, now=now, deadline=now + time_left_s, growth=growth, prefix=prefix,
                keys=keys, enable_hisparse=enable_hisparse,
            )  # fmt: skip
        except (LocalProtocolError, WorldError) as error:
            self._tell(RoomFailed(room, Cause.REFUSED, str(error)))
            return
        self._run(effects)

    def ready(self, bytes_ready: int) -> None:
        """So many of the arena's first bytes are prefaulted now."""
        self._run(self.core.ready(bytes_ready, self._loop.time()))

    def release(self, room: int, *, after: Event | None = None) -> None:
        """The engine is done with a READY room once `after` has fired. A room that is not READY fails."""
        self._events.call(room, after, lambda: self._release(room))

    def abort(self, room: int, cause: Cause = Cause.ABORTED, detail: str = "") -> None:
        """Gives a room up that is not READY."""
        self._run(self.core.abort(room, self._loop.time(), cause, detail))

    def receive(self, peer: str, message: Message) -> None:
        """A message of a prefill rank, unless it is somebody else's."""
        if self._others is None or not self._others(peer, message):
            self._run(self.core.receive(peer, message, self._loop.time()))

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list. Who is on it no more loses its sessions; its leases wait for the fence."""
        for peer in self.bus.allow(allowed):
            self.receive(peer, _revoked())

    async def close(self) -> None:
        """Fails what is not READY, says goodbye, stops the clock and the hand-over.

        Peers may write on until they have heard it: the arena's bytes are nobody else's until its last mapping is gone.
        This node reads none of them any more.
        """
        for room in list(self.core.rooms):
            self.abort(room, Cause.SHUTDOWN, "this node is closed")
        for name, peer in self.core.links.peers.items():
            if peer.identity is not None:
                self.bus.send(name, Goodbye(self.core.links.identity.incarnation, Cause.SHUTDOWN.value))
        self._run.ticker.stop()
        self._events.stop()
        if self._verifier is not None:
            await self._verifier.close()
        await self._transport.close()
        await self.bus.close()

    def _never_quiet(self, room: int, error: Exception) -> None:
        log.critical("room %#x keeps its slots, nothing says when they are quiet: %s", room, error)

    def _release(self, room: int) -> None:
        try:
            self._run(self.core.release(room, self._loop.time()))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def _perform(self, effect: DecodeEffect) -> None:
        match effect:
            case Send(peer, message):
                self.bus.send(peer, message)
            case Ready() | RoomFailed():
                self._tell(effect)
            case Leased(room):
                if self._leased is not None:
                    self._leased(room)
            case Offer(_, session):
                reach = self._transport.offer(session)
                self._run(self.core.offered(session, reach, self._loop.time()))
            case Fence(session):
                self._transport.revoke(session)
                if self._transport.quiet(session):
                    self._run(self.core.fenced(session, self._loop.time()))
            case Forget(session):
                self._transport.forget(session)
            case Verify():
                assert self._verifier is not None
                self._verifier.verify(effect, self._verified)
            case HangUp(peer):
                self.bus.hang_up(peer)
            case PeerRefused(_, detail):
                log.warning("%s", detail)

    def _verified(self, order: Verify, checksum: int, detail: str) -> None:
        self._run(self.core.verified(order.session, order.grant, checksum, detail, self._loop.time()))


class PrefillNode:
    """A prefill rank on the loop: maps arenas, writes cells, says when pages are safe.

    It tells who dials it which layers and heads `components` hold; `replicas` says of which there are equal holders.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        tell: Callable[[Leased | Landed | RoomFailed | Drained], None],
        *,
        pool_address: int = 0,
        copy_threads: int = 2,
        replicas: Replicas | None = None,
        others: Others | None = None,
    ) -> None:
        self._tell, self._others = tell, others
        self._loop = asyncio.get_running_loop()
        identity = settings.identity("prefill", holds_of(components, settings.ranks, replicas or {}))
        core = self.core = PrefillSessions(identity, components, settings.limits)
        self._silence_s = settings.limits.silence_ms / 1e3
        self._transport: WriterTransport = ShmWriter(
            tuple(components), pool_address=pool_address, copy_threads=copy_threads
        )
        self.bus = settings.bus(self.receive)
        ticker = Ticker(core.next_tick, lambda: self._run(core.tick(self._loop.time())))
        self._run: Performer[PrefillEffect] = Performer(self._perform, ticker)
        self._events = EventQueue(lambda room, error: self.abort(room, Cause.ENGINE, f"its event: {error}"))
        self._mappings: set[asyncio.Task[None]] = set()
        self._started_ns: dict[tuple[int, int], int] = {}
        self.stamp_ns = 0  # CLOCK_MONOTONIC of the latest write's end, or finish: what lands a room
        self.copy_ns: dict[int, int] = {}  # by room, until it is drained: the time that its writes took

    def open(
        self, room: int, *, tokens: int, time_left_s: float, grants: int = 1, peers: Collection[str] | None = None
    ) -> None:
        """As PrefillSessions.open, `peers` by the names that they go by; numbers that make no sense fail the room."""
        now = self._loop.time()
        names = None if peers is None else [self.bus.peer_named(name) for name in peers]
        try:
            effects = self.core.open(
                room, tokens=tokens, now=now, deadline=now + time_left_s, grants=grants, peers=names
            )
        except LocalProtocolError as error:
            if room in self.core.rooms:
                raise  # Drained would be a lie about the room that has this label.
            self._tell(RoomFailed(room, Cause.REFUSED, str(error)))
            self._tell(Drained(room))
            return
        self._run(effects)

    def push(self, room: int, cell: Cell, *, after: Event | None = None) -> None:
        """Offers a cell once `after` and the events of the room's earlier cells have fired; read until it is drained.

        A wrong cell fails the room.
        """
        self._call(room, after, lambda: self._run(self.core.push(room, cell)))

    def finish(self, room: int, *, aux: bytes, after: Event | None = None) -> None:
        """No more cells, once `after` has fired and every cell has been offered."""
        self._call(room, after, lambda: self._finish(room, aux))

    def abort(self, room: int, cause: Cause = Cause.ABORTED, detail: str = "") -> None:
        """Gives a room up; Drained says when its pages are safe."""
        self._run(self.core.abort(room, self._loop.time(), cause, detail))

    def receive(self, peer: str, message: Message) -> None:
        """A message of a decode node, unless it is somebody else's."""
        if self._others is None or not self._others(peer, message):
            self._run(self.core.receive(peer, message, self._loop.time()))

    @property
    def idle(self) -> bool:
        """No room is open, no write in flight, and no decode node that lives has an end to acknowledge."""
        silent = self._loop.time() - self._silence_s
        waits = (self.core.peers.get(each.peer) for each in self.core.sessions.values() if each.open and each.duties)
        return not self.core.rooms and all(peer is None or peer.heard < silent for peer in waits)

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list. Who is on it no more loses its sessions: nothing is written for it any more."""
        for peer in self.bus.allow(allowed):
            known = self.core.peers.get(peer)
            self.receive(peer, _revoked() if known is None else Goodbye(known.incarnation, _REVOKED))

    async def close(self) -> None:
        """Fails what is open, says goodbye, stops the clock, and waits for what is in flight: pages are safe then."""
        for room in list(self.core.rooms):
            self.abort(room, Cause.SHUTDOWN, "this node is closed")
        for name in self.core.peers:
            self.bus.send(name, Goodbye(self.core.identity.incarnation, Cause.SHUTDOWN.value))
        self._run.ticker.stop()
        self._events.stop()
        for task in self._mappings:
            task.cancel()
        await self._transport.close()
        await self.bus.close()

    def _perform(self, effect: PrefillEffect) -> None:
        match effect:
            case Send(peer, message):
                self.bus.send(peer, message)
            case Write():
                self._started_ns[effect.session, effect.write] = time.monotonic_ns()
                self._transport.write(effect, self._wrote)
            case Leased() | Landed() | RoomFailed():
                self._tell(effect)
            case Drained(room):
                self._events.forget(room)
                self.copy_ns.pop(room, None)
                self._tell(effect)
            case StopWriting(session, grant):
                self._transport.cancel(session, grant)
            case Map():
                task = self._loop.create_task(self._map(effect))
                self._mappings.add(task)
                task.add_done_callback(self._mappings.discard)
            case Unmap(session):
                self._transport.unmap(session)
            case FenceWriter(session):
                # The only writer here is this process: what it left unknown stays quarantined until it is gone.
                log.critical(
                    "session %#x: a write's outcome is unknown; restart this process to give its slots back", session
                )

    def _call(self, room: int, after: Event | None, call: Callable[[], None]) -> None:
        def checked() -> None:
            try:
                call()
            except LocalProtocolError as error:
                self.abort(room, Cause.REFUSED, str(error))

        self._events.call(room, after, checked)

    def _finish(self, room: int, aux: bytes) -> None:
        self.stamp_ns = time.monotonic_ns()
        self._run(self.core.finish(room, aux=aux, now=self._loop.time()))

    def _wrote(self, order: Write, outcome: Outcome, detail: str, checksum: int) -> None:
        self.stamp_ns = time.monotonic_ns()
        took_ns = self.stamp_ns - self._started_ns.pop((order.session, order.write))
        self.copy_ns[order.room] = self.copy_ns.get(order.room, 0) + took_ns
        now = self._loop.time()
        self._run(self.core.wrote(order.session, order.write, outcome, detail, now, checksum=checksum))

    async def _map(self, effect: Map) -> None:
        def mapped(bytes_ready: int) -> None:
            self._run(self.core.mapped(effect.session, bytes_ready))

        try:
            bytes_ready = await self._transport.map(effect.session, effect.reach, effect.components, mapped)
        except PDTransferError as error:
            log.warning("session %#x: %s", effect.session, error)
            self._run(self.core.unmappable(effect.session, str(error), self._loop.time()))
        else:
            mapped(bytes_ready)

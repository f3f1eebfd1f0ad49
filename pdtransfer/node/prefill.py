"""A prefill rank on the loop: maps arenas, writes cells, says when pages are safe."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace

from ..bus.keys import AllowList
from ..engine_api import Spans
from ..errors import Cause, LocalProtocolError, PDTransferError, TransportError
from ..handoff.effects import (
    Drained,
    FenceWriter,
    Landed,
    Leased,
    Map,
    Outcome,
    PrefillEffect,
    PrefillEvent,
    RoomFailed,
    Send,
    StopWriting,
    Unmap,
    Write,
)
from ..handoff.prefill.sessions import Cell, PrefillSessions
from ..handoff.ready_gate import Gate
from ..handoff.sharing import Replicas, holds_of
from ..layout.layout import Component
from ..transports.card_launcher import PoolCard
from ..transports.device_events import Event, EventQueue
from ..transports.network import NETWORK, Network, Transport
from ..transports.select import WriterChoice
from ..wire import Goodbye, Message
from .core_driver import Clock, Performer, Ticker
from .settings import REVOKED, NodeSettings, Others, revoked

log = logging.getLogger(__name__)


class PrefillNode:
    """One prefill rank. `tell` gets what the engine has to hear.

    It tells who dials it which layers and heads `components` hold; `replicas` says of which there are equal holders.
    With a `card` the pool lies in the memory of that card, which writes. `spans` hears of each write, and of each of a
    card's launches. `condemned` is called once nothing but the end of this process proves a write's end.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        tell: Callable[[PrefillEvent], None],
        *,
        pool_address: int = 0,
        pool_fd: int = -1,
        copy_threads: int = 2,
        card: int | None = None,
        replicas: Replicas | None = None,
        others: Others | None = None,
        transport: Transport = "auto",
        network: Network = NETWORK,
        spans: Spans | None = None,
    ) -> None:
        self._tell, self._others, self._spans = tell, others, spans
        self._loop, self._clock = asyncio.get_running_loop(), Clock(settings.limits.ping_ms / 2e3)
        self.transport = WriterChoice(
            tuple(components),
            transport,
            network,
            pool_address=pool_address,
            pool_fd=pool_fd,
            copy_threads=copy_threads,
            card=None if card is None else PoolCard(card, spans),
            lost=self._end_writer,
            broken=self._broken,
            near=self._nears,
        )
        holds = holds_of(components, settings.ranks, replicas or {})
        identity = settings.identity("prefill", holds, self.transport.taken)
        core = self.core = PrefillSessions(identity, components, settings.limits)
        self._silence_s = settings.limits.silence_ms / 1e3
        self.condemned: Callable[[], None] = lambda: None
        self.bus = settings.bus(self.receive)
        ticker = Ticker(core.next_tick, lambda: self._run(core.tick(self._clock.now())), self._clock)
        self._run: Performer[PrefillEffect] = Performer(self._perform, ticker)
        self._events = EventQueue(self._broken)
        self._gates: dict[int, Gate] = {}  # of each room's latest cell
        self._tasks: set[asyncio.Task[None]] = set()
        self._fencing: set[int] = set()  # sessions
        self._started_ns: dict[tuple[int, int], int] = {}
        self.stamp_ns = 0  # CLOCK_MONOTONIC of the latest write's end, or finish: what lands a room
        self.copy_ns: dict[int, int] = {}  # by room, until it is drained: the time that its writes took

    def open(
        self, room: int, *, tokens: int, time_left_s: float, grants: int = 1, peers: Collection[str] | None = None
    ) -> None:
        """As PrefillSessions.open, `peers` by the names that they go by; numbers that make no sense fail the room."""
        now = self._clock.now()
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
        """Offers a cell, whose rows are read from when `after` has fired until it is drained.

        Without `after` of its own it waits as the room's cell before it. A wrong cell fails the room. A card waits for
        CUDA events itself, off the loop.
        """
        gate = self._gates.get(room) if after is None else Gate(after)
        if gate is not None and room in self.core.rooms:
            self._gates[room] = gate
        try:
            self._run(self.core.push(room, replace(cell, after=gate)))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def finish(self, room: int, *, aux: bytes, after: Event | None = None) -> None:
        """No more cells, once `after` has fired; the room lands when every cell has."""
        self._events.call(room, after, lambda: self._finish(room, aux))

    def abort(self, room: int, cause: Cause = Cause.ABORTED, detail: str = "") -> None:
        """Gives a room up; Drained says when its pages are safe."""
        self._run(self.core.abort(room, self._clock.now(), cause, detail))

    def receive(self, peer: str, message: Message) -> None:
        """A message of a decode node, unless it is somebody else's."""
        if self._others is None or not self._others(peer, message):
            self._run(self.core.receive(peer, message, self._clock.now()))

    @property
    def idle(self) -> bool:
        """No room is open, no write in flight, and no decode node that lives has an end to acknowledge."""
        silent = self._clock.now() - self._silence_s
        waits = (self.core.peers.get(each.peer) for each in self.core.sessions.values() if each.open and each.duties)
        return not self.core.rooms and all(peer is None or peer.heard < silent for peer in waits)

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list. Who is on it no more loses its sessions: nothing is written for it any more."""
        for peer in self.bus.allow(allowed):
            known = self.core.peers.get(peer)
            self.receive(peer, revoked() if known is None else Goodbye(known.incarnation, REVOKED))

    async def close(self) -> None:
        """Fails what is open, says goodbye, stops the clock, and waits for what is in flight: pages are safe then."""
        for room in list(self.core.rooms):
            self.abort(room, Cause.SHUTDOWN, "this node is closed")
        for name in self.core.peers:
            self.bus.send(name, Goodbye(self.core.identity.incarnation, Cause.SHUTDOWN.value))
        self._run.ticker.stop()
        self._events.stop()
        for task in self._tasks:
            task.cancel()
        await self.transport.close()
        await self.bus.close()

    def _perform(self, effect: PrefillEffect) -> None:
        match effect:
            case Send():  # without sub-patterns, which cost as much as the call
                self.bus.send(effect.peer, effect.message)
            case Write():
                self._started_ns[effect.session, effect.write] = time.monotonic_ns()
                self.transport.write(effect, self._wrote)
            case Leased() | Landed() | RoomFailed():
                self._tell(effect)
            case Drained():
                self._events.forget(effect.room)
                self._gates.pop(effect.room, None)
                self.copy_ns.pop(effect.room, None)
                self._tell(effect)
            case StopWriting(session, grant):
                self.transport.cancel(session, grant)
            case Map():
                self._spawn(self._map(effect))
            case Unmap(session):
                self.transport.unmap(session)
            case FenceWriter(session):
                self._end_writer(session)

    def _broken(self, room: int, error: Exception | str) -> None:
        self.abort(room, Cause.ENGINE, f"its event: {error}")

    def _finish(self, room: int, aux: bytes) -> None:
        self.stamp_ns = time.monotonic_ns()
        try:
            self._run(self.core.finish(room, aux=aux, now=self._clock.now()))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def _nears(self, order: Write) -> None:
        self._run(self.core.near(order.session, order.write))

    def _wrote(self, order: Write, outcome: Outcome, detail: str, checksum: int) -> None:
        self.stamp_ns = time.monotonic_ns()
        started_ns = self._started_ns.pop((order.session, order.write))
        if order.after is not None:
            started_ns = max(started_ns, order.after.opened_ns)
            if order.after.broken:
                self._broken(order.room, order.after.broken)
        took_ns = self.stamp_ns - started_ns
        if self._spans is not None:
            self._report(self._spans, order, started_ns, outcome)
        self.copy_ns[order.room] = self.copy_ns.get(order.room, 0) + took_ns
        now = self._clock.now()
        self._run(self.core.wrote(order.session, order.write, outcome, detail, now, checksum=checksum))

    def _report(self, spans: Spans, order: Write, started_ns: int, outcome: Outcome) -> None:
        """From when the transport got the write, and its rows were computed, until this loop heard of its end."""
        session, rows = self.core.sessions.get(order.session), len(order.source_slots)
        layout = session.components[order.component].layout if session is not None else None
        name = f"rows {order.first_row}-{order.first_row + rows}, layers {order.layers[0]}-{order.layers[1]}"
        spans(
            "push", name if outcome is Outcome.LANDED else f"{name}: {outcome.name}",
            started_ns / 1e9, self.stamp_ns / 1e9, room=order.room, layer=order.layers[0],
            byte_count=rows * layout.row_bytes_of(*order.layers) if layout is not None else 0,
        )  # fmt: skip

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_writer(self, session: int) -> None:
        if session not in self._fencing:
            self._fencing.add(session)
            self._spawn(self._fence(session))

    async def _fence(self, session: int) -> None:
        fenced = await self.transport.fence(session)
        if fenced:
            self._fencing.discard(session)
            self._run(self.core.fenced(session, self._clock.now()))
            return
        # The only writer here is this process: what it left unknown stays quarantined until it is gone.
        log.critical("session %#x: a write's outcome is unknown until this process has ended", session)
        self.condemned()

    async def _map(self, effect: Map) -> None:
        def mapped(bytes_ready: int) -> None:
            direct = self.transport.hbm_direct(effect.session)
            self._run(self.core.mapped(effect.session, bytes_ready, hbm_direct=direct))

        try:
            if effect.session in self._fencing:  # that goes by the id: it would be taken for this one's end
                raise TransportError("an earlier session of the same id has not ended yet")
            bytes_ready = await self.transport.map(effect.session, effect.reach, effect.components, mapped)
        except PDTransferError as error:
            log.warning("session %#x: %s", effect.session, error)
            self._run(self.core.unmappable(effect.session, str(error), self._clock.now()))
        else:
            mapped(bytes_ready)

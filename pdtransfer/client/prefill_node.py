"""A prefill rank on the loop: maps arenas, writes cells, reports when pages may be reused."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ..bus.gone import Gone
from ..bus.keys import REVOKED, AllowList, revoked
from ..disconnect import disconnect
from ..errors import Cause, LocalProtocolError, PDTransferError, TransportError
from ..handoff.effects import (
    FenceWriter,
    Map,
    Outcome,
    PeerRefused,
    PrefillEffect,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    Send,
    StopWriting,
    Unmap,
    Write,
)
from ..handoff.events import Spans
from ..handoff.prefill.cells import Cell
from ..handoff.prefill.sessions import PrefillSessions
from ..handoff.sharing import Replicas, holds_of
from ..layout.layout import Component
from ..threads import in_thread
from ..transports.base import WriterCalls
from ..transports.copier import CANCELLED
from ..transports.device_events import Event, EventQueue, GateEvent
from ..transports.options import WriterOptions, of_node
from ..transports.select import PrefillTransports
from ..transports.works import Tasks
from ..wire import Goodbye, Grant, Landed, Member, Message, Released
from .core_driver import EffectRunner, LoopClock, Ticker
from .settings import NO_OTHERS, NodeSettings, Others, PeerTimed

log = logging.getLogger(__name__)


class PrefillNode:
    """One prefill rank. `on_event` gets the events for the engine.

    Peers that dial it get the layers and heads that `components` hold, and which of them other ranks hold as well
    (`replicas`). `spans` gets each write, and each launch on a GPU. `condemned` is called once only the end of this
    process can prove the end of a write.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        on_event: Callable[[PrefillEvent], None],
        *,
        writer: WriterOptions | None = None,
        replicas: Replicas | None = None,
        others: Others = NO_OTHERS,
        spans: Spans | None = None,
        handed_off: PeerTimed | None = None,
        condemned: Callable[[], None] = lambda: None,
    ) -> None:
        """`handed_off` gets the time from each grant's Landed, which follows its last byte written or its room's finish
        at once, to decode's acknowledgement. That is a round trip, which is measurable between any two hosts."""
        self._on_event, self._others, self._spans, self._handed_off = on_event, others, spans, handed_off
        self._loop, self._clock = asyncio.get_running_loop(), LoopClock.among_peers(settings.limits.ping_ms)
        self.transport = PrefillTransports(
            tuple(components), of_node(writer or WriterOptions(), settings.guard, self._keep_line),
            WriterCalls(self._wrote, self._end_writer, self._wake_hint), spans,
        )  # fmt: skip
        holds = holds_of(components, settings.ranks, replicas or {})
        identity = settings.identity("prefill", holds, self.transport.taken)
        core = self.core = PrefillSessions(
            identity, components, settings.limits, group_is_known=settings.group is not None
        )
        self._silence_s = settings.limits.silence_ms / 1e3
        self._condemned = condemned
        self.bus = settings.bus(self.receive, self._report_gone)
        ticker = Ticker(
            core.next_tick, lambda: self._run(core.tick(self._clock.now())), self._clock, self.bus.read_lines
        )
        self._run: EffectRunner[PrefillEffect] = EffectRunner(self._perform, ticker)
        self._events = EventQueue(self._broken)
        self._held: dict[tuple[int, int], list[Write]] = {}  # by session and grant, whose gates are closed
        self._tasks = Tasks()
        self._fencing: set[int] = set()  # sessions
        self._started_ns: dict[tuple[int, int], int] = {}
        self._landed_ns: dict[int, dict[int, int]] = {}  # by session and grant, until it is acknowledged
        self.stamp_ns = 0  # CLOCK_MONOTONIC of the latest write's end or finish, whichever landed the latest room
        self.copy_ns: dict[int, int] = {}  # by room, until it is drained: the time that its writes took

    async def prepare(self) -> None:
        """As PrefillTransports.prepare, off the loop: to be awaited before the node listens."""
        await in_thread(self.transport.prepare)

    def set_group(self, members: tuple[Member, ...]) -> None:
        """As PrefillSessions.set_group."""
        self.core.set_group(members)

    def open(
        self,
        room: int,
        *,
        tokens: int | None,
        time_left_s: float,
        grants: int | None = 1,
        peers: Collection[str] | None = None,
    ) -> None:
        """As PrefillSessions.open, with `peers` by their names on the bus. Wrong numbers fail the room."""
        now = self._clock.now()
        names = None if peers is None else [self.bus.peer_name(name) for name in peers]
        try:
            effects = self.core.open(
                room, tokens=tokens, now=now, deadline=now + time_left_s, grants=grants, peers=names
            )
        except LocalProtocolError as error:
            if room in self.core.rooms:
                raise  # RoomDrained would be wrong for the room that has this id.
            self._on_event(RoomFailed(room, Cause.REFUSED, str(error)))
            self._on_event(RoomDrained(room))
            return
        self._run(effects)

    def push(self, room: int, cell: Cell) -> None:
        """Offers a cell, whose rows are read once its gate is open, until it is drained. A wrong cell fails the room.
        A GPU waits for CUDA events itself, off the loop."""
        try:
            self._run(self.core.push(room, cell, self._clock.now()))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def finish(self, room: int, *, aux: bytes, after: Event | None = None) -> None:
        """Ends the room's cells once `after` has fired; the room lands when every cell has."""
        self._events.call(room, after, lambda: self._finish(room, aux))

    def abort(self, room: int, cause: Cause = Cause.ABORTED, detail: str = "") -> None:
        """Gives up a room; RoomDrained reports when its pages may be reused."""
        self._run(self.core.abort(room, self._clock.now(), cause, detail))

    def receive(self, peer: str, message: Message) -> None:
        """Takes a message of a decode rank, unless `others` has taken it."""
        if type(message) is Released and self._handed_off is not None:
            self._time_handoff(self._handed_off, peer, message)
        if not self._others.receive(peer, message):
            self._run(self.core.receive(peer, message, self._clock.now()))
            if type(message) is Grant:
                self._expect_rows(peer, message)

    def _expect_rows(self, peer: str, message: Grant) -> None:
        """Tells the transport of a grant that was not refused: its rows may still have to be computed."""
        session = self.core.sessions.get(message.session)
        if session is not None and session.peer == peer and (grant := session.grants.get(message.grant)) is not None:
            for share in grant.shares:
                self.transport.expect_rows(session.id, share.component, share.extents)

    def way_of(self, room: int) -> tuple[str, str]:
        """The first decode rank that has granted for the room, by its node or the name of its key, and the transport to
        it. Empty where there is none."""
        record = self.core.rooms.get(room)
        if record is None or not record.grants:
            return "", ""
        session = next(iter(record.grants.values())).session
        return session.peer.partition(":")[2], self.transport.name_of(session.id)

    @property
    def idle(self) -> bool:
        """True if no room is open, no write is in flight, and no living decode rank has yet to acknowledge an end."""
        silent = self._clock.now() - self._silence_s
        waiting = {session.peer for session in self.core.sessions.values() if session.open and session.grants}
        peers = [self.core.peers.get(name) for name in waiting]
        return not self.core.rooms and all(peer is None or peer.liveness.last_seen < silent for peer in peers)

    def _report_gone(self, peer: str, gone: Gone | None) -> None:
        evidence = "" if gone is None else gone.text
        if gone is None or not gone.host:  # a decode node keeps its session while the network is away
            self._run(self.core.gone(peer, evidence, self._clock.now()))
        self._others.gone(peer, evidence)

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list. A peer that is not on it loses its sessions; nothing more is written for it."""
        for peer in self.bus.allow(allowed):
            record = self.core.peers.get(peer)
            self.receive(peer, revoked() if record is None else Goodbye(record.incarnation, REVOKED))

    async def close(self) -> None:
        """Fails open rooms, sends Goodbye, stops the clock, waits for what is in flight. Then pages may be reused."""
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
                if type(effect.message) is Landed and self._handed_off is not None:
                    landed = effect.message  # perhaps once more
                    self._landed_ns.setdefault(landed.session, {}).setdefault(landed.grant, time.monotonic_ns())
                self.bus.send(effect.peer, effect.message)
            case Write():
                self._started_ns[effect.session, effect.write] = time.monotonic_ns()
                self._hold_or_write(effect)
            case RoomAsked() | RoomLeased() | RoomLanded() | RoomFailed():
                self._on_event(effect)
            case PeerRefused(_, detail):
                log.warning("%s", detail)
            case RoomDrained():
                self._events.forget(effect.room)
                self.copy_ns.pop(effect.room, None)
                self._on_event(effect)
            case StopWriting(session, grant):
                self._events.forget((session, grant))
                for order in self._held.pop((session, grant), ()):
                    self._loop.call_soon(self._wrote, order, Outcome.FAILED, CANCELLED, 0)
                self.transport.cancel(session, grant)
            case Map():
                self._tasks.spawn(self._map(effect))
            case Unmap(session):
                self._landed_ns.pop(session, None)
                self.bus.detach(session)
                self.transport.unmap(session)
            case FenceWriter(session):
                self._end_writer(session)

    def _keep_line(self, session: int, line: socket.socket) -> None:
        if (record := self.core.sessions.get(session)) is None:
            disconnect(line)
        else:
            self.bus.attach(record.peer, session, line, greeted=False)

    def _hold_or_write(self, order: Write) -> None:
        """A write goes once its gate is open, but a thread that launches on a GPU waits for CUDA events itself."""
        gate, key = order.after, (order.session, order.grant)
        if gate is not None and (gate.next is None or not self.transport.sleeps_on_cuda(order.session)):
            try:
                opened = gate.opened_ns if key in self._held else gate.poll(time.monotonic_ns())
            except Exception:  # noqa: BLE001 (the queue of events asks again, and reports it)
                opened = False
            if not opened:
                self._held.setdefault(key, []).append(order)
                self._events.call(key, GateEvent(gate), partial(self._release, key))
                return
        self.transport.write(order)

    def _release(self, key: tuple[int, int]) -> None:
        order, *left = self._held.pop(key)
        if left:
            self._held[key] = left
        self.transport.write(order)

    def _broken(self, key: int | tuple[int, int], error: Exception | str) -> None:
        """An event cannot be queried any more: that of a room's finish, or of the first write of a grant."""
        room = key if isinstance(key, int) else self._held[key][0].room
        self.abort(room, Cause.ENGINE, f"its event: {error}")

    def _finish(self, room: int, aux: bytes) -> None:
        self.stamp_ns = time.monotonic_ns()
        try:
            self._run(self.core.finish(room, aux=aux, now=self._clock.now()))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def _time_handoff(self, handed_off: PeerTimed, peer: str, message: Released) -> None:
        session = self.core.sessions.get(message.session)
        if session is not None and session.peer == peer:
            landed_ns = self._landed_ns.get(session.id, {}).pop(message.grant, 0)
            if landed_ns:
                took_s = (time.monotonic_ns() - landed_ns) / 1e9
                handed_off(peer.partition(":")[2], self.transport.name_of(session.id), took_s)

    def _wake_hint(self, order: Write) -> None:
        self._run(self.core.wake_hint(order.session, order.write))

    def _wrote(self, order: Write, outcome: Outcome, detail: str, checksum: int) -> None:
        self.stamp_ns = time.monotonic_ns()
        started_ns = self._started_ns.pop((order.session, order.write))
        if order.after is not None:
            if order.after.broken:  # the room ends first, with this reason
                self._broken(order.room, order.after.broken)
            started_ns = max(started_ns, order.after.opened_ns)
        took_ns = self.stamp_ns - started_ns
        if self._spans is not None:
            self._report_span(self._spans, order, started_ns, outcome)
        self.copy_ns[order.room] = self.copy_ns.get(order.room, 0) + took_ns
        now = self._clock.now()
        self._run(self.core.wrote(order.session, order.write, outcome, detail, now, checksum=checksum))

    def _report_span(self, spans: Spans, order: Write, started_ns: int, outcome: Outcome) -> None:
        """From when the transport got the write, and its rows were computed, until this loop got its end."""
        session, rows = self.core.sessions.get(order.session), len(order.source_slots)
        layout = session.components[order.component].layout if session is not None else None
        name = f"rows {order.first_row}-{order.first_row + rows}, layers {order.layers[0]}-{order.layers[1]}"
        spans(
            "push", name if outcome is Outcome.LANDED else f"{name}: {outcome.name}",
            started_ns / 1e9, self.stamp_ns / 1e9, room=order.room, layer=order.layers[0],
            byte_count=rows * layout.row_bytes_of(*order.layers) if layout is not None else 0,
        )  # fmt: skip

    def _end_writer(self, session: int) -> None:
        if session not in self._fencing:
            self._fencing.add(session)
            self._tasks.spawn(self._fence(session))

    async def _fence(self, session: int) -> None:
        fenced = await self.transport.fence(session)
        if fenced:
            self._fencing.discard(session)
            self._run(self.core.fenced(session, self._clock.now()))
            return
        # This process is the only writer: a write of unknown outcome stays quarantined until it has ended.
        log.critical("session %#x: a write's outcome is unknown until this process has ended", session)
        self._condemned()

    async def _map(self, effect: Map) -> None:
        def mapped(bytes_ready: int) -> None:
            direct = self.transport.hbm_direct(effect.session)
            self._run(self.core.mapped(effect.session, bytes_ready, hbm_direct=direct))

        try:
            if effect.session in self._fencing:  # its end would be taken for this one's
                raise TransportError("an earlier session of the same id has not ended yet")
            record = self.core.sessions.get(effect.session)
            peer = record.peer if record is not None else ""
            bytes_ready = await self.transport.map(effect, mapped, peer=peer)
        except PDTransferError as error:
            log.warning("session %#x: %s", effect.session, error)
            self.bus.detach(effect.session)
            self._run(self.core.unmappable(effect.session, str(error), self._clock.now()))
        else:
            mapped(bytes_ready)

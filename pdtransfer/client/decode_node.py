"""A decode rank on the loop: expects rooms, hands its arena over, fences writers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..bus.gone import Gone
from ..bus.keys import AllowList, revoked
from ..disconnect import disconnect
from ..errors import Cause, ConfigError, LocalProtocolError, TransportError, WorldError
from ..handoff.component_variants import NO_STAND_INS, StandIns
from ..handoff.decode.records import LeaseEntry
from ..handoff.decode.room_request import RoomRequest
from ..handoff.decode.sessions import DecodeSessions
from ..handoff.effects import (
    DecodeEffect,
    DecodeEvent,
    Dial,
    Fence,
    Forget,
    HangUp,
    Offer,
    PeerRefused,
    RoomDrained,
    RoomFailed,
    RoomLeased,
    RoomReady,
    Send,
    SessionLost,
    Settle,
    StopSettling,
)
from ..handoff.slot_allocator import check_apart
from ..handoff.states import SessionState
from ..layout.layout import Component
from ..layout.staging import staged
from ..memory.arena_memory import ArenaMemory
from ..transports.device_events import Event, EventQueue
from ..transports.hbm_copier import HbmCopier
from ..transports.options import ArenaOptions, of_node
from ..transports.select import DecodeTransports, on_loopback
from ..transports.verifier import Verifier
from ..transports.works import Tasks
from ..wire import Goodbye, Message, Registered
from .core_driver import EffectRunner, LoopClock, Ticker
from .settings import NO_OTHERS, NodeSettings, Others, PeerTimed

log = logging.getLogger(__name__)


class DecodeNode:
    """One decode rank. `on_event` gets the events for the engine."""

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        arena: ArenaMemory,
        on_event: Callable[[DecodeEvent], None],
        *,
        options: ArenaOptions | None = None,
        enable_hisparse: bool = False,
        engine_slots: bool = False,
        stand_ins: StandIns = NO_STAND_INS,
        prefix_cache: bool = True,
        verify: bool = False,
        others: Others = NO_OTHERS,
        leased: Callable[[int], None] = lambda _: None,
        quarantined: PeerTimed = lambda _, __, ___: None,
        unusable_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`leased` gets each room that has its slots, some time before it is READY. `quarantined` gets how long each
        lease was in quarantine, once its writer is proven quiet. `unusable_changed` is called when what `unusable`
        returns may have changed, in the middle of a call of the core.

        Raises LocalProtocolError for components that lie in the same memory without `engine_slots`, and for a staging
        buffer that is too small for them.
        """
        if not engine_slots:
            check_apart(components)
        self._on_event, self._others, self._leased = on_event, others, leased
        self._clock = LoopClock.among_peers(settings.limits.ping_ms)
        # To be verified, rows have to land where this process can read them: in the arena.
        self.transport = DecodeTransports(
            arena, of_node(options or ArenaOptions(), settings.guard, self._keep_line), hbm_direct=not verify,
            lost=self._unoffered,
        )  # fmt: skip
        core = self.core = DecodeSessions(
            settings.identity("decode", transports=self.transport.taken),
            components,
            settings.limits,
            lambda: secrets.randbits(64) or 1,  # 0 is no session
            enable_hisparse=enable_hisparse,
            prefix_cache=prefix_cache,
            verify=verify,
            # An arena that is not prefaulted is backed as it is written, but for what waits for a writer that needs it.
            bytes_ready=arena.bytes_ready or (None if arena.needed == arena.byte_count else 0),
            landing=self._landing(components, arena),
            engine_slots=engine_slots,
            stand_ins=stand_ins,
            may_be_one=lambda first, second: self.bus.may_be_one(first, second),  # noqa: PLW0108 -- made below
            quarantine=self._on_quarantine,
            unusable_changed=unusable_changed,
        )
        self._quarantined, self._since = quarantined, dict[LeaseEntry, tuple[str, str, float]]()
        self._offers = Tasks()
        self._arena, self._backs_late = arena, arena.needed < arena.byte_count  # its staging buffer
        self._backing: asyncio.Task[None] | None = None  # of the buffer, from the first writer on that needs it
        self._closing = False
        self.bus = settings.bus(self.receive, self._report_gone)
        ticker = Ticker(
            core.next_tick, lambda: self._run(core.tick(self._clock.now())), self._clock, self.bus.read_lines
        )
        self._run: EffectRunner[DecodeEffect] = EffectRunner(self._perform, ticker)
        self._events = EventQueue(self._never_quiet)
        # Last, since their threads would outlive a node that cannot be made.
        self._verifier = Verifier(arena.mapping.address, self._settled) if verify else None
        self._lifter = HbmCopier(arena, arena.hbm, self._settled) if arena.hbm is not None else None

    @staticmethod
    def _landing(components: Sequence[Component], arena: ArenaMemory) -> tuple[Component, ...] | None:
        """The components for writers that do not reach the GPU; None if these are the same as for others."""
        if arena.hbm is None or all(component.memory == "dram" for component in components):
            return None
        return staged(components, base=arena.staging_base, byte_count=arena.staging_bytes)

    def introduce(self, sources: Sequence[str]) -> None:
        """Opens sessions ahead of time with ranks that rooms may name, up to AHEAD_MAX peers. One that may not be
        dialled is skipped: a room that names it fails with the reason."""
        for source in sources:
            now = self._clock.now()
            if self.core.may_dial_ahead(source, now):
                with suppress(ConfigError, WorldError):
                    self.bus.dial(self.core.prefill_peers.resolve(source, now), "prefill")
                    self._run(self.core.dial(source, now))

    def expect(self, request: RoomRequest) -> None:
        """As DecodeSessions.expect; an invalid request and a source that cannot be dialled fail the room. Raises
        LocalProtocolError for a room that is under way."""
        now = self._clock.now()
        try:
            for source in request.sources:
                self.bus.dial(self.core.prefill_peers.resolve(source, now), "prefill")
            effects = self.core.expect(request, now)
        except (LocalProtocolError, WorldError) as error:  # WorldError: this node can dial no more, others may
            if request.room in self.core.rooms:
                raise  # RoomFailed and RoomDrained would be wrong for the room that has this id.
            cause = Cause.PEER_LOST if isinstance(error, WorldError) else Cause.REFUSED
            self._on_event(RoomFailed(request.room, cause, str(error)))
            if request.chosen is not None:
                self._on_event(RoomDrained(request.room))
            self.withdraw(request.room, request.sources, f"{cause.value}: {error}")
            return
        self._run(effects)

    def ready(self, bytes_ready: int) -> None:
        """Reports that this number of the arena's first bytes is prefaulted."""
        self._run(self.core.ready(bytes_ready, self._clock.now()))

    def way_of(self, room: int) -> tuple[str, str]:
        """The first prefill rank of the room, by its node, and the transport from it; empty where it is not known."""
        record = self.core.rooms.get(room)
        peer = self.core.prefill_peers.peers.get(record.sources[0]) if record is not None and record.sources else None
        if peer is None or peer.identity is None:
            return "", ""
        return peer.identity.node, self.transport.name_of(peer.session.id) if peer.session is not None else ""

    def release(self, room: int, *, after: Event | None = None, keys: Sequence[bytes] = ()) -> None:
        """Releases a READY room once `after` has fired: the engine does not use it any more. A room that is not READY
        fails. `keys` as DecodeSessions.release."""
        self._events.call(room, after, lambda: self._release(room, keys))

    def abort(self, room: int, cause: Cause = Cause.ABORTED, detail: str = "") -> None:
        """Gives up a room that is not READY."""
        self._run(self.core.abort(room, self._clock.now(), cause, detail))

    def withdraw(self, room: int, sources: Sequence[str], detail: str) -> None:
        """Informs prefill ranks that a room will not be expected here."""
        self._run(self.core.withdraw(room, sources, detail, self._clock.now()))

    def unusable(self) -> list[tuple[str, str]]:
        """The dialled prefill ranks that no room can be expected from now, each with the reason."""
        return self.core.prefill_peers.unusable(self._clock.now(), self.bus.trouble)

    def receive(self, peer: str, message: Message) -> None:
        """Takes a message of a prefill rank, unless `others` has taken it."""
        if not self._others.receive(peer, message):
            self._run(self.core.receive(peer, message, self._clock.now()))
            if isinstance(message, Registered):
                self._back_for(message.session)

    def _report_gone(self, peer: str, gone: Gone | None) -> None:
        evidence = "" if gone is None else gone.text
        self._run(self.core.gone(peer, evidence, self._clock.now()))
        self._others.gone(peer, evidence)

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list. A peer that is not on it loses its sessions; its leases wait for the fence."""
        for peer in self.bus.allow(allowed):
            self.receive(peer, revoked())

    async def close(self) -> None:
        """Fails rooms that are not READY, sends Goodbye, stops the clock and the hand-over.

        Peers may write until they have received it, so the arena's memory must not be reused before its last mapping is
        gone. This node reads none of it any more.
        """
        for room in list(self.core.rooms):
            self.abort(room, Cause.SHUTDOWN, "this node is closed")
        for name, peer in self.core.prefill_peers.peers.items():
            if peer.identity is not None:
                self.bus.send(name, Goodbye(self.core.prefill_peers.identity.incarnation, Cause.SHUTDOWN.value))
        self._run.ticker.stop()
        self._events.stop()
        for task in self._offers:
            task.cancel()
        self._closing = True
        if self._backing is not None:
            await asyncio.wait([self._backing])
        for settling in (self._verifier, self._lifter):
            if settling is not None:
                await settling.close()
        await self.transport.close()
        await self.bus.close()

    @property
    def lifted_bytes(self) -> int:
        """Bytes that were copied up from the staging buffer to HBM, as the copier counts them."""
        return self._lifter.moved_bytes if self._lifter is not None else 0

    def _on_quarantine(self, lease: LeaseEntry, begins: bool) -> None:
        if begins:
            identity = self.core.prefill_peers.peers[lease.session.peer].identity
            node = identity.node if identity is not None else ""
            self._since[lease] = node, self.transport.name_of(lease.session.id), time.monotonic()
        else:
            node, transport, since_s = self._since.pop(lease)
            self._quarantined(node, transport, time.monotonic() - since_s)

    def _never_quiet(self, room: int, error: Exception) -> None:
        log.critical("room %016x: its CUDA event failed, its slots stay leased until this node ends: %s", room, error)

    def _release(self, room: int, keys: Sequence[bytes]) -> None:
        try:
            self._run(self.core.release(room, self._clock.now(), keys))
        except LocalProtocolError as error:
            self.abort(room, Cause.REFUSED, str(error))

    def _perform(self, effect: DecodeEffect) -> None:
        match effect:
            case Send():  # without sub-patterns, which cost as much as the call
                self.bus.send(effect.peer, effect.message)
            case RoomReady() | RoomFailed() | RoomDrained():
                self._on_event(effect)
            case RoomLeased():
                self._leased(effect.room)
            case Offer(peer, session):
                self._offers.spawn(self._offer(peer, session))
            case Fence(session):
                self.bus.detach(session)
                if self.transport.fence(session):
                    self._run(self.core.fenced(session, self._clock.now()))
            case Forget(session):
                self.transport.forget(session)
            case Dial(peer):
                self._dial(peer)
            case HangUp(peer):
                self.bus.hang_up(peer)
            case SessionLost(session, detail, parted):
                log.log(logging.INFO if parted else logging.WARNING, "session %#x: %s", session, detail)
            case PeerRefused(_, detail):
                log.warning("%s", detail)
            case _:
                self._settle(effect)

    def _dial(self, peer: str) -> None:
        try:
            self.bus.dial(peer, "prefill")
        except (ConfigError, WorldError) as error:
            self._run(self.core.undialled(peer, Cause.PEER_LOST, str(error), self._clock.now()))

    def _settle(self, effect: Settle | StopSettling) -> None:
        if isinstance(effect, StopSettling):
            for settling in (self._verifier, self._lifter):
                if settling is not None:
                    settling.stop(effect.session, effect.grant)
        elif effect.targets:
            assert self._lifter is not None
            self._lifter.lift(effect)
        else:
            assert self._verifier is not None
            self._verifier.verify(effect)

    def _settled(self, order: Settle, checksum: int, detail: str) -> None:
        self._run(self.core.settled(order.session, order.grant, checksum, detail, self._clock.now()))

    async def _offer(self, peer: str, session: int) -> None:
        loopback = await on_loopback(peer)
        identity, peers = None, self.core.prefill_peers
        if (record := peers.sessions.get(session)) is not None and record.state is SessionState.OFFERING:
            identity = peers.peers[peer].identity if peer in peers.peers else None
        if identity is None:
            return  # it has ended meanwhile: nothing would ever end what is begun for it
        try:
            reach = await self.transport.offer(session, peer, identity, loopback=loopback)
        except TransportError as error:
            self._unoffered(session, str(error))
        else:
            self._run(self.core.offered(session, reach, self._clock.now()))

    def _back_for(self, session: int) -> None:
        """Backs the staging buffer once the first writer has reported that it cannot reach the GPU."""
        if self._backs_late and self._backing is None and self._lands_here(session):
            self._arena.need_all()
            self._backing = asyncio.get_running_loop().create_task(self._back())

    def _lands_here(self, session: int) -> bool:
        record = self.core.prefill_peers.sessions.get(session)
        return record is not None and record.stages

    async def _back(self) -> None:
        """A writer that waits for memory that this host lacks gets the reason; the next one has it tried again."""
        log.info("a writer does not reach the GPU: its staging buffer of %d bytes is backed", self._arena.staging_bytes)
        loop = asyncio.get_running_loop()

        def progress(byte_count: int) -> None:
            loop.call_soon_threadsafe(self.ready, byte_count)

        try:
            await loop.run_in_executor(None, self._arena.prefault, progress, lambda: self._closing)
        except Exception as error:
            log.error("%s", error, exc_info=None if isinstance(error, WorldError) else error)
            self._backing = None
            for session in [session for session in self.core.prefill_peers.sessions if self._lands_here(session)]:
                self._unoffered(session, str(error))

    def _keep_line(self, session: int, line: socket.socket) -> None:
        record = self.core.prefill_peers.sessions.get(session)
        if record is None or record.state not in (SessionState.REGISTERING, SessionState.UP, SessionState.SLOW):
            disconnect(line)
        else:
            self.bus.attach(record.peer, session, line, greeted=True)

    def _unoffered(self, session: int, text: str) -> None:
        self._run(self.core.unoffered(session, text, self._clock.now()))

"""A decode process of the simulated world: its arena's memory, its rooms, and the watch over who may write."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.records import LeaseEntry, SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.slot_allocator import slot_count, slots_of
from pdtransfer.handoff.states import Lease, SessionState
from pdtransfer.layout.checksum import MASK
from pdtransfer.layout.layout import Component
from pdtransfer.layout.staging import staged
from pdtransfer.wire import (
    Abort,
    Drained,
    Failed,
    Grant,
    Identity,
    Landed,
    Load,
    Message,
    Ranks,
    Reach,
    Register,
    Registered,
    unpack_extents,
)

from .copies import Backing, Mapping, is_free
from .fairness import Repeats, WaitingLine
from .groups import Group, members
from .lifts import Lifter
from .parts import SoleWriters
from .pools import PAGE, ROW, STAND_INS, Int64s, Shape, checksum, components, holds, memory, places
from .process import Alarm, Process
from .promises import OwnerPromises
from .rooms import Target
from .services import DecodeDesk
from .sparse import SparseEngine
from .spellings import plain, spell

if TYPE_CHECKING:
    from .world import World


STAGING_GAP = 256  # bytes that a buffer's first page may be moved by, to be aligned


class DecodeNode(Process):
    """One decode rank; a daemon, where the world has routers."""

    def __init__(self, world: World, name: str, *, shape: Shape, ranks: Ranks) -> None:
        super().__init__(world, name)
        page, blocks = (PAGE, True) if world.profile.stand_ins else (1, False)
        self.components = components(
            world.profile.arena_tokens, page, shape, page_first=True, kv_first=False, blocks=blocks
        )
        self.stand_ins = STAND_INS if blocks else {}
        originals = [component for component in self.components if component.name not in self.stand_ins]
        self._slot_bytes = sum(component.bytes_of(component.layout.slots) for component in originals)
        self.landing, self._arena_bytes = None, self._slot_bytes
        if world.profile.apart:
            self.components = kv, c4 = replace(self.components[0], memory="hbm"), self.components[1]
            room = (kv.bytes_of(world.profile.staging_tokens) + STAGING_GAP) // ROW * ROW
            self.landing = staged(self.components, base=c4.layout.end, byte_count=room)
            self._arena_bytes = self.landing[0].layout.end
        self._ranks = ranks
        self.rooms: dict[int, Target] = {}
        self.group: Group | None = None
        self._performed = 0

    def start(self) -> None:
        world, p = self.world, self.world.profile
        self.memory, self.hbm = memory(self.landing or self.components), memory(self.components)
        self.lifter = Lifter(self)
        ends = [*sorted(world.rng.randrange(1, self._arena_bytes) for _ in range(p.chunks - 1)), self._arena_bytes]
        self.arena = Backing(self.memory, ends[0], self.hbm if p.apart else None)
        self.reached = ends[0]  # how many of the arena's first bytes its GPU reaches
        incarnation = world.rng.getrandbits(64)
        self.identity = Identity(
            self.name, "decode", incarnation, self._ranks, "sim", b"w", self.limits.window, group=members(self)
        )
        self.core = DecodeSessions(
            self.identity, self.components, self.limits, lambda: world.rng.getrandbits(63) + 1,
            verify=p.verify, bytes_ready=ends[0], landing=self.landing, engine_slots=p.placed,
            stand_ins=self.stand_ins,
            may_be_one=lambda first, second: plain(first) == plain(second),
        )  # fmt: skip
        self.slots = [[*range(component.layout.slots)] for component in self.components]  # that the engine may choose
        self.line, self.repeats, self.promises = WaitingLine(self), Repeats(self), OwnerPromises(self)
        self._sole_writers = SoleWriters(self)
        self.alarm = Alarm(
            self, self.core.next_tick, lambda: self.perform(self.repeats.ticked(self.core.tick(self.clock)))
        )
        self.desk = DecodeDesk(self) if p.routers and self.group.leader is self else None
        self.engine = SparseEngine(self) if p.sparse else None
        self.rooms = {}
        self.dialled: set[str] = set()  # that it may send to
        self.writers: dict[int, set[Mapping]] = {}  # session -> mappings that can still write
        self.revoked: set[int] = set()
        self.offered: set[int] = set()  # sessions whose token is good: once
        self._read: set[tuple[int, int]] = set()  # grants that were read back, or are not to be
        self.settling: dict[tuple[int, int], fx.Settle] = {}  # of grants that are being read back or copied up
        self._staged: dict[int, list[Grant]] = {}  # by slot of the staging buffer: those of the latest room there
        self._evicted = 0
        self.ends: Counter[str] = Counter()  # of sessions by peer, and its deaths before this life
        self.ends.update({name: node.deaths for name, node in world.prefills.items()})
        self.asked: dict[tuple[int, int], float] = {}  # when a session's grant was first given up
        self.granted: Counter[int] = Counter()  # the highest number, by session
        self.grants_of: dict[int, set[tuple[int, int]]] = defaultdict(set)  # sessions and numbers, by room
        self.landed: set[tuple[int, int]] = set()  # of these, whose Landed has come
        for peer in [spell(world, name) for name in world.prefills]:
            if not p.led or world.rng.random() < 0.2:
                self.dialled.add(peer)
                self.later(0.0, lambda peer=peer: self.perform(self.core.dial(peer, self.clock)))
        for end in ends[1:]:
            self.later(p.backing * end / self._arena_bytes, lambda end=end: self._back(end))

    def _back(self, byte_count: int) -> None:
        """This number of the arena's first bytes has memory; a GPU of its own reaches them after that."""
        self.arena.byte_count = byte_count
        if self.world.profile.apart:
            self.later(self.world.rng.expovariate(20.0), lambda: self._reach_more(byte_count))
        else:
            self._reach_more(byte_count)

    def _reach_more(self, byte_count: int) -> None:
        self.reached = max(byte_count, self.reached)
        self.perform(self.core.ready(self.reached, self.clock))

    def kill(self) -> None:
        """The process dies; its arena lives on, unread, as long as somebody maps it."""
        if self.dead or self.world.healed:
            return
        self.world.log(f"{self.name} is killed")
        self.world.seen["decode kills"] += 1
        self.die()
        for target in self.rooms.values():
            target.on_killed()
        life = self.life
        self.world.at(1.2 * self.limits.session_silence_ms / 1e3, lambda: self._check_forgotten(life))

    @property
    def at_rest(self) -> bool:
        """Whether nobody waits for anything of it; a lease whose writer is not proven quiet holds up nobody."""
        return not self.core.rooms

    def depart(self) -> None:
        self._leave(
            [name for name, peer in self.core.prefill_peers.peers.items() if peer.identity], self.identity.incarnation
        )

    def _check_forgotten(self, life: int) -> None:
        """Who stays away is mapped by nobody."""
        if self.life == life and self.dead and not self.world.profile.duplicate:  # late, it would count as life
            self.world.seen["decode nodes that stay away"] += 1
            for node in self.world.prefills.values():
                kept = [session.id for session in node.core.sessions.values() if session.peer == self.name]
                if kept and not node.disturbed and not node.core.sessions[kept[0]].writes:
                    self.world.fail(f"{node.name} keeps sessions of {self.name}, which is gone")

    def gone(self, name: str, evidence: str, *, host: bool) -> None:
        self.perform(self.core.gone(name, evidence, self.clock))
        if self.desk is not None:
            self.desk.run(self.desk.service.gone(name, evidence, self.clock))

    def load(self) -> Load:
        """As a daemon's."""
        core = self.core
        free = min(core.arena.free, key=lambda each: each.free_slots / each.slots)
        quarantined = core.leases.quarantined_bytes // sum(component.layout.row_bytes for component in self.components)
        waiting = len(core.admission)
        return Load(True, core.draining, len(core.rooms) - waiting, waiting, free.free_slots, free.slots, quarantined)

    def receive(self, source: str, message: Message) -> None:
        if self.desk is not None and source in self.world.routers:
            self.desk.receive(source, message)
            return
        session = self.core.prefill_peers.sessions.get(getattr(message, "session", 0))
        if session is not None and isinstance(message, Registered):
            held = [lease for lease in session.leases.values() if lease.state is Lease.GRANTED and not lease.repeat_ms]
            self.world.seen["grants that waited for memory"] += len(held)
        self._look_at(session, message)
        self.repeats.received(source, message)
        silent = {s.id for s in self.core.prefill_peers.sessions.values() if s.state is SessionState.SILENT}
        leases = self._leases_of_others(message)
        effects = self.core.receive(source, message, self.clock)
        if lost := leases - self._leases_of_others(message):
            session, grant = min(lost)
            self.fail(
                f"ends grant {grant} of session {session:#x} for {type(message).__name__} on {message.session:#x}"
            )
        self.promises.received(source, message, effects)
        self.perform(effects)
        for session_id in silent:
            session = self.core.prefill_peers.sessions.get(session_id)
            self.world.seen["silent peers back"] += session is not None and session.state is SessionState.UP

    def _leases_of_others(self, message: Message) -> set[tuple[int, int]]:
        """The grants that a proof of this message's session says nothing about."""
        if not isinstance(message, Landed | Failed | Drained):
            return set()
        sessions = self.core.prefill_peers.sessions.values()
        return {
            (session.id, number) for session in sessions if session.id != message.session for number in session.leases
        }

    def _look_at(self, session: object, message: Message) -> None:
        if session is None or not isinstance(message, Landed | Failed):
            return
        lease, seen = session.leases.get(message.grant), self.world.seen
        if isinstance(message, Landed):
            self.landed.add((message.session, message.grant))
        if isinstance(message, Failed) and not message.quiescent:
            seen["Failed before its writing has ended"] += 1
        elif lease is None:
            seen["repeated ends"] += 1
        elif lease.state is not Lease.GRANTED and isinstance(message, Landed):
            seen["Landed that met an Abort"] += 1

    def perform(self, effects: list[fx.DecodeEffect]) -> None:
        self.line.check(effects)
        for effect in effects:
            self._perform(effect)
        if self.core.leases.quarantined_bytes:
            self.world.seen["steps with quarantine"] += 1
        self._performed += 1
        if self._performed % 8 == 0:
            self.check_ledger()
        if self.desk is not None:
            self.desk.send_load()
        self.alarm.arm()

    def _perform(self, effect: fx.DecodeEffect) -> None:
        world = self.world
        match effect:
            case fx.Send(peer, message):
                self.send(peer, message)
            case fx.Dial(peer):
                self._dial(peer)
            case fx.Offer(peer, session):
                self.promises.offered(peer, session)
                reach = self._reach()
                self.writers[session] = set()
                self.offered.add(session)
                self.later(0.001, lambda s=session, r=reach: self.perform(self.core.offered(s, r, self.clock)))
            case fx.Fence(session):
                self.lines.detach(session)
                self._fence(session)
            case fx.Forget(session):
                world.seen["fences"] += 1
                self.promises.forgotten(session)
                if self.writers.pop(session):
                    world.fail(f"{self.name} forgets session {session:#x}, which can still be written")
            case fx.RoomLeased(room):
                self.rooms[room].caller.leased(self.rooms[room])
            case fx.RoomReady() | fx.RoomFailed() | fx.RoomDrained():
                self._check_lost(effect)
                self.rooms[effect.room].on_event(effect)
            case fx.SessionLost() | fx.PeerRefused() | fx.HangUp():
                self._check_parting(effect)
            case _:
                self._settle(effect)

    def _reach(self) -> Reach:
        """What is to be read back is announced to nobody as HBM."""
        reach = Reach("shm", "host", self.name, b"token", 0, len(self.memory) * ROW)
        if not self.world.profile.apart or self.world.profile.verify:
            return reach
        base, end = self.components[1].layout.end, self.components[0].layout.end
        return replace(reach, hbm_handle=b"hbm", hbm_base=base, hbm_bytes=end - base)

    def where(self, component: Component) -> Int64s:
        """The memory that the engine finds its rows in."""
        return self.hbm if self.world.profile.apart and component.memory == "hbm" else self.memory

    def send(self, peer: str, message: Message) -> None:
        match message:
            case Grant():
                self._check_grant(peer, message)
            case Abort():
                self.asked.setdefault((message.session, message.grant), self.clock)
            case _:
                pass
        if self.world.profile.led and peer not in self.dialled and not self.world.profile.dial_fails:
            self.world.fail(f"{self.name} sends to {peer}, which nobody has dialled")
        if peer in self.dialled:
            self.repeats.sent(peer, message)
        self.promises.sent(peer, message)
        super().send(peer, message)
        if isinstance(message, Register):
            self._die_registering(peer)

    def _dial(self, peer: str) -> None:
        world = self.world
        if peer in self.dialled or world.rng.random() >= world.profile.dial_fails:
            self.dialled.add(peer)
        else:
            world.seen["ranks that cannot be dialled"] += 1
            self.perform(self.core.undialled(peer, Cause.PEER_LOST, "too many are dialled", self.clock))

    def _check_parting(self, effect: fx.SessionLost | fx.PeerRefused | fx.HangUp) -> None:
        """None parts from an honest peer; but a new process cannot map what the dead one had, without saying so."""
        if isinstance(effect, fx.HangUp):
            self.lines.end(effect.peer)
            self.repeats.forgotten(effect.peer)
        if not isinstance(effect, fx.SessionLost) and effect.peer in self.world.strangers:
            return
        others = {plain(peer) for peer in self.core.prefill_peers.peers}
        if isinstance(effect, fx.HangUp) and plain(effect.peer) in others:
            self.world.seen["second names"] += 1
            return
        if isinstance(effect, fx.SessionLost):  # it was silent, or is another process
            self.world.log(f"{self.name} session {effect.session:#x} lost {effect.detail}")
            return
        if isinstance(effect, fx.HangUp) and effect.peer not in self.dialled and self.world.profile.dial_fails:
            return  # it could not be dialled
        refused = isinstance(effect, fx.PeerRefused) and "(transfer)" in effect.detail
        if not refused or not self.world.prefills[plain(effect.peer)].deaths:
            self.world.fail(f"{self.name}: {effect}")

    def _check_lost(self, effect: fx.DecodeEvent) -> None:
        """What a peer has sent counts before its end: no room is lost that has landed."""
        if not isinstance(effect, fx.RoomFailed) or effect.cause is not Cause.PEER_LOST:
            return
        world, grants = self.world, self.grants_of.get(effect.room, set())
        unread = {(session, number) for session, _ in grants for number in self.lines.landed(session)} & grants
        if unread and grants <= unread | self.landed:
            world.fail(f"{self.name} loses room {effect.room}, of which every Landed has come: {effect.detail}")
        room = self.rooms[effect.room].room
        if world.profile.closes and "goodbye" in effect.detail and room.sources and all(s.landed for s in room.sources):
            world.fail(f"{self.name} loses room {effect.room}, which has landed, to its prefill's Goodbye")

    def _die_registering(self, peer: str) -> None:
        """What it has sent arrives late, when another process of its name has a session there. A prefill that has not
        received its Hello yet would take it for the latest, since incarnations have no order."""
        world, p = self.world, self.world.profile
        if p.dies_registering and world.prefills[plain(peer)].deaths and not self.deaths:
            peers = [node.core.peers.get(self.name) for node in world.prefills.values()]
            known_everywhere = all(peer is not None and peer.incarnation == self.identity.incarnation for peer in peers)
            if known_everywhere and world.rng.random() < p.dies_registering:
                self.later(0.0, lambda: world.kill(self))

    def _fence(self, session_id: int) -> None:
        """The kernel's proof: nobody can write by this session's hand-over any more."""
        world, session = self.world, self.core.prefill_peers.sessions[session_id]
        if session_id not in self.revoked:
            self._count_end(session.peer)
        self.revoked.add(session_id)
        self.offered.discard(session_id)
        if self.writers[session_id]:
            world.seen["fences that had to wait"] += 1
        else:
            self.later(0.0005, lambda: self.perform(self.core.fenced(session_id, self.clock)))

    def _settle(self, effect: fx.Settle | fx.StopSettling) -> None:
        key = effect.session, effect.grant
        if isinstance(effect, fx.Settle):
            self.settling[key] = effect
            if effect.targets:
                self.lifter.lift(effect)
            else:
                self.later(self.world.stretch(self.world.profile.write, 1.0), lambda: self._verify(effect))
        elif self.settling[key].targets:
            self.lifter.stop(*key)
        else:
            self._stop_verifying(*key)

    def _verify(self, order: fx.Settle) -> None:
        """Reads a grant's rows back, unless it was stopped. Invariant 1: they are nobody else's meanwhile."""
        if (order.session, order.grant) in self._read:
            return
        self._read.add((order.session, order.grant))
        world, total, names = self.world, 0, [component.name for component in self.components]
        for part in order.parts:
            slots = slots_of(part.extents)
            staged = self.landing is not None and part.component.memory == "hbm"
            allocator = self.core.staging.slots if staged else self.core.arena
            free = allocator.free[names.index(part.component.name)]
            if any(is_free(free, slot) for slot in slots.tolist()):
                world.fail(f"{self.name} reads slots {slots[0]}.. for grant {order.grant}, which are free")
            got = self.memory[places(part.component)[:, :, slots]]
            total += checksum(part.component, holds(part.component).layers, part.first_row, got)
        world.seen["grants read back"] += 1
        world.seen["grants read back after the room failed"] += self.rooms[order.room].failed
        del self.settling[order.session, order.grant]
        self.perform(self.core.settled(order.session, order.grant, total & MASK, "", self.clock))

    def _stop_verifying(self, session: int, grant: int) -> None:
        """Now and then it is too late."""
        if (session, grant) not in self._read and self.world.rng.random() < 0.5:
            self._read.add((session, grant))
            self.later(0.0005, lambda: self._stopped(session, grant))

    def _stopped(self, session: int, grant: int) -> None:
        del self.settling[session, grant]
        self.perform(self.core.settled(session, grant, 0, "stopped", self.clock))

    def _count_end(self, peer: str) -> None:
        """Where nothing is lost and nobody stops, a session ends because a process has died, and for nothing else."""
        self.ends[plain(peer)] += 1
        if self.world.profile.exact and self.ends[plain(peer)] > self.world.prefills[plain(peer)].deaths:
            self.world.fail(f"{self.name} ends a session with {peer}, which lives and has always answered")

    def _check_grant(self, peer: str, message: Grant) -> None:
        """Who keeps too much in quarantine gets nothing new, no session more than its window, no room more time."""
        session = self.core.prefill_peers.sessions[message.session]
        if len(session.leases) > session.window:
            self.world.fail(f"{self.name} grants {message.grant}, outside the window of {session.window}")
        target = self.rooms[message.room]
        if abs(message.time_left_ms / 1e3 - max(0.0, target.deadline - self.clock)) > 0.01:
            self.world.fail(f"{self.name} grants room {message.room} {message.time_left_ms} ms, which it has not")
        kept, share = self.core.prefill_peers.peers[peer].quarantined_bytes, self.limits.quarantine_fraction_max
        if message.grant > self.granted[session.id] and kept > share * self._slot_bytes:
            self.world.fail(f"{self.name} grants slots to {peer}, which keeps {kept} bytes in quarantine")
        if message.grant > self.granted[session.id]:
            self._check_staged(session, message)
            self._sole_writers.granted(session, message)
        self.grants_of[message.room].add((session.id, message.grant))
        self.granted[session.id] = max(message.grant, self.granted[session.id])

    def _check_staged(self, session: SessionRecord, message: Grant) -> None:
        """Invariant 1: a slot of the staging buffer is one room's until each write, check and copy of it has ended."""
        world, sessions = self.world, self.core.prefill_peers.sessions
        parts = [part for part in message.parts if session.stages and session.targets[part.component].memory == "hbm"]
        world.seen["pieces"] += not message.last
        for part in parts:
            for slot in slots_of(unpack_extents("extents", part.extents)).tolist():
                holders = self._staged.get(slot, [])
                for other in holders:
                    leased = other.session in sessions and other.grant in sessions[other.session].leases
                    if (other.room, other.prefix) != (message.room, message.prefix) and (
                        leased or (other.session, other.grant) in self.settling
                    ):
                        world.fail(f"{self.name} grants slot {slot} of its buffer, which grant {other.grant} has")
                same = [other for other in holders if (other.room, other.prefix) == (message.room, message.prefix)]
                self._staged[slot] = [*same, message]

    def _check_staging(self, leases: list[LeaseEntry]) -> None:
        """What is taken of the buffer is held by pieces that somebody still writes, reads back or copies up."""
        core, world = self.core, self.world
        staging = core.staging
        for place, free in enumerate(staging.slots.free):
            taken = sum(int(holding.own[place][:, 1].sum()) for holding in staging.held)
            if taken != free.ready - free.free_slots:
                world.fail(f"{self.name}: {free.ready - free.free_slots} staging slots are taken, {taken} are held")
        users = {id(lease.staged) for lease in leases}
        users |= {id(landed.lease.staged) for landed in core.post_landing._open.values()}
        if {id(holding) for holding in staging.held} != users - {id(None)}:
            world.fail(f"{self.name}: {len(staging.held)} pieces have slots of the buffer, {len(users)} use them")

    def check_ledger(self) -> None:
        """What is taken is held by rooms and leases, and quarantine is counted as what it holds."""
        core, world = self.core, self.world
        leases = [lease for session in core.prefill_peers.sessions.values() for lease in session.leases.values()]
        held = {id(lease.holding): lease.holding for lease in leases}
        held |= {id(room.holding): room.holding for room in core.rooms.values() if room.holding is not None}
        held |= {id(landed.lease.holding): landed.lease.holding for landed in core.post_landing._open.values()}
        self._check_staging(leases)
        blocks = core.cache._blocks
        for place, free in enumerate(core.arena.free):
            taken = sum(int(holding.own[place][:, 1].sum()) for holding in held.values())
            taken += sum(count for block in blocks.values() for _, count in block.runs[place])
            if taken != free.ready - free.free_slots:
                world.fail(f"{self.name}: {free.ready - free.free_slots} slots are taken, {taken} are held")
        if core.idle and (leases or core.rooms):
            world.fail(f"{self.name} says that it is idle, with {len(core.rooms)} rooms and {len(leases)} leases")
        by_peer, kept = Counter[str](), dict[int, int]()
        for lease in leases:
            if lease.state is Lease.GRANTED and lease.message.room not in core.rooms:
                world.fail(f"{self.name}: room {lease.message.room} has ended, and a grant of it is not given up")
            first = self.asked.get((lease.session.id, lease.message.grant), self.clock)
            asked = self.clock - max(first, self.thawed)
            if lease.state is Lease.ABORTING and asked > (self.limits.slow_ms + self.limits.resend_ms_max) / 1e3:
                world.fail(
                    f"{self.name}: {lease.session.peer} does not answer Abort, and its slots are not quarantined"
                )
            if lease.state is Lease.QUARANTINED:
                own = zip(self.components, lease.holding.own, strict=True)
                size = sum(c.bytes_of(slot_count(extents)) for c, extents in own if c.name not in self.stand_ins)
                by_peer[lease.session.peer] += size
                kept[id(lease.holding)] = size
        counted = {
            peer.name: peer.quarantined_bytes for peer in core.prefill_peers.peers.values() if peer.quarantined_bytes
        }
        if counted != +by_peer or core.leases.quarantined_bytes != sum(kept.values()):
            world.fail(f"{self.name}: quarantine is counted as {counted}, it is {by_peer}")
        claims = Counter(block.key for holding in held.values() for block in holding.blocks)
        if claims != {key: block.claims for key, block in blocks.items() if block.claims}:
            world.fail(f"{self.name}: blocks count other claims than rooms and leases have on them")
        world.seen["blocks evicted"] += core.cache.evicted_blocks - self._evicted
        self._evicted = core.cache.evicted_blocks
        landing = sum(
            room.demand.inflight_bytes - core.cache.bytes_of(room.holding.prefix)
            for room in core.rooms.values()
            if room.state.value in ("landing", "settling") and room.holding is not None
        )
        if core.admission.inflight_bytes != landing:
            world.fail(f"{self.name}: {core.admission.inflight_bytes} bytes in flight are counted, {landing} are")

    def check_end(self) -> None:
        """Invariant 5: everything is where it started."""
        core, world = self.core, self.world
        self.check_ledger()
        if not core.idle:
            leases = {s.id: list(s.leases) for s in core.prefill_peers.sessions.values()}
            world.fail(f"{self.name} is not idle: rooms {list(core.rooms)}, leases {leases}")
        core.cache.clear()
        for free in (*core.arena.free, *core.staging.slots.free):
            if free.free_slots != free.slots or free.fragmentation:
                world.fail(f"{self.name} leaks {free.slots - free.free_slots} slots")
        if core.admission.inflight_bytes or len(core.admission) or core.leases.quarantined_bytes:
            world.fail(f"{self.name} ends with bytes in flight, in the queue or in quarantine")
        waiting = core.window_slots.rooms or core.unnamed or core.staging.line
        if len(core.prefill_peers.sessions) != self._sessions_in_the_end or waiting:
            world.fail(f"{self.name} ends with sessions that nobody fenced, or rooms that wait")
        for peer in core.prefill_peers.peers.values():
            if peer.up is None or peer.quarantined_bytes:
                world.fail(f"{self.name} has no session with {peer.name} after healing, or its slots in quarantine")
            if not self.arena.whole or peer.up.bytes_ready != self.arena.byte_count:
                world.fail(f"{peer.name} has {peer.up.bytes_ready} bytes of {self.name} ready, of {self._arena_bytes}")
            if peer.up.reserved or not peer.up.has_window_slot:
                world.fail(f"{self.name} ends with places of the window taken")
        if self.desk is not None:
            self.desk.check_end()
        if self.engine is not None:
            self.engine.check_end()
        self._check_slots()

    @property
    def _sessions_in_the_end(self) -> int:
        """One a prefill rank; where rooms name leaders or strangers, of those that were dialled."""
        some = self.world.profile.led or self.world.profile.strangers
        return len(self.core.prefill_peers.peers if some else self.world.prefills)

    def _check_slots(self) -> None:
        for slots, component in zip(self.slots, self.components, strict=True):
            if sorted(slots) != [*range(component.layout.slots)]:
                self.world.fail(f"{self.name}: {len(slots)} slots of {component.name} came back to the engine")

    @property
    def settled(self) -> bool:
        """Whether nothing is left to happen but pings."""
        peers = self.core.prefill_peers
        return (
            not self.dead
            and self.core.idle
            and all(peer.up and peer.up.bytes_ready == self._arena_bytes for peer in peers.peers.values())
            and len(peers.sessions) == self._sessions_in_the_end
            and (self.desk is None or self.desk.idle)
            and (self.engine is None or self.engine.idle)
        )

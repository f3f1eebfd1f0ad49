"""A prefill process of the simulated world: its pool, its engine's pages, its copies in flight."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.handoff.sharing import holds_of
from pdtransfer.handoff.states import WRITER_GRANT_ENDS, PrefillRoom, SessionState, WriterGrantState
from pdtransfer.layout.layout import Component
from pdtransfer.wire import Abort, Grant, Identity, Load, Message, Ranks, Reach

from .copies import Copy, Mapping
from .fairness import Repeats
from .groups import Group, members
from .lines import join
from .pools import PAGE, ROW, Shape, components, memory
from .process import Alarm, Process
from .promises import WriterPromises
from .rooms import Source
from .services import PrefillDesk
from .spellings import plain

if TYPE_CHECKING:
    from .world import World


class PrefillNode(Process):
    """One prefill rank; a daemon, where the world has routers."""

    def __init__(
        self, world: World, name: str, *, shape: Shape, ranks: Ranks, replicas: dict[str, tuple[int, int]],
        names: Collection[str] = (),
    ) -> None:  # fmt: skip
        """With `names` it has these components alone."""
        super().__init__(world, name)
        p = world.profile
        self.components = components(p.pool_tokens, PAGE, shape, page_first=False, blocks=p.stand_ins)
        if names:
            self.components = tuple([component for component in self.components if component.name in names])
        self._ranks, self._holds = ranks, ()
        if ranks != Ranks() or names:
            self._holds = holds_of(self.components, ranks, replicas)
        self.rooms: dict[int, Source] = {}
        self.group: Group | None = None

    def start(self) -> None:
        world, p = self.world, self.world.profile
        self.pool = memory(self.components)
        self.pages = list(range(p.pool_tokens // PAGE))
        world.rng.shuffle(self.pages)
        incarnation = world.rng.getrandbits(64)
        self.identity = Identity(
            self.name, "prefill", incarnation, self._ranks, "sim", b"w", self.limits.window, holds=self._holds,
            group=members(self),
        )  # fmt: skip
        late = p.led and bool(self.identity.group)
        identity = replace(self.identity, group=()) if late else self.identity
        self.core = PrefillSessions(identity, self.components, self.limits, group_is_known=not late)
        if late:
            self.later(world.rng.uniform(0.0, 0.3), lambda core=self.core: core.set_group(members(self)))
        self.repeats, self.promises = Repeats(self), WriterPromises(self)
        self.grant_deadlines: dict[tuple[int, int], float] = {}  # by session and number, as its Grants say
        self.alarm = Alarm(
            self, self.core.next_tick, lambda: self.perform(self.repeats.ticked(self.core.tick(self.clock)))
        )
        self.desk = PrefillDesk(self) if p.routers and self.group.leader is self else None
        self.rooms = {}
        self.mappings: dict[int, Mapping] = {}
        self.stopping: set[tuple[int, int]] = set()
        self.fenced: set[int] = set()  # sessions whose writer was killed

    @property
    def free_slots(self) -> int:
        return PAGE * len(self.pages)

    def load(self) -> Load:
        """As a daemon's."""
        open_rooms = [source for source in self.rooms.values() if not source.over]
        used = sum(source.room.tokens for source in open_rooms)
        slots = self.world.profile.pool_tokens
        return Load(True, self.core.draining, len(open_rooms), 0, max(0, slots - used), slots)

    def kill(self) -> None:
        """The process dies. Its mappings die with it, or later where a child that it forked writes on."""
        world = self.world
        if self.dead or world.healed:
            return
        orphan = world.rng.random() < world.profile.orphans
        world.log(f"{self.name} is killed{', a child writes on' if orphan else ''}")
        world.seen["prefill kills"] += 1
        self.die(forked=orphan)
        delay = world.rng.uniform(0.5, 4.0) if orphan else 0.0002
        for mapping in self.mappings.values():
            world.at(delay, lambda mapping=mapping: mapping.live.discard(mapping))
        for source in self.rooms.values():
            source.on_killed()
        limits, life = self.limits, self.life
        proven = 1.2 * (limits.silence_ms + 2 * limits.ping_ms + limits.fence_poll_ms_max) / 1e3 + 0.1
        world.at(delay + proven, lambda: self._check_fenced(life))

    @property
    def at_rest(self) -> bool:
        """Whether nobody waits for anything of it."""
        return self.core.idle

    def depart(self) -> None:
        self._leave(list(self.core.peers), self.identity.incarnation)
        for mapping in self.mappings.values():
            mapping.live.discard(mapping)

    def close(self, tries: int = 400) -> None:
        """As a client's close, which fails what is under way and waits for no acknowledgement: now, or soon, when a
        grant has landed that is not acknowledged."""
        if self.dead or self.world.healed:
            return
        grants = [grant for session in self.core.sessions.values() for grant in session.grants.values()]
        if tries and not any(grant.state is WriterGrantState.LANDED for grant in grants):
            self.later(0.001, lambda: self.close(tries - 1))
            return
        self.world.seen["prefills that leave with grants unacknowledged"] += 1
        for room in list(self.core.rooms):
            self.perform(self.core.abort(room, self.clock, Cause.SHUTDOWN, "this node is closed"))
        self.depart()
        for source in self.rooms.values():
            source.on_killed()

    def _check_fenced(self, life: int) -> None:
        """Nobody has to come back for what a dead one kept: the kernel's proof suffices."""
        for node in self.world.decodes.values():
            repeats = self.world.profile.duplicate  # late, they would count as life
            if self.life == life and self.dead and self.deaths == 1 and not node.disturbed and not repeats:
                self.world.seen["fences of who stays away"] += 1
                sessions = [
                    session for session in node.core.prefill_peers.sessions.values() if plain(session.peer) == self.name
                ]
                if any(session.leases and not node.writers[session.id] for session in sessions):
                    self.world.fail(f"{node.name} keeps leases of {self.name}, which is dead and wholly so")

    def receive(self, source: str, message: Message) -> None:
        if self.desk is not None and source in self.world.routers:
            self.desk.receive(source, message)
            return
        session = self.core.sessions.get(getattr(message, "session", 0))
        if session is not None and isinstance(message, Grant | Abort):
            grant, kind = session.grants.get(message.grant), type(message).__name__
            if session.known_end(message.grant):
                self.world.seen[f"{kind} after the end was acknowledged"] += 1
            elif grant is not None and grant.state in WRITER_GRANT_ENDS:
                self.world.seen[f"{kind} after the end"] += 1
            elif grant is None and isinstance(message, Abort):
                self.world.seen["Abort before its Grant"] += 1
        if isinstance(message, Grant):
            number, deadline = (message.session, message.grant), self.clock + message.time_left_ms / 1e3
            self.grant_deadlines[number] = max(deadline, self.grant_deadlines.get(number, deadline))
        before = self.promises.open_sessions(source)
        effects = self.core.receive(source, message, self.clock)
        self.promises.received(source, message, effects)
        self.promises.superseded(source, message, before)
        self.perform(effects)
        if session is not None and len(session.grants) > session.window:
            self.world.fail(f"{self.name} keeps grants beyond the window of {session.window}")

    def send(self, peer: str, message: Message) -> None:
        self.repeats.sent(peer, message)
        self.promises.sent(message)
        super().send(peer, message)

    def perform(self, effects: list[fx.PrefillEffect]) -> None:
        for effect in effects:
            self._perform(effect)
        for grants in self.core._waiting.values():
            for grant in grants:
                deadline = self.grant_deadlines[grant.session.id, grant.number]
                if self.clock > max(deadline, self.thawed) + 1e-6:
                    self.world.fail(f"{self.name} waits for the room of grant {grant.number} beyond its deadline")
        for room in self.core.rooms.values() if self.world.profile.apart else ():
            for grant in room.grants.values():
                waits = room.state in (PrefillRoom.OPEN, PrefillRoom.FINISHED) and not grant.last
                if waits and not grant.session.open:
                    self.world.fail(f"{self.name} waits for a piece of room {room.id} from a session that has ended")
        if self.desk is not None:
            self.desk.send_load()
        self.alarm.arm()

    def _perform(self, effect: fx.PrefillEffect) -> None:
        world = self.world
        match effect:
            case fx.Send(peer, message):
                self.send(peer, message)
            case fx.Map(session, reach, theirs):
                self.promises.mapped(session)
                self.later(world.stretch(0.002, 0.5), lambda s=session, r=reach, c=theirs: self._map(s, r, c))
            case fx.Unmap(session):
                self.promises.unmapped(session)
                self.lines.detach(session)
                if session in self.mappings:
                    mapping = self.mappings.pop(session)
                    mapping.live.discard(mapping)
            case fx.Write():
                self.promises.writes(effect)
                Copy(self, effect)
            case fx.StopWriting(session, grant):
                self.stopping.add((session, grant))
            case fx.FenceWriter(session):
                self.later(world.stretch(0.02, 1.0), lambda s=session: self._kill_writer(s))
            case fx.RoomLanded(room):
                self.rooms[room].on_landed()
            case fx.RoomFailed():
                world.log(f"{self.name} room {effect.room} failed {effect.cause} {effect.detail}")
                self.rooms[effect.room].on_failed(effect)
            case fx.RoomDrained(room):
                self.rooms[room].on_drained()

    def _map(self, session: int, reach: Reach, theirs: tuple[Component, ...]) -> None:
        node = self.world.decodes.get(reach.address) or self.world.strange_decodes[reach.address]
        if node.dead or session not in node.offered:
            self.perform(self.core.unmappable(session, "the hand-over was revoked, or taken", self.clock))
            return
        node.offered.remove(session)
        mapping = Mapping(node.name, node.arena, node.core, node.writers[session])
        mapping.hbm_direct = bool(reach.hbm_handle) and self.world.rng.random() < 0.5
        mapping.live.add(mapping)
        self.mappings[session] = mapping
        if self.world.profile.lines and self.world.rng.random() < self.world.profile.lines:
            self._join(session, node)
        self._follow(session, mapping)

    def _join(self, session: int, node: Process) -> None:
        """The connection of the hand-over is the session's line."""

        def known() -> bool:
            session_of = node.core.prefill_peers.sessions.get(session)
            return session_of is not None and session_of.state in (SessionState.REGISTERING, SessionState.UP)

        if node.name in self.world.decodes:
            join(self, node, session, known)

    def _follow(self, session: int, mapping: Mapping) -> None:
        """Takes what the arena's owner has backed meanwhile, and looks again until that is all."""
        if self.mappings.get(session) is not mapping:
            return
        if mapping.arena.byte_count > mapping.ready:
            mapping.ready = mapping.arena.byte_count
            self.perform(self.core.mapped(session, mapping.ready, hbm_direct=mapping.hbm_direct))
        if mapping.ready < len(mapping.arena.memory) * ROW:
            self.later(0.02, lambda: self._follow(session, mapping))

    def _kill_writer(self, session: int) -> None:
        """What this session's writer had in flight goes no further; the rest of the process lives."""
        self.world.log(f"{self.name} kills the writer of {session:#x}")
        self.world.seen["writers killed"] += session not in self.fenced
        self.fenced.add(session)
        self.perform(self.core.fenced(session, self.clock))

    def gone(self, name: str, evidence: str, *, host: bool) -> None:
        if not host:
            self.perform(self.core.gone(name, evidence, self.clock))
        if self.desk is not None:
            self.desk.run(self.desk.service.gone(name, evidence, self.clock))

    def check_found(self) -> None:
        """Whoever has a session with it, and was not disturbed, holds it for lost."""
        for node in self.world.decodes.values():
            peer = node.core.prefill_peers.peers.get(self.name)
            late = self.world.profile.duplicate or self.world.profile.delay_tail  # what came late counts as life
            if node.disturbed or peer is None or peer.session is None or late:
                continue
            self.world.seen["dead and frozen peers found"] += 1
            if peer.session.state in (SessionState.UP, SessionState.SLOW):
                self.world.fail(f"{node.name} waits for {self.name}, which is {'dead' if self.dead else 'frozen'}")

    @property
    def settled(self) -> bool:
        """Whether nothing is left to happen but pings."""
        sessions = len(self.core.sessions)
        at_rest = not self.dead and self.core.idle and sessions <= len(self.world.decodes)
        return at_rest and (self.desk is None or self.desk.idle)

    def check_end(self) -> None:
        """Invariant 5: everything is where it started."""
        core, world = self.core, self.world
        if not core.idle:
            grants = {s.id: {n: d.state for n, d in s.grants.items()} for s in core.sessions.values()}
            world.fail(f"{self.name} is not idle: rooms {list(core.rooms)}, grants {grants}")
        if self.free_slots != world.profile.pool_tokens:
            world.fail(f"{self.name} leaks source pages: {self.free_slots} of {world.profile.pool_tokens}")
        if core._waiting:
            world.fail(f"{self.name} ends with grants that wait")
        # One may be missing: where both Rejects of it were lost, decode learns it by its next Grant.
        mapped = {session.id for session in core.sessions.values() if session.components}
        if len(core.sessions) > len(world.decodes) or self.mappings.keys() != mapped:
            world.fail(f"{self.name} keeps {len(core.sessions)} sessions and {len(self.mappings)} mappings")
        if self.desk is not None:
            self.desk.check_end()

"""The processes of the simulated world: they perform what their cores decide, freeze, die, and come back as others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pdtransfer import effects as fx
from pdtransfer.arena import Arena, FreeExtents
from pdtransfer.layout import Component
from pdtransfer.lease import DUTY_ENDS, Lease
from pdtransfer.limits import Limits
from pdtransfer.session.decode import DecodeSessions
from pdtransfer.session.ledger import SessionState
from pdtransfer.session.prefill import PrefillSessions
from pdtransfer.wire import Abort, Grant, Identity, Landed, Message, Ranks, Reach

from .pools import ROW, Int64s, components, memory, places

if TYPE_CHECKING:
    from .world import World

LIMITS = Limits(
    window=64, resend_ms=50, resend_ms_max=400, ping_ms=150, silence_ms=600, session_silence_ms=5_000, fence_poll_ms=20
)


def is_free(free: FreeExtents, slot: int) -> bool:
    place = bisect_right(free._starts, slot) - 1
    return place >= 0 and slot < free._starts[place] + free._count_at[free._starts[place]]


class Node:
    """A process: while it is frozen, what is sent to it waits; when it has died, what it had begun never happens."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.frozen = self.dead = False
        self.never_froze = True
        self.life = 1
        self.backlog: list[Callable[[], None]] = []
        self._tick_at: float | None = None

    def act(self, life: int, action: Callable[[], None]) -> None:
        """Runs in this process: now, when it thaws, or never if it dies first."""
        if self.life != life or self.dead:
            return
        if self.frozen:
            self.backlog.append(lambda: self.act(life, action))
        else:
            action()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        life = self.life
        self.world.at(delay, lambda: self.act(life, action))

    def wake(self, when: float | None, tick: Callable[[], None]) -> None:
        """Has `tick` called at `when`, unless an earlier call is due already."""
        if when is None or (self._tick_at is not None and self._tick_at <= when):
            return
        self._tick_at = when

        def fire() -> None:
            if self._tick_at == when:
                self._tick_at = None
                tick()

        self.later(max(0.0, when - self.world.now), fire)

    def freeze(self, seconds: float) -> None:
        if not self.frozen and not self.dead:
            self.world.log(f"{self.name} freezes for {seconds:.2f}")
            self.world.seen["freezes"] += 1
            self.frozen, self.never_froze = True, False
            life = self.life
            self.world.at(seconds, lambda: self.thaw() if self.life == life else None)

    def thaw(self) -> None:
        if self.frozen:
            self.world.log(f"{self.name} thaws")
            self.frozen = False
            backlog, self.backlog = self.backlog, []
            for action in backlog:
                action()

    def die(self) -> None:
        self.dead, self.frozen, self.backlog, self._tick_at = True, False, [], None
        self.life += 1
        self.world.at(self.world.rng.uniform(0.05, 1.0), self.restart)

    def restart(self) -> None:
        self.world.log(f"{self.name} is started again")
        self.dead = False
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class Mapping:
    """One life of a decode node's arena, as a writer maps it; it outlives the node."""

    name: str
    memory: Int64s
    arena: Arena
    live: set[Mapping]  # those of the session that can still write


class DecodeNode(Node):
    """A decode process: its arena's memory, its engine, and the watch over who may write."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.components = components(world.profile.arena_tokens, 1, page_first=True)
        self.start()

    def start(self) -> None:
        world, window = self.world, self.world.profile.window
        self.memory = memory(self.components)
        limits = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | {"window": window})
        identity = Identity(self.name, "decode", world.rng.getrandbits(64), Ranks(), "sim", b"w", window)
        self.core = DecodeSessions(identity, self.components, limits, lambda: world.rng.getrandbits(63) + 1)
        self.writers: dict[int, set[Mapping]] = {}  # session -> mappings that can still write
        self.revoked: set[int] = set()
        for peer in world.prefills:
            self.later(0.0, lambda peer=peer: self.perform(self.core.dial(peer, world.now)))

    def kill(self) -> None:
        """The process dies; its arena lives on, unread, as long as somebody maps it."""
        if self.dead:
            return
        self.world.log(f"{self.name} is killed")
        self.world.seen["decode kills"] += 1
        self.die()
        for request in self.world.requests:
            if request.decode is self:
                request.on_decode_killed()

    def receive(self, source: str, message: Message) -> None:
        if isinstance(message, Landed):
            session = self.core.links.sessions.get(message.session)
            lease = None if session is None else session.leases.get(message.grant)
            if session is not None and lease is None:
                self.world.seen["repeated ends"] += 1
            elif lease is not None and lease.state is not Lease.GRANTED:
                self.world.seen["Landed that met an Abort"] += 1
        silent = {s.id for s in self.core.links.sessions.values() if s.state is SessionState.SILENT}
        self.perform(self.core.receive(source, message, self.world.now))
        for session_id in silent:
            session = self.core.links.sessions.get(session_id)
            self.world.seen["silent peers back"] += session is not None and session.state is SessionState.UP

    def perform(self, effects: list[fx.DecodeEffect]) -> None:
        world = self.world
        for effect in effects:
            match effect:
                case fx.Send(peer, message):
                    world.send(self, peer, message)
                case fx.Offer(_, session):
                    reach = Reach("shm", "host", self.name, b"token", 0, len(self.memory) * ROW)
                    self.writers[session] = set()
                    self.later(0.001, lambda s=session, r=reach: self.perform(self.core.offered(s, r, world.now)))
                case fx.Fence(session):
                    self.revoked.add(session)
                    if self.writers[session]:
                        world.seen["fences that had to wait"] += 1
                    else:
                        self.later(0.0005, lambda s=session: self.perform(self.core.fenced(s, world.now)))
                case fx.Forget(session):
                    world.seen["fences"] += 1
                    if self.writers.pop(session):
                        world.fail(f"{self.name} forgets session {session:#x}, which can still be written")
                case fx.Ready():
                    world.requests[effect.room - 1].on_ready(effect)
                case fx.RoomFailed():
                    world.log(f"{self.name} room {effect.room} failed {effect.cause} {effect.detail}")
                    world.requests[effect.room - 1].on_decode_failed(effect)
                case fx.PeerRefused() | fx.HangUp():
                    world.fail(f"{self.name}: {effect}")
        if self.core.leases.quarantined_bytes:
            world.seen["steps with quarantine"] += 1
        self.wake(self.core.next_tick(), lambda: self.perform(self.core.tick(world.now)))


class PrefillNode(Node):
    """A prefill process: its pool, its engine's pages, its copies in flight."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.components = components(world.profile.pool_tokens, 4, page_first=False)
        self.start()

    def start(self) -> None:
        world, p = self.world, self.world.profile
        self.pool = memory(self.components)
        self.pages = list(range(p.pool_tokens // 4))
        world.rng.shuffle(self.pages)
        self.identity = Identity(self.name, "prefill", world.rng.getrandbits(64), Ranks(), "sim", b"w", p.window)
        self.core = PrefillSessions(self.identity, self.components, LIMITS)
        self.mappings: dict[int, Mapping] = {}
        self.stopping: set[tuple[int, int]] = set()
        self.fenced: set[int] = set()  # sessions whose writer was killed

    @property
    def free_slots(self) -> int:
        return 4 * len(self.pages)

    def kill(self) -> None:
        """The process dies. Its mappings die with it, or later where a child that it forked writes on."""
        world = self.world
        if self.dead:
            return
        orphan = world.rng.random() < world.profile.orphans
        world.log(f"{self.name} is killed{', a child writes on' if orphan else ''}")
        world.seen["prefill kills"] += 1
        self.die()
        delay = world.rng.uniform(0.5, 4.0) if orphan else 0.0002
        for mapping in self.mappings.values():
            world.at(delay, lambda mapping=mapping: mapping.live.discard(mapping))
        for request in world.requests:
            if request.prefill is self:
                request.on_prefill_killed()

    def receive(self, source: str, message: Message) -> None:
        session = self.core.sessions.get(getattr(message, "session", 0))
        if session is not None and isinstance(message, Grant | Abort):
            duty, kind = session.duties.get(message.grant), type(message).__name__
            if session.known_end(message.grant):
                self.world.seen[f"{kind} after the end was acknowledged"] += 1
            elif duty is not None and duty.state in DUTY_ENDS:
                self.world.seen[f"{kind} after the end"] += 1
            elif duty is None and isinstance(message, Abort):
                self.world.seen["Abort before its Grant"] += 1
        self.perform(self.core.receive(source, message, self.world.now))

    def perform(self, effects: list[fx.PrefillEffect]) -> None:
        world = self.world
        for effect in effects:
            match effect:
                case fx.Send(peer, message):
                    world.send(self, peer, message)
                case fx.Map(session, reach, theirs):
                    self.later(world.stretch(0.002, 0.5), lambda s=session, r=reach, c=theirs: self._map(s, r, c))
                case fx.Unmap(session):
                    if session in self.mappings:
                        mapping = self.mappings.pop(session)
                        mapping.live.discard(mapping)
                case fx.Write():
                    Copy(self, effect)
                case fx.StopWriting(session, grant):
                    self.stopping.add((session, grant))
                case fx.FenceWriter(session):
                    self.later(world.stretch(0.02, 1.0), lambda s=session: self._kill_writer(s))
                case fx.Landed(room):
                    world.requests[room - 1].on_landed()
                case fx.RoomFailed():
                    world.log(f"{self.name} room {effect.room} failed {effect.cause} {effect.detail}")
                    world.requests[effect.room - 1].on_prefill_failed()
                case fx.Drained(room):
                    world.requests[room - 1].on_drained()
        self.wake(self.core.next_tick(), lambda: self.perform(self.core.tick(world.now)))

    def _map(self, session: int, reach: Reach, theirs: tuple[Component, ...]) -> None:
        node = self.world.decodes[reach.address]
        if node.dead or session in node.revoked or session not in node.writers:
            self.perform(self.core.unmappable(session, "the hand-over was revoked", self.world.now))
            return
        mapping = Mapping(node.name, node.memory, node.core.arena, node.writers[session])
        mapping.live.add(mapping)
        self.mappings[session] = mapping
        self.perform(self.core.mapped(session, reach.arena_bytes))

    def _kill_writer(self, session: int) -> None:
        """What this session's writer had in flight goes no further; the rest of the process lives."""
        self.world.log(f"{self.name} kills the writer of {session:#x}")
        self.world.seen["writers killed"] += session not in self.fenced
        self.fenced.add(session)
        self.perform(self.core.fenced(session, self.world.now))


class Copy:
    """One write: pieces of rows and layers land one by one, each reading its source when it lands."""

    def __init__(self, node: PrefillNode, order: fx.Write) -> None:
        self.node, self.order, self.world = node, order, node.world
        self.life, self.told = node.life, False
        self.mapping, self.component = node.mappings[order.session], order.component
        theirs = node.core.sessions[order.session].components[order.component]
        self.targets, self.sources = places(theirs), places(node.components[order.component])
        self.request = self.world.requests[order.room - 1]
        world, p = self.world, self.world.profile
        total = world.stretch(p.write, 0.0 if world.healed else p.write_tail)
        self.fails = not world.healed and world.rng.random() < p.write_fails
        rows = len(order.source_slots)
        cuts = sorted({0, rows, *(world.rng.randrange(rows + 1) for _ in range(2))})
        self.pieces = [(layer, low, high) for low, high in pairwise(cuts) for layer in range(*order.layers)]
        world.rng.shuffle(self.pieces)
        if self.fails:
            self.pieces = self.pieces[: world.rng.randrange(len(self.pieces) + 1)]
        # When so many pieces are left, nobody can say any more how it will end.
        unknown = not world.healed and world.rng.random() < p.write_unknown
        self.unknown_at = world.rng.randrange(len(self.pieces) + 1) if unknown else None
        self.each = total / (len(self.pieces) + 1)
        world.at(self.each, self._next)

    def _next(self) -> None:
        node, world, order = self.node, self.world, self.order
        alive = node.life == self.life
        if not alive and self.mapping not in self.mapping.live:
            return  # the process and every child of it are gone
        if alive and order.session in node.fenced:
            return
        if alive and self.unknown_at == len(self.pieces):
            self.unknown_at = None
            world.seen["writes of unknown outcome"] += 1
            self._report(fx.Outcome.UNKNOWN)
        stopped = (order.session, order.grant) in node.stopping and world.rng.random() < 0.5
        if self.pieces and not (alive and stopped):
            self._land(*self.pieces.pop(), alive=alive)
            world.at(self.each, self._next)
        elif alive and not self.told:
            self._report(fx.Outcome.FAILED if self.pieces or self.fails else fx.Outcome.LANDED)

    def _report(self, outcome: fx.Outcome) -> None:
        node, order = self.node, self.order
        self.told = True
        wrote = node.core.wrote
        node.act(
            self.life,
            lambda: node.perform(wrote(order.session, order.write, outcome, "the copy failed", self.world.now)),
        )

    def _land(self, layer: int, low: int, high: int, *, alive: bool) -> None:
        """Invariant 1: the target is this grant's still; the source is the room's still (its words say whose it is)."""
        world, node = self.world, self.node
        sources, targets = self.order.source_slots[low:high], self.order.target_slots[low:high]
        free, memory = self.mapping.arena.free[self.component], self.mapping.memory
        for target in targets.tolist():
            if is_free(free, target):
                world.fail(f"{node.name} writes slot {target} of {self.mapping.name}, which is free")
        if alive and self.request.drained:
            world.fail(f"{node.name} reads pages of room {self.request.room}, which were given back")
        world.seen["pieces by orphans"] += not alive
        world.seen["pieces after the room failed"] += self.request.decode_failed
        memory[self.targets[layer, targets]] = node.pool[self.sources[layer, sources]] if alive else -1

"""A seeded world with virtual time: real cores and real wire bytes, a network that loses, repeats and reorders, writes
that land row by row and late, processes that freeze and die. It ends by healing, and asks for termination and no leak.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdtransfer import effects as fx
from pdtransfer.errors import Cause
from pdtransfer.layout import Component, Layout, Plane, Span, expand_pages
from pdtransfer.limits import Limits
from pdtransfer.session.decode import DecodeSessions
from pdtransfer.session.prefill import Cell, PrefillSessions
from pdtransfer.wire import Identity, Message, Ranks, Reach, decode, encode

from .profile import Profile, draw

ROW = 8  # bytes: one word, which names the room, the component, the row and the layer that it belongs to
LAYERS = 3


class Violation(AssertionError):
    """An invariant does not hold."""


Int64s = NDArray[np.int64]


def words(room: int, component: int, rows: Int64s, layer: int) -> Int64s:
    """What rows of a room have to read as."""
    return room * 1_000_003 + component * 40_009 + rows * 101 + layer + 1


def layout(slots: int, page: int, base: int, *, page_first: bool) -> Layout:
    """LAYERS planes of one word a row, layer_first or page_first_direct."""
    planes: list[Plane] = []
    for layer in range(LAYERS):
        if page_first:
            planes.append(Plane(layer, "latent", "int64", 0, 1, base + layer * page * ROW, LAYERS * page * ROW, ROW, ROW))
        else:
            planes.append(Plane(layer, "latent", "int64", 0, 1, base + layer * slots * ROW, page * ROW, ROW, ROW))
    return Layout(tuple(planes), page, slots)


def components(tokens: int, page: int, *, page_first: bool) -> tuple[Component, ...]:
    """A KV with a row a token, and a compressed one with a row per 4 tokens."""
    kv = layout(tokens, page, 0, page_first=page_first)
    c4 = layout(tokens, page, tokens * LAYERS * ROW, page_first=page_first)
    return Component("kv", "dram", 1, Span(), kv), Component("c4", "dram", 4, Span(), c4)


LIMITS = Limits(
    window=64, resend_ms=50, resend_ms_max=400, ping_ms=100, silence_ms=600, session_silence_ms=5_000, fence_poll_ms=20
)


class World:
    """Everything of one seed; `run` returns the counts, or raises Violation."""

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        self.seed, self.profile = seed, profile or draw(seed)
        self.rng = random.Random(f"world {seed}")
        self.now = 0.0
        self.healed = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        p = self.profile
        self.prefills = {f"tcp://p{i}": PrefillNode(self, f"tcp://p{i}") for i in range(p.prefills)}
        self.decodes = {f"d{i}": DecodeNode(self, f"d{i}") for i in range(p.decodes)}
        self.requests: list[Request] = []
        self.trace: list[str] | None = None

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay, self._serial, action))

    def log(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {text}")

    def stretch(self, median: float, tail: float) -> float:
        """A log-normal time, ten seconds at most; without a tail it varies by a tenth."""
        return min(median * math.exp(self.rng.gauss(0.0, tail or 0.1)), 10.0)

    def send(self, source: Node, target_name: str, message: Message) -> None:
        """The network: real bytes, lost, repeated or late while the world is not healed."""
        frame = encode(message)
        if self.trace is not None:
            self.log(f"{source.name} -> {target_name} {message}")
        p = self.profile
        copies = 1
        if not self.healed:
            copies = 0 if self.rng.random() < p.loss else 2 if self.rng.random() < p.duplicate else 1
        for _ in range(copies):
            delay = self.stretch(p.delay, 0.0 if self.healed else p.delay_tail)
            self.at(delay, lambda: self._deliver(source.name, source.life, target_name, frame))

    def _deliver(self, source: str, source_life: int, target: str, frame: bytes) -> None:
        node = self.prefills.get(target) or self.decodes[target]
        if node.dead:
            return
        if node.frozen:
            node.backlog.append(lambda: self._deliver(source, source_life, target, frame))
            return
        node.receive(source, decode(frame))

    def run(self) -> dict[str, int]:
        p, rng = self.profile, self.rng
        for number in range(p.rooms):
            request = Request(self, number + 1)
            self.requests.append(request)
            self.at(rng.uniform(0.0, p.span), request.begin)
        for _ in range(p.freezes):
            node = rng.choice(list(self.prefills.values()))
            self.at(rng.uniform(0.0, p.span), lambda node=node: self._strike(node, lambda: node.freeze(rng.uniform(*p.freeze))))
        for _ in range(p.kills):
            node = rng.choice(list(self.prefills.values()))
            self.at(rng.uniform(0.0, p.span), lambda node=node: self._strike(node, node.kill))
        self._run_until(p.span + 1.0)
        for _ in range(20):  # what runs on, runs on in the rough, as long as there is something to see
            if self._settled:
                break
            self._run_until(self.now + 0.5)
        self.healed = True
        for node in self.prefills.values():
            node.thaw()
        for _ in range(60):
            self._run_until(self.now + 1.0)
            if self._settled:
                break
        self._check_end()
        ready = sum(request.ready for request in self.requests)
        return {"rooms": len(self.requests), "ready": ready}

    def _strike(self, node: PrefillNode, blow: Callable[[], None], tries: int = 100) -> None:
        """Faults come when they hurt: while a write is in flight, if there is one soon."""
        if tries and not any(session.writes for session in node.core.sessions.values()):
            self.at(0.005, lambda: self._strike(node, blow, tries - 1))
        else:
            blow()

    @property
    def _settled(self) -> bool:
        """Whether nothing is left to happen but pings."""
        ended = all(r.decode_failed or r.released for r in self.requests if r.expected)
        decodes = all(n.core.idle and all(peer.up for peer in n.core.links.peers.values()) for n in self.decodes.values())
        return ended and decodes and all(node.core.idle and not node.dead for node in self.prefills.values())

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    def fail(self, text: str) -> None:
        raise Violation(f"at {self.now:.4f}: {text}")

    def _check_end(self) -> None:
        """Invariants 4 and 5: every room has ended once, and everything is back where it started."""
        for request in self.requests:
            request.check_end()
            if self.profile.isolation and request.prefill.never_froze and not request.ready_at - request.begun_at < 1.0:
                self.fail(f"room {request.room} had to wait for a frozen peer that is not its own")
        for node in self.decodes.values():
            core = node.core
            if not core.idle:
                leases = {s.id: list(s.leases) for s in core.links.sessions.values()}
                self.fail(f"{node.name} is not idle: rooms {list(core.rooms)}, leases {leases}")
            for free in core.arena.free:
                if free.free_slots != free.slots or free.fragmentation:
                    self.fail(f"{node.name} leaks {free.slots - free.free_slots} slots")
            if core.admission.inflight_bytes or len(core.admission) or core.leases.quarantined_bytes:
                self.fail(f"{node.name} ends with bytes in flight, in the queue or in quarantine")
            for peer in core.links.peers.values():
                if peer.session is not None and (peer.session.reserved or not peer.session.has_place):
                    self.fail(f"{node.name} ends with places of the window taken")
                if peer.session is None or peer.up is None:
                    self.fail(f"{node.name} has no session with {peer.name} after healing")
            if any(node.core._waiting.values()):
                self.fail(f"{node.name} ends with rooms that wait")
        for node in self.prefills.values():
            if not node.core.idle:
                duties = {s.id: {n: d.state for n, d in s.duties.items()} for s in node.core.sessions.values()}
                self.fail(f"{node.name} is not idle: rooms {list(node.core.rooms)}, duties {duties}")
            if node.free_slots != self.profile.pool_tokens:
                self.fail(f"{node.name} leaks source pages: {node.free_slots} of {self.profile.pool_tokens}")
            if node.core._waiting:
                self.fail(f"{node.name} ends with grants that wait")


class Node:
    """A process: it can freeze, and what is sent to it waits."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.frozen = self.dead = False
        self.never_froze = True
        self.life = 1
        self.backlog: list[Callable[[], None]] = []
        self._tick_at: float | None = None

    def act(self, action: Callable[[], None]) -> None:
        """Runs in this process: now, when it thaws, or never if it dies first."""
        life = self.life
        if self.frozen:
            self.backlog.append(lambda: self.act(action))
        elif not self.dead and life == self.life:
            action()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        life = self.life
        self.world.at(delay, lambda: self.act(action) if self.life == life else None)

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
            self.frozen, self.never_froze = True, False
            self.world.at(seconds, self.thaw)

    def thaw(self) -> None:
        if self.frozen:
            self.world.log(f"{self.name} thaws")
            self.frozen = False
            backlog, self.backlog = self.backlog, []
            for action in backlog:
                action()


class DecodeNode(Node):
    """A decode process: its arena's memory, its engine, and the watch over who may write."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        p = world.profile
        self.components = components(p.arena_tokens, 1, page_first=True)
        self.memory = np.zeros(max(c.layout.end for c in self.components) // ROW, dtype=np.int64)
        limits = Limits(**{**{f: getattr(LIMITS, f) for f in LIMITS.__slots__}, "window": p.window})
        identity = Identity(name, "decode", world.rng.getrandbits(64), Ranks(), "sim", b"w", limits.window)
        self.core = DecodeSessions(identity, self.components, limits, lambda: world.rng.getrandbits(63) + 1)
        self.writers: dict[int, set[object]] = {}  # session -> mappings that can still write
        self.revoked: set[int] = set()
        for peer in world.prefills:
            self.later(0.0, lambda peer=peer: self.perform(self.core.dial(peer, world.now)))

    def receive(self, source: str, message: Message) -> None:
        self.perform(self.core.receive(source, message, self.world.now))

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
                    if not self.writers[session]:
                        self.later(0.0005, lambda s=session: self.perform(self.core.fenced(s, world.now)))
                case fx.Forget(session):
                    if self.writers.pop(session):
                        world.fail(f"{self.name} forgets session {session:#x}, which can still be written")
                case fx.Ready():
                    world.requests[effect.room - 1].on_ready(effect)
                case fx.RoomFailed():
                    world.log(f"{self.name} room {effect.room} failed {effect.cause} {effect.detail}")
                    world.requests[effect.room - 1].on_decode_failed(effect)
                case fx.PeerRefused():
                    world.fail(f"{self.name}: {effect.detail}")
        self.wake(self.core.next_tick(), lambda: self.perform(self.core.tick(world.now)))

    def is_free(self, component: int, slot: int) -> bool:
        free = self.core.arena.free[component]
        place = bisect_right(free._starts, slot) - 1
        return place >= 0 and slot < free._starts[place] + free._count_at[free._starts[place]]


class PrefillNode(Node):
    """A prefill process: its pool, its engine's pages, its copies in flight. Killed, it comes back as another process."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        p = world.profile
        self.components = components(p.pool_tokens, 4, page_first=False)
        self._start()

    def _start(self) -> None:
        world, p = self.world, self.world.profile
        self.pool = np.zeros(max(c.layout.end for c in self.components) // ROW, dtype=np.int64)
        self.pages = list(range(p.pool_tokens // 4))
        world.rng.shuffle(self.pages)
        self.identity = Identity(self.name, "prefill", world.rng.getrandbits(64), Ranks(), "sim", b"w", p.window)
        self.core = PrefillSessions(self.identity, self.components, LIMITS)
        self.mappings: dict[int, tuple[DecodeNode, object]] = {}
        self.stopping: set[tuple[int, int]] = set()

    @property
    def free_slots(self) -> int:
        return 4 * len(self.pages)

    def kill(self) -> None:
        """The process dies. Its mappings die with it, or later where a child that it forked holds them and goes on writing."""
        world = self.world
        if self.dead:
            return
        orphan = world.rng.random() < world.profile.orphans
        world.log(f"{self.name} is killed{', a child writes on' if orphan else ''}")
        self.dead, self.frozen, self.backlog, self._tick_at = True, False, [], None
        self.life += 1
        delay = world.rng.uniform(0.5, 4.0) if orphan else 0.0002
        for session, (node, mapping) in self.mappings.items():
            world.at(delay, lambda s=session, n=node, m=mapping: n.writers.get(s, set()).discard(m))
        self.orphaned_until = world.now + delay
        for request in world.requests:
            if request.prefill is self:
                request.on_prefill_killed()
        world.at(world.rng.uniform(0.05, 2.0), self.restart)

    def restart(self) -> None:
        self.world.log(f"{self.name} is started again")
        self.dead = False
        self._start()

    def receive(self, source: str, message: Message) -> None:
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
                        node, mapping = self.mappings.pop(session)
                        node.writers.get(session, set()).discard(mapping)
                case fx.Write():
                    Copy(self, effect)
                case fx.StopWriting(session, grant):
                    self.stopping.add((session, grant))
                case fx.FenceWriter(session):
                    self.later(0.01, lambda s=session: self.perform(self.core.fenced(s, world.now)))
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
        if session in node.revoked or session not in node.writers:
            self.perform(self.core.unmappable(session, "the hand-over was revoked", self.world.now))
            return
        mapping = object()
        node.writers[session].add(mapping)
        self.mappings[session] = node, mapping
        self.perform(self.core.mapped(session, reach.arena_bytes))


class Copy:
    """One write: pieces of rows and layers land one by one, each reading its source when it lands."""

    def __init__(self, node: PrefillNode, order: fx.Write) -> None:
        self.node, self.order, self.world = node, order, node.world
        self.life = node.life
        self.decode, self.mapping = node.mappings[order.session]
        self.theirs = node.core.sessions[order.session].components[order.component]
        self.ours = next(c for c in node.components if c.name == self.theirs.name)
        self.request = self.world.requests[node.core.sessions[order.session].duties[order.grant].room - 1]
        self.index = [c.name for c in self.decode.components].index(self.theirs.name)
        world, p = self.world, self.world.profile
        total = world.stretch(p.write, 0.0 if world.healed else p.write_tail)
        self.fails = not world.healed and world.rng.random() < p.write_fails
        rows = len(order.source_slots)
        cuts = sorted({0, rows, *(world.rng.randrange(rows + 1) for _ in range(2))})
        self.pieces = [
            (layer, low, high)
            for low, high in zip(cuts, cuts[1:], strict=False)
            for layer in range(*order.layers)
        ]
        world.rng.shuffle(self.pieces)
        if self.fails:
            self.pieces = self.pieces[: world.rng.randrange(len(self.pieces) + 1)]
        self.each = total / (len(self.pieces) + 1)
        world.at(self.each, self._next)

    def _next(self) -> None:
        node, world, order = self.node, self.world, self.order
        alive = node.life == self.life
        if not alive and self.mapping not in self.decode.writers.get(order.session, set()):
            return  # the process and every child of it are gone
        stopped = (order.session, order.grant) in node.stopping and world.rng.random() < 0.5
        if self.pieces and not (alive and stopped):
            self._land(*self.pieces.pop())
            world.at(self.each, self._next)
            return
        if alive:
            outcome = fx.Outcome.FAILED if self.pieces or self.fails else fx.Outcome.LANDED
            self.node.act(
                lambda: self.node.perform(
                    self.node.core.wrote(order.session, order.write, outcome, "the copy failed", world.now)
                )
            )

    def _land(self, layer: int, low: int, high: int) -> None:
        """Invariant 1: the target is this grant's still; the source is the room's still (its words say whose it is)."""
        world, node = self.world, self.node
        sources, targets = self.order.source_slots[low:high], self.order.target_slots[low:high]
        for target in targets.tolist():
            if self.decode.is_free(self.index, target):
                world.fail(f"{node.name} writes slot {target} of {self.decode.name}, which is free")
        if node.life == self.life and self.request.drained:
            world.fail(f"{node.name} reads pages of room {self.request.room}, which were given back")
        read = node.pool[self.ours.layout.address(layer, sources) // ROW] if node.life == self.life else -1
        self.decode.memory[self.theirs.layout.address(layer, targets) // ROW] = read


class Request:
    """One room: what the router would start on both sides, and what each of them says of it."""

    def __init__(self, world: World, room: int) -> None:
        self.world, self.room = world, room
        rng, p = world.rng, world.profile
        self.tokens = rng.randint(1, p.tokens_max)
        self.growth = rng.randint(0, 8)
        self.prefill = rng.choice(list(world.prefills.values()))
        self.decode = rng.choice(list(world.decodes.values()))
        self.deadline = rng.uniform(*p.deadline)
        self.ready = self.decode_failed = self.released = False
        self.opened = self.landed = self.prefill_failed = self.drained = self.killed = False
        self.expected = False
        self.begun_at = self.ready_at = math.inf
        self.pages: list[int] = []
        self.life = 0

    def begin(self) -> None:
        world, rng = self.world, self.world.rng
        self.begun_at = world.now
        self.decode.later(rng.expovariate(500.0), self._expect)
        slow = rng.random() < world.profile.opens_late
        self.prefill.later(rng.uniform(0.1, 2.0) if slow else rng.expovariate(500.0), self._open)
        if rng.random() < world.profile.abort:
            delay = rng.choice([0.001, 0.02, 0.5, 2.0]) * rng.random()
            node = rng.choice([self.decode, self.prefill])
            node.later(delay, self._abort_decode if node is self.decode else self._abort_prefill)

    def _expect(self) -> None:
        now, self.expected = self.world.now, True
        self.decode.perform(
            self.decode.core.expect(
                self.room, tokens=self.tokens, sources=[self.prefill.name], now=now,
                deadline=now + self.deadline, growth=self.growth,
            )
        )  # fmt: skip

    def _open(self) -> None:
        node, world = self.prefill, self.world
        needed = -(-self.tokens // 4)
        if needed > len(node.pages):
            node.later(0.05, self._open)
            return
        self.life, self.opened = node.life, True
        self.pages, node.pages = node.pages[:needed], node.pages[needed:]
        node.perform(
            node.core.open(self.room, tokens=self.tokens, now=world.now, deadline=world.now + self.deadline)
        )
        cells: list[tuple[int, int, int, tuple[int, int]]] = []
        for index, component in enumerate(node.components):
            rows = component.rows(self.tokens)
            cuts = sorted({0, rows, *(world.rng.randrange(rows + 1) for _ in range(world.rng.randint(0, 2)))})
            for low, high in zip(cuts, cuts[1:], strict=False):
                split = world.rng.choice([[(0, LAYERS)], [(0, 1), (1, LAYERS)]])
                cells += [(index, low, high, layers) for layers in split]
        world.rng.shuffle(cells)
        node.later(world.rng.expovariate(200.0), lambda: self._compute(cells))

    def _compute(self, cells: list[tuple[int, int, int, tuple[int, int]]]) -> None:
        """The engine computes a cell, offers it, and goes on, unless the room has failed meanwhile."""
        node, world = self.prefill, self.world
        if self.prefill_failed:
            return
        index, low, high, layers = cells.pop()
        component = node.components[index]
        slots = expand_pages(np.array(self.pages), 4, self.tokens)[low:high]
        for layer in range(*layers):
            at = component.layout.address(layer, slots) // ROW
            node.pool[at] = words(self.room, index, np.arange(low, high), layer)
        node.perform(node.core.push(self.room, Cell(component.name, low, layers, slots)))
        if cells:
            node.later(world.rng.expovariate(500.0), lambda: self._compute(cells))
        else:
            node.later(
                world.rng.expovariate(500.0),
                lambda: node.perform(node.core.finish(self.room, aux=self.room.to_bytes(8, "little"), now=world.now)),
            )

    def _abort_decode(self) -> None:
        self.decode.perform(self.decode.core.abort(self.room, self.world.now))

    def _abort_prefill(self) -> None:
        self.prefill.perform(self.prefill.core.abort(self.room, self.world.now))

    def _cancel_other(self, node: Node, abort: Callable[[], None]) -> None:
        """What a router does when one side fails; now and then it is lost, and the deadline has to do."""
        if self.world.rng.random() < 0.8:
            node.later(self.world.rng.expovariate(50.0), abort)

    def on_ready(self, effect: fx.Ready) -> None:
        """Invariants 3 and 4."""
        world = self.world
        if self.ready or self.decode_failed:
            world.fail(f"room {self.room} is READY after it has ended")
        self.ready, self.ready_at = True, world.now
        if effect.aux != self.room.to_bytes(8, "little"):
            world.fail(f"room {self.room} has another's aux")
        self.slots = effect.slots
        for component in self.decode.components:
            if len(effect.slots[component.name]) != component.rows(self.tokens + self.growth):
                world.fail(f"room {self.room} got {len(effect.slots[component.name])} slots for {component.name}")
        self._read("READY")
        self._grow(self.tokens)
        self.decode.later(world.rng.expovariate(5.0), self._release)

    def _grow(self, row: int) -> None:
        """Decode writes its own rows behind the prompt's."""
        layout = self.decode.components[0].layout
        for layer in range(LAYERS):
            at = layout.address(layer, self.slots["kv"][row:]) // ROW
            self.decode.memory[at] = words(self.room, 0, np.arange(row, self.tokens + self.growth), layer)

    def _read(self, when: str) -> None:
        for index, component in enumerate(self.decode.components):
            slots = self.slots[component.name]
            rows = component.rows(self.tokens) if when == "READY" or index else self.tokens + self.growth
            for layer in range(LAYERS):
                got = self.decode.memory[component.layout.address(layer, slots[:rows]) // ROW]
                if (got != words(self.room, index, np.arange(rows), layer)).any():
                    self.world.fail(f"at {when} room {self.room} reads layer {layer} of {component.name} wrong")

    def _release(self) -> None:
        self._read("release")
        self.released = True
        self.decode.perform(self.decode.core.release(self.room, self.world.now))

    def on_decode_failed(self, effect: fx.RoomFailed) -> None:
        if self.ready or self.decode_failed:
            self.world.fail(f"room {self.room} fails on decode after it has ended: {effect.cause} {effect.detail}")
        if effect.cause is Cause.BREACH:
            self.world.fail(f"room {self.room}: honest peers were accused: {effect.detail}")
        self.decode_failed = True
        self._cancel_other(self.prefill, self._abort_prefill)

    def on_landed(self) -> None:
        if self.landed or self.prefill_failed:
            self.world.fail(f"room {self.room} lands after it has ended")
        self.landed = True

    def on_prefill_failed(self) -> None:
        if self.landed or self.prefill_failed:
            self.world.fail(f"room {self.room} fails on prefill after it has ended")
        self.prefill_failed = True
        self._cancel_other(self.decode, self._abort_decode)

    def on_drained(self) -> None:
        """Invariant 1: from here on the engine reuses the pages, so it poisons them."""
        if self.drained or not (self.landed or self.prefill_failed):
            self.world.fail(f"room {self.room} drains twice, or before it has ended")
        self.drained = True
        node = self.prefill
        for component in node.components:
            slots = expand_pages(np.array(self.pages), 4, 4 * len(self.pages))
            for layer in range(LAYERS):
                node.pool[component.layout.address(layer, slots) // ROW] = -1
        node.pages += self.pages
        self.pages = []

    def on_prefill_killed(self) -> None:
        """What its process knew of this room is gone; the router hears of it."""
        if self.opened and not self.drained:
            self.killed = True
            self._cancel_other(self.decode, self._abort_decode)

    def check_end(self) -> None:
        """Invariant 4: ended, exactly once."""
        if self.expected and self.ready + self.decode_failed != 1:
            self.world.fail(f"room {self.room} has not ended on decode")
        if self.ready and not self.released:
            self.world.fail(f"room {self.room} was not released")
        if self.opened and not self.killed and (self.landed + self.prefill_failed != 1 or not self.drained):
            self.world.fail(f"room {self.room} has not ended on prefill, or its pages were not given back")

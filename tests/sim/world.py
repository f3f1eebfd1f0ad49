"""A seeded world with virtual time: real cores and real wire bytes, a network that loses, repeats and reorders, writes
that land row by row and late, processes that freeze and die. It ends by healing, and asks for termination and no leak.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

from pdtransfer.wire import Message, decode, encode

from .nodes import DecodeNode, Node, PrefillNode
from .profile import Profile, draw
from .requests import Request


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """Everything of one seed; `run` returns what was seen, counted, or raises Violation."""

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        self.seed, self.profile = seed, profile or draw(seed)
        self.rng = random.Random(f"world {seed}")
        self.now = 0.0
        self.healed = False
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        p = self.profile
        self.requests: list[Request] = []
        self.decodes: dict[str, DecodeNode] = {}
        self.prefills = {f"tcp://p{i}": PrefillNode(self, f"tcp://p{i}") for i in range(p.prefills)}
        self.decodes |= {f"d{i}": DecodeNode(self, f"d{i}") for i in range(p.decodes)}

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
        self.seen["lost messages"] += copies == 0
        self.seen["repeated messages"] += copies == 2
        for copy in range(copies):
            delay = self.stretch(p.delay, 0.0 if self.healed else p.delay_tail)
            if copy and self.rng.random() < 0.7:
                delay += self.rng.expovariate(2.0)  # long after what it repeats has been answered
            self.at(delay, lambda: self._deliver(source.name, target_name, frame))

    def _deliver(self, source: str, target: str, frame: bytes) -> None:
        node = self.prefills.get(target) or self.decodes[target]
        if node.frozen:
            node.backlog.append(lambda: self._deliver(source, target, frame))
        elif not node.dead:
            node.receive(source, decode(frame))

    def run(self) -> Counter[str]:
        p, rng = self.profile, self.rng
        for number in range(p.rooms):
            request = Request(self, number + 1)
            self.requests.append(request)
            self.at(rng.uniform(0.0, p.span), request.begin)
        everybody = [*self.prefills.values(), *self.decodes.values()]
        for _ in range(p.freezes):
            node = rng.choice([*self.prefills.values()] if p.isolation else everybody)
            self._plan(lambda node=node: node.freeze(rng.uniform(*p.freeze)))
        for _ in range(p.kills):
            self._plan(rng.choice(everybody).kill)
        self._run_until(p.span + 1.0)
        for _ in range(20):  # what runs on, runs on in the rough, as long as there is something to see
            if self._settled:
                break
            self._run_until(self.now + 0.5)
        self.healed = True
        for node in everybody:
            node.thaw()
        for _ in range(60):
            self._run_until(self.now + 1.0)
            if self._settled:
                break
        self._check_end()
        self.seen["rooms"], self.seen["ready"] = len(self.requests), sum(request.ready for request in self.requests)
        return self.seen

    def _plan(self, blow: Callable[[], None]) -> None:
        self.at(self.rng.uniform(0.0, self.profile.span), lambda: self._strike(blow, tries=100))

    def _strike(self, blow: Callable[[], None], tries: int) -> None:
        """Faults come when they hurt: while a write is in flight, if there is one soon."""
        writing = any(s.writes for node in self.prefills.values() for s in node.core.sessions.values())
        if tries and not writing:
            self.at(0.005, lambda: self._strike(blow, tries - 1))
        else:
            blow()

    @property
    def _settled(self) -> bool:
        """Whether nothing is left to happen but pings."""
        nodes = [*self.prefills.values(), *self.decodes.values()]
        return (
            all(request.over for request in self.requests)
            and all(node.core.idle and not node.dead for node in nodes)
            and all(peer.up for node in self.decodes.values() for peer in node.core.links.peers.values())
            and all(len(node.core.links.sessions) == len(self.prefills) for node in self.decodes.values())
            and all(len(node.core.sessions) <= len(self.decodes) for node in self.prefills.values())
        )

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    def fail(self, text: str) -> None:
        raise Violation(f"at {self.now:.4f}: {text}")

    def _check_end(self) -> None:
        """Invariants 4, 5 and 6: every room has ended once, everything is back where it started, nobody had to wait."""
        for request in self.requests:
            request.check_end()
            if self.profile.isolation and request.prefill.never_froze and not request.ready_at - request.begun_at < 1.0:
                self.fail(f"room {request.room} had to wait for a frozen peer that is not its own")
        for node in self.decodes.values():
            self._check_decode(node)
        for node in self.prefills.values():
            self._check_prefill(node)

    def _check_decode(self, node: DecodeNode) -> None:
        core = node.core
        if not core.idle:
            leases = {s.id: list(s.leases) for s in core.links.sessions.values()}
            self.fail(f"{node.name} is not idle: rooms {list(core.rooms)}, leases {leases}")
        for free in core.arena.free:
            if free.free_slots != free.slots or free.fragmentation:
                self.fail(f"{node.name} leaks {free.slots - free.free_slots} slots")
        if core.admission.inflight_bytes or len(core.admission) or core.leases.quarantined_bytes:
            self.fail(f"{node.name} ends with bytes in flight, in the queue or in quarantine")
        if len(core.links.sessions) != len(self.prefills) or any(core._waiting.values()):
            self.fail(f"{node.name} ends with sessions that nobody fenced, or rooms that wait")
        for peer in core.links.peers.values():
            if peer.up is None or peer.quarantined_bytes:
                self.fail(f"{node.name} has no session with {peer.name} after healing, or its slots in quarantine")
            if peer.up.reserved or not peer.up.has_place:
                self.fail(f"{node.name} ends with places of the window taken")

    def _check_prefill(self, node: PrefillNode) -> None:
        core = node.core
        if not core.idle:
            duties = {s.id: {n: d.state for n, d in s.duties.items()} for s in core.sessions.values()}
            self.fail(f"{node.name} is not idle: rooms {list(core.rooms)}, duties {duties}")
        if node.free_slots != self.profile.pool_tokens:
            self.fail(f"{node.name} leaks source pages: {node.free_slots} of {self.profile.pool_tokens}")
        if core._waiting:
            self.fail(f"{node.name} ends with grants that wait")
        # One may be missing: where both Rejects that said so were lost, decode learns it by its next Grant.
        if len(core.sessions) > len(self.decodes) or node.mappings.keys() != core.sessions.keys():
            self.fail(f"{node.name} keeps {len(core.sessions)} sessions and {len(node.mappings)} mappings")

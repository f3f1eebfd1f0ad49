"""A seeded world with virtual time: real cores and real wire bytes, a network that loses, repeats, reorders and parts,
writes that land row by row and late, processes that freeze, die and come back. It ends by healing, and asks for
termination and no leak.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain

from pdtransfer.wire import Begin, Ranks

from .calls import Call
from .chats import Chat
from .decodes import DecodeNode
from .groups import Group
from .kernels import Kernels
from .lines import damage
from .network import Network
from .parts import Parts, names_held
from .pools import LAYERS, ONE_HEAD, Shape
from .prefills import PrefillNode
from .process import Process
from .profile import Profile, draw
from .rooms import Room
from .routers import Client, RouterNode
from .spellings import SpelledNetwork
from .strangers import Stranger, StrangerDecode, StrangerPrefill

EVENTS_MAX = 300_000  # of one seed: the busiest have a tenth of it


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
        self.network = SpelledNetwork(self) if self.profile.spellings > 1 else Network(self)
        self.kernels = Kernels(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._happened = 0
        p = self.profile
        self.calls: list[Call] = []
        self.clients: list[Client] = []
        self._labels: dict[int, Room] = {}
        self.held: list[tuple[str, ...]] = []  # components of each prefill, where it has some alone
        self.prefill_groups = [self._prefill_group(f"tcp://p{place}") for place in range(p.prefills)]
        self.parts = Parts(self) if p.parts else None
        self.decode_groups = [self._decode_group(f"d{place}") for place in range(p.decodes)]
        for group in (*self.prefill_groups, *self.decode_groups):
            Group(group)
        self.prefills = {node.name: node for node in chain.from_iterable(self.prefill_groups)}
        self.decodes = {node.name: node for node in chain.from_iterable(self.decode_groups)}
        self.routers = {f"r{place}": RouterNode(self, f"r{place}") for place in range(p.routers)}
        self.strange_decodes = {name: StrangerDecode(self, name) for name in ["x0"] if p.strangers}
        self.strange_prefills = {name: StrangerPrefill(self, name) for name in ["y0"] if p.strangers}
        self.strangers: dict[str, Stranger] = {**self.strange_decodes, **self.strange_prefills}
        self.processes: dict[str, Process] = {**self.prefills, **self.decodes, **self.routers, **self.strangers}
        for process in self.processes.values():
            process.start()

    def _prefill_group(self, name: str) -> list[PrefillNode]:
        """One rank, or up to four: halves of the heads, times two stages of the pipeline. All have the head of c4. Or
        one that has some components."""
        if self.profile.parts:
            names = names_held(self)
            return [PrefillNode(self, name, shape=ONE_HEAD, ranks=Ranks(), replicas={}, names=names)]
        tp, pp = self.rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)]) if self.profile.ranks else (1, 1)
        cut = self.rng.randint(1, LAYERS - 1)
        stages = [(0, LAYERS)] if pp == 1 else [(0, cut), (cut, LAYERS)]
        group: list[PrefillNode] = []
        for pp_rank, layers in enumerate(stages):
            for tp_rank in range(tp):
                of_rank = name if tp == pp == 1 else f"{name}.{pp_rank}{tp_rank}"
                shape = Shape(layers, self._heads(tp_rank, tp))
                ranks = Ranks(tp_rank=tp_rank, tp_size=tp, pp_rank=pp_rank, pp_size=pp)
                group.append(PrefillNode(self, of_rank, shape=shape, ranks=ranks, replicas={"c4": (tp_rank, tp)}))
        return group

    def _decode_group(self, name: str) -> list[DecodeNode]:
        """One rank, or two: each with half of the heads, or both with all of them."""
        tp = self.rng.choice([1, 2]) if self.profile.ranks else 1
        split = self.rng.random() < 0.7
        return [
            DecodeNode(
                self,
                name if tp == 1 else f"{name}.{rank}",
                shape=Shape(heads=self._heads(rank if split else 0, tp if split else 1)),
                ranks=Ranks(tp_rank=rank, tp_size=tp),
            )
            for rank in range(tp)
        ]

    def _heads(self, rank: int, size: int) -> tuple[int, int]:
        """A rank's KV heads, two in all where the world has ranks."""
        each = (2 if self.profile.ranks else 1) // size
        return rank * each, (rank + 1) * each

    @property
    def rooms(self) -> list[Room]:
        return [*self._labels.values(), *(call.room for call in self.calls)]

    def room_of(self, begin: Begin) -> Room:
        """The room that a router began, whichever side learns of it first."""
        room = self._labels.get(begin.room)
        if room is None:
            tokens, serial = len(begin.prompt) // 4, len(self._labels) + 1
            growth, seconds = begin.sampling.max_tokens, begin.time_left_ms / 1e3
            room = self._labels[begin.room] = Room(self, begin.room, serial, tokens, growth, seconds, self.now)
        return room

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay, self._serial, action))

    def log(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {text}")

    def stretch(self, median: float, tail: float) -> float:
        """A log-normal time, ten seconds at most; without a tail it varies by a tenth."""
        return min(median * math.exp(self.rng.gauss(0.0, tail or 0.1)), 10.0)

    def run(self) -> Counter[str]:
        p, rng = self.profile, self.rng
        for number in range(1, p.rooms + 1):
            if p.routers:
                client = Client(self, number)
                self.clients.append(client)
                self.at(rng.uniform(0.1, p.span), client.ask)
            else:
                call = Chat(self, number) if p.turns else Call(self, number)
                self.calls.append(call)
                self.at(rng.uniform(0.0, p.span), call.begin)
        self._plan_faults()
        self._run_until(p.span + 1.0)
        for _ in range(20):  # what runs on, runs on in the rough, as long as there is something to see
            if self._settled:
                break
            self._run_until(self.now + 0.5)
        self.healed = True
        self.network.heal()
        for process in self.processes.values():
            process.thaw()
        for _ in range(60):
            self._run_until(self.now + 1.0)
            if self._settled:
                break
        self._check_end()
        self.seen["rooms"], self.seen["ready"] = len(self.rooms), sum(room.ready for room in self.rooms)
        return self.seen

    def _plan_faults(self) -> None:
        p, rng = self.profile, self.rng
        # Where it is exact, a decode dies with its Register on the way, if at all.
        nodes: list[Process] = [*self.prefills.values(), *([] if p.exact else self.decodes.values())]
        for _ in range(p.freezes):
            node = rng.choice([*self.prefills.values()] if p.isolation else [*self.processes.values()])
            self._plan(lambda node=node: node.freeze(rng.uniform(*p.freeze)))
        # Incarnations have no order: which of three at once is the latest, nobody can tell. So exactly, each dies once.
        killed = rng.sample(nodes, min(p.kills, len(nodes))) if p.exact else rng.choices(nodes, k=p.kills)
        for node in killed:
            self._plan(partial(self.kill, node), first=0.3 if p.exact else 0.0)
        for _ in range(p.line_faults):
            self._plan(partial(damage, self))
        for _ in range(p.closes):
            self.at(rng.uniform(0.1, 1.0) * p.span, rng.choice([*self.prefills.values()]).close)
        for _ in range(p.router_kills):
            self._plan(rng.choice([*self.routers.values()]).kill)
        if p.leaves:  # one after another: who is refused by one that drains is tried again once
            first, second = rng.sample([self.prefill_groups, self.decode_groups], 2)
            self.at(rng.uniform(0.1, 0.5) * p.span, lambda: self._leave(rng.choice(first)[0]))
            self.at(rng.uniform(0.7, 1.0) * p.span, lambda: self._leave(rng.choice(second)[0]))
        for _ in range(p.partitions):
            self._plan(self._part)
        for _ in range(p.blips):
            self.at(rng.uniform(0.0, p.span), self.kernels.blip)
        if p.starved:
            for process in self.processes.values():
                self._starve(process)

    def _starve(self, process: Process) -> None:
        """It runs for a moment, and then waits nine times as long for a processor."""
        runs = self.rng.uniform(0.001, self.profile.starved / 9)
        self.at(runs, lambda: process.freeze(9 * runs))
        if not self.healed:
            self.at(10.001 * runs, lambda: self._starve(process))

    def _leave(self, leader: PrefillNode | DecodeNode) -> None:
        assert leader.desk is not None
        leader.desk.leave()

    def kill(self, node: Process) -> None:
        if self.profile.exact and node.name in self.prefills:
            wait = max(each.died for each in self.decodes.values()) + 0.3 - self.now
            if wait > 0:  # else what both had left on their way would meet, and nobody could tell who is the latest
                self.at(wait, partial(self.kill, node))
                return
        workers = (self.profile.routers or self.profile.turns) and node.group is not None
        ranks = node.group.ranks if workers else [node]
        for rank in ranks:
            rank.kill()
        for call in self.calls:
            for rank in ranks:
                call.on_killed(rank)

    def _part(self) -> None:
        rng = self.rng
        node = rng.choice([*self.processes.values()])
        others = [name for name in self.processes if name != node.name]
        inward, outward = rng.choice([(True, True), (True, False), (False, True)])
        self.network.cut(
            node,
            others=others if rng.random() < 0.5 else [rng.choice(others)],
            inward=inward,
            outward=outward,
            holds=rng.random() < 0.5,
            seconds=rng.choice([0.3, 2.0, 8.0]) * rng.random(),
        )

    def _plan(self, blow: Callable[[], None], first: float = 0.0) -> None:
        self.at(self.rng.uniform(first, self.profile.span), lambda: self._strike(blow, tries=100))

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
        return (
            all(call.over for call in self.calls)
            and all(client.end for client in self.clients)
            and all(process.settled for process in self.processes.values())
        )

    def _run_until(self, end: float) -> None:
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, action = heapq.heappop(events)
            self._happened += 1
            if self._happened > EVENTS_MAX:
                self.fail(f"{EVENTS_MAX} events have happened, and no end of it")
            action()
        self.now = end

    def fail(self, text: str) -> None:
        raise Violation(f"at {self.now:.4f}: {text}")

    def _check_end(self) -> None:
        """Invariants 4, 5 and 6: every room has ended once, everything is back where it started, nobody had to wait."""
        for room in self.rooms:
            for part in (*room.sources, *room.targets):
                part.check_end()
        if self.profile.isolation:
            for call in self.calls:
                call.check_isolation()
        for client in self.clients:
            if not client.end:
                self.fail(f"request {client.number} has not ended")
        for process in self.processes.values():
            process.check_end()

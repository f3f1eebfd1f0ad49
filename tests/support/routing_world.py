"""A seeded world for the router and the daemons' services: virtual time, the wire's own bytes, a bad network."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.handoff.peers import Send
from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.daemons.router_effects import Emit, RoomEnded
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.serve.worker.service import Service, StartRoom, StopRoom
from pdtransfer.wire import Begin, End, Identity, Load, Message, Ranks, Sampling, decode, encode, pack_ids, unpack_ids

ROUTER = "node:router"
LIMITS = Limits(resend_ms=50, resend_ms_max=400, ping_ms=200, silence_ms=1_000, room_deadline_ms=8_000)


def identity(
    node: str, role: str, incarnation: int = 1, *, model: str = "m", weights: bytes = b"w", context_tokens: int = 0
) -> Identity:
    if role == "router":
        model, weights = "", b""
    return Identity(node, role, incarnation, Ranks(), model, weights, 256, context_tokens=context_tokens)


def request(
    first: int = 7, *, length: int = 5, max_tokens: int = 12, sampling: Sampling | None = None, **more
) -> CompletionRequest:
    ids = np.arange(first, first + length)
    return CompletionRequest(prompt=pack_ids(ids), sampling=sampling or Sampling(max_tokens), **more)


def answer(asked: Begin | CompletionRequest) -> list[int]:
    """What every fake decode generates for this prompt."""
    ids, before = unpack_ids("prompt", asked.prompt), asked.sampling.generated
    seed = int(ids[: len(ids) - before].sum())
    return [(seed * 31 + place * 7) % 300 for place in range(before, before + asked.sampling.max_tokens)]


@dataclass(frozen=True)
class Net:
    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.002)


@dataclass(frozen=True)
class Faults:
    fail: float = 0.0  # of rooms on either side end as a failure
    full: float = 0.0  # of rooms are refused as full
    slow_s: float = 0.3  # at most, for prefill and for each burst of tokens


@dataclass
class Daemon:
    """A Service, and an engine that computes nothing."""

    world: World
    node: str
    role: str
    model: str = "m"
    weights: bytes = b"w"
    lives: int = 0
    load: Load = field(default_factory=lambda: Load(True, False, 0, 0, 10_000, 10_000))

    def __post_init__(self) -> None:
        self.endpoint = f"tcp://{self.node}:1"
        self.start()

    def start(self) -> None:
        """A new process: nothing of the old one is left."""
        self.lives += 1
        self.live: dict[int, Begin] = {}
        self.started: set[int] = set()
        who = identity(self.node, self.role, 1000 + self.lives, model=self.model, weights=self.weights)
        self.service = Service(who, self.world.limits)
        self.perform(self.service.load(self.load, self.world.now))

    def perform(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    assert peer == ROUTER
                    self.world.carry(self, message, to_router=True)
                case StartRoom(_, begin):
                    assert begin.room not in self.started, "started twice"
                    self.started.add(begin.room)
                    self.live[begin.room] = begin
                    self.world.starts.append((self.node, begin.room))
                    self.engine(begin)
                case StopRoom(room, cause):
                    assert room in self.live, "stopped, but not running"
                    self.world.stops.append((self.node, room, cause))
                    self.later(lambda ended=room: self.finish(End(ended, "aborted", "", 0)))

    def later(self, call: Callable[[], None]) -> None:
        life = self.lives
        wait = self.world.random.uniform(0.001, self.world.faults.slow_s)
        self.world.at(self.world.now + wait, lambda: call() if self.lives == life else None)

    def engine(self, begin: Begin) -> None:
        draw = self.world.random.random()
        if draw < self.world.faults.fail:
            self.later(lambda: self.finish(End(begin.room, "engine", "broken", 0)))
        elif draw < self.world.faults.fail + self.world.faults.full:
            self.later(lambda: self.finish(End(begin.room, "full", "", 0, retry_ms=700)))
        elif self.role == "prefill":
            self.later(lambda: self.prefilled(begin))
        else:
            self.later(lambda: self.generate(begin, 0))

    def prefilled(self, begin: Begin) -> None:
        if begin.room in self.live:
            self.world.landed.add(begin.room)
            if begin.first_token:
                self.perform(self.service.tokens(begin.room, answer(begin)[:1], self.world.now))
            self.finish(End(begin.room, "done", "", 0, kv_bytes=64))

    def generate(self, begin: Begin, done: int) -> None:
        if begin.room not in self.live:
            return
        if begin.room not in self.world.landed:
            self.later(lambda: self.generate(begin, done))
            return
        ids = answer(begin)
        upto = min(len(ids), done + self.world.random.randint(1, 4))
        self.perform(self.service.tokens(begin.room, ids[done:upto], self.world.now))
        if upto == len(ids):
            self.finish(End(begin.room, "length", "", 0, kv_bytes=64))
        else:
            self.later(lambda: self.generate(begin, upto))

    def finish(self, end: End) -> None:
        if self.live.pop(end.room, None) is not None:
            self.perform(self.service.end(end, self.world.now))


class World:
    """One router and its daemons. Checks as it goes: tokens come in order, nothing comes after an end."""

    def __init__(
        self,
        seed: int = 0,
        *,
        prefill: int = 2,
        decode: int = 2,
        net: Net | None = None,
        faults: Faults | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.random = random.Random(seed)
        self.now, self.net, self.faults, self.limits = 100.0, net or Net(), faults or Faults(), limits
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._woken: dict[object, float] = {}
        self.landed: set[int] = set()
        self.cut: set[str] = set()  # nodes that no message reaches or leaves
        self.starts: list[tuple[str, int]] = []
        self.stops: list[tuple[str, int, object]] = []
        self.sent: list[tuple[str, Message]] = []
        self.requests: dict[int, CompletionRequest] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, RoomEnded] = {}
        self.daemons = [Daemon(self, f"p{i}", "prefill") for i in range(prefill)]
        self.daemons += [Daemon(self, f"d{i}", "decode") for i in range(decode)]
        self.router_life = 0
        self.restart_router()

    def daemon(self, node: str) -> Daemon:
        return next(daemon for daemon in self.daemons if daemon.node == node)

    def restart_router(self) -> None:
        self.router_life += 1
        self.requests.clear()
        self.routing = Routing(
            identity("router", "router", self.router_life),
            prefill=[d.endpoint for d in self.daemons if d.role == "prefill"],
            decode=[d.endpoint for d in self.daemons if d.role == "decode"],
            limits=self.limits,
            mint=lambda: self.random.getrandbits(64),
        )
        self.perform(self.routing.start(self.now))

    def submit(self, wanted: CompletionRequest) -> int | AnswerFailedError:
        try:
            taken, effects = self.routing.submit(wanted, self.now)
        except AnswerFailedError as refused:
            return refused
        self.requests[taken] = wanted
        self.perform(effects)
        return taken

    def perform(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.sent.append((peer, message))
                    self.carry(next(d for d in self.daemons if d.endpoint == peer), message, to_router=False)
                case Emit(label, ids):
                    assert ids
                    assert label in self.requests
                    assert label not in self.ends, "tokens after the end"
                    self.tokens[label] += ids
                    whole = answer(self.requests[label])
                    assert self.tokens[label] == whole[: len(self.tokens[label])]
                case RoomEnded(request=label, next_room=None):
                    assert label in self.requests
                    assert label not in self.ends, "answered twice"
                    self.ends[label] = effect
                    if effect.cause is None:
                        assert effect.resumptions or len(self.tokens[label]) == effect.decode.tokens
                        assert len(self.tokens[label]) == self.requests[label].sampling.max_tokens

    def carry(self, daemon: Daemon, message: Message, *, to_router: bool) -> None:
        frame = encode(message)
        router_life, life = self.router_life, daemon.lives

        def arrive() -> None:
            if daemon.node in self.cut:
                return
            if to_router and router_life == self.router_life:
                self.perform(self.routing.receive(daemon.endpoint, decode(frame), self.now))
            elif not to_router and life == daemon.lives:
                daemon.perform(daemon.service.receive(ROUTER, decode(frame), self.now))

        copies = 0 if self.random.random() < self.net.drop else 1 + (self.random.random() < self.net.duplicate)
        for _ in range(copies):
            self.at(self.now + self.random.uniform(*self.net.delay_s), arrive)

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, call))

    def run(self, seconds: float) -> None:
        """Lets that much time pass."""
        end = self.now + seconds
        while True:
            cores = [self.routing, *(daemon.service for daemon in self.daemons)]
            ticks = [(when, place) for place, core in enumerate(cores) if (when := core.next_tick()) is not None]
            tick, place = min(ticks, default=(float("inf"), 0))
            event = self._heap[0][0] if self._heap else float("inf")
            if min(tick, event) > end:
                self.now = end
                return
            self.now = max(self.now, min(tick, event))
            if event <= tick:
                heapq.heappop(self._heap)[2]()
            elif place == 0:
                self.perform(self.routing.tick(self.now))
            else:
                daemon = self.daemons[place - 1]
                daemon.perform(daemon.service.tick(self.now))

    def heal(self) -> None:
        self.net, self.faults = Net(), Faults(slow_s=0.05)
        self.cut.clear()

    def check_quiet(self) -> None:
        """Every request has its one end, and nothing is left of any of them."""
        assert self.requests.keys() == self.ends.keys() & self.requests.keys(), "a request never ended"
        assert (len(self.routing.requests), len(self.routing.rooms)) == (0, 0)
        assert len(self.routing._timers) == 0
        for worker in self.routing.workers.by_peer.values():
            assert not worker.rooms
            assert worker.prompt_tokens == 0
        for daemon in self.daemons:
            assert not daemon.live, f"{daemon.node} still works on rooms"
            assert daemon.service.room_count == 0
            assert not [room for room in daemon.started if ("room", room) in daemon.service._timers]

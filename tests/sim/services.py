"""A daemon's side of its routers in the simulated world: the service core, and what a daemon does with its effects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdtransfer.effects import Send
from pdtransfer.errors import Cause
from pdtransfer.served import ServiceRoom
from pdtransfer.service import Service, ServiceEffect, Start, Stop
from pdtransfer.wire import Begin, End, Message

from .process import Alarm
from .rooms import Source, Target
from .routers import answer

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .prefills import PrefillNode
    from .process import Process


class Desk:
    """Performs the service's effects; `begin` and `stop` are the daemon's."""

    def __init__(self, node: DecodeNode | PrefillNode) -> None:
        self.node, self.world = node, node.world
        self.service = Service(node.identity, node.limits)
        self.alarm = Alarm(node, self.service.next_tick, lambda: self.run(self.service.tick(node.clock)))
        self._started: set[int] = set()
        self._ended: set[int] = set()

    def receive(self, source: str, message: Message) -> None:
        self.run(self.service.receive(source, message, self.node.clock))

    def run(self, effects: list[ServiceEffect]) -> None:
        node, world = self.node, self.world
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if isinstance(message, End):
                        self._ended.add(message.room)
                    node.send(peer, message)
                case Start(peer, begin):
                    if begin.room in self._started or begin.room in self._ended:
                        world.fail(f"{node.name} starts room {begin.room:#x} after it has started or ended there")
                    self._started.add(begin.room)
                    world.log(f"{node.name} starts room {begin.room:#x} of {peer}")
                    self.begin(begin)
                case Stop(room, cause):
                    self.stop(room, cause)
        self.tell_load()

    def tell_load(self) -> None:
        for effect in self.service.load(self.node.load(), self.node.clock):
            assert isinstance(effect, Send)
            self.node.send(effect.peer, effect.message)
        self.alarm.arm()

    def end(self, room: int, reason: str, detail: str = "", retry_ms: int = 0) -> None:
        self.run(self.service.end(End(room, reason, detail, 0, retry_ms=retry_ms), self.node.clock))

    def begin(self, begin: Begin) -> None:
        raise NotImplementedError

    def stop(self, room: int, cause: Cause) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        return not self.service.room_count

    def running_of(self, router: Process) -> list[int]:
        """Rooms that this process began and that nobody has stopped."""
        served = self.service._routers.get(router.name)
        running = [] if served is None else served.rooms.values()
        return [room.id for room in running if room.state is ServiceRoom.RUNNING]

    def check_end(self) -> None:
        if not self.idle:
            rooms = {room.id: room.state for room in self.service._rooms.values()}
            self.world.fail(f"{self.node.name} keeps rooms of its routers: {rooms}")


class PrefillDesk(Desk):
    """Prompts in, KV out."""

    node: PrefillNode

    def begin(self, begin: Begin) -> None:
        node, rng = self.node, self.world.rng
        source = Source(self.world.room_of(begin), node, self)
        seconds, peers = begin.time_left_ms / 1e3, list(begin.peers)
        source.open(seconds=seconds, grants=len(peers), peers=peers)
        if rng.random() < self.world.profile.engine_fails:
            node.later(rng.expovariate(50.0), lambda: source.abort(Cause.ENGINE))

    def stop(self, room: int, cause: Cause) -> None:
        self.node.rooms[room].abort(cause)

    def ready(self, target: Target) -> None:
        raise AssertionError("prefill has no target")

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        self.end(part.room.id, "done" if cause is None else cause.value, detail, retry_ms)


class DecodeDesk(Desk):
    """KV in, tokens out."""

    node: DecodeNode

    def __init__(self, node: DecodeNode) -> None:
        super().__init__(node)
        self._begins: dict[int, Begin] = {}
        self._stopped: dict[int, Cause] = {}

    def begin(self, begin: Begin) -> None:
        self._begins[begin.room] = begin
        target = Target(self.world.room_of(begin), self.node, self)
        target.expect(seconds=begin.time_left_ms / 1e3, sources=list(begin.peers))

    def stop(self, room: int, cause: Cause) -> None:
        self._stopped[room] = cause
        target = self.node.rooms[room]
        if not target.ready:  # else the engine drops it at its next step
            target.abort(cause)

    def ready(self, target: Target) -> None:
        rng = self.world.rng
        fails = rng.random() < self.world.profile.engine_fails
        first = answer(self._begins[target.room.id])
        last = rng.randrange(len(first) + 1) if fails else len(first)
        pace = rng.choice([0.01, 0.01, 0.01, 0.01, 0.3])
        self.node.later(rng.expovariate(200.0), lambda: self._step(target, first, 0, last, pace, fails=fails))

    def _step(self, target: Target, ids: list[int], done: int, last: int, pace: float, *, fails: bool) -> None:
        """The engine generates some tokens and goes on, unless the room was dropped."""
        room, rng = target.room.id, self.world.rng
        if room in self._stopped:
            target.release()
            self.end(room, self._stopped[room].value)
            return
        upto = min(last, done + rng.randint(1, 4))
        if upto > done:
            self.run(self.service.tokens(room, ids[done:upto], self.node.clock))
        if upto == last:
            target.release()
            self.end(room, "engine" if fails else "length")
        else:
            self.node.later(rng.expovariate(1 / pace), lambda: self._step(target, ids, upto, last, pace, fails=fails))

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        assert cause is not None
        self.end(part.room.id, cause.value, detail, retry_ms)

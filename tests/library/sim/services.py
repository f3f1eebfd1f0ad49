"""A daemon's side of its routers in the simulated world: the service core, and what a daemon does with its effects."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdtransfer.errors import Cause
from pdtransfer.handoff.peers import Send
from pdtransfer.serve.worker.service import Service, ServiceEffect, StartRoom, StopRoom
from pdtransfer.serve.worker.service_rooms import ServiceRoom
from pdtransfer.wire import Begin, End, Message

from .groups import Group
from .process import Alarm, Process
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

    @property
    def group(self) -> Group:
        assert self.node.group is not None
        return self.node.group

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
                case StartRoom(peer, begin):
                    if begin.room in self._started or begin.room in self._ended:
                        world.fail(f"{node.name} starts room {begin.room:#x} after it has started or ended there")
                    self._started.add(begin.room)
                    world.log(f"{node.name} starts room {begin.room:#x} of {peer}")
                    self.begin(begin)
                case StopRoom(room, cause):
                    self.stop(room, cause)
        self.send_load()

    def send_load(self) -> None:
        for effect in self.service.load(self.node.load(), self.node.clock):
            assert isinstance(effect, Send)
            self.node.send(effect.peer, effect.message)
        self.alarm.arm()

    def end(self, room: int, reason: str, detail: str = "", retry_ms: int = 0) -> None:
        self.run(self.service.end(End(room, reason, detail, 0, retry_ms=retry_ms), self.node.clock))

    def leave(self) -> None:
        """As at SIGTERM: begins no more, ends what there is, says goodbye; then it is started again."""
        if not self.world.healed and not self.node.dead and not self.node.core.draining:
            self.world.log(f"{self.node.name} drains")
            self.node.core.drain()
            self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        self.send_load()
        if not self.idle or not self.node.at_rest:
            self.node.later(0.02, self._leave_when_idle)
            return
        self.world.seen["workers that leave"] += 1
        self.run(self.service.goodbye(Cause.SHUTDOWN.value))
        for rank in self.group.ranks[1:]:
            self.group.send(self.node, rank, rank.depart)
        self._depart_last({rank: rank.life for rank in self.group.ranks[1:]})

    def _depart_last(self, lives: dict[Process, int]) -> None:
        if any(rank.life == life for rank, life in lives.items()):
            self.node.later(0.001, lambda: self._depart_last(lives))
        else:
            self.node.depart()

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
    """Prompts in, KV out: a room has landed when it has on every rank, and fails on all when it fails on one."""

    node: PrefillNode

    def __init__(self, node: PrefillNode) -> None:
        super().__init__(node)
        self._landed: dict[int, int] = {}  # rooms under way, and on how many ranks they have landed

    def begin(self, begin: Begin) -> None:
        rng, ranks = self.world.rng, self.group.ranks
        self._landed[begin.room] = 0
        self.group.send_all(lambda rank: self._open(rank, begin))
        if rng.random() < self.world.profile.engine_fails:
            broken = rng.choice(ranks) if len(ranks) > 1 else self.node
            broken.later(rng.expovariate(50.0), lambda: self._abort(broken, begin.room, Cause.ENGINE))

    def _open(self, rank: PrefillNode, begin: Begin) -> None:
        source = Source(self.world.room_of(begin), rank, self)
        peers = list(begin.peers)
        source.open(seconds=begin.time_left_ms / 1e3, grants=len(peers), peers=peers)

    def _abort(self, rank: PrefillNode, room: int, cause: Cause) -> None:
        if room in rank.rooms:
            rank.rooms[room].abort(cause)

    def stop(self, room: int, cause: Cause) -> None:
        self._fail(room, cause)

    def leased(self, target: Target) -> None:
        raise AssertionError("prefill has no target")

    def ready(self, target: Target) -> None:
        raise AssertionError("prefill has no target")

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        room, leader = part.room.id, self.node
        if cause is None:
            self.group.send(part.node, leader, lambda: self._lands(room))
        else:
            self.group.send(part.node, leader, lambda: self._fail(room, cause, detail, retry_ms))

    def _lands(self, room: int) -> None:
        if room in self._landed:
            self._landed[room] += 1
            if self._landed[room] == len(self.group.ranks):
                del self._landed[room]
                self.end(room, "done")

    def _fail(self, room: int, cause: Cause, detail: str = "", retry_ms: int = 0) -> None:
        """For the first reason that there is."""
        if self._landed.pop(room, None) is not None:
            self.end(room, cause.value, detail, retry_ms)
            self.group.send_all(lambda rank: self._abort(rank, room, cause))


class DecodeDesk(Desk):
    """KV in, tokens out: a room generates when it is READY on every rank, and before that fails on all when on one."""

    node: DecodeNode

    def __init__(self, node: DecodeNode) -> None:
        super().__init__(node)
        self._begins: dict[int, Begin] = {}
        self._landing: dict[int, int] = {}  # rooms that do not generate yet, and on how many ranks they are READY
        self._stopped: dict[int, Cause] = {}
        self._sparse: set[int] = set()  # rooms for the HiSparse device, if there is one

    def begin(self, begin: Begin) -> None:
        if (engine := self.node.engine) is not None:
            if len(self._sparse) - len(engine.seats) >= self.world.profile.sparse_queue_max:
                self.end(begin.room, Cause.FULL.value, "the device", max(100, engine.scheduler.retry_ms))
                return
            self._sparse.add(begin.room)
        self._begins[begin.room], self._landing[begin.room] = begin, 0
        self._expect(self.node, begin)

    def leased(self, target: Target) -> None:
        """The others get their slots in the order in which the leader has: else two rooms would wait for each other."""
        room = target.room.id
        if target.node is self.node and room in self._landing:
            for rank in self.group.ranks[1:]:
                self.group.send(self.node, rank, lambda rank=rank: self._expect(rank, self._begins[room]))

    def _expect(self, rank: DecodeNode, begin: Begin) -> None:
        target = Target(self.world.room_of(begin), rank, self)
        target.expect(seconds=begin.time_left_ms / 1e3, sources=list(begin.peers))

    def stop(self, room: int, cause: Cause) -> None:
        if room in self._landing:
            self._fail(room, cause)
        elif self.node.engine is not None:
            self.node.engine.drop(room)
            self._sparse.discard(room)
            self.end(room, cause.value)
        else:  # the engine drops it at its next step
            self._stopped[room] = cause

    def ready(self, target: Target) -> None:
        self.group.send(target.node, self.node, lambda: self._ready(target.room.id))

    def _ready(self, room: int) -> None:
        if room not in self._landing:
            return
        self._landing[room] += 1
        if self._landing[room] < len(self.group.ranks):
            return
        del self._landing[room]
        rng = self.world.rng
        fails = rng.random() < self.world.profile.engine_fails
        first = answer(self._begins[room])
        last = rng.randrange(len(first) + 1) if fails else len(first)
        if self.node.engine is not None:
            end = "engine" if fails else "length"
            report = partial(self._stepped, room, first, last, end)
            self.node.engine.take(self.node.rooms[room], grows=last, report=report)
            return
        pace = rng.choice([0.01, 0.01, 0.01, 0.01, 0.3])
        self.node.later(rng.expovariate(200.0), lambda: self._step(room, first, 0, last, pace, fails=fails))

    def _step(self, room: int, ids: list[int], done: int, last: int, pace: float, *, fails: bool) -> None:
        """The engine generates some tokens and goes on, unless the room was dropped."""
        rng = self.world.rng
        if room in self._stopped:
            self._close(room, self._stopped[room].value)
            return
        upto = min(last, done + rng.randint(1, 4))
        if upto > done:
            self.run(self.service.tokens(room, ids[done:upto], self.node.clock))
        if upto == last:
            self._close(room, "engine" if fails else "length")
        else:
            self.node.later(rng.expovariate(1 / pace), lambda: self._step(room, ids, upto, last, pace, fails=fails))

    def _stepped(self, room: int, ids: list[int], last: int, end: str, grown: int) -> None:
        """A step on the HiSparse device: as many tokens were made so far."""
        if grown:
            self.run(self.service.tokens(room, ids[grown - 1 : grown], self.node.clock))
        if grown == last:
            self._sparse.discard(room)
            self.end(room, end)

    def _close(self, room: int, reason: str) -> None:
        self.group.send_all(lambda rank: rank.rooms[room].release())
        self.end(room, reason)

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        assert cause is not None
        self.group.send(part.node, self.node, lambda: self._fail(part.room.id, cause, detail, retry_ms))

    def _fail(self, room: int, cause: Cause, detail: str = "", retry_ms: int = 0) -> None:
        """Before it generates, for the first reason that there is."""
        if self._landing.pop(room, None) is not None:
            self._sparse.discard(room)
            self.end(room, cause.value, detail, retry_ms)
            self.group.send_all(lambda rank: self._give_up(rank, room, cause))

    def _give_up(self, rank: DecodeNode, room: int, cause: Cause) -> None:
        target = rank.rooms.get(room)  # else it was never started there
        if target is not None and target.ready:
            if rank.engine is not None:
                rank.engine.failed(target)
            target.release()
        elif target is not None:
            target.abort(cause)

"""Routers of the simulated world, and the clients that ask them: each request ends once, its tokens come in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdtransfer.errors import Cause
from pdtransfer.handoff.peers import Send
from pdtransfer.serve.router.backends.daemons.router_effects import Emit, RoomEnded, RoutingEffect
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.wire import Begin, Identity, Message, Ranks, Sampling, pack_ids, unpack_ids

from .process import Alarm, Process
from .spellings import plain, spell

if TYPE_CHECKING:
    from .services import Desk
    from .world import World


def answer(begin: Begin) -> list[int]:
    """What every decode generates from this prompt."""
    first, before = int(unpack_ids("prompt", begin.prompt)[0]), begin.sampling.generated
    return [first * 31 + place * 7 for place in range(before, before + begin.sampling.max_tokens)]


class Client:
    """One request: what it asked for, what it got."""

    def __init__(self, world: World, number: int) -> None:
        rng, p = world.rng, world.profile
        self.world, self.number = world, number
        self.router = rng.choice(list(world.routers.values()))
        self.prompt = pack_ids(np.arange(number, number + rng.randint(1, p.tokens_max)))
        self.max_tokens = rng.randint(1, 12)
        self.ids: list[int] = []
        self.asked = False
        self.end = ""
        self.leaves = rng.random() < p.abort

    def ask(self) -> None:
        router, rng = self.router, self.world.rng
        if router.dead:
            self.over("nobody there")
            return
        self.asked = True
        router.asked.append(self)
        router.later(0.0, lambda: router.submit(self))
        if self.leaves:
            router.later(rng.choice([0.005, 0.1, 1.0]) * rng.random(), lambda: router.leave(self))

    def receive(self, ids: list[int]) -> None:
        self.ids += ids
        first = self.number * 31
        if self.end or self.ids != [first + place * 7 for place in range(len(self.ids))]:
            self.world.fail(f"request {self.number} receives {ids} after {len(self.ids) - len(ids)} tokens, or its end")

    def over(self, how: str) -> None:
        if self.end:
            self.world.fail(f"request {self.number} ends as {how} after it has ended as {self.end}")
        self.end = how
        self.world.seen[f"requests: {how}"] += 1


class RouterNode(Process):
    """One router process."""

    def start(self) -> None:
        world = self.world
        self.identity = Identity(
            self.name, "router", world.rng.getrandbits(64), Ranks(), "", b"", self.limits.window
        )  # fmt: skip
        self.core = Routing(
            self.identity,
            prefill=self._spelled([group[0].name for group in world.prefill_groups]),
            decode=self._spelled([group[0].name for group in world.decode_groups]),
            limits=self.limits,
            mint=lambda: world.rng.getrandbits(64),
        )
        self.alarm = Alarm(self, self.core.next_tick, lambda: self.perform(self.core.tick(self.clock)))
        self.clients: dict[int, Client] = {}
        self.labels: dict[Client, int] = {}
        self.asked: list[Client] = []
        self.later(0.0, lambda: self.perform(self.core.start(self.clock)))

    def _spelled(self, names: list[str]) -> list[str]:
        """Each worker, now and then by two names."""
        return list(dict.fromkeys(spell(self.world, name) for name in names * min(self.world.profile.spellings, 2)))

    def submit(self, client: Client) -> None:
        resumed = client.number % 3 == 0
        sampling = Sampling(client.max_tokens, temperature=1.0)  # each room has to know what was generated before it
        request = CompletionRequest(prompt=client.prompt, sampling=sampling, enable_resume=resumed)
        try:
            taken, effects = self.core.submit(request, self.clock)
        except AnswerFailedError as refused:
            client.over(f"refused {refused.cause.value}")
            return
        self.clients[taken], self.labels[client] = client, taken
        self.perform(effects)

    def leave(self, client: Client) -> None:
        if not client.end and client in self.labels:
            self.perform(self.core.cancel(self.labels[client], self.clock))

    def perform(self, effects: list[RoutingEffect]) -> None:
        world = self.world
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.send(peer, message)
                case Emit(label, ids):
                    self.clients[label].receive(ids)
                case RoomEnded(request=label, cause=None):
                    client = self.clients[label]
                    if len(client.ids) != client.max_tokens:
                        world.fail(f"request {client.number} is finished with {len(client.ids)} tokens")
                    client.over("finished")
                case RoomEnded(request=label, cause=cause, detail=detail, next_room=None):
                    world.log(f"{self.name} request {self.clients[label].number} failed {cause} {detail}")
                    if (world.profile.leaves or world.profile.exact) and cause is not Cause.ABORTED:
                        world.fail(f"request {self.clients[label].number} is lost: {cause} {detail}")
                    self.clients[label].over(f"failed {cause}")
        world.seen["retries"] += self.core.retries - getattr(self, "_retries", 0)
        world.seen["resumptions"] += self.core.resumptions - getattr(self, "_resumptions", 0)
        self._retries, self._resumptions = self.core.retries, self.core.resumptions
        self.alarm.arm()

    def receive(self, source: str, message: Message) -> None:
        self.perform(self.core.receive(source, message, self.clock))

    def gone(self, name: str, evidence: str, *, host: bool) -> None:
        self.perform(self.core.gone(name, evidence, self.clock))

    def kill(self) -> None:
        """The process dies; its clients lose their connections, its workers have to stop what it began."""
        world = self.world
        if self.dead or world.healed:
            return
        world.log(f"{self.name} is killed")
        world.seen["router kills"] += 1
        self.die()
        self._retries = self._resumptions = 0
        for client in self.asked:
            if not client.end:
                client.over("its router died")
        for node in (*world.prefills.values(), *world.decodes.values()):
            desk = node.desk
            if desk is not None and not node.dead:
                rooms, before = desk.running_of(self), node.disturbed
                silence_ms = self.limits.slow_ms if world.kernels.share == 1.0 else self.limits.silence_ms
                wait = 1.3 * (silence_ms + self.limits.ping_ms) / 1e3
                world.at(wait, lambda d=desk, r=rooms, b=before: self._check_stopped(d, r, b))

    def _check_stopped(self, desk: Desk, rooms: list[int], before: int) -> None:
        """What a dead router began is stopped soon, whether or not it comes back."""
        node = desk.node
        repeats = self.world.profile.duplicate  # a late Ping of the dead one counts as life
        if node.disturbed == before and not node.frozen and not repeats:
            left = set(rooms) & set(desk.running_of(self))
            if left:
                self.world.fail(f"{node.name} still runs {left} of {self.name}, which has died")
            self.world.seen["rooms of dead routers"] += len(rooms)

    @property
    def settled(self) -> bool:
        return not self.dead and not self.core.rooms

    def check_end(self) -> None:
        core, world = self.core, self.world
        if core.requests or core.rooms:
            world.fail(f"{self.name} ends with {len(core.requests)} requests and {len(core.rooms)} rooms")
        for worker in core.workers.by_peer.values():
            same = [each for each in core.workers.by_peer.values() if plain(each.peer) == plain(worker.peer)]
            if worker.rooms or worker.prompt_tokens or sum(each.usable for each in same) != 1:
                world.fail(f"{self.name} ends with {worker.peer} in use, or lost: {worker.rooms} {worker.why}")

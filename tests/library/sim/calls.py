"""What begins a room where the world has no router: it starts both sides, and cancels one when the other has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdtransfer.errors import Cause

from .pools import BLOCK
from .process import Process
from .rooms import Room, Source, Target
from .spellings import plain, spell

if TYPE_CHECKING:
    from .world import World


class Call:
    """One room, from its beginning on all its ranks."""

    def __init__(self, world: World, serial: int) -> None:
        self.world = world
        rng, p = world.rng, world.profile
        deadline = rng.uniform(*p.deadline)
        growth = 16 if p.sparse else 8
        self.room = Room(world, serial, serial, rng.randint(1, p.tokens_max), rng.randint(0, growth), deadline)
        if p.placed:
            self.room.growth = 0  # the engine's own affair
        if p.families:
            self.room.family = rng.randint(1, p.families)
            self.room.shared = rng.choice([0, BLOCK, rng.randint(0, self.room.tokens), self.room.tokens])
            self.room.shared = min(self.room.shared, self.room.tokens)
        self.prefills, self.decodes = rng.choice(world.prefill_groups), rng.choice(world.decode_groups)
        if world.parts is not None:
            self.prefills = world.parts.choose(self.room)
        self.sources = [Source(self.room, node, self) for node in self.prefills]
        self.targets = [Target(self.room, node, self) for node in self.decodes]
        self._strange_prefill = self._strange_decode = ""
        if world.strangers and rng.random() < 0.5:
            self._meet_stranger()

    def _meet_stranger(self) -> None:
        """One side of the room is not one of ours."""
        self.room.honest = False
        if self.world.rng.random() < 0.5:
            (self._strange_prefill,), self.sources = self.world.strange_prefills, []
        else:
            (self._strange_decode,), self.targets = self.world.strange_decodes, []

    def begin(self) -> None:
        world, rng, room, p = self.world, self.world.rng, self.room, self.world.profile
        room.begun_at = world.now
        names = [self._strange_prefill or spell(world, node.name) for node in self.prefills]
        if self._strange_prefill:
            del names[1:]
        whole_group = p.led and rng.random() < 0.5
        if whole_group:
            world.seen["rooms that name a leader"] += 1
            del names[1:]
        elif len(names) > 1 and world.parts is None and rng.random() < 0.1:
            world.seen["rooms with a rank left out"] += 1
            names.remove(rng.choice(names))
            for source in self.sources:
                source.left_out = source.node.name not in map(plain, names)
        hasty = p.hasty > 0 and rng.random() < p.hasty
        for target in self.targets:
            target.hasty = hasty
            target.seconds = rng.uniform(0.2, 2.0) if hasty else room.deadline
        self._expect(names, whole_group=whole_group)
        slow, peers = rng.random() < p.opens_late, [node.name for node in self.decodes]
        if self._strange_decode:  # alone, or of two ranks
            peers = [self._strange_decode, "another rank"][: rng.randint(1, 2)]
        grants = len(peers)
        allowed = None if world.strangers and room.honest and rng.random() < 0.3 else peers  # None: whoever is first
        for source in self.sources:
            wait = rng.uniform(0.1, 2.0) if slow else rng.expovariate(500.0)
            source.node.later(wait, lambda each=source: each.open(seconds=room.deadline, grants=grants, peers=allowed))
        if rng.random() < p.abort:
            part = rng.choice([*self.sources, *self.targets])
            part.node.later(rng.choice([0.001, 0.02, 0.5, 2.0]) * rng.random(), part.abort)

    def _expect(self, names: list[str], *, whole_group: bool) -> None:
        for target in self.targets:
            wait = self.world.rng.expovariate(500.0)
            target.node.later(wait, lambda each=target: each.expect(each.seconds, names, whole_group))

    def leased(self, target: Target) -> None:
        """It has its slots on one rank."""

    def ready(self, target: Target) -> None:
        if (engine := target.node.engine) is not None:
            target.node.later(0.0, lambda: engine.take(target))
        else:
            target.node.later(self.world.rng.expovariate(5.0), target.release)

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        """What a router does when one side fails; now and then it is lost, and the deadline has to do."""
        if cause is not None:
            self._cancel(part)

    def on_killed(self, node: Process) -> None:
        """Its router learns that a process has died."""
        for part in (*self.sources, *self.targets):
            if part.node is node and (part.killed or not part.begun):
                self._cancel(part)

    def _cancel(self, ended: Source | Target) -> None:
        rng = self.world.rng
        if rng.random() < 0.8:
            for part in (*self.sources, *self.targets):
                if part is not ended and not part.over:
                    part.node.later(rng.expovariate(50.0), part.abort)

    def check_isolation(self) -> None:
        """Invariant 6: no room waits for a frozen peer that is not its own."""
        undisturbed = not any(node.disturbed for node in (*self.prefills, *self.decodes))
        for target in self.targets:
            if undisturbed and not target.ready_at - self.room.begun_at < 1.0:
                self.world.fail(f"room {self.room.id} had to wait for a frozen peer that is not its own")

    @property
    def over(self) -> bool:
        return all(target.over or not target.expected for target in self.targets)

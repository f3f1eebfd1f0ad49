"""Chats: prompts that go on from an answer, with a prefill, or without one where decode has kept the blocks before.

What a decode daemon and its engine do with such a room: the engine computes what is not cached, chunk by chunk, and
then the answer. From the room's release on, its blocks are shared. A room that decode refuses is handed over. Of two
ranks the second gets its slots after the leader, and computes the tokens that the leader computes, or refuses the room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdtransfer.errors import Cause

from .calls import Call
from .pools import BLOCK, ROWS_MAX
from .rooms import Source, Target

if TYPE_CHECKING:
    from .world import World

GROWTH = 8  # slots for an answer, at most
PROMPT_MAX = ROWS_MAX - GROWTH - 1  # tokens
REST_MAX = 64  # tokens that a decode ever computes of a prompt


class Chat(Call):
    """One turn."""

    def __init__(self, world: World, serial: int, *, first: bool = True) -> None:
        super().__init__(world, serial)
        rng = world.rng
        self.room.growth = rng.randint(1, GROWTH)
        self._answer = rng.randint(1, self.room.growth + 1)  # tokens; the last one has no row
        self._generated = 0
        self._breaks = rng.random() < world.profile.engine_fails
        self._cached = 0  # tokens at least that the decode has, unless it gave blocks up
        self._lives: dict[str, int] = {}  # of the ranks that have them
        self._ready: set[str] = set()  # ranks
        self._names: list[str] = []  # of its sources
        if first and rng.random() < 0.1:
            self._stay(REST_MAX)

    def _stay(self, rest_max: int) -> None:
        """It has no prefill."""
        self.prefills, self.sources = [], []
        self._leader.rest_max = rest_max
        self.world.seen["rooms without a prefill"] += 1

    @property
    def _leader(self) -> Target:
        return self.targets[0]

    # What the ranks of a worker do together: the leader's slots come first, and it orders each step

    def _send(self, source: Target, target: Target, action: Callable[[], object]) -> None:
        assert source.node.group is not None
        source.node.group.send(source.node, target.node, action)

    def _on_all(self, action: Callable[[Target], object]) -> None:
        for target in (*self.targets[1:], self._leader):
            self._send(self._leader, target, lambda each=target: action(each))

    def _expect(self, names: list[str], *, whole_group: bool) -> None:
        self._names, leader = names, self._leader
        leader.node.later(self.world.rng.expovariate(500.0), lambda: leader.expect(leader.seconds, names))

    def leased(self, target: Target) -> None:
        """Of a room without a prefill the other ranks compute what the leader does."""
        if target is not self._leader:
            return
        for other in self.targets[1:]:
            if target.rest_max:
                self.world.seen["turns of a rank that follows"] += 1
                other.follows = True
                other.rest_max = self.room.tokens - target.node.core.rooms[self.room.id].prefix
            self._send(target, other, lambda each=other: self._follow(each))

    def _follow(self, target: Target) -> None:
        if self.room.given_up:
            self._send(target, self._leader, lambda: self._give_up(self._leader))
        else:
            target.expect(target.seconds, self._names)

    def ready(self, target: Target) -> None:
        if target.cached < self._sure(target):
            self.world.fail(f"room {self.room.id} shares {target.cached} tokens, {self._cached} were kept for it")
        self.world.seen["turns READY"] += bool(target.rest_max)
        self._send(target, self._leader, lambda: self._one_is_ready(target))

    def _one_is_ready(self, target: Target) -> None:
        leader = self._leader
        self._ready.add(target.node.name)
        if leader.rest_max and target.cached != leader.cached:
            text = f"{target.node.name} has {target.cached} tokens of room {self.room.id}, its leader {leader.cached}"
            self.world.fail(f"the ranks of a worker compute unequal rests: {text}")
        if len(self._ready) == len(self.targets) and not leader.released:
            leader.node.later(self.world.rng.expovariate(200.0), lambda: self._step(leader))

    def _sure(self, target: Target) -> int:
        """Tokens that its decode certainly has."""
        node, cache = target.node, target.node.core.cache
        if node.life != self._lives.get(node.name) or cache.evicted_blocks:
            return 0
        if len(cache) == node.limits.prefix_blocks_max:
            return 0
        most = self.room.tokens - target.rest_max if target.follows else self.room.tokens - bool(target.rest_max)
        return min(self._cached, most // BLOCK * BLOCK)

    def _step(self, target: Target) -> None:
        """The engine computes one chunk of the prompt, or one token; what was dropped, it drops at its next step."""
        rng, room = self.world.rng, self.room
        if room.given_up or (self._breaks and rng.random() < 0.3):
            self.world.seen["turns dropped in their rest"] += target.written < room.tokens
            self._release(target, broken=not room.given_up)
            return
        if target.written < room.tokens:
            stop = min(room.tokens, target.written + rng.randint(1, 12))
            self._on_all(lambda each: each.compute(stop))
        else:
            if self._generated:
                stop = target.written + 1
                self._on_all(lambda each: each.compute(stop))
            self._generated += 1
        if self._generated == self._answer:
            self._release(target, broken=False)
        else:
            target.node.later(rng.expovariate(rng.choice([20.0, 500.0])), lambda: self._step(target))

    def _release(self, target: Target, *, broken: bool) -> None:
        """The blocks of what is written are shared; of what a broken engine has written, nothing is known."""
        room, core, rng = self.room, target.node.core, self.world.rng
        running = core.cache.running_keys(room.prompt, b"")
        running.generated(room.ids(room.tokens, room.tokens + self._generated))
        keys = tuple(running.keys) if self._generated and not broken else ()
        if keys and target.written == room.tokens + room.growth and rng.random() < 0.5:
            keys = core.cache.keys(room.ids(0, ROWS_MAX), b"")  # no slot is left for what would follow
            self.world.seen["keys of more than there are slots for"] += 1
        self._on_all(lambda each: each.release(keys))
        if keys:
            for _ in range(2):
                if not self.world.healed and rng.random() < self.world.profile.turns / 2:
                    self._go_on(target, room.tokens + self._generated)

    def _go_on(self, target: Target, length: int) -> None:
        """The next turn, whose prompt begins with all that was said; now and then elsewhere."""
        world, rng = self.world, self.world.rng
        if length >= PROMPT_MAX:
            return
        turn = self._another(length, rng.randint(length + 1, PROMPT_MAX))
        if rng.random() < 0.9:
            turn.decodes, turn.targets = self.decodes, [Target(turn.room, node, turn) for node in self.decodes]
            turn._cached = target.written // BLOCK * BLOCK
            turn._lives = {node.name: node.life for node in self.decodes}
        if rng.random() < 0.7:
            turn._stay(rng.choice([8, 16, REST_MAX]))
        world.at(rng.expovariate(20.0), turn.begin)

    def _another(self, length: int, tokens: int) -> Chat:
        """A room whose prompt begins with so much of what was said in this one."""
        before = self.room
        another = Chat(self.world, len(self.world.calls) + 1, first=False)
        self.world.calls.append(another)
        room = another.room
        room.family, room.shared, room.history = before.family, length, before.owners[:length]
        room.tokens = tokens
        return another

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        super().ended(part, cause, detail, retry_ms)
        if isinstance(part, Target):
            self._send(part, self._leader, lambda: self._fail_on_all(part))
        if not isinstance(part, Target) or cause is not Cause.REFUSED or not detail.startswith("prefix: "):
            return
        self.world.seen["turns refused"] += 1
        if self.room.tokens - self._sure(part) <= part.rest_max:
            self.world.fail(f"room {self.room.id} is refused: {detail}, and {self._sure(part)} were kept for it")
        if not self.world.healed:
            self._hand_over()

    def _fail_on_all(self, failed: Target) -> None:
        """It generates nowhere."""
        self.room.given_up = True
        for target in self.targets:
            if target is not failed:
                self._send(self._leader, target, lambda each=target: self._give_up(each))

    def _give_up(self, target: Target) -> None:
        if target.ready and not target.released:
            target.release()
        elif not target.over:
            target.abort()

    def _hand_over(self) -> None:
        """The same prompt, with a prefill."""
        self._another(self.room.tokens, self.room.tokens).begin()

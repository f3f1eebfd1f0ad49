"""One room of the simulated world: what a router starts on both sides, and the invariants seen from both."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pdtransfer import effects as fx
from pdtransfer.errors import Cause
from pdtransfer.layout import expand_pages
from pdtransfer.session.prefill import Cell

from .nodes import Node
from .pools import LAYERS, Int64s, places, words

if TYPE_CHECKING:
    from .world import World


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
        self.expected = self.ready = self.decode_failed = self.released = self.decode_killed = False
        self.opened = self.landed = self.prefill_failed = self.drained = self.prefill_killed = False
        self.begun_at = self.ready_at = math.inf
        self.pages: list[int] = []
        self.source_slots: Int64s = np.empty(0, dtype=np.int64)  # of whole pages

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
        self.opened = True
        self.pages, node.pages = node.pages[:needed], node.pages[needed:]
        self.source_slots = expand_pages(np.array(self.pages), 4, 4 * needed)
        node.perform(
            node.core.open(
                self.room, tokens=self.tokens, now=world.now, deadline=world.now + self.deadline,
                peers=[self.decode.name],
            )
        )  # fmt: skip
        cells: list[tuple[int, int, int, tuple[int, int]]] = []
        for index, component in enumerate(node.components):
            rows = component.rows(self.tokens)
            cuts = sorted({0, rows, *(world.rng.randrange(rows + 1) for _ in range(world.rng.randint(0, 2)))})
            for low, high in pairwise(cuts):
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
        slots, at = self.source_slots[low:high], places(component)
        for layer in range(*layers):
            node.pool[at[layer, slots]] = words(self.room, index, np.arange(low, high), layer)
        node.perform(node.core.push(self.room, Cell(component.name, low, layers, slots)))
        if cells:
            node.later(world.rng.expovariate(500.0), lambda: self._compute(cells))
        else:
            node.later(world.rng.expovariate(500.0), self._finish)

    def _finish(self) -> None:
        aux = self.room.to_bytes(8, "little")
        self.prefill.perform(self.prefill.core.finish(self.room, aux=aux, now=self.world.now))

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
        at = places(self.decode.components[0])
        for layer in range(LAYERS):
            own = words(self.room, 0, np.arange(row, self.tokens + self.growth), layer)
            self.decode.memory[at[layer, self.slots["kv"][row:]]] = own

    def _read(self, when: str) -> None:
        for index, component in enumerate(self.decode.components):
            slots, at = self.slots[component.name], places(component)
            rows = component.rows(self.tokens) if when == "READY" or index else self.tokens + self.growth
            for layer in range(LAYERS):
                got = self.decode.memory[at[layer, slots[:rows]]]
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
            node.pool[places(component)[:, self.source_slots]] = -1
        node.pages += self.pages
        self.pages = []

    def on_prefill_killed(self) -> None:
        """What its process knew of this room is gone; the router hears of it."""
        if self.opened and not self.drained:
            self.prefill_killed = True
            self._cancel_other(self.decode, self._abort_decode)

    def on_decode_killed(self) -> None:
        if self.expected and not (self.decode_failed or self.released):
            self.decode_killed = True
            self._cancel_other(self.prefill, self._abort_prefill)

    @property
    def over(self) -> bool:
        """Whether decode has nothing more to do with it."""
        return not self.expected or self.decode_failed or self.released or self.decode_killed

    def check_end(self) -> None:
        """Invariant 4: ended, exactly once."""
        if not self.over or (self.ready and self.decode_failed):
            self.world.fail(f"room {self.room} has not ended once on decode")
        if self.opened and not self.prefill_killed and (self.landed + self.prefill_failed != 1 or not self.drained):
            self.world.fail(f"room {self.room} has not ended on prefill, or its pages were not given back")

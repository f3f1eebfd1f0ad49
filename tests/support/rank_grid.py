"""Prefill and decode ranks of one model, each with its own pools: cores wired to each other in one process.

A row's content is hashed of (kind, layer, head, row), whichever rank holds it: equal holders hold equal bytes, and what
lands in a wrong place shows. Arenas hold canaries, and are compared whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.handoff.prefix import prefix_rows
from pdtransfer.handoff.sharing import holds_of, pair_share
from pdtransfer.kernels import numpy_copy
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.plan import plan
from pdtransfer.limits import Limits
from pdtransfer.wire import Identity, Ranks, Reach
from tests.support.client_pair import Expected
from tests.support.layout_tensors import Model, Pool

SLOTS = 64  # of each pool
JUNK = 1 << 20  # from here on are the contents of slots that no room has


@dataclass(frozen=True)
class Place:
    """What one rank holds of one component, and which of its equal holders it is."""

    ranks: Ranks
    layers: range
    heads: range
    replica: tuple[int, int]


def places(*, layers: int, heads: int, tp: int, pp: int) -> Iterator[Place]:
    """Layers go to stages, heads to tensor-parallel ranks; where there are fewer heads than ranks, several hold one."""
    for stage in range(pp):
        held = range(stage * layers // pp, (stage + 1) * layers // pp)
        for rank in range(tp):
            ranks = Ranks(rank, tp, stage, pp)
            if heads >= tp:
                yield Place(ranks, held, range(rank * heads // tp, (rank + 1) * heads // tp), (0, 1))
            else:
                of = tp // heads
                yield Place(ranks, held, range(rank // of, rank // of + 1), (rank % of, of))


@dataclass(frozen=True)
class Part:
    """One component of the model, whole: a rank's pools of it differ in layers, heads, layout and pages."""

    name: str
    model: Model
    tokens_per_row: int = 1
    span: Span = field(default_factory=Span)
    memory: str = "dram"

    def pool(self, place: Place, layout: str, page_size: int, slots: int) -> Pool:
        model = replace(self.model, layers=place.layers, heads=place.heads)
        return Pool(name=layout, model=model, page_size=page_size, slots=slots)

    def component(self, pool: Pool) -> Component:
        return Component(self.name, self.memory, self.tokens_per_row, self.span, pool.layout)  # type: ignore[arg-type]

    def places(self, tp: int, pp: int) -> list[Place]:
        return list(places(layers=len(self.model.layers), heads=len(self.model.heads), tp=tp, pp=pp))


@dataclass
class Rank:
    """One rank's core, its pools by component, and what it has reported to its engine."""

    name: str
    core: Any
    pools: dict[str, Pool]
    components: dict[str, Component]
    events: list[Any] = field(default_factory=list)

    def events_of(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.events if isinstance(effect, kind)]


class Grid:
    """Every rank of both sides. `shuffle` picks what happens next: which message arrives, which write lands."""

    def __init__(
        self,
        parts: list[Part],
        *,
        prefill: tuple[int, int],
        decode: tuple[int, int],
        layouts: tuple[str, str] = ("layer_first", "page_first"),
        page_sizes: tuple[int, int] = (4, 1),
        shuffle: random.Random,
    ) -> None:
        self.parts, self.shuffle, self.now = {part.name: part for part in parts}, shuffle, 0.0
        self.prefill = [self._rank("prefill", at, prefill, layouts[0], page_sizes[0]) for at in each_of(prefill)]
        self.decode = [self._rank("decode", at, decode, layouts[1], page_sizes[1]) for at in each_of(decode)]
        self._by_name = {rank.name: rank for rank in (*self.prefill, *self.decode)}
        self._maps: dict[int, tuple[Component, ...]] = {}
        self._due: list[Any] = []
        self.written: dict[str, int] = {}  # bytes by decode rank
        self.senders: dict[str, set[str]] = {}  # by decode rank

    def _rank(self, role: Any, at: int, size: tuple[int, int], layout: str, page_size: int) -> Rank:
        held = {part.name: part.places(*size)[at] for part in self.parts.values()}
        pools = {name: self.parts[name].pool(place, layout, page_size, SLOTS) for name, place in held.items()}
        components = {name: self.parts[name].component(pool) for name, pool in pools.items()}
        ranks = next(iter(held.values())).ranks
        own, name = tuple(components.values()), f"{role[0]}{at}"
        if role == "decode":
            identity = Identity(name, role, at + 1, ranks, "m", b"w", 64)
            ids = iter(range(1000 * (at + 1), 1000 * (at + 2)))
            return Rank(name, DecodeSessions(identity, own, Limits(), lambda: next(ids)), pools, components)
        holds = holds_of(own, ranks, {each: place.replica for each, place in held.items()})
        identity = Identity(name, role, at + 1, ranks, "m", b"w", 64, holds=holds)
        return Rank(name, PrefillSessions(identity, own, Limits()), pools, components)

    # What engines do

    def open(self, room: int, tokens: int) -> None:
        for rank in self.prefill:
            effects = rank.core.open(room, tokens=tokens, now=self.now, deadline=60.0, grants=len(self.decode))
            self.take(rank, effects)

    def expect(self, room: int, tokens: int, sources: list[str] | None = None, prefix: int = 0) -> None:
        sources = sources or [rank.name for rank in self.prefill]
        for rank in self.decode:
            request = RoomRequest(room=room, tokens=tokens, sources=sources, time_left_s=60.0 - self.now, prefix=prefix)
            self.take(rank, rank.core.expect(request, self.now))

    def cells(self, rank: Rank, tokens: int) -> list[Cell]:
        """The room's rows in random pages of the rank's pools, filled, cut along rows and layers, in no order."""
        cells: list[Cell] = []
        for name, pool in rank.pools.items():
            count = rank.components[name].rows(tokens)
            pages = self.shuffle.sample(range(pool.slots // pool.page_size), -(-count // pool.page_size))
            slots = (np.array(pages)[:, None] * pool.page_size + np.arange(pool.page_size)).reshape(-1)[:count]
            contents = np.arange(JUNK, JUNK + pool.slots)
            contents[slots] = np.arange(count)
            pool.fill(contents)
            layers = pool.layout.layer_range
            for first, end in self._cut(0, count):
                cells += [Cell(name, first, each, slots[first:end]) for each in self._cut(*layers)]
        self.shuffle.shuffle(cells)
        return cells

    def _cut(self, first: int, end: int) -> list[tuple[int, int]]:
        inner = range(first + 1, end)
        cuts = [first, *sorted(self.shuffle.sample(inner, self.shuffle.randint(0, min(2, len(inner))))), end]
        return list(pairwise(cuts))

    def send(self, room: int, tokens: int) -> None:
        """Every rank's cells and its finish, while messages and writes of others are under way."""
        left = {rank.name: [*self.cells(rank, tokens), None] for rank in self.prefill}
        while left:
            rank = self._by_name[self.shuffle.choice(sorted(left))]
            cell = left[rank.name].pop(0)
            if cell is not None:
                self.take(rank, rank.core.push(room, cell, self.now))
            else:
                self.take(rank, rank.core.finish(room, aux=b"aux of " + rank.name.encode(), now=self.now))
                del left[rank.name]
            for _ in range(self.shuffle.randint(0, 3)):
                self.step()

    # What the shells do

    def take(self, rank: Rank, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case fx.Send() | fx.Write():
                    self._due.append((rank, effect))
                case fx.Offer(_, session):
                    end = max(component.layout.end for component in rank.components.values())
                    reach = Reach("shm", "h", "@a", b"t", 0, end)
                    self.take(rank, rank.core.offered(session, reach, self.now))
                case fx.Map(session, reach, components):
                    self._maps[session] = components
                    self.take(rank, rank.core.mapped(session, reach.arena_bytes))
                case _:
                    rank.events.append(effect)

    def step(self) -> bool:
        """One thing that is due happens; whether there was one."""
        if not self._due:
            return False
        rank, effect = self._due.pop(self.shuffle.randrange(min(4, len(self._due))))
        if isinstance(effect, fx.Write):
            self._copy(rank, effect)
            self.take(rank, rank.core.wrote(effect.session, effect.write, fx.Outcome.LANDED, "", self.now))
        else:
            other = self._by_name[effect.peer]
            self.take(other, other.core.receive(rank.name, effect.message, self.now))
        return True

    def run(self) -> None:
        """Until nothing is due."""
        while self.step():
            pass

    def _copy(self, rank: Rank, order: fx.Write) -> None:
        theirs = self._maps[order.session][order.component]
        target = self._by_name[rank.core.sessions[order.session].peer]
        ours, pool = rank.components[theirs.name], target.pools[theirs.name]
        work = plan(
            pair_share(ours.layout, theirs.layout).within_layers(*order.layers), order.source_slots, order.target_slots
        )
        self.written[target.name] = self.written.get(target.name, 0) + work.bytes
        self.senders.setdefault(target.name, set()).add(rank.name)
        assert numpy_copy.copy(work, rank.pools[theirs.name].memory.ctypes.data, pool.memory.ctypes.data, CancelWord())

    def landed_right(self, rank: Rank, ready: fx.RoomReady, tokens: int, prefix: int = 0) -> bool:
        """Whether a decode rank's pools hold the room's rows behind the prefix, and canaries beside them."""
        right = True
        for name, pool in rank.pools.items():
            component = rank.components[name]
            expected, first, end = Expected(pool), prefix_rows(component, prefix), component.rows(tokens)
            expected.land(np.arange(first, end), ready.slots[name][first:end])
            right &= expected.holds(pool.memory)
        return right


def each_of(size: tuple[int, int]) -> range:
    """Indices of the ranks of a group of (tp, pp)."""
    return range(size[0] * size[1])

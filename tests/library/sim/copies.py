"""The data plane: rows and layers of a write land one by one, late, also when their process is gone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.slot_allocator import FreeExtents
from pdtransfer.handoff.states import Lease
from pdtransfer.layout.checksum import MASK
from pdtransfer.layout.layout import Component

from .pools import ROW, Int64s, checksum, holds, places

if TYPE_CHECKING:
    from .prefills import PrefillNode


def is_free(free: FreeExtents, slot: int) -> bool:
    place = bisect_right(free._starts, slot) - 1
    return place >= 0 and slot < free._starts[place] + free._count_at[free._starts[place]]


def is_shared(cache: PrefixCache, component: int, slot: int) -> bool:
    runs = (run for block in cache._blocks.values() for run in block.runs[component])
    return any(start <= slot < start + count for start, count in runs)


@dataclass(eq=False)
class Backing:
    """One life of a decode node's arena, which outlives the node."""

    memory: Int64s
    byte_count: int  # of its first bytes there is memory
    hbm: Int64s | None = None  # where its HBM components are, if not here

    @property
    def whole(self) -> bool:
        return self.byte_count == len(self.memory) * ROW


@dataclass(eq=False)
class Mapping:
    """An arena as a writer maps it."""

    name: str
    arena: Backing
    core: DecodeSessions | None  # None: a stranger's, whose slots are its own affair
    live: set[Mapping]  # those of the session that can still write
    ready: int = 0  # bytes that the writer has in its page table
    hbm_direct: bool = False

    def of(self, component: Component) -> Int64s:
        """Where its rows go."""
        if self.hbm_direct and component.memory == "hbm":
            assert self.arena.hbm is not None
            return self.arena.hbm
        return self.arena.memory


class Copy:
    """One write: each piece reads its source when it lands."""

    def __init__(self, node: PrefillNode, order: fx.Write) -> None:
        self.node, self.order, self.world = node, order, node.world
        self.life, self.reported = node.life, False
        self.mapping = node.mappings[order.session]
        theirs = node.core.sessions[order.session].components[order.component]
        ours = next(component for component in node.components if component.name == theirs.name)
        self.source, core = node.rooms[order.room], self.mapping.core
        self.session = None if core is None else core.prefill_peers.sessions.get(order.session)
        self.lease = None if self.session is None else self.session.leases.get(order.grant)
        self.theirs, self.checksum = theirs, 0
        # Which words of a row: their heads, by either side's count of layers and heads.
        heads, here, there = holds(theirs).heads, holds(ours), holds(theirs)
        self.targets = places(theirs), there.layers[0]
        cut = slice(heads[0] - here.heads[0], heads[1] - here.heads[0])
        self.sources = places(ours)[:, cut], here.layers[0]
        world, p = self.world, self.world.profile
        self.memory = self.mapping.of(theirs)
        to_hbm = self.memory is self.mapping.arena.hbm
        world.seen["writes to HBM"] += to_hbm
        if not to_hbm and (int(self.targets[0][:, :, order.target_slots].max()) + 1) * ROW > self.mapping.ready:
            world.fail(f"{node.name} writes {self.mapping.name} for grant {order.grant} where it has no memory yet")
        total = world.stretch(p.write, 0.0 if world.healed else p.write_tail)
        self.fails = not world.healed and world.rng.random() < p.write_fails
        rows = len(order.source_slots)
        cuts = sorted({0, rows, *(world.rng.randrange(rows + 1) for _ in range(2))})
        self.pieces = [(layer, low, high) for low, high in pairwise(cuts) for layer in range(*order.layers)]
        world.rng.shuffle(self.pieces)
        if self.fails:
            self.pieces = self.pieces[: world.rng.randrange(len(self.pieces) + 1)]
        # When this many pieces are left, nobody can say any more how it will end.
        unknown = not world.healed and world.rng.random() < p.write_unknown
        self.unknown_at = world.rng.randrange(len(self.pieces) + 1) if unknown else None
        self.deaf = bool(p.write_deaf) and world.rng.random() < p.write_deaf
        # The last piece to land arrives with another bit.
        self.corrupts = bool(p.corrupts) and not world.healed and world.rng.random() < p.corrupts
        self.each = total / (len(self.pieces) + 1)
        world.at(self.each, self._next)

    def _next(self) -> None:
        node, world, order = self.node, self.world, self.order
        alive = node.life == self.life
        if not alive and self.mapping not in self.mapping.live:
            return  # the process and every child of it are gone
        if alive and order.session in node.fenced:
            return
        if alive and self.unknown_at == len(self.pieces):
            self.unknown_at = None
            world.seen["writes of unknown outcome"] += 1
            self._report(fx.Outcome.UNKNOWN)
        stopped = not self.deaf and (order.session, order.grant) in node.stopping and world.rng.random() < 0.5
        if self.pieces and not (alive and stopped):
            self._land(*self.pieces.pop(), alive=alive)
            world.at(self.each, self._next)
        elif alive and not self.reported:
            self._report(fx.Outcome.FAILED if self.pieces or self.fails else fx.Outcome.LANDED)

    def _report(self, outcome: fx.Outcome) -> None:
        node, order = self.node, self.order
        self.reported = True

        def report() -> None:
            detail, checksum = "the copy failed", self.checksum
            node.perform(node.core.wrote(order.session, order.write, outcome, detail, node.clock, checksum=checksum))

        node.act(self.life, report)

    def _land(self, layer: int, low: int, high: int, *, alive: bool) -> None:
        """Invariant 1: the target is this grant's still; the source is the room's still (its words say whose it is)."""
        world, node, lease = self.world, self.node, self.lease
        sources, targets = self.order.source_slots[low:high], self.order.target_slots[low:high]
        if self.mapping.core is not None:
            self._check_leased(self.mapping.core, targets)
        if alive and self.source.drained:
            world.fail(f"{node.name} reads pages of room {self.source.room.id}, which were given back")
        world.seen["pieces by orphans"] += not alive
        world.seen["pieces after the room failed"] += lease is not None and lease.state is not Lease.GRANTED
        (to, first), (from_, from_first) = self.targets, self.sources
        at = to[layer - first][:, targets]
        words = node.pool[from_[layer - from_first][:, sources]] if alive else -1
        self.memory[at] = words
        if alive and self.order.verify:
            found = checksum(self.theirs, (layer, layer + 1), self.order.first_row + low, words[None])
            self.checksum = (self.checksum + found) & MASK
        if self.corrupts and not self.pieces:
            self._corrupt(at)

    def _check_leased(self, core: DecodeSessions, targets: Int64s) -> None:
        world, node, lease = self.world, self.node, self.lease
        where = f"{node.name} writes slots {targets[0]}.. of {self.mapping.name} for grant {self.order.grant}"
        if lease is None or lease.state is Lease.ENDED or not lease.holding.claims:
            world.fail(f"{where}, which has no lease on them any more")
        staged = self.session.stages and self.theirs.memory == "hbm"
        component = self.session.component_indices[self.order.component]
        if is_free((core.staging.slots if staged else core.arena).free[component], int(targets[0])):
            world.fail(f"{where}, which are free")
        if not staged and is_shared(core.cache, component, int(targets[0])):
            world.fail(f"{where}, which rooms share")
        target = world.decodes[self.mapping.name]
        if target.core is core and target.rooms[self.order.room].drained:
            world.fail(f"{where}, which the engine may reuse")

    def _corrupt(self, at: Int64s) -> None:
        rng, reader = self.world.rng, self.world.decodes[self.mapping.name]
        self.mapping.arena.memory[rng.choice(at.ravel())] ^= 1 << rng.randrange(63)
        if reader.core is self.mapping.core:
            reader.rooms[self.order.room].corrupted = True

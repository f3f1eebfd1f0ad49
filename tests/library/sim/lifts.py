"""Rows that are copied from a decode's arena to its HBM, piece by piece and late; a copy may fail, or stop too late."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.slot_allocator import slots_of

from .copies import is_free, is_shared
from .pools import ROW, Int64s, holds, places

if TYPE_CHECKING:
    from .decodes import DecodeNode

Piece = tuple[int, Int64s, Int64s, Int64s]  # a component's place, slots, which words their rows are, and what they say


class Lifter:
    """One life of a decode node's copies."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._stopped: set[tuple[int, int]] = set()

    def perform(self, effect: fx.DecodeEffect) -> None:
        """What is its own; the others need nothing."""
        if isinstance(effect, fx.Lift):
            self._lift(effect)
        elif isinstance(effect, fx.StopLifting):
            self._stopped.add((effect.session, effect.grant))

    def _lift(self, order: fx.Lift) -> None:
        node, world = self._node, self._node.world
        pieces: list[Piece] = []
        for part in order.parts:
            slots, whole = slots_of(part.extents), places(part.component)
            place = next(at for at, each in enumerate(node.components) if each.name == part.component.name)
            cuts = sorted({0, len(slots), *(world.rng.randrange(len(slots) + 1) for _ in range(2))})
            rows = part.first_row, part.first_row + len(slots)
            words = node.rooms[order.room].room.words(part.component, place, rows, holds(part.component))
            pieces += [
                (place, slots[low:high], whole[:, :, slots[low:high]], words[:, :, low:high])
                for low, high in pairwise(cuts)
            ]
        world.rng.shuffle(pieces)
        fails = not world.healed and world.rng.random() < world.profile.lift_fails
        if fails:
            pieces = pieces[: world.rng.randrange(len(pieces))]
        each = 3 * world.stretch(world.profile.write, 1.0) / (len(pieces) + 1)
        node.later(each, lambda: self._next(order, pieces, each, fails=fails))

    def _next(self, order: fx.Lift, pieces: list[Piece], each: float, *, fails: bool) -> None:
        """Invariant 1: these slots are the room's still, on either side, and no other room's. And 3: what is read there
        has landed, and lies where this node's GPU reaches the arena."""
        node, world = self._node, self._node.world
        stopped = (order.session, order.grant) in self._stopped and world.rng.random() < 0.5
        if not pieces or stopped:
            detail = "the copy failed" if fails else "stopped" if pieces else ""
            world.seen["grants copied up"] += not detail
            node.perform(node.core.lifted(order.session, order.grant, detail, node.clock))
            return
        place, slots, at, words = pieces.pop()
        where = f"{node.name} copies up slots {slots[0]}.. for grant {order.grant}"
        if any(is_free(node.core.arena.free[place], slot) for slot in slots.tolist()):
            world.fail(f"{where}, which are free")
        if any(is_shared(node.core.cache, place, slot) for slot in slots.tolist()):
            world.fail(f"{where}, which rooms share")
        if (int(at.max()) + 1) * ROW > node.reached:
            world.fail(f"{where}, beyond the {node.reached} bytes that its GPU reaches")
        if (node.memory[at] != words).any():
            world.fail(f"{where}, which have not landed")
        world.seen["pieces copied up after the room failed"] += node.rooms[order.room].failed
        node.hbm[at] = node.memory[at]
        node.later(each, lambda: self._next(order, pieces, each, fails=fails))

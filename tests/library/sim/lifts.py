"""Rows that are copied from a decode's staging buffer to its HBM piece by piece; a copy may fail, or stop late."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.slot_allocator import slots_of

from .copies import is_free, is_shared
from .pools import ROW, Int64s, holds, places

if TYPE_CHECKING:
    from .decodes import DecodeNode


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one component, on their way up."""

    place: int  # of the component among the node's
    staged: Int64s  # slots
    slots: Int64s
    source: Int64s  # places of words
    target: Int64s
    words: Int64s  # what they are filled with


class Lifter:
    """One life of a decode node's copies."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._stopped: set[tuple[int, int]] = set()

    def stop(self, session: int, grant: int) -> None:
        """Now and then it is too late."""
        self._stopped.add((session, grant))

    def lift(self, order: fx.Settle) -> None:
        """Copies the rows up, in pieces and in any order."""
        node, world = self._node, self._node.world
        pieces: list[Rows] = []
        for landed, target in zip(order.parts, order.targets, strict=True):
            staged, slots = slots_of(landed.extents), slots_of(target.extents)
            source, whole = places(landed.component)[:, :, staged], places(target.component)[:, :, slots]
            place = next(
                index for index, component in enumerate(node.components) if component.name == target.component.name
            )
            rows = target.first_row, target.first_row + len(slots)
            if landed.first_row != target.first_row or len(staged) != len(slots):
                world.fail(f"{node.name} copies up other rows for grant {order.grant} than have landed")
            words = node.rooms[order.room].room.words(target.component, rows, holds(target.component))
            cuts = sorted({0, len(slots), *(world.rng.randrange(len(slots) + 1) for _ in range(2))})
            pieces += [
                Rows(place, staged[cut], slots[cut], source[:, :, cut], whole[:, :, cut], words[:, :, cut])
                for cut in [slice(*ends) for ends in pairwise(cuts)]
            ]
        world.rng.shuffle(pieces)
        fails = not world.healed and world.rng.random() < world.profile.lift_fails
        if fails:
            pieces = pieces[: world.rng.randrange(len(pieces))]
        each = 3 * world.stretch(world.profile.write, 1.0) / (len(pieces) + 1)
        node.later(each, lambda: self._next(order, pieces, each, fails=fails))

    def _next(self, order: fx.Settle, pieces: list[Rows], each: float, *, fails: bool) -> None:
        """Invariant 1: these slots are the room's still, on either side, and no other room's. And 3: what is read there
        has landed, and lies where this node's GPU reaches the arena."""
        node, world = self._node, self._node.world
        stopped = (order.session, order.grant) in self._stopped and world.rng.random() < 0.5
        if not pieces or stopped:
            detail = "the copy failed" if fails else "stopped" if pieces else ""
            world.seen["grants copied up"] += not detail
            del node.settling[order.session, order.grant]
            node.perform(node.core.settled(order.session, order.grant, 0, detail, node.clock))
            return
        rows = pieces.pop()
        where = f"{node.name} copies up slots {rows.staged[0]}.. to {rows.slots[0]}.. for grant {order.grant}"
        if any(is_free(node.core.arena.free[rows.place], slot) for slot in rows.slots.tolist()):
            world.fail(f"{where}, which are free")
        if any(is_free(node.core.staging.slots.free[rows.place], slot) for slot in rows.staged.tolist()):
            world.fail(f"{where}, and the former are free")
        if any(is_shared(node.core.cache, rows.place, slot) for slot in rows.slots.tolist()):
            world.fail(f"{where}, which rooms share")
        if (int(rows.source.max()) + 1) * ROW > node.reached:
            world.fail(f"{where}, beyond the {node.reached} bytes that its GPU reaches")
        if (node.memory[rows.source] != rows.words).any():
            world.fail(f"{where}, which have not landed")
        world.seen["pieces copied up after the room failed"] += node.rooms[order.room].failed
        node.hbm[rows.target] = node.memory[rows.source]
        node.later(each, lambda: self._next(order, pieces, each, fails=fails))

"""What decode copies up before a room is ready: rows of HBM components that have landed in the arena, grant by grant.

They are written to the slots that they have, in another memory. While the shell copies, these are claimed: a room may
fail and its leases end meanwhile, and copying is stopped then, but the slots come back after the last byte has moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...wire import unpack_extents
from ..effects import DecodeEffect, Lift, Rows, StopLifting
from ..prefix import PrefixCache
from ..slot_allocator import Holding
from .records import LeaseEntry, Room

INDEX_KIND = "index"  # a component with such a plane is an index; what else is in HBM are the rows of dense requests


@dataclass(frozen=True, slots=True, eq=False)
class Lifting:
    """One landed grant whose rows are on their way up."""

    room: Room
    holding: Holding
    peer: str
    parts: tuple[Rows, ...]


class Lifts:
    """Every grant that is being copied up. Effects go to `out`. Without `apart` HBM is a range of the arena itself, and
    there is nothing to copy."""

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None], *, apart: bool) -> None:
        self._cache, self._out, self._apart = cache, out, apart
        self._open: dict[tuple[int, int], Lifting] = {}  # by session and grant
        self.copies: Counter[str] = Counter()  # of one grant's rows of one component: "index" or "dense"
        self.bytes: Counter[str] = Counter()  # the same
        self.failed = 0  # grants

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, room: Room, lease: LeaseEntry) -> None:
        """Has the rows of a landed grant copied up, those that did not go there themselves."""
        session, message = lease.session, lease.message
        parts = tuple(
            Rows(component, part.first_row, unpack_extents("Part.extents", part.extents))
            for part in message.parts
            if (component := session.components[part.component]).memory == "hbm"
        )
        if self._apart and not session.hbm_direct and parts:
            lease.holding.claims += 1
            room.settling += 1
            self._open[session.id, message.grant] = Lifting(room, lease.holding, session.peer, parts)
            self._out(Lift(session.id, message.grant, room.id, parts))

    def stop(self, room: Room) -> None:
        """The room has failed: what is being copied of it is for nobody."""
        for (session, grant), each in self._open.items():
            if each.room is room:
                self._out(StopLifting(session, grant))

    def end(self, session: int, grant: int, detail: str) -> tuple[Room, str]:
        """Nothing of this grant is copied any more: its room, which may have failed meanwhile, and what is wrong."""
        each = self._open.pop((session, grant))
        each.room.settling -= 1
        self._cache.drop(each.holding)
        if detail:
            self.failed += 1
            return each.room, f"{each.peer}: grant {grant} was not copied up: {detail}"
        for part in each.parts:
            kinds = {plane.kind for plane in part.component.layout.planes}
            of = "index" if INDEX_KIND in kinds else "dense"
            self.copies[of] += 1
            self.bytes[of] += part.component.bytes_of(int(part.extents[:, 1].sum()))
        return each.room, ""

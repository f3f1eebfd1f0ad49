"""What follows when rows have landed: they are verified, copied to HBM, and the prompt is published for sharing.

While the shell reads or copies rows, they are claimed. A room may fail and its leases may end meanwhile: the shell is
asked to stop, and the slots return after the last byte was read or copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...layout.checksum import CHECKSUM_BYTES
from ...wire import unpack_extents
from ..effects import ComponentRows, DecodeEffect, Settle, StopSettling
from ..prefix import PrefixCache
from ..slot_allocator import cut, slot_count
from ..states import DecodeRoom
from ..timers import TimerKey, Timers
from .records import LeaseEntry, RoomRecord
from .staging import StagingBuffer

INDEX_KIND = "index"  # of a plane that makes a component an index


@dataclass(frozen=True, slots=True, eq=False)
class LandedGrant:
    """One landed grant whose rows the shell reads back or copies."""

    order: Settle
    room: RoomRecord
    lease: LeaseEntry
    checksum: bytes = b""  # from Landed, of rows that are read back

    def unlike(self, checksum: int) -> str:
        """What is wrong where the rows in the arena have this checksum; empty for nothing."""
        read = checksum.to_bytes(CHECKSUM_BYTES, "little")
        if read == self.checksum:
            return ""
        return f"checksum {self.checksum.hex()} of what was sent, {read.hex()} of what is in the arena"


class PostLanding:
    """Every landed grant whose rows are read back and compared with the writer's checksum, or copied from the staging
    buffer to their slots in HBM. Effects go to `out`."""

    def __init__(self, cache: PrefixCache, staging: StagingBuffer, out: Callable[[DecodeEffect], None]) -> None:
        self._cache, self._staging, self._out = cache, staging, out
        self._open: dict[tuple[int, int], LandedGrant] = {}  # by session and grant
        self.matched = self.mismatched = 0  # grants that were read back
        self.copies: Counter[str] = Counter()  # of one grant's rows of one component, by kind: "index" or "dense"
        self.copied_bytes: Counter[str] = Counter()  # by the same kinds

    def __len__(self) -> int:
        return len(self._open)

    def landed(self, room: RoomRecord, lease: LeaseEntry, checksum: bytes) -> str:
        """Begins what follows a landed grant; returns what is wrong already, or an empty text."""
        if not lease.message.verify:
            self.lift(room, lease)
            return ""
        if len(checksum) != CHECKSUM_BYTES:
            self.mismatched += 1
            return (
                f"{lease.session.peer}: grant {lease.message.grant} landed with {len(checksum)} bytes of checksum, "
                f"{CHECKSUM_BYTES} were requested"
            )
        order = Settle(lease.session.id, lease.message.grant, room.id, _landed_rows(lease))
        self._begin(LandedGrant(order, room, lease, checksum))
        return ""

    def lift(self, room: RoomRecord, lease: LeaseEntry) -> None:
        """Has those rows of a landed grant copied that its writer could not write to HBM."""
        rows = _staged_rows(room, lease) if lease.session.stages else ()
        if rows:
            parts, targets = zip(*rows, strict=True)
            order = Settle(lease.session.id, lease.message.grant, room.id, parts, targets)
            self._begin(LandedGrant(order, room, lease))

    def settled(self, session: int, grant: int, checksum: int, detail: str) -> tuple[RoomRecord, str]:
        """Answers Settle, or `detail` is why not; returns the room, which may have failed meanwhile, and what is wrong
        with the grant."""
        landed = self._open.pop((session, grant))
        wrong = self._lifted(landed, detail) if landed.order.targets else self._verified(landed, checksum, detail)
        self._end(landed)
        return landed.room, wrong and f"{landed.lease.session.peer}: grant {grant}{wrong}"

    def _verified(self, landed: LandedGrant, checksum: int, detail: str) -> str:
        """Wrong rows are not copied, nor those of an ended room."""
        wrong = detail or landed.unlike(checksum)
        if wrong:
            self.mismatched += not detail
            return f": {wrong}"
        self.matched += 1
        if landed.room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING):
            self.lift(landed.room, landed.lease)  # claims the rows before the claim of this check ends
        return ""

    def _lifted(self, landed: LandedGrant, detail: str) -> str:
        if detail:
            return f" was not copied to HBM: {detail}"
        for target in landed.order.targets:
            kinds = {plane.kind for plane in target.component.layout.planes}
            kind = "index" if INDEX_KIND in kinds else "dense"
            self.copies[kind] += 1
            self.copied_bytes[kind] += target.component.bytes_of(slot_count(target.extents))
        return ""

    def stop(self, room: RoomRecord) -> None:
        """The room has failed: the shell stops reading and copying its rows."""
        for (session, grant), landed in self._open.items() if room.post_landing_count else ():
            if landed.room is room:
                self._out(StopSettling(session, grant))

    def _begin(self, landed: LandedGrant) -> None:
        landed.lease.claim()
        landed.room.post_landing_count += 1
        self._open[landed.order.session, landed.order.grant] = landed
        self._out(landed.order)

    def _end(self, landed: LandedGrant) -> None:
        landed.room.post_landing_count -= 1
        self._cache.drop(landed.lease.holding)
        self._staging.drop(landed.lease.staged)


def _landed_rows(lease: LeaseEntry) -> tuple[ComponentRows, ...]:
    return tuple(
        [
            ComponentRows(
                lease.session.targets[part.component], part.first_row, unpack_extents("Part.extents", part.extents)
            )
            for part in lease.message.parts
        ]
    )


def _staged_rows(room: RoomRecord, lease: LeaseEntry) -> list[tuple[ComponentRows, ComponentRows]]:
    """The rows of a landed grant in the staging buffer, each with the room's own slots for them."""
    session, holding, lifted = lease.session, lease.holding, list[tuple[ComponentRows, ComponentRows]]()
    for part, landed in zip(lease.message.parts, _landed_rows(lease), strict=True):
        component, index = session.components[part.component], session.component_indices[part.component]
        if component.memory == "hbm":
            first = part.first_row - (room.first_rows[index] if room.first_rows else 0)
            extents = cut(holding.extents[index], first=first, count=part.rows)
            lifted.append((landed, ComponentRows(component, part.first_row, extents)))
    return lifted


class PrefixPublish:
    """READY rooms whose prompts enter the prefix cache one turn after READY, so that no engine waits for it.

    Each prompt enters the cache once: when its turn comes, when its room is released, or before another room is
    admitted.
    """

    def __init__(self, cache: PrefixCache, timers: Timers[TimerKey]) -> None:
        self._cache, self._timers = cache, timers
        self._rooms: dict[int, RoomRecord] = {}

    def add(self, room: RoomRecord, now: float) -> None:
        """The room is READY; one without keys shares nothing."""
        if room.keys:
            self._rooms[room.id] = room
            self._timers.set(("publish", room.id, 0), now)

    def publish(self, room_id: int) -> None:
        """Puts the room's prompt into the cache; idempotent."""
        room = self._rooms.pop(room_id, None)
        if room is not None:
            assert room.holding is not None
            self._cache.keep(room.holding, room.keys)
            self._timers.clear(("publish", room_id, 0))

    def publish_all(self) -> None:
        """Puts all prompts into the cache, in the order in which their rooms became READY."""
        while self._rooms:
            self.publish(next(iter(self._rooms)))

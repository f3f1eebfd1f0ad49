"""What decode reads back before a room is ready: each grant's rows, held against the sum of whoever wrote them.

While the shell reads, the rows are claimed: a room may fail and its leases end meanwhile, and reading is stopped then,
but its slots come back after the last byte was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...layout.checksum import CHECKSUM_BYTES
from ...wire import unpack_extents
from ..effects import DecodeEffect, Rows, StopVerifying, Verify
from ..prefix import PrefixCache
from .records import LeaseEntry, Room


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """One landed grant that is being read."""

    room: Room
    lease: LeaseEntry
    checksum: bytes  # as Landed says


class Verifications:
    """Every grant that is being read. Effects go to `out`."""

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None]) -> None:
        self._cache, self._out = cache, out
        self._open: dict[tuple[int, int], Verification] = {}  # by session and grant
        self.matched = 0  # grants
        self.mismatched = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, room: Room, lease: LeaseEntry, checksum: bytes) -> str:
        """Has the rows of a landed grant read; or why it is wrong already."""
        session, message = lease.session, lease.message
        if len(checksum) != CHECKSUM_BYTES:
            self.mismatched += 1
            return (
                f"{session.peer}: grant {message.grant} landed with {len(checksum)} bytes of checksum, "
                f"{CHECKSUM_BYTES} were asked for"
            )
        lease.holding.claims += 1
        room.settling += 1
        self._open[session.id, message.grant] = Verification(room, lease, checksum)
        parts = tuple(
            Rows(session.components[part.component], part.first_row, unpack_extents("Part.extents", part.extents))
            for part in message.parts
        )
        self._out(Verify(session.id, message.grant, room.id, parts))
        return ""

    def stop(self, room: Room) -> None:
        """The room has failed: what is being read of it is read for nobody."""
        for (session, grant), each in self._open.items():
            if each.room is room:
                self._out(StopVerifying(session, grant))

    def end(self, session: int, grant: int, checksum: int, detail: str) -> tuple[Room, LeaseEntry, str]:
        """The rows were read, or could not be: their room, which may have failed meanwhile, and what is wrong."""
        each = self._open.pop((session, grant))
        each.room.settling -= 1
        self._cache.drop(each.lease.holding)
        found = checksum.to_bytes(CHECKSUM_BYTES, "little")
        if not detail and found == each.checksum:
            self.matched += 1
            return each.room, each.lease, ""
        self.mismatched += not detail
        text = detail or f"checksum {each.checksum.hex()} of what was sent, {found.hex()} of what is in the arena"
        return each.room, each.lease, f"{each.lease.session.peer}: grant {grant}: {text}"

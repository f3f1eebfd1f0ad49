"""What follows when rows have landed: they are verified, copied to HBM, and the prompt is published for sharing.

While the shell reads or copies rows, they are claimed. A room may fail and its leases may end meanwhile: the shell is
told to stop, and the slots return after the last byte was read or copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...layout.checksum import CHECKSUM_BYTES
from ...wire import unpack_extents
from ..effects import DecodeEffect, LandedRows, Lift, StopLifting, StopVerifying, Verify
from ..prefix import PrefixCache
from ..slot_allocator import Holding
from ..states import DecodeRoom
from ..timers import TimerKey, Timers
from .records import LeaseEntry, RoomRecord


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """One landed grant whose rows are read back."""

    room: RoomRecord
    lease: LeaseEntry
    checksum: bytes  # from Landed


class Verifications:
    """Every grant whose rows are read back and compared with the writer's checksum. Effects go to `out`."""

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None]) -> None:
        self._cache, self._out = cache, out
        self._open: dict[tuple[int, int], Verification] = {}  # by session and grant
        self.matched = 0  # grants
        self.mismatched = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, room: RoomRecord, lease: LeaseEntry, checksum: bytes) -> str:
        """Has the rows of a landed grant read back; returns what is wrong already, or an empty text."""
        session, message = lease.session, lease.message
        if len(checksum) != CHECKSUM_BYTES:
            self.mismatched += 1
            return (
                f"{session.peer}: grant {message.grant} landed with {len(checksum)} bytes of checksum, "
                f"{CHECKSUM_BYTES} were requested"
            )
        lease.holding.claims += 1
        room.post_landing_count += 1
        self._open[session.id, message.grant] = Verification(room, lease, checksum)
        parts = tuple(
            LandedRows(session.components[part.component], part.first_row, unpack_extents("Part.extents", part.extents))
            for part in message.parts
        )
        self._out(Verify(session.id, message.grant, room.id, parts))
        return ""

    def stop(self, room: RoomRecord) -> None:
        """The room has failed: stops reading its rows."""
        for (session, grant), each in self._open.items():
            if each.room is room:
                self._out(StopVerifying(session, grant))

    def end(self, session: int, grant: int, checksum: int, detail: str) -> tuple[RoomRecord, LeaseEntry, str]:
        """The rows were read, or `detail` says why not. Returns the room, which may have failed meanwhile, the lease,
        and what is wrong."""
        each = self._open.pop((session, grant))
        each.room.post_landing_count -= 1
        self._cache.drop(each.lease.holding)
        found = checksum.to_bytes(CHECKSUM_BYTES, "little")
        if not detail and found == each.checksum:
            self.matched += 1
            return each.room, each.lease, ""
        self.mismatched += not detail
        text = detail or f"checksum {each.checksum.hex()} of what was sent, {found.hex()} of what is in the arena"
        return each.room, each.lease, f"{each.lease.session.peer}: grant {grant}: {text}"


INDEX_KIND = "index"  # of a plane that makes a component an index


@dataclass(frozen=True, slots=True, eq=False)
class HbmCopy:
    """One landed grant whose rows are copied to HBM."""

    room: RoomRecord
    holding: Holding
    peer: str
    parts: tuple[LandedRows, ...]


class HbmCopies:
    """Every grant whose rows are copied from the arena to the same slots in HBM. Effects go to `out`.

    Without `apart` HBM is a range of the arena itself, and nothing is copied.
    """

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None], *, apart: bool) -> None:
        self._cache, self._out, self._apart = cache, out, apart
        self._open: dict[tuple[int, int], HbmCopy] = {}  # by session and grant
        self.copies: Counter[str] = Counter()  # of one grant's rows of one component, by kind: "index" or "dense"
        self.bytes: Counter[str] = Counter()  # by the same kinds
        self.failed = 0  # grants

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, room: RoomRecord, lease: LeaseEntry) -> None:
        """Has those rows of a landed grant copied that its writer could not write to HBM."""
        session, message = lease.session, lease.message
        parts = tuple(
            LandedRows(component, part.first_row, unpack_extents("Part.extents", part.extents))
            for part in message.parts
            if (component := session.components[part.component]).memory == "hbm"
        )
        if self._apart and not session.hbm_direct and parts:
            lease.holding.claims += 1
            room.post_landing_count += 1
            self._open[session.id, message.grant] = HbmCopy(room, lease.holding, session.peer, parts)
            self._out(Lift(session.id, message.grant, room.id, parts))

    def stop(self, room: RoomRecord) -> None:
        """The room has failed: stops copying its rows."""
        for (session, grant), each in self._open.items():
            if each.room is room:
                self._out(StopLifting(session, grant))

    def end(self, session: int, grant: int, detail: str) -> tuple[RoomRecord, str]:
        """Nothing of this grant is copied any more. Returns the room, which may have failed meanwhile, and what is
        wrong."""
        each = self._open.pop((session, grant))
        each.room.post_landing_count -= 1
        self._cache.drop(each.holding)
        if detail:
            self.failed += 1
            return each.room, f"{each.peer}: grant {grant} was not copied to HBM: {detail}"
        for part in each.parts:
            kinds = {plane.kind for plane in part.component.layout.planes}
            of = "index" if INDEX_KIND in kinds else "dense"
            self.copies[of] += 1
            self.bytes[of] += part.component.bytes_of(int(part.extents[:, 1].sum()))
        return each.room, ""


class PostLanding:
    """Every landed grant that is still verified or copied."""

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None], *, hbm_apart: bool) -> None:
        self.verifications = Verifications(cache, out)
        self.hbm_copies = HbmCopies(cache, out, apart=hbm_apart)

    def __bool__(self) -> bool:
        return bool(self.verifications or self.hbm_copies)

    def landed(self, room: RoomRecord, lease: LeaseEntry, checksum: bytes) -> str:
        """Begins what follows a landed grant; returns what is wrong already, or an empty text."""
        if lease.message.verify:
            return self.verifications.begin(room, lease, checksum)
        self.hbm_copies.begin(room, lease)
        return ""

    def verified(self, session: int, grant: int, checksum: int, detail: str) -> tuple[RoomRecord, str]:
        """Answers Verify; returns the room and what is wrong. Wrong rows are not copied, nor those of an ended room."""
        room, lease, wrong = self.verifications.end(session, grant, checksum, detail)
        if room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING) and not wrong:
            self.hbm_copies.begin(room, lease)
        return room, wrong

    def stop(self, room: RoomRecord) -> None:
        """The room has failed."""
        if room.post_landing_count:
            self.verifications.stop(room)
            self.hbm_copies.stop(room)


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

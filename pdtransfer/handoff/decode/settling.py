"""What is still to be done with a grant that has landed: its rows are read back, and then copied up to HBM."""

from __future__ import annotations

from collections.abc import Callable

from ..effects import DecodeEffect
from ..prefix import PrefixCache
from ..room import DecodeRoom
from .hbm_copies import Lifts
from .post_landing import Verifications
from .records import LeaseEntry, Room


class Settling:
    """Every grant of which something is still to be done."""

    def __init__(self, cache: PrefixCache, out: Callable[[DecodeEffect], None], *, hbm_apart: bool) -> None:
        self.verifications = Verifications(cache, out)
        self.lifts = Lifts(cache, out, apart=hbm_apart)

    def __bool__(self) -> bool:
        return bool(self.verifications or self.lifts)

    def landed(self, room: Room, lease: LeaseEntry, checksum: bytes) -> str:
        """Begins with a grant; or says what is wrong with it already."""
        if lease.message.verify:
            return self.verifications.begin(room, lease, checksum)
        self.lifts.begin(room, lease)
        return ""

    def verified(self, session: int, grant: int, checksum: int, detail: str) -> tuple[Room, str]:
        """Answers Verify: the room, and what is wrong. A wrong row is copied nowhere, nor one that nobody wants."""
        room, lease, wrong = self.verifications.end(session, grant, checksum, detail)
        if room.state in (DecodeRoom.LANDING, DecodeRoom.SETTLING) and not wrong:
            self.lifts.begin(room, lease)
        return room, wrong

    def stop(self, room: Room) -> None:
        """The room has failed."""
        if room.settling:
            self.verifications.stop(room)
            self.lifts.stop(room)

"""The staging buffer: slots in host memory for rows of HBM components whose writer does not reach the GPU.

A room that is larger than its share is sent in pieces, one after the other. A piece is granted once the engine of each
source has rows for it, so its slots are held while rows are on their way and no longer. What waits for slots waits in
one line, and needs nothing else of this node: so the line moves on, whatever each room's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...layout.layout import Component
from ..prefix import piece_rows
from ..slot_allocator import Holding, SlotAllocator, slot_count
from ..states import SessionState
from .records import RoomPiece, RoomRecord, SessionRecord

_PIECES = 4  # that the buffer holds at least: of a peer's half, one lands while another is copied up
_SHARE = 2  # one peer has one part in this many of the slots. A lost one keeps no more than that until its fence


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a room's next piece takes of each component: rows [first, end)."""

    stop: int
    rows: tuple[tuple[int, int], ...]


class StagingBuffer:
    """The slots of one node's buffer, and the rooms that wait for some, the oldest first. `landing` are the node's
    components as writers see them that do not reach its GPU."""

    def __init__(self, landing: Sequence[Component], bytes_ready: int | None) -> None:
        self.slots = SlotAllocator(landing, bytes_ready)
        self.line: dict[int, RoomRecord] = {}
        self.held: dict[Holding, tuple[SessionRecord, ...]] = {}  # by pieces that have not ended
        self._components = self.slots.components
        self._bytes = sum([c.bytes_of(c.layout.slots) for c in landing if c.memory == "hbm"])

    def begin(self, room: RoomRecord) -> RoomPiece:
        """The first piece, which has no rows: it lands when the engine of its source has some."""
        piece = self._piece(room, self._cut(room, room.stop))
        assert piece is not None
        return piece

    def next(self, room: RoomRecord) -> RoomPiece | None:
        """The next piece, which has slots; None while too few are free. The caller drops its claim on them."""
        return self._piece(room, self._cut(room, self._stop(room)))

    def waits_for(self, room: RoomRecord) -> set[str]:
        """The peers that a room waits for, and not for slots: until they answer again, or have fewer of them."""
        rows = self._cut(room, self._stop(room)).rows
        wanted = sum([c.bytes_of(end - first) for c, (first, end) in zip(self._components, rows, strict=True)])
        bytes_held = [(session, self._held_by(session)) for session in room.staged]
        return {
            session.peer
            for session, byte_count in bytes_held
            if session.state is not SessionState.UP or (byte_count and byte_count + wanted > self._bytes // _SHARE)
        }

    def drop(self, holding: Holding | None) -> None:
        """Ends one claim on the slots of a piece, if it has some."""
        if holding is not None and self.slots.drop(holding):
            del self.held[holding]

    def _held_by(self, session: SessionRecord) -> int:
        """The bytes that a session's peer has in pieces."""
        return sum([
            holding.bytes
            for holding, sessions in self.held.items()
            if any(other.peer == session.peer for other in sessions)
        ])  # fmt: skip

    def _stop(self, room: RoomRecord) -> int:
        """The token before which the next piece ends: no component has more rows in it than a piece may have."""
        stop = room.tokens
        for component, (first, end) in zip(self._components, self._cut(room, room.tokens).rows, strict=True):
            most = _piece_slots(component)
            if component.span.kind == "all" and end - first > most:
                stop = min(stop, (first + most) * component.tokens_per_row)
        return stop

    def _cut(self, room: RoomRecord, stop: int) -> _Cut:
        """The piece that ends at `stop`. Only HBM components have rows in it."""
        assert room.holding is not None
        rows: list[tuple[int, int]] = []
        for index, (component, extents) in enumerate(zip(self._components, room.holding.extents, strict=True)):
            slots_from = room.first_rows[index] if room.first_rows else 0
            first, end = piece_rows(component, tokens=room.tokens, prefix=room.stop, stop=stop)
            first, end = max(first, slots_from), min(end, slots_from + slot_count(extents))
            used = component.memory == "hbm" and len(extents)
            rows.append((first, max(first, end)) if used else (slots_from, slots_from))
        return _Cut(stop, tuple(rows))

    def _piece(self, room: RoomRecord, cut: _Cut) -> RoomPiece | None:
        holding = self.slots.allocate([end - first for first, end in cut.rows])
        if holding is None:
            return None
        self.held[holding] = room.staged
        first_rows = tuple([first for first, _ in cut.rows])
        return RoomPiece(prefix=room.stop, stop=cut.stop, first_rows=first_rows, staged=holding)


def _piece_slots(component: Component) -> int:
    """The slots of a component that one piece may have, in whole pages."""
    page_size = component.layout.page_size
    return max(page_size, component.layout.slots // _PIECES // page_size * page_size)

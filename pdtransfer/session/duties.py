"""The writer's ledger: one session's grants, from their first word to their acknowledged end.

What has ended is a floor and the few numbers above it. The floor passes only acknowledged ends, so no late message
finds a number that was forgotten, and the window keeps the ledger small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arena import Extents, ExtentSet, slots_of
from ..errors import Cause, RemoteProtocolError
from ..layout import Component, Layout
from ..lease import DUTY, DUTY_ENDS, Duty, DutyEvent
from ..states import step
from ..wire import Drained, Failed, Grant, Landed, Part, unpack_extents

EndMessage: TypeAlias = Landed | Failed | Drained


class WriterState(Enum):
    """A session on the prefill side."""

    MAPPING = "mapping"
    UP = "up"
    CLOSED = "closed"  # takes no message any more; its mapping goes when its last write has ended


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a grant, checked: row first_row + i of the room goes to target_slots[i]."""

    component: int
    first_row: int
    rows: int
    target_slots: NDArray[np.int64]
    extents: Extents


@dataclass(slots=True, eq=False)
class DutyEntry:
    """One grant as its writer keeps it until its end is acknowledged."""

    session: WriterSession
    number: int
    room: int
    tokens: int
    shares: tuple[Share, ...]
    send_aux: bool
    kv_bytes: int  # that it has to write
    deadline: float
    state: Duty = Duty.WAITING
    written_bytes: int = 0
    in_flight: int = 0
    repeat_ms: int = 0
    end: EndMessage | None = None

    def step(self, event: DutyEvent) -> None:
        """Moves on in the table; a duty that stops claims its target slots no more once it is quiet."""
        self.state = step(DUTY, self.state, event)
        if self.state in DUTY_ENDS:
            self.session.unclaim(self.shares)

    def stop(self, event: DutyEvent) -> None:
        """FAIL or ABORT, in the form that fits whether writes are in flight."""
        busy = {DutyEvent.FAIL: DutyEvent.FAIL_BUSY, DutyEvent.ABORT: DutyEvent.ABORT_BUSY}
        self.step(busy[event] if self.in_flight else event)


@dataclass(slots=True, eq=False)
class WriterSession:
    """One decode rank's arena as this prefill rank may write it."""

    id: int
    peer: str
    components: tuple[Component, ...]
    window: int
    state: WriterState = WriterState.MAPPING
    bytes_ready: int = 0
    floor: int = 1  # every lower number has ended, and its end was acknowledged
    acked: set[int] = field(default_factory=set[int])  # the same, above the floor
    duties: dict[int, DutyEntry] = field(default_factory=dict[int, DutyEntry])
    writes: dict[int, tuple[DutyEntry, int]] = field(default_factory=dict[int, tuple[DutyEntry, int]])
    unknown: set[int] = field(default_factory=set[int])  # writes that may still move bytes until the fence
    next_write: int = 1
    _claims: dict[int, ExtentSet] = field(default_factory=dict[int, ExtentSet])

    def known_end(self, number: int) -> bool:
        """Whether this grant has ended and decode knows it."""
        return number < self.floor or number in self.acked

    def outside(self, number: int) -> bool:
        """Whether the number lies beyond the window: unanswered, since our view of what has ended may lag behind."""
        return number >= self.floor + self.window

    def acknowledge(self, number: int) -> None:
        """The end of `number` has arrived at decode."""
        del self.duties[number]
        self.acked.add(number)
        while self.floor in self.acked:
            self.acked.remove(self.floor)
            self.floor += 1

    def admit(self, message: Grant, now: float) -> DutyEntry:
        """A new duty, checked against what was registered; RemoteProtocolError names the field, and nothing is kept."""
        if message.tokens < 1 or message.prefix > message.tokens:
            raise RemoteProtocolError("Grant.prefix", f"{message.prefix} of {message.tokens} tokens")
        shares: list[Share] = []
        try:
            for index, part in enumerate(message.parts):
                shares.append(self._share(f"Grant.parts[{index}]", part, message.tokens, shares))
        except RemoteProtocolError:
            self.unclaim(tuple(shares))
            raise
        duty = DutyEntry(
            session=self,
            number=message.grant,
            room=message.room,
            tokens=message.tokens,
            shares=tuple(shares),
            send_aux=message.send_aux,
            kv_bytes=sum(self.components[s.component].layout.row_bytes * s.rows for s in shares),
            deadline=now + message.time_left_ms / 1e3,
        )
        self.duties[message.grant] = duty
        return duty

    def refuse(self, number: int) -> DutyEntry:
        """An aborted number that was never granted: ended from the start, so that its Grant finds it so."""
        duty = DutyEntry(self, number, 0, 0, (), send_aux=False, kv_bytes=0, deadline=0.0)
        duty.step(DutyEvent.ABORT)
        self.duties[number] = duty
        return duty

    def unclaim(self, shares: tuple[Share, ...]) -> None:
        """These shares are written no more: decode may grant their slots again."""
        for share in shares:
            self._claims[share.component].remove(share.extents)

    def _share(self, field_name: str, part: Part, tokens: int, before: list[Share]) -> Share:
        if part.component >= len(self.components):
            text = f"{part.component}, Register names {len(self.components)}"
            raise RemoteProtocolError(f"{field_name}.component", text)
        if any(share.component == part.component for share in before):
            raise RemoteProtocolError(f"{field_name}.component", f"{part.component} a second time")
        component = self.components[part.component]
        rows_total = component.rows(tokens)
        if part.rows < 1 or part.first_row + part.rows > rows_total:
            text = f"rows {part.first_row}+{part.rows}, {component.name} has {rows_total} for {tokens} tokens"
            raise RemoteProtocolError(f"{field_name}.rows", text)
        extents = unpack_extents(f"{field_name}.extents", part.extents)
        slots, granted = component.layout.slots, int(extents[:, 1].sum())
        if granted != part.rows:
            raise RemoteProtocolError(f"{field_name}.rows", f"{part.rows}, its extents hold {granted}")
        if int((extents[:, 0] + extents[:, 1]).max()) > slots:
            worst = int((extents[:, 0] + extents[:, 1]).max())
            raise RemoteProtocolError(f"{field_name}.extents", f"end at slot {worst}, {component.name} has {slots}")
        if not self._claims.setdefault(part.component, ExtentSet()).add(extents):
            text = "overlap each other, or another grant that has not ended"
            raise RemoteProtocolError(f"{field_name}.extents", text)
        return Share(part.component, part.first_row, part.rows, slots_of(extents), extents)


def end_message(duty: DutyEntry, *, aux: bytes, cause: Cause, detail: str) -> EndMessage:
    """What an ended duty says until it is Released."""
    session, number = duty.session.id, duty.number
    match duty.state:
        case Duty.LANDED:
            return Landed(session, number, duty.written_bytes, aux if duty.send_aux else b"")
        case Duty.FAILED:
            return Failed(session, number, cause.value, detail[:500], quiescent=True)
        case _:
            assert duty.state is Duty.DRAINED
            return Drained(session, number)


def layer_bytes(layout: Layout, first: int, end: int) -> int:
    """Bytes that one slot has in the layers [first, end)."""
    if (first, end) == layout.layer_range:
        return layout.row_bytes
    return sum(plane.row_bytes for plane in layout.planes if first <= plane.layer < end)

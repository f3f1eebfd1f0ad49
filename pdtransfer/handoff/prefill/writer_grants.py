"""The writer's ledger: one session's grants, from their first word to their acknowledged end.

What has ended is a floor and the few numbers above it. The floor passes only acknowledged ends, so no late message
finds a number that was forgotten, and the window keeps the ledger small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import Cause, RemoteProtocolError
from ...layout.checksum import CHECKSUM_BYTES, MASK
from ...layout.layout import Component
from ...limits import TEXT_LENGTH_MAX
from ...wire import Drained, Failed, Grant, Landed, Part, Reach, unpack_extents
from ..decode.parts import prefix_rows
from ..lease import DUTY, DUTY_ENDS, Duty, DutyEvent
from ..slot_allocator import Extents, ExtentSet, end_of, slot_count, slots_below, slots_of
from ..states import Word, step

EndMessage: TypeAlias = Landed | Failed | Drained


class WriterState(Word):
    """A session on the prefill side; only MAPPING and UP take messages."""

    MAPPING = "mapping"  # the shell maps the arena
    UP = "up"
    ABANDONED = "abandoned"  # closed while the shell maps: what it maps goes at once
    CLOSING = "closing"  # its mapping goes when its last write has ended
    CLOSED = "closed"


class WriterEvent(Word):
    """What happens to a session on the prefill side."""

    MAP = "map"
    CLOSE = "close"
    QUIET = "quiet"


_S, _SE = WriterState, WriterEvent

WRITER: dict[tuple[WriterState, WriterEvent], WriterState] = {
    (_S.MAPPING, _SE.MAP): _S.UP,
    (_S.MAPPING, _SE.CLOSE): _S.ABANDONED,
    (_S.UP, _SE.MAP): _S.UP,
    (_S.UP, _SE.CLOSE): _S.CLOSING,
    (_S.ABANDONED, _SE.QUIET): _S.CLOSED,
    (_S.CLOSING, _SE.QUIET): _S.CLOSED,
}


@dataclass(frozen=True)
class Share:
    """One part of a grant, checked: row first_row + i of the room goes to target_slots[i]."""

    component: int
    first_row: int
    rows: int
    extents: Extents

    @cached_property
    def target_slots(self) -> NDArray[np.int64]:
        """A slot for each row, int64 (rows,). Made when first asked for: a grant that only waits costs its extents."""
        return slots_of(self.extents)


@dataclass(slots=True, eq=False)
class DutyEntry:
    """One grant as its writer keeps it until its end is acknowledged."""

    session: WriterSession
    number: int
    message: Grant | None  # None: it was refused before it came
    shares: tuple[Share, ...]
    deadline: float
    state: Duty = Duty.WAITING
    written_bytes: int = 0
    checksum: int = 0  # of what is written, where the Grant says verify
    in_flight: int = 0
    repeat_ms: int = 0
    end: EndMessage | None = None
    kv_bytes: int = field(init=False)  # what it has to write

    def __post_init__(self) -> None:
        components = self.session.components
        self.kv_bytes = sum([components[share.component].bytes_of(share.rows) for share in self.shares])

    @property
    def room(self) -> int | None:
        """The label of the room that it is for."""
        return None if self.message is None else self.message.room

    @property
    def verify(self) -> bool:
        """Whether decode wants a checksum."""
        return self.message is not None and self.message.verify

    def wrote(self, byte_count: int, checksum: int) -> None:
        """A write of it has landed."""
        self.written_bytes += byte_count
        self.checksum = (self.checksum + checksum) & MASK

    def check_same(self, message: Grant) -> None:
        """RemoteProtocolError where a Grant of the same number says something else than the first one did."""
        first = self.message
        if first is None:
            return
        for name in ("room", "tokens", "prefix", "send_aux", "enable_hisparse", "verify"):
            was, now = getattr(first, name), getattr(message, name)
            if was != now:
                raise RemoteProtocolError(f"Grant.{name}", f"{now}, grant {self.number} had {was} before")
        if message.parts != first.parts:
            text = (
                f"{len(message.parts)} parts that are not the {len(first.parts)} which grant {self.number} had before"
            )
            raise RemoteProtocolError("Grant.parts", text)

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
    reach: Reach
    window: int
    state: WriterState = WriterState.MAPPING
    spoken_on: bool = False  # by its owner, after Register
    bytes_ready: int = 0
    hbm_direct: bool = False  # it writes HBM itself
    slots_ready: tuple[int, ...] = ()  # the same, for each component: its first slots
    floor: int = 1  # every lower number has ended, and its end was acknowledged
    acked: set[int] = field(default_factory=set[int])  # the same, above the floor
    duties: dict[int, DutyEntry] = field(default_factory=dict[int, DutyEntry])
    writes: dict[int, tuple[DutyEntry, int]] = field(default_factory=dict[int, tuple[DutyEntry, int]])
    next_write: int = 1
    _claims: dict[int, ExtentSet] = field(default_factory=dict[int, ExtentSet])

    @property
    def open(self) -> bool:
        """Whether it takes messages."""
        return self.state in (WriterState.MAPPING, WriterState.UP)

    @property
    def granting(self) -> bool:
        """Whether some of the arena may be granted; before that a Grant is a breach."""
        return self.state is WriterState.UP and self.bytes_ready > 0

    def ready(self, bytes_ready: int, *, hbm_direct: bool) -> None:
        """So many of the arena's first bytes may be granted, and where this writes HBM itself all slots there."""
        self.bytes_ready, self.hbm_direct = bytes_ready, hbm_direct
        self.slots_ready = tuple(
            each.layout.slots if hbm_direct and each.memory == "hbm" else slots_below(each.layout, bytes_ready)
            for each in self.components
        )

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
                shares.append(self._share(f"Grant.parts[{index}]", part, message, shares))
        except RemoteProtocolError:
            self.unclaim(tuple(shares))
            raise
        deadline = now + message.time_left_ms / 1e3
        duty = DutyEntry(self, message.grant, message, tuple(shares), deadline)
        self.duties[message.grant] = duty
        return duty

    def refuse(self, number: int) -> DutyEntry:
        """An aborted number that was never granted: ended from the start, so that its Grant finds it so."""
        duty = DutyEntry(self, number, None, (), 0.0)
        duty.step(DutyEvent.ABORT)
        self.duties[number] = duty
        return duty

    def unclaim(self, shares: tuple[Share, ...]) -> None:
        """These shares are written no more: decode may grant their slots again."""
        for share in shares:
            self._claims[share.component].remove(share.extents)

    def _share(self, field_name: str, part: Part, message: Grant, before: list[Share]) -> Share:
        if part.component >= len(self.components):
            text = f"{part.component}, Register names {len(self.components)}"
            raise RemoteProtocolError(f"{field_name}.component", text)
        if any(share.component == part.component for share in before):
            raise RemoteProtocolError(f"{field_name}.component", f"{part.component} a second time")
        component = self.components[part.component]
        tokens, rows_total = message.tokens, component.rows(message.tokens)
        if part.first_row < (held := prefix_rows(component, message.prefix)):
            text = f"{part.first_row}, decode holds {held} rows of {component.name} for a prefix of {message.prefix}"
            raise RemoteProtocolError(f"{field_name}.first_row", text)
        if part.rows < 1 or part.first_row + part.rows > rows_total:
            text = f"rows {part.first_row}+{part.rows}, {component.name} has {rows_total} for {tokens} tokens"
            raise RemoteProtocolError(f"{field_name}.rows", text)
        extents = unpack_extents(f"{field_name}.extents", part.extents)
        slots, granted, end = component.layout.slots, slot_count(extents), end_of(extents)
        if granted != part.rows:
            raise RemoteProtocolError(f"{field_name}.rows", f"{part.rows}, its extents hold {granted}")
        if end > slots:
            raise RemoteProtocolError(f"{field_name}.extents", f"end at slot {end}, {component.name} has {slots}")
        if end > (ready := self.slots_ready[part.component]):
            text = f"end at slot {end}, {ready} of {component.name} are ready in what Registered said"
            raise RemoteProtocolError(f"{field_name}.extents", text)
        claims = self._claims.setdefault(part.component, ExtentSet())
        if not claims.add(extents):
            (start, count), (other, other_count) = claims.clash(extents)
            text = f"{start}+{count} and {other}+{other_count} overlap, in this grant or with one that has not ended"
            raise RemoteProtocolError(f"{field_name}.extents", text)
        return Share(part.component, part.first_row, part.rows, extents)


def end_message(duty: DutyEntry, *, aux: bytes, cause: Cause, detail: str) -> EndMessage:
    """What an ended duty says until it is Released."""
    session, number = duty.session.id, duty.number
    match duty.state:
        case Duty.LANDED:
            send_aux = duty.message is not None and duty.message.send_aux
            checksum = duty.checksum.to_bytes(CHECKSUM_BYTES, "little") if duty.verify else b""
            return Landed(session, number, duty.written_bytes, aux if send_aux else b"", checksum)
        case Duty.FAILED:
            return Failed(session, number, cause.value, detail[:TEXT_LENGTH_MAX], quiescent=True)
        case _:
            assert duty.state is Duty.DRAINED
            return Drained(session, number)

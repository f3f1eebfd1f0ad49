"""A decode rank's session as prefill keeps it, and its grants, from the first message to the acknowledged end.

Numbers whose ends were acknowledged are kept as runs, so a late message never meets a forgotten number. The window
bounds the gaps between them, and so the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...errors import RemoteProtocolError
from ...layout.checksum import MASK
from ...layout.layout import Component
from ...wire import Drained, Failed, Grant, Landed, Part, Register, unpack_extents
from ..prefix import piece_rows
from ..slot_allocator import Extents, ExtentSet, end_of, slot_count, slots_below, slots_of
from ..states import WRITER_GRANT, WRITER_GRANT_ENDS, WriterGrantEvent, WriterGrantState, WriterState
from ..tables import step

EndMessage: TypeAlias = Landed | Failed | Drained

_SECRETS = frozenset({"token", "hbm_handle"})  # fields whose values no error shows


def check_repeated(
    name: str, first: Struct, repeated: Struct, *, begun: str, changing: frozenset[str] = frozenset()
) -> None:
    """Raises RemoteProtocolError that names a field in which a repeated message differs from the first: any but the
    `changing` ones. `begun` is what the first one has begun."""
    for field_name in first.__struct_fields__:
        was, now = getattr(first, field_name), getattr(repeated, field_name)
        if was == now or field_name in changing:
            continue
        field = f"{name}.{field_name}"
        if isinstance(was, tuple):
            counts = len(cast("tuple[object, ...]", now)), len(cast("tuple[object, ...]", was))
            text = f"{counts[0]} items, not the {counts[1]} that {begun} began with"
        elif isinstance(was, Struct):
            check_repeated(field, was, now, begun=begun)
            continue
        elif field_name in _SECRETS:
            text = f"not the one that {begun} began with"
        else:
            text = f"{now!r}, {begun} began with {was!r}"
        raise RemoteProtocolError(field, text)


@dataclass(frozen=True, eq=False)
class Share:
    """One part of a grant, checked: row first_row + i of the room goes to target_slots[i]."""

    component: int
    first_row: int
    rows: int
    extents: Extents

    @cached_property
    def target_slots(self) -> NDArray[np.int64]:
        """A slot for each row, int64 (rows,); made on first use, so that a waiting grant costs only its extents."""
        return slots_of(self.extents)


@dataclass(slots=True, eq=False)
class WriterGrant:
    """One grant as its writer keeps it until its end is acknowledged."""

    session: WriterSession
    number: int
    message: Grant | None  # None: refused before it came
    shares: tuple[Share, ...]
    deadline: float
    state: WriterGrantState = WriterGrantState.WAITING
    written_bytes: int = 0
    checksum: int = 0  # of what is written, where the Grant wants one
    in_flight: int = 0
    repeat_ms: int = 0
    end: EndMessage | None = None
    kv_bytes: int = field(init=False)  # that have to be written

    def __post_init__(self) -> None:
        components = self.session.components
        self.kv_bytes = sum([components[share.component].bytes_of(share.rows) for share in self.shares])

    @property
    def room(self) -> int | None:
        """The label of its room."""
        return None if self.message is None else self.message.room

    @property
    def last(self) -> bool:
        """True if no grant of its room follows on its session."""
        return self.message is None or self.message.last

    @property
    def verify(self) -> bool:
        """True if decode wants a checksum."""
        return self.message is not None and self.message.verify

    def check_same(self, message: Grant) -> None:
        """Raises RemoteProtocolError where a repeated Grant differs from the first."""
        first = self.message
        if first is None:
            return
        check_repeated("Grant", first, message, begun=f"grant {self.number}", changing=frozenset({"time_left_ms"}))

    def step(self, event: WriterGrantEvent) -> None:
        """Takes a step in the table; a grant that has ended releases its claim on the target slots."""
        self.state = step(WRITER_GRANT, self.state, event)
        if self.state in WRITER_GRANT_ENDS:
            self.session.unclaim(self.shares)

    def stop(self, event: WriterGrantEvent) -> None:
        """Takes an event that ends it: FAIL and ABORT in the form for writes in flight or for none."""
        busy = {WriterGrantEvent.FAIL: WriterGrantEvent.FAIL_BUSY, WriterGrantEvent.ABORT: WriterGrantEvent.ABORT_BUSY}
        self.step(busy[event] if self.in_flight else event)


class Numbers:
    """Numbers from 1 on, each added once, as runs: one more than there are gaps between them."""

    __slots__ = ("_count", "_ends", "_starts")

    def __init__(self) -> None:
        self._starts, self._ends, self._count = [1], [1], 0

    def add(self, number: int) -> None:
        """Adds a number that is not there."""
        index = bisect_right(self._starts, number)  # of the run behind it
        assert index
        assert self._ends[index - 1] <= number, f"{number} is there"
        self._count += 1
        joins = index < len(self._starts) and self._starts[index] == number + 1
        if self._ends[index - 1] == number:
            self._ends[index - 1] = self._ends.pop(index) if joins else number + 1
            if joins:
                del self._starts[index]
        elif joins:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._ends.insert(index, number + 1)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number)
        return index > 0 and number < self._ends[index - 1]

    def __len__(self) -> int:
        return self._count

    @property
    def runs(self) -> int:
        """How many runs they are."""
        return len(self._starts)


@dataclass(slots=True, eq=False)
class WriterSession:
    """One decode rank's arena as this prefill rank may write it."""

    id: int
    peer: str
    register: Register  # the first; it repeats
    landing: tuple[Component, ...]  # its components as a writer that does not reach HBM writes them
    window: int
    state: WriterState = WriterState.MAPPING
    in_use: bool = False  # a message followed Register
    bytes_ready: int = 0
    hbm_direct: bool = False  # this rank writes HBM directly
    slots_ready: tuple[int, ...] = ()  # the same in slots of each component
    acked: Numbers = field(default_factory=Numbers)  # of grants that have ended, acknowledged
    highest: int = 0  # number that was taken
    grants: dict[int, WriterGrant] = field(default_factory=dict[int, WriterGrant])
    writes: dict[int, tuple[WriterGrant, int]] = field(default_factory=dict[int, tuple[WriterGrant, int]])
    next_write: int = 1
    _claims: dict[int, ExtentSet] = field(default_factory=dict[int, ExtentSet])

    @property
    def components(self) -> tuple[Component, ...]:
        """What this rank writes, where it does."""
        return self.register.components if self.hbm_direct else self.landing

    @property
    def open(self) -> bool:
        """True if it takes messages."""
        return self.state in (WriterState.MAPPING, WriterState.UP)

    @property
    def granting(self) -> bool:
        """True if some of the arena may be granted; before that a Grant is a breach."""
        return self.state is WriterState.UP and self.bytes_ready > 0

    def ready(self, bytes_ready: int, *, hbm_direct: bool) -> None:
        """The first `bytes_ready` bytes of the arena may be granted; with `hbm_direct`, all slots of HBM too."""
        self.bytes_ready, self.hbm_direct = bytes_ready, hbm_direct
        self.slots_ready = tuple(
            layout.slots if hbm_direct and memory == "hbm" else slots_below(layout, bytes_ready)
            for layout, memory in [(component.layout, component.memory) for component in self.components]
        )

    def known_end(self, number: int) -> bool:
        """True if this grant has ended and decode acknowledged it."""
        return number in self.acked

    def outside(self, number: int) -> bool:
        """True if the number lies beyond the window. Such a message is not answered: decode may know of ends before
        this rank does."""
        return max(self.highest, number) - len(self.acked) > self.window

    def acknowledge(self, number: int) -> None:
        """Decode acknowledged the end of grant `number`."""
        del self.grants[number]
        self.acked.add(number)

    def admit(self, message: Grant, now: float) -> WriterGrant:
        """A new grant, checked against Register; RemoteProtocolError names a wrong field, and nothing is kept."""
        if message.tokens < 1 or message.prefix > message.tokens:
            raise RemoteProtocolError("Grant.prefix", f"{message.prefix} of {message.tokens} tokens")
        if message.stop < message.prefix:
            raise RemoteProtocolError("Grant.stop", f"{message.stop}, the prefix is {message.prefix}")
        if message.send_aux and not message.last:
            raise RemoteProtocolError("Grant.send_aux", f"true, of tokens up to {message.stop} of {message.tokens}")
        shares: list[Share] = []
        try:
            for index, part in enumerate(message.parts):
                shares.append(self._share(f"Grant.parts[{index}]", part, message, shares))
        except RemoteProtocolError:
            self.unclaim(tuple(shares))
            raise
        deadline = now + message.time_left_ms / 1e3
        grant = WriterGrant(self, message.grant, message, tuple(shares), deadline)
        self.grants[message.grant], self.highest = grant, max(self.highest, message.grant)
        return grant

    def refuse(self, number: int) -> WriterGrant:
        """An aborted number that was never granted: it is to end at once, for the Grant that may follow."""
        grant = WriterGrant(self, number, None, (), 0.0)
        self.grants[number], self.highest = grant, max(self.highest, number)
        return grant

    def end(self, write: int, checksum: int | None = None) -> WriterGrant:
        """Ends a write, which has landed if it has a checksum; returns its grant."""
        grant, byte_count = self.writes.pop(write)
        grant.in_flight -= 1
        if checksum is not None:
            grant.written_bytes += byte_count
            grant.checksum = (grant.checksum + checksum) & MASK
        return grant

    def unclaim(self, shares: tuple[Share, ...]) -> None:
        """Releases the claims of these shares: decode may grant their slots again."""
        for share in shares:
            self._claims[share.component].remove(share.extents)

    def _share(self, field_name: str, part: Part, message: Grant, before: list[Share]) -> Share:
        if part.component >= len(self.components):
            text = f"{part.component}, must be below {len(self.components)}, the number of components in Register"
            raise RemoteProtocolError(f"{field_name}.component", text)
        if any(share.component == part.component for share in before):
            raise RemoteProtocolError(f"{field_name}.component", f"{part.component} is there twice")
        component = self.components[part.component]
        first, end_row = piece_rows(component, tokens=message.tokens, prefix=message.prefix, stop=message.stop)
        if part.first_row < first:
            prefix = f"a prefix of {message.prefix}"
            text = f"{part.first_row}, decode holds {first} rows of {component.name} for {prefix}"
            raise RemoteProtocolError(f"{field_name}.first_row", text)
        if part.rows < 1 or part.first_row + part.rows > end_row:
            tokens = message.tokens if message.last else message.stop
            text = f"rows {part.first_row}+{part.rows}, {component.name} has {end_row} for {tokens} tokens"
            raise RemoteProtocolError(f"{field_name}.rows", text)
        extents = unpack_extents(f"{field_name}.extents", part.extents)
        slots, granted, end = component.layout.slots, slot_count(extents), end_of(extents)
        if granted != part.rows:
            raise RemoteProtocolError(f"{field_name}.rows", f"{part.rows}, its extents hold {granted}")
        if end > slots:
            raise RemoteProtocolError(f"{field_name}.extents", f"end at slot {end}, {component.name} has {slots}")
        if end > (ready := self.slots_ready[part.component]):
            text = f"end at slot {end}, {ready} of {component.name} are ready"
            raise RemoteProtocolError(f"{field_name}.extents", text)
        claims = self._claims.setdefault(part.component, ExtentSet())
        if not claims.add(extents):
            (start, count), (other, other_count) = claims.clash(extents)
            text = f"{start}+{count} and {other}+{other_count} overlap, in this grant or with one that has not ended"
            raise RemoteProtocolError(f"{field_name}.extents", text)
        return Share(part.component, part.first_row, part.rows, extents)

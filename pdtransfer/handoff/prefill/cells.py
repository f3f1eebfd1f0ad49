"""The cells that prefill's engine offers for a room: each is checked at once, and split into writes for each grant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import Cause, LocalProtocolError
from ...layout.geometry import bounds_of
from ...layout.layout import Component
from ...wire import Grant
from ..effects import Write
from ..ready_gate import ReadyGate
from ..slot_allocator import ExtentSet
from ..states import PrefillRoom, WriterGrantState
from .records import WriterGrant


@dataclass(slots=True, eq=False)
class Cell:
    """Rows [first_row, first_row + len(source_slots)) of layers [first, end) of one component; read once `after` is
    open, by default with the room's cell before it."""

    component: str
    first_row: int
    layers: tuple[int, int]
    source_slots: NDArray[np.int64]
    after: ReadyGate | None = None


@dataclass(slots=True, eq=False)
class OpenRoom:
    """One request on the prefill side."""

    id: int
    tokens: int | None  # None: as many as the first Grant has
    grant_count: int | None  # decode ranks that will grant; None: all ranks of the group whose Grant comes first
    peers: frozenset[str] | None  # that may grant; None: all that know the label
    deadline: float
    state: PrefillRoom = PrefillRoom.OPEN
    cells: list[Cell] = field(default_factory=list[Cell])
    grants: dict[int, WriterGrant] = field(default_factory=dict[int, WriterGrant])  # the latest of each session
    prefix: int = 0  # the first tokens that no decode rank needs
    granted_bytes: int = 0
    offered_tokens: int = 0  # the end of the tokens of which rows were offered
    aux: bytes = b""
    cause: Cause = Cause.REFUSED
    detail: str = ""
    _offered: dict[tuple[str, int, int], ExtentSet] = field(default_factory=dict[tuple[str, int, int], ExtentSet])

    def offer(self, cell: Cell, components: Mapping[str, Component]) -> None:
        """Adds a cell. Raises LocalProtocolError if it lies outside the room or the pool, or overlaps an earlier
        one."""
        component = components.get(cell.component)
        if component is None:
            raise LocalProtocolError(f"component: {cell.component!r} must be one of {sorted(components)}")
        end_row = cell.first_row + len(cell.source_slots)
        rows = end_row if self.tokens is None else component.rows(self.tokens)
        if not 0 <= cell.first_row < end_row <= rows:
            raise LocalProtocolError(f"rows: [{cell.first_row}, {end_row}) must be within the room's {rows} rows")
        first, end = component.layout.layer_range
        if not first <= cell.layers[0] < cell.layers[1] <= end:
            raise LocalProtocolError(f"layers: {list(cell.layers)} must be within [{first}, {end})")
        low, high = bounds_of(cell.source_slots)
        if low < 0 or high >= component.layout.slots:
            raise LocalProtocolError(f"slots: {low}..{high} are outside 0..{component.layout.slots - 1}")
        for (name, other_first, other_end), offered in self._offered.items():
            apart = other_end <= cell.layers[0] or cell.layers[1] <= other_first
            if name == cell.component and not apart and offered.overlaps_run(cell.first_row, end_row - cell.first_row):
                raise LocalProtocolError(f"cell: rows [{cell.first_row}, {end_row}) were offered already")
        key = cell.component, *cell.layers
        if (offered := self._offered.get(key)) is None:
            offered = self._offered[key] = ExtentSet()
        offered.add_run(cell.first_row, end_row - cell.first_row)
        if component.span.kind == "all":
            self.offered_tokens = max(self.offered_tokens, end_row * component.tokens_per_row)
        if cell.after is None and self.cells:
            cell.after = self.cells[-1].after
        self.cells.append(cell)

    def admits(self, peer: str) -> bool:
        """True if this decode rank may grant."""
        return self.peers is None or peer in self.peers

    @property
    def leased(self) -> bool:
        """True if every decode rank has granted."""
        return len(self.grants) == self.grant_count

    @property
    def landed(self) -> bool:
        """True if the last grant of every decode rank has landed."""
        return self.leased and all(
            grant.last and grant.state is WriterGrantState.LANDED for grant in self.grants.values()
        )

    @property
    def awaited(self) -> str:
        """What it waits for, and from whom."""
        granted = {grant.session.peer for grant in self.grants.values()}
        if not self.leased:
            names = ", ".join(sorted((self.peers or frozenset()) - granted))
            names = names or (granted and f"{len(granted)} of {self.grant_count} ranks have")
            return "decode has granted no memory yet" + (f" ({names})" if names else "")
        if any(not grant.last and grant.state is WriterGrantState.LANDED for grant in self.grants.values()):
            return "decode has granted no memory yet for the rest"
        if self.state is PrefillRoom.OPEN:
            return "this node's engine has yet to compute the rest"
        return f"its bytes are on their way to {', '.join(sorted(granted))}"

    def meet(self, grant: WriterGrant, ranks: int) -> None:
        """Adds a grant, of a group of this many decode ranks; the first one decides what the engine left open. A
        further one of its session replaces the one before, which has landed."""
        assert grant.message is not None
        if grant.session.id not in self.grants:
            self.prefix = min(self.prefix, grant.message.prefix) if self.grants else grant.message.prefix
        self.grants[grant.session.id] = grant
        self.granted_bytes += grant.kv_bytes
        if self.tokens is None:
            self.tokens = grant.message.tokens
        if self.grant_count is None:
            self.grant_count = ranks

    def misplaced(self, message: Grant) -> str:
        """What is wrong with a further grant of a session that has granted; empty where it is the next piece."""
        before = self.grants[message.session]
        if before.message is None or before.last:
            return f"grants: session {message.session:#x} has two for room {self.id:016x}"
        if before.state is not WriterGrantState.LANDED:
            return f"grants: grant {before.number} of room {self.id:016x} has not landed, it is {before.state.value}"
        if message.prefix != before.message.stop:
            return f"Grant.prefix: {message.prefix}, grant {before.number} of this room ends at {before.message.stop}"
        if message.stop == message.prefix:
            return f"Grant.stop: {message.stop}, only the first piece of a room may have no tokens"
        return ""


def started(grant: WriterGrant, cell: Cell) -> list[Write]:
    """Starts one write for each part of an active grant that this cell overlaps."""
    session, orders = grant.session, list[Write]()
    assert grant.room is not None
    for share in grant.shares:
        component = session.components[share.component]
        if component.name != cell.component:
            continue
        low = max(share.first_row, cell.first_row)
        high = min(share.first_row + share.rows, cell.first_row + len(cell.source_slots))
        layers = component.layout.layer_range
        first, end = max(layers[0], cell.layers[0]), min(layers[1], cell.layers[1])
        slot_bytes = component.layout.row_bytes
        if (first, end) != layers:
            slot_bytes = component.layout.row_bytes_of(first, end)
        if low >= high or not slot_bytes:
            continue
        write = session.next_write
        session.next_write += 1
        session.writes[write] = grant, (high - low) * slot_bytes
        grant.in_flight += 1
        order = Write(
            session=session.id, grant=grant.number, room=grant.room, write=write,
            component=share.component, layers=(first, end), first_row=low, verify=grant.verify, after=cell.after,
            urgent=high == share.first_row + share.rows and layers[1] - end <= end - first,
            source_slots=cell.source_slots[low - cell.first_row : high - cell.first_row],
            target_slots=share.target_slots[low - share.first_row : high - share.first_row],
        )  # fmt: skip
        orders.append(order)
    return orders

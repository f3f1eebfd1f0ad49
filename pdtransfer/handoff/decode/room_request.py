"""A request for a room on the decode side: its checks, and the reasons for which a node refuses it at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ...errors import ArenaFullError, Cause, LocalProtocolError
from ...layout.layout import Component, check_slots
from ...limits import TOKENS_MAX
from ..admission import Admission, Demand
from ..component_variants import labels, leased, shares_prefixes
from ..effects import RoomFailed
from ..prefix import PrefixCache, prefix_rows
from ..slot_allocator import Extents, extents_of, slot_count
from .records import RoomRecord


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Where the engine wants one component's rows [first_row, first_row + slots): in extents of its choice."""

    first_row: int
    extents: Extents


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """Slots for `tokens` + `growth` tokens, which the prefill ranks `sources` write.

    `room` is the label under which those ranks open it. The engine has the first `prefix` tokens elsewhere. Or `keys`,
    as `PrefixCache.keys` makes them, name the prompt's blocks: those in the arena when the room is admitted do not
    cross, and the others are shared from READY on. Or `placed`, one a component, are the slots that the engine chose.
    With `whole_group` the sources are leaders, and the room is written by all ranks of the groups that they name.
    """

    room: int
    tokens: int
    sources: Sequence[str]  # names or endpoints, as they are dialled
    time_left_s: float
    growth: int = 0
    prefix: int = 0
    keys: tuple[bytes, ...] = ()
    enable_hisparse: bool = False
    placed: tuple[PlacedRows, ...] | None = None
    whole_group: bool = False

    def record(
        self, cache: PrefixCache, rooms: Collection[int], deadline: float, names: Callable[[str], str] = str
    ) -> RoomRecord:
        """The room, which waits for nothing yet. `names` tells which peer a source is.

        Raises LocalProtocolError for a label among `rooms`, and for numbers that contradict one another.
        """
        tokens, prefix, growth, keys, placed = self.tokens, self.prefix, self.growth, self.keys, self.placed
        if self.room in rooms:
            raise LocalProtocolError(f"room: {self.room:016x} is expected already")
        if not 0 <= prefix <= tokens or not 1 <= tokens <= TOKENS_MAX or growth < 0:
            raise LocalProtocolError(f"tokens: {tokens}, prefix {prefix}, growth {growth} are invalid")
        if keys and (prefix or len(keys) * cache.block_tokens > tokens):
            raise LocalProtocolError(f"keys: {len(keys)} of {tokens} tokens with prefix {prefix} are invalid")
        if cache.arena.engine_slots != (placed is not None):
            who = "the engine chooses" if placed is None else "this node leases"
            raise LocalProtocolError(f"slots: {who} the slots of all its rooms")
        if placed is not None and (growth or keys):
            raise LocalProtocolError(f"slots: chosen by the engine, with growth {growth} and {len(keys)} keys")
        sources = tuple(map(names, self.sources))
        if not sources or len(set(sources)) != len(sources):
            raise LocalProtocolError(f"sources: {list(self.sources)} names no rank, or one twice")
        demand = self._demand(cache.arena.components)
        first_rows = () if placed is None else tuple([each.first_row for each in placed])
        return RoomRecord(
            self.room, tokens, prefix, demand, sources, deadline, self.enable_hisparse,
            leaders=sources if self.whole_group else (), first_rows=first_rows,
        )  # fmt: skip

    def _demand(self, components: Sequence[Component]) -> Demand:
        rows, byte_count = list[int](), 0
        if self.placed is not None:
            rows = [slot_count(each.extents) for each in self.placed]
            byte_count = sum([of.bytes_of(count) for of, count in zip(components, rows, strict=True)])
            return Demand(tuple(rows), byte_count)
        for component, whole in zip(components, leased(components, enable_hisparse=self.enable_hisparse), strict=True):
            rows.append(component.rows(self.tokens + self.growth) if whole else 0)
            if whole:
                byte_count += component.bytes_of(component.rows(self.tokens) - prefix_rows(component, self.prefix))
        shared = shares_prefixes(components, enable_hisparse=self.enable_hisparse)
        return Demand(tuple(rows), byte_count, self.keys if shared else ())


def place(
    components: Sequence[Component],
    slots: Mapping[str, ArrayLike],
    *,
    tokens: int,
    prefix: int = 0,
    enable_hisparse: bool = False,
) -> tuple[PlacedRows, ...]:
    """The slots that an engine chose, checked: for each component integers (rows,), one a row of the room.

    The first rows of a component do not cross where their slots are -1, and those of the `prefix`, whatever their
    slots. Raises LocalProtocolError that names the component for a missing one, an unknown one, a wrong number of
    slots, and slots that are outside the pool or repeated.
    """
    used = leased(components, enable_hisparse=enable_hisparse)
    if unknown := sorted(slots.keys() - {each.name for each in components}):
        raise LocalProtocolError(f"slots: {unknown} must be among {sorted({each.name for each in components})}")
    placed: list[PlacedRows] = []
    for component, whole, label in zip(components, used, labels(components), strict=True):
        rows = component.rows(tokens) if whole else 0
        first = min(prefix_rows(component, prefix), rows)
        if first == rows:
            placed.append(PlacedRows(first, extents_of(np.empty(0, np.int64))))
            continue
        if component.name not in slots:
            raise LocalProtocolError(f"slots: none of {label!r}, which has {rows} rows")
        found = np.asarray(slots[component.name])
        if found.shape != (rows,) or found.dtype.kind not in "iu":
            what = f"{found.dtype} of shape {found.shape}"
            raise LocalProtocolError(f"slots: {what} for {label!r}, not integers ({rows},)")
        wanted = found[first:].astype(np.int64)
        absent = int((wanted == -1).cumprod().sum())
        try:
            check_slots(wanted[absent:], component.layout.slots, f"slots of {label!r}")
        except ValueError as error:
            raise LocalProtocolError(str(error)) from None
        placed.append(PlacedRows(first + absent, extents_of(wanted[absent:])))
    return tuple(placed)


def refusal(
    room: RoomRecord, admission: Admission, *, rooms: int, draining: bool, enable_hisparse: bool
) -> RoomFailed | None:
    """Why this node refuses the room now or forever, with `rooms` others; None where it takes the room.

    `enable_hisparse`: whether this node serves HiSparse.
    """
    if draining:
        return RoomFailed(room.id, Cause.SHUTDOWN, "this node is draining")
    if room.enable_hisparse and not enable_hisparse:
        return RoomFailed(room.id, Cause.REFUSED, "enable_hisparse: the request wants it, this node is without it")
    try:
        admission.check(room.demand.rows, rooms=rooms)
    except ArenaFullError as error:
        cause = Cause.FULL if error.retry_ms is not None else Cause.REFUSED
        return RoomFailed(room.id, cause, str(error), error.retry_ms or 0)
    return None

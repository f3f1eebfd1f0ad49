"""A request for a room on the decode side: its checks, and the reasons for which a node refuses it at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import ArenaFullError, Cause, LocalProtocolError
from ...layout.geometry import integers
from ...layout.layout import Component, check_slots
from ...limits import TOKENS_MAX
from ..admission import Admission, Demand
from ..component_variants import labels, leased, shares_prefixes
from ..effects import ComponentRows, RoomFailed
from ..prefix import PrefixCache, prefix_rows
from ..slot_allocator import SlotAllocator, extents_of, slot_count
from .records import RoomRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """Slots for `tokens` + `growth` tokens, which the prefill ranks `sources` write. Without any the engine computes
    what is not cached, `rest_max` tokens of the prompt at most. The room is READY with its slots, and the blocks that
    it fills are shared from its release on.

    `room` is the label under which those ranks open it. The engine has the first `prefix` tokens elsewhere. Or `keys`,
    as `PrefixCache.keys` makes them, name the prompt's blocks. Those in the arena when the room is admitted are not
    sent, and the others are shared from READY on. Or `chosen`, one a component, are rows in slots that the engine
    chose. With `whole_group` the sources are leaders, and the room is written by all ranks of the groups that they
    name.
    """

    room: int
    tokens: int
    sources: Sequence[str]  # names or endpoints, as they are dialled
    time_left_s: float
    growth: int = 0
    prefix: int = 0
    keys: tuple[bytes, ...] = ()
    enable_hisparse: bool = False
    chosen: tuple[ComponentRows, ...] | None = None
    whole_group: bool = False
    rest_max: int = 0

    def record(
        self, cache: PrefixCache, rooms: Collection[int], deadline: float, names: Callable[[str], str] = str
    ) -> RoomRecord:
        """The room, which waits for nothing yet. `names` maps a source to its peer.

        Raises LocalProtocolError for a label among `rooms`, and for numbers that contradict one another.
        """
        tokens, prefix, growth, keys, chosen = self.tokens, self.prefix, self.growth, self.keys, self.chosen
        if self.room in rooms:
            raise LocalProtocolError(f"room: {self.room:016x} is expected already")
        if not 0 <= prefix <= tokens or not 1 <= tokens <= TOKENS_MAX or growth < 0:
            raise LocalProtocolError(f"tokens: {tokens}, prefix {prefix}, growth {growth} are invalid")
        if keys and (prefix or len(keys) * cache.block_tokens > tokens):
            raise LocalProtocolError(f"keys: {len(keys)} of {tokens} tokens with prefix {prefix} are invalid")
        if cache.arena.engine_slots != (chosen is not None):
            chooser = "the engine chooses" if chosen is None else "this node leases"
            raise LocalProtocolError(f"slots: {chooser} the slots of all its rooms")
        if chosen is not None and (growth or keys):
            raise LocalProtocolError(
                f"slots: an engine that chooses them may set no growth and no keys: {growth} and {len(keys)}"
            )
        sources = tuple(map(names, self.sources))
        if self.rest_max < 0 or (sources and self.rest_max):
            raise LocalProtocolError(f"rest_max: {self.rest_max} with {len(sources)} sources")
        if not (sources or self.rest_max) or len(set(sources)) != len(sources):
            raise LocalProtocolError(f"sources: {list(self.sources)} must name at least one rank, each once")
        if not sources:  # the last token is computed in any case, and writes no row of a block that others read
            keys = keys[: (tokens - 1) // max(1, cache.block_tokens)]
        demand = self._demand(cache.arena, keys)
        first_rows = () if chosen is None else tuple([rows.first_row for rows in chosen])
        return RoomRecord(
            self.room, tokens, prefix, demand, sources, deadline, self.enable_hisparse,
            leaders=sources if self.whole_group else (), first_rows=first_rows, rest_max=self.rest_max,
        )  # fmt: skip

    def _demand(self, arena: SlotAllocator, keys: tuple[bytes, ...]) -> Demand:
        components = arena.components
        if self.chosen is not None:
            counts = [slot_count(rows.extents) for rows in self.chosen]
            parts = zip(self.chosen, counts, strict=True)
            byte_count = sum(
                [rows.component.bytes_of(n) for rows, n in parts if rows.component.name not in arena.stand_ins]
            )
            return Demand(tuple(counts), byte_count)
        counts, byte_count = list[int](), 0
        for component, used in zip(components, leased(components, enable_hisparse=self.enable_hisparse), strict=True):
            counts.append(component.rows(self.tokens + self.growth) if used else 0)
            if used:
                byte_count += component.bytes_of(component.rows(self.tokens) - prefix_rows(component, self.prefix))
        shared = shares_prefixes(components, enable_hisparse=self.enable_hisparse)
        return Demand(tuple(counts), byte_count, keys if shared else ())


def chosen_rows(
    components: Sequence[Component],
    slots: Mapping[str, ArrayLike],
    *,
    tokens: int,
    prefix: int = 0,
    enable_hisparse: bool = False,
    open_ended: Collection[str] = (),
) -> tuple[ComponentRows, ...]:
    """The slots that an engine chose, checked: for each component integers (rows,), one a row of the room.

    The first rows of a component are not sent where their slots are -1, nor those of the `prefix`, whatever their
    slots. Nor are the last ones of the components named in `open_ended` whose slots are -1. Raises LocalProtocolError
    that names the component for a missing or unknown one, and a wrong number of slots. So it does for slots that are
    repeated or outside the pool, as any other -1 is.
    """
    used = leased(components, enable_hisparse=enable_hisparse)
    names = {component.name for component in components}
    if unknown := sorted(slots.keys() - names):
        raise LocalProtocolError(f"slots: {unknown} are not among the components {sorted(names)}")
    chosen: list[ComponentRows] = []
    for component, is_used, label in zip(components, used, labels(components), strict=True):
        rows = component.rows(tokens) if is_used else 0
        first = min(prefix_rows(component, prefix), rows)
        if first == rows:
            chosen.append(ComponentRows(component, first, extents_of(np.empty(0, np.int64))))
            continue
        if component.name not in slots:
            raise LocalProtocolError(f"slots: missing for {label!r}, which has {rows} rows")
        indices = integers(f"slots of {label!r}", slots[component.name], rows)[first:].astype(np.int64)
        absent = _absent(indices)
        landing = indices[absent:]
        if component.name in open_ended:
            landing = landing[: len(landing) - _absent(landing[::-1])]
        try:
            check_slots(landing, component.layout.slots, f"slots of {label!r}")
        except ValueError as error:
            raise LocalProtocolError(str(error)) from None
        chosen.append(ComponentRows(component, first + absent, extents_of(landing)))
    return tuple(chosen)


def _absent(slots: NDArray[np.int64]) -> int:
    """How many slots are -1 before the first one that is not."""
    return int((slots == -1).cumprod().sum())


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
    return None if room.sources else rest_refusal(room, admission.cached(room.demand))


def rest_refusal(room: RoomRecord, cached: int) -> RoomFailed | None:
    """Why this node does not compute the rest of the prompt of a room without sources, of which its cache has `cached`
    tokens; None where it does. What the engine has elsewhere is not left either."""
    present = max(room.prefix, cached)
    if (rest := room.tokens - present) <= room.rest_max:
        return None
    have = f"{present} of {room.tokens} tokens are cached"
    text = f"prefix: {have}, {rest} are left, at most {room.rest_max} are computed here"
    return RoomFailed(room.id, Cause.REFUSED, text)

"""A request for a room on the decode side: its checks, and the reasons for which a node refuses it at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...errors import ArenaFullError, Cause, LocalProtocolError
from ...layout.layout import Component
from ...limits import TOKENS_MAX
from ..admission import Admission, Demand
from ..component_variants import leased, shares_prefixes
from ..effects import RoomFailed
from ..prefix import PrefixCache, prefix_rows
from .records import RoomRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """Slots for `tokens` + `growth` tokens, which the prefill ranks `sources` write.

    `room` is the label under which those ranks open it. The engine has the first `prefix` tokens elsewhere. Or `keys`,
    as `PrefixCache.keys` makes them, name the prompt's blocks: those in the arena when the room is admitted do not
    cross, and the others are shared from READY on.
    """

    room: int
    tokens: int
    sources: Sequence[str]  # names or endpoints, as they are dialled
    time_left_s: float
    growth: int = 0
    prefix: int = 0
    keys: tuple[bytes, ...] = ()
    enable_hisparse: bool = False

    def record(self, cache: PrefixCache, rooms: Collection[int], deadline: float) -> RoomRecord:
        """The room, which waits for nothing yet.

        Raises LocalProtocolError for a label among `rooms`, and for numbers that contradict one another.
        """
        tokens, prefix, growth, keys = self.tokens, self.prefix, self.growth, self.keys
        if self.room in rooms:
            raise LocalProtocolError(f"room: {self.room:#x} is expected already")
        if not 0 <= prefix <= tokens or not 1 <= tokens <= TOKENS_MAX or growth < 0:
            raise LocalProtocolError(f"tokens: {tokens}, prefix {prefix}, growth {growth} are invalid")
        if keys and (prefix or len(keys) * cache.block_tokens > tokens):
            raise LocalProtocolError(f"keys: {len(keys)} of {tokens} tokens with prefix {prefix} are invalid")
        if not self.sources or len(set(self.sources)) != len(self.sources):
            raise LocalProtocolError(f"sources: {list(self.sources)} names no rank, or one twice")
        demand = self._demand(cache.arena.components)
        return RoomRecord(self.room, tokens, prefix, demand, tuple(self.sources), deadline, self.enable_hisparse)

    def _demand(self, components: Sequence[Component]) -> Demand:
        rows, byte_count = list[int](), 0
        for component, whole in zip(components, leased(components, enable_hisparse=self.enable_hisparse), strict=True):
            rows.append(component.rows(self.tokens + self.growth) if whole else 0)
            if whole:
                byte_count += component.bytes_of(component.rows(self.tokens) - prefix_rows(component, self.prefix))
        shared = shares_prefixes(components, enable_hisparse=self.enable_hisparse)
        return Demand(tuple(rows), byte_count, self.keys if shared else ())


def refusal(
    room: RoomRecord, admission: Admission, *, rooms: int, draining: bool, enable_hisparse: bool
) -> RoomFailed | None:
    """Why this node refuses the room now or for ever, with `rooms` others; None where it takes the room.

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

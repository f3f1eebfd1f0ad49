"""What an engine asks of decode: a room that makes sense, or why it does not; and what is refused at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import ArenaFullError, Cause, LocalProtocolError
from ...limits import TOKENS_MAX
from ..admission import Admission
from ..effects import RoomFailed
from ..prefix import PrefixCache
from .parts import demand_of
from .records import Room


def room_of(
    room_id: int,
    *,
    known: Collection[int],
    cache: PrefixCache,
    tokens: int,
    sources: Sequence[str],
    deadline: float,
    growth: int,
    prefix: int,
    keys: tuple[bytes, ...],
    enable_hisparse: bool,
) -> Room:
    """The room, which waits for nothing yet. Raises LocalProtocolError for a label in `known`, and for numbers that
    make no sense."""
    if room_id in known:
        raise LocalProtocolError(f"room: {room_id:#x} is expected already")
    if not 0 <= prefix <= tokens or not 1 <= tokens <= TOKENS_MAX or growth < 0:
        raise LocalProtocolError(f"tokens: {tokens}, prefix {prefix}, growth {growth} make no sense")
    if keys and (prefix or len(keys) * cache.block_tokens > tokens):
        raise LocalProtocolError(f"keys: {len(keys)} of {tokens} tokens with prefix {prefix} make no sense")
    if not sources or len(set(sources)) != len(sources):
        raise LocalProtocolError(f"sources: {list(sources)} names no rank, or one twice")
    demand = demand_of(
        cache.arena.components, tokens=tokens, growth=growth, prefix=prefix, keys=keys, sparse=enable_hisparse
    )
    return Room(room_id, tokens, prefix, demand, tuple(sources), deadline, enable_hisparse)


def refusal(
    room: Room, admission: Admission, *, rooms: int, draining: bool, enable_hisparse: bool
) -> RoomFailed | None:
    """Why this node takes it not at all, or not now, beside its `rooms` others; with `enable_hisparse` it can do
    that."""
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

"""What sessions ask of the shell around them, and how writes end; the shell performs effects in order, and decides
nothing."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import Cause
from ..layout.layout import Component
from ..wire import Message, Reach
from .ready_gate import Gate
from .slot_allocator import Extents


class Send(Struct, frozen=True):
    """Hand `message` to `peer`: an endpoint that was dialled, or the authenticated name of who dialled. May be lost."""

    peer: str
    message: Message


# Decode


class Offer(Struct, frozen=True):
    """Prepare a hand-over of the arena for `session`, then call `offered` with its Reach."""

    peer: str
    session: int


class Fence(Struct, frozen=True):
    """Revoke the session's hand-over and watch until it is proven quiet, then call `fenced`. Repeats are harmless."""

    session: int


class Forget(Struct, frozen=True):
    """The session is over and was proven quiet: drop what is kept of it."""

    session: int


class Ready(Struct, frozen=True):
    """Every byte of the room is in the arena: `slots` holds, per component, one int64 slot a row, growth included.

    Other rooms may read the prompt's rows, too: they are not to be written.
    """

    room: int
    slots: dict[str, NDArray[np.int64]]
    aux: bytes
    kv_bytes: int  # that crossed
    prefix: int = 0  # tokens that did not


class Rows(Struct, frozen=True):
    """Rows of a room from first_row on, in the order of `extents` of the component, whose bases are arena offsets."""

    component: Component
    first_row: int
    extents: Extents


class Verify(Struct, frozen=True):
    """Sum the rows of a landed grant as they lie in the arena, then call `verified`: its slots wait for that."""

    session: int
    grant: int
    room: int
    parts: tuple[Rows, ...]


class StopVerifying(Struct, frozen=True):
    """Nobody wants this grant's sum any more: stop reading soon, and say `verified` when nothing of it is read."""

    session: int
    grant: int


class Lift(Struct, frozen=True):
    """Copy the rows of a landed grant from the arena to the same slots in HBM, then call `lifted`: both wait for that.

    Say it only once nothing of it is copied any more, whichever way that ended; where nobody can tell, never.
    """

    session: int
    grant: int
    room: int
    parts: tuple[Rows, ...]


class StopLifting(Struct, frozen=True):
    """Nobody wants this grant in HBM any more: stop copying soon, and say `lifted` when nothing of it is copied."""

    session: int
    grant: int


class RoomFailed(Struct, frozen=True):
    """The room ended without READY (decode) or without landing (prefill); said once, with the one root cause."""

    room: int
    cause: Cause
    detail: str
    retry_ms: int = 0


class HangUp(Struct, frozen=True):
    """The peer is forgotten: close what was dialled. The next room that needs it dials again."""

    peer: str


class SessionLost(Struct, frozen=True):
    """Nothing more is granted on the session, unless its silent peer is heard again; `detail` says why."""

    session: int
    detail: str


class PeerRefused(Struct, frozen=True):
    """The peer and this node can't work together; the text names each field with both values."""

    peer: str
    detail: str


# Prefill


class Outcome(Enum):
    """How a write ended. LANDED and FAILED are quiescent: no byte moves any more. After UNKNOWN bytes still may."""

    LANDED = "landed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Map(Struct, frozen=True):
    """Map the arena that `reach` names for `session`, then call `mapped` or `unmappable`."""

    session: int
    reach: Reach
    components: tuple[Component, ...]


class Unmap(Struct, frozen=True):
    """The session is over and none of its writes is in flight: let its mapping go."""

    session: int


class Write(Struct, frozen=True, kw_only=True):
    """One cell's rows on their way into one grant's slots; answered by `wrote`.

    `source_slots` and `target_slots` are int64 of equal length, in slots of the component's layout on either side;
    `layers` is [first, end). The slots were checked against both layouts before this was made. Nothing of it is read
    before `after` is open, if there is one.
    """

    session: int
    grant: int
    room: int
    write: int  # unique in its session
    component: int  # place in Register
    layers: tuple[int, int]
    source_slots: NDArray[np.int64]
    target_slots: NDArray[np.int64]
    first_row: int = 0  # of the room: the first slot's
    verify: bool = False  # a checksum of the rows as they are read is wanted with the outcome
    after: Gate | None = None
    urgent: bool = False  # no more of the grant is computed behind it than it has itself: it may be waited for


class StopWriting(Struct, frozen=True):
    """Writes of this grant may stop early; each still reports its own outcome."""

    session: int
    grant: int


class FenceWriter(Struct, frozen=True):
    """A write's outcome is unknown: kill what writes for this session, then call `fenced`."""

    session: int


class Leased(Struct, frozen=True):
    """Prefill: every decode rank has leased slots for the room, what is computed now leaves at once. Decode: this one
    has, and the room waits for nobody's slots any more."""

    room: int


class Landed(Struct, frozen=True):
    """Every grant of the room has landed."""

    room: int
    kv_bytes: int


class Drained(Struct, frozen=True):
    """The room has ended and nothing reads its pages any more: the engine may reuse them. Said once."""

    room: int


DecodeEffect: TypeAlias = (
    Send | Offer | Fence | Forget | Leased | Verify | StopVerifying | Lift | StopLifting | Ready | RoomFailed | HangUp
    | SessionLost | PeerRefused
)  # fmt: skip
PrefillEffect: TypeAlias = (
    Send | Map | Unmap | Write | StopWriting | FenceWriter | Leased | Landed | RoomFailed | Drained
)

DecodeEvent: TypeAlias = Ready | RoomFailed
"""What an engine hears of a room on the decode side."""

PrefillEvent: TypeAlias = Leased | Landed | RoomFailed | Drained
"""The same on the prefill side; Drained comes last."""

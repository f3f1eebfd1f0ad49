"""Effects that sessions return, and the outcomes of writes. The shell performs effects in order and decides nothing."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import Cause
from ..layout.layout import Component
from ..wire import Reach
from .peers import PeerRefused, Send

if TYPE_CHECKING:
    from .ready_gate import ReadyGate
    from .slot_allocator import Extents


# Decode


class Dial(Struct, frozen=True):
    """Keep a connection to `peer`, an endpoint that a leader named, from now on; call `undialled` where that is
    impossible."""

    peer: str


class Offer(Struct, frozen=True):
    """Prepare a hand-over of the arena for `session`, then call `offered` with its Reach."""

    peer: str
    session: int


class Fence(Struct, frozen=True):
    """Revoke the session's hand-over and poll until it is proven quiet, then call `fenced`. Repeats are harmless."""

    session: int


class Forget(Struct, frozen=True):
    """The session is over and proven quiet: drop its state."""

    session: int


class RoomReady(Struct, frozen=True):
    """Every byte of the room is in the arena. `slots` has, for each component, one int64 slot a row, growth included.

    Other rooms may read the prompt's rows as well: the engine must not write them.
    """

    room: int
    slots: dict[str, NDArray[np.int64]]  # (rows,) by the component's name
    aux: bytes  # as the prefill rank gave it to finish()
    kv_bytes: int  # bytes that were sent
    prefix: int = 0  # tokens that were not sent: the arena had them


class ComponentRows(Struct, frozen=True):
    """One component's rows of a room, from first_row on, in the slots of `extents`."""

    component: Component  # with bases that are arena offsets
    first_row: int
    extents: Extents


class Settle(Struct, frozen=True):
    """Verify the rows of a landed grant, that is compute their checksum in the arena, or with `targets` lift them: copy
    them from the staging buffer to HBM. Then call `settled`.

    All slots stay claimed until then. Call it only once nothing is read or copied any more, whether that succeeded or
    failed; where that cannot be known, never.
    """

    session: int
    grant: int
    room: int
    parts: tuple[ComponentRows, ...]
    targets: tuple[ComponentRows, ...] = ()  # of each part: as many slots, in the same order


class StopSettling(Struct, frozen=True):
    """The rows are not needed any more: stop soon, and call `settled` when nothing is read or copied."""

    session: int
    grant: int


class RoomFailed(Struct, frozen=True):
    """The room ended without RoomReady (decode) or without landing (prefill). Reported once, with its root cause."""

    room: int
    cause: Cause
    detail: str  # for a person
    retry_ms: int = 0  # when it is worth asking again; 0 if never, or unknown


class HangUp(Struct, frozen=True):
    """The peer is forgotten: close its connection. The next room that needs it dials again."""

    peer: str


class SessionLost(Struct, frozen=True):
    """Nothing more is granted on the session, unless its silent peer is seen again; `detail` is the reason. The peer
    `parted` in good order where it said Goodbye."""

    session: int
    detail: str
    parted: bool = False


# Prefill


class Outcome(Enum):
    """The end of a write. After LANDED and FAILED no byte moves any more; after UNKNOWN bytes still may."""

    LANDED = "landed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Map(Struct, frozen=True):
    """Map the arena that `reach` names for `session`, then call `mapped` or `unmappable`."""

    session: int
    reach: Reach
    components: tuple[Component, ...]  # as a writer that reaches HBM writes them
    landing: tuple[Component, ...]  # as any other writes them


class Unmap(Struct, frozen=True):
    """The session is over and none of its writes is in flight: release its mapping."""

    session: int


class Write(Struct, frozen=True, kw_only=True):
    """Write one cell's rows into one grant's slots, then call `wrote`.

    `source_slots` and `target_slots` are int64 of equal length, in slots of the component's layout on either side;
    `layers` is [first, end). The slots were checked against both layouts. Nothing is read before `after` is open, if
    there is one.
    """

    session: int
    grant: int
    room: int
    write: int  # unique in its session
    component: int  # index in Register
    layers: tuple[int, int]
    source_slots: NDArray[np.int64]
    target_slots: NDArray[np.int64]
    first_row: int = 0  # in the room, of the first slot
    verify: bool = False  # the outcome needs a checksum of the rows as read
    after: ReadyGate | None = None
    urgent: bool = False  # little of the grant is still to be computed: the room may wait for this write


class StopWriting(Struct, frozen=True):
    """Writes of this grant may stop early; each still reports its outcome."""

    session: int
    grant: int


class FenceWriter(Struct, frozen=True):
    """A write's outcome is unknown: kill the process that writes for this session, then call `fenced`."""

    session: int


class RoomAsked(Struct, frozen=True):
    """A decode rank granted slots to a room that is not open yet; reported with the first Grant that waits for it. Or
    it gave such a room up before its Grant: then there are no `tokens`, and the room fails as soon as it is opened."""

    room: int
    tokens: int
    prefix: int  # tokens that this decode rank has already


class RoomLeased(Struct, frozen=True):
    """Prefill: every decode rank has leased slots for the room, so what is pushed now leaves at once. Decode: this
    rank has leased them."""

    room: int
    tokens: int = 0  # of the room; prefill only, as the next
    prefix: int = 0  # the first tokens that no decode rank needs: rows of them are not sent


class RoomLanded(Struct, frozen=True):
    """Every byte of the room has landed on every decode rank."""

    room: int
    kv_bytes: int  # bytes that were sent


class RoomDrained(Struct, frozen=True):
    """The room has ended, and the engine may reuse its memory. Reported once, as the last event of a room.

    Prefill: nothing reads its pages any more. Decode: nobody writes the slots any more that the engine chose for it.
    """

    room: int


DecodeEffect: TypeAlias = (
    Send | Dial | Offer | Fence | Forget | RoomLeased | Settle | StopSettling | RoomReady | RoomFailed | RoomDrained
    | HangUp | SessionLost | PeerRefused
)  # fmt: skip
PrefillEffect: TypeAlias = (
    Send | Map | Unmap | Write | StopWriting | FenceWriter | RoomAsked | RoomLeased | RoomLanded | RoomFailed
    | RoomDrained | PeerRefused
)  # fmt: skip

DecodeEvent: TypeAlias = RoomReady | RoomFailed | RoomDrained
"""What DecodeClient.poll returns. RoomDrained is the last of a room whose slots the engine chose; other rooms end with
RoomFailed, or with RoomReady once the engine has released them."""

PrefillEvent: TypeAlias = RoomAsked | RoomLeased | RoomLanded | RoomFailed | RoomDrained
"""What PrefillClient.poll returns; RoomDrained is the last of a room."""

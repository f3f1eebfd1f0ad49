"""What the ranks of one worker say to each other: msgpack arrays behind a length, the name of their kind first.

A room goes by the serial number that its leader gave it, and never by its label: a word of an earlier room of the same
label, which may still be on its way, finds nobody.
Not part of the protocol between workers: all ranks of a group run the same version, and joining says so.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ...limits import ADDRESS_LENGTH_MAX, AUX_BYTES_MAX, FRAME_BYTES_MAX, NAME_LENGTH_MAX, TEXT_LENGTH_MAX
from ...wire import Begin, Ranks

LENGTH_BYTES = 4  # little-endian, before each frame
BYTES_MAX = FRAME_BYTES_MAX  # a Begin with the longest prompt is half of it

Serial = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_LENGTH_MAX)]
Cause = Annotated[str, Meta(max_length=32)]
Aux = Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)]
Op = Literal["compute", "generate", "cancel", "free"]
Count = Annotated[int, Meta(ge=0)]


class _Frame(Struct, array_like=True, frozen=True, tag=True):
    """Fields in order, behind the name of the kind."""


class Join(_Frame, frozen=True):
    """Follower: who it is, and what must be the same on all ranks."""

    ranks: Ranks
    node: Name
    common: dict[Name, Text]


class Refuse(_Frame, frozen=True):
    """Leader: it cannot join, and why."""

    detail: Text


class Joined(_Frame, frozen=True):
    """Leader: all ranks are here; they meet at this port for their collectives."""

    port: Count


class Bound(_Frame, frozen=True):
    """Follower: where decode reaches it, and people its metrics."""

    endpoint: Address
    http: Address


class Start(_Frame, frozen=True):
    """Leader: open or expect this room, as the router has begun it."""

    serial: Serial
    begin: Begin


class Turn(_Frame, frozen=True):
    """Leader: give the engine these orders, then step it once."""

    orders: list[tuple[Op, Serial, Aux]]


class Abort(_Frame, frozen=True):
    """Leader: the room has failed. Until it generates, it is the node's to end."""

    serial: Serial
    cause: Cause
    detail: Text


class Introduce(_Frame, frozen=True):
    """Leader of decode: rooms may name these prefill ranks."""

    peers: tuple[Address, ...]


class Reload(_Frame, frozen=True):
    """Leader: read the allow-list anew, whoever is on it."""


class Quit(_Frame, frozen=True):
    """Leader: all rooms are over, end in good order."""


class Asked(_Frame, frozen=True):
    """Follower: somebody has asked this process to end, which takes the whole group."""


class Ready(_Frame, frozen=True):
    """Decode follower: the room is in its arena."""

    serial: Serial
    kv_bytes: Count
    prefix: Count  # tokens that were there already


class Landed(_Frame, frozen=True):
    """Prefill follower: all that it had to write of the room is written."""

    serial: Serial
    kv_bytes: Count
    copy_us: Count
    stamp_ns: Count


class Drained(_Frame, frozen=True):
    """Prefill follower: nothing reads its pages of the room any more."""

    serial: Serial


class Failed(_Frame, frozen=True):
    """Follower: the room has failed here."""

    serial: Serial
    cause: Cause
    detail: Text
    retry_ms: Count


class Picked(_Frame, frozen=True):
    """The rank that ends a pipeline: what decode needs to go on."""

    serial: Serial
    aux: Aux


class Beat(_Frame, frozen=True):
    """Either: still there."""


Report: TypeAlias = Ready | Landed | Drained | Failed | Picked
Frame: TypeAlias = (
    Join | Refuse | Joined | Bound | Start | Turn | Abort | Introduce | Reload | Quit | Asked | Beat | Report
)

_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """With its length before it."""
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode(body: bytes) -> Frame:
    """Raises ValueError for what is no frame."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None

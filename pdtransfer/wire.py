"""Message structs of protocol v1, and msgpack in and out: any bytes give a message or a RemoteProtocolError.

A frame is the array [version, kind, field...]. Within a version fields are only appended, each with a default, so that
a decoder fills what is missing and ignores what is extra. Times are remaining milliseconds; slots are little-endian u32.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

import msgpack
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from .errors import RemoteProtocolError
from .layout import Components, Count16, Count32
from .limits import (
    ADDRESS_LENGTH_MAX,
    AUX_BYTES_MAX,
    COMPONENTS_MAX,
    DIGEST_BYTES_MAX,
    FIELDS_MAX,
    FRAME_BYTES_MAX,
    NAME_LENGTH_MAX,
    PART_EXTENTS_MAX,
    PEERS_MAX,
    PLANES_MAX,
    PROMPT_BYTES_MAX,
    TEXT_LENGTH_MAX,
    TOKENS_BURST_MAX,
    TOKENS_MAX,
)

VERSION = 1

Id64 = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Bytes64 = Annotated[int, Meta(ge=0, le=1 << 62)]
Milliseconds = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
TokenCount = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
GrantNumber = Annotated[int, Meta(ge=1, le=1 << 53)]  # dense from 1; exact in a double for those who log it as JSON
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_LENGTH_MAX)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
Reason = Annotated[str, Meta(min_length=1, max_length=32)]


class Kind(IntEnum):
    """The second field of every frame."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    REGISTER = 4
    REGISTERED = 5
    GRANT = 6
    GRANTED = 7
    LANDED = 8
    RELEASED = 9
    FAILED = 10
    ABORT = 11
    DRAINED = 12
    BEGIN = 13
    BEGUN = 14
    TOKENS = 15
    TOKENS_ACKED = 16
    END = 17
    ENDED = 18
    CANCEL = 19
    LOAD = 20
    PING = 21
    PONG = 22
    GOODBYE = 23


class _Wire(Struct, array_like=True, frozen=True, gc=False):
    """Fields in wire order; a field with a default was appended after v1.0 or is optional from the start."""

    kind: ClassVar[Kind]


class Ranks(Struct, array_like=True, frozen=True):
    """A worker's place in its model's parallel groups; a group of one has rank 0 of size 1."""

    tp_rank: Count16 = 0
    tp_size: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = 1
    pp_rank: Count16 = 0
    pp_size: Annotated[int, Meta(ge=1, le=PEERS_MAX)] = 1
    dp_rank: Count16 = 0
    dp_size: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1


class Identity(Struct, array_like=True, frozen=True):
    """Who a node says it is: what Hello and Welcome carry."""

    node: Name
    role: Literal["prefill", "decode", "router"]
    incarnation: Id64  # a random u64 of one process's life
    ranks: Ranks
    model: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]  # empty for a router
    weights: Digest  # digest of the weights; empty for a router
    window: Annotated[int, Meta(ge=1, le=0xFFFF)]  # unended grants a session that this node accepts
    frame_bytes_max: Annotated[int, Meta(ge=1 << 16, le=FRAME_BYTES_MAX)] = FRAME_BYTES_MAX


class Hello(_Wire):
    """Opens a connection; says which versions the dialler speaks, and repeats until Welcome or Reject."""

    kind = Kind.HELLO
    version_min: Count16
    version_max: Count16
    identity: Identity


class Welcome(_Wire):
    """Answers Hello: the version that both will speak, and who the listener is."""

    kind = Kind.WELCOME
    version: Count16
    identity: Identity


class Reject(_Wire):
    """Refuses a Hello (session 0) or a session; `fields` names each field that was wrong, with both values."""

    kind = Kind.REJECT
    session: Id64
    reason: Reason  # a Cause, or a newer peer's word
    fields: Annotated[tuple[Text, ...], Meta(max_length=FIELDS_MAX)]


class Reach(Struct, array_like=True, frozen=True):
    """How a writer reaches the arena: over shm a Unix socket that hands its descriptor to whoever shows the token."""

    transport: Literal["shm", "mooncake"]
    host: Address  # shm: the boot id, equal only on one host; mooncake: host:port of the engine
    address: Address  # shm: the socket's path, or "@name" in the abstract namespace
    token: Annotated[bytes, Meta(max_length=32)]  # a secret for one hand-over
    base: Bytes64  # mooncake: the arena's address there
    arena_bytes: Bytes64


class Register(_Wire):
    """Opens a session: what this writer may write, and how; repeats until Registered says that all bytes are ready."""

    kind = Kind.REGISTER
    session: Id64
    components: Components  # only this rank's planes; bases are arena offsets
    reach: Reach
    enable_hisparse: bool = False  # what the decode rank can do; last of v1.0


class Registered(_Wire):
    """How many bytes of the arena the writer has ready, from offset 0; grants stay below."""

    kind = Kind.REGISTERED
    session: Id64
    bytes_ready: Bytes64


class Part(Struct, array_like=True, frozen=True):
    """One component's share of a grant: rows [first_row, first_row + rows) of the room, in this order of slots."""

    component: Annotated[int, Meta(ge=0, lt=COMPONENTS_MAX)]  # its place in Register
    first_row: Count32
    rows: Count32
    extents: Annotated[bytes, Meta(max_length=8 * PART_EXTENTS_MAX)]  # u32 start, count pairs; see pack_extents


class Grant(_Wire):
    """Leases slots to one room on this session; repeats until Granted or an end."""

    kind = Kind.GRANT
    session: Id64
    grant: GrantNumber
    room: Id64
    tokens: TokenCount  # the room's total
    prefix: TokenCount  # tokens that decode already holds: their rows are in no part
    parts: Annotated[tuple[Part, ...], Meta(max_length=COMPONENTS_MAX)]  # none: this rank sends no rows
    send_aux: bool  # exactly one rank of a room sends it
    time_left_ms: Milliseconds
    enable_hisparse: bool = False  # what this request wants; last of v1.0


class Granted(_Wire):
    """The grant is known; it will end as Landed, Failed or Drained."""

    kind = Kind.GRANTED
    session: Id64
    grant: GrantNumber


class Landed(_Wire):
    """Every byte of the grant is written: proof that writing has ended. Repeats until Released."""

    kind = Kind.LANDED
    session: Id64
    grant: GrantNumber
    kv_bytes: Bytes64
    aux: Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)]


class Released(_Wire):
    """The end of this grant has arrived, whichever of Landed, Failed, Drained it was; says nothing of the slots."""

    kind = Kind.RELEASED
    session: Id64
    grant: GrantNumber


class Failed(_Wire):
    """The grant failed. Quiescent: proof that writing has ended, repeats until Released. Else Drained follows."""

    kind = Kind.FAILED
    session: Id64
    grant: GrantNumber
    reason: Reason
    detail: Text
    quiescent: bool


class Abort(_Wire):
    """Stop writing for this grant, or refuse it for ever; repeats until Drained, Landed or Failed(quiescent)."""

    kind = Kind.ABORT
    session: Id64
    grant: GrantNumber


class Drained(_Wire):
    """No access of this grant is, or ever will be, in flight. Repeats until Released."""

    kind = Kind.DRAINED
    session: Id64
    grant: GrantNumber


class Sampling(Struct, array_like=True, frozen=True):
    """How decode picks tokens; temperature 0 is greedy."""

    max_tokens: TokenCount
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Id64 = 0
    ignore_eos: bool = False


class Begin(_Wire):
    """The router starts a room on one daemon; repeats until Begun or End."""

    kind = Kind.BEGIN
    room: Id64
    prompt: Annotated[bytes, Meta(max_length=PROMPT_BYTES_MAX)]  # u32 token ids
    sampling: Sampling
    peers: Annotated[
        tuple[Name, ...], Meta(min_length=1, max_length=PEERS_MAX)
    ]  # decode: endpoints of the prefill ranks to dial; prefill: nodes of the decode ranks
    time_left_ms: Milliseconds
    enable_hisparse: bool = False


class Begun(_Wire):
    """Begin has arrived; End will follow."""

    kind = Kind.BEGUN
    room: Id64


class Tokens(_Wire):
    """Generated ids from `first` on; what is not acknowledged is sent again."""

    kind = Kind.TOKENS
    room: Id64
    first: TokenCount
    ids: Annotated[bytes, Meta(max_length=4 * TOKENS_BURST_MAX)]  # u32


class TokensAcked(_Wire):
    """Every generated id below `next` has arrived."""

    kind = Kind.TOKENS_ACKED
    room: Id64
    next: TokenCount


class End(_Wire):
    """The room has ended on this daemon, once; repeats until Ended."""

    kind = Kind.END
    room: Id64
    reason: Reason  # "stop", "length", "done" (prefill), or a Cause
    detail: Text
    tokens: TokenCount  # generated: the router waits for all of them
    retry_ms: Milliseconds = 0  # reason "full": when to ask again
    kv_bytes: Bytes64 = 0  # prefill: written; decode: landed
    copy_us: Bytes64 = 0  # prefill: time that its copies took
    stamp_ns: Bytes64 = 0  # CLOCK_MONOTONIC of the last byte written (prefill), of READY (decode): one host only
    tokens_digest: Digest = b""
    logits_digest: Digest = b""
    kv_digest: Digest = b""


class Ended(_Wire):
    """End has arrived."""

    kind = Kind.ENDED
    room: Id64


class Cancel(_Wire):
    """The router gives the room up; repeats until End."""

    kind = Kind.CANCEL
    room: Id64
    reason: Reason


class Load(_Wire):
    """What a daemon has and has left, sent to its routers when it changes and with every Pong."""

    kind = Kind.LOAD
    ready: bool
    draining: bool
    rooms_running: Count32
    rooms_queued: Count32
    slots_free: Bytes64
    slots_total: Bytes64
    slots_quarantined: Bytes64 = 0
    enable_hisparse: bool = False


class Ping(_Wire):
    """Are you there, and still the one I know?"""

    kind = Kind.PING
    incarnation: Id64


class Pong(_Wire):
    """Answers Ping with the answering process's own incarnation."""

    kind = Kind.PONG
    incarnation: Id64


class Goodbye(_Wire):
    """This process ends its sessions in good order."""

    kind = Kind.GOODBYE
    incarnation: Id64
    reason: Reason


Message: TypeAlias = (
    Hello | Welcome | Reject | Register | Registered | Grant | Granted | Landed | Released | Failed | Abort | Drained
    | Begin | Begun | Tokens | TokensAcked | End | Ended | Cancel | Load | Ping | Pong | Goodbye
)  # fmt: skip

MESSAGES: dict[int, type[Message]] = {int(message.kind): message for message in get_args(Message)}


def encode(message: Message) -> bytes:
    """One frame; every field is written, defaults too."""
    fields: list[object] = msgspec.to_builtins(message, builtin_types=(bytes,))
    frame: bytes = msgpack.packb([VERSION, int(message.kind), *fields], use_bin_type=True)
    assert len(frame) <= FRAME_BYTES_MAX, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame, or RemoteProtocolError that names the field; nothing else, whatever the bytes."""
    if len(frame) > FRAME_BYTES_MAX:
        raise RemoteProtocolError("frame", f"{len(frame)} bytes, the limit is {FRAME_BYTES_MAX}")
    try:
        raw: object = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=4 * TEXT_LENGTH_MAX,
            max_bin_len=max(8 * PART_EXTENTS_MAX, PROMPT_BYTES_MAX),
            max_array_len=PLANES_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError("frame", f"not msgpack within the limits: {str(error)[:200]}") from None
    if not isinstance(raw, list) or len(raw) < 2:  # pyright: ignore[reportUnknownArgumentType]
        raise RemoteProtocolError("frame", "not an array [version, kind, field...]")
    version, kind, *fields = raw  # pyright: ignore[reportUnknownVariableType]
    if type(version) is not int or version != VERSION:
        raise RemoteProtocolError("version", f"{str(version)[:32]!r}, this side speaks {VERSION}")  # pyright: ignore[reportUnknownArgumentType]
    message_type = MESSAGES.get(kind) if type(kind) is int else None
    if message_type is None:
        raise RemoteProtocolError("kind", f"{str(kind)[:32]!r} is none of v{VERSION}'s")  # pyright: ignore[reportUnknownArgumentType]
    try:
        return msgspec.convert(fields, message_type, strict=True)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(*_named(message_type, str(error))) from None


_PATH = re.compile(r" - at `\$([^`]*)`$")


def _named(message_type: type[Message], text: str) -> tuple[str, str]:
    """msgspec's path `$[6][0][3]` as `Grant.parts[0].extents`, and its text without the path."""
    raise NotImplementedError((message_type, text, _PATH))


def pack_extents(extents: NDArray[np.int64]) -> bytes:
    """(n, 2) int64 of start, count as the wire's little-endian u32 pairs."""
    return extents.astype("<u4").tobytes()


def unpack_extents(field: str, data: bytes) -> NDArray[np.int64]:
    """The wire's u32 pairs as (n, 2) int64; RemoteProtocolError when they are no pairs or a count is 0."""
    if len(data) % 8:
        raise RemoteProtocolError(field, f"{len(data)} bytes are not pairs of u32")
    extents = np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)
    if not extents[:, 1].all():
        raise RemoteProtocolError(field, "an extent of 0 slots")
    return extents


def pack_ids(ids: NDArray[np.int64] | list[int]) -> bytes:
    """Token ids as little-endian u32."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(field: str, data: bytes) -> NDArray[np.int64]:
    """The wire's u32 token ids as int64; RemoteProtocolError when the length is no multiple of 4."""
    if len(data) % 4:
        raise RemoteProtocolError(field, f"{len(data)} bytes are not u32 ids")
    return np.frombuffer(data, "<u4").astype(np.int64)

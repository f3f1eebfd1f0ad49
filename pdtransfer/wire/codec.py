"""msgpack in and out: any bytes give a message or a RemoteProtocolError, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, cast

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import RemoteProtocolError
from ..limits import (
    ARRAYS_MAX,
    FRAME_BYTES_MAX,
    PEERS_MAX,
    PLANE_BYTES_MIN,
    PLANES_MAX,
    VALUES_MAX,
)
from .blame import blame, shown
from .messages import MESSAGES, VERSION, Message

# What we make ourselves needs no limits: msgspec writes the same bytes four times as fast as msgpack.
_encoder = msgspec.msgpack.Encoder()

# msgpack brings no types.
_unpack = cast("Callable[..., object]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def encode(message: Message) -> bytes:
    """One frame; every field is written, defaults too. Bounds are not checked: our peer does that, and the tests do."""
    frame = _encoder.encode((VERSION, int(message.kind), *msgspec.structs.astuple(message)))
    assert len(frame) <= FRAME_BYTES_MAX, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame, or RemoteProtocolError that names the field; nothing else, whatever the bytes."""
    frame_bytes = len(frame)
    if frame_bytes > FRAME_BYTES_MAX:
        raise RemoteProtocolError("frame", f"{frame_bytes} bytes, the limit is {FRAME_BYTES_MAX}")
    try:
        raw = _unpack(
            frame,
            raw=False,
            # One that is too long for its field is refused there, under the field's name.
            max_str_len=FRAME_BYTES_MAX,
            max_bin_len=FRAME_BYTES_MAX,
            # msgpack makes room for what an array's head promises, at every depth: hold promises to what may follow.
            max_array_len=max(PEERS_MAX, min(PLANES_MAX, frame_bytes // PLANE_BYTES_MIN)),
            max_map_len=0,
            max_ext_len=0,
            object_hook=_refuse_map,
            ext_hook=_refuse_ext,
            # A shorter frame cannot hold more than either limit.
            list_hook=_census() if frame_bytes > ARRAYS_MAX else None,
        )
    except ValueError as error:
        raise RemoteProtocolError("frame", f"not msgpack within the limits: {_fault(error)}") from None
    array = cast("list[object]", raw)
    if not isinstance(raw, list) or len(array) < 2:
        raise RemoteProtocolError("frame", f"{shown(array)}, expected an array [version, kind, field...]")
    version, kind, *fields = array
    if type(version) is not int or version != VERSION:
        raise RemoteProtocolError("version", f"{shown(version)}, this side speaks {VERSION}")
    message_type = MESSAGES.get(kind) if type(kind) is int else None
    if message_type is None:
        raise RemoteProtocolError("kind", f"{shown(kind)}, v{VERSION} has {min(MESSAGES)} to {max(MESSAGES)}")
    try:
        # Without builtin_types a str would do for bytes, as base64.
        return msgspec.convert(fields, message_type, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise blame(message_type, fields, str(error)) from None


def _refuse_map(_: object) -> NoReturn:
    raise ValueError("a map: v1 has none")


def _refuse_ext(_code: int, _payload: bytes) -> NoReturn:
    raise ValueError("an ext: v1 has none")


def _census() -> Callable[[list[object]], list[object]]:
    """Counts a frame's arrays and their elements as msgpack makes them: an empty array is 1 byte there, 64 here."""
    arrays = values = 0

    def count(array: list[object]) -> list[object]:
        nonlocal arrays, values
        arrays += 1
        values += len(array)
        if arrays > ARRAYS_MAX:
            raise ValueError(f"more than {ARRAYS_MAX} arrays")
        if values > VALUES_MAX:
            raise ValueError(f"more than {VALUES_MAX} values in arrays")
        return array

    return count


def _fault(error: BaseException) -> str:
    match error:
        case msgpack.StackError():
            return "nested too deep"
        case msgpack.ExtraData():
            return "bytes after the end of the array"
        case msgpack.FormatError():
            return "a byte that begins no value"
        case UnicodeDecodeError():
            return f"a str that is not UTF-8: {error.reason}"
        case _:
            return str(error)[:200]


def negotiate(*, ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The highest version in both ranges (min, max), ends included; RemoteProtocolError that names both otherwise."""
    assert ours[0] <= ours[1], ours
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise RemoteProtocolError(
            "version", f"the peer speaks {theirs[0]} to {theirs[1]}, this side {ours[0]} to {ours[1]}"
        )
    return version


def pack_extents(extents: NDArray[np.int64]) -> bytes:
    """(n, 2) int64 of start, count as the wire's little-endian u32 pairs."""
    assert not np.count_nonzero(extents >> 32), "an extent beyond u32"
    return extents.astype("<u4").tobytes()


def unpack_extents(field: str, data: bytes) -> NDArray[np.int64]:
    """The wire's u32 pairs as (n, 2) int64; RemoteProtocolError when they are no pairs or a count is 0."""
    if len(data) % 8:
        raise RemoteProtocolError(field, f"{len(data)} bytes, expected pairs of u32")
    extents = np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)
    if np.count_nonzero(extents[:, 1]) < len(extents):  # in a tenth of the time of all()
        place = int(np.argmin(extents[:, 1]))
        raise RemoteProtocolError(field, f"extent {place} is 0 slots from {extents[place, 0]}, expected 1 at least")
    return extents


def pack_ids(ids: NDArray[np.int64] | list[int]) -> bytes:
    """Token ids as little-endian u32."""
    array = np.asarray(ids, dtype=np.int64)
    assert not array.size or (array.min() >= 0 and array.max() <= 0xFFFF_FFFF), "a token id beyond u32"
    return array.astype("<u4").tobytes()


def unpack_ids(field: str, data: bytes) -> NDArray[np.int64]:
    """The wire's u32 token ids as int64; RemoteProtocolError when the length is no multiple of 4."""
    if len(data) % 4:
        raise RemoteProtocolError(field, f"{len(data)} bytes, expected u32 ids")
    return np.frombuffer(data, "<u4").astype(np.int64)

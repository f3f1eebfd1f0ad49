"""msgpack encoding of messages. Any bytes decode to a message or a RemoteProtocolError, in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, cast

import msgpack
import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from ..errors import RemoteProtocolError
from ..limits import ARRAYS_MAX, FRAME_BYTES_MAX, PEERS_MAX, PLANE_BYTES_MIN, PLANES_MAX, TEXT_LENGTH_MAX, VALUES_MAX
from .messages import MESSAGES, VERSION, Message

KEY_LENGTH = 40  # Z85 characters of a 32-byte key

_PATH = re.compile(r" - at `\$((?:\[\d+\])+)`\Z")
_FIELD = re.compile(r"([a-z_]\w*(?:\[\d+\])?(?:\.[a-z_]\w*(?:\[\d+\])?)*): (.*)", re.DOTALL)
_GOT = re.compile(r", got `\w+`\Z")
_DISPLAY_LENGTH_MAX = 64
_model = cache(inspect.type_info)

# Encoding needs no limits, and msgspec writes the same bytes several times faster than msgpack.
_encoder = msgspec.msgpack.Encoder()

# msgpack has no type stubs.
_unpack = cast("Callable[..., object]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def encode(message: Message) -> bytes:
    """Encodes one frame; writes every field, defaults too. Does not check bounds: the receiver and the tests do."""
    frame = _encoder.encode((VERSION, message.kind, *msgspec.structs.astuple(message)))
    assert len(frame) <= FRAME_BYTES_MAX, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """Decodes the message in a frame. Raises RemoteProtocolError that names the field, and nothing else."""
    frame_bytes = len(frame)
    if frame_bytes > FRAME_BYTES_MAX:
        raise RemoteProtocolError("frame", f"{frame_bytes} bytes, the limit is {FRAME_BYTES_MAX}")
    try:
        raw = _unpack(
            frame,
            raw=False,
            # Values too long for their field are refused later, under the field's name.
            max_str_len=FRAME_BYTES_MAX,
            max_bin_len=FRAME_BYTES_MAX,
            # msgpack allocates what an array's header announces: bound it by the bytes that may follow.
            max_array_len=max(PEERS_MAX, min(PLANES_MAX, frame_bytes // PLANE_BYTES_MIN)),
            max_map_len=0,
            max_ext_len=0,
            object_hook=_refuse_map,
            ext_hook=_refuse_ext,
            # A shorter frame cannot exceed either limit.
            list_hook=_array_limits() if frame_bytes > ARRAYS_MAX else None,
        )
    except ValueError as error:
        raise RemoteProtocolError("frame", f"not msgpack within the limits: {_unpack_error(error)}") from None
    array = cast("list[object]", raw)
    if not isinstance(raw, list) or len(array) < 2:
        raise RemoteProtocolError("frame", f"{display(array)}, expected an array [version, kind, field...]")
    version, kind, *fields = array
    if type(version) is not int or version != VERSION:
        raise RemoteProtocolError("version", f"{display(version)}, this side speaks {VERSION}")
    message_type = MESSAGES.get(kind) if type(kind) is int else None
    if message_type is None:
        raise RemoteProtocolError("kind", f"{display(kind)}, v{VERSION} has {min(MESSAGES)} to {max(MESSAGES)}")
    try:
        # Without builtin_types, msgspec would accept a base64 str for bytes.
        return msgspec.convert(fields, message_type, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise field_error(message_type, fields, str(error)) from None


def _refuse_map(_: object) -> NoReturn:
    raise ValueError("a map; v1 has none")


def _refuse_ext(_code: int, _payload: bytes) -> NoReturn:
    raise ValueError("an ext; v1 has none")


def _array_limits() -> Callable[[list[object]], list[object]]:
    """Counts a frame's arrays and elements while msgpack creates them: an array of one byte takes far more memory."""
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


def _unpack_error(error: BaseException) -> str:
    match error:
        case msgpack.StackError():
            return "nested too deeply"
        case msgpack.ExtraData():
            return "bytes after the end of the array"
        case msgpack.FormatError():
            return "an invalid first byte of a value"
        case UnicodeDecodeError():
            return f"a str that is not UTF-8: {error.reason}"
        case _:
            return str(error)[:200]


def field_error(message_type: type[Message], fields: list[object], text: str) -> RemoteProtocolError:
    """Turns msgspec's error into a RemoteProtocolError with the field, the value and its bound.

    Follows msgspec's path, such as `$[5][0][3]`, through structs and values to `Grant.parts[0].extents`.
    """
    located = _PATH.search(text)
    path = [int(index) for index in re.findall(r"\d+", located[1])] if located else []
    expected = text[: located.start()] if located else text
    name, model = message_type.__name__, _model(message_type)
    value = cast("object", fields)
    for index in path:
        if isinstance(model, inspect.StructType):
            name, model = f"{name}.{model.fields[index].name}", model.fields[index].type
        else:
            assert isinstance(model, inspect.VarTupleType), model
            name, model = f"{name}[{index}]", model.item_type
        value = cast("list[object]", value)[index]
    if not expected.startswith(("Expected ", "Invalid enum value ")):
        # A struct's own check names the values; a field name at its start becomes part of the path.
        inner = _FIELD.match(expected)
        return _error(f"{name}.{inner[1]}", inner[2]) if inner else _error(name, expected)
    if isinstance(model, inspect.StructType) and isinstance(value, list):
        count, count_min = len(cast("list[object]", value)), sum(field.required for field in model.fields)
        return _error(f"{name}.{model.fields[count].name}", f"missing: {count} fields, expected {count_min} at least")
    return _error(name, f"{display(value)}, expected {_bound(model, expected)}")


def _error(field: str, text: str) -> RemoteProtocolError:
    """Shortens the text so that it fits into a Reject."""
    return RemoteProtocolError(field, text[: TEXT_LENGTH_MAX - len(field) - 2])


def _bound(model: inspect.Type, expected: str) -> str:
    if isinstance(model, inspect.LiteralType):
        return "one of " + ", ".join(repr(value) for value in model.values)
    return _GOT.sub("", expected.removeprefix("Expected ")).replace("`", "")


def display(value: object) -> str:
    """Formats a peer's value for people: short, on one line, and never nested."""
    match value:
        case str():
            text = repr(value[:_DISPLAY_LENGTH_MAX])
            whole = len(value) <= _DISPLAY_LENGTH_MAX and len(text) <= 2 * _DISPLAY_LENGTH_MAX
            return text if whole else f"{text[: 2 * _DISPLAY_LENGTH_MAX]}... ({len(value)} characters)"
        case bytes():
            return f"{len(value)} bytes"
        case list():
            return f"an array of {len(cast('list[object]', value))}"
        case dict():
            return f"an object of {len(cast('dict[object, object]', value))}"
        case int() if value.bit_length() > 64:  # Python refuses to write very long ones
            return f"an integer of {value.bit_length()} bits"
        case _:
            return repr(value)


def negotiate(*, ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """Returns the highest version in both ranges (min, max), ends included; raises RemoteProtocolError for none."""
    assert ours[0] <= ours[1], ours
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise RemoteProtocolError(
            "version", f"the peer speaks {theirs[0]} to {theirs[1]}, this side {ours[0]} to {ours[1]}"
        )
    return version


def pack_extents(extents: NDArray[np.int64]) -> bytes:
    """Encodes (n, 2) int64 of start, count as little-endian u32 pairs."""
    assert not np.count_nonzero(extents >> 32), "an extent beyond u32"
    return extents.astype("<u4").tobytes()


def unpack_extents(field: str, data: bytes) -> NDArray[np.int64]:
    """Decodes u32 pairs to (n, 2) int64. Raises RemoteProtocolError for a wrong length or a count of 0."""
    if len(data) % 8:
        raise RemoteProtocolError(field, f"{len(data)} bytes, expected pairs of u32")
    extents = np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)
    if np.count_nonzero(extents[:, 1]) < len(extents):  # much faster than all()
        index = int(np.argmin(extents[:, 1]))
        raise RemoteProtocolError(field, f"extent {index} is 0 slots from {extents[index, 0]}, expected at least 1")
    return extents


def pack_ids(ids: NDArray[np.integer[Any]] | list[int]) -> bytes:
    """Encodes token ids as little-endian u32."""
    array = np.asarray(ids, dtype=np.int64)
    assert not array.size or (array.min() >= 0 and array.max() <= 0xFFFF_FFFF), "a token id beyond u32"
    return array.astype("<u4").tobytes()


def unpack_ids(field: str, data: bytes) -> NDArray[np.int64]:
    """Decodes u32 token ids to int64. Raises RemoteProtocolError for a length that is not a multiple of 4."""
    if len(data) % 4:
        raise RemoteProtocolError(field, f"{len(data)} bytes, expected u32 ids")
    return np.frombuffer(data, "<u4").astype(np.int64)


def split_key(endpoint: str) -> tuple[str, str]:
    """Splits [KEY@]tcp://host:port into KEY, empty for none, and the rest; KEY may contain '@' and ':'."""
    if endpoint[KEY_LENGTH : KEY_LENGTH + 7] == "@tcp://":
        return endpoint[:KEY_LENGTH], endpoint[KEY_LENGTH + 1 :]
    return "", endpoint

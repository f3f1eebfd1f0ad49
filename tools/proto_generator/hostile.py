"""Frames that no encoder here would make: odd but lawful encodings, and every way to break a frame or a rule."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, cast

import msgpack

from pdtransfer.limits import ARRAYS_MAX, FRAME_BYTES_MAX, PEERS_MAX, PLANES_MAX, VALUES_MAX

from .specimens import component, plane, register

_RELEASED = b"\x01\x09\x01\x01"  # version, kind, session, grant: what any four-field array may open with


def pack(array: Any) -> bytes:
    """Plain msgpack, as a stranger has it."""
    return cast("bytes", msgpack.packb(array, use_bin_type=True))  # pyright: ignore[reportUnknownMemberType]


def _wide(value: Any, *, signed: bool) -> bytes:
    """msgpack with every head in its widest form."""
    match value:
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return struct.pack(">Bq", 0xD3, value) if signed and value < 2**63 else struct.pack(">BQ", 0xCF, value)
        case float():
            return struct.pack(">Bd", 0xCB, value)
        case str():
            return struct.pack(">BI", 0xDB, len(value.encode())) + value.encode()
        case bytes():
            return struct.pack(">BI", 0xC6, len(value)) + value
        case list():
            items = cast("list[Any]", value)
            return struct.pack(">BI", 0xDD, len(items)) + b"".join(_wide(item, signed=signed) for item in items)
        case _:
            raise TypeError(value)


def odd_encodings(specimens: dict[str, list[Any]]) -> Iterator[tuple[str, bytes, list[Any]]]:
    """(name, frame, the array that it encodes)."""
    for name, array in specimens.items():
        yield f"{name}, every value in its widest form", _wide(array, signed=False), array
    yield "Released, integers as int64", _wide(specimens["Released"], signed=True), specimens["Released"]
    begin = list(specimens["Begin"])
    begin[4] = [128, 1.0, 1.0, 42, True]
    yield "Begin, integers for floats", pack([*begin[:4], [128, 1, 1, 42, True], *begin[5:]]), begin
    begin[4] = [128, 0.5, 0.25, 42, True]
    narrow = msgpack.packb(begin, use_bin_type=True, use_single_float=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    yield "Begin, floats as float32", cast("bytes", narrow), begin
    released = [1, 9, 1, 1]
    yield f"frame of exactly {FRAME_BYTES_MAX} bytes", _padded(FRAME_BYTES_MAX), released
    yield f"frame with exactly {ARRAYS_MAX} arrays", _arrays(ARRAYS_MAX), released
    yield f"frame with exactly {VALUES_MAX} values", _values(VALUES_MAX), released
    yield f"frame with an unknown array of {PEERS_MAX} short elements", pack([*released, [None] * PEERS_MAX]), released


def _padded(frame_bytes: int) -> bytes:
    head = b"\x95" + _RELEASED + b"\xc6"
    rest = frame_bytes - len(head) - 4
    return head + struct.pack(">I", rest) + bytes(rest)


def _arrays(count: int) -> bytes:
    """A Released with an unknown field, in which there are enough empty arrays that all are `count`."""
    full, rest = divmod(count - 3, 257)
    inner = [b"\xdc\x01\x00" + b"\x90" * 256] * full + [struct.pack(">BH", 0xDC, rest) + b"\x90" * rest]
    return b"\x95" + _RELEASED + struct.pack(">BH", 0xDC, len(inner)) + b"".join(inner)


def _values(count: int) -> bytes:
    """A Released with an unknown field, in which there are enough nils that all elements of arrays are `count`."""
    full, rest = divmod(count - 5 - 17, PLANES_MAX)
    assert full <= 16
    lengths = [PLANES_MAX] * full + [rest] + [0] * (16 - full)
    inner = b"".join(struct.pack(">BI", 0xDD, length) + b"\xc0" * length for length in lengths)
    return b"\x95" + _RELEASED + b"\xdc\x00\x11" + inner


def frames() -> Iterator[tuple[str, bytes, str]]:
    """(name, frame, field to name): not the array of a v1 message."""
    hello = pack([1, 9, 1, 1])
    yield "nothing", b"", "frame"
    yield "a str for a frame", pack("hello"), "frame"
    yield "an int for a frame", b"\x01", "frame"
    yield "nil for a frame", b"\xc0", "frame"
    yield "an empty array", b"\x90", "frame"
    yield "an array of the version alone", b"\x91\x01", "frame"
    yield "an empty map", b"\x80", "frame"
    yield "an empty map as an unknown field", b"\x95" + _RELEASED + b"\x80", "frame"
    yield "a map as an unknown field", b"\x95" + _RELEASED + b"\x81\x01\x01", "frame"
    yield "an empty ext as an unknown field", b"\x95" + _RELEASED + b"\xc7\x00\x05", "frame"
    yield "an ext as an unknown field", b"\x95" + _RELEASED + b"\xd4\x05\x00", "frame"
    yield "a timestamp as an unknown field", b"\x95" + _RELEASED + b"\xd6\xff\x00\x00\x00\x00", "frame"
    yield "a timestamp of no bytes", b"\x95" + _RELEASED + b"\xc7\x00\xff", "frame"
    yield "a byte that msgpack never uses", b"\x95" + _RELEASED + b"\xc1", "frame"
    yield "the last byte missing", hello[:-1], "frame"
    yield "one byte too many", hello + b"\x00", "frame"
    yield "two messages", hello + hello, "frame"
    for name, text in (
        ("cut UTF-8", b"\xe2\x82"),
        ("a surrogate in UTF-8", b"\xed\xa0\x80"),
        ("overlong UTF-8", b"\xc0\x80"),
        ("UTF-8 beyond U+10FFFF", b"\xf4\x90\x80\x80"),
    ):
        yield name, b"\x94\x01\x13\x01" + bytes([0xA0 + len(text)]) + text, "frame"
    for name, head in (("array", b"\xdd"), ("str", b"\xdb"), ("bin", b"\xc6"), ("map", b"\xdf"), ("ext", b"\xc9")):
        yield f"an {name} that promises 2^32 - 1", b"\x95" + _RELEASED + head + b"\xff\xff\xff\xff", "frame"
    yield "arrays that promise 32,768 elements at every depth", b"\xdc\x80\x00" * 1000, "frame"
    yield "arrays nested 2,000 deep", b"\x91" * 2000 + b"\xc0", "frame"
    yield "arrays nested 2,000 deep for a version", b"\x94" + b"\x91" * 2000 + b"\xc0\x09\x01\x01", "frame"
    yield "arrays nested 500 deep for a version", b"\x94" + b"\x91" * 500 + b"\xc0\x09\x01\x01", "version"
    yield "arrays nested 500 deep for a kind", b"\x94\x01" + b"\x91" * 500 + b"\xc0\x01\x01", "kind"
    yield f"{FRAME_BYTES_MAX + 1} bytes", _padded(FRAME_BYTES_MAX + 1), "frame"
    yield f"{ARRAYS_MAX + 1} arrays", _arrays(ARRAYS_MAX + 1), "frame"
    yield f"{VALUES_MAX + 1} values", _values(VALUES_MAX + 1), "frame"
    yield f"an array of {PEERS_MAX + 1} short elements", pack([1, 9, 1, 1, [None] * (PEERS_MAX + 1)]), "frame"
    promise = struct.pack(">BI", 0xDD, PLANES_MAX + 1) + bytes(8 * (PLANES_MAX + 1))
    yield f"an array of {PLANES_MAX + 1} elements", b"\x95" + _RELEASED + promise, "frame"
    for value in (0, 2, -1, 2**63, 2**64 - 1, True, 1.0, "1", b"\1", None):
        yield f"version {value!r}", pack([value, 9, 1, 1]), "version"
    for value in (0, 24, -1, 256 + 9, 2**63, 2**64 - 1, True, 9.0, "9", b"\11", None):
        yield f"kind {value!r}", pack([1, value, 1, 1]), "kind"


def rules() -> Iterator[tuple[str, list[Any], str]]:
    """(name, array, struct to name, or a field in it): every value within its bounds, but not together."""
    of_span, of_layout = "Register.components[0].span", "Register.components[0].layout"
    for page_size in (3, 48, (1 << 20) - 1):
        bad = register(component([plane(page_stride=1 << 40)], page_size, page_size))
        yield f"page_size {page_size} is no power of two", bad, of_layout
    bad = register(component([plane(page_stride=64 * 1152)], 64, 4097))
    yield "slots no multiple of page_size", bad, of_layout
    for dtype in ("", "float4", "BFLOAT16", "bfloat16 "):
        yield f"dtype {dtype!r}", register(component([plane(dtype=dtype)], 1, 4096)), of_layout
    for kind in ("k\n", "k\u00fc", "\x00"):
        yield f"kind {kind!r}", register(component([plane(kind=kind)], 1, 4096)), of_layout
    yield "no head", register(component([plane(head_count=0)], 1, 4096)), of_layout
    bad = register(component([plane(row_bytes=1151)], 1, 4096))
    yield "row_bytes no multiple of the dtype", bad, of_layout
    bad = register(component([plane(head_count=5)], 1, 4096))
    yield "row_bytes no multiple of the heads", bad, of_layout
    for tokens, kind in ((1, "all"), (0, "last"), (1, "once")):
        bad = register(["latent", "dram", 1, [kind, tokens], component([plane()], 1, 4096)[4]])
        yield f"span {kind} of {tokens}", bad, of_span
    layouts = {
        "a head twice": [plane(), plane(base=1152)],
        "heads that overlap": [plane(head_count=4), plane(base=1152, head_start=3)],
        "planes on the same bytes": [plane(), plane(layer=1)],
        "planes one byte into each other": [plane(), plane(layer=1, base=1151)],
    }
    for name, planes in layouts.items():
        yield name, register(component(planes, 1, 4096)), of_layout
    strides = {
        "pages that overlap": [plane(page_stride=1151)],
        "rows that overlap in a page": [plane(page_stride=1 << 20, row_stride=1151)],
        "a page that is longer than its stride": [plane(page_stride=64 * 1152 - 1)],
        "bytes beyond 2^62": [plane(base=2**62)],
        "pages beyond 2^62": [plane(page_stride=2**62)],
        "pages beyond 2^64": [plane(page_stride=2**62, base=2**61)],
    }
    for name, planes in strides.items():
        yield name, register(component(planes, 64, 1 << 40)), of_layout


def contents(specimens: dict[str, list[Any]]) -> Iterator[tuple[str, list[Any], str]]:
    """(name, array, field to name): what a bin holds is no u32s, or makes no sense."""
    grant, begin, tokens = (specimens[name] for name in ("Grant", "Begin", "Tokens"))
    for name, extents in (("7 bytes", bytes(7)), ("half a pair", bytes(4)), ("a count of 0", bytes(8))):
        bad = [*grant[:7], [[0, 0, 1000, extents]], *grant[8:]]
        yield f"extents of {name}", bad, "Grant.parts[0].extents"
    yield "prompt of 3 bytes", [*begin[:3], bytes(3), *begin[4:]], "Begin.prompt"
    yield "ids of 5 bytes", [*tokens[:4], bytes(5)], "Tokens.ids"

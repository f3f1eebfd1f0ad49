import math
import tracemalloc
import typing

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.limits import FRAME_BYTES_MAX, PLANES_MAX, TEXT_LENGTH_MAX
from pdtransfer.wire import (
    MESSAGES,
    VERSION,
    Begin,
    Failed,
    Grant,
    Hello,
    Part,
    Register,
    Released,
    Sampling,
    decode,
    encode,
    negotiate,
    pack_extents,
    pack_ids,
    unpack_extents,
    unpack_ids,
)
from pdtransfer.wire.codec import field_error
from tests.library import fuzz_wire
from tests.support.effort import some
from tools.proto_generator.specimens import SPECIMENS

GRANT = [1, 7, 5, 1000, 0, [[0, 0, 1000, bytes(7) + b"\1"]], True, 60000, True]


def frame(kind, *fields):
    return msgpack.packb([VERSION, int(kind), *fields], use_bin_type=True)


def changed(fields, path, value):
    """Returns a copy of nested lists with another value at `path`."""
    copy = list(fields)
    copy[path[0]] = changed(copy[path[0]], path[1:], value) if path[1:] else value
    return copy


def refusal(content):
    with pytest.raises(RemoteProtocolError) as caught:
        decode(content)
    return caught.value


# Round trips


def of_type(model):
    """Values that the wire allows for a type as msgspec describes it."""
    inspect = msgspec.inspect
    match model:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=least, le=most, lt=below):
            most = most if most is not None else (2**64 - 1 if below is None else below - 1)
            return st.one_of(st.just(least), st.just(most), st.integers(least, most))
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least or 5e-324, most)
        case inspect.StrType(min_length=least, max_length=most, pattern=None):
            return st.text(min_size=least or 0, max_size=min(most, 40))
        case inspect.StrType(pattern=pattern):
            return st.from_regex(pattern).filter(lambda text: len(text) <= model.max_length)
        case inspect.BytesType(max_length=most):
            return st.binary(max_size=min(most, 80))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return st.lists(of_type(item), min_size=least or 0, max_size=min(most, 4)).map(tuple)
        case inspect.StructType(cls=cls, fields=fields) if cls.__name__ == "Component":
            return st.just(decode(frame(*SPECIMENS["Register"][1:])).components[0])
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: of_type(field.type) for field in fields})


ANY_MESSAGE = st.one_of([of_type(msgspec.inspect.type_info(message)) for message in MESSAGES.values()])


@given(ANY_MESSAGE)
@settings(max_examples=some(150), deadline=None)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


@given(ANY_MESSAGE)
@settings(max_examples=some(50), deadline=None)
def test_a_frame_may_lie_in_any_buffer(message):
    assert decode(memoryview(bytearray(encode(message)))) == message


def test_the_largest_register_fits_its_frame():
    planes = [[n // 256, "kv"[n % 2], "bfloat16", n // 2 % 128, 1, n << 20, 256, 256, 256] for n in range(PLANES_MAX)]
    component = ["kv", "dram", 1, ["all", 0], [planes, 1, 4096]]
    message = decode(frame(4, 1, [component], SPECIMENS["Register"][4]))
    assert len(message.components[0].layout.planes) == PLANES_MAX
    assert decode(encode(message)) == message


# An error names the field, the value and its bound


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ((3,), 2**24 + 1, "Grant.tokens: 16777217, expected int <= 16777216"),
        ((1,), 0, "Grant.grant: 0, expected int >= 1"),
        ((1,), True, "Grant.grant: True, expected int"),
        ((1,), 7.0, "Grant.grant: 7.0, expected int"),
        ((1,), 2**53 + 1, "Grant.grant: 9007199254740993, expected int <= 9007199254740992"),
        ((0,), -1, "Grant.session: -1, expected int >= 0"),
        ((2,), None, "Grant.room: None, expected int"),
        ((6,), 1, "Grant.send_aux: 1, expected bool"),
        ((5,), "parts", "Grant.parts: 'parts', expected array"),
        ((5,), [GRANT[5][0]] * 17, "Grant.parts: an array of 17, expected array of length <= 16"),
        ((5, 0), 3, "Grant.parts[0]: 3, expected array"),
        ((5, 0), [0, 0], "Grant.parts[0].rows: missing: 2 fields, expected 4 at least"),
        ((5, 0, 0), 16, "Grant.parts[0].component: 16, expected int <= 15"),
        ((5, 0, 3), bytes(2**20 + 1), "Grant.parts[0].extents: 1048577 bytes, expected bytes of length <= 1048576"),
        ((5, 0, 3), "AAAA", "Grant.parts[0].extents: 'AAAA', expected bytes"),
        ((7,), 2**64 - 1, "Grant.time_left_ms: 18446744073709551615, expected int <= 4294967295"),
    ],
)
def test_an_error_names_the_field_the_value_and_its_bound(path, value, text):
    assert str(refusal(frame(6, *changed(GRANT, path, value)))) == text


def test_an_error_counts_elements_from_0_in_every_part():
    fields = changed(GRANT, (5,), [GRANT[5][0], [1, 0, -1, b""]])
    assert refusal(frame(6, *fields)).field == "Grant.parts[1].rows"


@pytest.mark.parametrize(
    ("name", "path", "value", "text"),
    [
        ("Hello", (2, 1), "writer", "Hello.identity.role: 'writer', expected one of 'decode', 'prefill', 'router'"),
        ("Hello", (2, 1), "` - at `$[9]`", "Hello.identity.role: '` - at `$[9]`', expected one of 'decode', "),
        ("Hello", (2, 0), "", "Hello.identity.node: '', expected str of length >= 1"),
        ("Hello", (2, 3, 1), 0, "Hello.identity.ranks.tp_size: 0, expected int >= 1"),
        ("Begin", (2, 2), math.nan, "Begin.sampling.top_p: nan, expected float > 0.0"),
        ("Begin", (2, 1), math.inf, "Begin.sampling.temperature: inf, expected float <= 100.0"),
        ("Begin", (3, 0), b"x", "Begin.peers[0]: 1 bytes, expected str"),
        ("Reject", (2, 0), "x" * 513, f"Reject.fields[0]: '{'x' * 64}'... (513 characters), expected str of length <="),
        ("Register", (1, 0, 4, 0, 0, 2), "float", "Register.components[0].layout.planes[0].dtype: 'float' must be "),
        ("Register", (1, 0, 4, 1), 48, "Register.components[0].layout.page_size: 48 is not a power of two"),
    ],
)  # fmt: skip
def test_an_error_is_exact_inside_structs_and_in_their_own_rules(name, path, value, text):
    _, kind, *fields = SPECIMENS[name]
    assert str(refusal(frame(kind, *changed(fields, path, value)))).startswith(text)


@pytest.mark.parametrize("value", ["\0" * 512, "\U000e0001" * 512, "x\n\x1b[2J" * 100, "\u2028" * 200])
def test_an_error_fits_a_reject_and_is_one_line(value):
    # A failing peer's reason is logged, and sent back to it.
    _, kind, *fields = SPECIMENS["Hello"]
    for path in ((2, 0), (2, 1), (2, 4)):
        error = refusal(frame(kind, *changed(fields, path, value)))
        assert len(str(error)) <= TEXT_LENGTH_MAX
        assert str(error).isprintable()
    reject = decode(encode(MESSAGES[3](0, "breach", (str(error),))))
    assert reject.fields == (str(error),)


def test_a_structs_long_error_still_fits_a_reject():
    error = field_error(Register, SPECIMENS["Register"][2:], "planes: " + "much " * 200 + " - at `$[1][0][4]`")
    assert error.field == "Register.components[0].layout.planes"
    assert len(str(error)) == TEXT_LENGTH_MAX


# Regressions: each was accepted, or raised something else than a RemoteProtocolError


def test_a_base64_str_is_not_accepted_as_bin():
    assert refusal(frame(8, 1, 7, 0, "AAAA")).field == "Landed.aux"


def test_an_empty_ext_is_not_accepted_as_struct():
    # msgpack's ExtType is a tuple (code, bytes), and an empty one passes max_ext_len=0.
    assert refusal(bytes.fromhex("960104 01 90 c70005 c2".replace(" ", ""))).field == "frame"


def test_an_empty_map_is_refused_in_an_unknown_field_too():
    assert refusal(frame(9, 1, 1, {})).field == "frame"


@pytest.mark.parametrize("before", [b"\x94", b"\x94\x01"])
def test_a_deep_array_for_version_or_kind_does_not_exhaust_the_stack(before):
    field = "kind" if before[1:] else "version"
    assert refusal(before + b"\x91" * 900 + b"\xc0" + b"\x01" * (3 - len(before) + 1)).field == field


# Any bytes give a message or a RemoteProtocolError


@pytest.mark.parametrize("seed", [11, 12])
def test_fuzzed_frames_give_a_message_or_a_remote_protocol_error(seed):
    seen = fuzz_wire.run(seed, 6000)
    accepted = sum(times for (_, outcome), times in seen.items() if outcome != "refused")
    assert 600 < accepted < 5000, "a fuzzer that is always, or never, refused looks at one half only"
    assert len({outcome for _, outcome in seen}) > 20


@given(st.binary(max_size=300))
@settings(max_examples=some(300), deadline=None)
def test_noise_gives_a_message_or_a_remote_protocol_error(content):
    fuzz_wire.check(content)


SCALARS = st.one_of(
    st.sampled_from([None, True, 0, 1, 2**53, 2**62, 2**63, 2**64 - 1, 0.5, math.nan, "all", "dram", "shm", "decode"]),
    st.integers(-(2**63), 2**64 - 1), st.text(max_size=9), st.binary(max_size=9),
)  # fmt: skip
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=9), max_leaves=12)


@given(st.sampled_from(sorted(MESSAGES)), st.lists(TREES, max_size=9))
@settings(max_examples=some(150), deadline=None)
def test_any_fields_give_a_message_or_a_remote_protocol_error(kind, fields):
    fuzz_wire.check(frame(kind, *fields))


def array(count, item):
    return b"\xdd" + count.to_bytes(4, "big") + item * count


HOSTILE = {
    "empty arrays": array(PLANES_MAX, array(120, b"\x90")),
    "empty arrays in an unknown field": b"\x95\x01\x09\x01\x01" + array(PLANES_MAX, array(120, b"\x90")),
    "short strings": array(PLANES_MAX, array(40, b"\xa2ab")),
    "short bins": array(PLANES_MAX, array(30, b"\xc4\x02ab")),
    "floats": array(PLANES_MAX, array(13, b"\xcb" + bytes(8))),
    "empty maps": array(PLANES_MAX, array(120, b"\x80")),
    "promises at every depth": b"\xdc\x80\x00" * 1000 + bytes(FRAME_BYTES_MAX - 3000),
    "promises in a short frame": b"\xdc\x80\x00" * 1000,
    "promises in a frame of 256 KiB": b"\xdc\x80\x00" * 1000 + bytes(259144),
    "arrays 4 Mi deep": b"\x91" * FRAME_BYTES_MAX,
    "one long str": b"\xdb\x00\x3f\xff\xf8" + b"x" * (FRAME_BYTES_MAX - 8),
    "one str, 4 bytes a character for a single one": b"\xdb\x00\x3f\xff\xf8" + "\U0001f600".encode() + b"x" * 0x3FFFF4,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_takes_no_more_memory_than_a_large_valid_one(name):
    content = HOSTILE[name]
    assert len(content) <= FRAME_BYTES_MAX
    tracemalloc.start()
    try:
        refusal(content)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Small empty arrays exhausted memory before arrays were counted.
    assert peak_bytes < 80 << 20


def test_a_frame_beyond_the_limit_is_refused_unread():
    assert (
        str(refusal(bytes(FRAME_BYTES_MAX + 1)))
        == f"frame: {FRAME_BYTES_MAX + 1} bytes, the limit is {FRAME_BYTES_MAX}"
    )


# Older and newer peers


def variant(cls, *, without=(), appended=(), replaced=()):
    """A struct as another v1.x has it: fields removed, appended, or of other types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    swaps = dict(replaced)
    fields = []
    for field in msgspec.structs.fields(cls):
        if field.name not in without:
            default = () if field.required else (field.default,)
            fields.append((field.name, swaps.get(field.name, hints[field.name]), *default))
    return msgspec.defstruct(cls.__name__, [*fields, *appended], array_like=True, frozen=True)


def peer_encode(message, kind):
    return frame(kind, *msgspec.to_builtins(message, builtin_types=(bytes,)))


def peer_decode(content, cls):
    return msgspec.convert(msgpack.unpackb(content)[2:], cls, builtin_types=(bytes,))


def common(message, other):
    """The fields that both structs have."""
    names = [name for name in message.__struct_fields__ if name in other.__struct_fields__]
    return [getattr(message, name) for name in names], [getattr(other, name) for name in names]


WITH_FLAG = [message for message in MESSAGES.values() if "enable_hisparse" in message.__struct_fields__]
WITH_DEFAULTS = [
    (message, count)
    for message in MESSAGES.values()
    for count in range(1, 1 + sum(not field.required for field in msgspec.structs.fields(message)))
]


def specimen(message):
    return decode(frame(*SPECIMENS[message.__name__][1:]))


def test_hisparse_is_where_register_and_grant_of_v1_0_end():
    assert Register.__struct_fields__[-2:] == ("enable_hisparse", "staging")
    assert Grant.__struct_fields__[-3:] == ("enable_hisparse", "verify", "stop")


@pytest.mark.parametrize("message", WITH_FLAG)
def test_an_older_peer_without_hisparse_is_understood_as_false(message):
    fields = message.__struct_fields__
    older = variant(message, without=list(fields[fields.index("enable_hisparse") :]))
    theirs = peer_decode(encode(specimen(message)), older)
    ours = decode(peer_encode(theirs, message.kind))
    assert specimen(message).enable_hisparse is True
    assert ours.enable_hisparse is False


@pytest.mark.parametrize(("message", "count"), WITH_DEFAULTS)
def test_an_older_peer_without_trailing_fields_interoperates_both_ways(message, count):
    last = [field for field in msgspec.structs.fields(message) if not field.required][-count:]
    older = variant(message, without=[field.name for field in last])
    ours = specimen(message)
    theirs = peer_decode(encode(ours), older)
    assert len(theirs.__struct_fields__) == len(ours.__struct_fields__) - count
    seen, sent = common(theirs, ours)
    assert seen == sent
    back = decode(peer_encode(theirs, message.kind))
    assert back == msgspec.structs.replace(ours, **{field.name: field.default for field in last})


LATER = [None, True, 2**64 - 1, -(2**63), 0.5, "later", b"later", [], [1, ["deep", [None, b"\0"]]]]


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("message", MESSAGES.values())
def test_a_newer_peer_with_an_unknown_field_interoperates_both_ways(message, later):
    newer = variant(message, appended=[("later", object, "absent")])
    ours = specimen(message)
    theirs = peer_decode(encode(ours), newer)
    assert theirs.later == "absent"
    theirs = msgspec.structs.replace(theirs, later=later)
    assert decode(peer_encode(theirs, message.kind)) == ours


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize(
    ("message", "inner", "wrap"),
    [
        (Grant, Part, lambda newer: ("parts", tuple[newer, ...])),
        (Begin, Sampling, lambda newer: ("sampling", newer)),
        (Hello, typing.get_type_hints(Hello)["identity"], lambda newer: ("identity", newer)),
    ],
)
def test_a_newer_peer_with_an_unknown_field_inside_a_struct_interoperates_both_ways(message, inner, wrap, later):
    newer_inner = variant(inner, appended=[("later", object, "absent")])
    name, wrapped = wrap(newer_inner)
    newer = variant(message, replaced=[(name, wrapped)])
    ours = specimen(message)
    theirs = peer_decode(encode(ours), newer)
    value = getattr(theirs, name)
    assert (value[0] if isinstance(value, tuple) else value).later == "absent"
    value = (
        tuple(msgspec.structs.replace(item, later=later) for item in value)
        if isinstance(value, tuple)
        else msgspec.structs.replace(value, later=later)
    )
    assert decode(peer_encode(msgspec.structs.replace(theirs, **{name: value}), message.kind)) == ours


def test_a_newer_peer_may_append_to_every_struct_of_a_register():
    _, kind, *fields = SPECIMENS["Register"]
    session, (component,), reach, flag, (staging,) = fields
    name, memory, tokens_per_row, span, (planes, page_size, slots) = component
    layout = [[[*plane, "later"] for plane in planes], page_size, slots, "later"]
    later = [[name, memory, tokens_per_row, [*span, 1], layout, None]], [*reach, b"later"], flag
    newer = [session, *later, [[*staging, "later"]], [1]]
    assert decode(frame(kind, *newer)) == specimen(Register)


# Versions


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 9), (4, 4), 4),
        ((1, 2), (0, 65535), 2),
        ((3, 3), (1, 3), 3),
    ],
)
def test_negotiation_chooses_the_highest_common_version(ours, theirs, spoken):
    assert negotiate(ours=ours, theirs=theirs) == spoken


@pytest.mark.parametrize(
    ("ours", "theirs"), [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((1, 5), (4, 2)), ((1, 1), (65535, 0))]
)
def test_negotiation_without_a_common_version_names_both_ranges(ours, theirs):
    with pytest.raises(RemoteProtocolError) as caught:
        negotiate(ours=ours, theirs=theirs)
    assert caught.value.field == "version"
    assert f"{theirs[0]} to {theirs[1]}" in str(caught.value)
    assert f"{ours[0]} to {ours[1]}" in str(caught.value)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_negotiation_is_the_greatest_of_the_intersection(ours, theirs):
    both = set(range(ours[0], ours[1] + 1)) & set(range(theirs[0], theirs[1] + 1))
    try:
        assert negotiate(ours=tuple(ours), theirs=theirs) == max(both)
    except RemoteProtocolError:
        assert not both


# Contents of bins


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1)), max_size=50))
def test_extents_survive_the_wire(pairs):
    extents = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    data = pack_extents(extents)
    assert data == b"".join(value.to_bytes(4, "little") for pair in pairs for value in pair)
    assert unpack_extents("x", data).tolist() == extents.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_survive_the_wire(ids):
    assert (
        pack_ids(ids) == pack_ids(np.array(ids, dtype=np.int64)) == b"".join(id_.to_bytes(4, "little") for id_ in ids)
    )
    assert unpack_ids("x", pack_ids(ids)).tolist() == ids


@pytest.mark.parametrize(
    ("unpack", "data", "text"),
    [
        (unpack_extents, bytes(7), "here: 7 bytes, expected pairs of u32"),
        (unpack_extents, bytes(4), "here: 4 bytes, expected pairs of u32"),
        (unpack_extents, b"\5\0\0\0\1\0\0\0\6\0\0\0\0\0\0\0", "here: extent 1 is 0 slots from 6, expected at least 1"),
        (unpack_ids, bytes(3), "here: 3 bytes, expected u32 ids"),
    ],
)
def test_a_bin_without_whole_u32s_is_refused(unpack, data, text):
    with pytest.raises(RemoteProtocolError) as caught:
        unpack("here", data)
    assert str(caught.value) == text


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_value_beyond_u32_is_never_sent_truncated(value):
    with pytest.raises(AssertionError):
        pack_extents(np.array([[value, 1]], dtype=np.int64))
    with pytest.raises(AssertionError):
        pack_ids([value])


def test_an_oversized_message_of_our_own_is_our_own_bug():
    with pytest.raises(AssertionError):
        encode(Begin(1, bytes(FRAME_BYTES_MAX), Sampling(1), ("x",), 1))
    assert decode(encode(Released(1, 1))) == Released(1, 1)
    assert decode(encode(Failed(1, 1, "full", "", quiescent=True))).quiescent

"""The decode side: whose slots it touches, whose turn it is, how rooms end, and what it refuses."""

from itertools import count

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdtransfer_lab.models.factory import create, generate

from pdtransfer.serve.engine_api import Broken, Finished, Token
from pdtransfer.serve.engines.shell.first_token import FirstToken
from tests.support.effort import some
from tests.support.engine_pair import SMALL, Decode, Prefill, config, heads_of, places, prompts, request


def pair(attention, rooms, **more):
    prefill = Prefill.of(attention=attention).run(*rooms)
    decode = Decode.of(attention=attention, **more)
    for room in rooms:
        decode.admit(room, prefill)
    return decode


def single(attention, one):
    return generate(config(attention=attention), one.prompt, one.sampling)


def cells(layout, slots):
    return np.concatenate([places(layout, *head, slots).reshape(-1) for head in heads_of(layout)])


@pytest.mark.parametrize(("host_layout", "page_size"), [("page_first", 1), ("page_head", 16)])
def test_only_generated_rows_are_written(attention, host_layout, page_size):
    one = request(1, prompts(0, (70,))[0], max_tokens=5)
    decode = pair(attention, [one], host_layout=host_layout, page_size=page_size, slots=512)
    before = decode.memory.view(np.uint32).copy()
    decode.run()
    changed = np.flatnonzero(decode.memory.view(np.uint32) != before)
    # The last token's row is never computed: its slot stays as it was.
    assert np.array_equal(changed, np.sort(cells(decode.layout, decode.slots[1][70:74])))


def test_a_cancelled_room_is_touched_no_more_and_others_go_on(attention):
    rooms = [request(index, prompt, max_tokens=8) for index, prompt in enumerate(prompts(1, (60, 61, 300)))]
    decode = pair(attention, rooms)
    decode.step()
    decode.step()
    decode.engine.cancel(1)
    decode.engine.cancel(99)
    gone = cells(decode.layout, decode.slots[1])
    decode.memory[gone] = np.nan
    decode.run()
    assert np.isnan(decode.memory[gone]).all()
    assert 1 not in decode.ends
    assert [decode.outcome(at) for at in (0, 2)] == [single(attention, rooms[at]) for at in (0, 2)]


def test_a_finished_room_is_touched_no_more(attention):
    rooms = [request(0, prompts(2, (60,))[0], max_tokens=2), request(1, prompts(3, (60,))[0], max_tokens=8)]
    decode = pair(attention, rooms)
    while 0 not in decode.ends:
        decode.step()
    gone = cells(decode.layout, decode.slots[0])
    decode.memory[gone] = np.nan
    decode.run()
    assert np.isnan(decode.memory[gone]).all()
    assert decode.outcome(1) == single(attention, rooms[1])


def test_a_corrupt_room_breaks_alone(attention):
    rooms = [request(index, prompt) for index, prompt in enumerate(prompts(4, (60, 300, 310)))]
    decode = pair(attention, rooms)
    kind = heads_of(decode.layout)[0]
    decode.memory[places(decode.layout, *kind, decode.slots[1][7:8])] = np.nan
    decode.run()
    assert isinstance(decode.ends[1], Broken)
    assert "not finite" in decode.ends[1].detail
    assert [decode.outcome(at) for at in (0, 2)] == [single(attention, rooms[at]) for at in (0, 2)]


def test_rooms_that_join_and_leave_change_nothing_for_others(attention):
    rooms = [
        request(index, prompt, max_tokens=3 + 2 * index)
        for index, prompt in enumerate(prompts(5, (300, 5, 256, 64, 1)))
    ]
    prefill = Prefill.of(attention=attention).run(*rooms)
    decode = Decode.of(attention=attention, batch_max=3)
    for room in rooms:
        decode.admit(room, prefill)
        decode.step()
    decode.run()
    assert [decode.outcome(room.room) for room in rooms] == [single(attention, room) for room in rooms]


def test_rooms_beyond_the_batch_take_turns():
    rooms = [request(index, prompt, max_tokens=50) for index, prompt in enumerate(prompts(6, (3,) * 7))]
    decode = pair("mla", rooms, batch_max=3)
    for _ in range(14):
        decode.step()
    lengths = [len(decode.tokens[room.room]) for room in rooms]
    assert sum(lengths) == 3 * 14 + 7
    assert max(lengths) - min(lengths) <= 1


def test_the_first_step_reports_the_first_token_and_the_next():
    one = request(1, prompts(7, (9,))[0])
    prefill = Prefill.of().run(one)
    decode = Decode.of()
    decode.admit(one, prefill)
    first, second = decode.engine.step()
    assert first == Token(
        room=1, index=0, id=FirstToken.unpack(prefill.aux[1], prompt_tokens=9, facts=decode.engine.model.facts).id
    )
    assert second.index == 1


def test_one_token_needs_no_decode_step(attention):
    one = request(1, prompts(8, (30,))[0], max_tokens=1)
    decode = pair(attention, [one])
    before = decode.memory.copy()
    events = decode.engine.step()
    assert [type(event) for event in events] == [Token, Finished]
    assert events[1].reason == "length"
    assert np.array_equal(decode.memory, before, equal_nan=True)
    assert events[1].kv_digest == single(attention, one).kv_digest


@pytest.mark.parametrize("stop_at", [0, 3])
def test_eos_stops_a_room_unless_it_is_to_be_ignored(attention, stop_at):
    # A seed whose token at stop_at is new there, so that it may serve as EOS.
    for seed in count(9):
        one = request(1, prompts(seed, (40,))[0], max_tokens=8)
        free = single(attention, one)
        if free.tokens[stop_at] not in free.tokens[:stop_at]:
            break
    options = SMALL | {"eos": str(free.tokens[stop_at])}
    ignored = generate(config(attention=attention, options=options), one.prompt, one.sampling)
    assert (ignored.tokens, ignored.reason) == (free.tokens, "length")
    stopping = request(1, one.prompt, max_tokens=8, ignore_eos=False)
    decode = pair(attention, [stopping], options=options)
    decode.run()
    assert decode.outcome(1).tokens == free.tokens[: stop_at + 1]
    assert decode.outcome(1).reason == "stop"


def test_sampling_is_the_same_on_both_paths_and_differs_by_seed(attention):
    prompt = prompts(10, (50,))[0]
    rooms = [request(index, prompt, max_tokens=8, temperature=1.5, top_p=0.9, seed=index // 2) for index in range(4)]
    decode = pair(attention, rooms, batch_max=2)
    decode.run()
    outcomes = [decode.outcome(room.room) for room in rooms]
    assert outcomes == [single(attention, room) for room in rooms]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].tokens != outcomes[2].tokens


# What is refused


@pytest.fixture(scope="module")
def landed():
    one = request(1, prompts(11, (20,))[0])
    return one, Prefill.of().run(one).aux[1]


def decode_engine():
    decode = Decode.of(slots=64)
    return decode.engine


GOOD = np.arange(26)


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ({}, "components"),
        ({"kv": GOOD, "index": GOOD}, "components"),
        ({"kv": GOOD[:25]}, r"\(25,\)"),
        ({"kv": np.arange(27)}, r"\(27,\)"),
        ({"kv": GOOD.astype(np.int32)}, "int32"),
        ({"kv": GOOD + 39}, "64 is outside 0..63"),
        ({"kv": GOOD - 1}, "-1 is outside"),
        ({"kv": np.where(GOOD == 3, 4, GOOD)}, "4 is there twice"),
    ],
)
def test_slots_that_are_not_the_rooms_are_refused(landed, slots, named):
    one, aux = landed
    engine = decode_engine()
    with pytest.raises(ValueError, match=named):
        engine.admit(one, slots, aux)
    assert engine.idle
    engine.admit(one, {"kv": GOOD}, aux)


FIELDS = ["reference/1", 20, 5, b"d" * 16, b"", b""]


def packed(**change):
    fields = list(FIELDS)
    for at, value in change.items():
        fields[int(at[1:])] = value
    return msgpack.packb(fields)


def test_aux_as_any_msgpack_writes_it_is_accepted(landed):
    engine = decode_engine()
    engine.admit(landed[0], {"kv": GOOD}, packed())
    assert engine.step()[0] == Token(room=1, index=0, id=5)


@pytest.mark.parametrize(
    "aux",
    [
        b"",
        b"\xc1",
        packed()[:-1],
        packed() + b"\x00",
        msgpack.packb(FIELDS[:3]),
        msgpack.packb([*FIELDS, 1]),
        msgpack.packb({}),
        msgpack.packb(None),
        packed(_0="reference/2"),
        packed(_1=21),
        packed(_1=0),
        packed(_1=True),
        packed(_1=20.0),
        packed(_2=257),
        packed(_2=-1),
        packed(_2="5"),
        packed(_3=b"d" * 15),
        packed(_3=b"d" * 17),
        packed(_3="d" * 16),
        packed(_3=b""),
        packed(_4=b"?"),
        packed(_5=b"d" * 1_025),
        # The right values in a longer form than they need.
        b"\x96" + msgpack.packb("reference/1") + b"\xcd\x00\x14" + b"\x05" + b"".join(map(msgpack.packb, FIELDS[3:])),
        b"\x91" * 100_000,
    ],
)
def test_aux_that_prefill_does_not_make_is_refused(landed, aux):
    engine = decode_engine()
    with pytest.raises(ValueError, match="aux"):
        engine.admit(landed[0], {"kv": GOOD}, aux)
    assert engine.idle


FIELD = (
    st.sampled_from([*FIELDS, None, True]) | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats()
)


FACTS = decode_engine().model.facts


@given(aux=st.binary(max_size=200) | st.lists(FIELD, max_size=8).map(msgpack.packb))
@settings(max_examples=some(300), deadline=None)
def test_any_bytes_as_aux_are_a_handoff_or_a_value_error(aux):
    try:
        handoff = FirstToken.unpack(aux, prompt_tokens=20, facts=FACTS)
    except ValueError:
        return
    assert handoff.pack() == aux


def test_an_arena_that_is_too_small_or_read_only_is_refused():
    engine = create(config("decode", slots=64))
    need = engine.description.memory_bytes
    with pytest.raises(ValueError, match=f"{need - 1} writable bytes, expected {need}"):
        engine.attach(memoryview(bytearray(need - 1)))
    with pytest.raises(ValueError, match="read-only"):
        engine.attach(memoryview(bytes(need)))
    engine.attach(memoryview(bytearray(need)))


def test_a_request_longer_than_the_arena_or_there_already_is_refused(landed):
    one, aux = landed
    engine = decode_engine()
    with pytest.raises(ValueError, match="70 tokens, the arena has 64 slots"):
        engine.check(request(2, np.zeros(64, np.int64)))
    engine.admit(one, {"kv": GOOD}, aux)
    with pytest.raises(ValueError, match="room 0000000000000001 exists already"):
        engine.admit(one, {"kv": GOOD + 30}, aux)

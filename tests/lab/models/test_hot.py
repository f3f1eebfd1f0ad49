"""HiSparse in the engine: the bits are those of the same model with every token resident, whatever the device holds."""

from itertools import count

import numpy as np
import pytest
from pdtransfer_lab.models.factory import create, generate_many

from pdtransfer.errors import ConfigError, LocalProtocolError
from pdtransfer.layout.layout_builders import HOST_LAYOUTS
from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import Broken, Finished, HiSparse
from pdtransfer.serve.tracing.spans import Timeline
from tests.lab.models.hot_requests import HOT, LENGTHS, SPARSE, TOKENS, hisparse, sparse_requests
from tests.support.engine_pair import Decode, Prefill, config, heads_of, places, prompts, request
from tests.support.planted_staging import stage


@pytest.fixture(scope="module")
def landed(attention):
    rooms = sparse_requests()
    return rooms, Prefill.of(attention=attention, slots=4096, options=SPARSE).run(*rooms)


@pytest.fixture(scope="module")
def expected(attention):
    asked = [(sparse_request.prompt, sparse_request.sampling) for sparse_request in sparse_requests()]
    return generate_many(config(attention=attention, slots=4096, page_size=64, options=SPARSE), asked)


def decode_of(attention, hot, **more):
    more = {"slots": 2048, "options": SPARSE} | more
    return Decode.of(attention=attention, hisparse=hot, **more)


@pytest.fixture
def admitted(attention, landed):
    """Makes decode engines that have admitted those of the rooms that have landed which are picked."""

    def made(hot, picked=lambda _: True, **more):
        rooms, prefill = landed
        decode = decode_of(attention, hot, **more)
        for room in filter(picked, rooms):
            decode.admit(room, prefill)
        return decode

    return made


@pytest.mark.parametrize(("host_layout", "page_size"), [*zip(HOST_LAYOUTS, (1, 1, 16, 64), strict=True)])
def test_hot_tokens_are_bitwise_every_token_resident(attention, landed, expected, host_layout, page_size):
    decode = decode_of(attention, hisparse(), host_layout=host_layout, page_size=page_size)
    assert decode.served(*landed) == expected
    figures = decode.engine.figures
    assert figures.hits > 0
    assert figures.misses > 0
    assert figures.preloaded_bytes > 0
    assert figures.admission_bytes == figures.preloaded_bytes
    assert (figures.retracts, figures.running, figures.waiting) == (0, 0, 0)


def test_a_staging_copy_changes_no_bit_and_shows_in_the_figures(attention, landed, expected, monkeypatch):
    stage(monkeypatch)
    decode = decode_of(attention, hisparse())
    assert decode.served(*landed) == expected
    figures = decode.engine.figures
    assert figures.admission_bytes == 2 * figures.preloaded_bytes > 0


def test_rooms_that_are_retracted_and_come_back_lose_no_bit(attention, landed, expected):
    """Places for two long requests: the others wait, and those that run are retracted for them, each more than once."""
    decode = decode_of(attention, hisparse(slots=2 * (HOT + 1)))
    assert decode.served(*landed) == expected
    figures = decode.engine.figures
    assert figures.retracts >= len(expected) - 2
    assert figures.admission_bytes == figures.preloaded_bytes


@pytest.mark.parametrize("policy", ["longest", "shortest", "newest"])
def test_rooms_that_come_and_go_and_dense_ones_beside_them_change_nothing(attention, landed, expected, policy):
    rooms, prefill = landed
    dense = [
        request(50 + index, prompt, max_tokens=TOKENS)
        for index, prompt in enumerate(prompts(0, LENGTHS))
        if index % 3 == 0
    ]
    others = Prefill.of(attention=attention, slots=4096, options=SPARSE).run(*dense)
    decode = decode_of(attention, hisparse(slots=3 * (HOT + 1), policy=policy), batch_max=4, slots=4096)
    mixed = [*((room, prefill) for room in rooms), *((one, others) for one in dense)]
    for one, source in [mixed[at] for at in np.random.default_rng(0).permutation(len(mixed))]:
        decode.admit(one, source)
        decode.step()
    decode.engine.cancel(9)
    decode.run()
    assert [decode.outcome(room.room) for room in rooms[:9]] == expected[:9]
    assert [decode.outcome(one.room) for one in dense] == [expected[one.room - 50] for one in dense]
    assert decode.engine.figures.retracts > 0


def test_each_steps_swap_ins_are_reported_within_it_and_preloads_before(attention, landed):
    """Of a request that fits the device, and of one that does not, alone and together."""
    timeline = Timeline("decode")
    rooms, prefill = landed
    short, long = (next(room for room in rooms if len(room.prompt) == length) for length in (17, 100))
    decode = decode_of(attention, hisparse(), spans=timeline)
    decode.admit(short, prefill)
    decode.step()
    preload, *swaps, step = timeline.take()
    row_bytes = decode.layout.row_bytes
    assert (preload.lane, preload.name, preload.room) == ("swap-in", "preload 17 tokens", short.room)
    assert preload.byte_count == 17 * row_bytes
    assert [(span.lane, span.name, span.room, span.layer) for span in swaps] == [
        ("swap-in", "1 request", short.room, layer) for layer in range(2)
    ]
    assert (step.lane, step.name, step.room) == ("step", "1 request", short.room)
    assert preload.end_s <= step.begin_s
    assert all(step.begin_s <= span.begin_s <= span.end_s <= step.end_s for span in swaps)
    decode.admit(long, prefill)
    decode.step()
    place, *swaps, step = timeline.take()
    assert (place.name, place.room, place.byte_count) == ("place 100 tokens", long.room, 0)
    assert [(span.name, span.room, span.layer) for span in swaps] == [("2 requests", 0, layer) for layer in range(2)]
    assert (step.name, step.room) == ("2 requests", 0)


def test_only_generated_rows_are_written_to_the_arena(landed, admitted):
    rooms, _ = landed
    decode = admitted(hisparse(slots=2 * (HOT + 1)))
    before = decode.memory.view(np.uint32).copy()[: decode.layout.end // 4]
    decode.run()
    changed = np.flatnonzero(decode.memory.view(np.uint32)[: decode.layout.end // 4] != before)
    own = [decode.slots[room.room][len(room.prompt) : len(room.prompt) + TOKENS - 1] for room in rooms]
    cells = [places(decode.layout, *head, slots).reshape(-1) for head in heads_of(decode.layout) for slots in own]
    assert np.array_equal(changed, np.sort(np.concatenate(cells)))


@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_cancelled_room_is_touched_no_more_wherever_it_is(landed, admitted, expected, when):
    """Waiting, running or retracted: with places for one long request, rooms are in all of these."""
    long = [room for room in landed[0] if len(room.prompt) > HOT]
    decode = admitted(hisparse(slots=HOT + 1), picked=lambda room: len(room.prompt) > HOT)
    for _ in range(when):
        decode.step()
    for gone in (long[0], long[2]):
        decode.engine.cancel(gone.room)
        for head in heads_of(decode.layout):
            decode.memory[places(decode.layout, *head, decode.slots[gone.room])] = np.nan
    decode.run()
    for gone in (long[0], long[2]):
        cells = [places(decode.layout, *head, decode.slots[gone.room]) for head in heads_of(decode.layout)]
        assert all(np.isnan(decode.memory[cell]).all() for cell in cells)
        assert gone.room not in decode.ends
    assert [decode.outcome(one.room) for one in (long[1], long[3])] == [
        expected[one.room] for one in (long[1], long[3])
    ]


def test_a_room_that_has_but_one_token_to_give_needs_no_place(attention):
    one = request(0, prompts(3, (100,))[0], max_tokens=1, sparse=True)
    prefill = Prefill.of(attention=attention, options=SPARSE).run(one)
    decode = decode_of(attention, hisparse(slots=HOT + 1))
    decode.admit(one, prefill)
    decode.run()
    assert decode.outcome(0).reason == "length"
    assert decode.engine.figures.misses == 0


def test_a_corrupt_room_breaks_alone(landed, admitted, expected):
    rooms, _ = landed
    decode = admitted(hisparse(slots=3 * (HOT + 1)))
    kind, _, head = heads_of(decode.layout)[0]
    decode.memory[places(decode.layout, kind, 0, head, decode.slots[8][:300])] = np.nan
    decode.run()
    assert isinstance(decode.ends[8], Broken)
    assert "not finite" in decode.ends[8].detail
    for room in rooms:
        assert room.room == 8 or decode.outcome(room.room) == expected[room.room]


def test_a_step_that_is_refused_a_place_ends_its_room_alone(landed, admitted, expected):
    rooms, _ = landed
    decode = admitted(hisparse())
    decode.step()
    hot = decode.engine.model.hot
    hot._pool.refused[hot._placed[7].row] = 1
    decode.run()
    assert isinstance(decode.ends[7], Broken)
    assert "the device has no room" in decode.ends[7].detail
    assert all(isinstance(decode.ends[room.room], Finished) for room in rooms if room.room != 7)
    assert decode.outcome(9) == expected[9]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_in_whatever_sizes_every_bit_is_that_of_all_resident(seed):
    """Requests of any length, sparse or not, on a device of any size, cancelled anywhere."""
    random = np.random.default_rng(seed)
    attention, top = ("mla", "gqa")[seed % 2], int(random.choice([1, 8, 33]))
    hot = top + int(random.integers(0, 40))
    options = {"layers": "2", "top_k": str(top), "index_share": str(random.integers(1, 3))}
    lengths = [max(1, int(size)) for size in random.choice([1, top, hot - 1, hot, hot + 1, 2 * hot, 5 * hot], 7)]
    rooms = [
        request(index, prompt, max_tokens=int(random.integers(1, 20)), sparse=bool(random.random() < 0.8))
        for index, prompt in enumerate(prompts(seed, lengths))
    ]
    prefill = Prefill.of(attention=attention, slots=4096, options=options).run(*rooms)
    wanted = generate_many(
        config(attention=attention, slots=4096, page_size=64, options=options),
        [(room.prompt, room.sampling) for room in rooms],
    )
    limits = Limits(hisparse_wait_steps=int(random.integers(1, 6)), hisparse_quantum_steps=int(random.integers(1, 8)))
    slots = (hot + 1) * int(random.integers(1, 4)) + int(random.integers(0, hot))
    device = HiSparse(device_slots=slots, hot_tokens=hot, dense_slots=4096, limits=limits)
    decode = Decode.of(
        attention=attention, slots=4096, hisparse=device, options=options, batch_max=int(random.integers(1, 6))
    )
    gone = set()
    for room in rooms:
        decode.admit(room, prefill)
        for _ in range(random.integers(0, 4)):
            decode.step()
        if random.random() < 0.2 and (unlucky := int(random.integers(0, room.room + 1))) not in decode.ends:
            decode.engine.cancel(unlucky)
            gone.add(unlucky)
    decode.run()
    assert set(decode.ends) == {room.room for room in rooms} - gone
    for room in rooms:
        assert room.room in gone or decode.outcome(room.room) == wanted[room.room]


# What is refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hot_tokens": 15}, "hot_tokens = 15: must be at least top_k 16"),
        ({"device_slots": 48}, "device_slots = 48: must be above hot_tokens 48"),
        ({"dense_slots": 0}, "dense_slots = 0"),
    ],
)
def test_a_device_that_no_request_could_run_on_is_refused_at_the_start(change, named):
    hot = HiSparse(**({"device_slots": 100, "hot_tokens": HOT, "dense_slots": 64} | change))
    with pytest.raises(ConfigError, match=named):
        create(config("decode", options=SPARSE, hisparse=hot))


@pytest.mark.parametrize(
    ("option", "errors"),
    [
        ({"top": "16"}, "engine_option = 'top=16': must be one of .*top_k"),
        ({"top_k": "x"}, "engine_option top_k: .*int"),
    ],
)
def test_an_option_that_the_engine_does_not_know_is_refused_with_those_that_it_does(option, errors):
    with pytest.raises(ConfigError, match=errors):
        create(config("decode", options=option))


def test_hisparse_wants_a_model_that_picks():
    with pytest.raises(ConfigError, match="top_k"):
        create(config("decode", hisparse=hisparse()))


def test_a_request_that_could_never_run_is_refused_and_nothing_else_disturbed(attention, landed, expected):
    rooms, prefill = landed
    decode = decode_of(attention, hisparse(), slots=1088)
    with pytest.raises(ValueError, match="1100 tokens, the arena has 1088 slots"):
        decode.engine.check(request(99, np.zeros(1000, np.int64), max_tokens=100, sparse=True))
    with pytest.raises(ValueError, match="1025 tokens, the arena has 1024 slots"):
        decode.engine.check(request(99, np.zeros(1000, np.int64), max_tokens=25))
    decode.admit(rooms[7], prefill)
    assert decode.run().outcome(7) == expected[7]


def test_nobody_waits_forever(landed, admitted):
    """While newcomers keep coming, the first that waits gets its place within wait and quantum."""
    rooms, _ = landed
    decode = admitted(hisparse(slots=HOT + 1, wait=2, quantum=2), picked=lambda room: room.room >= 7)
    for step in count():
        decode.step()
        if all(len(decode.tokens.get(room.room, ())) > 1 for room in rooms[7:]):
            break
        assert step < 20
    assert decode.engine.figures.retracts > 0


def test_more_than_a_step_can_plan_for_is_refused_at_the_start():
    hot = HiSparse(device_slots=16_385, hot_tokens=16_384, dense_slots=64)
    with pytest.raises(LocalProtocolError, match="hot: 16384 and top 4096 take"):
        decode_of("mla", hot, options=SPARSE | {"top_k": "4096"})

"""The reference model is bitwise the same however it is cut, batched, laid out or split between two processes."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from pdtransfer_lab.models import architecture
from pdtransfer_lab.models.factory import create, generate, generate_many

from pdtransfer.errors import ConfigError
from pdtransfer.layout.layout_builders import HOST_LAYOUTS
from pdtransfer.wire import Sampling
from tests.lab.models.engine_cuts import are_the_same, otherwise
from tests.support.engine_pair import SMALL, Decode, Prefill, config, copy_rows, heads_of, places, prompts, request

LENGTHS = (1, 1, 2, 63, 64, 65, 100, 255, 256, 257, 300, 511, 513)


def requests(seed=0, lengths=LENGTHS, max_tokens=6, **sampling):
    sampling.setdefault("ignore_eos", True)
    return [(prompt, Sampling(max_tokens=max_tokens, **sampling)) for prompt in prompts(seed, lengths)]


@pytest.fixture(scope="module")
def expected(attention):
    return generate_many(config(attention=attention, slots=4096, page_size=64, chunk_tokens=512), requests())


@pytest.mark.slow
@otherwise
def test_no_chunk_batch_page_layout_or_pool_changes_a_bit(attention, expected, cut):
    assert are_the_same(cut, attention, SMALL, requests(), expected)


def test_a_request_alone_equals_itself_in_a_crowd(attention, expected):
    for at in (0, 5, 9):
        assert generate(config(attention=attention), *requests()[at]) == expected[at]


@pytest.mark.slow
def test_chunks_of_one_row_equal_one_chunk(attention):
    (request,) = requests(1, (70,))
    whole = generate(config(attention=attention, chunk_tokens=512), *request)
    assert generate(config(attention=attention, chunk_tokens=1), *request) == whole


@pytest.mark.parametrize("source", HOST_LAYOUTS)
@pytest.mark.parametrize("target", HOST_LAYOUTS)
def test_rows_copied_between_any_two_layouts_decode_to_what_one_process_generates(attention, expected, source, target):
    random = np.random.default_rng([HOST_LAYOUTS.index(source), HOST_LAYOUTS.index(target)])
    source_page, target_page = (int(random.choice([1, 16, 64])) for _ in range(2))
    rooms = [request(index, prompt) for index, prompt in enumerate(prompts(0, LENGTHS)) if len(prompt) in (2, 64, 300)]
    prefill = Prefill.of(attention=attention, host_layout=source, page_size=source_page, slots=1024, chunk_tokens=100)
    decode = Decode.of(attention=attention, host_layout=target, page_size=target_page, slots=1024, batch_max=3)
    assert decode.served(rooms, prefill.run(*rooms)) == [expected[room.room] for room in rooms]


# As a transformer in float64 without a cache, absorption or blocks has generated them.
PLAIN = {
    "mla": [(148, 204, 11, 227), (146, 65, 17, 148), (30, 141, 209, 101)],
    "gqa": [(99, 99, 161, 211), (31, 127, 247, 249), (59, 130, 182, 130)],
}


def test_tokens_are_those_of_a_plain_transformer(attention):
    found = generate_many(config(attention=attention), requests(3, (1, 40, 300), max_tokens=4))
    assert [one.tokens for one in found] == PLAIN[attention]


def test_outputs_vary_and_depend_on_an_early_byte(attention, expected):
    assert len({outcome.tokens for outcome in expected}) == len(expected)
    assert len({token for outcome in expected for token in outcome.tokens}) > 30
    prompt, sampling = requests(4, (200,), max_tokens=12)[0]
    other = prompt.copy()
    other[3] ^= 1
    assert (
        generate(config(attention=attention), prompt, sampling).tokens
        != generate(config(attention=attention), other, sampling).tokens
    )


def decoded(attention, spoil):
    """One room's outcome after `spoil(memory, layout, slots)` on the landed rows."""
    one = request(7, prompts(5, (150,))[0])
    prefill = Prefill.of(attention=attention).run(one)
    decode = Decode.of(attention=attention)
    decode.admit(one, prefill)
    spoil(decode.memory, decode.layout, decode.slots[7][:150])
    return decode.run().outcome(7)


def test_two_swapped_rows_show_in_the_kv_and_in_the_logits_though_not_in_the_tokens(attention):
    def swap(memory, layout, slots):
        whole = memory.copy(), layout
        copy_rows(whole, slots[[20, 90]], (memory, layout), slots[[90, 20]])

    good, swapped = decoded(attention, lambda *_: None), decoded(attention, swap)
    assert swapped.tokens_digest == good.tokens_digest
    assert swapped.kv_digest != good.kv_digest
    assert swapped.logits_digest != good.logits_digest


@pytest.mark.parametrize("layer", [0, 1])
def test_one_flipped_bit_of_any_layer_shows_in_the_kv_digest(attention, layer):
    def flip(memory, layout, slots):
        kind = heads_of(layout)[-1][0]
        memory.view(np.uint32)[places(layout, kind, layer, 0, slots[11:12])[0, 5]] ^= 1

    assert decoded(attention, flip).kv_digest != decoded(attention, lambda *_: None).kv_digest


def test_a_lost_page_shows_in_the_tokens(attention):
    def lose(memory, layout, slots):
        for kind, layer, head in heads_of(layout):
            memory[places(layout, kind, layer, head, slots[64:128])] = 0.0

    assert decoded(attention, lose).tokens != decoded(attention, lambda *_: None).tokens


@pytest.mark.slow
def test_another_process_generates_the_same(attention, expected):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(generate_many, config(attention=attention), requests()[:4]).result(timeout=120)
    assert found == expected[:4]


def test_engines_of_one_seed_agree_on_their_weights_and_others_do_not(attention):
    first = create(config("prefill", attention=attention)).description
    assert (
        create(config("decode", attention=attention, page_size=1, host_layout="page_first")).description.weights
        == first.weights
    )
    others = [
        config("decode", attention=attention, options=SMALL | {"seed": "1"}),
        config("decode", attention=attention, options={"layers": "3"}),
        config("decode", attention="gqa" if attention == "mla" else "mla"),
    ]
    assert len({create(other).description.weights for other in others} | {first.weights}) == 4
    assert first.model == f"reference-{attention}"


def test_the_weights_digest_knows_the_weights_themselves(monkeypatch):
    plain = create(config()).description.weights
    monkeypatch.setitem(architecture._GAINS, "down", 1.001)
    assert create(config()).description.weights != plain


def test_seeds_give_models_that_generate_otherwise(attention, expected):
    other = config(attention=attention, options=SMALL | {"seed": "1"})
    assert generate(other, *requests()[6]).tokens != expected[6].tokens


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 3}, "3"),
        ({"page_size": 0}, "0"),
        ({"slots": 100, "page_size": 16}, "100"),
        ({"slots": 0}, "0"),
        ({"host_layout": "sideways"}, "sideways"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"options": {"attention": "linear"}}, "linear"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"batch_max": 0}, "batch_max"),
        ({"options": {"layers": "0"}}, "layers"),
        ({"options": {"layers": "two"}}, "layers"),
        ({"options": {"colour": "red"}}, "colour"),
        ({"options": {"eos": "257"}}, "eos"),
        ({"options": {"seed": "-1"}}, "seed"),
    ],
)
def test_a_setting_that_makes_no_engine_is_named(change, named):
    for role in ("prefill", "decode"):
        with pytest.raises(ConfigError, match=named):
            create(replace(config(role), **change))


def test_one_process_refuses_a_request_that_its_pool_can_never_hold():
    with pytest.raises(ValueError, match="70 tokens, the pool has 64 slots"):
        generate(config(slots=64), prompts(6, (64,))[0], Sampling(max_tokens=6))

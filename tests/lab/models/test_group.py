"""Ranks that compute one model together: the same bits as one process, however heads and layers are split."""

from __future__ import annotations

import numpy as np
import pytest
from pdtransfer_lab.models.factory import create, generate_many

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engine_api import Computed
from pdtransfer.wire import Ranks, Sampling
from tests.support.engine_group import Threads, decodes, generate, prefills, together
from tests.support.engine_pair import config, prompts, request

PROMPTS = prompts(7, (1, 63, 300, 129))
TOKENS = 5


def expected(attention, options):
    one = config("decode", attention=attention, options=options)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    return generate_many(one, [(prompt, sampling) for prompt in PROMPTS])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options", "prefill_tp", "prefill_pp", "decode_tp"),
    [
        ("mla", {"layers": "2"}, 2, 1, 1),
        ("mla", {"layers": "2"}, 1, 1, 2),
        ("mla", {"layers": "3"}, 2, 2, 1),
        ("gqa", {"layers": "2"}, 2, 1, 2),
        ("gqa", {"layers": "3"}, 1, 3, 1),
        ("gqa", {"layers": "2", "kv_heads": "2"}, 4, 1, 1),
        ("gqa", {"layers": "2", "kv_heads": "1"}, 2, 2, 4),
        ("gqa", {"layers": "2", "kv_heads": "8"}, 4, 1, 2),
        # Layers 0 and 2 pick: of three stages the second keeps no index.
        ("mla", {"layers": "4", "top_k": "16"}, 1, 2, 2),
        ("gqa", {"layers": "4", "top_k": "16"}, 2, 3, 2),
    ],
)
def test_groups_generate_the_bits_of_one_process(attention, options, prefill_tp, prefill_pp, decode_tp):
    sources = prefills(prefill_tp, prefill_pp, attention=attention, options=options, chunk_tokens=100)
    targets = decodes(decode_tp, attention=attention, options=options)
    found = generate(sources, targets, PROMPTS, max_tokens=TOKENS)
    for each, one in zip(found, expected(attention, options), strict=True):
        assert each == [one] * decode_tp


def test_stages_that_offer_layers_one_by_one_agree_on_what_is_computed_when():
    options = {"layers": "5", "layers_per_cell": "1"}
    sources = prefills(1, 2, options=options, chunk_tokens=100)
    found = generate(sources, decodes(1, options=options), PROMPTS, max_tokens=TOKENS)
    assert [one for (one,) in found] == expected("mla", options)
    assert [cell.layers for cell in sources[0].cells[0]] == [(0, 1), (1, 2)]
    assert [cell.layers for cell in sources[1].cells[0]] == [(2, 3), (3, 4), (4, 5)]


def test_a_prompt_that_is_cancelled_between_two_chunks_leaves_no_stage_waiting():
    options = {"layers": "4", "layers_per_cell": "1"}
    engines = [
        create(config("prefill", options=options, group=group, chunk_tokens=64)) for group in Threads(pp=2).groups()
    ]
    long, short = request(1, PROMPTS[2]), request(2, PROMPTS[1])

    def run(engine):
        assert engine.admit(long)
        step = engine.step()
        engine.cancel(1)
        assert engine.admit(short)
        while not engine.idle:
            step += engine.step()
        return {each.room for each in step if isinstance(each, Computed)}

    assert together([lambda engine=engine: run(engine) for engine in engines]) == [{1, 2}, {1, 2}]


def test_replicas_that_differ_in_one_bit_spoil_the_kv_digest():
    sources = prefills(1)
    targets = decodes(2)

    rooms = [request(0, PROMPTS[2], max_tokens=1)]
    sources[0].run(*rooms)
    for target in targets:
        target.admit(rooms[0], sources[0])
    row = targets[1].layout.address(0, int(targets[1].slots[0][3]))
    targets[1].memory.view(np.uint32)[row // 4] ^= 1
    together([target.run for target in targets])
    (one,) = generate_many(config("decode"), [(PROMPTS[2], Sampling(max_tokens=1, ignore_eos=True))])
    assert targets[0].outcome(0).tokens_digest == one.tokens_digest
    assert targets[0].outcome(0).kv_digest != one.kv_digest


@pytest.mark.parametrize(
    ("attention", "options", "ranks", "layers", "heads", "replica"),
    [
        ("mla", {}, Ranks(1, 2), (0, 4), (0, 1), (1, 2)),
        ("gqa", {}, Ranks(1, 2), (0, 4), (2, 4), (0, 1)),
        ("gqa", {"kv_heads": "2"}, Ranks(3, 4), (0, 4), (1, 2), (1, 2)),
        ("gqa", {"layers": "5"}, Ranks(0, 1, 1, 2), (2, 5), (0, 4), (0, 1)),
    ],
)
def test_a_rank_reports_which_layers_and_heads_it_holds_and_who_else_does(
    attention, options, ranks, layers, heads, replica
):
    group = next(g for g in Threads(tp=ranks.tp_size, pp=ranks.pp_size).groups() if g.ranks == ranks)
    description = create(config("prefill", attention=attention, options=options, group=group)).description
    assert description.replicas == {"kv": replica}
    layout = description.components[0].layout
    assert layout.layer_range == layers
    assert {(plane.head_start, plane.head_start + plane.head_count) for plane in layout.planes} == {heads}


@pytest.mark.parametrize(
    ("role", "options", "ranks", "text"),
    [
        ("prefill", {}, Ranks(0, 3), "tp_size = 3: does not divide the 8 query heads of reference-gqa"),
        ("prefill", {"layers": "2"}, Ranks(0, 1, 0, 3), "pp_size = 3: more stages than the 2 layers of the model"),
        ("decode", {}, Ranks(0, 1, 0, 2), "pp_size = 2: only prefill is split into stages"),
        ("decode", {"kv_heads": "3"}, Ranks(), "kv_heads: 3 does not divide 8 query heads"),
    ],
)
def test_a_split_that_the_model_does_not_allow_is_one_clear_line(role, options, ranks, text):
    group = Threads(tp=ranks.tp_size, pp=ranks.pp_size).groups()[0]
    with pytest.raises(ConfigError, match=f"(?m)^{text}$"):
        create(config(role, attention="gqa", options=options, group=group))

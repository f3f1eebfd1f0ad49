"""The model at real dimensions, here a small one of its kind: held to the textbook in float32, by what the pool has."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from pdtransfer_lab.models import deep
from pdtransfer_lab.models.deep import create

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engine_api import Computed, HiSparse
from pdtransfer.serve.engines.shell.prefill import LastRow, _Picking
from pdtransfer.wire import Ranks
from tests.lab.models.deep_model import OPTIONS, SMALL, kv_of, model_of, near, textbook
from tests.support.engine_pair import Decode, Prefill, config, copy_rows, prompts, request


def prefill_of(attention, *, options=None, **more):
    return Prefill.of(factory=create, attention=attention, options=OPTIONS[attention] | (options or {}), **more)


def decode_of(attention, *, options=None, **more):
    return Decode.of(factory=create, attention=attention, options=OPTIONS[attention] | (options or {}), **more)


def last_logits(engine, monkeypatch):
    """What the engine's model has said of the latest row that it was asked about."""
    latest = []
    model = model_of(engine)
    plain = model.logits
    monkeypatch.setattr(model, "logits", lambda x: latest.append(plain(x)) or latest[-1])
    return latest


@pytest.mark.parametrize("chunk_tokens", [512, 100, 64, 7])
def test_the_pool_and_the_logits_are_the_textbooks_however_the_prompt_is_cut(attention, chunk_tokens, monkeypatch):
    prefill = prefill_of(attention, chunk_tokens=chunk_tokens, slots=1024)
    prefill.memory[:] = np.nan  # what is stale shows
    one = request(1, prompts(0, (70 if chunk_tokens == 7 else 300,))[0])
    latest = last_logits(prefill.engine, monkeypatch)
    prefill.run(one)
    wanted, logits = textbook(model_of(prefill.engine), one.prompt)
    found = kv_of(prefill.memory, prefill.layout, prefill.slots(one))
    assert found.keys() == wanted.keys()
    for key in wanted:
        near(found[key], wanted[key])
    near(latest[-1][(len(one.prompt) - 1) % 64], logits)


def test_a_layer_is_offered_as_soon_as_it_is_computed_and_stays_as_it_is(attention):
    prefill = prefill_of(attention, chunk_tokens=128)
    seen = prefill.offered(request(1, prompts(1, (200,))[0]))
    assert [(cell.rows, cell.layers) for cell, _, _ in seen[:: len(seen) // 6]] == [
        (rows, (layer, layer + 1)) for rows in ((0, 128), (128, 200)) for layer in range(3)
    ]
    for _, place, rows in seen:
        assert rows.any(axis=1).all()
        assert np.array_equal(prefill.memory[place], rows)


@pytest.mark.parametrize("lengths", [(1,), (255, 256, 300, 5)])
def test_a_step_out_of_what_has_landed_is_the_textbooks(attention, lengths, monkeypatch):
    """The arena is NaN but for the rows that prefill has written: a row read before it was written shows."""
    prefill = prefill_of(attention, slots=2048, chunk_tokens=200)
    decode = decode_of(attention, slots=2048, host_layout="page_first")
    rooms = [request(index, prompt, max_tokens=3) for index, prompt in enumerate(prompts(3, lengths))]
    prefill.run(*rooms)
    for room in rooms:
        decode.admit(room, prefill)
    latest = last_logits(decode.engine, monkeypatch)
    decode.step()  # tells what prefill picked, and makes the first step
    by_position = sorted(rooms, key=lambda room: len(room.prompt))
    for row, room in enumerate(by_position):
        ids = np.append(room.prompt, decode.tokens[room.room][0])
        near(latest[0][row], textbook(model_of(decode.engine), ids)[1])
    decode.run()
    assert all(len(decode.tokens[room.room]) == 3 for room in rooms)


def test_what_decode_has_is_what_prefill_wrote_bit_by_bit(attention):
    options = {"digests": "1"}
    prefill = prefill_of(attention, options=options, chunk_tokens=64)
    decode = decode_of(attention, options=options)
    one = request(1, prompts(4, (150,))[0], max_tokens=1)  # which prefill has picked: decode adds no row
    prefill.run(one)
    decode.admit(one, prefill)
    decode.run()
    cache = prefill.engine.model._cache
    digests = cache.digests(cache.index(prefill.slots(one), 1))
    assert decode.ends[1].kv_digest == model_of(prefill.engine).whole_digest(digests)


def test_digests_are_made_for_who_asks(attention):
    prefill, decode = prefill_of(attention), decode_of(attention)
    one = request(1, prompts(4, (20,))[0], max_tokens=1)
    decode.admit(one, prefill.run(one))
    assert decode.run().ends[1].kv_digest == b""


def test_hisparse_picks_of_all_there_is_are_the_textbooks(attention, monkeypatch):
    options = {"top_k": "64", "index_share": "2"}
    hisparse = HiSparse(device_slots=256, hot_tokens=80, dense_slots=128)
    prefill = prefill_of(attention, options=options, chunk_tokens=32)
    decode = decode_of(attention, options=options, hisparse=hisparse)
    one = request(1, prompts(5, (60,))[0], max_tokens=2, sparse=True)
    decode.admit(one, prefill.run(one))
    latest = last_logits(decode.engine, monkeypatch)
    decode.run()
    near(latest[0][0], textbook(model_of(decode.engine), np.append(one.prompt, decode.tokens[1][0]))[1])


def test_spans_show_when_each_layer_was_computed(attention):
    recorded = []

    def spans(lane, name, begin_s, end_s, *, room, layer=-1, byte_count=0):
        recorded.append((lane, name, begin_s, end_s, room, layer))

    prefill = prefill_of(attention, chunk_tokens=64, spans=spans)
    decode = decode_of(attention, spans=spans)
    one = request(7, prompts(6, (100,))[0], max_tokens=2)
    prefill.run(one)
    assert (recorded, prefill.engine.model.spans.pending) == ([], True), "its rows may still be on their way"
    prefill.engine.free(7)
    prefill.run()
    assert not prefill.engine.model.spans.pending
    layers = [(lane, name, room, layer) for lane, name, _, _, room, layer in recorded]
    chunks = [("compute", name, 7, layer) for name in ("rows 0-64", "rows 64-100") for layer in range(3)]
    assert layers == [*chunks, ("pick", "", 7, -1)]
    ends = [end for _, _, begin, end, _, _ in recorded]
    assert ends == sorted(ends)
    assert all(begin <= end for _, _, begin, end, _, _ in recorded)
    assert all(before[3] <= after[2] for before, after in pairwise(recorded))
    decode.admit(one, prefill)
    decode.run()
    assert [lane for lane, *_ in recorded[7:]] == ["step"]


def test_cells_do_not_wait_for_the_token_of_a_prompt_that_a_card_still_computes():
    class Slow:
        ready, asked = False, 0

        def get(self):
            Slow.asked += 1
            return torch.zeros(257)

    engine = create(config(attention="mla", options=OPTIONS["mla"]))
    assert engine.admit(request(1, prompts(9, (20,))[0]))
    engine._picking.append(_Picking(request(9, prompts(9, (20,))[0]), LastRow(Slow())))
    assert engine.admit(request(2, prompts(10, (20,))[0]))
    steps = [engine.step() for _ in range(2)]
    assert [[type(event) for event in step] for step in steps] == [[Computed] * 3] * 2
    assert Slow.asked == 0
    assert not engine.idle
    (last,) = engine.step()
    assert (last.room, Slow.asked) == (9, 1)
    assert [event.room for event in engine.step()] == [1, 2]
    assert engine.idle


def test_both_sides_draw_the_same_weights_and_a_seed_others(attention):
    prefill, decode = prefill_of(attention), decode_of(attention)
    assert prefill.engine.description.weights == decode.engine.description.weights
    assert torch.equal(model_of(prefill.engine)._head, model_of(decode.engine)._head)
    other = prefill_of(attention, options={"seed": "1"})
    assert other.engine.description.weights != prefill.engine.description.weights
    assert not torch.equal(model_of(prefill.engine)._head, model_of(other.engine)._head)


@pytest.mark.parametrize(("kind", "layers", "row_bytes"), [("mla", 61, 1_152), ("gqa", 32, 4_096)])
def test_the_real_dimensions_are_the_default(kind, layers, row_bytes):
    sizes = deep._architecture(config(options={}), deep.DeepOptions(attention=kind))
    assert (sizes.layers, sizes.width, sizes.context_tokens) == (layers, 4_096, 65_536)
    assert len(sizes.kinds) * sizes.cache_heads * sizes.head_bytes == row_bytes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {"kv_heads": "3"}}, "kv_heads"),
        ({"options": {"colour": "red"}}, "colour"),
        ({"options": {"layers": "129"}}, "layers"),
        ({"attention": "linear"}, "linear"),
    ],
)
def test_a_setting_that_makes_no_model_is_named(change, named):
    with pytest.raises(ConfigError, match=named):
        create(config(**({"attention": "gqa", "options": {}} | change)))


def test_a_group_is_refused():
    class Two:
        ranks = Ranks(tp_size=2)

    with pytest.raises(ConfigError, match="one process"):
        create(config(group=Two(), options=SMALL))


def test_rows_copied_to_another_layout_are_the_same_rows(attention):
    prefill = prefill_of(attention, page_size=64, host_layout="page_head")
    one = request(1, prompts(8, (90,))[0])
    prefill.run(one)
    decode = decode_of(attention, host_layout="layer_first")
    slots = decode.take(0, one)[:90]
    copy_rows((prefill.memory, prefill.layout), prefill.slots(one), (decode.memory, decode.layout), slots)
    ours, theirs = kv_of(prefill.memory, prefill.layout, prefill.slots(one)), kv_of(decode.memory, decode.layout, slots)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

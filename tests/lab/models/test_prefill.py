"""The prefill side: cells, pages, turns, and what it refuses."""

import mmap
import os

import numpy as np
import pytest
from pdtransfer_lab.models.factory import create

from pdtransfer.errors import WorldError
from pdtransfer.memory import shared_pool
from pdtransfer.memory.available_memory import AvailableMemory
from pdtransfer.serve.engine_api import Computed
from pdtransfer.serve.engines.shell.decode import DecodeShell
from pdtransfer.serve.engines.shell.first_token import FirstToken
from pdtransfer.serve.engines.shell.prefill import PrefillShell
from tests.support.engine_pair import SMALL, Prefill, config, heads_of, places, prompts, request


@pytest.mark.parametrize(("chunk_tokens", "layers_per_cell"), [(512, "0"), (100, "0"), (64, "1"), (100, "2"), (7, "3")])
def test_cells_cover_every_row_and_layer_once_in_order(chunk_tokens, layers_per_cell):
    options = {"layers": "3", "layers_per_cell": layers_per_cell}
    prefill = Prefill.of(chunk_tokens=chunk_tokens, options=options)
    prefill.run(request(1, prompts(0, (230,))[0]))
    count = np.zeros((230, 3), int)
    for cell in prefill.cells[1]:
        assert cell.component == "kv"
        assert cell.rows[1] - cell.rows[0] <= chunk_tokens
        assert cell.layers[1] - cell.layers[0] <= (int(layers_per_cell) or 3)
        assert len(cell.pages) == -(-cell.rows[1] // 16)
        count[slice(*cell.rows), slice(*cell.layers)] += 1
    assert (count == 1).all()
    assert [cell.rows for cell in prefill.cells[1]] == sorted(cell.rows for cell in prefill.cells[1])


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_a_cell_is_in_the_pool_when_it_is_reported(attention):
    prefill = Prefill.of(attention=attention, chunk_tokens=64, options=SMALL | {"layers_per_cell": "1"})
    for _, place, rows in prefill.offered(request(1, prompts(1, (150,))[0])):
        assert rows.any(axis=1).all()
        assert np.array_equal(prefill.memory[place], rows)


def test_only_the_pages_of_the_room_are_written():
    prefill = Prefill.of(page_size=16, slots=256)
    prefill.memory[:] = 7.0
    one = request(1, prompts(2, (40,))[0])
    prefill.run(one)
    expected = np.ones(len(prefill.memory), bool)
    for kind, layer, head in heads_of(prefill.layout):
        expected[places(prefill.layout, kind, layer, head, prefill.slots(one))] = False
    assert np.array_equal(prefill.memory == 7.0, expected)


def test_stale_pages_do_not_show():
    one = request(1, prompts(3, (100,))[0])
    clean = Prefill.of(chunk_tokens=30).run(one)
    stale = Prefill.of(chunk_tokens=30)
    stale.memory[:] = np.nan
    assert stale.run(one).aux == clean.aux


def test_a_full_pool_refuses_until_pages_are_freed():
    engine = create(config(slots=128))
    first, second = (request(room, prompt) for room, prompt in enumerate(prompts(4, (100, 40))))
    assert engine.admit(first)
    assert not engine.admit(second)
    while not engine.idle:
        engine.step()
    assert not engine.admit(second)
    engine.cancel(first.room)
    assert not engine.admit(second), "cancelled pages may still be read"
    engine.free(first.room)
    assert engine.admit(second)


def test_every_page_comes_back_once():
    engine = create(config(slots=256))
    random = np.random.default_rng(5)
    for turn in range(30):
        room = request(turn, prompts(turn, (int(random.integers(1, 257)),))[0])
        assert engine.admit(room)
        for _ in range(int(random.integers(0, 3))):
            engine.step()
        engine.free(turn)
        engine.free(turn)
        assert engine.idle
    everything = [request(1000 + index, prompt) for index, prompt in enumerate(prompts(6, (16,) * 16))]
    assert all(engine.admit(one) for one in everything)
    assert not engine.admit(request(2000, prompts(7, (1,))[0]))
    cells = [cell for _ in everything for cell in engine.step() if isinstance(cell, Computed)]
    assert sorted(page for cell in cells for page in cell.pages) == list(range(16))


def test_a_cancelled_room_computes_no_more_and_reports_nothing():
    engine = create(config(chunk_tokens=16))
    engine.admit(request(1, prompts(8, (100,))[0]))
    engine.step()
    engine.cancel(1)
    engine.cancel(99)
    assert engine.idle
    before = bytes(engine.pool.view)
    assert engine.step() == []
    assert bytes(engine.pool.view) == before


def test_a_short_prompt_waits_for_one_chunk_of_the_long_ones_at_most():
    prefill = Prefill.of(chunk_tokens=16, slots=4096)
    for room, prompt in enumerate(prompts(9, (320,) * 8)):
        assert prefill.engine.admit(request(room, prompt))
    for _ in range(5):
        prefill.step()
    assert prefill.engine.admit(request(100, prompts(10, (1,))[0]))
    prefill.step()
    prefill.step()
    assert 100 in prefill.aux


def test_a_long_prompt_is_not_starved_by_short_ones():
    prefill = Prefill.of(chunk_tokens=16, slots=4096)
    assert prefill.engine.admit(request(0, prompts(11, (320,))[0]))
    for step in range(1, 41):
        assert prefill.engine.admit(request(step, prompts(step, (1,))[0]))
        prefill.step()
    assert 0 in prefill.aux


def test_aux_carries_the_first_token_and_the_digest_of_its_logits():
    one = request(1, prompts(12, (33,))[0])
    prefill = Prefill.of().run(one)
    handoff = FirstToken.unpack(prefill.aux[1], prompt_tokens=33, facts=prefill.engine.model.facts)
    assert 0 <= handoff.id <= 256
    assert len(handoff.logits_digest) == 16


BAD = [
    (np.zeros(0, np.int64), {}, "prompt: 0 tokens"),
    (np.array([1, 257]), {}, r"id 257 is not within \[0, 257\)"),
    (np.array([1, -1]), {}, "id -1 is not within"),
    (np.array([1.0]), {}, "float64"),
    (np.zeros((1, 1), np.int64), {}, r"\(1, 1\)"),
    (np.zeros(10, np.int64), {"max_tokens": 0}, "max_tokens: 0"),
    (np.zeros(90, np.int64), {"max_tokens": 11}, "90 tokens and max_tokens 11 are 101 tokens, the context has 100"),
    (np.zeros(10, np.int64), {"temperature": float("nan")}, "temperature: nan"),
    (np.zeros(10, np.int64), {"temperature": -1.0}, "temperature: -1.0"),
    (np.zeros(10, np.int64), {"top_p": 0.0}, "top_p: 0.0"),
    (np.zeros(10, np.int64), {"seed": 1 << 64}, "seed: 18446744073709551616"),
]


@pytest.mark.parametrize(("prompt", "sampling", "named"), BAD)
def test_a_request_that_makes_no_sense_is_refused_by_both_sides(prompt, sampling, named):
    one = request(1, prompt, **sampling)
    options = SMALL | {"context_tokens": "100"}
    prefill = create(config("prefill", options=options))
    with pytest.raises(ValueError, match=named):
        prefill.admit(one)
    assert prefill.idle
    with pytest.raises(ValueError, match=named):
        create(config("decode", options=options)).check(one)


def test_a_request_at_the_limit_of_the_context_is_served():
    options = SMALL | {"context_tokens": "100"}
    assert create(config(options=options)).admit(request(1, np.zeros(90, np.int64), max_tokens=10))


def test_a_prompt_longer_than_the_pool_is_refused_forever():
    with pytest.raises(ValueError, match="65 tokens, the pool has 64 slots"):
        create(config(slots=64)).admit(request(1, np.zeros(65, np.int64)))


def test_a_room_that_still_holds_pages_is_not_admitted_again():
    engine = create(config())
    one = request(0xAB, prompts(13, (5,))[0])
    assert engine.admit(one)
    engine.cancel(one.room)
    with pytest.raises(ValueError, match="00000000000000ab"):
        engine.admit(one)
    engine.free(one.room)
    assert engine.admit(one)


def test_the_factory_makes_the_side_that_was_asked_for():
    assert isinstance(create(config("prefill")), PrefillShell)
    assert isinstance(create(config("decode")), DecodeShell)
    assert create(config(options={"eos": "17"})).description.eos == 17


def test_whoever_is_handed_the_pool_can_neither_resize_nor_write_it():
    engine = create(config())
    pool = engine.pool
    size = os.fstat(pool.fd).st_size
    for refused in (
        lambda: os.ftruncate(pool.fd, 0),
        lambda: os.ftruncate(pool.fd, 2 * size),
        lambda: os.pwrite(pool.fd, b"x", 0),
        lambda: mmap.mmap(pool.fd, size),
    ):
        with pytest.raises(PermissionError):
            refused()
    pool.view[0] = 1
    with mmap.mmap(pool.fd, size, prot=mmap.PROT_READ) as theirs:
        assert theirs[0] == 1


def test_a_pool_that_the_host_has_no_memory_for_is_refused_with_both_values(monkeypatch):
    monkeypatch.setattr(shared_pool, "available_memory", lambda: AvailableMemory("a cgroup", 4_096))
    with pytest.raises(WorldError, match=r"a pool of \d+ bytes: a cgroup is 4096 bytes"):
        create(config())

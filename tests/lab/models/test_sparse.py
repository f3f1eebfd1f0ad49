"""Sparse decode: what is picked, that nothing but the picks counts, and that every way of running it is bitwise one."""

from functools import partial

import numpy as np
import pytest
import torch
from pdtransfer_lab.models.architecture import INDEX_DIM, INDEX_HEADS
from pdtransfer_lab.models.attention import KEY_BLOCK
from pdtransfer_lab.models.factory import create, generate, generate_many
from pdtransfer_lab.models.indexer import IndexCache, Queries, pick_top, scores
from pdtransfer_lab.models.numerics import single_threaded
from pdtransfer_lab.models.steps import AllResident, Own, StepPart, _readings

from pdtransfer.layout.layout_builders import DSA_INDEX_PARTS, HOST_LAYOUTS, item_layout
from pdtransfer.serve.engine_api import Finished
from pdtransfer.wire import Sampling
from tests.lab.models.engine_cuts import are_the_same, otherwise
from tests.support.engine_pair import SMALL, Decode, Prefill, config, heads_of, places, prompts, request

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 513)
TOP = 16
SPARSE = SMALL | {"top_k": str(TOP)}


def requests(seed=0, lengths=LENGTHS, max_tokens=6):
    return [(prompt, Sampling(max_tokens=max_tokens, ignore_eos=True)) for prompt in prompts(seed, lengths)]


@pytest.fixture(scope="module")
def expected(attention):
    return generate_many(config(attention=attention, slots=4096, page_size=64, options=SPARSE), requests())


@pytest.fixture(scope="module")
def dense(attention):
    return generate_many(config(attention=attention, slots=4096, page_size=64), requests())


# Picks


def plainly(found, top):
    """By sorting pairs of (score, position)."""
    order = sorted((index for index in range(len(found)) if found[index] > -np.inf), key=lambda at: (-found[at], at))
    return sorted(order[:top])


@pytest.mark.parametrize("top", [1, 3, 16, 40, 100])
def test_picks_are_the_highest_and_of_equal_scores_the_lower_positions(top):
    random = np.random.default_rng(top)
    # Few different values, so that the last picks are a choice among equals; each row ends somewhere else.
    found = torch.tensor(random.integers(-3, 3, (50, 64)).astype(np.float32)) / 7
    for row, end in enumerate(random.integers(1, 65, 50)):
        found[row, end:] = -torch.inf
    for row, picks in zip(found, pick_top(found, top), strict=True):
        wanted = plainly(row.numpy(), top)
        assert picks.tolist() == wanted + [-1] * (top - len(wanted))


def test_a_score_that_is_no_number_is_picked_first_and_spoils_no_other_row():
    found = torch.tensor([[1.0, torch.nan, 3.0, -torch.inf], [1.0, 2.0, 3.0, 4.0]])
    assert pick_top(found, 2).tolist() == [[1, 2], [2, 3]]


def index_cache(slots=1024, layers=1):
    layout = item_layout(
        "layer_first", parts=DSA_INDEX_PARTS, layers=range(0, 2 * layers, 2), slots=slots, page_size=64
    )
    return IndexCache(torch.full((layout.end // 4,), torch.nan), layout)


def test_index_keys_come_back_as_float8_with_a_scale_a_token():
    cache, keys = index_cache(), torch.randn(100, INDEX_DIM) * torch.logspace(-12, 12, 100).unsqueeze(1)
    keys[7] = 0.0
    slots = np.random.default_rng(0).permutation(1024)[:100]
    cache.write(0, cache.index(slots, 1), keys)
    held, scales = cache.read(0, cache.index(slots, KEY_BLOCK))
    found = (held * scales.unsqueeze(1))[:100]
    assert torch.all((found - keys).abs() <= keys.abs() / 16 + keys.abs().amax(-1, keepdim=True) * 2.0**-9 / 448 * 2)
    assert torch.all(found[7] == 0.0)


def test_a_score_is_the_sum_of_what_the_heads_find_and_does_not_depend_on_others():
    single_threaded()
    torch.manual_seed(0)
    cache, random = index_cache(), np.random.default_rng(0)
    lengths = [1, 255, 256, 300]
    slots = np.split(random.permutation(1024)[: sum(lengths)], np.cumsum(lengths)[:-1])
    indices = [cache.index(slot, KEY_BLOCK) for slot in slots]
    keys = [torch.randn(length, INDEX_DIM) for length in lengths]
    for slot, key in zip(slots, keys, strict=True):
        cache.write(0, cache.index(slot, 1), key)
    asked = Queries(heads=torch.randn(4, INDEX_HEADS, INDEX_DIM), shares=torch.randn(4, INDEX_HEADS))
    found = scores(asked, cache, 0, indices, lengths)
    assert found.shape == (4, 300)
    for row, length in enumerate(lengths):
        small, scales = cache.read(0, indices[row][:, :length])
        key = torch.einsum("hd,kd->hk", asked.heads[row].double(), small.double() * scales.double().unsqueeze(1))
        wanted = (key.relu() * asked.shares[row].double().unsqueeze(1)).sum(0)
        assert torch.allclose(found[row, :length].double(), wanted, atol=1e-3)
        assert torch.all(found[row, length:] == -torch.inf)
        alone = Queries(heads=asked.heads[row : row + 1], shares=asked.shares[row : row + 1])
        assert torch.equal(scores(alone, cache, 0, indices[row : row + 1], [length])[0], found[row, :length])


@pytest.mark.parametrize("top", [16, 255, 256, 300])
def test_a_step_reads_the_picks_in_order_then_the_newest_token_and_nothing_else(top):
    positions = [1, 15, 16, 17, 255, 256, 299, 300, 700]
    picked, newest = torch.full((len(positions), top), -7), 10_000 + torch.arange(len(positions))
    for row, position in enumerate(positions):
        count = min(position, top)
        picked[row, :count] = 1_000 * row + torch.arange(count)
    rooms = list(range(len(positions)))
    part = StepPart(residency=AllResident(None), rooms=rooms, positions=positions, rows=[], index=[])
    where = torch.where(picked < 0, newest.unsqueeze(1), picked)
    seen = []
    for reading in _readings(Own(part, 3, newest, newest[:, None]), where):
        tiles = reading.tiles
        assert tiles.first == 3 + len(seen)
        for index, (depth, end) in enumerate(zip(tiles.depths, tiles.ends, strict=True)):
            assert (end - 1) // KEY_BLOCK == depth
            # A block's source has the tiles that reach it, this one and those after it at least.
            keys = [source.view(-1, KEY_BLOCK)[index - len(tiles.depths)] for source in tiles.sources[: depth + 1]]
            hidden = torch.isinf(tiles.bias[index, 0])
            assert torch.equal(hidden, torch.arange(KEY_BLOCK) > (end - 1) % KEY_BLOCK)
            seen.append(torch.cat(keys)[:end].tolist())
    for row, position in enumerate(positions):
        count = min(position, top)
        assert seen[row] == [*picked[row, :count].tolist(), int(newest[row])]


# The model


def test_picks_of_all_there_is_are_the_dense_model(attention, dense):
    every = generate_many(
        config(attention=attention, slots=4096, page_size=64, options=SMALL | {"top_k": "600"}), requests()
    )
    assert [(one.tokens, one.logits_digest) for one in every] == [(one.tokens, one.logits_digest) for one in dense]


def test_fewer_picks_than_tokens_are_another_model(expected, dense):
    same = [one.logits_digest == other.logits_digest for one, other in zip(expected, dense, strict=True)]
    # With max_tokens 6 the last step is at position length + 4, and picks of the length + 4 tokens before.
    assert same == [length + 4 <= TOP for length in LENGTHS]


@pytest.mark.slow
@otherwise
def test_no_chunk_batch_page_layout_or_pool_changes_a_bit(attention, expected, cut):
    assert are_the_same(cut, attention, SPARSE, requests(), expected)


@pytest.mark.parametrize("share", [1, 2, 3])
def test_layers_share_picks_as_configured(attention, share):
    options = {"layers": "4", "top_k": str(TOP), "index_share": str(share)}
    request = requests(2, (90,))[0]
    alone = generate(config(attention=attention, options=options), *request)
    both = generate_many(config(attention=attention, options=options, batch_max=2), [request, requests(3, (40,))[0]])
    assert both[0] == alone
    planes = create(config(attention=attention, options=options)).description.components[1].layout.planes
    assert sorted({plane.layer for plane in planes}) == list(range(0, 4, share))


@pytest.fixture(scope="module")
def rooms():
    return [
        request(index, prompt) for index, prompt in enumerate(prompts(0, LENGTHS)) if len(prompt) in (2, 17, 64, 300)
    ]


@pytest.fixture(scope="module")
def prefill(attention, rooms):
    """Has run them; whoever takes its rows leaves them as they are."""
    return Prefill.of(attention=attention, slots=1024, chunk_tokens=100, options=SPARSE).run(*rooms)


@pytest.mark.parametrize("target", HOST_LAYOUTS)
def test_rows_that_crossed_between_two_engines_decode_to_what_one_process_generates(
    attention, expected, rooms, prefill, target
):
    decode = Decode.of(attention=attention, host_layout=target, slots=1024, batch_max=3, options=SPARSE)
    assert decode.served(rooms, prefill) == [expected[room.room] for room in rooms]


def test_index_rows_are_cells_of_their_own_and_every_plane_is_offered_once(attention):
    options = {"layers": "4", "top_k": "8", "layers_per_cell": "1", "index_share": "2"}
    one = request(1, prompts(4, (100,))[0])
    prefill = Prefill.of(attention=attention, chunk_tokens=64, options=options).run(one)
    cells = [(cell.rows, cell.layers) for cell in prefill.cells[1] if cell.component == "index"]
    assert sorted(cells) == [((0, 64), (0, 1)), ((0, 64), (2, 3)), ((64, 100), (0, 1)), ((64, 100), (2, 3))]


@pytest.fixture(scope="module")
def ended(attention):
    """How one room of 150 tokens ends, after `spoil(decode)` on what has landed."""
    one = request(7, prompts(5, (150,))[0])
    prefill = Prefill.of(attention=attention, options=SPARSE).run(one)

    def run(spoil=lambda _: None):
        decode = Decode.of(attention=attention, options=SPARSE)
        decode.admit(one, prefill)
        spoil(decode)
        return decode.run().ends[7]

    return run


def test_one_flipped_bit_of_the_index_shows_in_the_kv_digest(ended):
    def flip(decode):
        layout = decode.index_layout
        decode.memory.view(np.uint8)[layout.address(0, decode.index_slots[7][11:12])] ^= 1

    assert ended(flip).kv_digest != ended().kv_digest


@pytest.mark.slow
def test_only_what_is_picked_is_read(ended):
    """Most of 150 tokens are not among the 16 picks of 5 steps: what lies there does no harm, elsewhere it does."""

    def spoil(at, decode):
        for kind, layer, head in heads_of(decode.layout):
            decode.memory[places(decode.layout, kind, layer, head, decode.slots[7][at : at + 1])] = np.nan

    good = ended()
    ends = [ended(partial(spoil, offset)) for offset in range(0, 150, 10)]
    harmless = [isinstance(end, Finished) and end.logits_digest == good.logits_digest for end in ends]
    assert any(harmless)
    assert not all(harmless)


def test_a_dense_model_is_what_it_was(attention):
    """Weights and GPU, whatever index_share says."""
    plain = create(config(attention=attention)).description
    assert [component.name for component in plain.components] == ["kv"]
    same = create(config(attention=attention, options=SMALL | {"index_share": "3", "top_k": "0"})).description
    assert same.weights == plain.weights
    sparse = create(config(attention=attention, options=SPARSE)).description
    assert sparse.weights != plain.weights
    assert sparse.components[0] == plain.components[0]

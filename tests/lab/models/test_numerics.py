"""No row's bits depend on its place or its company; and the attention is the textbook's."""

import numpy as np
import pytest
import torch
from pdtransfer_lab.models.attention import KEY_BLOCK, Tiles, attend, causal_bias
from pdtransfer_lab.models.numerics import BLOCK_ROWS, Rope, block_up, exp2, linear, rms_norm, silu, single_threaded


@pytest.fixture(autouse=True)
def one_thread():
    single_threaded()
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("summed", "columns"),
    [(256, 256), (256, 576), (256, 768), (768, 256), (64, 512), (512, 64), (128, 256), (256, 257)],
)
def test_a_row_of_a_product_is_the_same_at_any_place_and_in_any_company(summed, columns):
    weight, row = torch.randn(summed, columns), torch.randn(summed)
    alone = torch.zeros(BLOCK_ROWS, summed)
    alone[0] = row
    expected = linear(alone, weight)[0]
    assert torch.allclose(expected, row @ weight, atol=1e-3)
    for place in range(3 * BLOCK_ROWS):
        crowd = torch.randn(3 * BLOCK_ROWS, summed)
        crowd[place] = row
        assert torch.equal(linear(crowd, weight)[place], expected), place


def test_every_product_has_one_shape_whatever_the_row_count(monkeypatch):
    """On one CPU other shapes may happen to agree; on the next they do not."""
    seen = []
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: seen.append(a.shape[0]) or plain(a, b, out=out))
    linear(torch.randn(5 * BLOCK_ROWS, 8), torch.randn(8, 8))
    assert seen == [BLOCK_ROWS] * 5


def test_a_product_of_rows_that_are_no_whole_blocks_is_our_own_mistake():
    with pytest.raises(AssertionError):
        linear(torch.zeros(BLOCK_ROWS + 1, 8), torch.zeros(8, 8))


@pytest.mark.parametrize("function", [rms_norm, silu])
def test_a_row_is_the_same_whatever_the_row_count(function):
    row = torch.randn(512)
    expected = function(row.expand(BLOCK_ROWS, -1).contiguous())[0]
    for rows in (BLOCK_ROWS, 2 * BLOCK_ROWS, 9 * BLOCK_ROWS):
        for place in (0, 1, 31, rows - 1):
            crowd = torch.randn(rows, 512)
            crowd[place] = row
            assert torch.equal(function(crowd)[place], expected), (rows, place)


def test_exp2_is_the_same_in_a_tail_as_in_a_vector():
    values = torch.randn(4096) * 10 - 5
    whole = exp2(values)
    assert torch.allclose(whole.double(), 2 ** values.double(), rtol=1e-6)
    for first in range(40):
        for count in (1, 2, 3, 17, 31, 33, 100):
            assert torch.equal(exp2(values[first : first + count]), whole[first : first + count])
    assert exp2(torch.tensor([-torch.inf])).item() == 0.0


@pytest.mark.parametrize(("rows", "padded"), [(1, 64), (64, 64), (65, 128), (0, 0)])
def test_rows_are_padded_to_whole_blocks(rows, padded):
    assert block_up(rows) == padded


def test_rope_turns_by_the_difference_of_positions():
    rope = Rope(positions=100, dim=64, device=torch.device("cpu"))
    query, key = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(at, other):
        return float((rope(query, torch.tensor([at])) * rope(key, torch.tensor([other]))).sum())

    assert score(20, 10) == pytest.approx(score(90, 80), abs=1e-3)
    assert abs(score(20, 10) - score(20, 11)) > 1e-2


def folded(query, keys, values, first_position, rows, tiles_together):
    """attend() for one request whose last query row is its last key: query (heads, rows, group, dim)."""
    heads, count, group, _ = query.shape
    ends = [len(keys)]
    blocks = -(-len(keys) // KEY_BLOCK)
    # Places past the end hold NaN, as a slot that was never written may.
    held = (
        torch.full((blocks * KEY_BLOCK, *keys.shape[1:]), torch.nan),
        torch.full((blocks * KEY_BLOCK, *values.shape[1:]), torch.nan),
    )
    held[0][: len(keys)], held[1][: len(values)] = keys, values
    positions = torch.arange(first_position, first_position + count).view(-1, rows)
    depths = [int(tile[0]) // KEY_BLOCK for tile in positions]
    found = []
    tiled = query.view(heads, count // rows, rows * group, -1)
    for offset in range(0, len(depths), tiles_together):
        own = slice(offset, offset + tiles_together)
        tiles = Tiles(
            first=offset,
            depths=depths[own],
            bias=causal_bias(positions[own]),
            sources=list(torch.arange(blocks * KEY_BLOCK).view(blocks, KEY_BLOCK)),
            ends=ends,
        )
        found.append(attend(tiled[:, own], tiles, lambda index: (held[0][index], held[1][index]), values.shape[-1]))
    return torch.cat(found, dim=1).view(heads, count, group, -1)


@pytest.mark.parametrize(("heads", "group", "key_dim", "value_dim"), [(4, 2, 64, 64), (1, 2, 576, 512)])
@pytest.mark.parametrize(("first", "count"), [(0, 64), (192, 128), (512, 64)])
def test_attention_is_the_softmax_of_the_textbook(heads, group, key_dim, value_dim, first, count):
    keys, values = torch.randn(first + count, heads, key_dim), torch.randn(first + count, heads, value_dim)
    query = torch.randn(heads, count, group, key_dim) * 0.3
    scores = torch.einsum("hrgd,khd->hrgk", query.double(), keys.double()) * np.log(2)
    hidden = torch.arange(first + count) > torch.arange(first, first + count)[:, None]
    shares = scores.masked_fill(hidden[None, :, None], -torch.inf).softmax(-1)
    expected = torch.einsum("hrgk,khd->hrgd", shares, values.double())
    found = folded(query, keys, values, first, 64, 4)
    assert torch.allclose(found.double(), expected, atol=1e-4)


@pytest.mark.parametrize(("heads", "group", "key_dim", "value_dim"), [(4, 2, 64, 64), (1, 2, 576, 512)])
def test_attention_of_a_tile_does_not_depend_on_tiles_beside_it_nor_on_later_keys(heads, group, key_dim, value_dim):
    keys, values = torch.randn(640, heads, key_dim), torch.randn(640, heads, value_dim)
    query = torch.randn(heads, 640, group, key_dim) * 0.3
    expected = folded(query, keys, values, 0, 64, 10)
    for together in (1, 3, 4):
        assert torch.equal(folded(query, keys, values, 0, 64, together), expected)
    for end in (64, 320, 576):
        assert torch.equal(folded(query[:, :end], keys[:end], values[:end], 0, 64, 4), expected[:, :end])

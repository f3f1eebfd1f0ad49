"""Where the numbers of a token are in a KV cache, found by having attention backends write one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm.kinds import PAGED
from pdtransfer.adapters.vllm.orders import KVGroup
from pdtransfer.adapters.vllm.pools import Pools
from pdtransfer.adapters.vllm.token_rows import kinds_of
from pdtransfer.errors import ConfigError, LayoutMismatchError
from pdtransfer.kernels import CancelWord, numpy_copy
from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.layout.layout_builders import strided_layout
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import plan
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import pools_of

BLOCKS, HEADS, TOKENS, SIZE = 6, 2, 8, 4
NAME = "model.layers.0.self_attn.attn"


class Backend:
    """An attention backend that keeps keys and values in one of vLLM's ways, or in one that nobody knows."""

    def __init__(self, way: str) -> None:
        self.way = way

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for at, slot in enumerate(slots.tolist()):
            page, token = divmod(slot, cache.shape[2])
            for head in range(cache.shape[1]):
                block = cache[page, head]  # [tokens, 2 * size]
                if self.way == "side by side":
                    block[token] = torch.cat([key[at, head], value[at, head]])
                    continue
                keys, values = block.reshape(-1).view(2, -1)
                values.view(-1, SIZE)[token] = value[at, head]
                if self.way == "number by number":
                    keys.view(SIZE, -1)[:, token] = key[at, head]
                elif self.way == "row by row":
                    keys.view(-1, SIZE)[token] = key[at, head]
                else:
                    keys.view(-1, 2, SIZE // 2, 2)[token // 2, token % 2] = key[at, head].view(2, -1).T


class LatentBackend:
    """vLLM's latent attention: a row for a token."""

    kv_lora_rank, kv_cache_dtype = 24, "auto"

    def do_kv_cache_update(
        self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any
    ) -> None:
        cache.view(-1, cache.shape[-1])[slots] = torch.cat([latent, rope.squeeze(1)], dim=-1)


def made(way: str, tokens: int = TOKENS) -> tuple[Any, torch.Tensor, Pools]:
    """A layer, its cache and the component of it, whose bases are offsets from the cache."""
    layer, cache = SimpleNamespace(impl=Backend(way)), torch.zeros(BLOCKS, HEADS, tokens, 2 * SIZE)
    return layer, cache, described(layer, cache, tokens=tokens)


def described(layer: Any, cache: torch.Tensor, heads: int = HEADS, **more: Any) -> Pools:
    given = {"blocks": BLOCKS, "tokens": TOKENS, "base": cache.data_ptr(), "heads": Heads(heads, Ranks())} | more
    return pools_of({NAME: cache}, **given, kinds={NAME: kinds_of(NAME, layer, cache)})


def rows_of(count: int) -> tuple[torch.Tensor, Layout]:
    """Keys and values as engines with a row for each token keep them, [k and v, slots, heads, numbers]."""
    rows = torch.arange(2 * count * HEADS * SIZE, dtype=torch.float32).view(2, count, HEADS * SIZE)
    views = {(0, kind): rows[at] for at, kind in enumerate(("k", "v"))}
    return rows.view(2, count, HEADS, SIZE), strided_layout(views, axes=("row", "head"), origin=rows.data_ptr())


@pytest.mark.parametrize("way", ["side by side", "number by number", "row by row"])
def test_rows_of_another_engine_land_where_the_backend_would_have_written_them(way: str) -> None:
    layer, cache, found = made(way)
    assert not cache.any(), "nothing of the search stays"
    [held] = found.rows
    assert (held.component.name, held.component.tokens_per_row, held.component.layout.page_size) == ("kv", 1, TOKENS)
    rows, source = rows_of(32)
    sources, blocks = np.array([3, 30, 4, 5, 17, 18, 9, 10, 11, 12, 0]), [4, 2]
    pairing = pair(source, held.component.layout)
    wanted = plan(pairing, sources, held.slots(blocks, len(sources)))
    assert numpy_copy.copy(wanted, rows.data_ptr(), cache.data_ptr(), CancelWord())
    expected = torch.zeros_like(cache)
    slots = torch.tensor([blocks[at // TOKENS] * TOKENS + at % TOKENS for at in range(len(sources))])
    layer.impl.do_kv_cache_update(layer, rows[0][sources], rows[1][sources], expected, slots)
    assert torch.equal(cache, expected)


def test_blocks_of_unequal_sizes_and_ways_pair() -> None:
    _, _, one = made("number by number", 4)
    _, _, other = made("side by side", 16)
    pairing = pair(one.components[0].layout, other.components[0].layout)
    assert pairing.row_bytes == 2 * HEADS * SIZE * 4


def test_another_dtype_and_another_size_of_heads_are_named() -> None:
    [component] = made("side by side")[2].components
    rows = torch.zeros(2, 8, HEADS * SIZE, dtype=torch.bfloat16)
    half = strided_layout({(0, kind): rows[at] for at, kind in enumerate("kv")}, axes=("row", "head"))
    with pytest.raises(LayoutMismatchError, match="dtype: source bfloat16, target float32"):
        pair(half, component.layout)
    rows = torch.zeros(2, 8, HEADS * SIZE * 2)
    wide = strided_layout({(0, kind): rows[at] for at, kind in enumerate("kv")}, axes=("row", "head"))
    with pytest.raises(LayoutMismatchError, match=r"heads: source 0\.\.15, target 0\.\.7"):
        pair(wide, component.layout)


def test_latents_are_rows() -> None:
    layer, cache = SimpleNamespace(impl=LatentBackend()), torch.zeros(BLOCKS, 1, TOKENS, 32)
    [component] = described(layer, cache, heads=1).components
    other = strided_layout({(0, "latent"): torch.zeros(64, 32)}, axes=("row",))
    assert component == Component("kv", "dram", 1, Span(), component.layout)
    assert pair(other, component.layout).row_bytes == 32 * 4


def test_smaller_pages_of_the_backend_are_parts_of_a_block() -> None:
    layer, cache = SimpleNamespace(impl=Backend("number by number")), torch.zeros(2 * BLOCKS, HEADS, TOKENS, 2 * SIZE)
    [held] = described(layer, cache, tokens=2 * TOKENS).rows
    assert held.component.layout.slots == 2 * BLOCKS * TOKENS
    assert held.pages([3, 1]).tolist() == [6, 7, 2, 3]
    assert held.slots([-1, 1], 20).tolist() == [-1] * 16 + [16, 17, 18, 19]


@pytest.mark.parametrize("backend", [Backend("packed"), SimpleNamespace()])
def test_a_backend_that_nobody_knows_is_refused(backend: Any) -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    with pytest.raises(ConfigError, match=f'{NAME}: .*{type(backend).__name__}.*: set rows to "blocks"'):
        kinds_of(NAME, SimpleNamespace(impl=backend), cache)
    assert not cache.any()


def test_windows_are_not_sent_by_tokens() -> None:
    layer, cache = SimpleNamespace(impl=Backend("side by side")), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    with pytest.raises(ConfigError, match=r"group0: attention windows cannot be transferred token by token"):
        described(layer, cache, groups=[(KVGroup(0, PAGED.of(TOKENS, window=16)), [NAME])])

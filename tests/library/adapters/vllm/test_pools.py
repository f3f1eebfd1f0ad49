"""A KV cache as vLLM shows it, and the components that are made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.heads import Heads
from pdtransfer.adapters.vllm.orders import KVGroup
from pdtransfer.adapters.vllm.pools import Pools, layer_number, pools, range_of
from pdtransfer.errors import ConfigError
from pdtransfer.handoff.sharing import holds_of, share_of, uncovered
from pdtransfer.layout.pairing import pair
from pdtransfer.wire import Ranks

BLOCKS, TOKENS, WIDTH = 8, 16, 32
ONE = Heads(4, Ranks())


def cache(layers: int, heads: int, *, parts: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Layers one behind the other in one allocation, whose heads lie apart."""
    whole = torch.arange(layers * BLOCKS * heads * TOKENS * WIDTH, dtype=torch.int32).view(dtype)
    made = whole.view(layers, BLOCKS * parts, heads, TOKENS // parts, WIDTH)
    return {f"model.layers.{at}.self_attn.attn": made[at] for at in range(layers)}


def made_of(
    tensors: dict[str, torch.Tensor], heads: Heads = ONE, groups: list[tuple[KVGroup, list[str]]] | None = None
) -> Pools:
    base, _ = range_of(tensors.values())
    groups = groups or [(KVGroup(0, TOKENS), list(tensors))]
    return pools(tensors, groups, blocks=BLOCKS, base=base, heads=heads)


def row(tensors: dict[str, torch.Tensor], made: Pools, plane: int, slot: int) -> np.ndarray:
    """The bytes of a plane's row, by its layout, as int32."""
    layout = made.components[0].layout
    whole = next(iter(tensors.values())).untyped_storage()
    first, count = layout.address(plane, slot), layout.planes[plane].row_bytes
    return np.frombuffer(bytes(whole[first : first + count]), np.int32)  # type: ignore[arg-type]


def test_a_row_is_a_block_of_one_layer() -> None:
    tensors = cache(2, 4)
    made = made_of(tensors)
    [component] = made.components
    assert (component.name, component.tokens_per_row, component.layout.page_size) == ("group0", TOKENS, 1)
    assert component.layout.row_bytes == 2 * 4 * TOKENS * WIDTH * 4
    for at, plane in enumerate(component.layout.planes):
        tensor = tensors[f"model.layers.{plane.layer}.self_attn.attn"]
        assert (plane.head_start, plane.head_count) == (0, 4)
        expected = tensor[5].flatten().view(torch.int32).numpy()
        assert np.array_equal(row(tensors, made, at, 5), expected)
    assert made.layers == ((0, 1),)
    assert made.complete_after == {name: (0, at) for at, name in enumerate(tensors)}


def test_smaller_blocks_of_the_backend_are_parts_of_a_row() -> None:
    tensors = cache(1, 4, parts=2)
    made = made_of(tensors)
    planes = made.components[0].layout.planes
    assert [(plane.kind, plane.head_count, plane.page_stride) for plane in planes] == [
        (kind, 4, 2 * 4 * (TOKENS // 2) * WIDTH * 4) for kind in ("kv", "kv.1")
    ]
    expected = tensors["model.layers.0.self_attn.attn"][7].flatten().view(torch.int32).numpy()
    assert np.array_equal(row(tensors, made, 1, 3), expected)


def test_heads_of_a_token_that_lie_together_are_one_thing() -> None:
    tensors = {name: each.view(BLOCKS, TOKENS, 4, WIDTH).transpose(1, 2) for name, each in cache(1, 4).items()}
    [plane] = made_of(tensors, Heads(8, Ranks(1, 2))).components[0].layout.planes
    assert (plane.row_bytes, plane.head_start, plane.head_count) == (4 * TOKENS * WIDTH * 4, 1, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "total"), [(2, 1, 4), (1, 2, 4), (4, 2, 4), (4, 1, 2), (2, 4, 2), (4, 4, 1)]
)
def test_ranks_of_unequal_groups_send_every_head_once(prefill: int, decode: int, total: int) -> None:
    """Also where there are fewer heads than ranks, so that several hold the same ones: as of latent attention."""

    def rank(at: int, size: int) -> Pools:
        return made_of(cache(2, max(1, total // size)), Heads(total, Ranks(at, size)))

    sources = [rank(at, prefill) for at in range(prefill)]
    holds = [holds_of(each.components, Ranks(at, prefill), each.replicas) for at, each in enumerate(sources)]
    for at in range(decode):
        target = rank(at, decode).components
        shares = {str(number): share_of(target, held, at) for number, held in enumerate(holds)}
        assert uncovered(target, shares) == ""
        for number, share in shares.items():
            for each in share:
                [source] = sources[int(number)].components
                first, *_, end = sorted(
                    {
                        at
                        for plane in each.layout.planes
                        for at in (plane.head_start, plane.head_start + plane.head_count)
                    }
                )
                pair(source.layout.heads(first, end), each.layout)


def test_a_cache_reaches_from_its_first_byte_to_its_last() -> None:
    tensors = cache(2, 4)
    first, end = range_of(tensors.values())
    assert first == tensors["model.layers.0.self_attn.attn"].data_ptr()
    assert end - first == 2 * BLOCKS * 4 * TOKENS * WIDTH * 4


def test_groups_in_the_same_memory_are_components_in_the_same_memory() -> None:
    tensors = cache(2, 4)
    names = list(tensors)
    tensors = {names[0]: tensors[names[0]], names[1]: tensors[names[0]], names[1] + ".again": tensors[names[0]]}
    groups = [(KVGroup(0, TOKENS), names[:1]), (KVGroup(2, TOKENS, window=64), [names[1], names[1] + ".again"])]
    made = made_of(tensors, groups=groups)
    one, two = made.components
    assert (one.name, two.name) == ("group0", "group2")
    assert [plane.base for plane in one.layout.planes] == [plane.base for plane in two.layout.planes]
    # A layer that shares another one's cache is not there twice.
    assert made.complete_after == {names[0]: (0, 0), names[1]: (1, 1)}


def test_two_caches_of_one_layer_are_complete_with_the_second() -> None:
    tensors = cache(2, 1)
    one, two = tensors.values()
    named = {"model.layers.0.self_attn.attn": one, "model.layers.0.self_attn.indexer": two}
    made = made_of(named, Heads(1, Ranks()))
    assert [(plane.layer, plane.kind) for plane in made.components[0].layout.planes] == [(0, "kv"), (0, "kv1")]
    assert made.complete_after == {"model.layers.0.self_attn.indexer": (0, 0)}


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(8, 16, 32), "a: a KV cache of shape (8, 16, 32), not [8, heads, tokens, width]"),
        (torch.zeros(7, 1, 16, 32), "a: a KV cache of shape (7, 1, 16, 32), not [8, heads, tokens, width]"),
        (torch.zeros(8, 1, 16, 64)[..., ::2], "a: views[0, 'kv'].strides"),
    ],
)
def test_a_cache_that_cannot_cross_is_named(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made_of({"a": tensor})
    assert text in str(caught.value)


def test_too_many_groups_are_refused() -> None:
    tensors = cache(1, 1)
    groups = [(KVGroup(at, TOKENS), list(tensors)) for at in range(17)]
    with pytest.raises(ConfigError, match="KV cache groups: 17, must be 1 to 16"):
        made_of(tensors, groups=groups)


def test_numbers_of_layers_are_read_from_their_names() -> None:
    names: dict[str, Any] = {
        "model.layers.12.self_attn.attn": 12, "language_model.model.layers.3": 3, "encoder": 7, "h.5.attn.k8": 5
    }  # fmt: skip
    assert {name: layer_number(name, 7) for name in names} == names


@pytest.mark.parametrize(
    ("group", "tokens", "first"),
    [
        (KVGroup(0, 16), 700, 0),
        (KVGroup(0, 16, window=64), 700, 39),  # tokens 637 on are seen by the next one
        (KVGroup(0, 16, window=64), 63, 0),
        (KVGroup(0, 16, chunk=128), 700, 40),
        (KVGroup(0, 16, chunk=128), 128, 8),
    ],
)
def test_a_window_needs_its_last_blocks(group: KVGroup, tokens: int, first: int) -> None:
    assert group.first_row(tokens) == first

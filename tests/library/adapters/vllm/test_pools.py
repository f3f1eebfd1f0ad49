"""A KV cache as vLLM shows it, and the components that are made of it."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.kinds import Heads, StatePart, described, state_planes
from pdtransfer.adapters.vllm.kinds import PAGED, STATE, parts_of
from pdtransfer.adapters.vllm.orders import KVGroup
from pdtransfer.adapters.vllm.pools import Pools, layer_number, range_of, with_heads
from pdtransfer.errors import ConfigError, LayoutMismatchError
from pdtransfer.layout.pairing import pair
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import pools_of
from tests.support.covered import check_covered

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
    return pools_of(tensors, groups, blocks=BLOCKS, heads=heads, base=base)


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


def test_a_table_that_lacks_blocks_has_too_few_slots_which_the_client_refuses() -> None:
    [rows] = made_of(cache(1, 4)).rows
    assert [rows.slots(blocks, 3 * TOKENS).tolist() for blocks in ([5, 6], [5, 6, 2])] == [[5, 6], [5, 6, 2]]


def test_layers_of_a_drafter_are_complete_with_their_step_alone() -> None:
    """Else rows behind the prompt, which its last block has, would change while they are read, and no checksum fits."""
    tensors = cache(3, 4)
    described = pools_of(tensors, blocks=BLOCKS, heads=ONE, late=list(tensors)[2:])
    assert described.complete_after == dict(zip(list(tensors)[:2], [(0, 0), (0, 1)], strict=True))
    assert described.layers == ((0, 1, 2),)


def test_a_latent_without_an_axis_of_heads_has_one_head() -> None:
    """As vLLM 0.26 shows it."""
    tensors = cache(2, 1)
    rows = made_of(with_heads({name: tensor[:, 0] for name, tensor in tensors.items()}), Heads(1, Ranks())).rows
    assert rows == made_of(tensors, Heads(1, Ranks())).rows
    assert all(view is tensors[name] for name, view in with_heads(tensors).items())


def test_heads_that_lie_apart_do_not_pair_with_heads_that_lie_together() -> None:
    apart = cache(1, 4)
    together = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in apart.items()}
    layouts = [made_of(tensors).components[0].layout for tensors in (apart, together)]
    for source, target in (layouts, layouts[::-1]):
        with pytest.raises(LayoutMismatchError, match="heads: source"):
            pair(source, target)


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

    for _, shares in check_covered(rank, prefill, decode):
        for number, share in shares.items():
            for each in share:
                [source] = rank(number, prefill).components
                first = min(plane.head_start for plane in each.layout.planes)
                end = max(plane.head_start + plane.head_count for plane in each.layout.planes)
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
    window = KVGroup(2, PAGED.of(TOKENS, window=64))
    groups = [(KVGroup(0, PAGED.of(TOKENS)), names[:1]), (window, [names[1], names[1] + ".again"])]
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
        (torch.zeros(8, 16, 32), "a: a KV cache of shape [8, 16, 32], not [8, heads, tokens, width]"),
        (torch.zeros(7, 1, 16, 32), "a: a KV cache of shape [7, 1, 16, 32], not [8, heads, tokens, width]"),
        (torch.zeros(8, 1, 16, 64)[..., ::2], "a: views[0, 'kv'].strides"),
    ],
)
def test_a_cache_that_is_not_supported_is_named(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made_of({"a": tensor})
    assert text in str(caught.value)


# By the kind of layer: the states of all ranks together, at 4 bytes a number, with channels first and last.
STATES = {
    "SHORT_CONV": lambda tp: [(32 // tp, 2)], "MAMBA1": lambda tp: [(32 // tp, 3), (32 // tp, 8)],
    "MAMBA2": lambda tp: [((32 + 8) // tp, 3), (8 // tp, 4, 8)],
    "GDN_ATTN": lambda tp: [((16 + 32) // tp, 3), (4 // tp, 8, 8)],
}  # fmt: skip


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_ranks_of_unequal_groups_share_the_heads_and_channels_of_a_state(
    kind: str, channels_first: bool, prefill: int, decode: int
) -> None:
    """Each byte of a page of decode's has one source, which is the same number of the model's state."""

    def rank(at: int, size: int) -> Pools:
        shapes = STATES[kind](size)
        if not channels_first:
            shapes = [shapes[0][::-1], *shapes[1:]]
        parts = parts_of(kind, shapes, [4] * len(shapes), channels_first=channels_first)
        count = sum(part.shares * part.share_bytes for part in parts)
        assert count == 4 * sum(prod(shape) for shape in shapes)
        pages = torch.zeros(BLOCKS, count + 24, dtype=torch.int8)
        view = pages[:, :count].view(BLOCKS, 1, 1, count)
        name, heads = "model.layers.1.mixer", Heads(4, Ranks(at, size))
        groups, given = [(KVGroup(0, STATE.of(1024)), [name])], {"states": {name: parts}, "base": pages.data_ptr()}
        return pools_of({name: view}, groups, blocks=BLOCKS, heads=heads, **given)

    def numbers(made: Pools) -> dict[tuple[str, int], int]:
        """Where each head's bytes begin in page 3, by plane and head of the model."""
        layout = made.components[0].layout
        return {
            (plane.kind, plane.head_start + head): layout.address(at, 3) + head * plane.head_bytes
            for at, plane in enumerate(layout.planes)
            for head in range(plane.head_count)
        }

    sources, seen = [rank(at, prefill) for at in range(prefill)], set[tuple[str, int]]()
    for target, _ in check_covered(rank, prefill, decode):
        found = numbers(target)
        assert sorted(found.values()) == sorted(set(found.values()))
        seen |= found.keys()
    assert seen == {key for made in sources for key in numbers(made)} == set(numbers(rank(0, 1)))


@pytest.mark.parametrize("kind", ["SHORT_CONV", "MAMBA2", "GDN_ATTN"])
def test_room_for_drafts_in_a_state_is_not_sent(kind: str) -> None:
    """So engines that draft unequal numbers of tokens have equal states, but where the channels lie apart."""
    (channels, tokens), *others = STATES[kind](1)

    def parts(drafts: int, *, channels_first: bool = False) -> list[StatePart]:
        shape = (channels, tokens + drafts) if channels_first else (tokens + drafts, channels)
        items = [4] * (1 + len(others))
        return parts_of(kind, [shape, *others], items, channels_first=channels_first, drafts=drafts)

    assert described(parts(3), 1) == described(parts(1), 1) == described(parts(0), 1)
    assert described(parts(3, channels_first=True), 1) != described(parts(0, channels_first=True), 1)
    narrow, wide = (
        state_planes(parts(drafts), layer=0, name="{}", base=0, stride=1 << 20, rank=0) for drafts in (0, 3)
    )
    moved = [after.base - before.base for before, after in zip(narrow, wide, strict=True)]
    assert moved == [0] * (len(moved) - len(others)) + [3 * 4 * channels] * len(others)


def test_states_of_a_kind_that_is_not_known_are_one_thing() -> None:
    assert parts_of("LINEAR", [(4, 8, 8)], [4], channels_first=False) == [StatePart("state", 1, 1024)]
    for kind in ("MAMBA2", "GDN_ATTN"):
        for channels, size in ((33, 1222), (32, 1216)):
            whole = parts_of(kind, [(3, channels), (8, 4, 8)], [2, 4], channels_first=False)
            assert whole == [StatePart("state", 1, size)]
    two = [described(parts_of("LINEAR", [(4 // tp, 8, 8)], [4], channels_first=False), tp) for tp in (1, 2)]
    assert two == ["state:1x1024", "state:2x512"], "which are two facts, so such engines refuse each other"
    halves = [described(parts_of("MAMBA2", STATES["MAMBA2"](tp), [4, 4], channels_first=True), tp) for tp in (1, 2)]
    assert halves == ["x:4x96 b:4x12 c:4x12 state1:4x256"] * 2


def test_a_state_is_one_row_a_request_in_memory_that_it_shares_with_kv() -> None:
    """vLLM shows states as bytes of a page, which may be longer than they are."""
    kv = cache(1, 4)
    [page] = kv.values()
    name = "model.layers.1.mixer"
    views = kv | {name: page.view(BLOCKS, 1, 1, -1).view(torch.int8)[..., :100]}
    groups = [(KVGroup(0, STATE.of(1024)), [name]), (KVGroup(1, PAGED.of(TOKENS)), list(kv))]
    options: dict[str, Any] = {"blocks": BLOCKS, "base": page.data_ptr(), "heads": Heads(8, Ranks(1, 2))}
    made = pools_of(views, groups, states={name: [StatePart("x", 5, 20)]}, **options)
    states, rows = made.components
    assert (states.span.kind, states.tokens_per_row, states.rows(700), rows.rows(700)) == ("once", 1, 1, 44)
    [plane] = states.layout.planes
    assert (plane.kind, plane.layer, plane.head_start, plane.head_count, plane.row_bytes) == ("x", 1, 5, 5, 100)
    assert states.layout.address(0, 5) == rows.layout.address(0, 5)
    assert made.rows[0].slots((5,), 700).tolist() == made.rows[0].pages((5,)).tolist() == [5]
    assert made.replicas == {"group0": (0, 1), "group1": (0, 1)}
    groups[0] = KVGroup(0, STATE.of(1024, holder="every")), [name]
    replicated = pools_of(views, groups, states={name: [StatePart("x", 5, 20)]}, **options)
    assert replicated.components[0].layout.planes[0].head_start == 0
    assert replicated.replicas["group0"] == (1, 2)
    with pytest.raises(ConfigError, match=r"mixer: states of shape .*, not 8 pages of 96 bytes"):
        pools_of(views, groups, states={name: [StatePart("x", 4, 24)]}, **options)


def test_bytes_of_a_block_are_those_of_its_layers() -> None:
    """Of a sparse index those of the index, and of a state those without what vLLM pads its page by."""
    kv = cache(3, 1)
    latents, [whole, _, _] = list(kv), kv.values()
    views = kv | {
        "model.layers.0.indexer": whole[..., :6].contiguous(),
        "model.layers.3.mixer": whole.view(BLOCKS, 1, 1, -1).view(torch.int8)[..., :100],
    }
    groups = [(KVGroup(0, PAGED.of(TOKENS)), [*latents, "model.layers.0.indexer"]),
              (KVGroup(1, STATE.of(1024)), ["model.layers.3.mixer"])]  # fmt: skip
    states = {"model.layers.3.mixer": [StatePart("x", 5, 20)]}
    kinds = {name: {"latent": view.transpose(1, 2)} for name, view in views.items()}
    for more in ({}, {"indices": ["model.layers.0.indexer"]}, {"kinds": kinds}):
        of_rank = pools_of(views, groups, blocks=BLOCKS, states=states, **more)
        assert of_rank.block_bytes == (TOKENS * (3 * WIDTH + 6) * 4, 100), more


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_bytes_of_a_block_are_in_one_stripe(dcp_size: int) -> None:
    tensors = cache(2, 1)
    groups = [(KVGroup(0, PAGED.of(TOKENS), dcp_size=dcp_size, stripes=4), list(tensors))]
    of_ranks = [made_of(tensors, Heads(1, Ranks(rank, 4)), groups) for rank in range(4)]
    copies = 4 // dcp_size  # of each block, in all ranks
    assert sum(rank.block_bytes[0] for rank in of_ranks) // 4 == copies * 2 * TOKENS * WIDTH * 4


def test_too_many_groups_are_refused() -> None:
    tensors = cache(1, 1)
    groups = [(KVGroup(at, PAGED.of(TOKENS)), list(tensors)) for at in range(17)]
    with pytest.raises(ConfigError, match="KV cache groups: 17, must be 1 to 16"):
        made_of(tensors, groups=groups)


def test_numbers_of_layers_are_read_from_their_names() -> None:
    names: dict[str, Any] = {
        "model.layers.12.self_attn.attn": 12, "language_model.model.layers.3": 3, "encoder": 7, "h.5.attn.k8": 5
    }  # fmt: skip
    assert {name: layer_number(name, 7) for name in names} == names

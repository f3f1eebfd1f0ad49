"""SGLang's buffers, and the components that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.pools import DRAFT_LAYER, HeadCounts, KVPools, kv_buffers, pools, state_buffers
from pdtransfer.errors import ConfigError
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_ranks import HEADS, ITEM, LAYERS, SLOTS, STATES, WIDTH, Pool, model_of
from tests.support.covered import check_covered

MINIMAX = ("minimax_index_k", "minimax_dense_kv")


def made_of(pool: Pool, model: HeadCounts | None = None, **changed: Any) -> KVPools:
    args = pool.args
    vars(args).update(changed)
    base = pool.raw.ctypes.data
    return pools(
        args, model or model_of(Ranks()), lambda _: (base, "dram"), kv=kv_buffers(args), states=state_buffers(args)
    )


def a_pool(states: tuple[str, ...] = (), *, page_size: int = 4, heads: int = HEADS, latent: bool = False) -> Pool:
    pool = Pool(None, page_size, heads, states, latent)
    pool.raw[:] = np.random.default_rng(2).integers(0, 256, len(pool.raw), np.uint8)
    return pool


def test_a_row_is_a_token_of_one_layer_and_kind() -> None:
    pool = a_pool()
    [part] = made_of(pool).parts
    layout = part.component.layout
    assert (part.name, part.component.tokens_per_row, layout.page_size, layout.slots) == ("kv", 1, 1, SLOTS)
    assert layout.row_bytes == 2 * LAYERS * HEADS * WIDTH * 4
    for index, plane in enumerate(layout.planes):
        row = pool.raw[layout.address(index, 37) :][: plane.row_bytes].tobytes()
        assert row == pool.kv["kv".index(plane.kind), plane.layer, 37].tobytes()
        assert (plane.head_start, plane.head_count) == (0, HEADS)


def test_a_latent_is_one_head_that_every_rank_has() -> None:
    ranks = Ranks(1, 2)
    made = made_of(a_pool(latent=True), model_of(ranks, latent=True))
    assert {(plane.kind, plane.head_start, plane.head_count) for plane in made.components[0].layout.planes} == {
        ("latent", 0, 1)
    }
    assert made.replicas == {"kv": (1, 2)}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (4, 1), (2, 8), (8, 2)])
@pytest.mark.parametrize("total", [2, 4])
def test_the_shares_of_all_prefill_ranks_are_what_a_decode_rank_has(sizes: tuple[int, int], total: int) -> None:
    def made(at: int, size: int) -> KVPools:
        return made_of(a_pool(heads=max(1, total // size)), model_of(Ranks(at, size), total=total))

    check_covered(made, *sizes)


def test_layers_of_a_stage_and_of_a_draft_model_keep_their_numbers() -> None:
    pool = a_pool()
    [part] = made_of(pool, prefill_start_layer=5).parts
    assert {plane.layer for plane in part.component.layout.planes} == {5, 6, 7}
    [part] = made_of(pool, kv_layer_ids=[1, 4, 9] * 2).parts
    assert [(plane.kind, plane.layer) for plane in part.component.layout.planes] == [
        (kind, layer) for kind in "kv" for layer in (1, 4, 9)
    ]
    planes = {
        part.name: [(plane.kind, plane.layer) for plane in part.component.layout.planes]
        for part in made_of(pool, num_draft_entries=2).parts
    }
    assert planes == {
        "kv": [("k", 0), ("k", 1), ("v", 0), ("v", 1)], "kv_draft": [("k", DRAFT_LAYER), ("v", DRAFT_LAYER)]
    }  # fmt: skip


def test_states_are_components_with_rows_of_their_own() -> None:
    pool = a_pool(STATES)
    made = made_of(pool, model_of(Ranks(1, 2)))
    kv, swa, dsa, mamba = made.components
    assert [(component.name, component.span.kind, component.tokens_per_row) for component in made.components] == [
        ("kv", "all", 1), ("swa", "all", 1), ("dsa", "all", 4), ("mamba", "once", 1),
    ]  # fmt: skip
    assert (kv.rows(10), swa.rows(10), dsa.rows(10), mamba.rows(10)) == (10, 10, 3, 1)
    assert dsa.layout.row_bytes == LAYERS * 4 * ITEM
    row = pool.raw[mamba.layout.address(2, 5) :][:ITEM].tobytes()
    assert row == pool.arrays["mamba"][2, 5].tobytes()
    # The index is the same on all ranks; a recurrent state is this rank's own.
    assert (dsa.layout.planes[0].head_start, made.replicas["dsa"]) == (0, (1, 2))
    assert (mamba.layout.planes[0].head_start, made.replicas["mamba"]) == (1, (0, 1))


def test_an_index_of_minimax_is_the_same_on_all_ranks_and_its_other_layers_are_not() -> None:
    made = made_of(a_pool(MINIMAX), model_of(Ranks(1, 2)))
    kv, index, dense = made.components
    assert [(component.tokens_per_row, component.span.kind) for component in (kv, index, dense)] == [
        (1, "all"), (4, "all"), (4, "all"),
    ]  # fmt: skip
    assert [component.layout.planes[0].head_start for component in (index, dense)] == [0, 1]
    assert made.replicas == {"kv": (0, 1), "minimax_index_k": (1, 2), "minimax_dense_kv": (0, 1)}


def test_one_buffer_of_each_layer_of_minimax_has_rows_of_pages() -> None:
    """In NVFP4. The buffers of a draft model behind it are named by K and V."""
    pool = a_pool(MINIMAX[:1])
    made = made_of(pool, kv_layer_ids=[0, 1, 2, 3, 4, 4], num_draft_entries=2)
    kv, _ = made.components
    assert (kv.tokens_per_row, kv.layout.slots) == (4, SLOTS // 4)
    assert kv.layout.planes[0].row_bytes == 4 * HEADS * WIDTH * 4
    assert [(plane.layer, plane.kind) for plane in kv.layout.planes] == [
        *((layer, "item") for layer in range(5)), (4, "item1"),
    ]  # fmt: skip
    assert made.parts[0].kind.expand(np.array([5, 2])).tolist() == [5, 2]


def test_several_items_of_a_layer_are_several_kinds() -> None:
    made = made_of(a_pool(("mamba",)), state_layer_ids=[[4, 4, 6]])
    planes = made.components[1].layout.planes
    assert [(plane.layer, plane.kind) for plane in planes] == [(4, "item.whole"), (4, "item1.whole"), (6, "item.whole")]


def test_windows_may_have_other_heads() -> None:
    ranks = Ranks(1, 2)
    model = replace(model_of(ranks), window_heads=Heads(8, ranks))
    made = made_of(a_pool(("swa",)), model)
    assert [component.layout.planes[0].head_start for component in made.components] == [2, 4]


@pytest.mark.parametrize(
    ("states", "changed", "text"),
    [
        ((), {"aux_item_lens": [1 << 16, 64]}, "metadata of a request: 65600 bytes, must be at most 65536"),
        (
            MINIMAX, {"state_types": ["minimax_index_k"] * 2},
            "state minimax_index_k: is not supported; must be one each of block_scale",
        ),
        (("dsa",), {"state_types": ["dsa_tail"]}, "state dsa_tail: is not supported; must be one each of block_scale"),
        (("swa",), {"swa_kv_cache_layout": "hnd"}, "state swa: its layout is hnd, must be nhd"),
        ((), {"kv_item_lens": [128] * 5 + [127]}, "kv: an item of 127 bytes is not a page of 4 rows"),
        ((), {"kv_data_lens": [4_096] * 6, "kv_item_lens": [128] * 5 + [256]}, "its buffers hold 64, 128 rows"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_the_reason(
    states: tuple[str, ...], changed: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        made_of(a_pool(states), **changed)


def test_buffers_that_are_not_of_each_layer_are_refused() -> None:
    pool = a_pool()
    args = pool.args
    with pytest.raises(ConfigError, match="kv: 5 buffers are not k and v of each layer"):
        pools(args, model_of(Ranks()), lambda _: (0, "dram"), kv=kv_buffers(args).part(0, 5), states=[])


def test_a_component_is_in_one_memory() -> None:
    args = a_pool().args
    first = args.kv_data_ptrs[0]
    with pytest.raises(ConfigError, match="kv: some of its buffers are in host memory, and some are not"):
        pools(
            args, model_of(Ranks()), lambda address: (first, "dram" if address == first else "hbm"),
            kv=kv_buffers(args), states=[],
        )  # fmt: skip

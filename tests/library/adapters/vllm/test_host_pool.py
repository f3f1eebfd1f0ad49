"""Decode with HiSparse: the latents of prefill's one group land in its host pool, and the index in the GPU's cache.

Tensors in place of vLLM's caches, and memory of this process in place of a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.cache_memory import CacheMemory, Extent
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm import worker
from pdtransfer.adapters.vllm.kinds import PAGED, host_pool_of, sparse_indices, tables_of
from pdtransfer.adapters.vllm.orders import KVGroup, slots_of
from pdtransfer.adapters.vllm.pools import INDEX, Pools, pools, range_of
from pdtransfer.errors import ConfigError
from pdtransfer.layout import cell_sizes
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import World, world
from tests.support.client_pair import Late
from tests.support.waiting import wait_for

TOKENS, BLOCKS, HOST_BLOCKS = 16, 12, 40
LAYERS, INDEXED = (0, 1, 2), (0, 2)  # the second layer uses the index of the first
LATENT_WIDTH, INDEX_WIDTH = 24, 6
LATENTS = [f"model.layers.{layer}.self_attn.attn" for layer in LAYERS]
INDICES = [f"model.layers.{layer}.self_attn.indexer.k_cache" for layer in INDEXED]
PROMPT, SENT, LATENTS_AT, INDEX_AT = 40, [7, 3, 5], [31, 9, 22], [2, 11, 4]


def views_of(names: list[str], whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each layer, [blocks, heads, tokens, width]; all layers of a block lie together."""
    return {name: whole[:, layer] for layer, name in enumerate(names)}


def described(views: dict[str, torch.Tensor], groups: Any, locate: Any) -> Pools:
    return pools(
        views, groups, blocks=BLOCKS, host_blocks=HOST_BLOCKS, locate=locate, heads=Heads(1, Ranks()), indices=INDICES
    )


def landed(site: World, part: int, layer: int, blocks: list[int]) -> bool:
    """Of latents, part 0, or of the index."""
    return torch.equal(site.decode[0].cache[part][blocks, layer], site.prefill[0].cache[part][SENT, layer])


def hand_over(site: World, event: Callable[[], Any], latents_at: Sequence[int] = LATENTS_AT) -> None:
    """A step of prefill, which reports attention layers alone, as vLLM does."""
    site.receive("d", "room", PROMPT, latents_at, INDEX_AT)
    site.send("p", "room", PROMPT, SENT, after=event, layers=LATENTS)


@pytest.fixture
def site() -> Iterator[World]:
    draw = np.random.default_rng(5)
    shapes = (len(LATENTS), 1, TOKENS, LATENT_WIDTH), (len(INDICES), 1, TOKENS, INDEX_WIDTH)
    source = tuple(torch.from_numpy(draw.random((BLOCKS, *shape), np.float32)) for shape in shapes)
    sent = views_of(LATENTS, source[0]) | views_of(INDICES, source[1])
    index = torch.zeros(BLOCKS, *shapes[1])
    memory, extent = CacheMemory([index.nbytes]), Extent(*range_of([index]))
    host_bytes = HOST_BLOCKS * source[0][0].nbytes
    latents = memory.beside(extent, host_bytes).view(torch.float32).view(HOST_BLOCKS, *shapes[0])
    target = memory.target(extent)
    of_prefill = described(sent, [(KVGroup(0, PAGED.of(TOKENS)), [*LATENTS, *INDICES])], lambda _: (0, "dram"))
    of_decode = described(
        views_of(LATENTS, latents) | views_of(INDICES, index),
        [(KVGroup(0, PAGED.of(TOKENS), host=True), LATENTS), (KVGroup(1, PAGED.of(TOKENS)), INDICES)], target.locate,
    )  # fmt: skip
    with world() as made:
        made.add_prefill(source, of_prefill, 0)
        made.add_decode((latents, index), of_decode, target.arena)
        yield made
    del latents, target


def test_each_part_lands_where_decode_has_it(site: World) -> None:
    hand_over(site, lambda: None)
    site.until_received("d")
    assert all(landed(site, 0, layer, LATENTS_AT) for layer in range(len(LATENTS)))
    assert all(landed(site, 1, layer, INDEX_AT) for layer in range(len(INDICES)))
    for part, blocks in zip(site.decode[0].cache, (LATENTS_AT, INDEX_AT), strict=True):
        assert not part[[block for block in range(len(part)) if block not in blocks]].any()


def test_the_index_of_a_layer_leaves_with_its_latents(site: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(worker, "CELL_BYTES_MIN", 1)
    events: list[Late] = []

    def event() -> Late:
        events.append(Late())
        return events[-1]

    hand_over(site, event)
    assert len(events) == len(LATENTS), "one a layer, for both parts of it"
    for layer, late in enumerate(events):
        late.fired = True
        wait_for(lambda layer=layer: landed(site, 0, layer, LATENTS_AT))
    site.until_received("d")
    assert all(landed(site, 1, layer, INDEX_AT) for layer in range(len(INDICES)))


def test_components_have_the_same_names_whatever_the_groups() -> None:
    """And a stage without an index has none."""
    whole = torch.zeros(BLOCKS, len(LATENTS), 1, TOKENS, LATENT_WIDTH), torch.zeros(BLOCKS, 2, 1, TOKENS, INDEX_WIDTH)
    views = views_of(LATENTS, whole[0]) | views_of(INDICES, whole[1])
    for names, expected in (([*INDICES, *LATENTS], ["group0", INDEX]), (LATENTS, ["group0"])):
        of_side = described(views, [(KVGroup(0, PAGED.of(TOKENS)), names)], lambda _: (0, "dram"))
        assert [component.name for component in of_side.components] == expected
        assert {block_rows.group for block_rows in of_side.rows} == {0}
        assert of_side.complete_after == {name: (0, layer) for layer, name in enumerate(LATENTS)}


def test_layers_of_one_component_in_two_memories_are_refused() -> None:
    views = views_of(LATENTS, torch.zeros(BLOCKS, len(LATENTS), 1, TOKENS, LATENT_WIDTH))
    first, group = views[LATENTS[0]].data_ptr(), KVGroup(0, PAGED.of(TOKENS))
    with pytest.raises(ConfigError, match="group0: its layers have no KV cache, or in several memories"):
        described(views, [(group, LATENTS)], lambda address: (0, "dram" if address == first else "hbm"))


def test_an_index_in_several_groups_is_refused() -> None:
    views = views_of(INDICES, torch.zeros(BLOCKS, 2, 1, TOKENS, INDEX_WIDTH))
    groups = [(KVGroup(index, PAGED.of(TOKENS)), [name]) for index, name in enumerate(INDICES)]
    with pytest.raises(ConfigError, match="index: sparse index layers must be in one KV cache group"):
        described(views, groups, lambda _: (0, "dram"))


def test_nothing_lands_in_host_blocks_that_vllm_has_of_the_prompt() -> None:
    """Of this request's four, two are in the prefix cache: both groups have the first, the host pool the second too."""
    host, index = KVGroup(0, PAGED.of(TOKENS), host=True), KVGroup(1, PAGED.of(TOKENS))

    def block(number: int, block_hash: bytes | None) -> SimpleNamespace:
        return SimpleNamespace(block_id=number, block_hash=block_hash)

    tables = [block(31, b"1"), block(9, b"2"), block(22, None), block(5, None)], [block(2, b"1"), block(11, None)]
    blocks = SimpleNamespace(blocks=tables, get_block_ids=lambda: ([31, 9, 22, 5], [2, 11, 4, 6]))
    found_tables = tables_of(blocks, [host, index])
    assert found_tables == [[0, 0, 22, 5], [2, 11, 4, 6]]
    tokens = 4 * TOKENS
    assert slots_of(host, found_tables[0], tokens, TOKENS) == (-1, -1, 22, 5)
    assert slots_of(index, found_tables[1], tokens, TOKENS) == (-1, 11, 4, 6)


def test_rows_that_vllm_has_in_the_host_pool_alone_are_not_sent(site: World) -> None:
    """The first block of the latents is there, and of the index none."""
    before = site.decode[0].cache[0].clone()
    hand_over(site, lambda: None, latents_at=(-1, *LATENTS_AT[1:]))
    site.until_received("d")
    assert all(landed(site, 1, layer, INDEX_AT) for layer in range(len(INDICES)))
    assert torch.equal(site.decode[0].cache[0][LATENTS_AT[1:]], site.prefill[0].cache[0][SENT[1:]])
    assert torch.equal(site.decode[0].cache[0][LATENTS_AT[0]], before[LATENTS_AT[0]])


def test_a_block_that_is_missing_behind_others_fails_the_load(site: World) -> None:
    hand_over(site, lambda: None, latents_at=(*LATENTS_AT[:2], -1))
    site.until_received("d", failed={"d"})


def config(*groups: SimpleNamespace, shared: bool = False, count: int = 2) -> SimpleNamespace:
    """vLLM's, of an engine with HiSparse."""
    sizes = [SimpleNamespace(size=10_000, host_resident=True), SimpleNamespace(size=7, host_resident=False)]
    return SimpleNamespace(
        kv_cache_tensors=sizes, hisparse_shared_host_pool=shared, hisparse_host_num_blocks=40,
        transfer_groups=[None] * count, kv_cache_groups=groups,
    )  # fmt: skip


def test_the_tensor_of_the_pool_has_whole_pages_and_room_to_begin_at_one() -> None:
    assert host_pool_of(config(), sends=False) == (40, 3 * 4096 + 4096)
    without = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=7)])
    assert host_pool_of(without, sends=True) == (0, 0), "as of versions without it"


@pytest.mark.parametrize(
    ("given", "sends", "text"),
    [
        (config(), True, "KV cannot be sent from its host pool"),
        (config(shared=True), False, "ranks share the host pool of HiSparse"),
        (config(count=3), False, "HiSparse with other KV cache groups is not supported"),
    ],
)
def test_pools_that_are_not_supported_are_refused_by_name(given: SimpleNamespace, sends: bool, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        host_pool_of(given, sends=sends)


def test_a_sparse_index_has_its_role_in_its_specification() -> None:
    def spec(role: str, version: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(cache_role=SimpleNamespace(value=role), model_version=version)

    specs = {"latents": spec("sparse"), "index": spec("indexer"), "compressed": spec("indexer", "deepseek_v4")}
    groups = (
        SimpleNamespace(layer_names=list(specs), kv_cache_spec=SimpleNamespace(kv_cache_specs=specs)),
        SimpleNamespace(layer_names=["alone"], kv_cache_spec=spec("indexer")),
        SimpleNamespace(layer_names=["older"], kv_cache_spec=SimpleNamespace()),
    )
    assert sparse_indices(config(*groups)) == {"index", "alone"}

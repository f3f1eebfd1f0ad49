"""Decode with HiSparse: the latents of prefill's one group land in its host pool, and the index in the GPU's cache.

Tensors in place of vLLM's caches, and memory of this process in place of a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import DecodeClient, NodeSettings, PrefillClient, WriterOptions, room_id
from pdtransfer.adapters.kit.cache_memory import CacheMemory, Extent
from pdtransfer.adapters.kit.heads import Heads
from pdtransfer.adapters.vllm import worker
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Rows
from pdtransfer.adapters.vllm.pools import INDEX, Pools, pools, range_of
from pdtransfer.adapters.vllm.worker import Results, WorkerSide
from pdtransfer.errors import ConfigError
from pdtransfer.handoff import cell_sizes
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS, Late
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


@dataclass
class Site:
    """Prefill's worker and decode's, and their caches: latents and index."""

    prefill: WorkerSide
    decode: WorkerSide
    source: tuple[torch.Tensor, torch.Tensor]
    target: tuple[torch.Tensor, torch.Tensor]
    endpoint: str
    received: Results = field(default_factory=Results)

    def landed(self, part: int, layer: int, blocks: list[int]) -> bool:
        return torch.equal(self.target[part][blocks, layer], self.source[part][SENT, layer])

    def hand_over(self, event: Callable[[], Any]) -> None:
        """A step of prefill, which reports attention layers alone, as vLLM does."""
        slots = tuple(LATENTS_AT), tuple(INDEX_AT)
        self.decode.begin(
            Orders(receives=[Receive("d", room_id("room"), (self.endpoint,), PROMPT, prefix=0, slots=slots)])
        )
        rows = Rows(0, 0, len(SENT), tuple(SENT))
        self.prefill.begin(Orders(opens=[Open("p", "room", PROMPT)], chunks=[Chunk("p", (rows,), last=True)]))
        for name in LATENTS:
            self.prefill.save(name, event)
        self.prefill.end(event)

    def poll(self) -> Results:
        self.prefill.results(())
        results = self.decode.results(())
        self.received.received |= results.received
        self.received.failed |= results.failed
        return self.received


@pytest.fixture
def site() -> Iterator[Site]:
    draw = np.random.default_rng(5)
    shapes = (len(LATENTS), 1, TOKENS, LATENT_WIDTH), (len(INDICES), 1, TOKENS, INDEX_WIDTH)
    source = tuple(torch.from_numpy(draw.random((BLOCKS, *shape), np.float32)) for shape in shapes)
    sent = views_of(LATENTS, source[0]) | views_of(INDICES, source[1])
    index = torch.zeros(BLOCKS, *shapes[1])
    memory, extent = CacheMemory([index.nbytes]), Extent(*range_of([index]))
    host_bytes = HOST_BLOCKS * source[0][0].nbytes
    latents = memory.beside(extent, host_bytes).view(torch.float32).view(HOST_BLOCKS, *shapes[0])
    target = memory.target(extent)
    of_prefill = described(sent, [(KVGroup(0, TOKENS), [*LATENTS, *INDICES])], lambda _: (0, "dram"))
    of_decode = described(
        views_of(LATENTS, latents) | views_of(INDICES, index),
        [(KVGroup(0, TOKENS, host=True), LATENTS), (KVGroup(1, TOKENS), INDICES)],
        target.locate,
    )
    options: dict[str, Any] = {"model": "m", "weights": b"w", "limits": LIMITS}
    prefill = PrefillClient(
        NodeSettings(node="p", **options), of_prefill.components, writer=WriterOptions(pool_address=0)
    )
    decode = DecodeClient(
        NodeSettings(node="d", **options), of_decode.components, target.arena, engine_slots=True, prefix_cache=False,
        verify=True,
    )  # fmt: skip
    with prefill, decode:
        sides = [
            WorkerSide(**{"pools": of_side, "time_left_s": 20.0, "prefill": None, "decode": None} | clients)
            for of_side, clients in ((of_prefill, {"prefill": prefill}), (of_decode, {"decode": decode}))
        ]
        yield Site(*sides, (source[0], source[1]), (latents, index), prefill.endpoint)
    del latents, target


def test_each_part_lands_where_decode_has_it(site: Site) -> None:
    site.hand_over(lambda: None)
    wait_for(lambda: site.poll().received)
    assert (site.received.received, site.received.failed) == ({"d"}, set())
    assert all(site.landed(0, layer, LATENTS_AT) for layer in range(len(LATENTS)))
    assert all(site.landed(1, layer, INDEX_AT) for layer in range(len(INDICES)))
    for part, blocks in zip(site.target, (LATENTS_AT, INDEX_AT), strict=True):
        assert not part[[block for block in range(len(part)) if block not in blocks]].any()


def test_the_index_of_a_layer_leaves_with_its_latents(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(worker, "CELL_BYTES_MIN", 1)
    events: list[Late] = []

    def event() -> Late:
        events.append(Late())
        return events[-1]

    site.hand_over(event)
    assert len(events) == len(LATENTS), "one a layer, for both parts of it"
    for layer, late in enumerate(events):
        late.fired = True
        wait_for(lambda layer=layer: site.landed(0, layer, LATENTS_AT))
    wait_for(lambda: site.poll().received)
    assert all(site.landed(1, layer, INDEX_AT) for layer in range(len(INDICES)))


def test_components_have_the_same_names_whatever_the_groups() -> None:
    """And a stage without an index has none."""
    whole = torch.zeros(BLOCKS, len(LATENTS), 1, TOKENS, LATENT_WIDTH), torch.zeros(BLOCKS, 2, 1, TOKENS, INDEX_WIDTH)
    views = views_of(LATENTS, whole[0]) | views_of(INDICES, whole[1])
    for names, expected in (([*INDICES, *LATENTS], ["group0", INDEX]), (LATENTS, ["group0"])):
        of_side = described(views, [(KVGroup(0, TOKENS), names)], lambda _: (0, "dram"))
        assert [component.name for component in of_side.components] == expected
        assert {block_rows.group for block_rows in of_side.rows} == {0}
        assert of_side.complete_after == {name: (0, layer) for layer, name in enumerate(LATENTS)}


def test_layers_of_one_component_in_two_memories_are_refused() -> None:
    views = views_of(LATENTS, torch.zeros(BLOCKS, len(LATENTS), 1, TOKENS, LATENT_WIDTH))
    first = views[LATENTS[0]].data_ptr()
    with pytest.raises(ConfigError, match="group0: its layers have no KV cache, or in several memories"):
        described(views, [(KVGroup(0, TOKENS), LATENTS)], lambda address: (0, "dram" if address == first else "hbm"))

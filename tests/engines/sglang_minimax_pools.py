"""The pools of MiniMax's sparse attention, by SGLang's own classes on a CPU: requests go from one such pool to another.
Runs in SGLang's environment, without a server: its attention needs a GPU.

    python -m tests.engines.sglang_minimax_pools '{"page_size": 16, "dense": [0, 3], "nvfp4": false}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.minimax import minimax_index_transfer_pages
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.server_args import ServerArgs

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.pools import HeadCounts
from pdtransfer.wire import Ranks
from tests.engines.sglang_pools import Engine, hand_over

LAYERS, HEADS, WIDTH, SLOTS, REQUESTS = 5, 2, 128, 1536, 5
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300, 511)


class MiniMaxEngine(Engine):
    """MiniMax's, of which the layers in `dense` have no index."""

    layer_count = LAYERS

    def __init__(self, seed: int, page_size: int, requests: int, *, dense: list[int], nvfp4: bool) -> None:
        dtype = "uint8" if nvfp4 else "bfloat16"
        heads = Heads(HEADS, Ranks())
        self.model = HeadCounts(False, heads, heads, dtype)
        self.sparse = [layer for layer in range(LAYERS) if layer not in dense]
        super().__init__(seed, page_size, requests, lambda: (pool_of(page_size, dense, self.sparse, nvfp4=nvfp4), None))

    def tensors(self) -> list[torch.Tensor]:
        main, index = self.pool.main_pool, self.pool.index_k_pool
        if isinstance(self.pool, MiniMaxM3Nvfp4KVPool):
            return [*main.rows, *index.rows]
        return [*main.k_buffer, *main.v_buffer, *index.k_buffer]

    def place(self, tokens: int) -> int:
        request = int(self.random.integers(self.requests))
        self.place_pages(request, tokens, SLOTS // self.page_size)
        return request

    def state_indices(self, request: int, prefix: int, tokens: int) -> dict[Any, Any]:
        slots = self.at(request, np.arange(tokens))
        index = minimax_index_transfer_pages(slots, page_size=self.page_size, prefix_len=prefix)
        return {StateType.MINIMAX_INDEX_K: index, StateType.MINIMAX_DENSE_KV: kv_to_page_indices(slots, self.page_size)}

    def rows(self, request: int, first: int, tokens: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        pool, slots = self.pool, self.at(request, np.arange(first, tokens))
        for layer in range(LAYERS):
            for name, rows in zip(("k", "v", "k scales", "v scales"), kv_rows(pool, layer, slots), strict=False):
                yield f"{name} of layer {layer}", raw(rows)
            if layer in self.sparse:
                for name, rows in zip(("index", "index scales"), index_rows(pool, layer, slots), strict=False):
                    yield f"{name} of layer {layer}", raw(rows)


def kv_rows(pool: Any, layer: int, slots: torch.Tensor) -> Sequence[torch.Tensor]:
    """K and V of tokens, and in NVFP4 their scales."""
    if isinstance(pool, MiniMaxM3Nvfp4KVPool):
        return pool.main_pool.get_quantized_rows(layer, slots)
    return [pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]]


def index_rows(pool: Any, layer: int, slots: torch.Tensor) -> Sequence[torch.Tensor]:
    """The index's keys of tokens, and in NVFP4 their scales."""
    if isinstance(pool, MiniMaxM3Nvfp4KVPool):
        return pool.index_k_pool.get_quantized_rows(pool.index_k_layer_id_mapping[layer], slots)
    return [pool.get_index_k_buffer(layer)[slots]]


def raw(rows: torch.Tensor) -> NDArray[np.uint8]:
    """(tokens, bytes)."""
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()


def check_names(engine: MiniMaxEngine, components: Sequence[Any], bases: Mapping[str, int]) -> None:
    """Each component has the buffers in which SGLang keeps what its name says, and no other component has them."""
    pool = engine.pool
    found = {
        component.name: sorted(bases[component.memory] + plane.base for plane in component.layout.planes)
        for component in components
    }
    sparse = sorted(pool.sparse_layer_id_mapping)
    dense = [layer for layer in range(LAYERS) if layer not in sparse]
    if isinstance(pool, MiniMaxM3Nvfp4KVPool):
        wanted = {"kv": pool.main_pool.rows, "minimax_index_k": pool.index_k_pool.rows}
    else:
        wanted = {
            "kv": both(pool, sparse),
            "minimax_index_k": [pool.get_index_k_buffer(layer) for layer in sparse],
            **({"minimax_dense_kv": both(pool, dense)} if dense else {}),
        }
    addresses = {name: sorted(tensor.data_ptr() for tensor in tensors) for name, tensors in wanted.items()}
    if found != addresses:
        raise SystemExit(f"buffers at {found}, expected {addresses}")


def both(pool: Any, layers: Sequence[int]) -> list[torch.Tensor]:
    """K and V of layers."""
    return [tensor for layer in layers for tensor in pool.get_kv_buffer(layer)]


def pool_of(page_size: int, dense: list[int], sparse: list[int], *, nvfp4: bool) -> Any:
    pool_class = MiniMaxM3Nvfp4KVPool if nvfp4 else MiniMaxSparseKVPool
    return pool_class(
        size=SLOTS, page_size=page_size, dtype=torch.bfloat16, head_num=HEADS, head_dim=WIDTH, idx_head_dim=128,
        dense_layer_ids=dense, sparse_layer_ids=sparse, device="cpu", disable_value_sparse_layer_ids=sparse,
        start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def main() -> None:
    given = json.loads(sys.argv[1])
    page_size, kind = given["page_size"], {"dense": given["dense"], "nvfp4": given["nvfp4"]}
    runtime_context.get_context().set_server_args(ServerArgs(model_path="none", device="cpu"))
    source = MiniMaxEngine(1, page_size, REQUESTS, **kind)
    target = MiniMaxEngine(2, page_size, REQUESTS + 2, **kind)
    longer = [(page_size, page_size + more) for more in (1, 5, 128, 300)]
    print(hand_over(source, target, [*((0, tokens) for tokens in LENGTHS), *longer], check_names))


if __name__ == "__main__":
    main()

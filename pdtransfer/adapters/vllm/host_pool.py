"""vLLM's HiSparse: latents of sparse attention are in a pool of host memory, and the index that chooses on the GPU.

What is read here of vLLM's objects is the same in all versions that have it; others have none of it.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import ConfigError
from .orders import NULL_BLOCK, KVGroup

_PAGE_BYTES = 4096  # of allocate_pinned_host_pool, in vllm/v1/hisparse/runtime.py, on any host


def host_pool_of(kv_cache_config: Any, *, sends: bool) -> tuple[int, int]:
    """The host pool's blocks, and the bytes of the tensor that vLLM allocates for it; 0 for none. Raises ConfigError
    for one that cannot cross."""
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors if getattr(tensor, "host_resident", False)}
    if not sizes:
        return 0, 0
    if sends:
        raise ConfigError("HiSparseConnector: KV cannot be sent from its host pool: leave it out on prefill")
    if kv_cache_config.hisparse_shared_host_pool:
        raise ConfigError("tensor_parallel_size: ranks share the host pool of HiSparse, which cannot be written yet")
    if len(kv_cache_config.transfer_groups) > 2:  # an engine without HiSparse numbers its groups otherwise
        raise ConfigError("HiSparseConnector: HiSparse with other KV cache groups is not supported")
    (size,) = sizes
    # Whole pages, and one more, since they begin at one.
    return kv_cache_config.hisparse_host_num_blocks, (-(-size // _PAGE_BYTES) + 1) * _PAGE_BYTES


def sparse_indices(kv_cache_config: Any) -> frozenset[str]:
    """The layers that keep what a sparse index chooses by. DeepSeek V4 has it among its compressed rows."""
    return frozenset(
        name
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        for spec in [getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)]
        if getattr(getattr(spec, "cache_role", None), "value", "") == "indexer"
        and getattr(spec, "model_version", None) != "deepseek_v4"
    )


def tables_of(blocks: Any, groups: Iterable[KVGroup]) -> Sequence[Sequence[int]]:
    """The block tables of a request whose KV is to land, by vLLM's groups. vLLM may have more of a prompt in its host
    pool than in all groups: blocks that other requests read as well. Nothing lands in these."""
    tables = list(blocks.get_block_ids())
    for group in groups:
        if group.host:
            tables[group.index] = [
                NULL_BLOCK if block.block_hash is not None else block.block_id for block in blocks.blocks[group.index]
            ]
    return tables

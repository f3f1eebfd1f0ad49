"""What vLLM's caches hold: `KINDS`, states, tokens in turn (context parallelism), HiSparse's host pool. No vLLM.

States: linear attention, Mamba, gated delta nets and convolutions keep no KV. vLLM packs a layer's states into one
page. First what a convolution still needs of the last tokens, by channel or by token. Then the recurrent states, head
by head. Tensor parallel ranks share heads and channels out, those of each section of a convolution apart. So a page is
planes of as many equal shares as all of its parts can be cut into. Engines of other sizes take these as they take heads
of KV. What is not known in this detail is one share for each rank, and a peer must have as many ranks.

An engine that drafts has room in a convolution for one more token for each that it drafts. Behind a prompt only the
first tokens are in use, so engines that draft unequal numbers of tokens exchange these, where tokens lie apart.

Decode context parallelism (DCP): ranks with the same KV heads, or latents, have the tokens in turn. A hand-off needs
whole blocks of them at each rank, as vLLM's own connectors do; how these are paired is in `pools`. Prefill context
parallelism (PCP): ranks compute a prompt together, and each has all of its KV, so that the first one sends it.

HiSparse: latents of sparse attention are in a pool of host memory, and the index that chooses on the GPU.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any

from ...errors import ConfigError
from ..kit.kinds import CacheKind, StatePart
from .orders import NULL_BLOCK, KVGroup

PAGED, STATE = CacheKind("page", "whole", "heads"), CacheKind("request", "whole", "shares")
LATENT = CacheKind("page", "whole", "every")
# Of the layers whose spec has this class; of windows and chunks the spec has the size. What is not here cannot be
# transferred yet.
KINDS = {
    "FullAttentionSpec": PAGED, "SinkFullAttentionSpec": PAGED, "MLAAttentionSpec": LATENT,
    "SlidingWindowSpec": PAGED.of(1, window=1), "SlidingWindowMLASpec": LATENT.of(1, window=1),
    "ChunkedLocalAttentionSpec": PAGED.of(1, chunk=1), "MambaSpec": STATE,
}  # fmt: skip

Sections = tuple[tuple[str, int], ...]  # of a convolution: names and channels
Shape = Sequence[int]

_ROOM_FOR_DRAFTS = {"SHORT_CONV", "MAMBA2", "GDN_ATTN"}  # the kinds whose convolutions are known to have it


def parts_of(
    kind: str, shapes: Sequence[Shape], item_bytes: Sequence[int], *, channels_first: bool, drafts: int = 0
) -> list[StatePart]:
    """The parts of a page, in order. `kind` is vLLM's name of what keeps the state; `shapes` and `item_bytes` are of
    each of the states, of this rank; with `channels_first` a convolution's is [channels, tokens]. The engine drafts
    this many tokens in a step."""
    channels, tokens = (shapes[0] if channels_first else shapes[0][::-1]) if len(shapes[0]) == 2 else (0, 0)
    sections = _sections(kind, channels, shapes[1:])
    if not sections:
        return [StatePart("state", 1, sum(prod(shape) * size for shape, size in zip(shapes, item_bytes, strict=True)))]
    shares = gcd(*(count for _, count in sections), *(shape[0] for shape in shapes[1:]))
    if channels_first:
        sizes = [(name, count * tokens * item_bytes[0]) for name, count in sections]
    else:
        sizes = [(f"{name}{token}", count * item_bytes[0]) for token in range(tokens) for name, count in sections]
    room = drafts * len(sections) if kind in _ROOM_FOR_DRAFTS and not channels_first else 0
    used = len(sizes) - room
    sizes += [(f"state{i}", prod(shapes[i]) * item_bytes[i]) for i in range(1, len(shapes))]
    return [
        StatePart(name, shares, byte_count // shares, transferred=not used <= index < used + room)
        for index, (name, byte_count) in enumerate(sizes)
    ]


def _sections(kind: str, channels: int, states: Sequence[Shape]) -> Sections:
    """Of a convolution that is known; empty for another one."""
    match kind, states:
        case ("SHORT_CONV", []) | ("MAMBA1", [_]):
            return (("x", channels),)
        case "MAMBA2", [(heads, head_size, _)] if (rest := channels - heads * head_size) > 0 and rest % 2 == 0:
            return ("x", heads * head_size), ("b", rest // 2), ("c", rest // 2)
        case "GDN_ATTN", [(heads, size, _)] if (rest := channels - heads * size) > 0 and rest % 2 == 0:
            return ("q", rest // 2), ("k", rest // 2), ("v", heads * size)
        case _:
            return ()


def kind_of(spec: Any, block_size: int) -> CacheKind:
    """The kind of a spec in `KINDS`, whose pages are blocks of this size."""
    kind = KINDS[type(spec).__name__]
    window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0) if kind.window else 0
    holder = "every" if kind.row == "request" and spec.tp_replicated else kind.holder
    return kind.of(block_size, window=window, chunk=kind.chunk and spec.attention_chunk_size, holder=holder)


def dcp_sizes_of(parallel: Any, largest: int, *, receives: bool, needs: str = "") -> tuple[int, int]:
    """The decode context parallel sizes of this engine, and of the largest that it exchanges KV with: `largest`, or 0
    for its own. `parallel` is vLLM's configuration; `needs`: the first version with PCP, if this one has none.

    Raises ConfigError for context parallelism that is not supported.
    """
    size = getattr(parallel, "decode_context_parallel_size", 1)
    largest = largest or size
    if (pcp_size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        reasons = {
            "a --decode-context-parallel-size": size > 1,
            "a kv_role other than kv_producer": receives,
            f"a vLLM before {needs}": bool(needs),
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), ""):
            raise ConfigError(f"--prefill-context-parallel-size {pcp_size}: is not supported with {reason}")
    if largest % size:
        raise ConfigError(f"dcp_size = {largest}: must be a multiple of --decode-context-parallel-size {size}")
    return size, largest


def keep_blocks_whole(parallel: Any, specs: Iterable[Any], *, may_set: bool) -> None:
    """Sets cp_kv_cache_interleave_size to the block size: each rank gets whole blocks. A worker calls it before vLLM
    makes its block tables. `specs` are those of all KV cache groups. Raises ConfigError where it is impossible, as
    without `may_set`: older versions need it as an option."""
    if getattr(parallel, "decode_context_parallel_size", 1) == 1:
        return
    sizes = {spec.block_size for spec in specs if getattr(spec, "dcp_sharded", True)}
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"--decode-context-parallel-size: blocks of {listed} tokens, must be of one size")
    [size] = sizes or {1}
    if (given := parallel.cp_kv_cache_interleave_size) != size and (given != 1 or not may_set):
        raise ConfigError(f"--cp-kv-cache-interleave-size {given}: must be {size}, the size of a block")
    parallel.cp_kv_cache_interleave_size = size


_PAGE_BYTES = 4096  # of allocate_pinned_host_pool, in vllm/v1/hisparse/runtime.py, on any host


def host_pool_of(kv_cache_config: Any, *, sends: bool) -> tuple[int, int]:
    """The host pool's blocks, and the bytes of the tensor that vLLM allocates for it; 0 for none. Raises ConfigError
    for one that cannot be transferred."""
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


def specs_of(kv_cache_config: Any) -> dict[str, Any]:
    """The spec of each layer, by its name: a group of unlike layers has theirs within its own."""
    return {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }


def sparse_indices(kv_cache_config: Any) -> frozenset[str]:
    """The layers that keep what a sparse index chooses by. DeepSeek V4 has it among its compressed rows."""
    return frozenset(
        name
        for name, spec in specs_of(kv_cache_config).items()
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

"""What of vLLM's context parallelism can be handed over, and what vLLM has to do for it.

Decode context parallelism (DCP): ranks with the same KV heads, or latents, have the tokens in turn. A hand-off needs
whole blocks of them at each rank, as vLLM's own connectors do; how these are paired is in `pools`. Prefill context
parallelism (PCP): ranks compute a prompt together, and each has all of its KV, so that the first one sends it.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError


def dcp_sizes_of(parallel: Any, largest: int, *, receives: bool, pcp: bool) -> tuple[int, int]:
    """The decode context parallel sizes of this engine, and of the largest that it exchanges KV with: `largest`, or 0
    for its own. `parallel` is vLLM's configuration; `pcp`: whether this version of vLLM is one whose PCP can cross.

    Raises ConfigError for context parallelism that cannot cross.
    """
    size = getattr(parallel, "decode_context_parallel_size", 1)
    largest = largest or size
    if (pcp_size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        reasons = {
            "a --decode-context-parallel-size": size > 1,
            "a kv_role other than kv_producer": receives,
            "a vLLM before 0.32": not pcp,
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

"""A plugin of SGLang's, for tests: what its engine for CPUs lacks and cards have. Servers find it on PYTHONPATH."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor], dst_layers: Sequence[torch.Tensor], src_indices: Any, dst_indices: Any,
    page_size: int,
) -> None:  # fmt: skip
    """Stands in for the kernel of this name, which copies rows between SGLang's host pool and its device pool."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def plugin() -> None:
    """Called in each of a server's processes."""
    from sglang.srt.mem_cache.pool_host import base, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of the machine, whose other processes have most of it
    mha.transfer_kv_direct = transfer_kv_direct

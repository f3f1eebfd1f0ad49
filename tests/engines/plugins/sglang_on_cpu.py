"""A plugin of SGLang's, for tests: what its engine for CPUs lacks and GPUs have. Servers find it on PYTHONPATH."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def plugin() -> None:
    """Called in each of a server's processes."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache.pool_host import base, mha
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of the machine, whose other processes have most of it
    mha.transfer_kv_direct = transfer_kv_direct
    # Attention with torch has one form for latent rows, in which all heads share a token's one row.
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    # A rank of data parallel attention takes part in steps where it has no token.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    for name in ("forward_native", "forward_cpu"):
        setattr(RotaryEmbedding, name, _unless_empty(getattr(RotaryEmbedding, name)))


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor], dst_layers: Sequence[torch.Tensor], src_indices: Any, dst_indices: Any,
    page_size: int,
) -> None:  # fmt: skip
    """Stands in for the kernel of this name, which copies rows between SGLang's host pool and its device pool."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _unless_empty(turn: Callable[..., Any]) -> Callable[..., Any]:
    def turned(self: Any, positions: torch.Tensor, query: Any, key: Any, *more: Any, **named: Any) -> Any:
        return turn(self, positions, query, key, *more, **named) if positions.numel() else (query, key)

    return turned

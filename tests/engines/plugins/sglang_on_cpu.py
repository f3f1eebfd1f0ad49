"""A plugin of SGLang's, for tests: what its engine for CPUs lacks and GPUs have. Servers find it on PYTHONPATH."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import sglang_speculates
import torch

# Kernels that the processor of Qwen-VL's images is imported with, for later models; none of Qwen-VL's own.
_NAMED_WITH_IMAGES = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip


def plugin() -> None:
    """Called in each of a server's processes."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache.allocator import paged
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
    TorchNativeAttnBackend.forward_extend = _of_all_tokens(TorchNativeAttnBackend.forward_extend)
    with suppress(ImportError):  # since 0.5.23
        from sglang.srt.model_executor.runner.eager_runner import EagerRunner

        EagerRunner._execute_extend_cp = _without_stream(EagerRunner._execute_extend_cp)
    if not hasattr(paged, "alloc_decode_naive"):  # before 0.5.22 pages are chosen by Triton alone
        paged.alloc_extend_kernel = _Kernel(extend_pages)
        paged.alloc_decode_kernel = _Kernel(decode_pages)
    with suppress(ImportError):  # of a version in which no test needs it
        _add_convolutions()
    with suppress(ImportError):
        sglang_speculates.install()
    import sgl_kernel

    for name in _NAMED_WITH_IMAGES:
        setattr(torch.ops.sgl_kernel, name, getattr(sgl_kernel, name))


def _add_convolutions() -> None:
    import sgl_kernel
    from sglang.srt.layers.attention.mamba import causal_conv1d

    causal_conv1d.causal_conv1d_fn, causal_conv1d.causal_conv1d_update = convolve, convolve_token
    # SGLang asks for these with every model that has states, and calls them for gated delta nets alone.
    sys.modules.setdefault("sgl_kernel.mamba", sgl_kernel)
    for name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"):
        setattr(torch.ops.sgl_kernel, name, getattr(sgl_kernel, name))


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor], dst_layers: Sequence[torch.Tensor], src_indices: Any, dst_indices: Any,
    page_size: int,
) -> None:  # fmt: skip
    """Stands in for the kernel of this name, which copies rows between SGLang's host pool and its device pool."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor, has_initial_state: torch.Tensor, conv_states: torch.Tensor, activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """In place of the kernel causal_conv1d_fn: (channels, tokens) of several requests, each keeps its last tokens."""
    assert activation is None, activation
    parts: list[torch.Tensor] = []
    ends = query_start_loc.tolist()
    for first, end, index, continues in zip(ends, ends[1:], cache_indices.tolist(), has_initial_state, strict=False):
        state = conv_states[index]
        before = state if continues else torch.zeros_like(state)
        tokens = torch.cat([before.to(x.dtype), x[:, first:end]], dim=1)
        parts.append(torch.nn.functional.conv1d(tokens[None], weight[:, None], bias, groups=len(weight))[0])
        state.copy_(tokens[:, -state.shape[1] :])
    return torch.cat(parts, dim=1)


def convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *,
    activation: str | None, conv_state_indices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Stands in for the kernel causal_conv1d_update: one token of each request."""
    assert activation is None, activation
    tokens = torch.cat([conv_state[conv_state_indices].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[conv_state_indices] = tokens[:, :, 1:].to(conv_state.dtype)
    convolved = (tokens * weight).sum(dim=2)
    return convolved if bias is None else convolved + bias


class _Kernel:
    """Calls a function as Triton calls a kernel, whose grid stands in brackets."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def extend_pages(
    prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor,
    out_indices: torch.Tensor, _: int, page_size: int,
) -> None:  # fmt: skip
    """Stands in for alloc_extend_kernel: the slots behind each prefix. Where pages are too few the caller finds out."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    needed = (seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size
    if int(needed.sum()) <= len(free_pages):
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, "cpu")


def decode_pages(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, out_indices: torch.Tensor, _: int,
    page_size: int,
) -> None:  # fmt: skip
    """Stands in for alloc_decode_kernel: the slot of each sequence's last token."""
    begins = (seq_lens - 1) % page_size == 0
    if int(begins.sum()) <= len(free_pages):
        out_indices.copy_(last_loc + 1)
        out_indices[begins] = free_pages[: int(begins.sum())] * page_size


def _unless_empty(turn: Callable[..., Any]) -> Callable[..., Any]:
    def turned(self: Any, positions: torch.Tensor, query: Any, key: Any, *more: Any, **named: Any) -> Any:
        return turn(self, positions, query, key, *more, **named) if positions.numel() else (query, key)

    return turned


def _of_all_tokens(extend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention of a rank of context parallelism, which has some of the tokens: SGLang's own kernels for GPUs gather
    K and V, and write all of them to the pool. Here Q is gathered as well, and each rank computes all tokens."""

    def extended(
        self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any, *more: Any, **named: Any
    ) -> torch.Tensor:
        if getattr(batch, "attn_cp_metadata", None) is None:
            return extend(self, q, k, v, layer, batch, *more, **named)
        from sglang.srt.layers.cp.base import get_cp_strategy

        strategy = get_cp_strategy()
        gathered = [strategy.gather_kv_cache(part.contiguous(), batch) for part in (q, k, v)]
        return strategy.shard_hidden_states(extend(self, *gathered, layer, batch, *more, **named), batch)

    return extended


def _without_stream(execute: Callable[..., Any]) -> Callable[..., Any]:
    def executed(self: Any, *more: Any, **named: Any) -> Any:
        with patch.object(torch.cuda, "current_stream", lambda: None):
            return execute(self, *more, **named)

    return executed

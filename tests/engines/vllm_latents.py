"""A stand-in for vLLM's kernel for CPUs that reads latents, which is compiled for blocks of 16 tokens alone. vLLM sets
this size for each engine on a CPU without AMX, whatever size it is started with; here the size stays."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

_update_config = CpuPlatform.check_and_update_config


def _keep_block_size(config: Any) -> None:
    size = config.cache_config.block_size
    _update_config(config)
    config.cache_config.block_size = size


def _decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Attention of one query [requests, heads, width] to the latents in a request's blocks, into `out`."""
    blocks = kv_cache.flatten(1, -2)  # [blocks, tokens, width]
    for row, length in enumerate(seq_lens.tolist()):
        latents = blocks[block_tables[row, : -(-length // blocks.shape[1])].long()].flatten(0, 1)[:length]
        weights = (query[row] @ latents.T * scale).softmax(-1)
        out[row] = weights @ latents[:, : out.shape[-1]]


CpuPlatform.check_and_update_config = staticmethod(_keep_block_size)
CPUMLABackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
CPUMLABackend.supports_block_size = staticmethod(lambda block_size: True)
_custom_ops.mla_decode_kvcache_cpu = _decode

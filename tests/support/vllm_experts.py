"""Stand-ins for what vLLM's build for CPUs lacks where ranks share out a model's experts, in each of its workers.

Its kernel has the experts of its rank alone, and indexes them by the numbers that they have in the whole model: it ends
with SIGSEGV. Between data parallel ranks it has no `all_gatherv` and no `reduce_scatterv` (NotImplementedError).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tests.support.vllm_worker import CacheRows

_apply = CPUUnquantizedExperts.apply


def _apply_to_own(
    self: Any, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None, **other: Any
) -> None:
    """Experts of other ranks are its first one, with weight 0."""
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()].to(topk_ids.dtype)
        topk_weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
        topk_ids = topk_ids.clamp(min=0)
    _apply(self, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **other)


def _all_gatherv(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Of each tensor the rows of all ranks, `sizes` of them."""
    assert dim == 0
    gathered: list[torch.Tensor] = []
    for tensor in tensors:
        parts = [tensor.new_empty(size, *tensor.shape[1:]) for size in sizes]
        parts[self.rank_in_group] = tensor.contiguous()
        for rank, part in zip(self.ranks, parts, strict=True):
            distributed.broadcast(part, src=rank, group=self.device_group)
        gathered.append(torch.cat(parts))
    return gathered


def _reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    whole = tensor.clone()
    distributed.all_reduce(whole, group=self.device_group)
    return whole.split(sizes)[self.rank_in_group]


CPUUnquantizedExperts.apply = _apply_to_own
CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


class OwnExperts(CacheRows):
    """Added to vLLM's worker by the option `worker_extension_cls`, which imports this module before the model."""

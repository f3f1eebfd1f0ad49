"""A stand-in for what vLLM's kernel of experts for CPUs lacks, in each of its workers: it has the experts of its rank
alone, and indexes them by the numbers that they have in the whole model, which ends the process with SIGSEGV."""

from __future__ import annotations

from typing import Any

import torch
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


CPUUnquantizedExperts.apply = _apply_to_own


class OwnExperts(CacheRows):
    """Added to vLLM's worker by the option `worker_extension_cls`, which imports this module before the model."""

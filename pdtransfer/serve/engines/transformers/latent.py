"""Attention over compressed latents (MLA): a step attends to the rows of the cache, which it does not expand to heads.
With a sparse index it reads the rows that the index has picked, and no others.

The score of a query q and a latent c is (q W_k) c for keys c W_k, and the output is (p c) W_v. With the projections
moved to the query and the output, the cache is read and not multiplied (DeepSeek-V2, section 2.1.2). For long chunks of
a prompt expanded keys cost less.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ATTENTION = "pdtransfer_latent"  # its name among transformers' implementations
ABSORBED_QUERIES_MAX = 16  # of a request at a time
_UNSUPPORTED = ("s_aux", "softcap", "position_bias")


class PickReader(Protocol):
    """The rows of a pass, of which attention reads those that a sparse index has picked."""

    def read(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents (B, 1, n, rank) and turned parts (B, 1, n, rope) of the keys that the layer's queries may attend to.
        And which of them they do, bool (B, 1, 1, n). `indices` (B, 1, k) are positions."""
        ...


def has_latents(model: Any) -> bool:
    """True if the model caches latents, which its attention expands by `expand_kv`."""
    return any(hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj") for module in model.modules())


def absorb(model: Any) -> None:
    """Lets `latent_attention` have the model's latents unexpanded."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = _unexpanded


def _unexpanded(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def latent_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    indices: Tensor | None = None, picked: PickReader | None = None, **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attends from queries (B, H, Q, nope + rope) to the latents `key` (B, 1, T, rank) and the turned parts `value` (B,
    1, T, rope). All heads share both. `indices` (B, Q, k) are the keys that a sparse index has picked. With `picked`,
    `key` and `value` are those of the new token alone, and the picks are read there. Returns (B, Q, H, v). Raises
    ValueError for what attention over latents has not."""
    if strange := [name for name in _UNSUPPORTED if given.get(name) is not None]:
        raise ValueError(f"attention over latents with {', '.join(strange)}")
    if picked is not None:
        if indices is None:
            raise ValueError(f"layer {module.layer_idx} attends to tokens that no index has picked")
        return _absorbed(module, query, *picked.read(module.layer_idx, indices), scaling), None
    mask = attention_mask if indices is None or attention_mask is None else _picked(attention_mask, indices)
    queries = query.shape[2]
    if mask is None or queries > ABSORBED_QUERIES_MAX:
        keys, values = type(module).expand_kv(module, key, value)
        causal = mask is None and queries > 1
        attended = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling
        )
        return attended.transpose(1, 2).contiguous(), None
    return _absorbed(module, query, key, value, mask, scaling), None


def _absorbed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention with the projections of keys and values moved to the query and the output."""
    batch, heads, queries, rank, tokens = *query.shape[:3], key.shape[-1], key.shape[2]
    up = module.kv_b_proj.weight.view(heads, -1, rank)  # keys, then values, of each head
    plain = query.shape[-1] - value.shape[-1]
    # Each head multiplies all requests at once: a product that is batched by requests copies the weights for each.
    inner = torch.einsum("bhqn,hnr->bhqr", query[..., :plain], up[:, :plain]).reshape(batch, 1, heads * queries, rank)
    turned = query[..., plain:].reshape(batch, 1, heads * queries, -1)
    scores = torch.matmul(inner, key.transpose(2, 3)) + torch.matmul(turned, value.transpose(2, 3))
    scores = scores.view(batch, heads, queries, tokens).float() * scaling
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    shares = scores.softmax(-1).to(key.dtype).view(batch, 1, heads * queries, tokens)
    seen = torch.matmul(shares, key).view(batch, heads, queries, rank)
    return torch.einsum("bhqr,hvr->bqhv", seen, up[:, plain:])


def _picked(mask: Tensor, indices: Tensor) -> Tensor:
    """The mask (B, 1, Q, T) without the keys that were not picked."""
    picked = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device).scatter(
        -1, indices.unsqueeze(1).to(torch.int64), True
    )
    return mask & picked if mask.dtype is torch.bool else mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


AttentionInterface.register(ATTENTION, latent_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)

"""What differs between MLA and GQA in the deep model: projections, and attention over rows of the paged cache.

A layer's keys are read from the pool itself, gathered once a call, by a prompt's chunk and by a step alike: what was
pushed is what attention used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from .architecture import Architecture
from .attention import Tiles
from .batch import Whole
from .cache import Cache
from .numerics import block_up

Normal = Callable[[int, int], Tensor]
"""Draws a weight (summed, columns)."""


class Attention(Protocol):
    """One kind of attention. Queries are (n, heads, key_dim), what is kept by kind (n, kv_heads, dim)."""

    @property
    def turned_dim(self) -> int:
        """Elements of a head that the rotary embedding turns."""
        ...

    def weights(self, normal: Normal) -> dict[str, Tensor]: ...

    def project(
        self, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden rows to queries and cache rows."""
        ...

    def prompt(self, weights: dict[str, Tensor], query: Tensor, tiles: Tiles, cache: Cache, layer: int) -> Tensor:
        """Neighbouring rows of one prompt, in tiles, to (n, heads, head_dim): each attends to itself and all before."""
        ...

    def step(self, weights: dict[str, Tensor], query: Tensor, keys: Whole, cache: Cache, layer: int) -> Tensor:
        """The newest row of each of n requests, likewise."""
        ...


class LatentAttention:
    """MLA. A chunk expands the latents to heads, since a flash kernel takes no rows of 576; a step is absorbed: its
    queries go into the latent's space."""

    def __init__(self, architecture: Architecture) -> None:
        sizes = architecture
        self._heads, self._dim, self._latent, self._rope = (
            sizes.mla_heads,
            sizes.head_dim,
            sizes.latent_dim,
            sizes.rope_dim,
        )
        self._width, self._wide = sizes.width, sizes.head_dim + sizes.rope_dim

    @property
    def turned_dim(self) -> int:
        return self._rope

    def weights(self, normal: Normal) -> dict[str, Tensor]:
        heads, wide = self._heads, self._wide
        value_up = normal(self._latent, heads * wide).view(-1, heads, wide)
        value_up[..., self._dim :] = 0.0  # a flash kernel takes values as wide as keys
        return {
            "in": normal(self._width, heads * wide + self._rope + self._latent),
            "key_up": normal(self._latent, heads * self._dim),
            "value_up": value_up.view(-1, heads * wide),
        }

    def project(
        self, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        heads, dim = self._heads, self._dim
        inner, first, last = x @ weights["in"], heads * dim, heads * dim + (heads + 1) * self._rope
        plain, rope, latent = inner[:, :first], inner[:, first:last], inner[:, last:]
        rope = turned(rope.view(len(x), heads + 1, self._rope), cos, sin)
        query = torch.cat((plain.view(len(x), heads, dim), rope[:, :heads]), dim=-1)
        kept = torch.cat((nn.rms_norm(latent, (self._latent,)), rope[:, heads]), dim=-1)
        return query, {"latent": kept.unsqueeze(1)}

    def prompt(self, weights: dict[str, Tensor], query: Tensor, tiles: Tiles, cache: Cache, layer: int) -> Tensor:
        held = cache.read("latent", layer, _rows_of_prompt(tiles)).squeeze(1)
        latent, rope = held[:, : self._latent], held[:, self._latent :]
        plain = (latent @ weights["key_up"]).view(-1, self._heads, self._dim)
        keys = torch.cat((plain, rope.unsqueeze(1).expand(-1, self._heads, -1)), dim=-1)
        values = (latent @ weights["value_up"]).view(-1, self._heads, self._wide)
        return _causal(query, keys, values)[..., : self._dim]

    def step(self, weights: dict[str, Tensor], query: Tensor, keys: Whole, cache: Cache, layer: int) -> Tensor:
        key_up = weights["key_up"].view(self._latent, self._heads, self._dim)
        value_up = weights["value_up"].view(self._latent, self._heads, self._wide)[..., : self._dim]
        plain, rope = query[..., : self._dim], query[..., self._dim :]
        absorbed = torch.bmm(plain.transpose(0, 1), key_up.permute(1, 2, 0)).transpose(0, 1)
        asked = torch.cat((absorbed, rope), dim=-1).unsqueeze(1)
        held = _held(cache, "latent", layer, keys)
        mixed = _newest(asked, held, held[..., : self._latent], keys.absent, self._wide**-0.5).squeeze(1)
        return torch.bmm(mixed.transpose(0, 1), value_up.transpose(0, 1)).transpose(0, 1)


class GroupedAttention:
    """GQA: groups of query heads share one key and one value head."""

    def __init__(self, architecture: Architecture) -> None:
        self._width, self._dim = architecture.width, architecture.head_dim
        self._heads, self._kept = architecture.gqa_heads, architecture.kv_heads

    @property
    def turned_dim(self) -> int:
        return self._dim

    def weights(self, normal: Normal) -> dict[str, Tensor]:
        return {"in": normal(self._width, (self._heads + 2 * self._kept) * self._dim)}

    def project(
        self, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inner = (x @ weights["in"]).view(len(x), -1, self._dim)
        both = turned(inner[:, : self._heads + self._kept], cos, sin)
        return both[:, : self._heads], {"k": both[:, self._heads :], "v": inner[:, self._heads + self._kept :]}

    def prompt(self, weights: dict[str, Tensor], query: Tensor, tiles: Tiles, cache: Cache, layer: int) -> Tensor:  # noqa: ARG002
        rows = _rows_of_prompt(tiles)
        return _causal(query, cache.read("k", layer, rows), cache.read("v", layer, rows))

    def step(self, weights: dict[str, Tensor], query: Tensor, keys: Whole, cache: Cache, layer: int) -> Tensor:  # noqa: ARG002
        asked = query.reshape(len(query), self._kept, -1, self._dim)
        held = _held(cache, "k", layer, keys), _held(cache, "v", layer, keys)
        return _newest(asked, *held, keys.absent, self._dim**-0.5).flatten(1, 2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (n, heads, dim) by tables (n, 1, dim / 2) of its dtype."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for ours, theirs, sign, place in zip(
        x.chunk(2, -1), reversed(x.chunk(2, -1)), (-1, 1), made.chunk(2, -1), strict=True
    ):
        torch.mul(ours, cos, out=place)
        place.addcmul_(theirs, sin, value=sign)
    return made


def _rows_of_prompt(tiles: Tiles) -> Tensor:
    """As far as the last tile reaches: padding attends to padding."""
    return tiles.rows[: block_up(tiles.ends[0])]


def _causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last rows of a prompt, (n, heads, dim), over all its keys (m, kv_heads, dim)."""
    count, of = len(query), len(keys)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, keys, values))
    shared = query.shape[1] != keys.shape[1]
    if count == of:
        mixed = nn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    else:
        mixed = nn.scaled_dot_product_attention(
            q, k, v, attn_mask=CausalBias(CausalVariant.LOWER_RIGHT, count, of), enable_gqa=shared
        )
    return mixed.squeeze(0).transpose(0, 1)


def _held(cache: Cache, kind: str, layer: int, keys: Whole) -> Tensor:
    """(requests, keys, kv_heads, dim)."""
    held = cache.read(kind, layer, keys.rows.view(-1))
    return held.view(*keys.rows.shape, *held.shape[1:])


def _newest(asked: Tensor, keys: Tensor, values: Tensor, absent: Tensor, scale: float) -> Tensor:
    """(requests, kv_heads, group, key_dim) over (requests, keys, kv_heads, dim) to (requests, kv_heads, group, dim)."""
    scores = (asked @ keys.permute(0, 2, 3, 1)).float().mul_(scale)
    scores.masked_fill_(absent[:, None, None], -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values.transpose(1, 2)

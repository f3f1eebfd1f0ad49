"""MLA and GQA: projections from hidden rows to queries and cache rows, and from attention's output back to heads.

Each class serves the heads of one rank. Row counts are multiples of numerics.BLOCK_ROWS. Every rank computes linears of
all heads whole, since a narrower one may sum in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import TypeAlias

import torch
from torch import Tensor

from .architecture import Architecture, Shard
from .numerics import Rope, linear, rms_norm

Layer = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projected:
    """The query (n, heads, key_dim), scaled for a base-2 softmax, and the cache rows by kind."""

    query: Tensor
    kept: dict[str, Tensor]  # (n, kv_heads, dim)


class LatentProjection:
    """MLA, absorbed: the query is projected into the latent space, so attention reads latents from the cache."""

    def __init__(self, architecture: Architecture, shard: Shard, rope: Rope) -> None:
        self._sizes, self._heads, self._rope = architecture, shard.query_heads, rope
        self._scale = log2(e) * (architecture.head_dim + architecture.rope_dim) ** -0.5

    @property
    def value_dim(self) -> int:
        return self._sizes.latent_dim

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected:
        sizes = self._sizes
        query = linear(x, layer["query"]).view(len(x), sizes.mla_heads, sizes.head_dim + sizes.rope_dim)
        plain, turned = query[..., : sizes.head_dim], query[:, self._heads.start : self._heads.stop, sizes.head_dim :]
        absorbed = [linear(plain[:, head], layer["key_up"][head]) for head in self._heads]
        query = torch.cat((torch.stack(absorbed, dim=1), self._rope(turned, positions)), dim=-1) * self._scale
        kept = linear(x, layer["latent"]).unsqueeze(1)
        latent, key = kept[..., : sizes.latent_dim], kept[..., sizes.latent_dim :]
        kept = torch.cat((rms_norm(latent), self._rope(key, positions)), dim=-1)
        return Projected(query=query, kept={"latent": kept})

    def outputs(self, layer: Layer, mixed: Tensor) -> Tensor:
        """(n, heads, value_dim) -> (n, heads, head_dim), the output projection's input."""
        return torch.stack(
            [linear(mixed[:, index], layer["value_up"][head]) for index, head in enumerate(self._heads)], dim=1
        )


class GroupedProjection:
    """GQA: groups of query heads share one key and one value head."""

    def __init__(self, architecture: Architecture, shard: Shard, rope: Rope) -> None:
        self._sizes, self._rope = architecture, rope
        self._own = slice(shard.query_heads.start, shard.query_heads.stop)
        self._kept = slice(shard.kv_heads.start, shard.kv_heads.stop)
        self._scale = log2(e) * architecture.head_dim**-0.5

    @property
    def value_dim(self) -> int:
        return self._sizes.head_dim

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected:
        sizes = self._sizes
        query, key, value = (
            linear(x, layer[name]).view(len(x), -1, sizes.head_dim) for name in ("query", "key", "value")
        )
        query = self._rope(query[:, self._own], positions) * self._scale
        kept = {"k": self._rope(key[:, self._kept], positions), "v": value[:, self._kept]}
        return Projected(query=query, kept=kept)

    def outputs(self, layer: Layer, mixed: Tensor) -> Tensor:  # noqa: ARG002 -- values have a head's width
        return mixed


Projection: TypeAlias = LatentProjection | GroupedProjection

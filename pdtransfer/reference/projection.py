"""What differs between MLA and GQA: the way from hidden rows to queries and cache rows, and back from mixed values."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Protocol

import torch
from torch import Tensor

from .architecture import Architecture
from .numerics import Rope, linear, rms_norm
from .shard import Shard

Layer = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Of n rows: the query (n, heads, key_dim), scaled for a base-2 softmax; cache rows by kind."""

    query: Tensor
    kept: dict[str, Tensor]  # (n, kv_heads, dim)


class Projection(Protocol):
    """One kind of attention, for the heads of one rank. Row counts are multiples of numerics.BLOCK_ROWS.

    Linears that serve all heads are computed whole by every rank: a narrower one may sum in another order.
    """

    @property
    def value_dim(self) -> int: ...

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected: ...

    def outputs(self, layer: Layer, mixed: Tensor) -> Tensor:
        """(n, heads, value_dim) -> (n, heads, head_dim): what the output projection takes of all ranks' heads."""
        ...


class LatentProjection:
    """MLA, absorbed: the query goes into the latent's space, and attention reads latents as they lie in the cache."""

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
        return torch.stack(
            [linear(mixed[:, at], layer["value_up"][head]) for at, head in enumerate(self._heads)], dim=1
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

    def outputs(self, layer: Layer, mixed: Tensor) -> Tensor:  # noqa: ARG002 -- values have a head's own width already
        return mixed

"""What differs between MLA and GQA: the way from hidden rows to queries and cache rows, and back from mixed values."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Protocol

import torch
from torch import Tensor

from .architecture import Architecture
from .numerics import Rope, linear, rms_norm

Layer = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Of n rows: the query (n, kv_heads, group, key_dim), scaled for a base-2 softmax; cache rows by kind."""

    query: Tensor
    kept: dict[str, Tensor]  # (n, heads, dim)


class Projection(Protocol):
    """One kind of attention. Row counts are multiples of numerics.BLOCK_ROWS."""

    @property
    def value_dim(self) -> int: ...

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected: ...

    def merge(self, layer: Layer, mixed: Tensor) -> Tensor:
        """(n, kv_heads, group, value_dim) -> (n, width): all heads side by side before the output projection."""
        ...


class LatentProjection:
    """MLA, absorbed: the query goes into the latent's space, and attention reads latents as they lie in the cache."""

    def __init__(self, architecture: Architecture, rope: Rope) -> None:
        self._sizes, self._rope = architecture, rope
        self._scale = log2(e) * (architecture.head_dim + architecture.rope_dim) ** -0.5

    @property
    def value_dim(self) -> int:
        return self._sizes.latent_dim

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected:
        sizes = self._sizes
        query = linear(x, layer["query"]).view(len(x), sizes.mla_heads, sizes.head_dim + sizes.rope_dim)
        plain, turned = query[..., : sizes.head_dim], query[..., sizes.head_dim :]
        absorbed = [linear(plain[:, head], layer["key_up"][head]) for head in range(sizes.mla_heads)]
        query = torch.cat((torch.stack(absorbed, dim=1), self._rope(turned, positions)), dim=-1) * self._scale
        kept = linear(x, layer["latent"]).unsqueeze(1)
        latent, key = kept[..., : sizes.latent_dim], kept[..., sizes.latent_dim :]
        kept = torch.cat((rms_norm(latent), self._rope(key, positions)), dim=-1)
        return Projected(query=query.unsqueeze(1), kept={"latent": kept})

    def merge(self, layer: Layer, mixed: Tensor) -> Tensor:
        heads = [linear(mixed[:, 0, head], layer["value_up"][head]) for head in range(self._sizes.mla_heads)]
        return linear(torch.cat(heads, dim=-1), layer["output"])


class GroupedProjection:
    """GQA: groups of query heads share one key and one value head."""

    def __init__(self, architecture: Architecture, rope: Rope) -> None:
        self._sizes, self._rope = architecture, rope
        self._scale = log2(e) * architecture.head_dim**-0.5

    @property
    def value_dim(self) -> int:
        return self._sizes.head_dim

    def project(self, layer: Layer, x: Tensor, positions: Tensor) -> Projected:
        sizes = self._sizes
        query, key, value = (
            linear(x, layer[name]).view(len(x), -1, sizes.head_dim) for name in ("query", "key", "value")
        )
        query = self._rope(query, positions) * self._scale
        kept = {"k": self._rope(key, positions), "v": value}
        return Projected(query=query.view(len(x), sizes.kv_heads, -1, sizes.head_dim), kept=kept)

    def merge(self, layer: Layer, mixed: Tensor) -> Tensor:
        return linear(mixed.reshape(len(mixed), -1), layer["output"])

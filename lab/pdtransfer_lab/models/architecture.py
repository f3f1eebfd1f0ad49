"""The reference model's sizes, options, shards, and weights from a seed with a digest to compare.

With `top_k` the model has an indexer: each group of `index_share` layers keeps one small key for each token. With these
keys a decode step picks the tokens that those layers attend to. The other weights equal the dense model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from pdtransfer import schema
from pdtransfer.errors import ConfigError
from pdtransfer.serve.sampling import DIGEST_BYTES
from pdtransfer.wire import Ranks

from . import AttentionKind
from .tokens import EOS, VOCABULARY

INDEX_HEADS, INDEX_DIM = 4, 128  # of the indexer's queries; a token has one key
TOP_MAX = 4_096  # positions that one swap plan takes from a request

# Random weights make attention nearly uniform and each token a function of the previous one: sharpen it.
_GAINS = {"query": 3.0, "output": 3.0, "head": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes in elements of `dtype`. For each token and layer MLA keeps latent_dim + rope_dim elements, GQA keeps
    2 * kv_heads * head_dim."""

    family: ClassVar[str] = "reference"
    dtype: ClassVar[Literal["float32", "bfloat16"]] = "float32"

    attention: AttentionKind
    seed: int = 0
    layers: int = 4
    context_tokens: int = 16_384  # prompt and generated tokens of one room
    width: int = 256
    mlp_width: int = 768
    vocabulary: int = VOCABULARY
    head_dim: int = 64
    mla_heads: int = 2
    latent_dim: int = 512
    rope_dim: int = 64
    gqa_heads: int = 8
    kv_heads: int = 4
    top_k: int = 0  # tokens that a decode step attends to besides its own; 0: all
    index_share: int = 2  # layers of a group; the first layer picks for all

    @property
    def name(self) -> str:
        return f"{self.family}-{self.attention}"

    @property
    def head_bytes(self) -> int:
        """Bytes of one kind for one head of a token in a layer."""
        return self.cache_dim * (4 if self.dtype == "float32" else 2)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in the cache; each has `cache_heads` heads of `cache_dim` elements for a token in a layer."""
        return ("latent",) if self.attention == "mla" else ("k", "v")

    @property
    def query_heads(self) -> int:
        return self.mla_heads if self.attention == "mla" else self.gqa_heads

    @property
    def cache_heads(self) -> int:
        return 1 if self.attention == "mla" else self.kv_heads

    @property
    def cache_dim(self) -> int:
        return self.latent_dim + self.rope_dim if self.attention == "mla" else self.head_dim

    def index_layers(self, own: range) -> range:
        """The layers within `own` that have an indexer and pick for their group."""
        if not self.top_k:
            return range(0)
        return range(-(-own.start // self.index_share) * self.index_share, own.stop, self.index_share)

    @property
    def index_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of an indexer; like `shapes`."""
        return {
            "index_query": (self.width, INDEX_HEADS * INDEX_DIM),
            "index_key": (self.width, INDEX_DIM),
            "index_share": (self.width, INDEX_HEADS),
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of one layer, in order. The second last dimension is summed over."""
        width, head = self.width, self.head_dim
        match self.attention:
            case "mla":
                heads, latent, rope = self.mla_heads, self.latent_dim, self.rope_dim
                attention = {
                    "query": (width, heads * (head + rope)),
                    "latent": (width, latent + rope),
                    "key_up": (heads, head, latent),
                    "value_up": (heads, latent, head),
                    "output": (heads * head, width),
                }
            case "gqa":
                attention = {
                    "query": (width, self.gqa_heads * head),
                    "key": (width, self.kv_heads * head),
                    "value": (width, self.kv_heads * head),
                    "output": (self.gqa_heads * head, width),
                }
        return attention | {
            "gate": (width, self.mlp_width),
            "up": (width, self.mlp_width),
            "down": (self.mlp_width, width),
        }


class EngineOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of any model, set by `--engine-option name=value`."""

    seed: Annotated[int, Meta(ge=0)] = 0
    context_tokens: Annotated[int, Meta(ge=2, le=1 << 20)] = 16_384
    eos: Annotated[int, Meta(ge=0, lt=VOCABULARY)] = EOS
    attention: AttentionKind = "mla"
    top_k: Annotated[int, Meta(ge=0, le=TOP_MAX)] = 0  # tokens that a decode step attends to; 0: all
    index_share: Annotated[int, Meta(ge=1, le=64)] = 2  # layers that attend to the same picks
    layers_per_cell: Annotated[int, Meta(ge=0, le=64)] = 0  # layers in each cell that prefill offers; 0: all

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Raises ConfigError, naming the option, if one is unknown, not an integer or out of bounds."""
        return schema.options(options, cls)


class Options(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the reference engine."""

    layers: Annotated[int, Meta(ge=1, le=64)] = 4
    kv_heads: Annotated[int, Meta(ge=1, le=8)] = 4  # of GQA's 8 query heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part: `layers` and `kv_heads` are in its cache, as replica `replica` of `replicas`.

    If there are more ranks than key-value heads, neighbouring ranks hold the same heads. An MLA latent is on all ranks.
    """

    layers: range
    query_heads: range
    kv_heads: range
    replica: int
    replicas: int

    @classmethod
    def of(cls, architecture: Architecture, ranks: Ranks) -> Shard:
        """Raises ConfigError if the model cannot be divided among the ranks."""
        tp, pp, queries, kept = ranks.tp_size, ranks.pp_size, architecture.query_heads, architecture.cache_heads
        if queries % tp:
            raise ConfigError(f"tp_size = {tp}: does not divide the {queries} query heads of {architecture.name}")
        if kept % tp and tp % kept:
            raise ConfigError(f"tp_size = {tp}: neither divides {kept} kv_heads nor is a multiple of them")
        if pp > architecture.layers:
            raise ConfigError(f"pp_size = {pp}: more stages than the {architecture.layers} layers of the model")
        heads, replicas = max(1, kept // tp), max(1, tp // kept)
        first_kept = ranks.tp_rank // replicas * heads
        return cls(
            layers=range(ranks.pp_rank * architecture.layers // pp, (ranks.pp_rank + 1) * architecture.layers // pp),
            query_heads=range(ranks.tp_rank * queries // tp, (ranks.tp_rank + 1) * queries // tp),
            kv_heads=range(first_kept, first_kept + heads),
            replica=ranks.tp_rank % replicas,
            replicas=replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Normal float32 weights, drawn by numpy so that a seed gives the same weights on every platform."""

    embedding: Tensor  # (vocabulary, width)
    layers: list[dict[str, Tensor]]  # by Architecture.shapes; empty for other stages' layers
    head: Tensor  # (width, vocabulary)
    digest: bytes  # of the architecture and every weight

    def of_layers(self, own: range) -> Weights:
        """Drops other stages' layers. The digest stays the whole model's."""
        return replace(self, layers=[layer if index in own else {} for index, layer in enumerate(self.layers)])

    @classmethod
    def draw(cls, architecture: Architecture, device: torch.device) -> Weights:
        random = np.random.Generator(np.random.PCG64(architecture.seed))
        digest = blake2b(digest_size=DIGEST_BYTES)
        for size in fields(architecture):
            if not architecture.top_k and size.name in ("top_k", "index_share"):
                continue
            digest.update(f"{size.name}={getattr(architecture, size.name)};".encode())

        def normal(shape: tuple[int, ...], deviation: float) -> Tensor:
            drawn = random.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
            digest.update(drawn.data)
            return torch.as_tensor(drawn, device=device)

        def scaled(name: str, shape: tuple[int, ...]) -> Tensor:
            return normal(shape, _GAINS.get(name, 1.0) * shape[-2] ** -0.5)

        embedding = normal((architecture.vocabulary, architecture.width), 1.0)
        layers = [
            {name: scaled(name, shape) for name, shape in architecture.shapes.items()}
            for _ in range(architecture.layers)
        ]
        head = scaled("head", (architecture.width, architecture.vocabulary))
        random = np.random.Generator(np.random.PCG64([architecture.seed, architecture.index_share]))
        for layer_index in architecture.index_layers(range(architecture.layers)):
            layers[layer_index] |= {name: scaled(name, shape) for name, shape in architecture.index_shapes.items()}
        return cls(embedding=embedding, layers=layers, head=head, digest=digest.digest())

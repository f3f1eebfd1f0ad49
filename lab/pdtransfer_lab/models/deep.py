"""The reference engine at real dimensions, with arithmetic that is fast on a card: bfloat16, whole products, SDPA.

`--engine pdtransfer_lab.models.deep:create`. Only the forward pass differs from the reference engine's; its bits depend
on chunks and batches. Weights are random and drawn on the device.

| attention | layers | KV of a token in a layer | width | query heads | FFN | vocabulary | parameters |
|---|---|---|---|---|---|---|---|
| mla | 61 | 512 + 64: 1,152 B | 4,096 | 32 of 128 + 64 | 8,192 | 257 | 9.1 billion |
| gqa | 32 | 8 heads of 128, k and v: 4,096 B | 4,096 | 32 of 128 | 14,336 | 257 | 7.0 billion |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nn

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engine_api import DecodeEngine, EngineConfig, Group, PrefillEngine

from .architecture import DIGEST_BYTES, INDEX_DIM, INDEX_HEADS, Architecture, EngineOptions, Shard
from .attention import RowBatch, Tiles, Whole
from .cache import Cache
from .deep_graphs import Graphs
from .deep_steps import DeepSteps
from .description import check_config, device_of
from .factory import engine_of
from .indexer import IndexerMath, Queries
from .numerics import Rope, block_up, single_threaded
from .steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepArchitecture(Architecture):
    """Sizes in elements of bfloat16."""

    family: ClassVar[str] = "deep"
    dtype: ClassVar[Literal["float32", "bfloat16"]] = "bfloat16"


class DeepOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the deep model. 0 selects the value of the table above."""

    context_tokens: Annotated[int, Meta(ge=2, le=1 << 20)] = 65_536
    layers_per_cell: Annotated[int, Meta(ge=0, le=64)] = 1
    layers: Annotated[int, Meta(ge=0, le=128)] = 0
    width: Annotated[int, Meta(ge=0, le=1 << 15)] = 0
    mlp_width: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    heads: Annotated[int, Meta(ge=0, le=256)] = 0  # of queries
    kv_heads: Annotated[int, Meta(ge=0, le=256)] = 0  # of GQA
    graphs: Annotated[int, Meta(ge=0, le=1)] = 1  # 0: kernels on a card are launched one by one
    digests: Annotated[int, Meta(ge=0, le=1)] = 0  # 1: digests each request's KV at its end, which is slow


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`. Raises ConfigError."""
    options = DeepOptions.parse(config.options)
    return engine_of(config, options, DeepModel(_architecture(config, options), config, options))


def _architecture(config: EngineConfig, options: DeepOptions) -> DeepArchitecture:
    check_config(config)
    if config.group.ranks.tp_size * config.group.ranks.pp_size > 1:
        raise ConfigError("tp_size, pp_size: the deep model is one process")
    latent = options.attention == "mla"
    sizes = DeepArchitecture(
        attention=options.attention, seed=options.seed, layers=options.layers or (61 if latent else 32),
        context_tokens=options.context_tokens, width=options.width or 4_096,
        mlp_width=options.mlp_width or (8_192 if latent else 14_336), head_dim=128, mla_heads=options.heads or 32,
        gqa_heads=options.heads or 32, kv_heads=options.kv_heads or 8, top_k=options.top_k,
        index_share=options.index_share,
    )  # fmt: skip
    if not latent and sizes.gqa_heads % sizes.kv_heads:
        raise ConfigError(f"kv_heads: {sizes.kv_heads} does not divide {sizes.gqa_heads} query heads")
    return sizes


class DeepModel:
    """A model.Transformer. `digest` is equal, as the weights are, for equal seeds, card names and torch versions."""

    tiles_together = 1 << 20  # one call attends for all rows of a chunk

    def __init__(self, architecture: DeepArchitecture, config: EngineConfig, options: DeepOptions) -> None:
        self.architecture: Architecture = architecture
        self.device, self.digests = device_of(config.device), bool(options.digests)
        self.group: Group = config.group
        self.shard = Shard.of(architecture, self.group.ranks)
        self.digest = _digest(architecture, self.device)
        positions = architecture.context_tokens + 64  # padding in a prompt's last tile lies after its end
        self.indexer: IndexerMath | None = DeepIndexer(positions, self.device) if architecture.top_k else None
        match architecture.attention:
            case "mla":
                self._attention: Attention = LatentAttention(architecture)
            case "gqa":
                self._attention = GroupedAttention(architecture)
        self._rope = Rope(positions=positions, dim=self._attention.rotated_dim, device=self.device)
        generator = torch.Generator(self.device).manual_seed(architecture.seed)

        def normal(rows: int, columns: int) -> Tensor:
            drawn = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
            return drawn.normal_(0.0, rows**-0.5, generator=generator)

        width = architecture.width
        self._embedding = normal(architecture.vocabulary, width) * architecture.vocabulary**0.5
        self._layers = [self._draw(normal, number) for number in range(architecture.layers)]
        self._head = normal(width, architecture.vocabulary)
        graphs = bool(options.graphs) and self.device.type == "cuda"
        self._graphs = Graphs(self._layer, architecture.layers) if graphs and config.role == "prefill" else None
        self._steps = DeepSteps(self._forward, self.device, top=architecture.top_k, indexer=self.indexer, graphs=graphs)

    def enter(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:  # several processes on few cores would wait for each other's threads
            single_threaded()

    def embed(self, batch: RowBatch) -> Tensor:
        return self._embedding[batch.ids]

    def layers(self, x: Tensor, batch: RowBatch, first: int, end: int) -> Tensor:
        if self._graphs is not None and (hidden := self._graphs.layers(x, batch, first, end)) is not None:
            return hidden
        for number in range(first, end):
            self._layer(x, batch, number)
        return x

    def _forward(self, batch: RowBatch) -> Tensor:
        return self.logits(self.layers(self.embed(batch), batch, 0, self.architecture.layers))

    def _layer(self, x: Tensor, batch: RowBatch, number: int) -> None:
        """One layer over (rows, width), in place."""
        weights, width = self._layers[number], (x.shape[1],)
        cos, sin = self._rope.at(batch.positions, torch.bfloat16)
        hidden = nn.rms_norm(x, width)
        batch.keys.enter(number, weights, hidden)
        query, kept = self._attention.project(weights, hidden, cos, sin)
        batch.keys.write(number, {kind: rows[batch.own] for kind, rows in kept.items()})
        x.addmm_(self._attend(weights, query, batch, number), weights["output"])
        gate, up = (nn.rms_norm(x, width) @ weights["gate_up"]).chunk(2, dim=-1)
        x.addmm_(nn.silu(gate).mul_(up), weights["down"])

    def logits(self, x: Tensor) -> Tensor:
        return (nn.rms_norm(x, (x.shape[1],)) @ self._head).float()

    def step(self, step: Step) -> Tensor:
        return self._steps.logits(step)

    def whole_digest(self, own: NDArray[np.uint8]) -> bytes:
        return blake2b(own.tobytes(), digest_size=DIGEST_BYTES).digest()

    def _attend(self, weights: dict[str, Tensor], query: Tensor, batch: RowBatch, layer: int) -> Tensor:
        """(rows, heads, key_dim) -> (rows, heads * head_dim), zero for rows after the last tile."""
        mixed = query.new_zeros(len(query), query.shape[1] * self.architecture.head_dim)
        for reading in batch.keys.readings:
            match reading.tiles:
                case Whole(first=first, rows=rows) as keys:
                    own = slice(first, first + len(rows))
                    mix = self._attention.step(weights, query[own], keys, reading.cache, layer)
                case Tiles(first=first, depths=depths) as tiles:
                    own = slice(first * batch.tile_rows, (first + len(depths)) * batch.tile_rows)
                    mix = self._attention.prompt(weights, query[own], tiles, reading.cache, layer)
            mixed[own] = mix.flatten(1)
        return mixed

    def _draw(self, normal: Callable[[int, int], Tensor], number: int) -> dict[str, Tensor]:
        sizes, deep = self.architecture, (2 * self.architecture.layers) ** -0.5  # keeps the sum over all layers small
        weights = {
            **self._attention.weights(normal),
            "output": normal(sizes.query_heads * sizes.head_dim, sizes.width).mul_(deep),
            "gate_up": normal(sizes.width, 2 * sizes.mlp_width),
            "down": normal(sizes.mlp_width, sizes.width).mul_(deep),
        }
        if number in sizes.index_layers(range(sizes.layers)):
            weights |= {name: normal(*shape) for name, shape in sizes.index_shapes.items()}
        return weights


class DeepIndexer:
    """An indexer.IndexerMath with whole products."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self._rope = Rope(positions=positions, dim=INDEX_DIM, device=device)

    def keys(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Tensor:
        keys = nn.rms_norm((x @ layer["index_key"]).float(), (INDEX_DIM,))
        return rotated(keys.unsqueeze(1), *self._rope.at(positions, torch.float32)).squeeze(1)

    def queries(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Queries:
        heads = (x @ layer["index_query"]).float().view(len(x), INDEX_HEADS, INDEX_DIM)
        heads = rotated(heads, *self._rope.at(positions, torch.float32))
        return Queries(heads=heads, shares=(x @ layer["index_share"]).float())


def _digest(architecture: Architecture, device: torch.device) -> bytes:
    """The digest of everything that determines the weights, since reading all weights is slow."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    named = [f"{size.name}={getattr(architecture, size.name)}" for size in fields(architecture)]
    return blake2b(";".join([*named, where, torch.__version__]).encode(), digest_size=DIGEST_BYTES).digest()


# Attention. `project` turns hidden rows into queries (n, heads, key_dim) and, by kind, cache rows (n, kv_heads, dim).
# `prompt` attends for neighbouring rows of one prompt, in tiles, and returns (n, heads, head_dim); each row attends to
# itself and all before it. `step` attends for the newest row of each of n requests. A layer's keys are always read from
# the pool, so attention uses exactly the rows that are transferred.

Normal = Callable[[int, int], Tensor]
"""Draws a weight (rows, columns)."""


class LatentAttention:
    """MLA. A chunk expands latents to heads, since a flash kernel does not support their width. A step is absorbed: its
    queries are projected into the latent space."""

    def __init__(self, architecture: Architecture) -> None:
        self._heads, self._dim = architecture.mla_heads, architecture.head_dim
        self._latent, self._rope = architecture.latent_dim, architecture.rope_dim
        self._width, self._wide = architecture.width, self._dim + self._rope

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that the rotary embedding rotates."""
        return self._rope

    def weights(self, normal: Normal) -> dict[str, Tensor]:
        heads, wide = self._heads, self._wide
        value_up = normal(self._latent, heads * wide).view(-1, heads, wide)
        value_up[..., self._dim :] = 0.0  # a flash kernel needs values as wide as keys
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
        rope = rotated(rope.view(len(x), heads + 1, self._rope), cos, sin)
        query = torch.cat((plain.view(len(x), heads, dim), rope[:, :heads]), dim=-1)
        kept = torch.cat((nn.rms_norm(latent, (self._latent,)), rope[:, heads]), dim=-1)
        return query, {"latent": kept.unsqueeze(1)}

    def prompt(self, weights: dict[str, Tensor], query: Tensor, tiles: Tiles, cache: Cache, layer: int) -> Tensor:
        rows = cache.read("latent", layer, _rows_of_prompt(tiles)).squeeze(1)
        latent, rope = rows[:, : self._latent], rows[:, self._latent :]
        plain = (latent @ weights["key_up"]).view(-1, self._heads, self._dim)
        keys = torch.cat((plain, rope.unsqueeze(1).expand(-1, self._heads, -1)), dim=-1)
        values = (latent @ weights["value_up"]).view(-1, self._heads, self._wide)
        return _attend_causal(query, keys, values)[..., : self._dim]

    def step(self, weights: dict[str, Tensor], query: Tensor, keys: Whole, cache: Cache, layer: int) -> Tensor:
        key_up = weights["key_up"].view(self._latent, self._heads, self._dim)
        value_up = weights["value_up"].view(self._latent, self._heads, self._wide)[..., : self._dim]
        plain, rope = query[..., : self._dim], query[..., self._dim :]
        absorbed = torch.bmm(plain.transpose(0, 1), key_up.permute(1, 2, 0)).transpose(0, 1)
        queries = torch.cat((absorbed, rope), dim=-1).unsqueeze(1)
        rows = _read(cache, "latent", layer, keys)
        mixed = _attend_newest(queries, rows, rows[..., : self._latent], keys.absent, self._wide**-0.5).squeeze(1)
        return torch.bmm(mixed.transpose(0, 1), value_up.transpose(0, 1)).transpose(0, 1)


class GroupedAttention:
    """GQA: groups of query heads share one key and one value head."""

    def __init__(self, architecture: Architecture) -> None:
        self._width, self._dim = architecture.width, architecture.head_dim
        self._heads, self._kept = architecture.gqa_heads, architecture.kv_heads

    @property
    def rotated_dim(self) -> int:
        return self._dim

    def weights(self, normal: Normal) -> dict[str, Tensor]:
        return {"in": normal(self._width, (self._heads + 2 * self._kept) * self._dim)}

    def project(
        self, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inner = (x @ weights["in"]).view(len(x), -1, self._dim)
        both = rotated(inner[:, : self._heads + self._kept], cos, sin)
        return both[:, : self._heads], {"k": both[:, self._heads :], "v": inner[:, self._heads + self._kept :]}

    def prompt(self, weights: dict[str, Tensor], query: Tensor, tiles: Tiles, cache: Cache, layer: int) -> Tensor:  # noqa: ARG002
        rows = _rows_of_prompt(tiles)
        return _attend_causal(query, cache.read("k", layer, rows), cache.read("v", layer, rows))

    def step(self, weights: dict[str, Tensor], query: Tensor, keys: Whole, cache: Cache, layer: int) -> Tensor:  # noqa: ARG002
        queries = query.reshape(len(query), self._kept, -1, self._dim)
        rows = _read(cache, "k", layer, keys), _read(cache, "v", layer, keys)
        return _attend_newest(queries, *rows, keys.absent, self._dim**-0.5).flatten(1, 2)


Attention: TypeAlias = LatentAttention | GroupedAttention


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (n, heads, dim) by tables (n, 1, dim / 2) of its dtype."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    halves, (low, high) = x.chunk(2, -1), result.chunk(2, -1)
    torch.mul(halves[0], cos, out=low).addcmul_(halves[1], sin, value=-1)
    torch.mul(halves[1], cos, out=high).addcmul_(halves[0], sin, value=1)
    return result


def _rows_of_prompt(tiles: Tiles) -> Tensor:
    """The prompt's rows up to the end of its last tile; padding attends to padding."""
    return tiles.rows[: block_up(tiles.ends[0])]


def _attend_causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attends for the last rows of a prompt, (n, heads, dim), to all its keys (m, kv_heads, dim)."""
    count, total = len(query), len(keys)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, keys, values))
    shared = query.shape[1] != keys.shape[1]
    if count == total:
        mixed = nn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    else:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # which takes seconds: it loads torch's compiler

        mixed = nn.scaled_dot_product_attention(
            q, k, v, attn_mask=CausalBias(CausalVariant.LOWER_RIGHT, count, total), enable_gqa=shared
        )
    return mixed.squeeze(0).transpose(0, 1)


def _read(cache: Cache, kind: str, layer: int, keys: Whole) -> Tensor:
    """The keys' rows, (requests, keys, kv_heads, dim)."""
    rows = cache.read(kind, layer, keys.rows.view(-1))
    return rows.view(*keys.rows.shape, *rows.shape[1:])


def _attend_newest(queries: Tensor, keys: Tensor, values: Tensor, absent: Tensor, scale: float) -> Tensor:
    """(requests, kv_heads, group, key_dim) x (requests, keys, kv_heads, dim) -> (requests, kv_heads, group, dim)."""
    scores = (queries @ keys.permute(0, 2, 3, 1)).float().mul_(scale)
    scores.masked_fill_(absent[:, None, None], -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values.transpose(1, 2)

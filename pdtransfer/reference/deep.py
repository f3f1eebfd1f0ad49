"""The reference engine at real dimensions, with the arithmetic that a card does fast: bfloat16, whole products, SDPA.

`--engine pdtransfer.reference.deep:create`. Rooms, pages, cells, steps and HiSparse are the reference engine's own; the
forward pass alone is another, whose bits depend on chunks and batches. Weights are random, drawn where they are used.

| attention | layers | a token's KV in a layer | width | query heads | FFN | vocabulary | parameters |
|---|---|---|---|---|---|---|---|
| mla | 61 | 512 + 64: 1,152 B | 4,096 | 32 of 128 + 64 | 8,192 | 257 | 9.1 billion |
| gqa | 32 | 8 heads of 128, k and v: 4,096 B | 4,096 | 32 of 128 | 14,336 | 257 | 7.0 billion |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nn

from ..engine_api import DecodeEngine, EngineConfig, Group, PrefillEngine
from ..errors import ConfigError
from .architecture import DIGEST_BYTES, INDEX_DIM, INDEX_HEADS, Architecture, EngineOptions
from .attention import Tiles
from .batch import Batch, Whole
from .decode import ReferenceDecode
from .deep_attention import Attention, GroupedAttention, LatentAttention, turned
from .deep_graphs import Graphs
from .deep_steps import DeepSteps
from .description import check_config, device_of
from .indexer import IndexerMath, Queries
from .numerics import Rope, single_threaded
from .prefill import ReferencePrefill
from .shard import Shard
from .steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepArchitecture(Architecture):
    """Sizes in elements of bfloat16."""

    family: ClassVar[str] = "deep"
    dtype: ClassVar[Literal["float32", "bfloat16"]] = "bfloat16"


class DeepOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--engine-option name=value` may say; 0 is what the table above has."""

    context_tokens: Annotated[int, Meta(ge=2, le=1 << 20)] = 65_536
    layers_per_cell: Annotated[int, Meta(ge=0, le=64)] = 1
    layers: Annotated[int, Meta(ge=0, le=128)] = 0
    width: Annotated[int, Meta(ge=0, le=1 << 15)] = 0
    mlp_width: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    heads: Annotated[int, Meta(ge=0, le=256)] = 0  # of queries
    kv_heads: Annotated[int, Meta(ge=0, le=256)] = 0  # of GQA
    graphs: Annotated[int, Meta(ge=0, le=1)] = 1  # 0: a card's kernels are launched one by one whatever their number
    digests: Annotated[int, Meta(ge=0, le=1)] = 0  # 1: digests each request's KV as it ends, at a second a gigabyte


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine that `config.role` names. Raises ConfigError."""
    options = DeepOptions.parse(config.options)
    model = DeepModel(_architecture(config, options), config, options)
    match config.role:
        case "prefill":
            return ReferencePrefill(config, options, model)
        case "decode":
            return ReferenceDecode(config, options, model)


def _architecture(config: EngineConfig, options: DeepOptions) -> DeepArchitecture:
    check_config(config)
    if config.group.ranks.tp_size * config.group.ranks.pp_size > 1:
        raise ConfigError("tp_size, pp_size: the deep model is one process")
    latent = config.attention == "mla"
    sizes = DeepArchitecture(
        attention=config.attention,
        seed=options.seed,
        layers=options.layers or (61 if latent else 32),
        context_tokens=options.context_tokens,
        width=options.width or 4_096,
        mlp_width=options.mlp_width or (8_192 if latent else 14_336),
        head_dim=128,
        mla_heads=options.heads or 32,
        gqa_heads=options.heads or 32,
        kv_heads=options.kv_heads or 8,
        top_k=options.top_k,
        index_share=options.index_share,
    )
    if not latent and sizes.gqa_heads % sizes.kv_heads:
        raise ConfigError(f"kv_heads: {sizes.kv_heads} does not divide {sizes.gqa_heads} query heads")
    return sizes


class DeepModel:
    """A model.Transformer. Equal seeds are equal weights on cards of one name under one torch, as `digest` says."""

    tiles_together = 1 << 20  # all of a chunk: one call attends for all its rows

    def __init__(self, architecture: DeepArchitecture, config: EngineConfig, options: DeepOptions) -> None:
        self.architecture: Architecture = architecture
        self.device, self.digests = device_of(config.device), bool(options.digests)
        self.group: Group = config.group
        self.shard = Shard.of(architecture, self.group.ranks)
        self.digest = _digest(architecture, self.device)
        positions = architecture.context_tokens + 64  # padding in a prompt's last tile lies past its end
        self.indexer: IndexerMath | None = DeepIndexer(positions, self.device) if architecture.top_k else None
        match architecture.attention:
            case "mla":
                self._attention: Attention = LatentAttention(architecture)
            case "gqa":
                self._attention = GroupedAttention(architecture)
        self._turn = Rope(positions=positions, dim=self._attention.turned_dim, device=self.device)
        generator = torch.Generator(self.device).manual_seed(architecture.seed)

        def normal(rows: int, columns: int) -> Tensor:
            drawn = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
            return drawn.normal_(0.0, rows**-0.5, generator=generator)

        width = architecture.width
        self._embedding = normal(architecture.vocabulary, width) * architecture.vocabulary**0.5
        self._layers = [self._drawn(normal, number) for number in range(architecture.layers)]
        self._head = normal(width, architecture.vocabulary)
        graphs = bool(options.graphs) and self.device.type == "cuda"
        self._graphs = Graphs(self._layer, architecture.layers) if graphs and config.role == "prefill" else None
        self._steps = DeepSteps(self._through, self.device, top=architecture.top_k, indexer=self.indexer, graphs=graphs)

    def enter(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:  # several processes on a few cores would wait for one another's threads
            single_threaded()

    def embed(self, batch: Batch) -> Tensor:
        return self._embedding[batch.ids]

    def layers(self, x: Tensor, batch: Batch, first: int, end: int) -> Tensor:
        if self._graphs is not None and (made := self._graphs.layers(x, batch, first, end)) is not None:
            return made
        for number in range(first, end):
            self._layer(x, batch, number)
        return x

    def _through(self, batch: Batch) -> Tensor:
        return self.logits(self.layers(self.embed(batch), batch, 0, self.architecture.layers))

    def _layer(self, x: Tensor, batch: Batch, number: int) -> None:
        """One layer over (rows, width), in place."""
        weights, width = self._layers[number], (x.shape[1],)
        cos, sin = self._turn.at(batch.positions, torch.bfloat16)
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

    def _attend(self, weights: dict[str, Tensor], query: Tensor, batch: Batch, layer: int) -> Tensor:
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

    def _drawn(self, normal: Callable[[int, int], Tensor], number: int) -> dict[str, Tensor]:
        sizes, deep = self.architecture, (2 * self.architecture.layers) ** -0.5  # keeps the sum of all layers small
        drawn = {
            **self._attention.weights(normal),
            "output": normal(sizes.query_heads * sizes.head_dim, sizes.width).mul_(deep),
            "gate_up": normal(sizes.width, 2 * sizes.mlp_width),
            "down": normal(sizes.mlp_width, sizes.width).mul_(deep),
        }
        if number in sizes.index_layers(range(sizes.layers)):
            drawn |= {name: normal(*shape) for name, shape in sizes.index_shapes.items()}
        return drawn


class DeepIndexer:
    """An indexer.IndexerMath by whole products."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self._turn = Rope(positions=positions, dim=INDEX_DIM, device=device)

    def keys(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Tensor:
        keys = nn.rms_norm((x @ layer["index_key"]).float(), (INDEX_DIM,))
        return turned(keys.unsqueeze(1), *self._turn.at(positions, torch.float32)).squeeze(1)

    def queries(self, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> Queries:
        heads = (x @ layer["index_query"]).float().view(len(x), INDEX_HEADS, INDEX_DIM)
        heads = turned(heads, *self._turn.at(positions, torch.float32))
        return Queries(heads=heads, shares=(x @ layer["index_share"]).float())


def _digest(architecture: Architecture, device: torch.device) -> bytes:
    """Of what the weights are drawn by: reading them all would take a while."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    named = [f"{size.name}={getattr(architecture, size.name)}" for size in fields(architecture)]
    return blake2b(";".join([*named, where, torch.__version__]).encode(), digest_size=DIGEST_BYTES).digest()

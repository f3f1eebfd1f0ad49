"""The reference transformer: one forward pass for prefill and decode, which reads its keys from the cache."""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.kernels.stream import Download, upload
from pdtransfer.serve.engine_api import Alone, Group
from pdtransfer.wire import Ranks

from .architecture import DIGEST_BYTES, Architecture, Shard, Weights
from .attention import RowBatch, Tiles, attend
from .cache import Cache
from .indexer import Indexer, IndexerMath
from .numerics import Rope, linear, rms_norm, silu, single_threaded
from .projection import GroupedProjection, LatentProjection, Projection
from .steps import Step, folded_keys

_INDEX = -1  # stands for the index among heads


class Transformer(Protocol):
    """Weights and a forward pass without any request's state.

    Row counts are multiples of BLOCK_ROWS. Only `whole_digest` waits for a GPU.
    """

    architecture: Architecture
    device: torch.device
    group: Group
    shard: Shard
    indexer: IndexerMath | None
    digest: bytes  # of the architecture and every weight
    digests: bool  # whether a request's KV is digested at its end
    tiles_together: int  # a prompt's tiles in one Tiles

    def enter(self) -> None:
        """Prepares the calling thread to compute for this model."""
        ...

    def embed(self, batch: RowBatch) -> Tensor:
        """(rows,) ids -> (rows, width)."""
        ...

    def layers(self, x: Tensor, batch: RowBatch, first: int, end: int) -> Tensor:
        """Layers [first, end) over (rows, width). Each layer writes its rows' keys before any row attends."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """(rows, width) -> float32 (rows, vocabulary)."""
        ...

    def step(self, step: Step) -> Tensor:
        """A decode step: float32 logits (requests, vocabulary), valid until the next call."""
        ...

    def whole_digest(self, own: NDArray[np.uint8]) -> bytes:
        """Digests all ranks' digests. `own` (heads, DIGEST_BYTES) are this rank's heads, then the index if any."""
        ...


def computing(model: Transformer) -> AbstractContextManager[object]:
    """Prepares the calling thread to compute for this model."""
    model.enter()
    return torch.inference_mode()


class Model:
    """The Transformer whose bits depend only on a row and the keys it attends to."""

    digests = True
    tiles_together = 4  # of 64 query rows: the key block that they share stays in the CPU's cache

    def __init__(self, architecture: Architecture, device: torch.device, group: Group | None = None) -> None:
        self.architecture, self.device = architecture, device
        self.group: Group = group or Alone()
        self.shard = Shard.of(architecture, self.group.ranks)
        self.weights = Weights.draw(architecture, device).of_layers(self.shard.layers)
        # Padding in a prompt's last tile has positions after the prompt's end.
        positions = architecture.context_tokens + 64
        self.digest = self.weights.digest
        self.indexer: IndexerMath | None = Indexer(positions, device) if architecture.top_k else None
        match architecture.attention:
            case "mla":
                rope = Rope(positions=positions, dim=architecture.rope_dim, device=device)
                self._projection: Projection = LatentProjection(architecture, self.shard, rope)
            case "gqa":
                rope = Rope(positions=positions, dim=architecture.head_dim, device=device)
                self._projection = GroupedProjection(architecture, self.shard, rope)

    def enter(self) -> None:
        single_threaded()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def embed(self, batch: RowBatch) -> Tensor:
        return self.weights.embedding[batch.ids]

    def layers(self, x: Tensor, batch: RowBatch, first: int, end: int) -> Tensor:
        for number in range(first, end):
            weights = self.weights.layers[number]
            hidden = rms_norm(x)
            batch.keys.enter(number, weights, hidden)
            projected = self._projection.project(weights, hidden, batch.positions)
            batch.keys.write(number, {kind: rows[batch.own] for kind, rows in projected.kept.items()})
            mixed = self._attend(projected.query, batch, number)
            x = x + linear(self._all_heads(self._projection.outputs(weights, mixed)), weights["output"])
            hidden = rms_norm(x)
            x = x + linear(silu(linear(hidden, weights["gate"])) * linear(hidden, weights["up"]), weights["down"])
        return x

    def logits(self, x: Tensor) -> Tensor:
        return linear(rms_norm(x), self.weights.head)

    def step(self, step: Step) -> Tensor:
        rows = step.rows(self.device)
        keys = folded_keys(step, rows[1], top=self.architecture.top_k, indexer=self.indexer)
        batch = step.batch(rows, keys)
        hidden = self.layers(self.embed(batch), batch, 0, self.architecture.layers)
        return self.logits(hidden)[: len(step.ids)]

    def whole_digest(self, own: NDArray[np.uint8]) -> bytes:
        digests: dict[int, set[bytes]] = {}  # of each head; replicas that differ change the result
        for rank, part in enumerate(self.group.gather(own)):
            shard = Shard.of(self.architecture, Ranks(tp_rank=rank, tp_size=self.group.ranks.tp_size))
            names = [*shard.kv_heads, *((_INDEX,) if self.indexer else ())]
            for head, digest in zip(names, part, strict=True):
                digests.setdefault(head, set()).add(digest.tobytes())
        every = b"".join(digest for head in sorted(digests) for digest in sorted(digests[head]))
        return blake2b(every, digest_size=DIGEST_BYTES).digest()

    def _attend(self, query: Tensor, batch: RowBatch, layer: int) -> Tensor:
        """(rows, own heads, key_dim) -> (rows, own heads, value_dim), zero for rows after the last tile.

        Bits depend on a tile's height, so a rank with some of the heads that share keys pads with zeros for the others.
        """
        rows, own, _ = query.shape
        heads, group = len(self.shard.kv_heads), self.architecture.query_heads // self.architecture.cache_heads
        first = self.shard.query_heads.start - self.shard.kv_heads.start * group
        if own < heads * group:
            query = torch.nn.functional.pad(query, (0, 0, first, heads * group - first - own))
        value_dim = self._projection.value_dim
        used = batch.tile_count * batch.tile_rows
        tiled = query[:used].view(batch.tile_count, batch.tile_rows, heads, group, -1).permute(2, 0, 1, 3, 4)
        tiled = tiled.reshape(heads, batch.tile_count, batch.tile_rows * group, -1)
        mixed = query.new_zeros(rows, heads * group, value_dim)

        for reading in batch.keys.readings:
            tiles, cache = reading.tiles, reading.cache
            assert isinstance(tiles, Tiles)

            def read(index: Tensor, cache: Cache = cache) -> tuple[Tensor, ...]:
                return tuple(cache.read(kind, layer, index) for kind in self.architecture.kinds)

            count = len(tiles.depths)
            part = attend(tiled[:, tiles.first : tiles.first + count], tiles, read, value_dim)
            part = part.view(heads, count, batch.tile_rows, group, value_dim).permute(1, 2, 0, 3, 4)
            place = slice(tiles.first * batch.tile_rows, (tiles.first + count) * batch.tile_rows)
            mixed[place] = part.reshape(-1, heads * group, value_dim)
        return mixed[:, first : first + own]

    def _all_heads(self, own: Tensor) -> Tensor:
        """(rows, own heads, head_dim) -> (rows, all heads * head_dim)."""
        if self.group.ranks.tp_size > 1:
            parts = self.group.gather(np.ascontiguousarray(Download(own).get().numpy()))
            own = torch.cat([upload(torch.as_tensor(part), self.device) for part in parts], dim=1)
        return own.reshape(len(own), -1)

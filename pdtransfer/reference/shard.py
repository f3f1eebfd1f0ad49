"""What one rank of a group holds and computes: whole layers of a pipeline, heads of a tensor-parallel group.

Where there are more ranks than key-value heads, neighbours hold equal ones; an MLA latent is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..wire import Ranks
from .architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Of one rank: `layers` and `kv_heads` are in its cache, as replica `replica` of `replicas`."""

    layers: range
    query_heads: range
    kv_heads: range
    replica: int
    replicas: int

    @classmethod
    def of(cls, architecture: Architecture, ranks: Ranks) -> Shard:
        """Raises ConfigError where the model cannot be split so."""
        tp, pp, queries, kept = ranks.tp_size, ranks.pp_size, architecture.query_heads, architecture.cache_heads
        if queries % tp:
            raise ConfigError(f"tp_size = {tp}: does not divide the {queries} query heads of {architecture.name}")
        if kept % tp and tp % kept:
            raise ConfigError(f"tp_size = {tp}: neither divides {kept} kv_heads nor is a multiple of them")
        if pp > architecture.layers:
            raise ConfigError(f"pp_size = {pp}: more stages than the {architecture.layers} layers of the model")
        own, replicas = max(1, kept // tp), max(1, tp // kept)
        first_kept = ranks.tp_rank // replicas * own
        return cls(
            layers=range(ranks.pp_rank * architecture.layers // pp, (ranks.pp_rank + 1) * architecture.layers // pp),
            query_heads=range(ranks.tp_rank * queries // tp, (ranks.tp_rank + 1) * queries // tp),
            kv_heads=range(first_kept, first_kept + own),
            replica=ranks.tp_rank % replicas,
            replicas=replicas,
        )

"""What goes through a model's layers together, and which keys it attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .attention import Tiles
from .cache import Cache
from .projection import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The keys of neighbouring rows, a request each, for who attends to all of them at once."""

    first: int  # place of the first row in the batch
    rows: Tensor  # (requests, keys) int64 cache rows, all of keys that are there
    absent: Tensor  # (requests, keys) bool: stands for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Keys and the cache that they are rows of; a model that folds is given tiles alone."""

    tiles: Tiles | Whole
    cache: Cache


class Keys(Protocol):
    """Where a batch's own rows leave their keys, and which keys they attend to."""

    @property
    def readings(self) -> Sequence[Reading]:
        """All tiles of the batch, as they are for the layer that was entered."""
        ...

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        """Called once a layer, in order, before it writes or reads; (rows, width) is what its projections take."""
        ...

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        """By kind (own rows, kv_heads, dim)."""
        ...


class EveryKey:
    """The Keys of a batch that attends to all that it may, in one cache: `targets` are its own rows there."""

    def __init__(self, cache: Cache, targets: Tensor, tiles: Sequence[Tiles]) -> None:
        self.cache, self.targets = cache, targets
        self.readings: Sequence[Reading] = [Reading(tiles=each, cache=cache) for each in tiles]

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        pass

    def write(self, layer: int, kept: Mapping[str, Tensor]) -> None:
        for kind, rows in kept.items():
            self.cache.write(kind, layer, self.targets, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that go through the layers together, padded to a multiple of BLOCK_ROWS.

    `own` are the rows that are somebody's; the rest is padding, computed and dropped. The first `tile_rows` rows are
    tile 0 and so on; rows after the last tile are padding that attends to nothing.
    """

    ids: Tensor  # (rows,) int64
    positions: Tensor  # (rows,) int64, absolute
    own: slice
    tile_rows: int
    tile_count: int
    keys: Keys

"""Where the rows are that a decode step attends to: `Residency` says, for what the indexer has picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .attention import KEY_BLOCK
from .cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Neighbouring rows of a step, ascending by position, whose requests one residency has."""

    residency: Residency
    rooms: list[int]
    positions: list[int]
    rows: list[Tensor]  # of each room, its cache rows by position where it has landed, growth included
    index: list[Tensor]  # of each room, its rows of the index cache, (2, whole key blocks); none without an index

    @property
    def newest(self) -> Tensor:
        """Of `rows` each room's at its position, int64 (requests,)."""
        return torch.stack([rows[at] for rows, at in zip(self.rows, self.positions, strict=True)])


class Begun(NamedTuple):
    """Where a step's requests are, for all of its layers."""

    newest: Tensor  # (requests,) int64 cache rows: where each one's new row belongs
    tables: Tensor  # (requests, n) int64 cache rows by position; n is 0 where `place` alone knows


class Residency(Protocol):
    """Some requests' rows in one cache. In a step at position p a request attends to picks of [0, p), and to p."""

    @property
    def cache(self) -> Cache: ...

    def begin(self, part: Part) -> Begun:
        """The next step has this part."""
        ...

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:
        """Where the layers of the group that `layer` leads find the step's picks, int64 (requests, top), of which -1
        is none: cache rows int64 of that shape, anything for none. Good until the next call; `tables` as begun."""
        ...


class AllResident:
    """Every row is where it landed, and there it is read."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._tables = cache, Tables()

    @property
    def cache(self) -> Cache:
        return self._cache

    def begin(self, part: Part) -> Begun:
        return Begun(part.newest, self._tables.of(part.rows, max(part.positions) + 1))

    def place(self, layer: int, picks: Tensor, tables: Tensor) -> Tensor:  # noqa: ARG002 -- all groups find them in one place
        return tables.gather(1, picks.clamp(min=0))


class Tables:
    """Rows of a step's requests by position as one tensor, which stays as long as they do and have enough of it."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._made = torch.empty(0)

    def of(self, rows: Sequence[Tensor], tokens: int) -> Tensor:
        """(..., n) of each request -> (requests, ..., reach(tokens)); behind a request's own rows its first stands."""
        width = reach(tokens)
        same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if not same or self._made.shape[-1] != width:
            self._rows, self._made = list(rows), torch.stack([_wide(each, width) for each in rows])
        return self._made


def reach(tokens: int) -> int:
    """So many keys or up to an eighth more, in whole blocks: requests of many lengths come to few sizes."""
    blocks = -(-tokens // KEY_BLOCK)
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step * KEY_BLOCK


def _wide(rows: Tensor, width: int) -> Tensor:
    lacking = width - rows.shape[-1]
    if lacking <= 0:
        return rows[..., :width]
    return torch.cat((rows, rows[..., :1].expand(*rows.shape[:-1], lacking)), dim=-1)

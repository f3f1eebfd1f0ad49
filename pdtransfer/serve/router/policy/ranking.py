"""Which worker is best, kept in order as loads change: a choice among thousands costs as much as one among few.

No I/O. A worker's rank is a tuple that ends with its endpoint, so that no two are equal; the least is the best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item")
Rank: TypeAlias = tuple[Any, ...]
_FEW = 256  # members of a mask that are looked up one by one; more are met sooner on a walk from the best on


def _rank_of(ranked: tuple[Rank, object]) -> Rank:
    return ranked[0]


class Ranking(Generic[Item]):
    """Items in the order of their ranks. `number` is an item's bit in masks, and its own."""

    def __init__(self) -> None:
        self._order: list[Rank] = []
        self._ranked: dict[int, tuple[Rank, Item]] = {}  # by number
        self._numbers: dict[str, int] = {}  # by the last part of the rank

    def __len__(self) -> int:
        return len(self._order)

    def items(self) -> list[Item]:
        """All items, in no order."""
        return [item for _, item in self._ranked.values()]

    def put(self, item: Item, number: int, rank: Rank) -> None:
        """Ranks an item, afresh where it was ranked before."""
        before = self._ranked.get(number)
        if before is not None:
            if before[0] == rank:
                return
            del self._order[bisect_left(self._order, before[0])]
        insort(self._order, rank)
        self._ranked[number] = rank, item
        self._numbers[rank[-1]] = number

    def remove(self, number: int) -> None:
        """Removes an item; an unknown one is ignored."""
        entry = self._ranked.pop(number, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry[0])]
            del self._numbers[entry[0][-1]]

    def best(self, mask: int, passes: Callable[[Item], bool]) -> tuple[Rank, Item] | None:
        """The best item of the mask that passes; None if none does."""
        if mask >= 0 and mask.bit_count() <= _FEW:
            ranked = [self._ranked[number] for number in numbers_of(mask) if number in self._ranked]
            best = min(ranked, key=_rank_of, default=None)
            if best is None or passes(best[1]):
                return best
            return next((entry for entry in sorted(ranked, key=_rank_of) if passes(entry[1])), None)
        for rank in self._order:
            number = self._numbers[rank[-1]]
            if mask >> number & 1 and passes(self._ranked[number][1]):
                return self._ranked[number]
        return None


def numbers_of(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()

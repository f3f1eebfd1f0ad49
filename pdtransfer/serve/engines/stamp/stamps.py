"""Stamps: 64-bit digests of a prompt's tokens, each of a token and of all tokens before it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, as every factor here, so that products modulo 2**64 lose nothing
_FACTOR, _FIRST, _SECOND = (
    np.uint64(factor) for factor in (0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(words: NDArray[Any]) -> Words:
    """splitmix64's finaliser, of each element: one changed bit changes about half of all bits."""
    words = words.astype(np.uint64)
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


class Stamper:
    """The stamps of one sequence, in as many pieces as its tokens come in."""

    def __init__(self) -> None:
        self._total, self._power = np.zeros(1, np.uint64), np.ones(1, np.uint64)

    def extend(self, ids: NDArray[np.int64]) -> Words:
        """The stamps of the next tokens: ids int64 (n,) -> uint64 (n,)."""
        powers = np.cumprod(np.full(len(ids), _FACTOR)) * self._power
        totals = np.cumsum(mixed(ids + 1) * powers) + self._total
        if len(ids):
            self._total, self._power = totals[-1:].copy(), powers[-1:].copy()
        return mixed(totals)


def stamps_of(ids: NDArray[np.int64]) -> Words:
    """The stamps of a whole sequence: ids int64 (n,) -> uint64 (n,)."""
    return Stamper().extend(ids)

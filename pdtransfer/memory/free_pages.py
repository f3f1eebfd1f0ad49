"""The free pages of a paged pool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class FreePages:
    """The free pages of a pool, a stack: over time the pages of a request become scattered."""

    def __init__(self, *, count: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(count - 1, -1, -1))

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, tokens: int) -> NDArray[np.int64] | None:
        """Takes pages for `tokens` tokens, in row order. Returns None if there are not enough."""
        count = self.needed(tokens)
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken[::-1], dtype=np.int64)

    def give(self, pages: NDArray[np.int64]) -> None:
        """Returns pages that are no longer read."""
        self._free.extend(int(page) for page in pages)

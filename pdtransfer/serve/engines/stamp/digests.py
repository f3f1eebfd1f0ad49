"""Digests of a request's rows: of each component on one rank, and of all of them on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....layout.geometry import Int64s
from ....layout.layout import Component
from ..shell.token_rows import last_tokens, numbers, row_of
from .rows import StampRows
from .stamps import GOLDEN, Words, mixed

AGAIN_ROWS, AGAIN_STEPS = 256, 16  # rows that a step reads again at least, and the steps that all rows take at most


class RowDigest:
    """The rows of one request in one component. `total` uint64 (heads,) is its digest.

    Of a component with rows for all tokens, a step reads new and rewritten rows and some that were read before. A
    window or a state is read whole.
    """

    def __init__(self, rows: StampRows, component: Component, slots: Int64s, prompt_tokens: int) -> None:
        self.rows, self.component, self.slots, self._prompt_tokens = rows, component, slots, prompt_tokens
        self._partial = component.span.kind == "all"
        self._mixed = np.zeros((len(slots) if self._partial else 0, rows.heads), np.uint64)
        self._read = self._again = 0
        self.total: Words = np.zeros(rows.heads, np.uint64)

    def due(self, tokens: int, *, whole: bool = False) -> Int64s:
        """The rows to read now that the request has `tokens` tokens. `whole`: all of them."""
        count = self.component.rows(tokens)
        if whole or not self._partial:
            return self._rows_of(tokens)
        # The last token may have changed the last row that was read.
        fresh = min(self._read, row_of(self.component, tokens - 1, self._prompt_tokens))
        again = min(fresh, max(AGAIN_ROWS, -(-fresh // AGAIN_STEPS)))
        old = np.arange(self._again, self._again + again) % max(1, fresh)
        self._again = (self._again + again) % max(1, fresh)
        return np.concatenate((old, np.arange(fresh, count)))

    def take(self, due: Int64s, sums: Words, tokens: int) -> None:
        """`sums` uint64 (rows, heads) are those of the rows that `due` returned for `tokens` tokens."""
        if not self._partial:
            self.total = total(sums, numbers(self.component, tokens))
            return
        numbered = _numbered(sums, due)
        self.total += (numbered - self._mixed[due]).sum(0, dtype=np.uint64)
        self._mixed[due] = numbered
        self._read = max(self._read, int(due[-1]) + 1)

    def _rows_of(self, tokens: int) -> Int64s:
        """All rows, in the order of their tokens."""
        if self._partial:
            return np.arange(self.component.rows(tokens))
        last = last_tokens(self.component, tokens)
        return np.array([row_of(self.component, int(token), self._prompt_tokens) for token in last])


def read(digests: Sequence[tuple[RowDigest, int]], *, whole: bool = False) -> None:
    """Reads the rows that are due, each digest's for its number of tokens, those of one memory together."""
    due = [digest.due(tokens, whole=whole) for digest, tokens in digests]
    by_rows: dict[StampRows, list[int]] = {}
    for index, (digest, _) in enumerate(digests):
        by_rows.setdefault(digest.rows, []).append(index)
    for rows, members in by_rows.items():
        sums = rows.sums(np.concatenate([digests[index][0].slots[due[index]] for index in members]))
        first = 0
        for index in members:
            digest, tokens = digests[index]
            digest.take(due[index], sums[first : first + len(due[index])], tokens)
            first += len(due[index])


def total(sums: Words, keys: Int64s | None = None) -> Words:
    """The digest of rows with these sums (rows, heads) and numbers, by default 0, 1, ...: uint64 (heads,)."""
    return _numbered(sums, np.arange(len(sums)) if keys is None else keys).sum(0, dtype=np.uint64)


def _numbered(sums: Words, keys: Int64s) -> Words:
    """Each row's sum mixed with the row's number."""
    return mixed(sums + (keys.astype(np.uint64) + np.uint64(1))[:, None] * GOLDEN)

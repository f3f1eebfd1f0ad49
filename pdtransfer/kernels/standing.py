"""A copy that is made again and again from the same arrays: planned once, and free to be captured in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import LocalProtocolError
from .card import card
from .kv_copy import THREADS, CopyArgument, blocks_of, checked, kv_copy, launch_of
from .pools import Pool


class StandingCopy:
    """Rows source_slots[i] to target_slots[i], all planes of both pools; negative slots on either side are skipped.

    Both are int32 (n,), of numpy where the pools are this process's own, else in the card's memory. `counts`, where
    given, is int32 of which the first is how many rows there are, also there. On a card its pairs stay uploaded until
    `close`, so that `queue` allocates nothing and waits for nothing. Raises as kv_copy does.
    """

    def __init__(self, target: Pool, source: Pool, target_slots: Any, source_slots: Any, *, counts: Any = None) -> None:
        self._pools, self._slots, self._counts = (target, source), (target_slots, source_slots), counts
        self._key: object = None
        self._card = None if target.card is None else card(target.card)
        if self._card is None:
            if source.card is not None:
                raise LocalProtocolError(f"pools: the target is of no card, the source of card {source.card}")
            return
        asked = checked(target, source, target_slots, source_slots, len(target_slots) if counts is None else counts)
        launch = launch_of(target, source, asked.target, asked.source, asked.rows, known=False)
        self._argument = launch.argument
        self._argument.pairs = self._card.tables.kept(launch.key, launch.pairs)
        self._key = launch.key
        if counts is not None:
            self._argument.count_at = int(counts.__cuda_array_interface__["data"][0])
        self._blocks = blocks_of(self._card, target, source)

    @property
    def argument(self) -> CopyArgument:
        """What a card's kernel is told of it, whose pairs stay until `close`."""
        assert self._card is not None
        return self._argument

    def queue(self, rows: int, *, stream: int = 0) -> None:
        """`rows` of them, or as many as `counts` says, at most `rows`. Done on return where there is no card."""
        if self._card is not None:
            self._argument.count = rows
            if rows:
                self._card.launch("kv_copy", self._argument, blocks=self._blocks, threads=THREADS, stream=stream)
            return
        count = rows if self._counts is None else min(rows, int(self._counts[0]))
        targets, sources = (each[:count] for each in self._slots)
        good = np.flatnonzero((targets >= 0) & (sources >= 0))
        kv_copy(*self._pools, targets[good], sources[good], len(good))

    def close(self) -> None:
        """Lets go of what is uploaded; no launch of it may be under way. Idempotent."""
        if self._card is not None and self._key is not None:
            self._card.tables.let(self._key)
            self._key = None

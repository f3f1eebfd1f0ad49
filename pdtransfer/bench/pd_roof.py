"""What nothing can be faster than: one copy of the same bytes, by the copy engine, or without a card by memcpy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from ..kernels.card import card
from ..memory.arena_memory import Arena
from .replays import registered

_DMA_BYTES = 256 << 20  # an arena is registered in such chunks


def roof(on: int | None, source: int, byte_counts: Sequence[int], repeats: int) -> list[float]:
    """Seconds for each, of the copy engine from the pool into registered memory, or of a memcpy into shared memory."""
    most = max(byte_counts)
    with ExitStack() as held:
        if on is None:
            arena = Arena.create(most)
            held.callback(arena.close)
            arena.prefault()
            return [_median(repeats, lambda n=n: _copied(arena.mapping.address, source, n)) for n in byte_counts]
        here = card(on)
        target, stream = held.enter_context(registered(here, most)), here.stream()
        start, end = (here.call("cuEventCreate", 0) for _ in range(2))

        def crossed(byte_count: int) -> float:
            here.record(start, stream)
            for at in range(0, byte_count, _DMA_BYTES):
                here.copy(target + at, source + at, min(_DMA_BYTES, byte_count - at), stream)
            here.record(end, stream)
            here.synchronise(stream)
            return float(here.call("cuEventElapsedTime", start, end)) / 1e3

        return [_median(repeats, lambda n=n: crossed(n)) for n in byte_counts]


def _median(repeats: int, once: Callable[[], float]) -> float:
    once()
    return median(once() for _ in range(repeats))


def _copied(target: int, source: int, byte_count: int) -> float:
    start = time.perf_counter()
    ctypes.memmove(target, source, byte_count)
    return time.perf_counter() - start

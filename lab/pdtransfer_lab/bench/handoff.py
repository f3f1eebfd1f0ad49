"""Small rooms between two processes: how late decode learns of the last byte, and how many rooms pass in a second."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .models import PAGE_SIZE, components
from .ranks import RankPair
from .report import Figures, Line

ROOM_BYTES_MAX = 64 << 10  # of the rooms whose rate is measured
_POOL_PAGES = 64  # 36 MiB of the reference model's KV: more than the caches next to a core

RATE = (
    Line("expect to READY, p50", "{ready_us_p50:.0f} us", "{tokens} tokens, {room_bytes:,} bytes, one at a time"),
    Line(
        "hand-offs a second",
        "{handoffs_s:,.0f}",
        "{handoffs_s_min:,.0f} to {handoffs_s_max:,.0f}; {rate_room_bytes:,} bytes, {concurrency} under way; "
        "aim: 5,000",
    ),
    Line("CPU a hand-off", "{prefill_cpu_us:.0f} + {decode_cpu_us:.0f} us", "prefill + decode, all their threads"),
)
LINES = (
    Line("hand-off, last cell written to READY, p50", "{handoff_us_p50:.0f} us", "p99 {handoff_us_p99:.0f} us"),
    *RATE,
)


def measure(*, tokens: int = 16, rooms: int = 2_000, concurrency: int = 64, rounds: int = 10) -> Figures:
    """Hand-offs of the reference model's KV over shm, between a node in one process and a node in another.

    In each round take turns: rooms of `tokens` tokens, one at a time, as many as make `rooms` in all rounds; then
    `rooms` rooms of at most ROOM_BYTES_MAX bytes, `concurrency` of them under way.

    A hand-off lasts from the stamp in prefill's process right behind the copy of the room's only cell, before any
    message about it is sent, to READY in decode's; `ready` from decode's `expect`, so that it contains Grant and copy.
    Each figure is the median over rounds of the round's own percentile, ratio or rate; `_min` and `_max` are extremes.
    """
    return measure_around(lambda _, __, own: own(), tokens=tokens, rooms=rooms, concurrency=concurrency, rounds=rounds)


def measure_around(
    around: Callable[[RankPair, int, Callable[[], dict[str, float]]], dict[str, float]],
    *,
    tokens: int,
    rooms: int,
    concurrency: int,
    rounds: int,
) -> Figures:
    """As `measure`; `around` runs each round, and adds figures of its own to it."""
    count = max(1, rooms // rounds)
    source, target = components("mla", source_slots=_POOL_PAGES * PAGE_SIZE, target_slots=2 * tokens * concurrency)
    row_bytes = source.layout.row_bytes
    rate_tokens = max(1, min(tokens, ROOM_BYTES_MAX // row_bytes))
    figures: Figures = {
        "tokens": tokens,
        "room_bytes": tokens * row_bytes,
        "rate_room_bytes": rate_tokens * row_bytes,
        "rooms": rooms,
        "concurrency": concurrency,
        "rounds": rounds,
    }
    taken: dict[str, list[float]] = {}
    with RankPair(source, target) as ranks:

        def own() -> dict[str, float]:
            hand_off = ranks.hand_off(count, tokens=tokens)
            many = ranks.hand_off(rooms, tokens=rate_tokens, at_once=concurrency)
            return {
                **percentiles("handoff", hand_off.ready - hand_off.written),
                **percentiles("ready", hand_off.ready - hand_off.expected),
                "handoffs_s": rooms / many.seconds,
                "prefill_cpu_us": many.prefill_cpu_ns / rooms / 1e3,
                "decode_cpu_us": many.decode_cpu_ns / rooms / 1e3,
            }

        ranks.hand_off(concurrency, tokens=rate_tokens, at_once=concurrency)
        ranks.hand_off(count, tokens=tokens)
        for _ in range(rounds):
            for name, value in around(ranks, count, own).items():
                taken.setdefault(name, []).append(value)
    for name, values in taken.items():
        figures |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return figures


def percentiles(name: str, nanoseconds: NDArray[np.int64]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    p50, p99 = np.percentile(nanoseconds, (50, 99)) / 1e3
    return {f"{name}_us_p50": float(p50), f"{name}_us_p99": float(p99)}

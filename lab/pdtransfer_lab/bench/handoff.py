"""Small rooms between two processes: how late decode learns of the last byte, and how many rooms pass in a second."""

from __future__ import annotations

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
BESIDE_ZMQ = (
    Line(
        "hand-off, last cell written to READY, p50",
        "{handoff_us_p50:.0f} us",
        "{handoff_to_raw_p50:.1f} x ZMQ's round trip on such loops, {raw_us_p50:.0f} us; aim: 4",
    ),
    Line("", "", "{handoff_to_blocking_p50:.1f} x ZMQ's round trip with blocking sockets, {blocking_us_p50:.0f} us"),
    Line("the same, p99", "{handoff_us_p99:.0f} us", "{raw_us_p99:.0f} and {blocking_us_p99:.0f} us"),
    *RATE,
)


def measure(
    *, tokens: int = 16, rooms: int = 2_000, concurrency: int = 64, rounds: int = 10, beside_zmq: bool = False
) -> Figures:
    """Hand-offs of the reference model's KV over shm, between a node in one process and a node in another.

    A round has rooms of `tokens` tokens, one at a time, as many as make `rooms` in all rounds. Then it has `rooms`
    rooms of at most ROOM_BYTES_MAX bytes, `concurrency` of them under way.

    A hand-off begins with the stamp in prefill's process right behind the copy of the room's only cell, before any
    message about it is sent. It ends with READY in decode's. `ready` begins with decode's `expect`, so that it contains
    Grant and copy. Each figure is the median over rounds of the round's own percentile, ratio or rate; `_min` and
    `_max` are extremes.

    With `beside_zmq` each round begins with bare ROUTER/DEALER round trips of a Grant's bytes between the same two
    processes. They are as many as the rooms one at a time. `raw` ones are drained by the loops that the nodes run on,
    `blocking` ones by blocking sockets. Ratios are of one round's medians.
    """
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
        ranks.hand_off(concurrency, tokens=rate_tokens, at_once=concurrency)
        ranks.hand_off(count, tokens=tokens)
        for _ in range(rounds):
            round_figures = _echoes(ranks, count) if beside_zmq else {}
            hand_off = ranks.hand_off(count, tokens=tokens)
            many = ranks.hand_off(rooms, tokens=rate_tokens, at_once=concurrency)
            round_figures |= {
                **_percentiles("handoff", hand_off.ready - hand_off.written),
                **_percentiles("ready", hand_off.ready - hand_off.expected),
                "handoffs_s": rooms / many.seconds,
                "prefill_cpu_us": many.prefill_cpu_ns / rooms / 1e3,
                "decode_cpu_us": many.decode_cpu_ns / rooms / 1e3,
            }
            for name in ("raw", "blocking") if beside_zmq else ():
                round_figures[f"handoff_to_{name}_p50"] = (
                    round_figures["handoff_us_p50"] / round_figures[f"{name}_us_p50"]
                )
            for name, value in round_figures.items():
                taken.setdefault(name, []).append(value)
    for name, values in taken.items():
        figures |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return figures


def _echoes(ranks: RankPair, count: int) -> dict[str, float]:
    raw, blocking = ranks.echo(count, blocking=False), ranks.echo(count, blocking=True)
    return _percentiles("raw", raw) | _percentiles("blocking", blocking)


def _percentiles(name: str, nanoseconds: NDArray[np.int64]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    p50, p99 = np.percentile(nanoseconds, (50, 99)) / 1e3
    return {f"{name}_us_p50": float(p50), f"{name}_us_p99": float(p99)}

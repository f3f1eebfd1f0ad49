"""Small rooms between two processes, as `pdtransfer bench handoff` moves them, beside bare ZMQ round trips."""

from __future__ import annotations

from collections.abc import Callable

from .handoff import RATE, measure_around, percentiles
from .ranks import RankPair
from .report import Figures, Line

LINES = (
    Line(
        "hand-off, last cell written to READY, p50",
        "{handoff_us_p50:.0f} us",
        "{handoff_to_raw_p50:.1f} x ZMQ's round trip on such loops, {raw_us_p50:.0f} us; aim: 4",
    ),
    Line(
        "",
        "",
        "{handoff_to_blocking_p50:.1f} x ZMQ's round trip with blocking sockets, {blocking_us_p50:.0f} us",
    ),
    Line("the same, p99", "{handoff_us_p99:.0f} us", "{raw_us_p99:.0f} and {blocking_us_p99:.0f} us"),
    *RATE,
)


def measure(*, tokens: int = 16, rooms: int = 2_000, concurrency: int = 64, rounds: int = 10) -> Figures:
    """The rounds of `pdtransfer bench handoff`. Each begins with bare ROUTER/DEALER round trips of a Grant's bytes
    between the same two processes, as many as there are rooms one at a time: `raw` ones drained by the loops that the
    nodes run on, then `blocking` ones with blocking sockets. Ratios are of one round's medians.
    """
    return measure_around(_beside_echoes, tokens=tokens, rooms=rooms, concurrency=concurrency, rounds=rounds)


def _beside_echoes(ranks: RankPair, count: int, own: Callable[[], dict[str, float]]) -> dict[str, float]:
    raw = percentiles("raw", ranks.echo(count, blocking=False))
    blocking = percentiles("blocking", ranks.echo(count, blocking=True))
    figures = own()
    return {
        **raw,
        **blocking,
        **figures,
        "handoff_to_raw_p50": figures["handoff_us_p50"] / raw["raw_us_p50"],
        "handoff_to_blocking_p50": figures["handoff_us_p50"] / blocking["blocking_us_p50"],
    }

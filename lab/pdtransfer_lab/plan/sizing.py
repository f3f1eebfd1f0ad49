"""How many workers keep an SLO: bounds from the work itself, then bisection over runs of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from pdtransfer.errors import WorldError
from pdtransfer.limits import ENGINES_A_SESSION, ENGINES_MAX, Limits

from .fleet_model import WORKERS_MAX, FleetShape
from .rates import Rates
from .serving_figures import Slo
from .trace import Trace, TraceRequest

GROWTH = 1.5  # of a fleet that was too small, from try to try
NUDGE = 1.05  # of one that was nearly large enough
TRIES_MAX = 40


class FleetSize(NamedTuple):
    """Workers of each role."""

    prefill: int
    decode: int


Evaluate = Callable[[Sequence[FleetSize]], list[dict[str, Any]]]
"""Runs the model with fleets of these sizes; returns their reports."""


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """What the work alone takes: fewer workers fall behind forever."""

    prefill: int
    decode: int
    batch: int  # requests whose step keeps the time between tokens
    slow_alone: float  # share of the requests that miss the SLO with the whole fleet to themselves


def work_bounds(trace: Trace, rates: Rates, shape: FleetShape, slo: Slo, *, users: int = 1) -> WorkBounds:
    """The least workers for `users` copies of the trace, by mean load."""
    seconds = max(trace.seconds, 1e-9) / users
    compute_s = sum(rates.prefill(request.input_tokens) for request in trace.requests)
    context = (trace.prompt_tokens + trace.output_tokens / 2) / len(trace.requests)

    def step_s(batch: int) -> float:
        return rates.decode(batch) + rates.context_s * context * batch

    batch = shape.batch_max
    if slo.itl_s is not None:
        batch = max(
            (batch_size for batch_size in range(1, shape.batch_max + 1) if step_s(batch_size) <= slo.itl_s), default=0
        )
    slow = sum(not _alone(request, rates, slo) for request in trace.requests) / len(trace.requests)
    decode_s = trace.output_tokens * step_s(max(1, batch)) / max(1, batch)
    return WorkBounds(max(1, ceil(compute_s / seconds)), max(1, ceil(decode_s / seconds)), batch, slow)


def _alone(request: TraceRequest, rates: Rates, slo: Slo) -> bool:
    """True if the request keeps the SLO on idle workers; nothing of its prompt is cached for prefill."""
    step_s = rates.decode(1) + rates.context_s * request.input_tokens
    ttft_s = rates.prefill(request.input_tokens) + rates.handoff_s + step_s + rates.overhead_s
    return slo.kept(ttft_s, step_s if request.output_tokens > 1 else 0.0)


def smallest_fleet(
    evaluate: Evaluate, bounds: WorkBounds, *, share: float, at_once: int = 1
) -> tuple[FleetSize, dict[str, Any]]:
    """The least prefill workers, and with these the least decode workers, that keep the SLO for `share` of the
    requests. `at_once` sizes are evaluated together. Raises WorldError where no fleet does."""
    if 1 - bounds.slow_alone < share:
        text = f"{bounds.slow_alone:.1%} of the requests miss it on workers of their own"
        raise WorldError(f"slo: no fleet keeps it for {share:.1%} of the requests: {text}")
    reports: dict[FleetSize, dict[str, Any]] = {}

    def good(sizes: Sequence[FleetSize]) -> list[bool]:
        fresh = [size for size in sizes if size not in reports]
        reports.update(zip(fresh, evaluate(fresh), strict=True))
        return [reports[size]["good_share"] >= share for size in sizes]

    size = FleetSize(bounds.prefill, bounds.decode)
    for _ in range(TRIES_MAX):
        size = FleetSize(*(min(WORKERS_MAX, ceil(count * GROWTH)) for count in size))
        if good([size])[0]:
            break
        if min(size) == WORKERS_MAX:
            raise WorldError(f"slo: not kept by {WORKERS_MAX} workers of each role")
    prefill = _least(lambda counts: good([FleetSize(count, size.decode) for count in counts]), 1, size.prefill, at_once)
    decode = _least(lambda counts: good([FleetSize(prefill, count) for count in counts]), 1, size.decode, at_once)
    smallest = FleetSize(prefill, decode)
    return smallest, reports[smallest]


def _least(good: Callable[[Sequence[int]], list[bool]], low: int, high: int, at_once: int) -> int:
    """The least count from `low` on that is good; `high` is."""
    while low < high:
        step = (high - low) / (at_once + 1)
        counts = sorted({min(high - 1, low + int(step * (index + 1))) for index in range(at_once)})
        for count, fine in zip(counts, good(counts), strict=True):
            if fine:
                high = count
                break
            low = count + 1
    return high


def enlarged(evaluate: Evaluate, size: FleetSize, *, share: float) -> tuple[FleetSize, dict[str, Any]]:
    """This size, or one a little larger, that keeps the SLO."""
    for _ in range(TRIES_MAX):
        (report,) = evaluate([size])
        if report["good_share"] >= share or min(size) >= WORKERS_MAX:
            return size, report
        size = FleetSize(*(min(WORKERS_MAX, max(count + 1, ceil(count * NUDGE))) for count in size))
    raise WorldError(f"slo: not kept by {size.prefill} prefill and {size.decode} decode workers")


def resources(report: dict[str, Any], shape: FleetShape, limits: Limits) -> dict[str, Any]:
    """What one worker of each role needs, from the report of a run."""
    fleet = report["fleet"]
    sessions = fleet["sessions_of_a_decode_max"]
    engines = min(ENGINES_MAX, sessions * ENGINES_A_SESSION)
    spare = 60_000 // limits.resend_ms_max * ENGINES_A_SESSION
    arena, pool = report["arena_high_water_tokens"], fleet["prefill_slots_high_water"]
    return {
        "decode_slots": -(-arena // shape.page_size) * shape.page_size,
        "decode_arena_gib": round(arena * shape.bytes_per_token / (1 << 30), 3),
        "prefill_slots": -(-pool // shape.page_size) * shape.page_size,
        "prefill_pool_gib": round(pool * shape.bytes_per_token / (1 << 30), 3),
        "batch": fleet["batch_high_water"],
        "rooms_max": fleet["rooms_high_water"],
        "prefill_link_gb_s": fleet["prefill_link_gb_s_max"],
        "decode_link_gb_s": fleet["decode_link_gb_s_max"],
        "sessions_of_a_decode": sessions,
        "mooncake_ports_of_a_decode": 2 * (engines + spare),
        "mooncake_sessions_fit": sessions <= ENGINES_MAX,
    }


def sized(shape: FleetShape, size: FleetSize) -> FleetShape:
    """The same workers, this many of them."""
    return replace(shape, prefill=size.prefill, decode=size.decode)
